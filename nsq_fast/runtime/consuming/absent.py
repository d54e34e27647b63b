"""Partitions that were chosen although the topic does not have them."""

from __future__ import annotations

from nsq_fast.errors import ConfigError
from nsq_fast.log_events import PARTITIONS_MISSING
from nsq_fast.protocol.targets import missing
from nsq_fast.protocol.topology import Topology
from nsq_fast.runtime.signals import emit

from .context import Context


class AbsentPartitions:
    """Names them once, to the log and to ``on_error``. They are waited for: a topic may get more partitions."""

    def __init__(self, consumer: Context) -> None:
        self._consumer = consumer
        self._reported: list[int] = []

    def report(self, topology: Topology) -> None:
        """Look at what lookup says now."""
        consumer, absent = self._consumer, missing(topology, self._consumer.config.partitions)
        if absent == self._reported or topology.meta is None:
            return
        self._reported = absent
        if absent:
            error = ConfigError(
                f"partitions: topic {consumer.topic} has partitions 0 to {topology.meta.partition_num - 1};"
                f" nothing comes of {', '.join(map(str, absent))} until it has more"
            )
            consumer.logger.warning("%s", error, extra=PARTITIONS_MISSING)
            emit(consumer, "on_error", error=error)
