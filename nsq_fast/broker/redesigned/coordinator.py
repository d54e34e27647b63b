"""Decides who leads what: first leaders, takeovers, moves; and what an administrator does to topics and nodes.

Nodes send heartbeats. One that is silent for the detection time, ``takeover_delay``, is *lost*: others may lead what it
led, and it is trusted again when it is heard of. Each answer gives a node a *lease*, which is shorter than that; a node
whose lease has ended leads nothing. So a node leads no more before it can be replaced. As everything is in one process,
a node that can be reached is heard all the time, and one that cannot be is silent from that moment. The real server has
heartbeats and the detection time of etcd, and finds out about a leader that was replaced when it writes (youzan/nsq:
consistence/nsqd_node_etcd.go, ETCD_TTL; nsqlookup_coordinator.go, handleNsqdNodes).
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence

import mmh3
from gevent import Greenlet, sleep, spawn, spawn_later
from gevent.lock import Semaphore

from nsq_fast._lazy import get_logger
from nsq_fast.broker.message import ClusterError
from nsq_fast.broker.options import ClusterOptions
from nsq_fast.broker.redesigned.partition import MAX_PARTITIONS, MAX_SYNC_EVERY, ClusterState, Partition, TopicMeta
from nsq_fast.log_events import BROKER_NODE_STAYS, BROKER_REPLICA_FAILED, BROKER_REPLICA_RECOVERED

logger: logging.Logger = get_logger("nsq_fast.broker.redesigned.coordinator")

UNSTABLE = "the cluster is unstable"
NO_NODE = "ErrType:9 ErrCode:1 : No node is available for topic"
NO_TOPIC = "Key not found"
LEASE_SHARE = 0.8
"""The length of a lease, in detection times."""
_FIRST_RETRY, _LONGEST_RETRY = 0.1, 5.0
"""Seconds until a replica that could not be written is tried again: twice as long each time."""
LEAST_READINESS, LEAST_WRITABLE = 55 / 115, 96 / 117
"""The shortest times that were measured on real nodes, as shares of the longest: ``readiness``, ``writable_delay``."""
_POLL = 0.005
_PAUSE = 0.1
"""Seconds after a move that failed, and between two looks at a node that cannot be emptied: others may be possible."""


def ring(topic: str, number: int, replicas: int, nodes: Sequence[str]) -> tuple[str, ...]:
    """The nodes of a partition that may share them with others of its topic: the first of them leads it.

    They stand on a ring of all nodes, which begins at one that the name of the topic gives; the next partition begins
    one node further. None where there are fewer nodes than replicas (youzan/nsq: consistence/data_placement_mgr.go,
    getRebalancedMultiTopicPartitionsFromNameList, which sorts the ids of nodes).
    """
    if len(nodes) < replicas:
        return ()
    first = mmh3.hash(topic, 0, False) + number
    return tuple(nodes[(first + step) % len(nodes)] for step in range(replicas))


class Coordinator:
    """Decides who leads what, and moves it.

    Args:
        state: what it decides about.
        options: how long things take.
    """

    def __init__(self, state: ClusterState, options: ClusterOptions) -> None:
        self.state = state
        self.options = options
        self._trusted: set[str] = set()
        self._silent: dict[str, float] = {}  # since when nodes cannot be reached
        self._moving = Semaphore()
        self._retry: Greenlet[..., None] | None = None
        self._retry_delay = _FIRST_RETRY
        self._settles_at = 0.0
        self._told: set[str] = set()  # nodes of which it was said what they wait for
        self._emptying: Greenlet[..., None] | None = None

    # --- whether all is quiet ----------------------------------------------------------------------------------------

    @property
    def is_stable(self) -> bool:
        """Whether every partition has a leader that is alive, none is being moved, and nothing changed just now."""
        is_quiet = not self._moving.locked() and time.monotonic() >= self._settles_at
        return is_quiet and all(
            partition.leader in self.state.reachable and len(partition.in_sync) >= partition.quorum
            for partition in self.state.all_partitions()
        )

    def require_stable(self) -> None:
        if not self.is_stable:
            raise ClusterError(UNSTABLE)

    def _unsettle(self) -> None:
        """Something has changed: the cluster is not stable for a while."""
        self._settles_at = time.monotonic() + self.options.ready_after

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
        if self.options.ready_after:
            spawn_later(random.uniform(0, self.options.ready_after), self.catch_up)
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
        if self.options.kind:  # publishing does not wait until the death is noticed
            for partition in self.state.all_partitions():
                partition.shrink(self._trusted - {node})
        self._fall_silent(node)

    def isolate(self, node: str) -> None:
        """Cut a node off from the others and from the coordinator, though not from its clients."""
        self.state.isolated.add(node)
        self.state.lease_ends.setdefault(node, time.monotonic() + LEASE_SHARE * self.options.takeover_delay)
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
        spawn_later(self.options.takeover_delay, self._lose, node, since)

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
                if partition.serve() and self.options.writable_delay:
                    self._open_later(partition)
            if not self._moving.locked():
                self._register(partition)

    def _open_later(self, partition: Partition) -> None:
        """For a while a partition whose leader has died can only be read: writers find it nowhere."""
        partition.is_writable = False
        delay = random.uniform(LEAST_WRITABLE, 1.0) * self.options.writable_delay - self.options.takeover_delay
        spawn_later(max(0.0, delay), self._open, partition)

    def _open(self, partition: Partition) -> None:
        partition.is_writable = True
        self._register(partition)

    def _register(self, partition: Partition) -> None:
        if partition.is_writable and partition.leader in self._trusted & self.state.alive:
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

    def move_leader(self, topic: str, number: int, to: str | None = None) -> None:
        """Let another node lead a partition; returns when lookups show it. Raises ClusterError.

        Args:
            to: id of the node, which becomes a replica if it is none; by default some other replica.
        """
        partition = self.state.partition(topic, number)
        if partition is None:
            raise ClusterError(NO_TOPIC)
        if not self._moving.acquire(blocking=False):
            raise ClusterError(UNSTABLE)
        try:
            self._move(partition, to)
        finally:
            partition.is_writable = True
            self._moving.release()
            self._after_move()

    def _move(self, partition: Partition, to: str | None) -> None:
        former, reachable = partition.leader, self.state.reachable
        if former is None or former not in reachable:  # it would not know that it leads no more
            raise ClusterError(UNSTABLE)
        choices = [to] if to else [node for node in partition.in_sync if node != former]
        target = next((node for node in choices if node in reachable), None)
        if target is None:
            raise ClusterError("no other node can lead the partition")
        if target == former:
            return
        partition.is_writable = False
        sleep(self.options.move_step)
        is_guest = target not in partition.logs
        partition.add(target)
        if not partition.catch_up(target):
            raise ClusterError(UNSTABLE)
        partition.lead(target)
        partition.serve()
        partition.is_writable = False
        if is_guest:  # it takes the place of the one that led
            partition.drop(former)
        sleep(self.options.move_step)
        partition.is_writable = True
        sleep(self.options.move_step)

    def _after_move(self) -> None:
        self._unsettle()
        for partition in self.state.all_partitions():  # those that got a leader meanwhile had to wait
            self._register(partition)

    def _check(self, partition: Partition, origin: str, to: str, *, is_leader: bool) -> None:
        """Raise ClusterError for a move that cannot be (youzan/nsq: data_placement_mgr.go, tryMoveTopicPartition)."""
        siblings = self.state.topics[partition.topic]
        is_sibling = to not in partition.logs and any(to in each.logs for each in siblings)
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

    def move(self, partition: Partition, origin: str, to: str, *, is_leader: bool) -> None:
        """Move the leadership of a partition, or a replica that does not lead. Raises ClusterError."""
        self.require_stable()
        self._check(partition, origin, to, is_leader=is_leader)
        if is_leader:
            self.move_leader(partition.topic, partition.number, to)
            return
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
        spawn_later(self.options.migrate_delay, self._migrate)

    def _migrate(self) -> None:
        for partition in self.state.all_partitions():
            if not partition.is_new and len(partition.in_sync) < partition.meta.replica:
                self._fit_replicas(partition)

    def _fit_replicas(self, partition: Partition) -> None:
        """Give a partition more replicas, or fewer, until as many are in sync as its topic wants.

        Those on nodes that leave do not count. Nothing happens without a leader; and no replica goes before enough
        others are in sync.
        """
        meta, staying = partition.meta, self.state.staying
        if partition.leader not in self.state.reachable:
            return

        def are_enough(without: str = "") -> bool:
            return len(staying.intersection(partition.in_sync) - {without}) >= meta.replica

        for node in self._free(partition):
            if are_enough():
                break
            partition.add(node)
            partition.catch_up(node)
        first = [node for node in partition.logs if node not in partition.in_sync or node not in staying]
        for node in dict.fromkeys((*first, *partition.in_sync)):
            if node != partition.leader and len(partition.logs) > meta.replica and are_enough(without=node):
                partition.drop(node)

    def _free(self, partition: Partition) -> list[str]:
        """The nodes that may get a replica of a partition, the best first."""
        meta, on_ring, taken = partition.meta, tuple[str, ...](), set(partition.logs)
        if meta.may_share_nodes:
            on_ring = ring(partition.topic, partition.number, meta.replica, self._staying)
        else:
            taken.update(*(sibling.logs for sibling in self.state.topics[partition.topic]))
        load = Counter(node for each in self.state.all_partitions() for node in each.logs)
        return sorted(self.state.staying - taken, key=lambda node: (node not in on_ring, load[node]))

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
        if meta.nodes_for(partition_num) > len(self.state.staying):
            raise ClusterError(NO_NODE)

    def _add_partitions(self, topic: str, meta: TopicMeta) -> None:
        partitions = self.state.topics[topic]
        while len(partitions) < meta.partition_num:
            nodes = self._place(partitions, topic, meta)
            made = Partition(self.state, topic, meta, len(partitions), nodes, is_kind=self.options.kind)
            partitions.append(made)
            for channel in meta.channels:
                made.channel(channel)
            if self.options.ready_after:
                self._unsettle()
                made.wait_for_leader()
                least = LEAST_READINESS if self.options.timings == "real" else 0.0
                spawn_later(random.uniform(least, 1.0) * self.options.ready_after, self._begin, made)
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

    # --- nodes that leave --------------------------------------------------------------------------------------------

    def empty(self, node: str) -> None:
        """A node is to have nothing in the end: it gets no more partitions, and others get those that it has."""
        self.state.leaving.add(node)
        if not self._emptying:
            self._emptying = spawn(self._empty_nodes)
            self._emptying.name = "cluster-emptying"

    def stop(self) -> None:
        if self._emptying is not None:
            self._emptying.kill()

    def has_partitions(self, node: str) -> bool:
        return any(node in partition.logs for partition in self.state.all_partitions())

    def _empty_nodes(self) -> None:
        """Have partitions leave, one after the other, whenever the cluster is stable."""
        while True:
            for partition in self.state.all_partitions():
                while not self.is_stable:
                    sleep(_POLL)
                if self.state.leaving.intersection(partition.logs):
                    self._leave_nodes(partition)
            if not self._tell_what_waits():
                return
            sleep(_PAUSE)

    def _leave_nodes(self, partition: Partition) -> None:
        self._fit_replicas(partition)
        if partition.leader in self.state.leaving:
            target = next((node for node in partition.in_sync if node in self.state.staying), None)
            if target is not None:
                with contextlib.suppress(ClusterError):  # it is tried again
                    self.move_leader(partition.topic, partition.number, target)
                self._fit_replicas(partition)
        self._unsettle()

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
