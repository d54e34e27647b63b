"""What moves leaders: the first ones of new topics, moves on request, and who takes over from a node that has died.

A move goes through the stages that clients of a real cluster see: the old leader
takes no more publishes; its consumers lose their connections and it is no longer
the leader; the new one begins to serve, then to take publishes; lookups show it.
"""

from __future__ import annotations

import random
import time

from gevent import sleep, spawn_later
from gevent.lock import Semaphore

from nsq_fast.errors import NsqError

from .options import ClusterOptions
from .state import ClusterState, Partition

UNSTABLE = "the cluster is unstable"


class ClusterError(NsqError):
    """The cluster refuses what an administrator asks for; the text is what the server would answer."""


class Coordinator:
    """Decides who leads what.

    Args:
        state: what it decides about.
        options: how long things take.
    """

    def __init__(self, state: ClusterState, options: ClusterOptions) -> None:
        self.state = state
        self._options = options
        self._moving = Semaphore()
        self._settles_at = 0.0

    @property
    def is_stable(self) -> bool:
        """Whether every partition has a leader that is alive, none is being moved, and nothing changed just now."""
        return not self._moving.locked() and time.monotonic() >= self._settles_at and self._has_all_leaders

    @property
    def _has_all_leaders(self) -> bool:
        return all(partition.leader in self.state.alive for partition in self.state.all_partitions())

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

    # --- leaders -----------------------------------------------------------------------------------------------------

    def move_leader(self, topic: str, number: int, to: str | None = None, origin: str | None = None) -> None:
        """Let another node lead a partition; returns when lookups show it. Raises ClusterError.

        Args:
            to: id of the node, which becomes a replica if it is none; by default some other replica.
            origin: id of the node that must lead it now, if one is named.
        """
        partition = self.state.partition(topic, number)
        if partition is None:
            raise ClusterError("Key not found")
        if not self._moving.acquire(blocking=False):
            raise ClusterError(UNSTABLE)
        try:
            self._move(partition, self._target(partition, to, origin))
        finally:
            partition.is_writable = True
            self._moving.release()
            # Those that got a leader meanwhile had to wait.
            for other in self.state.all_partitions():
                self._register(other)

    def _target(self, partition: Partition, to: str | None, origin: str | None) -> str:
        if partition.leader not in self.state.alive:
            raise ClusterError(UNSTABLE)
        if origin and origin != partition.leader:
            raise ClusterError("move from not the topic leader")
        choices = [to] if to else [node for node in partition.replicas if node != partition.leader]
        target = next((node for node in choices if node in self.state.alive), None)
        if target is None:
            raise ClusterError("no other node can lead the partition")
        return target

    def _move(self, partition: Partition, target: str) -> None:
        if target == partition.leader:
            return
        partition.is_writable = False
        sleep(self._options.move_step)
        if target not in self.state.alive:
            raise ClusterError(UNSTABLE)
        partition.interrupt()
        if target not in partition.replicas:
            # Its data is copied there, and leaves the node it comes from.
            partition.replicas[partition.replicas.index(str(partition.leader))] = target
        self._lead(partition, target)
        sleep(self._options.move_step)
        partition.is_writable = True
        sleep(self._options.move_step)

    def _lead(self, partition: Partition, node: str | None) -> None:
        partition.leader = node
        partition.registered = None

    def _register(self, partition: Partition) -> None:
        if partition.leader in self.state.alive:
            partition.registered = partition.leader

    # --- deaths ------------------------------------------------------------------------------------------------------

    def node_started(self, node: str) -> None:
        """A node runs: it leads the partitions that have no other living replica."""
        self._unsettle()
        self.state.alive.add(node)
        self._elect()

    def node_ended(self, node: str) -> None:
        """A node has gone, well or badly: after a while others lead what it led."""
        self._unsettle()
        self.state.alive.discard(node)
        for partition in self.state.led_by(node):
            partition.interrupt()
            partition.registered = None
        spawn_later(self._options.takeover_delay, self._elect)

    def _elect(self) -> None:
        for partition in self.state.all_partitions():
            if not partition.is_new and partition.leader not in self.state.alive:
                candidates = [node for node in partition.replicas if node in self.state.alive]
                if not candidates:
                    continue
                self._lead(partition, candidates[0])
                partition.is_writable = True
            if not self._moving.locked():
                self._register(partition)
