"""Decides who leads what: the first leaders of new topics, and who takes over from a node that has gone.

It runs the policy of ``membership`` on a clock. As everything is in one process, a node that can be reached is heard
all the time, and one that cannot be is silent from that moment.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from gevent import spawn_later

from .membership import Lease, Membership
from .moves import UNSTABLE, ClusterError, Moves
from .options import ClusterOptions
from .recovery import Recovery
from .replication import Replica, ReplicaSet
from .state import ClusterState, Partition


class Coordinator:
    """Decides who leads what.

    Args:
        state: what it decides about.
        options: how long things take.

    Attributes:
        moves: moves leaders and replicas on request.
        recovery: brings replicas back in sync.
    """

    def __init__(self, state: ClusterState, options: ClusterOptions) -> None:
        self.state = state
        self._options = options
        self.moves = Moves(state, options, self._after_move)
        self.recovery = Recovery(state, options, self.moves, self._unsettle)
        self._membership = Membership(options.takeover_delay, self._sets)
        self._leases: dict[str, Lease] = {}
        self._settles_at = 0.0

    def _sets(self) -> Iterator[ReplicaSet]:
        return (partition.set for partition in self.state.all_partitions() if not partition.is_new)

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
        self.recovery.catch_up()

    # --- nodes that come and go --------------------------------------------------------------------------------------

    def node_started(self, node: str) -> None:
        """A node runs, or can be reached again: its replicas catch up in a while."""
        self._unsettle()
        self.state.alive.add(node)
        self._hear()
        self._elect()
        for replica in self._replicas_on(node):
            replica.has_lease = node in self.state.reachable
        if self._options.ready_after:
            spawn_later(random.uniform(0, self._options.ready_after), self.recovery.catch_up)
        else:
            self.recovery.catch_up()

    def node_ended(self, node: str) -> None:
        """A node has gone, well or badly: after a while others lead what it led."""
        self._unsettle()
        self._hear()
        self.state.alive.discard(node)
        if not any(node in partition.replicas for partition in self.state.all_partitions()):
            self.state.leaving.discard(node)  # it has left; if it comes again, it is a new one
        for partition in self.state.led_by(node):
            partition.interrupt()
            partition.registered = None
        if self._options.kind:  # publishing does not wait until the death is noticed
            for partition in self.state.all_partitions():
                partition.set.shrink(self._membership.trusted - {node})
                partition.set.tell(self.state.reachable)
        spawn_later(self._options.takeover_delay, self._detect)

    def isolate(self, node: str) -> None:
        """Cut a node off from the others and from the coordinator, though not from its clients."""
        self._hear()
        self.state.isolated.add(node)
        lease = self._leases.get(node)
        if lease is not None:
            spawn_later(max(0.0, lease.ends_at - time.monotonic()), self._end_leases)
        spawn_later(self._options.takeover_delay, self._detect)

    def heal(self, node: str) -> None:
        """End what ``isolate`` has begun."""
        self.state.isolated.discard(node)
        if node in self.state.alive:
            self.node_started(node)

    def _hear(self) -> None:
        """The nodes that can be reached have been heard until now."""
        now = time.monotonic()
        for node in self.state.reachable:
            self._membership.heard(node, now)
            self._leases.setdefault(node, self._membership.make_lease()).renew(now)

    def _end_leases(self) -> None:
        """Have the nodes that are cut off lead nothing, when their leases have ended."""
        now = time.monotonic()
        for node in self.state.isolated:
            lease = self._leases.get(node)
            if lease is not None and lease.holds(now):  # it was cut off again meanwhile
                spawn_later(lease.ends_at - now, self._end_leases)
            else:
                for replica in self._replicas_on(node):
                    replica.has_lease = False

    def _replicas_on(self, node: str) -> Iterator[Replica]:
        return (each.set.replicas[node] for each in self.state.all_partitions() if node in each.replicas)

    def _detect(self) -> None:
        """Notice the nodes that cannot be reached; other nodes get their replicas later, if they stay away."""
        self._hear()
        now = time.monotonic()
        if self._membership.lose(now):
            self._unsettle()
            self.recovery.migrate_later()
        self._elect()
        next_loss = self._membership.next_loss(self._membership.trusted - self.state.reachable)
        if next_loss is not None:  # it has come and gone meanwhile
            spawn_later(next_loss - now, self._detect)

    def _elect(self) -> None:
        self._membership.elect()
        for partition in self.state.all_partitions():
            if not partition.is_new:
                partition.set.tell(self.state.reachable)
                partition.serve()
            if not self.moves.is_moving:
                self._register(partition)

    def _after_move(self) -> None:
        self._unsettle()
        for partition in self.state.all_partitions():  # those that got a leader meanwhile had to wait
            self._register(partition)

    def _register(self, partition: Partition) -> None:
        if partition.leader in self._membership.trusted & self.state.alive:
            partition.registered = partition.leader
