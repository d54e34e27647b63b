"""Decides who leads what: first leaders, takeovers, moves, balancing; and what an administrator does to topics.

Nodes send heartbeats. One that is silent for the detection time, ``takeover_delay``, is *lost*: others may lead what it
led, and it is trusted again when it is heard of. Each answer gives a node a *lease*, which is shorter than that; a node
whose lease has ended leads nothing. So a node leads no more before it can be replaced. As everything is in one process,
a node that can be reached is heard all the time, and one that cannot be is silent from that moment. The real server has
heartbeats and the detection time of etcd, and finds out about a leader that was replaced when it writes (youzan/nsq:
consistence/nsqd_node_etcd.go, ETCD_TTL; nsqlookup_coordinator.go, handleNsqdNodes).
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import mmh3
from gevent import Greenlet, sleep, spawn, spawn_later
from gevent.event import Event
from gevent.lock import Semaphore

from nsq_fast.broker.options import ClusterOptions
from nsq_fast.broker.redesigned.partition import MAX_PARTITIONS, MAX_SYNC_EVERY, ClusterState, Partition, TopicMeta
from nsq_fast.errors import NsqError
from nsq_fast.log_events import BROKER_MOVE_FAILED, BROKER_NODE_STAYS, BROKER_REPLICA_FAILED, BROKER_REPLICA_RECOVERED

logger = logging.getLogger("nsq_fast.broker.redesigned.coordinator")

UNSTABLE = "the cluster is unstable"
SAME_NODE = "move to and from node can not be the same"
NO_NODE = "ErrType:9 ErrCode:1 : No node is available for topic"
NO_TOPIC = "Key not found"
LEASE_SHARE = 0.8
"""The length of a lease, in detection times."""
_FIRST_RETRY, _LONGEST_RETRY = 0.1, 5.0
"""Seconds until a replica that could not be written is tried again: twice as long each time."""
_POLL = 0.005
_PAUSE = 0.1
"""Seconds after a move that failed, and between two looks at a node that cannot be emptied: others may be possible."""


class ClusterError(NsqError):
    """The cluster refuses what an administrator asks for; the text is what the server would answer."""


# --- where partitions are to stand, and which to move so that nodes have the same to do. No clock, no I/O ------------
# The partitions of a topic that may share nodes stand on a *ring* of all nodes, which begins at a node that the name
# of the topic gives: the first node of a partition leads it, the next ones have its replicas, and the next partition
# begins one node further. Others are moved: away from nodes that leave, then until the nodes have the same number of
# leaders, and of replicas (youzan/nsq: consistence/data_placement_mgr.go,
# getRebalancedMultiTopicPartitionsFromNameList; nsqlookup_coordinator.go, processRemovingNodes).


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
    """Where a partition stands: the first of the nodes leads it. If it ``may_share`` them, it stands on the ring."""

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


def next_move(placements: Sequence[Placement], nodes: Sequence[str], leaving: Collection[str] = ()) -> Move | None:
    """The move that helps most; None when none does.

    Each move lowers a cost, whose parts are compared in this order, so that moves come to an end: replicas on nodes
    that leave, leaders there, how far partitions are off the ring, and the sums of the squares of how many leaders, and
    replicas, the nodes have.

    Args:
        nodes: those that can be talked to, in the order of the ring.
        leaving: those of them that are to have nothing in the end.
    """
    staying = [node for node in nodes if node not in leaving]
    leaders = Counter(each.nodes[0] for each in placements)
    replicas = Counter(node for each in placements for node in each.nodes)
    of_topic = {(each.topic, node) for each in placements for node in each.nodes}
    best, least = None, (0, 0, 0, 0, 0)
    for place in placements:
        leader, *others = place.nodes
        on_ring = ring(place.topic, place.number, len(place.nodes), staying) if place.may_share else ()
        for target in staying if leader in nodes else ():
            is_copied = target not in place.nodes
            if target == leader or (is_copied and not place.may_share and (place.topic, target) in of_topic):
                continue
            for origin in (leader, *others) if is_copied else (leader,):
                if origin not in nodes:
                    continue
                is_leader, leaves = origin == leader, origin in leaving
                off = _change_of_ring(place, origin, target, on_ring) if on_ring else 0
                cost = (
                    -(leaves and is_copied),
                    -(leaves and is_leader),
                    off,
                    0 if on_ring or not is_leader else leaders[target] - leaders[origin] + 1,
                    0 if on_ring or not is_copied else replicas[target] - replicas[origin] + 1,
                )
                if cost < least:
                    best, least = Move(place.topic, place.number, origin, target, is_leader), cost
    return best


def _change_of_ring(place: Placement, origin: str, target: str, on_ring: tuple[str, ...]) -> int:
    """By how much a move brings a partition nearer to its nodes on the ring."""
    leader, nodes, wanted = place.nodes[0], set(place.nodes), set(on_ring)
    nodes_then = nodes if target in nodes else nodes - {origin} | {target}
    leader_then = target if origin == leader else leader
    return 2 * (len(wanted - nodes_then) - len(wanted - nodes)) + (leader_then != on_ring[0]) - (leader != on_ring[0])


class Coordinator:
    """Decides who leads what, and moves it.

    Args:
        state: what it decides about.
        options: how long things take.
    """

    def __init__(self, state: ClusterState, options: ClusterOptions) -> None:
        self.state = state
        self._options = options
        self._trusted: set[str] = set()
        self._silent: dict[str, float] = {}  # since when nodes cannot be reached
        self._moving = Semaphore()
        self._retry: Greenlet[..., None] | None = None
        self._retry_delay = _FIRST_RETRY
        self._settles_at = 0.0
        self._is_wanted = Event()
        self._told: set[str] = set()  # nodes of which it was said what they wait for
        self._balancer: Greenlet[..., None] | None = None

    # --- whether all is quiet ----------------------------------------------------------------------------------------

    @property
    def is_stable(self) -> bool:
        """Whether every partition has a leader that is alive, none is being moved, and nothing changed just now."""
        is_quiet = not self._moving.locked() and time.monotonic() >= self._settles_at
        return (
            is_quiet
            and not self.state.is_upgrading
            and all(
                partition.leader in self.state.reachable and len(partition.in_sync) >= partition.quorum
                for partition in self.state.all_partitions()
            )
        )

    def require_stable(self) -> None:
        if not self.is_stable:
            raise ClusterError(UNSTABLE)

    def _unsettle(self) -> None:
        """Something has changed: the cluster is not stable for a while."""
        self._settles_at = time.monotonic() + self._options.ready_after

    # --- nodes that come and go --------------------------------------------------------------------------------------

    def node_started(self, node: str) -> None:
        """A node runs, or can be reached again: its replicas catch up in a while."""
        self._unsettle()
        self.state.alive.add(node)
        if node in self.state.isolated:
            self.state.lease_ends[node] = 0.0
        else:
            self._trusted.add(node)
            self._silent.pop(node, None)
        self._elect()
        if self._options.ready_after:
            spawn_later(random.uniform(0, self._options.ready_after), self.catch_up)
        else:
            self.catch_up()

    def node_ended(self, node: str) -> None:
        """A node has gone, well or badly: after a while others lead what it led."""
        self._unsettle()
        self.state.alive.discard(node)
        if not self.has_partitions(node):
            self.state.leaving.discard(node)  # it has left; if it comes again, it is a new one
        for partition in self.state.led_by(node):
            partition.interrupt()
            partition.registered = None
        if self._options.kind:  # publishing does not wait until the death is noticed
            for partition in self.state.all_partitions():
                partition.shrink(self._trusted - {node})
        self._fall_silent(node)

    def isolate(self, node: str) -> None:
        """Cut a node off from the others and from the coordinator, though not from its clients."""
        self.state.isolated.add(node)
        self.state.lease_ends.setdefault(node, time.monotonic() + LEASE_SHARE * self._options.takeover_delay)
        for partition in self.state.all_partitions():
            partition.stale.setdefault(node, partition.decision)
        self._fall_silent(node)

    def heal(self, node: str) -> None:
        """End what ``isolate`` has begun."""
        self.state.isolated.discard(node)
        self.state.lease_ends.pop(node, None)
        for partition in self.state.all_partitions():
            partition.stale.pop(node, None)
        if node in self.state.alive:
            self.node_started(node)

    def _fall_silent(self, node: str) -> None:
        since = self._silent.setdefault(node, time.monotonic())
        spawn_later(self._options.takeover_delay, self._lose, node, since)

    def _lose(self, node: str, since: float) -> None:
        """Trust a node no more, unless it was heard of meanwhile; others get its replicas later, if it stays away."""
        if self._silent.get(node) == since and node in self._trusted:
            self._trusted.discard(node)
            self._unsettle()
            self._migrate_later()
            self._elect()

    def _elect(self) -> None:
        for partition in self.state.all_partitions():
            if not partition.is_new:
                partition.elect(self._trusted)
                partition.serve()
            if not self._moving.locked():
                self._register(partition)

    def _register(self, partition: Partition) -> None:
        if partition.leader in self._trusted & self.state.alive:
            partition.registered = partition.leader

    def restored(self) -> None:
        """Partitions are back after all nodes had ended: their leaders serve, and other replicas catch up."""
        self._unsettle()
        self._elect()
        self.catch_up()

    # --- moves of leaders and of replicas, one at a time -------------------------------------------------------------
    # A move of a leader goes through the stages that clients of a real cluster see: the old leader takes no more
    # publishes; its consumers lose their connections and it is no longer the leader; the new one begins to serve, then
    # to take publishes; lookups show it.

    def move_leader(self, topic: str, number: int, to: str | None = None, origin: str | None = None) -> None:
        """Let another node lead a partition; returns when lookups show it. Raises ClusterError.

        Args:
            to: id of the node, which becomes a replica if it is none; by default some other replica.
            origin: id of the node that must lead it now, if one is named.
        """
        partition = self.state.partition(topic, number)
        if partition is None:
            raise ClusterError(NO_TOPIC)
        if not self._moving.acquire(blocking=False):
            raise ClusterError(UNSTABLE)
        try:
            self._move(partition, to, origin)
        finally:
            partition.is_writable = True
            self._moving.release()
            self._after_move()

    def _move(self, partition: Partition, to: str | None, origin: str | None) -> None:
        former, reachable = partition.leader, self.state.reachable
        if former is None or former not in reachable:  # it would not know that it leads no more
            raise ClusterError(UNSTABLE)
        if origin and origin != former:
            raise ClusterError("move from not the topic leader")
        choices = [to] if to else [node for node in partition.in_sync if node != former]
        target = next((node for node in choices if node in reachable), None)
        if target is None:
            raise ClusterError("no other node can lead the partition")
        if target == former:
            return
        partition.is_writable = False
        sleep(self._options.move_step)
        is_guest = target not in partition.logs
        partition.add(target)
        if not partition.catch_up(target):
            raise ClusterError(UNSTABLE)
        partition.lead(target)
        partition.serve()
        partition.is_writable = False
        if is_guest:  # it takes the place of the one that led
            partition.drop(former)
        sleep(self._options.move_step)
        partition.is_writable = True
        sleep(self._options.move_step)

    def _after_move(self) -> None:
        self._unsettle()
        for partition in self.state.all_partitions():  # those that got a leader meanwhile had to wait
            self._register(partition)

    def check(self, topic: str, number: int, origin: str, to: str, *, is_leader: bool) -> None:
        """Raise ClusterError for a move that cannot be (youzan/nsq: data_placement_mgr.go, tryMoveTopicPartition)."""
        partition = self.state.partition(topic, number)
        if origin == to:
            raise ClusterError(SAME_NODE)
        if partition is None:
            raise ClusterError(NO_TOPIC)
        is_sibling = to not in partition.logs and any(to in each.logs for each in self.state.topics[topic])
        for is_wrong, text in (
            (is_leader and origin != partition.leader, "move from not the topic leader"),
            (not is_leader and origin == partition.leader, "can not move leader without moveleader param"),
            (not is_leader and origin not in partition.logs, "the move source node has no replica for the topic"),
            (not is_leader and to in partition.logs, "the move destination has the topic data already"),
            (to not in self.state.staying, "the move destination is not found in cluster"),
            (origin not in self.state.alive, "the move source data is lost in cluster"),
            (is_sibling and not partition.meta.may_share_nodes, "destination node is excluded for topic"),
        ):
            if is_wrong:
                raise ClusterError(text)

    def move(self, topic: str, number: int, origin: str, to: str, *, is_leader: bool) -> None:
        """Move the leadership of a partition, or a replica that does not lead. Raises ClusterError."""
        if is_leader:
            self.move_leader(topic, number, to, origin)
            return
        self.check(topic, number, origin, to, is_leader=False)
        partition = self.state.topics[topic][number]
        partition.add(to)
        if not partition.catch_up(to):
            partition.logs.pop(to)
            raise ClusterError(UNSTABLE)
        partition.drop(origin)
        self._after_move()

    # --- replicas that are not in sync -------------------------------------------------------------------------------
    # Those that were away, those whose disk failed, and others in place of both.

    def catch_up(self) -> None:
        """Let replicas that are not in sync have what their leaders have; one that cannot be written is tried again."""
        is_done = True
        for partition in self.state.all_partitions():
            for node in self.state.reachable.intersection(partition.logs).difference(partition.in_sync):
                if partition.catch_up(node):
                    logger.info("%s has all of %s again", node, partition.name, extra=BROKER_REPLICA_RECOVERED)
                elif partition.leader in self.state.reachable:
                    is_done = False
        if is_done:
            self._retry_delay = _FIRST_RETRY
        else:
            self._retry_later()

    def replica_failed(self, partition: Partition, node: str, error: OSError) -> bool:
        """A replica cannot be written: it is out of sync until it can; False when it has to stay in sync."""
        if partition.leader not in self.state.reachable or not partition.leave(node):
            return False
        self._unsettle()
        logger.error(
            "%s cannot write its replica of %s: %s; it is out of sync until it can, %d are in sync, and publishing"
            " needs %d; it is tried again",
            node, partition.name, error, len(partition.in_sync), partition.quorum, extra=BROKER_REPLICA_FAILED,
        )  # fmt: skip
        self._retry_later()
        self._migrate_later()
        return True

    def _retry_later(self) -> None:
        if not self._retry:
            self._retry = spawn_later(self._retry_delay, self._try_again)
            self._retry_delay = min(2 * self._retry_delay, _LONGEST_RETRY)

    def _try_again(self) -> None:
        self._retry = None
        self.catch_up()

    def _migrate_later(self) -> None:
        """Give replicas that are not in sync after ``migrate_delay`` to other nodes."""
        spawn_later(self._options.migrate_delay, self._migrate)

    def _migrate(self) -> None:
        for partition in self.state.all_partitions():
            if not partition.is_new and len(partition.in_sync) < partition.meta.replica:
                self._fit_replicas(partition)

    def _fit_replicas(self, partition: Partition) -> None:
        """Give a partition more replicas, or fewer, until as many are in sync as its topic wants.

        Nothing happens without a leader; and no replica goes before enough others are in sync.
        """
        wanted, meta = partition.meta.replica, partition.meta
        if partition.leader not in self.state.reachable:
            return
        on_ring = ring(partition.topic, partition.number, wanted, self._staying) if meta.may_share_nodes else ()
        load = Counter(node for each in self.state.all_partitions() for node in each.logs)
        free = self.state.staying.difference(partition.logs)
        for node in sorted(free, key=lambda node: (node not in on_ring, load[node])):
            if len(partition.in_sync) >= wanted:
                break
            partition.add(node)
            partition.catch_up(node)
        late = [node for node in partition.logs if node not in partition.in_sync]
        for node in [*late, *(node for node in partition.in_sync if node != partition.leader)]:
            if len(partition.logs) > wanted and len(set(partition.in_sync) - {node}) >= wanted:
                partition.drop(node)

    @property
    def _staying(self) -> list[str]:
        return [node for node in self.state.node_ids if node in self.state.staying]

    # --- topics ------------------------------------------------------------------------------------------------------

    def create(self, topic: str, meta: TopicMeta) -> None:
        """Create a topic; nothing happens when it exists just so. Raises ClusterError."""
        if meta.partition_num >= MAX_PARTITIONS:
            raise ClusterError("max partition allowed exceed")
        self._require_nodes(meta, meta.partition_num)
        meta.sync_every = min(meta.sync_every, MAX_SYNC_EVERY)
        existing = self.state.topics.get(topic)
        if existing:
            if not existing[0].meta.is_same(meta):
                raise ClusterError("already exist")
            return
        meta.magic_code = time.time_ns()
        self.state.topics[topic] = []
        self._add_partitions(topic, meta)

    def expand(self, topic: str, partition_num: int) -> None:
        """Give a topic more partitions. Raises ClusterError."""
        partitions = self._partitions(topic)
        meta = partitions[0].meta
        if partition_num < len(partitions):
            raise ClusterError("the partition number can not be reduced")
        if not meta.may_share_nodes:
            self._require_nodes(meta, partition_num)
        meta.partition_num = partition_num
        self._add_partitions(topic, meta)

    def _require_nodes(self, meta: TopicMeta, partition_num: int) -> None:
        if meta.replica * (1 if meta.may_share_nodes else partition_num) > len(self.state.staying):
            raise ClusterError(NO_NODE)

    def _add_partitions(self, topic: str, meta: TopicMeta) -> None:
        partitions = self.state.topics[topic]
        while len(partitions) < meta.partition_num:
            nodes = self._place(partitions, topic, meta)
            made = Partition(self.state, topic, meta, len(partitions), nodes, is_kind=self._options.kind)
            partitions.append(made)
            for channel in meta.channels:
                made.channel(channel)
            if self._options.ready_after:
                self._unsettle()
                made.wait_for_leader()
                spawn_later(random.uniform(0, self._options.ready_after), self._begin, made)
        self.state.keeper.decided()

    def _begin(self, partition: Partition) -> None:
        partition.is_new = False
        self._elect()

    def _place(self, siblings: list[Partition], topic: str, meta: TopicMeta) -> list[str]:
        """The nodes for one more partition, the first of them to lead: on the ring, or those with the least to do."""
        if meta.may_share_nodes:
            return list(ring(topic, len(siblings), meta.replica, self._staying))
        everything = self.state.all_partitions()
        leads = Counter(each.leader or each.replicas[0] for each in everything)
        has = Counter(node for each in everything for node in each.logs)
        free = [node for node in self._staying if not any(node in sibling.logs for sibling in siblings)]
        leader, *others = sorted(free, key=lambda node: (leads[node], has[node]))
        others.sort(key=lambda node: (has[node], leads[node]))
        return [leader, *others[: meta.replica - 1]]

    def wait_leaders(self, topic: str) -> None:
        """Return when every partition of a topic that is new has its first leader."""
        while any(partition.is_new for partition in self._partitions(topic)):
            sleep(_POLL)

    def update(
        self, topic: str, *, replica: int | None, sync_every: int, retention_days: int, upgrade_ext: bool
    ) -> None:
        """Change a topic: on how many nodes it stands, when its messages go to the disk and away, that it has headers.

        Consumers that cannot read headers are disconnected. Negative numbers change nothing. Raises ClusterError.
        """
        partitions = self._partitions(topic)
        meta = partitions[0].meta
        meta.sync_every = sync_every if sync_every >= 0 else meta.sync_every
        meta.retention_days = retention_days if retention_days >= 0 else meta.retention_days
        for partition in partitions if replica is not None else ():
            meta.replica = replica or 0
            self._fit_replicas(partition)
        for partition in partitions if upgrade_ext else ():
            meta.ext = True
            for log in partition.logs.values():
                log.is_ext = True
            for channel in partition.channels.values():
                channel.disconnect(lambda client: not client.gets_ext)
        self.state.keeper.decided()

    def set_channel_auto_create(self, topic: str, is_disabled: bool) -> None:
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
        """Create a channel of a topic whose channels SUB does not create."""
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
        self._partitions(topic)[0].meta.channels.remove(channel)
        self.state.keeper.decided()
        for partition in self._partitions(topic):
            partition.delete_channel(channel)

    def delete(self, topic: str) -> None:
        """Drop a topic with its messages, and disconnect its consumers. Raises ClusterError."""
        for partition in self._partitions(topic):
            partition.interrupt()
            for log in partition.logs.values():
                log.delete()
        del self.state.topics[topic]
        self.state.keeper.decided()
        self.state.keeper.topic_deleted(topic)

    def _partitions(self, topic: str) -> list[Partition]:
        if topic not in self.state.topics:
            raise ClusterError(NO_TOPIC)
        return self.state.topics[topic]

    # --- balancing ---------------------------------------------------------------------------------------------------
    # One move after the other, whenever the cluster is stable. Nodes that leave are emptied at once, the others
    # balanced every ``balance_interval``, if any.

    def start(self) -> None:
        self._balancer = spawn(self._run)
        self._balancer.name = "cluster-balancer"

    def stop(self) -> None:
        if self._balancer is not None:
            self._balancer.kill()
            self._balancer = None

    def empty(self, node: str) -> None:
        """A node is to have nothing in the end: it gets no more partitions, and others get those that it has."""
        self.state.leaving.add(node)
        self._is_wanted.set()

    def has_partitions(self, node: str) -> bool:
        return any(node in partition.logs for partition in self.state.all_partitions())

    def balance(self, is_wanted: Callable[[Move], bool] = lambda move: True) -> int:
        """Move until no move helps, or is wanted; how many there were. Raises ClusterError when one is refused."""
        count = 0
        while (move := self._next()) is not None and is_wanted(move):
            self.move(move.topic, move.number, move.origin, move.target, is_leader=move.is_leader)
            count += 1
        return count

    def _run(self) -> None:
        interval = self._options.balance_interval
        pause = interval or None
        while True:
            is_wanted = self._is_wanted.wait(pause)
            self._is_wanted.clear()
            try:
                if is_wanted or not interval:
                    self.balance(lambda move: move.origin in self.state.leaving)
                else:
                    self.balance()
            except ClusterError as error:
                logger.warning("a partition was not moved: %s; it is tried again", error, extra=BROKER_MOVE_FAILED)
                sleep(_PAUSE)
                self._is_wanted.set()
            else:
                pause = interval or (_PAUSE if self._tell_what_waits() else None)

    def _next(self) -> Move | None:
        while not self.is_stable:
            sleep(_POLL)
        reachable = self.state.reachable
        placements = [
            Placement(
                partition.topic,
                partition.number,
                (partition.leader, *(node for node in partition.logs if node != partition.leader)),
                partition.meta.may_share_nodes,
            )
            for partition in self.state.all_partitions()
            if partition.leader is not None
        ]
        nodes = [node for node in self.state.node_ids if node in reachable]
        return next_move(placements, nodes, self.state.leaving & reachable)

    def _tell_what_waits(self) -> bool:
        """Whether a node is to leave and cannot yet; that is said once."""
        waiting = {node for node in self.state.leaving if self.has_partitions(node)}
        for node in waiting - self._told:
            logger.warning(
                "node %s is to leave, and stays for now: no other node can take %s; it is emptied as soon as one can:"
                " add a node, start one that is down, or let the topic have fewer replicas",
                node,
                ", ".join(each.name for each in self.state.all_partitions() if node in each.logs),
                extra=BROKER_NODE_STAYS,
            )
        self._told = waiting
        return bool(waiting)
