"""The batch reader: a slice of the logs, by offsets or by time."""

from __future__ import annotations

import logging

from pyspark.sql.datasource import DataSourceReader, InputPartition

from nsq_fast.spark.options import EARLIEST, SourceOptions

from .log import Log, TopicLogs
from .loss import checked_loss
from .piece import Route, pieces
from .reading import ReadsPieces
from .start import Resolver

logger = logging.getLogger(__name__)

START_TIMEOUT = 60.0


class ReplayBatchReader(ReadsPieces, DataSourceReader):
    """Reads one slice, and leaves the channel where it is. Pickled into tasks: only the options travel."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        """The pieces of the slice. Raises ConfigError, DataLost, LookupFailed."""
        topic_logs = TopicLogs(self.options)
        try:
            logs = topic_logs.all_logs(START_TIMEOUT)
            resolver = Resolver(self.options, topic_logs)
            starts, ends = resolver.starting(logs, EARLIEST), resolver.ending(logs)
        finally:
            topic_logs.close()
        starts = {partition: self._checked(partition, starts[partition], log) for partition, log in logs.items()}
        routes = {partition: Route.of(log) for partition, log in logs.items()}
        found: list[InputPartition] = []
        found += pieces(starts, ends, routes, self.options.min_partitions)
        return found

    def _checked(self, partition: int, start: int, log: Log) -> int:
        """The start, or where the log begins when that is behind it and ``failOnDataLoss`` is false."""
        if start >= log.start:
            return start
        reason = f"the log begins at {log.start}"
        logger.warning("%s", checked_loss(self.options, partition, (start, log.start), reason))
        return log.start
