"""Where a channel of a redesigned topic begins: at its end, at a moment, or at an offset. Set before a partition is
subscribed to.

Redesigned servers take a position in SUB_ADVANCED too, but then ignore the
partition; over HTTP they do not. The position holds for the whole channel: what
lies before it is lost for every consumer of it. So by default it is set only
where nobody has begun: where the channel does not exist, or stands at the very
first message and has no client.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime
from time import time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from nsq_fast.config import EACH_START, MAX_PARTITION
from nsq_fast.errors import ConfigError, HttpError, NotLeader, RemoteProtocolError
from nsq_fast.log_events import START_POSITION_BEYOND, START_POSITION_KEPT, START_POSITION_SET
from nsq_fast.protocol.dialect import UNREADABLE
from nsq_fast.protocol.topology import ACCEPT, Nsqd, Target, unwrap

if TYPE_CHECKING:
    from .consumer import AnyConsumer
    from .http import HttpClient

END = "special:-1"
MAX_NUMBER = 2**63 - 1

_WIRE_KINDS = {
    "timestamp": "timestamp",
    "offset": "virtual_queue",
    "virtual_queue": "virtual_queue",
    "count": "msgcount",
    "msgcount": "msgcount",
}
_NO_CLUSTER = "Not supported while coordinator disabled"
LATEST = 10**11
"""Unix seconds that no clock shows: the year 5138. What is above is of another unit."""

_ALLOWED = "must be 'end', a datetime, 'timestamp:<unix seconds>', 'offset:<bytes>' or 'count:<messages>'"


CLOCKS = 60.0
"""Seconds by which clocks may differ: no message has a later moment than now and that."""


class StartPositions(NamedTuple):
    """The position of each partition, in the words of the server. ``others`` is for partitions not named."""

    others: str | None = None
    by_partition: Mapping[int, str] = {}

    def of(self, partition: int | None) -> str | None:
        """The position for ``partition``; None leaves its channel where it is."""
        return self.others if partition is None else self.by_partition.get(partition, self.others)


def parse_start(value: Any, name: str = "start_position") -> StartPositions | None:
    """Read the option ``name``: one position for all partitions, or a mapping by partition number.

    Offsets and counts differ from partition to partition, moments and the end do not. Raises ConfigError.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return StartPositions(_position(value, name))
    if not value or any(type(number) is not int or not 0 <= number <= MAX_PARTITION for number in value):
        raise ConfigError(f"{name}={value!r}: must map partition numbers, 0 to {MAX_PARTITION}, to positions")
    return StartPositions(None, {number: _position(each, name) for number, each in value.items()})


def _position(value: Any, name: str) -> str:
    if isinstance(value, datetime):
        return f"timestamp:{max(0, int(value.timestamp()))}"
    if value in ("end", END):
        return END
    kind, _, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind not in _WIRE_KINDS or not (number.isascii() and number.isdigit()) or int(number) > MAX_NUMBER:
        raise ConfigError(f"{name}={value!r}: {_ALLOWED}")
    if kind == "timestamp" and int(number) > LATEST:  # servers take what lies ahead for the end, and skip all there is
        raise ConfigError(f"{name}={value!r}: a timestamp is in seconds, and this one is in the far future")
    return f"{_WIRE_KINDS[kind]}:{int(number)}"


def _as_given(position: str) -> str:
    """A position in the words of ``start_position``."""
    kind, _, number = position.partition(":")
    name = next((name for name, wire in _WIRE_KINDS.items() if wire == kind), kind)
    return "end" if position == END else f"{name}:{number}"


def tell_beyond(log: logging.Logger, place: object, channel: str, position: str, row: Mapping[str, Any]) -> None:
    """Warn of a position beyond the end of the log of a partition.

    Servers take it, and set the channel to the end without a word: what is published from then on is delivered,
    wherever it lies (youzan/nsq: nsqdserver/context.go, SetChannelOffset).

    Args:
        row: of the partition, from the stats of its leader.
    """
    name, _, number = _as_given(position).partition(":")
    ends = {"offset": row.get("backend_depth"), "count": row.get("message_count"), "timestamp": int(time() + CLOCKS)}
    end = ends.get(name)
    if not isinstance(end, int):
        return  # the server does not say it
    asked, end = int(number), end + (name == "count")  # messages are counted from 1
    if asked > end:
        log.warning(
            "%s: channel %s was to begin at %s:%d, beyond the end of the log, %s:%d, and begins there",
            place, channel, name, asked, name, end, extra=START_POSITION_BEYOND,
        )  # fmt: skip


def is_for_want_of_messages(error: HttpError, row: Mapping[str, Any]) -> bool:
    """Whether a position was refused because nothing was ever published to the partition: all positions are one there.

    Servers search the log for all but the end, and find nothing (youzan/nsq: consistence/commitlog.go).

    Args:
        row: of the partition, from the stats of its leader.
    """
    return "commit log end of file" in error.text and not row.get("message_count")


