"""The batch reader: a slice of the logs, by offsets or by time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from nsq_fast._lazy import get_logger
from nsq_fast.errors import ConfigError
from nsq_fast.log_events import SPARK_DATA_LOST
from nsq_fast.spark.discovery import TopicFinder, check_redesigned, check_replayable, retried
from nsq_fast.spark.options import BEGINS, EARLIEST, ENDS, SourceOptions
from nsq_fast.spark.versions import DataSourceReader, InputPartition, hide_tracebacks, plain_errors, show_tracebacks

from .logs import START_TIMEOUT, Log, Offsets, Resolver, TopicLogs, check_parts, checked_loss
from .reading import ReadsPieces, Route, pieces

logger: logging.Logger = get_logger(__name__)


class ReplayBatchReader(ReadsPieces, DataSourceReader):
    """Reads one slice, and leaves the channel where it is. Pickled into tasks: only the options travel."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.bounds: Bounds = Bounds()

    @plain_errors
    def partitions(self) -> list[InputPartition]:
        """The pieces of the slice. Raises ConfigError, DataLost, LookupFailed."""
        show_tracebacks()
        missing = check_replayable(self.options, START_TIMEOUT)
        slices = {
            topic: self._slice(topic)
            for topic in TopicFinder(self.options).topics(START_TIMEOUT)
            if topic not in missing and (self.bounds.topics is None or topic in self.bounds.topics)
        }
        starts = {topic: each.starts for topic, each in slices.items()}
        ends = {topic: each.ends for topic, each in slices.items()}
        routes = {topic: each.routes for topic, each in slices.items()}
        least = self.options.min_partitions
        return [*pieces(starts, ends, routes, least, lambda topic, each, *_: slices[topic].cuts[each])]

    def _slice(self, topic: str) -> _Slice:
        options = self.options.for_topic(topic)
        check_redesigned(options)
        topic_logs = TopicLogs(options)
        try:
            # Leaders may move or die between two questions: all is asked again then.
            return retried(lambda left: self._slice_now(options, topic_logs, left), START_TIMEOUT)
        finally:
            topic_logs.close()

    def _slice_now(self, options: SourceOptions, topic_logs: TopicLogs, timeout: float) -> _Slice:
        logs = topic_logs.all_logs(timeout)
        check_parts(options, logs)
        resolver = Resolver(options, topic_logs)
        starts, ends = resolver.starting(logs, EARLIEST), resolver.ending(logs)
        _check_order(options, starts, ends)
        logs = {partition: log for partition, log in logs.items() if partition in self.bounds.partitions}
        starts, ends = _narrowed(resolver, self.bounds, logs, starts, ends)
        starts = {partition: _checked(options, partition, starts[partition], log) for partition, log in logs.items()}
        return _Slice(
            starts,
            ends,
            {partition: Route.of(log) for partition, log in logs.items()},
            {each: topic_logs.cuts(log, each, starts[each], ends[each]) for each, log in logs.items()},
        )


class FilteringBatchReader(ReplayBatchReader):
    """Reads only where rows can be that Spark filters for.

    Spark refuses it where filters are not to be pushed, in words that need no traceback; it has made it then, and calls
    nothing of it.
    """

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        hide_tracebacks()

    def pushFilters(self, filters: list[Any]) -> list[Any]:
        """Called before ``partitions``. All filters are Spark's still, which knows the rows at the edges."""
        show_tracebacks()
        self.bounds: Bounds = bounds_of(filters)
        return filters


class _Slice(NamedTuple):
    starts: Offsets
    ends: Offsets
    routes: Mapping[int, Route]
    cuts: Mapping[int, list[int]]


def _narrowed(
    resolver: Resolver, bounds: Bounds, logs: Mapping[int, Log], starts: Offsets, ends: Offsets
) -> tuple[Offsets, Offsets]:
    """The slice of these logs, without what lies outside the bounds."""
    (low, high), times = bounds.offsets, bounds.times
    begins = {partition: max(starts[partition], low or 0) for partition in logs}
    stops = {partition: ends[partition] if high is None else min(ends[partition], high + 1) for partition in logs}
    for partition, log in logs.items():
        if times.low is not None:
            begins[partition] = max(begins[partition], resolver.surely_before(partition, log, times.low))
        if times.high is not None:
            found = resolver.first_at(partition, log, times.high)
            stops[partition] = stops[partition] if found is None else min(stops[partition], found.offset)
    return begins, stops


