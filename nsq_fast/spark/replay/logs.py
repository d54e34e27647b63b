"""Positions in topics, and the logs that they lie in: what nsqds say of these, and where the options' positions are."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gevent import sleep

from nsq_fast._lazy import get_logger
from nsq_fast.client.admin import NsqdHTTPClient
from nsq_fast.client.http import Endpoint
from nsq_fast.errors import ConfigError, DataLost, HttpError, LookupFailed, RemoteProtocolError
from nsq_fast.log_events import SPARK_WAITS
from nsq_fast.spark.discovery import Nsqd, discover, nsqd_client, retried
from nsq_fast.spark.options import (
    EARLIEST,
    EARLIEST_NUMBER,
    ERROR,
    LATEST,
    LATEST_NUMBER,
    ByPartition,
    ByTopic,
    SourceOptions,
    of_topic,
)

logger: logging.Logger = get_logger(__name__)


# Positions in topics, as Spark keeps them in its checkpoint.
#
# A position maps the partitions of each topic to offsets, each that of the next
# record in the partition's log:
#
#     {"channel": "spark", "servers": ["10.0.0.1:4161"], "offsets": {"orders": {"0": 1234, "1": 560}}}
#
# The servers, the channel and the topics are there so that a checkpoint is not
# taken for that of another query. Older versions of nsq_fast kept ``{"0": 1234}``
# alone, of the one topic that they read; that is read, too.
#
# Spark asks for the initial position again when it repeats the first batch, and
# *latest* would then be another position. So the end of the first batch also says
# where that batch began (``begin``).


_CHANNEL, _SERVERS, _OFFSETS, _INITIAL, _BEGIN = "channel", "servers", "offsets", "initial", "begin"

Offsets = Mapping[int, int]
"""Partition -> offset."""

TopicOffsets = Mapping[str, Offsets]
"""Topic -> partition -> offset."""


class Identity(NamedTuple):
    """What a query reads from: the servers that it asks (``host:port``), and its channel."""

    servers: tuple[str, ...] = ()
    channel: str = ""


class Position(NamedTuple):
    """A position.

    Attributes:
        offsets: topic -> partition -> offset.
        is_initial: whether a query begins there.
        begin: in the end of the first batch, where that batch begins.
        identity: of the query that made it; None in those of older versions.
    """

    offsets: TopicOffsets
    is_initial: bool = False
    begin: TopicOffsets | None = None
    identity: Identity | None = None

    def to_json(self) -> dict[str, Any]:
        """The object that Spark keeps. Equal positions give equal text."""
        found: dict[str, Any] = {}
        if self.identity is not None:
            found[_CHANNEL] = self.identity.channel
            found[_SERVERS] = sorted(self.identity.servers)
        found[_OFFSETS] = by_topic(self.offsets)
        if self.is_initial:
            found[_INITIAL] = True
        if self.begin is not None:
            found[_BEGIN] = by_topic(self.begin)
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any], options: SourceOptions) -> Position:
        """Read what ``to_json`` wrote, of this version or an older one, which knew the topic of the options alone.

        Raises ConfigError for what another source wrote, or the other reader.
        """
        try:
            if _OFFSETS in found:
                return _decoded(found)
            position = _decoded_without_topics(found, options.topic)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(
                f"checkpointLocation: its offset {json.dumps(found)[:200]} is none of the replayable reader; did"
                " another source write it, or the journalled reader?"
            ) from None
        if options.reads_several:
            raise ConfigError(
                "checkpointLocation: an older version made it, which read one topic and did not write down which. Run"
                " the query once with that topic alone, then with several"
            )
        return position

    def until(self, offsets: TopicOffsets) -> Position:
        """The end of a batch that begins here; this position itself when the batch would be empty."""
        if by_topic(offsets) == by_topic(self.offsets):
            return self
        return self._replace(offsets=offsets, is_initial=False, begin=self.offsets if self.is_initial else None)

    def check(self, wanted: Identity, options: SourceOptions) -> None:
        """Raise ConfigError when another query made it: of other topics, another channel, or none of these servers."""
        others = sorted(topic for topic in self.offsets if not options.names_topic(topic))
        if others:
            raise ConfigError(
                f"checkpointLocation: it was made with the topic {', '.join(map(repr, others))}, which the options do"
                f" not name: they say {options.topic!r}. Name it, or use a new checkpoint"
            )
        if self.identity is None:
            return
        channel, servers = self.identity.channel, self.identity.servers
        if channel != wanted.channel:
            raise ConfigError(
                f"checkpointLocation: it was made with channel={channel!r}, and the option is"
                f" channel={wanted.channel!r}; use that channel, or a new checkpoint"
            )
        if not set(servers) & set(wanted.servers):
            raise ConfigError(
                f"checkpointLocation: it was made with the servers {', '.join(servers)}, and the options name"
                f" {', '.join(wanted.servers)}: offsets of one cluster mean nothing in another. Use a new checkpoint;"
                " if it is the same cluster at new addresses, name an old one beside the new ones once"
            )


def _decoded(found: Mapping[str, Any]) -> Position:
    begin = found.get(_BEGIN)
    return Position(
        _read_topics(found[_OFFSETS]),
        bool(found.get(_INITIAL)),
        None if begin is None else _read_topics(begin),
        Identity(tuple(map(str, found[_SERVERS])), str(found[_CHANNEL])) if _CHANNEL in found else None,
    )


def _decoded_without_topics(found: Mapping[str, Any], topic: str) -> Position:
    begin = found.get(_BEGIN)
    return Position(
        {topic: _read_offsets({key: value for key, value in found.items() if key not in (_INITIAL, _BEGIN)})},
        bool(found.get(_INITIAL)),
        None if begin is None else {topic: _read_offsets(begin)},
    )


def _read_topics(found: Mapping[str, Any]) -> TopicOffsets:
    return {str(topic): _read_offsets(offsets) for topic, offsets in found.items()}


def _read_offsets(found: Mapping[str, Any]) -> Offsets:
    return {int(partition): int(offset) for partition, offset in found.items()}


def start_of(start: Position, end: Position) -> TopicOffsets:
    """Where the batch from ``start`` to ``end`` begins. An initial position may have been found anew meanwhile."""
    if not start.is_initial:
        return start.offsets
    if end.is_initial:
        return end.offsets
    return start.offsets if end.begin is None else end.begin


def distance(start: TopicOffsets, end: TopicOffsets) -> int:
    return sum(
        offset - start.get(topic, {}).get(partition, 0)
        for topic, offsets in end.items()
        for partition, offset in offsets.items()
    )


def by_topic(offsets: TopicOffsets) -> dict[str, dict[str, int]]:
    """With topics and partitions as keys of JSON, in their order."""
    return {topic: {str(each): own[each] for each in sorted(own)} for topic, own in sorted(offsets.items())}


# The logs of a topic's partitions, as the leading nsqds report them over HTTP.
#
# Offsets are in bytes, and only nsqd knows where records begin: it finds the
# record at or behind an offset, and the record of a number (they are counted from
# 1). Leaders move; a request to the wrong nsqd fails, and has to be repeated after
# ``forget_leaders``.


START_TIMEOUT = 60.0
"""How long a query that begins waits for the servers, in seconds."""

LEADERS_AGE = 30.0
"""Leaders are looked up anew after so many seconds, even if they answer: there may be new partitions."""

LATE_PATIENCE = 10.0
"""How long a log that ends before what was read of it may be the answer of a replica that is behind, in seconds."""

_LOOKUP_PAUSE = 0.5
_MAX_KNOWN = 4096
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
        self._counts: dict[tuple[int, int], int] = {}  # (partition, offset) -> how many records lie before it

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

    def all_logs(self, timeout: float) -> dict[int, Log]:
        """All partitions. Raises LookupFailed when they cannot be had in time."""
        return retried(lambda left: self._complete(), timeout)

    def log(self, partition: int) -> Log:
        """One partition, as it is now. Raises LookupFailed when no nsqd says that it leads it."""
        self._firsts.clear()
        found = self.logs().get(partition)
        if found is None:
            raise LookupFailed(f"partition {partition} of topic {self._options.topic!r} has no leader at the moment")
        return found

    def caught_up(self, logs: dict[int, Log], read: Offsets) -> dict[int, Log]:
        """These logs, asked for again for ``LATE_PATIENCE`` seconds while one ends before what was read of it.

        Raises LookupFailed while a partition has no leader: what the others say may change, too.
        """
        deadline = time.monotonic() + LATE_PATIENCE
        while ends_before(logs, read) and time.monotonic() < deadline:
            sleep(_LOOKUP_PAUSE)
            self.forget_leaders()
            logs = self._complete()
        return logs

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

    def rows(self, log: Log, partition: int, begin: int, end: int) -> int:
        """How many records begin there; a few too many while they are being published."""
        if begin >= end:
            return 0
        return max(0, self._count_before(log, partition, end) - self._count_before(log, partition, begin))

    def behind_rows(self, log: Log, partition: int, begin: int, rows: int) -> int:
        """The offset so many records behind ``begin``; that itself while nsqd cannot tell."""
        if not rows:
            return begin
        number = self._count_before(log, partition, begin) + rows + 1
        record = self.record_number(log, partition, number)
        if record is None or record.number != number:
            logger.info("%s-%d: record %d is not there yet", log.nsqd, partition, number, extra=SPARK_WAITS)
            return begin
        self._remember(partition, record.offset, record.number - 1)
        return record.offset

    def forget_counts(self) -> None:
        """Count records anew: a log is another one than it was."""
        self._counts.clear()

    def _count_before(self, log: Log, partition: int, offset: int) -> int:
        if offset >= log.end:
            return log.messages
        known = self._counts.get((partition, offset))
        if known is None:
            record = self.record_at(log, partition, offset)
            if record is None:
                return log.messages
            known = record.number - 1
            self._remember(partition, offset, known)
        return known

    def _remember(self, partition: int, offset: int, count: int) -> None:
        if len(self._counts) > _MAX_KNOWN:  # only those of the last batch are asked for again
            self._counts.clear()
        self._counts[partition, offset] = count

    def cuts(self, log: Log, partition: int, begin: int, end: int) -> list[int]:
        """Offsets that cut a stretch into parts of ``maxRecordsPerPartition`` records; none where nsqd cannot tell."""
        most = self._options.max_records_per_partition
        found: list[int] = []
        record = None if most is None else self.record_at(log, partition, begin)
        while record is not None and most is not None:
            record = self.record_number(log, partition, record.number + most)
            if record is None or record.offset >= end:
                break
            found.append(record.offset)
        return found

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
        for client in self._clients.values():
            client.close()

    def _complete(self) -> dict[int, Log]:
        found = self.logs()
        missing = set(range(self._partition_count)) - found.keys()
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


def check_parts(options: SourceOptions, logs: Mapping[int, Log]) -> None:
    """Raise ConfigError for an option that cuts the partitions of an ordered topic."""
    for name in ("minPartitions", "maxRecordsPerPartition"):
        if name in options.given and any(log.is_ordered for log in logs.values()):
            raise ConfigError(
                f"{name}: topic {options.topic!r} is ordered, and parts of a partition that are read side by side are"
                " not in order"
            )


def ends_before(logs: Mapping[int, Log], read: Offsets) -> list[int]:
    """The partitions whose logs end before what was read of them."""
    return [partition for partition, log in logs.items() if read.get(partition, 0) > log.end]


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


# Offsets that are gone before a query has read them: an error, or a warning where ``failOnDataLoss`` is false.


def checked_loss(
    options: SourceOptions, partition: int, offsets: tuple[int, int], reason: str, goes_on: str = "behind them"
) -> DataLost:
    """The loss, for a warning, where the query may go on behind it; raises it where ``failOnDataLoss`` is true.

    Args:
        offsets: the first that is lost, and the first behind them.
        reason: what the log is like now.
        goes_on: where the query goes on.
    """
    if options.fail_on_data_loss:
        raise DataLost(options.topic, partition, offsets, reason, f"failOnDataLoss=false goes on {goes_on}")
    return DataLost(options.topic, partition, offsets, f"{reason}; the query goes on {goes_on}")


def lost_end(options: SourceOptions, partition: int, read: int, log: Log) -> DataLost:
    """As ``checked_loss``, of a log that ends before what was read of it."""
    reason = (
        f"the query has read up to {read}, and the log ends at {log.end}: the topic was deleted and made anew, or has"
        " lost its end"
    )
    return checked_loss(options, partition, (log.end, read), reason, f"at the beginning of the log, {log.start}")


# Turn the positions in the options into offsets of the partitions, as their logs are now.


_MILLISECOND = 1_000_000


class Resolver:
    """Turns the starting and ending options into offsets. Raises ConfigError, LookupFailed, HttpError."""

    def __init__(self, options: SourceOptions, topic_logs: TopicLogs) -> None:
        self._options = options
        self._topic_logs = topic_logs

    def starting(self, logs: Mapping[int, Log], default: str | None) -> Offsets:
        """Where to begin; without an option for it at ``default``, or where the channel stands."""
        options = self._options
        wanted = options.starting_offsets or default
        return self._resolved("starting", logs, options.starting_timestamp, options.starting_times, wanted)

    def ending(self, logs: Mapping[int, Log]) -> Offsets:
        """Where a batch ends: without an option at what is there now."""
        options = self._options
        wanted = options.ending_offsets or LATEST
        return self._resolved("ending", logs, options.ending_timestamp, options.ending_times, wanted)

    def first_at(self, partition: int, log: Log, timestamp: int) -> Record | None:
        """The first record of that time, in nanoseconds, or later; None when there is none, or nsqd cannot tell."""
        first = self._topic_logs.record_at(log, partition, log.start) if log.end > log.start else None
        if first is None:
            return None
        return first_at(lambda number: self._topic_logs.record_number(log, partition, number), first, log, timestamp)

    def surely_before(self, partition: int, log: Log, timestamp: int) -> int:
        """An offset before which all records are older than that; the end of the log only when its last one is."""
        found = self.first_at(partition, log, timestamp)
        if found is not None:
            return found.offset
        return log.end if self._are_all_older(partition, log, timestamp) else log.start

    def _are_all_older(self, partition: int, log: Log, timestamp: int) -> bool:
        """Whether the last record is older than that; False while nsqd cannot tell."""
        if log.end <= log.start:
            return True
        last = self._topic_logs.record_number(log, partition, log.messages)
        return last is not None and last.timestamp < timestamp

    def _resolved(
        self,
        which: str,
        logs: Mapping[int, Log],
        timestamp: int | None,
        times: ByPartition | ByTopic | None,
        offsets: str | ByPartition | ByTopic | None,
    ) -> Offsets:
        """Of the options whose names begin with ``which``, that which is given; where the channel stands without."""
        if timestamp is not None:
            return self._at_time(f"{which}Timestamp", logs, dict.fromkeys(logs, timestamp))
        if times is not None:
            option = f"{which}OffsetsByTimestamp"
            return self._at_time(option, logs, of_topic(option, times, self._options.topic))
        if offsets is not None:
            return self._positions(f"{which}Offsets", logs, offsets)
        return {partition: self._where_channel_stands(partition, log) for partition, log in logs.items()}

    def _positions(self, option: str, logs: Mapping[int, Log], given: str | ByPartition | ByTopic) -> Offsets:
        if isinstance(given, str):
            return {partition: log.start if given == EARLIEST else log.end for partition, log in logs.items()}
        wanted = of_topic(option, given, self._options.topic)
        self._check_named(option, logs, wanted)
        found = {partition: _named(wanted[partition], log) for partition, log in logs.items()}
        for partition, log in logs.items():
            if found[partition] > log.end:
                raise ConfigError(f"{option}: partition {partition} ends at {log.end}, not at {found[partition]}")
        return found

    def _check_named(self, option: str, logs: Mapping[int, Log], wanted: ByPartition) -> None:
        if wanted.keys() != logs.keys():
            raise ConfigError(
                f"{option}: names partitions {sorted(wanted)}, and topic {self._options.topic!r} has {sorted(logs)};"
                " all of them must be named"
            )

    def _where_channel_stands(self, partition: int, log: Log) -> int:
        """A channel that is not there would begin at the end. In numbers: a channel may lag behind with offsets."""
        channel = log.channels.get(self._options.channel)
        if channel is None or channel.done >= log.messages:
            return log.end
        return self._offset_of(partition, log, channel.done + 1)

    def _offset_of(self, partition: int, log: Log, number: int) -> int:
        record = self._topic_logs.record_number(log, partition, number)
        if record is None:  # not stored for good yet, or the leader is another one by now
            raise LookupFailed(f"{log.nsqd}: cannot tell where record {number} of partition {partition} begins")
        return record.offset

    def _at_time(self, option: str, logs: Mapping[int, Log], milliseconds: ByPartition) -> Offsets:
        self._check_named(option, logs, milliseconds)
        return {
            partition: self._offset_at(option, partition, log, milliseconds[partition])
            for partition, log in logs.items()
        }

    def _offset_at(self, option: str, partition: int, log: Log, milliseconds: int) -> int:
        """Where the first record of that time or later begins; the end of the log when there is none."""
        timestamp = milliseconds * _MILLISECOND
        found = self.first_at(partition, log, timestamp)
        if found is None and not self._are_all_older(partition, log, timestamp):
            raise LookupFailed(f"{log.nsqd}: cannot tell which record of partition {partition} is of {milliseconds}")
        if found is None and option.startswith("starting") and self._options.starting_strategy == ERROR:
            raise ConfigError(
                f"{option}: nothing was published to partition {partition} of topic {self._options.topic!r} at or after"
                f" {milliseconds}; startingOffsetsByTimestampStrategy=latest begins at its end"
            )
        return log.end if found is None else found.offset


def _named(offset: int, log: Log) -> int:
    return {EARLIEST_NUMBER: log.start, LATEST_NUMBER: log.end}.get(offset, offset)


def first_at(find: Callable[[int], Record | None], first: Record, log: Log, timestamp: int) -> Record | None:
    """The first record published at or after a time, in nanoseconds; None when all are older.

    ``find`` gives a record by its number, ``first`` is the oldest. Records are taken to be in the order of their times.
    """
    if first.timestamp >= timestamp:
        return first
    older, other = first.number, log.messages + 1
    found: Record | None = None
    while other - older > 1:
        middle = (older + other) // 2
        record = find(middle)
        if record is not None and record.timestamp < timestamp:
            older = middle
        else:
            other, found = middle, record
    return found