class Starter:
    """Sets positions by ``/channel/setoffset`` on the leader of a partition."""

    def __init__(self, consumer: AnyConsumer, topic: str, positions: StartPositions) -> None:
        self._consumer = consumer
        self._topic = topic
        self._channel = consumer.channel
        self._positions = positions
        self._is_for_each_start = consumer.config.start_position_policy == EACH_START
        self._log = consumer.logger
        self._done: set[int | None] = set()
        self._created: set[int | None] = set()
        self._gone: set[int | None] = set()

    def topic_is_gone(self) -> None:
        """Nobody knows the topic: if it is made anew, so are its channels, and the new ones begin where these did.

        Only where they do not exist: lookup may be wrong, and a channel that has begun must not be set back.
        """
        self._gone |= self._done
        self._done.clear()
        self._created.clear()

    async def place(self, target: Target, nsqd: Nsqd | None) -> None:
        """Set the position for ``target``, once at most and only where the policy allows it.

        Raises NotLeader and HttpError when it may work later, ConfigError when the server does not take the position
        at all.
        """
        position = self._positions.of(target.partition)
        if position is None or target.partition in self._done:
            return
        if nsqd is None or nsqd.http is None or not nsqd.is_redesigned:
            given = _as_given(position)
            raise ConfigError(f"start_position={given!r}: {target} is no redesigned nsqd found by lookup")
        from .http import Endpoint, HttpClient  # it may be the first question over HTTP

        timeout = self._consumer.lookup_config.lookupd_timeout
        with closing(HttpClient(Endpoint("http", nsqd.http), timeout=timeout, headers={"Accept": ACCEPT})) as client:
            try:
                await self._place(client, target, position)
            except HttpError as error:
                raise _cause(error, target, position) from error
        self._done.add(target.partition)

    async def _place(self, client: HttpClient, target: Target, position: str) -> None:
        loop = self._consumer.loop
        query = {"topic": self._topic, "channel": self._channel}
        if target.partition is not None:
            query["partition"] = str(target.partition)
        row, channel = await self._find(client, query)
        # A channel that we created stands at the end, where its creation put it, until the position is set.
        is_ours = self._is_for_each_start or target.partition in self._created
        if channel is not None and (target.partition in self._gone or (not is_ours and _has_begun(channel))):
            self._log.info(
                "%s: channel %s has begun there already, start_position=%r changes nothing",
                target, self._channel, _as_given(position), extra=START_POSITION_KEPT,
            )  # fmt: skip
            return
        if channel is None:
            # Refused where channels have to be registered, even if they are: youzan/nsq: nsqdserver/http.go,
            # doCreateChannel. So it is not asked for without need.
            await client.ask(loop, "POST", "/channel/create", query)
            self._created.add(target.partition)
        # A new channel begins at the end: youzan/nsq: nsqd/diskqueue_reader.go, newDiskQueueReader. To set that again
        # skips what has come since.
        if position != END or target.partition not in self._created:
            try:
                await client.ask(loop, "POST", "/channel/setoffset", query, position.encode())
            except HttpError as error:
                if not is_for_want_of_messages(error, row):
                    raise
            tell_beyond(self._log, f"{self._topic}-{target.partition}", self._channel, position, row)
        given = _as_given(position)
        self._log.info("%s: channel %s begins at %s", target, self._channel, given, extra=START_POSITION_SET)

    async def _find(self, client: HttpClient, query: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The stats of the partition, and of the channel; None when it does not exist."""
        reply = await client.ask(self._consumer.loop, "GET", "/stats", {"format": "json", **query})
        try:
            stats = msgspec.json.decode(unwrap(reply.body))
            # All channels of a partition are given when it does not have this one: youzan/nsq: nsqdserver/http.go,
            # doStats.
            rows = stats["topics"] or [{"channels": ()}]
            return next(
                (
                    (topic, channel)
                    for topic in rows
                    for channel in topic["channels"] or ()
                    if channel["channel_name"] == self._channel
                ),
                (rows[0], None),
            )
        except (KeyError, TypeError, *UNREADABLE) as error:
            raise RemoteProtocolError(f"{client.endpoint}: not the stats of a redesigned nsqd: {error!r}") from error


def _has_begun(channel: dict[str, Any]) -> bool:
    """Whether anybody consumes, or has confirmed a message.

    ``message_count`` is where the log ends, ``depth`` what is not confirmed of it: youzan/nsq: nsqd/stats.go,
    NewChannelStats.
    """
    try:
        return bool(channel["client_num"] or channel["in_flight_count"] or channel["depth"] < channel["message_count"])
    except (KeyError, TypeError) as error:
        raise RemoteProtocolError(f"not the stats of a channel of a redesigned nsqd: {error!r}") from error


def _cause(error: HttpError, target: Target, position: str) -> Exception:
    if error.text.startswith(NotLeader.code):
        return NotLeader(f"{target}: start_position could not be set")
    # Each will be refused again: the position; a channel that has to be registered first; what only a cluster can do
    # (youzan/nsq: nsqdserver/context.go, SetChannelOffset).
    if error.status in (400, 403) or error.text == _NO_CLUSTER:
        return ConfigError(f"start_position={_as_given(position)!r}: refused by {target}: {error.text}")
    return error
