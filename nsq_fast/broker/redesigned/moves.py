"""Moves of leaders and of replicas, one at a time.

A move of a leader goes through the stages that clients of a real cluster see: the old leader takes no more
publishes; its consumers lose their connections and it is no longer the leader; the new one begins to serve, then to
take publishes; lookups show it.
"""

from __future__ import annotations

from collections.abc import Callable

from gevent import sleep
from gevent.lock import Semaphore

from nsq_fast.errors import NsqError

from .balancing import ring
from .options import ClusterOptions
from .state import ClusterState, Partition

UNSTABLE = "the cluster is unstable"


SAME_NODE = "move to and from node can not be the same"


class ClusterError(NsqError):
    """The cluster refuses what an administrator asks for; the text is what the server would answer."""


class Moves:
    """Moves what an administrator wants moved.

    Args:
        state: what the cluster knows.
        options: how long things take.
        on_done: called after each move.
    """

    def __init__(self, state: ClusterState, options: ClusterOptions, on_done: Callable[[], None]) -> None:
        self.state = state
        self._options = options
        self._on_done = on_done
        self._moving = Semaphore()

    @property
    def is_moving(self) -> bool:
        """Whether a leader is being moved."""
        return self._moving.locked()

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
            self._on_done()

    def _target(self, partition: Partition, to: str | None, origin: str | None) -> str:
        if partition.leader not in self.state.reachable:  # it would not know that it leads no more
            raise ClusterError(UNSTABLE)
        if origin and origin != partition.leader:
            raise ClusterError("move from not the topic leader")
        choices = [to] if to else [node for node in partition.in_sync if node != partition.leader]
        target = next((node for node in choices if node in self.state.reachable), None)
        if target is None:
            raise ClusterError("no other node can lead the partition")
        return target

    def _move(self, partition: Partition, target: str) -> None:
        former = partition.leader
        if former is None or target == former:
            return
        partition.is_writable = False
        sleep(self._options.move_step)
        is_guest = target not in partition.replicas
        partition.set.add(target)
        if not partition.set.catch_up(target, self.state.reachable):
            raise ClusterError(UNSTABLE)
        partition.set.lead(target)
        partition.set.tell(self.state.reachable)
        partition.serve()
        partition.is_writable = False
        if is_guest:  # it takes the place of the one that led
            self._drop(partition, former)
        sleep(self._options.move_step)
        partition.is_writable = True
        sleep(self._options.move_step)

    def check(self, topic: str, number: int, origin: str, to: str, *, is_leader: bool) -> None:
        """Raise ClusterError for a move that cannot be (youzan/nsq: data_placement_mgr.go, tryMoveTopicPartition)."""
        if origin == to:
            raise ClusterError(SAME_NODE)
        partition = self.state.partition(topic, number)
        if partition is None:
            raise ClusterError("Key not found")
        _check_origin(partition, origin, to, is_leader=is_leader)
        if to not in self.state.staying:
            raise ClusterError("the move destination is not found in cluster")
        if origin not in self.state.alive:
            raise ClusterError("the move source data is lost in cluster")
        siblings = self.state.topics[topic]
        is_elsewhere = to not in partition.replicas and any(to in sibling.replicas for sibling in siblings)
        if is_elsewhere and not partition.meta.may_share_nodes:
            raise ClusterError("destination node is excluded for topic")

    def move(self, topic: str, number: int, origin: str, to: str, *, is_leader: bool) -> None:
        """Move the leadership of a partition, or a replica that does not lead. Raises ClusterError."""
        if is_leader:
            self.move_leader(topic, number, to, origin)
        else:
            self.move_replica(topic, number, origin, to)

    def move_replica(self, topic: str, number: int, origin: str, to: str) -> None:
        """Let a node have what another one, which does not lead, has of a partition. Raises ClusterError."""
        self.check(topic, number, origin, to, is_leader=False)
        partition = self.state.topics[topic][number]
        partition.set.add(to)
        if not partition.set.catch_up(to, self.state.reachable):
            partition.set.replicas.pop(to)
            raise ClusterError(UNSTABLE)
        self._drop(partition, origin)
        self._on_done()

    def _drop(self, partition: Partition, node: str) -> None:
        partition.set.drop(node)
        partition.set.tell(self.state.reachable)

    def fit_replicas(self, partition: Partition) -> None:
        """Give a partition more replicas, or fewer, until as many are in sync as its topic wants.

        Nothing happens without a leader; and no replica goes before enough others are in sync.
        """
        wanted = partition.meta.replica
        if partition.leader not in self.state.reachable:
            return
        free = self.state.staying.difference(partition.replicas)
        for node in sorted(free, key=lambda node: (node not in self._expected(partition), self._load(node))):
            if len(partition.in_sync) >= wanted:
                break
            partition.set.add(node)
            partition.set.catch_up(node, self.state.reachable)
        late = [node for node in partition.replicas if node not in partition.in_sync]
        for node in [*late, *(node for node in partition.in_sync if node != partition.leader)]:
            if len(partition.replicas) > wanted and len(set(partition.in_sync) - {node}) >= wanted:
                self._drop(partition, node)

    def _expected(self, partition: Partition) -> tuple[str, ...]:
        """Where a partition is to stand that is placed on the ring."""
        if not partition.meta.may_share_nodes:
            return ()
        nodes = [node for node in self.state.node_ids if node in self.state.staying]
        return ring(partition.topic, partition.number, partition.meta.replica, nodes)

    def _load(self, node: str) -> int:
        return sum(node in partition.replicas for partition in self.state.all_partitions())


def _check_origin(partition: Partition, origin: str, to: str, *, is_leader: bool) -> None:
    if is_leader:
        if origin != partition.leader:
            raise ClusterError("move from not the topic leader")
        return
    if origin == partition.leader:
        raise ClusterError("can not move leader without moveleader param")
    if origin not in partition.replicas:
        raise ClusterError("the move source node has no replica for the topic")
    if to in partition.replicas:
        raise ClusterError("the move destination has the topic data already")
