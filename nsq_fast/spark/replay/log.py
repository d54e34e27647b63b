"""The logs of a topic's partitions, as the leading nsqds report them over HTTP.

Offsets are in bytes, and only nsqd knows where records begin: it finds the
record at or behind an offset, and the record of a number (they are counted from
1). Leaders move; a request to the wrong nsqd fails, and has to be repeated after
``forget_leaders``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nsq_fast.errors import HttpError, LookupFailed, RemoteProtocolError
from nsq_fast.runtime import Endpoint, NsqdHTTPClient
from nsq_fast.spark.discovery import Nsqd, discover, nsqd_client, retried
from nsq_fast.spark.options import SourceOptions

LEADERS_AGE = 30.0
"""Leaders are looked up anew after so many seconds, even if they answer: there may be new partitions."""

_LOOKUP_PAUSE = 0.5
_NOT_FOUND = (400, 404, 500)  # what nsqd answers to an offset behind the end of its log


class Channel(NamedTuple):
    """A channel: how many messages the log had when it last looked, how many of them are not done, its consumers."""

    messages: int
    depth: int
    clients: int

    @property
    def done(self) -> int:
        """How many messages lie before its position."""
        return self.messages - self.depth


class Log(NamedTuple):
    """The log of one partition.

    Attributes:
        start: offset of the first record that can still be had; up to ``LEADERS_AGE`` old.
        end: offset of the record that comes next. A record that is not yet on all replicas is counted, too.
        messages: how many records there have ever been.
        nsqd: the leader.
        is_ordered, is_ext: of the topic.
        has_fixed_channels: whether channels must be registered before they can be subscribed to.
    """

    start: int
    end: int
    messages: int
    nsqd: Nsqd
    is_ordered: bool
    is_ext: bool
    has_fixed_channels: bool
    channels: Mapping[str, Channel]


class Record(NamedTuple):
    """A record: its offset, its number (from 1), and when it was published, in nanoseconds."""

    offset: int
    number: int
    timestamp: int


class TopicLogs:
    """The partitions of the topic of these options. Raises HttpError, LookupFailed, RemoteProtocolError."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._clients: dict[Endpoint, NsqdHTTPClient] = {}
        self._nsqds: tuple[Nsqd, ...] = ()
        self._partition_count = 0
        self._looked_up_at = float("-inf")
        self._firsts: dict[int, tuple[float, int]] = {}  # when it was asked for, and what it was

    def logs(self) -> dict[int, Log]:
        """The partitions whose leaders answer, now."""
        self._look_up()
        found: dict[int, Log] = {}
        failure: Exception | None = None
        for nsqd in self._nsqds:
            try:
                found.update(self._led_by(nsqd))
            except (HttpError, RemoteProtocolError) as error:  # noqa: PERF203  # the others are asked all the same
                failure = error
        is_whole = failure is None and len(found) >= self._partition_count
        if not is_whole and time.monotonic() - self._looked_up_at > _LOOKUP_PAUSE:
            self.forget_leaders()
        if failure is not None and not found:
            raise failure
        return dict(sorted(found.items()))

    def all_logs(self, timeout: float, wanted: Iterable[int] = ()) -> dict[int, Log]:
        """All partitions, those ``wanted`` among them. Raises LookupFailed when they cannot be had in time."""
        return retried(lambda left: self._complete(set(wanted)), timeout)

    def log(self, partition: int) -> Log:
        """One partition, as it is now. Raises LookupFailed when no nsqd says that it leads it."""
        self._firsts.clear()
        found = self.logs().get(partition)
        if found is None:
            raise LookupFailed(f"partition {partition} of topic {self._options.topic!r} has no leader at the moment")
        return found

    def forget_leaders(self) -> None:
        """Look up who leads before the next question."""
        self._firsts.clear()
        self._looked_up_at = float("-inf")

    # Records

    def record_at(self, log: Log, partition: int, offset: int) -> Record | None:
        """The first record that begins at or behind an offset; None when there is none (yet)."""
        return self._find(log, partition, "virtual_offset", offset)

    def record_number(self, log: Log, partition: int, number: int) -> Record | None:
        """The record of a number, or the first behind it that is still there; None when there is none (yet)."""
        return self._find(log, partition, "count", number)

    def _find(self, log: Log, partition: int, mode: str, value: int) -> Record | None:
        client = self._client(log.nsqd)
        query = {"topic": self._options.topic, "partition": partition, "search_mode": mode, "search_pos": value}
        try:
            found = client.call_json("GET", "/message/get", **query)
            return Record(int(found["offset"]), int(found["queue_cnt_index"]), int(found["timestamp"]))
        except HttpError as error:
            if error.status in _NOT_FOUND:
                return None
            raise
        except (KeyError, TypeError, ValueError):
            raise RemoteProtocolError(f"{client.address}: the reply to /message/get is no message") from None

    # Channels

    def create_channel(self, log: Log, partition: int) -> None:
        """Create the channel of the options where there is none; it begins at the end of the log."""
        if not log.has_fixed_channels and self._options.channel not in log.channels:
            client = self._client(log.nsqd)
            client.create_channel(self._options.topic, self._options.channel, partition=partition)

    def set_position(self, nsqd: Nsqd, partition: int, channel: str, offset: int) -> None:
        """Let a channel go on with the first record at or behind an offset. Clients may be attached."""
        query = {"topic": self._options.topic, "partition": partition, "channel": channel}
        self._client(nsqd).call("POST", "/channel/setoffset", b"virtual_queue:%d" % offset, **query)

    # Nsqds

    def close(self) -> None:
        """Close idle connections."""
        for client in self._clients.values():
            client.close()

    def _complete(self, wanted: set[int]) -> dict[int, Log]:
        found = self.logs()
        missing = (wanted | set(range(self._partition_count))) - found.keys()
        if missing or not found:
            names = f"partitions {sorted(missing)}" if missing else "the partitions"
            raise LookupFailed(f"topic {self._options.topic!r}: no nsqd says that it leads {names}")
        return found

    def _look_up(self) -> None:
        if time.monotonic() - self._looked_up_at < LEADERS_AGE:
            return
        servers = self._options.servers
        if servers.nsqd_tcp:
            self._nsqds = tuple(map(Nsqd, servers.nsqd_tcp, servers.nsqd_http))
        else:
            found = discover(self._options)
            self._nsqds = tuple(dict.fromkeys(found.leaders.values()))
            self._partition_count = found.meta.partition_num if found.meta is not None else 0
        self._looked_up_at = time.monotonic()

    def _led_by(self, nsqd: Nsqd) -> dict[int, Log]:
        client = self._client(nsqd)
        query = {"topic": self._options.topic, "leaderOnly": True, "needClients": False}
        reply = client.call_json("GET", "/stats", format="json", **query) or {}
        try:
            rows = [row for row in reply.get("topics") or () if row["topic_name"] == self._options.topic]
            logs = {int(row["topic_partition"]): _log(row, nsqd) for row in rows if row["is_leader"]}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RemoteProtocolError(f"{client.address}: the reply to /stats is none of a redesigned nsqd") from None
        return {partition: log._replace(start=self._first(partition, log)) for partition, log in logs.items()}

    def _first(self, partition: int, log: Log) -> int:
        """Where the first record begins that can be had.

        nsqd searches its log of publishes for an offset, and cleans that earlier than the data. What lies before the
        first publish that is left can neither be found nor delivered: youzan/nsq: consistence/nsqd_coordinator.go,
        doLogQClean, SearchLogByMsgOffset.
        """
        asked_at, first = self._firsts.get(partition, (float("-inf"), 0))
        if log.start < log.end and time.monotonic() - asked_at > LEADERS_AGE:
            record = self.record_at(log, partition, log.start)
            first = 0 if record is None else record.offset
            self._firsts[partition] = time.monotonic(), first
        return max(log.start, first)

    def _client(self, nsqd: Nsqd) -> NsqdHTTPClient:
        client = self._clients.get(nsqd.http)
        if client is None:
            client = self._clients[nsqd.http] = nsqd_client(self._options, nsqd)
        return client


def _log(row: Mapping[str, Any], nsqd: Nsqd) -> Log:
    return Log(
        start=int(row["backend_start"]),
        end=int(row["backend_depth"]),
        messages=int(row["message_count"]),
        nsqd=nsqd,
        is_ordered=bool(row.get("is_multi_ordered")),
        is_ext=bool(row.get("is_ext")),
        has_fixed_channels=bool(row.get("is_channel_auto_create_disabled")),
        channels={str(each["channel_name"]): _channel(each) for each in row.get("channels") or ()},
    )


def _channel(row: Mapping[str, Any]) -> Channel:
    return Channel(int(row["message_count"]), int(row["depth"]), int(row.get("client_num") or 0))
