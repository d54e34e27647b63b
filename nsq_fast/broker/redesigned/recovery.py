"""Brings replicas back in sync: those that were away, those whose disk failed, and others in place of both."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gevent import Greenlet, spawn_later

from nsq_fast.log_events import BROKER_REPLICA_FAILED, BROKER_REPLICA_RECOVERED

from .moves import Moves
from .options import ClusterOptions
from .state import ClusterState, Partition

logger = logging.getLogger("nsq_fast.broker.redesigned.recovery")

_FIRST_RETRY, _LONGEST_RETRY = 0.1, 5.0
"""Seconds until a replica that could not be written is tried again: twice as long each time."""


class Recovery:
    """Brings replicas back in sync.

    Args:
        state: what the cluster knows.
        options: how long things take.
        moves: gives replicas to other nodes.
        on_change: called when a replica is out of sync.
    """

    def __init__(
        self, state: ClusterState, options: ClusterOptions, moves: Moves, on_change: Callable[[], None]
    ) -> None:
        self._state = state
        self._options = options
        self._moves = moves
        self._on_change = on_change
        self._retry: Greenlet[..., None] | None = None
        self._retry_delay = _FIRST_RETRY

    def catch_up(self) -> None:
        """Let replicas that are not in sync have what their leaders have; one that cannot be written is tried again."""
        is_done = True
        for partition in self._state.all_partitions():
            for node in self._state.reachable.intersection(partition.replicas).difference(partition.in_sync):
                if partition.set.catch_up(node, self._state.reachable):
                    logger.info("%s has all of %s again", node, partition.name, extra=BROKER_REPLICA_RECOVERED)
                elif partition.leader in self._state.reachable:
                    is_done = False
        if is_done:
            self._retry_delay = _FIRST_RETRY
        else:
            self._retry_later()

    def migrate_later(self) -> None:
        """Give replicas that are not in sync after ``migrate_delay`` to other nodes."""
        spawn_later(self._options.migrate_delay, self._migrate)

    def replica_failed(self, partition: Partition, node: str, error: OSError) -> bool:
        """A replica cannot be written: it is out of sync until it can; False when it has to stay in sync."""
        if partition.leader not in self._state.reachable or not partition.set.leave(node):
            return False
        self._on_change()
        partition.set.tell(self._state.reachable)
        logger.error(
            "%s cannot write its replica of %s: %s; it is out of sync until it can, %d are in sync, and publishing"
            " needs %d; it is tried again",
            node,
            partition.name,
            error,
            len(partition.in_sync),
            partition.quorum,
            extra=BROKER_REPLICA_FAILED,
        )
        self._retry_later()
        self.migrate_later()
        return True

    def _retry_later(self) -> None:
        if not self._retry:
            self._retry = spawn_later(self._retry_delay, self._try_again)
            self._retry_delay = min(2 * self._retry_delay, _LONGEST_RETRY)

    def _try_again(self) -> None:
        self._retry = None
        self.catch_up()

    def _migrate(self) -> None:
        for partition in self._state.all_partitions():
            if not partition.is_new and len(partition.in_sync) < partition.meta.replica:
                self._moves.fit_replicas(partition)
