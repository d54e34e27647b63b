"""Decides who leads what: first leaders, takeovers, moves, balancing; and what an administrator does to topics."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import mmh3
from gevent import Greenlet, sleep, spawn, spawn_later
from gevent.event import Event
from gevent.lock import Semaphore

from nsq_fast.broker.options import ClusterOptions
from nsq_fast.broker.redesigned.replication import Lease, Membership, Replica, ReplicaSet
from nsq_fast.broker.redesigned.state import (
    MAX_PARTITIONS,
    MAX_SYNC_EVERY,
    ClusterState,
    Partition,
    TopicMeta,
)
from nsq_fast.errors import NsqError
from nsq_fast.log_events import BROKER_MOVE_FAILED, BROKER_NODE_STAYS, BROKER_REPLICA_FAILED, BROKER_REPLICA_RECOVERED

logger = logging.getLogger("nsq_fast.broker.redesigned.coordinator")


# --- which partition to move, so that the nodes have the same to do. No clock, no I/O --------------------------------
# The partitions of a topic that may share nodes stand on a *ring* of all nodes, which begins at a node that the name
# of the topic gives: the first node of a partition leads it, the next ones have its replicas, and the next partition
# begins one node further. Others are moved: away from nodes that leave, then until the nodes have the same number of
# leaders, and of replicas (youzan/nsq: consistence/data_placement_mgr.go,
# getRebalancedMultiTopicPartitionsFromNameList; nsqlookup_coordinator.go, processRemovingNodes). Each move lowers a
# cost that is compared in this order, so that moves come to an end.


def ring(topic: str, number: int, replicas: int, nodes: Sequence[str]) -> tuple[str, ...]:
    """The nodes of a partition on the ring, the leader first; none where there are fewer nodes than replicas.

    Args:
        nodes: all, in the order of the ring (the real server sorts their ids).
    """
    if len(nodes) < replicas:
        return ()
    first = mmh3.hash(topic, 0, False) + number
    return tuple(nodes[(first + step) % len(nodes)] for step in range(replicas))


class Placement(NamedTuple):
    """Where a partition stands.

    Attributes:
        nodes: ids of the nodes that have it; the first leads it.
        may_share: whether a node may have several partitions of the topic: then they stand on the ring.
    """

    topic: str
    number: int
    nodes: tuple[str, ...]
    may_share: bool = False


class Move(NamedTuple):
    """What to move: the leadership of a partition, or a replica that does not lead.

    A node that gets the leadership and has no replica gets that of the former leader.
    """

    topic: str
    number: int
    origin: str
    target: str
    is_leader: bool


class _Cost(NamedTuple):
    """By how much a move changes what is to be as small as possible; the first one counts most."""

    replicas_leaving: int = 0
    leaders_leaving: int = 0
    off_the_ring: int = 0
    leaders: int = 0
    replicas: int = 0


_NO_CHANGE = _Cost()


def next_move(placements: Sequence[Placement], nodes: Sequence[str], leaving: Collection[str] = ()) -> Move | None:
    """The move that helps most; None when none does.

    Args:
        nodes: those that can be talked to, in the order of the ring.
        leaving: those of them that are to have nothing in the end.
    """
    tally = _Tally(placements, nodes, leaving)
    best, least = None, _NO_CHANGE
    for placement in placements:
        for move in _moves_of(placement, tally):
            cost = tally.cost(placement, move)
            if cost < least:
                best, least = move, cost
    return best


def _moves_of(placement: Placement, tally: _Tally) -> Iterator[Move]:
    topic, number, (leader, *others) = placement.topic, placement.number, placement.nodes
    if leader not in tally.nodes:
        return
    for target in tally.staying:
        if target in others:
            yield Move(topic, number, leader, target, True)
        elif target != leader and (placement.may_share or not tally.of_topic[topic, target]):
            yield Move(topic, number, leader, target, True)
            for origin in others:
                if origin in tally.nodes:
                    yield Move(topic, number, origin, target, False)


class _Tally:
    """What each node has."""

    def __init__(self, placements: Sequence[Placement], nodes: Sequence[str], leaving: Collection[str]) -> None:
        self.nodes = set(nodes)
        self.leaving = set(leaving)
        self.staying = [node for node in nodes if node not in self.leaving]
        self.leaders: Counter[str] = Counter()
        self.of_topic: Counter[tuple[str, str]] = Counter()
        self.replicas: Counter[str] = Counter()
        for placement in placements:
            self.leaders[placement.nodes[0]] += 1
            for node in placement.nodes:
                self.replicas[node] += 1
                self.of_topic[placement.topic, node] += 1

    def cost(self, placement: Placement, move: Move) -> _Cost:
        origin, target = move.origin, move.target
        leaves = int(origin in self.leaving)
        is_copied = target not in placement.nodes
        leaving = _Cost(-leaves * is_copied, -leaves * move.is_leader)
        expected = ring(placement.topic, placement.number, len(placement.nodes), self.staying)
        if placement.may_share and expected:
            return leaving._replace(off_the_ring=_change_of_ring(placement, move, expected))
        return leaving._replace(
            leaders=_change(self.leaders[origin], self.leaders[target]) * move.is_leader,
            replicas=_change(self.replicas[origin], self.replicas[target]) * is_copied,
        )


def _change_of_ring(placement: Placement, move: Move, expected: tuple[str, ...]) -> int:
    """By how much a move brings a partition nearer to its nodes on the ring."""
    leader, nodes = placement.nodes[0], set(placement.nodes)
    nodes_then = nodes if move.target in nodes else nodes - {move.origin} | {move.target}
    leader_then = move.target if move.is_leader else leader
    missing = len(set(expected) - nodes_then) - len(set(expected) - nodes)
    return 2 * missing + (leader_then != expected[0]) - (leader != expected[0])


def _change(origin: int, target: int) -> int:
    """By how much the sum of the squares changes when the one gets one less, and the other one more."""
    return 2 * (target - origin + 1)


UNSTABLE = "the cluster is unstable"
SAME_NODE = "move to and from node can not be the same"
_FIRST_RETRY, _LONGEST_RETRY = 0.1, 5.0
"""Seconds until a replica that could not be written is tried again: twice as long each time."""


class ClusterError(NsqError):
    """The cluster refuses what an administrator asks for; the text is what the server would answer."""


# --- decides who leads what ------------------------------------------------------------------------------------------
# The first leaders of new topics, and who takes over from a node that has gone.
# It runs the policy of ``Membership`` on a clock. As everything is in one process, a node that can be reached is
# heard all the time, and one that cannot be is silent from that moment.


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
        self._retry: Greenlet[..., None] | None = None
        self._retry_delay = _FIRST_RETRY
        self._membership = Membership(options.takeover_delay, self._sets)
        self._leases: dict[str, Lease] = {}
        self._settles_at = 0.0

    def _sets(self) -> Iterator[ReplicaSet]:
        return (partition.set for partition in self.state.all_partitions() if not partition.is_new)

    @property
    def is_stable(self) -> bool:
        """Whether every partition has a leader that is alive, none is being moved, and nothing changed just now."""
        is_quiet = not self.is_moving and time.monotonic() >= self._settles_at
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
        self.catch_up()

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
            spawn_later(random.uniform(0, self._options.ready_after), self.catch_up)
        else:
            self.catch_up()

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
            self.migrate_later()
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
            if not self.is_moving:
                self._register(partition)

    def _after_move(self) -> None:
        self._unsettle()
        for partition in self.state.all_partitions():  # those that got a leader meanwhile had to wait
            self._register(partition)

    def _register(self, partition: Partition) -> None:
        if partition.leader in self._membership.trusted & self.state.alive:
            partition.registered = partition.leader

    # --- moves of leaders and of replicas, one at a time --------------------------------------------------------------
    # A move of a leader goes through the stages that clients of a real cluster see: the old leader takes no more
    # publishes; its consumers lose their connections and it is no longer the leader; the new one begins to serve, then
    # to take publishes; lookups show it.

    @property
    def is_moving(self) -> bool:
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
            self._after_move()

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
        self._after_move()

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

    # --- replicas that are not in sync --------------------------------------------------------------------------------
    # Those that were away, those whose disk failed, and others in place of both.

    def catch_up(self) -> None:
        """Let replicas that are not in sync have what their leaders have; one that cannot be written is tried again."""
        is_done = True
        for partition in self.state.all_partitions():
            for node in self.state.reachable.intersection(partition.replicas).difference(partition.in_sync):
                if partition.set.catch_up(node, self.state.reachable):
                    logger.info("%s has all of %s again", node, partition.name, extra=BROKER_REPLICA_RECOVERED)
                elif partition.leader in self.state.reachable:
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
        if partition.leader not in self.state.reachable or not partition.set.leave(node):
            return False
        self._unsettle()
        partition.set.tell(self.state.reachable)
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
        for partition in self.state.all_partitions():
            if not partition.is_new and len(partition.in_sync) < partition.meta.replica:
                self.fit_replicas(partition)


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


# --- topics of the cluster -------------------------------------------------------------------------------------------
# Created, expanded, changed and deleted, and where their partitions are placed.


_POLL = 0.005
NO_NODE = "ErrType:9 ErrCode:1 : No node is available for topic"


class Topics:
    """What an administrator does to topics.

    Args:
        state: what the cluster knows.
        options: how long things take.
        coordinator: gives new partitions their leaders.
    """

    def __init__(self, state: ClusterState, options: ClusterOptions, coordinator: Coordinator) -> None:
        self.state = state
        self._options = options
        self._coordinator = coordinator

    def wait_leaders(self, topic: str) -> None:
        """Return when every partition of a topic that is new has its first leader."""
        while any(partition.is_new for partition in self._partitions(topic)):
            sleep(_POLL)

    def create(self, topic: str, meta: TopicMeta) -> None:
        """Create a topic; nothing happens when it exists just so. Raises ClusterError."""
        if meta.partition_num >= MAX_PARTITIONS:
            raise ClusterError("max partition allowed exceed")
        needed = meta.replica if meta.may_share_nodes else meta.replica * meta.partition_num
        if needed > len(self.state.staying):
            raise ClusterError(NO_NODE)
        meta.sync_every = min(meta.sync_every, MAX_SYNC_EVERY)
        existing = self.state.topics.get(topic)
        if existing:
            if not existing[0].meta.is_same(meta):
                raise ClusterError("already exist")
            return
        meta.magic_code = time.time_ns()
        self.state.topics[topic] = []
        self._add_partitions(topic, meta, meta.partition_num)
        self.state.keeper.decided()

    def expand(self, topic: str, partition_num: int) -> None:
        """Give a topic more partitions. Raises ClusterError."""
        partitions = self._partitions(topic)
        meta = partitions[0].meta
        if partition_num < len(partitions):
            raise ClusterError("the partition number can not be reduced")
        if not meta.may_share_nodes and meta.replica * partition_num > len(self.state.staying):
            raise ClusterError(NO_NODE)
        meta.partition_num = partition_num
        self._add_partitions(topic, meta, partition_num)
        self.state.keeper.decided()

    def upgrade_to_ext(self, topic: str) -> None:
        """Let a topic have ext headers from now on; consumers that cannot read them are disconnected."""
        for partition in self._partitions(topic):
            partition.meta.ext = True
            for replica in partition.set.replicas.values():
                replica.log.is_ext = True
            for channel in partition.channels.values():
                channel.disconnect(lambda client: not client.gets_ext)
        self.state.keeper.decided()

    def set_replica(self, topic: str, count: int) -> None:
        """Let a topic stand on more nodes, or on fewer. Raises ClusterError."""
        for partition in self._partitions(topic):
            partition.meta.replica = count
            self._coordinator.fit_replicas(partition)
        self.state.keeper.decided()

    def set_upkeep(self, topic: str, sync_every: int, retention_days: int) -> None:
        """Let messages of a topic go to the disk, and away, at other times; negative numbers change nothing.

        Raises ClusterError.
        """
        meta = self._partitions(topic)[0].meta
        meta.sync_every = sync_every if sync_every >= 0 else meta.sync_every
        meta.retention_days = retention_days if retention_days >= 0 else meta.retention_days
        self.state.keeper.decided()

    def set_channel_auto_create(self, topic: str, is_disabled: bool) -> None:
        """Let SUB create channels of a topic, or not. Raises ClusterError."""
        self._partitions(topic)[0].meta.disable_channel_auto_create = is_disabled
        self.state.keeper.decided()

    def check_new_channel(self, topic: str, channel: str) -> None:
        """Raise ClusterError unless ``register_channel`` may create it."""
        meta = self._partitions(topic)[0].meta
        if not meta.disable_channel_auto_create:
            raise ClusterError(f"channel auto create NOT disabled in topic {topic}")
        if channel in meta.channels:
            raise ClusterError(f"channel {channel} already registered")

    def register_channel(self, topic: str, channel: str) -> None:
        """Create a channel of a topic whose channels SUB does not create. Raises ClusterError."""
        self.check_new_channel(topic, channel)
        self._partitions(topic)[0].meta.channels.append(channel)
        self.state.keeper.decided()
        for partition in self._partitions(topic):
            partition.channel(channel)

    def has_registered(self, topic: str, channel: str) -> bool:
        """Whether it is a channel that ``unregister_channel`` deletes; False for topics that make them by SUB.

        Raises ClusterError where there is no such topic, or no such channel.
        """
        meta = self._partitions(topic)[0].meta
        if meta.disable_channel_auto_create and channel not in meta.channels:
            raise ClusterError(f"channel {channel} not registered")
        return meta.disable_channel_auto_create

    def unregister_channel(self, topic: str, channel: str) -> None:
        """Delete such a channel; nothing happens for other topics. Raises ClusterError."""
        if not self.has_registered(topic, channel):
            return
        self._partitions(topic)[0].meta.channels.remove(channel)
        self.state.keeper.decided()
        for partition in self._partitions(topic):
            partition.delete_channel(channel)

    def delete(self, topic: str) -> None:
        """Drop a topic with its messages, and disconnect its consumers. Raises ClusterError."""
        for partition in self._partitions(topic):
            partition.interrupt()
            for replica in partition.set.replicas.values():
                replica.log.delete()
        del self.state.topics[topic]
        self.state.keeper.decided()
        self.state.keeper.topic_deleted(topic)

    def _partitions(self, topic: str) -> list[Partition]:
        if topic not in self.state.topics:
            raise ClusterError("Key not found")
        return self.state.topics[topic]

    def _add_partitions(self, topic: str, meta: TopicMeta, count: int) -> None:
        partitions = self.state.topics[topic]
        while len(partitions) < count:
            replicas = self._place(partitions, topic, meta)
            made = Partition(topic, meta, len(partitions), replicas, self.state.keeper, is_kind=self._options.kind)
            partitions.append(made)
            for channel in meta.channels:
                partitions[-1].channel(channel)
            if self._options.ready_after:
                self._coordinator.begin(partitions[-1])

    def _place(self, siblings: list[Partition], topic: str, meta: TopicMeta) -> list[str]:
        """The nodes for one more partition, the first of them to lead: on the ring, or those with the least to do."""
        nodes = [node for node in self.state.node_ids if node in self.state.staying]
        if meta.may_share_nodes:
            return list(ring(topic, len(siblings), meta.replica, nodes))
        free = [node for node in nodes if not any(node in sibling.replicas for sibling in siblings)]
        leader, *others = sorted(free, key=self._counts)
        others.sort(key=lambda node: tuple(reversed(self._counts(node))))
        return [leader, *others[: meta.replica - 1]]

    def _counts(self, node: str) -> tuple[int, int]:
        """How many partitions a node leads, or is to lead, and how many it has."""
        everything = self.state.all_partitions()
        leads = sum(node == (partition.leader or partition.replicas[0]) for partition in everything)
        return leads, sum(node in partition.replicas for partition in everything)


# --- carries out what balancing wants --------------------------------------------------------------------------------
# One move after the other, whenever the cluster is stable.


_PAUSE = 0.1
"""Seconds after a move that failed, and between two looks at a node that cannot be emptied: others may be possible."""


class Balancer:
    """Moves partitions. Nodes that leave are emptied at once, the others balanced every ``balance_interval``, if any.

    Args:
        state: what the cluster knows.
        options: how often it looks.
        coordinator: carries out the moves.
    """

    def __init__(self, state: ClusterState, options: ClusterOptions, coordinator: Coordinator) -> None:
        self._state = state
        self._options = options
        self._coordinator = coordinator
        self._is_wanted = Event()
        self._told: set[str] = set()  # nodes of which it was said what they wait for
        self._loop: Greenlet[..., None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._loop = spawn(self._run)
        self._loop.name = "cluster-balancer"

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.kill()
            self._loop = None

    def empty(self, node: str) -> None:
        """A node is to have nothing in the end: it gets no more partitions, and others get those that it has."""
        self._state.leaving.add(node)
        self._is_wanted.set()

    def is_empty(self, node: str) -> bool:
        return not any(node in partition.replicas for partition in self._state.all_partitions())

    def balance(self) -> int:
        """Move until no move helps; how many there were. Raises ClusterError when one is refused."""
        count = 0
        while (move := self._next()) is not None:
            self._carry_out(move)
            count += 1
        return count

    # --- by itself ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        interval = self._options.balance_interval
        pause = interval or None
        while True:
            is_wanted = self._is_wanted.wait(pause)
            self._is_wanted.clear()
            try:
                if is_wanted or not interval:
                    self._empty_leaving()
                else:
                    self.balance()
            except ClusterError as error:
                logger.warning("a partition was not moved: %s; it is tried again", error, extra=BROKER_MOVE_FAILED)
                sleep(_PAUSE)
                self._is_wanted.set()
            else:
                pause = interval or (_PAUSE if self._tell_what_waits() else None)

    def _empty_leaving(self) -> None:
        while (move := self._next()) is not None and move.origin in self._state.leaving:
            self._carry_out(move)

    def _tell_what_waits(self) -> bool:
        """Whether a node is to leave and cannot yet; that is said once."""
        waiting = {node for node in self._state.leaving if not self.is_empty(node)}
        for node in waiting - self._told:
            logger.warning(
                "node %s is to leave, and stays for now: no other node can take %s; it is emptied as soon as one can:"
                " add a node, start one that is down, or let the topic have fewer replicas",
                node,
                ", ".join(each.name for each in self._state.all_partitions() if node in each.replicas),
                extra=BROKER_NODE_STAYS,
            )
        self._told = waiting
        return bool(waiting)

    # --- moves -------------------------------------------------------------------------------------------------------

    def _next(self) -> Move | None:
        while not self._coordinator.is_stable:
            sleep(_POLL)
        reachable = self._state.reachable
        placements = [
            Placement(
                partition.topic,
                partition.number,
                (partition.leader, *(node for node in partition.replicas if node != partition.leader)),
                partition.meta.may_share_nodes,
            )
            for partition in self._state.all_partitions()
            if partition.leader is not None
        ]
        nodes = [node for node in self._state.node_ids if node in reachable]
        return next_move(placements, nodes, self._state.leaving & reachable)

    def _carry_out(self, move: Move) -> None:
        self._coordinator.move(move.topic, move.number, move.origin, move.target, is_leader=move.is_leader)
