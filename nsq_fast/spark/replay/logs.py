"""The logs of a topic: what its nsqds say of them, where positions of the options lie, the channel that follows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gevent import sleep

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

from .position import Offsets

logger: logging.Logger = logging.getLogger(__name__)


# The logs of a topic's partitions, as the leading nsqds report them over HTTP.
#
# Offsets are in bytes, and only nsqd knows where records begin: it finds the
# record at or behind an offset, and the record of a number (they are counted from
# 1). Leaders move; a request to the wrong nsqd fails, and has to be repeated after
# ``forget_leaders``.


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
