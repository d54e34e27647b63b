"""One topic of a stream, as its driver sees it: its logs, asked for now and then, and the channel that it moves."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from nsq_fast.errors import ConfigError, HttpError, LookupFailed, NsqError
from nsq_fast.log_events import SPARK_DATA_LOST, SPARK_LOOKUP_FAILED, SPARK_POSITION_LATER
from nsq_fast.spark.discovery import check_redesigned, retried
from nsq_fast.spark.options import SourceOptions

from .log import Log, TopicLogs
from .loss import checked_loss
from .piece import Route
from .planning import Planner, Stretch, stretch_of
from .position import Offsets
from .start import Resolver

logger = logging.getLogger(__name__)

POLL_INTERVAL = 0.2
"""Fewest seconds between two questions to the servers: Spark asks 50 times a second."""

RELEASE_INTERVAL = 1.0


class TopicDriver:
    """The driver's view of one topic; ``options`` are for it alone.

    Attributes:
        planner: counts its records.
        answered_at: when its servers were last asked with success (monotonic); None: never.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._topic_logs = TopicLogs(options)
        self.planner = Planner(self._topic_logs)
        self.answered_at: float | None = None
        self._logs: dict[int, Log] = {}
        self._asked_at = self._released_at = float("-inf")
        self._warned: set[int] = set()

    def begin(self, timeout: float) -> Offsets:
        """Where a new query begins. The channel is there then, and stands there. Raises ConfigError, NsqError."""
        check_redesigned(self._options, timeout)
        self._check_channel(self._all_logs(timeout))
        resolver = Resolver(self._options, self._topic_logs)
        # Leaders may move or die between two questions: they are asked for again then.
        starts = retried(lambda left: resolver.starting(self._all_logs(left), None), timeout)
        for partition, log in self._logs.items():
            self._move_channel(partition, log, starts[partition])
        return starts

    def has_channel(self, timeout: float) -> bool:
        """Whether the channel is there, on any partition. Raises ConfigError, NsqError."""
        check_redesigned(self._options, timeout)
        return any(self._options.channel in log.channels for log in self._all_logs(timeout).values())

    def ends(self, timeout: float) -> Offsets:
        """Where all logs end now. Raises ConfigError, NsqError."""
        check_redesigned(self._options, timeout)
        return {partition: log.end for partition, log in self._all_logs(timeout).items()}

    def stretch(self, start: Offsets, target: Offsets | None) -> Stretch:
        """What there is for the next batch. Raises DataLost when the servers have less than ``start``; NsqError."""
        logs = self._recent_logs()
        for partition, log in logs.items():
            if start.get(partition, log.start) < log.start:
                self._lost(partition, start[partition], log)
        return stretch_of(start, logs, target)

    def known_logs(self) -> Mapping[int, Log]:
        """The logs as they were when they were last asked about."""
        return self._logs

    def routes(self) -> dict[int, Route]:
        """How to read the partitions, as far as is known; whoever finds it wrong looks for himself."""
        if not self._logs:
            try:
                self._recent_logs()
            except NsqError as error:
                logger.warning(
                    "topic %s: its leaders are not known: %s", self._options.topic, error, extra=SPARK_LOOKUP_FAILED
                )
        return {partition: Route.of(log) for partition, log in self._logs.items()}

    def release(self, offsets: Offsets) -> None:
        """Move the channel to where everything before it may be forgotten. When that fails, the next call does it."""
        now = time.monotonic()
        if now - self._released_at < RELEASE_INTERVAL:
            return
        self._released_at = now
        for partition, offset in offsets.items():
            log = self._logs.get(partition)
            if log is not None:
                self._move_channel(partition, log, offset)

    def close(self) -> None:
        """Close connections."""
        self._topic_logs.close()

    def _recent_logs(self) -> Mapping[int, Log]:
        now = time.monotonic()
        if now - self._asked_at >= POLL_INTERVAL:
            self._asked_at = now
            self._keep(self._topic_logs.logs())
        return self._logs

    def _all_logs(self, timeout: float) -> Mapping[int, Log]:
        self._keep(self._topic_logs.all_logs(timeout))
        return self._logs

    def _keep(self, logs: dict[int, Log]) -> None:
        if not logs:
            raise LookupFailed(f"topic {self._options.topic!r} is not known to {', '.join(self._options.server_names)}")
        self._logs = logs
        self.answered_at = time.monotonic()
        if self._options.min_partitions is not None and any(log.is_ordered for log in logs.values()):
            raise ConfigError(
                f"minPartitions={self._options.min_partitions}: topic {self._options.topic!r} is ordered, and parts of"
                " a partition that are read side by side are not in order"
            )

    def _lost(self, partition: int, offset: int, log: Log) -> None:
        reason = f"the log begins at {log.start}: retention has overtaken the query"
        loss = checked_loss(self._options, partition, (offset, log.start), reason)
        if partition not in self._warned:
            self._warned.add(partition)
            logger.warning("%s", loss, extra=SPARK_DATA_LOST)

    # The channel

    def _check_channel(self, logs: Mapping[int, Log]) -> None:
        name = self._options.channel
        for partition, log in logs.items():
            clients = log.channels[name].clients if name in log.channels else 0
            if clients:
                raise ConfigError(
                    f"channel={name!r}: {clients} consumers are attached to it at {log.nsqd}, partition {partition};"
                    " the channel must be this query's own, which moves it as Spark commits"
                )

    def _move_channel(self, partition: int, log: Log, offset: int) -> None:
        if log.has_fixed_channels:
            return  # it is read from, and moves with that
        try:
            self._topic_logs.create_channel(log, partition)
            self._topic_logs.set_position(log.nsqd, partition, self._options.channel, offset)
        except HttpError as error:
            logger.info(
                "channel %s of partition %d is moved later: %s",
                self._options.channel,
                partition,
                error,
                extra=SPARK_POSITION_LATER,
            )
