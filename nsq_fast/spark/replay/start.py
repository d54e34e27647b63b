"""Turn the positions in the options into offsets of the partitions, as their logs are now."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nsq_fast.errors import ConfigError, LookupFailed
from nsq_fast.spark.options import ERROR, SourceOptions
from nsq_fast.spark.positions import (
    EARLIEST,
    EARLIEST_NUMBER,
    LATEST,
    LATEST_NUMBER,
    ByPartition,
    ByTopic,
    of_topic,
)

from .log import Log, Record, TopicLogs
from .position import Offsets

_MILLISECOND = 1_000_000


class Resolver:
    """Turns the starting and ending options into offsets. Raises ConfigError, LookupFailed, HttpError."""

    def __init__(self, options: SourceOptions, topic_logs: TopicLogs) -> None:
        self._options = options
        self._topic_logs = topic_logs

    def starting(self, logs: Mapping[int, Log], default: str | None) -> Offsets:
        """Where to begin; without an option for it at ``default``, or where the channel stands."""
        options = self._options
        if options.starting_timestamp is not None:
            return self._at_time("startingTimestamp", logs, dict.fromkeys(logs, options.starting_timestamp))
        if options.starting_times is not None:
            name = "startingOffsetsByTimestamp"
            return self._at_time(name, logs, of_topic(name, options.starting_times, options.topic))
        wanted = options.starting_offsets or default
        if wanted is None:
            return {partition: self._where_channel_stands(partition, log) for partition, log in logs.items()}
        return self._positions("startingOffsets", logs, wanted)

    def ending(self, logs: Mapping[int, Log]) -> Offsets:
        """Where a batch ends: without an option at what is there now."""
        options = self._options
        if options.ending_timestamp is not None:
            return self._at_time("endingTimestamp", logs, dict.fromkeys(logs, options.ending_timestamp))
        if options.ending_times is not None:
            name = "endingOffsetsByTimestamp"
            return self._at_time(name, logs, of_topic(name, options.ending_times, options.topic))
        return self._positions("endingOffsets", logs, options.ending_offsets or LATEST)

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
