"""Brings what the replicas of a partition have written to the disks themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from nsq_fast.log_events import BROKER_WRITE_FAILED, BROKER_WRITE_RECOVERED

from .log import PartitionLog
from .store import for_each

logger = logging.getLogger("nsq_fast.broker.redesigned.disk_sync")


class DiskSync:
    """Does so for one partition. Where it fails, that is logged once, and the next publish tries again.

    The messages are confirmed nevertheless, as on the real server (youzan/nsq: nsqd/topic.go, flushData).

    Args:
        name: of the partition.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_failing = False

    def sync(self, logs: Iterable[PartitionLog], every: int) -> None:
        """Bring the records of each log to its disk, when that are ``every`` of them. Blocks."""
        try:
            for_each(logs, lambda log: log.sync(every))
        except OSError as error:
            if not self._is_failing:
                logger.error(
                    "failed to bring messages of %s to the disk itself: %s; they are written, but a power loss may take"
                    " them",
                    self._name,
                    error,
                    extra=BROKER_WRITE_FAILED,
                )
            self._is_failing = True
        else:
            if self._is_failing:
                logger.warning("messages of %s reach the disk itself again", self._name, extra=BROKER_WRITE_RECOVERED)
            self._is_failing = False
