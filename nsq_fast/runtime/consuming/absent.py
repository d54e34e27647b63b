"""Partitions that were chosen although the topic does not have them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from nsq_fast.errors import ConfigError
from nsq_fast.log_events import PARTITIONS_MISSING
from nsq_fast.protocol.targets import impossible, missing
from nsq_fast.protocol.topology import Topology
from nsq_fast.runtime.signals import emit

if TYPE_CHECKING:
    from .context import Context


class AbsentPartitions:
    """Names them once, to the log and to ``on_error``. They are waited for: a topic may get more partitions.

    Attributes:
        impossible: why the topic has none of the chosen partitions, and will get none; None as long as it may have one.
    """

    def __init__(self, consumer: Context, topic: str) -> None:
        self._consumer = consumer
        self._topic = topic
        self._reported: list[int] = []
        self.impossible: ConfigError | None = None

    def report(self, topology: Topology) -> None:
        """Look at what lookup says now."""
        chosen = self._consumer.config.partitions
        complaint = impossible(topology, chosen)
        if complaint is None:
            self.impossible = None
            self._report_missing(topology, missing(topology, chosen))
        elif self.impossible is None:
            self.impossible = ConfigError(f"topic {self._topic}: {complaint}")
            self._say(logging.ERROR, self.impossible)

    def _report_missing(self, topology: Topology, absent: list[int]) -> None:
        if absent == self._reported or topology.meta is None:
            return
        self._reported = absent
        if absent:
            error = ConfigError(
                f"partitions: topic {self._topic} has partitions 0 to {topology.meta.partition_num - 1};"
                f" nothing comes of {', '.join(map(str, absent))} until it has more"
            )
            self._say(logging.WARNING, error)

    def _say(self, level: int, error: ConfigError) -> None:
        self._consumer.logger.log(level, "%s", error, extra=PARTITIONS_MISSING)
        emit(self._consumer, "on_error", error=error)