def _check_order(options: SourceOptions, starts: Offsets, ends: Offsets) -> None:
    """Raise ConfigError when the options end a partition before they begin it: they are swapped, or of another topic.

    A beginning behind all that there is, as of a time to come, is none: there is nothing to read yet.
    """
    beginning, ending = options.given.intersection(BEGINS), options.given.intersection(ENDS)
    if not (beginning and ending):
        return
    for partition, start in starts.items():
        if start > ends[partition]:
            raise ConfigError(
                f"{min(beginning)}: partition {partition} of topic {options.topic!r} would begin at"
                f" {start}, behind its end at {ends[partition]} by {min(ending)}"
            )


def _checked(options: SourceOptions, partition: int, start: int, log: Log) -> int:
    """The start, or where the log begins when that is behind it and ``failOnDataLoss`` is false."""
    if start >= log.start:
        return start
    logger.warning(
        "%s",
        checked_loss(options, partition, (start, log.start), f"the log begins at {log.start}"),
        extra=SPARK_DATA_LOST,
    )
    return log.start


# Which part of the logs can hold the rows that a query filters for: Spark hands its filters on, and filters again.
#
# Filters on ``topic``, ``partition``, ``offset`` and ``timestamp`` make the slice
# smaller; all others are Spark's alone. A range of times is found in the log by search, as
# records are stored about in the order of their times. About, since each leader
# has a clock of its own: ``MARGIN`` is left on both sides.


MARGIN = 600 * 10**9
"""Nanoseconds by which the clocks of the nsqds may differ."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)


class Range(NamedTuple):
    """Whole numbers from ``low`` to ``high``, both among them; None: without an end on that side."""

    low: int | None = None
    high: int | None = None

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int)
        return (self.low is None or self.low <= value) and (self.high is None or value <= self.high)

    def within(self, other: Range) -> Range:
        lows = [low for low in (self.low, other.low) if low is not None]
        highs = [high for high in (self.high, other.high) if high is not None]
        return Range(max(lows, default=None), min(highs, default=None))


class Bounds(NamedTuple):
    """Where all rows lie that pass the filters.

    ``times`` are in nanoseconds, with the margin; ``topics``: None for all.
    """

    partitions: Range = Range()
    offsets: Range = Range()
    times: Range = Range()
    topics: frozenset[str] | None = None


def bounds_of(filters: Iterable[Any]) -> Bounds:
    """The bounds that filters of pyspark set, all of which have to hold. Unknown filters set none."""
    found = dict.fromkeys(_VALUE, Range())
    topics: frozenset[str] | None = None
    for each in filters:
        column = each.attribute[0] if len(getattr(each, "attribute", ())) == 1 else None
        if column in found:
            found[column] = found[column].within(_range(each, _VALUE[column]))
        elif column == "topic" and (named := _named(each)) is not None:
            topics = named if topics is None else topics & named
    return Bounds(found["partition"], found["offset"], _nanoseconds(found["timestamp"]), topics)


def _named(wanted: Any) -> frozenset[str] | None:
    kind = type(wanted).__name__
    if kind not in ("EqualTo", "EqualNullSafe", "In"):
        return None
    values = wanted.value if kind == "In" else (wanted.value,)
    return frozenset(values) if all(isinstance(value, str) for value in values) else None


def _range(wanted: Any, value_of: Callable[[Any], int | None]) -> Range:
    kind = type(wanted).__name__
    values = [value_of(value) for value in (wanted.value if kind == "In" else [getattr(wanted, "value", None)])]
    numbers = [value for value in values if value is not None]
    if kind not in _RANGE or len(numbers) < len(values) or not numbers:
        return Range()
    return _RANGE[kind](numbers)


_RANGE: Mapping[str, Callable[[list[int]], Range]] = {
    "EqualTo": lambda values: Range(values[0], values[0]),
    "EqualNullSafe": lambda values: Range(values[0], values[0]),
    "In": lambda values: Range(min(values), max(values)),
    "GreaterThan": lambda values: Range(values[0] + 1, None),
    "GreaterThanOrEqual": lambda values: Range(values[0], None),
    "LessThan": lambda values: Range(None, values[0] - 1),
    "LessThanOrEqual": lambda values: Range(None, values[0]),
}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _microseconds(value: Any) -> int | None:
    """What the column has. A time without a zone would be one of the session's, which is not known here."""
    return (value - _EPOCH) // _MICROSECOND if isinstance(value, datetime) and value.tzinfo is not None else None


_VALUE: Mapping[str, Callable[[Any], int | None]] = {
    "partition": _whole,
    "offset": _whole,
    "timestamp": _microseconds,
}


def _nanoseconds(times: Range) -> Range:
    """Times of records for those of the column, which leaves the nanoseconds out."""
    return Range(
        None if times.low is None else times.low * 1000 - MARGIN,
        None if times.high is None else (times.high + 1) * 1000 + MARGIN,
    )
