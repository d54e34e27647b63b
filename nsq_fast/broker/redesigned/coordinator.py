"""Decides who leads what: the first leaders of new topics, and who takes over from a node that has gone."""

from __future__ import annotations

import random
import time

from gevent import spawn_later

from .moves import UNSTABLE, ClusterError, Moves
from .options import ClusterOptions
from .state import ClusterState, Partition


class Coordinator:
    """Decides who leads what.

    Args:
        state: what it decides about.
        options: how long things take.

    Attributes:
        moves: moves leaders and replicas on request.
    """

    def __init__(self, state: ClusterState, options: ClusterOptions) -> None:
        self.state = state
        self._options = options
        self.moves = Moves(state, options, self._after_move)
        self._trusted: set[str] = set()  # nodes that are not known to have gone
        self._settles_at = 0.0

    @property
    def is_stable(self) -> bool:
        """Whether every partition has a leader that is alive, none is being moved, and nothing changed just now."""
        is_quiet = not self.moves.is_moving and time.monotonic() >= self._settles_at
        return is_quiet and not self.state.is_upgrading and self._has_all_leaders

    @property
    def _has_all_leaders(self) -> bool:
        return all(
            partition.leader in self.state.reachable and len(partition.in_sync) >= partition.quorum
            for partition in self.state.all_partitions()
        )

    def begin(self, partition: Partition) -> None:
        """Give a new partition its first leader in a while."""
        self._unsettle()
        partition.wait_for_leader()
        spawn_later(random.uniform(0, self._options.ready_after), self._end_beginning, partition)

    def _end_beginning(self, partition: Partition) -> None:
        partition.is_new = False
        self._elect()

    def _unsettle(self) -> None:
        """Something has changed: the cluster is not stable for a while."""
        self._settles_at = time.monotonic() + self._options.ready_after

    def require_stable(self) -> None:
        """Raise ClusterError unless the cluster is stable."""
        if not self.is_stable:
            raise ClusterError(UNSTABLE)

    def restored(self) -> None:
        """Partitions are back after all nodes had ended: their leaders serve, and other replicas catch up."""
        self._unsettle()
        self._elect()
        self._catch_up()

    # --- nodes that come and go --------------------------------------------------------------------------------------

    def node_started(self, node: str) -> None:
        """A node runs, or can be reached again: its replicas catch up in a while."""
        self._unsettle()
        self.state.alive.add(node)
        self._trusted.add(node)
        self._elect()
        if self._options.ready_after:
            spawn_later(random.uniform(0, self._options.ready_after), self._catch_up)
        else:
            self._catch_up()

    def node_ended(self, node: str) -> None:
        """A node has gone, well or badly: after a while others lead what it led."""
        self._unsettle()
        self.state.alive.discard(node)
        if not any(node in partition.replicas for partition in self.state.all_partitions()):
            self.state.leaving.discard(node)  # it has left; if it comes again, it is a new one
        for partition in self.state.led_by(node):
            partition.interrupt()
            partition.registered = None
        if self._options.kind:  # publishing does not wait until the death is noticed
            for partition in self.state.all_partitions():
                partition.set.shrink(self._trusted - {node})
                partition.set.tell(self.state.reachable)
        spawn_later(self._options.takeover_delay, self._detect)

    def isolate(self, node: str) -> None:
        """Cut a node off from the others and from the coordinator, though not from its clients."""
        self.state.isolated.add(node)
        spawn_later(self._options.takeover_delay, self._detect)

    def heal(self, node: str) -> None:
        """End what ``isolate`` has begun."""
        self.state.isolated.discard(node)
        if node in self.state.alive:
            self.node_started(node)

    def _detect(self) -> None:
        """Notice the nodes that cannot be reached; other nodes get their replicas later, if they stay away."""
        if not self._trusted <= self.state.reachable:
            self._unsettle()
            self._trusted &= self.state.reachable
            spawn_later(self._options.migrate_delay, self._migrate)
        self._elect()

    def _migrate(self) -> None:
        for partition in self.state.all_partitions():
            if not partition.is_new and not self.state.reachable.issuperset(partition.replicas):
                self.moves.fit_replicas(partition)

    def _catch_up(self) -> None:
        for partition in self.state.all_partitions():
            for node in set(partition.replicas).difference(partition.in_sync):
                partition.set.catch_up(node, self.state.reachable)

    def _elect(self) -> None:
        for partition in self.state.all_partitions():
            if not partition.is_new:
                partition.set.elect(self._trusted)
                partition.set.shrink(self._trusted)
                partition.set.tell(self.state.reachable)
                partition.serve()
            if not self.moves.is_moving:
                self._register(partition)

    def _after_move(self) -> None:
        self._unsettle()
        for partition in self.state.all_partitions():  # those that got a leader meanwhile had to wait
            self._register(partition)

    def _register(self, partition: Partition) -> None:
        if partition.leader in self._trusted & self.state.alive:
            partition.registered = partition.leader
