"""The batch reader: a slice of the logs, by offsets or by time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from pyspark.sql.datasource import DataSourceReader, InputPartition

from nsq_fast.errors import ConfigError
from nsq_fast.log_events import SPARK_DATA_LOST
from nsq_fast.spark.discovery import TopicFinder, check_redesigned, retried
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.plain_errors import plain_errors
from nsq_fast.spark.positions import EARLIEST

from .filters import Bounds, bounds_of
from .log import Log, TopicLogs
from .loss import checked_loss
from .piece import Route, pieces
from .position import Offsets
from .reading import ReadsPieces
from .start import Resolver

logger = logging.getLogger(__name__)

START_TIMEOUT = 60.0
_BEGINS = frozenset({"startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp"})
_ENDS = frozenset({"endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"})


class ReplayBatchReader(ReadsPieces, DataSourceReader):
    """Reads one slice, and leaves the channel where it is. Pickled into tasks: only the options travel."""

    bounds = Bounds()

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    @plain_errors
    def partitions(self) -> list[InputPartition]:
        """The pieces of the slice. Raises ConfigError, DataLost, LookupFailed."""
        slices = {topic: self._slice(topic) for topic in TopicFinder(self.options).topics(START_TIMEOUT)}
        starts = {topic: each.starts for topic, each in slices.items()}
        ends = {topic: each.ends for topic, each in slices.items()}
        routes = {topic: each.routes for topic, each in slices.items()}
        found: list[InputPartition] = []
        found += pieces(starts, ends, routes, self.options.min_partitions)
        return found

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
        resolver = Resolver(options, topic_logs)
        starts, ends = resolver.starting(logs, EARLIEST), resolver.ending(logs)
        _check_order(options, starts, ends)
        logs = {partition: log for partition, log in logs.items() if partition in self.bounds.partitions}
        starts, ends = _narrowed(resolver, self.bounds, logs, starts, ends)
        return _Slice(
            {partition: _checked(options, partition, starts[partition], log) for partition, log in logs.items()},
            ends,
            {partition: Route.of(log) for partition, log in logs.items()},
        )


class FilteringBatchReader(ReplayBatchReader):
    """Reads only where rows can be that Spark filters for. Spark refuses it where filters are not to be pushed."""

    def pushFilters(self, filters: list[Any]) -> list[Any]:
        """Called before ``partitions``. All filters are Spark's still, which knows the rows at the edges."""
        self.bounds = bounds_of(filters)
        return filters


class _Slice(NamedTuple):
    """Of one topic."""

    starts: Offsets
    ends: Offsets
    routes: Mapping[int, Route]


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
    if not (options.given & _BEGINS and options.given & _ENDS):
        return
    for partition, start in starts.items():
        if start > ends[partition]:
            raise ConfigError(
                f"{min(options.given & _BEGINS)}: partition {partition} of topic {options.topic!r} would begin at"
                f" {start}, behind its end at {ends[partition]} by {min(options.given & _ENDS)}"
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
