"""A partition: its replicas, who leads, when a write is confirmed; its topic; the nodes; and what they all know.

A partition stands on some nodes; each has a log of its own. What is decided about a partition, who leads it and which
replicas are in sync (the ISR), is a ``Decision`` with a number, the epoch. Nodes know every decision, but for those
that are cut off: they know the last one from before.

- A write is confirmed when every replica of the ISR that the leader knows has it. One that is cut off reaches none of
  the others, so that a leader which was replaced, and does not know it, confirms nothing.
- Only a replica of the ISR becomes leader; so what was confirmed is in the log of every later leader.
- A leader without a lease refuses writes, also where it is the only one in sync.

A partition whose replicas in sync are all dead has no leader until one of them is back. What happens when, is for the
``coordinator``. youzan/nsq: consistence/nsqd_coordinator_cluster_write.go, doSyncOpToCluster;
nsqlookup_coordinator.go, handleTopicLeaderElection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gevent import Greenlet, sleep, spawn

from nsq_fast._lazy import get_logger
from nsq_fast.broker.journal import Trouble, for_each
from nsq_fast.broker.nsqd import Host
from nsq_fast.broker.options import NsqdOptions
from nsq_fast.broker.redesigned.channel import PartitionChannel, Trace
from nsq_fast.broker.redesigned.log import Draft, PartitionLog, Record
from nsq_fast.errors import NotLeader, NotWritable, TopicNotExist

if TYPE_CHECKING:
    from nsq_fast.broker.redesigned.coordinator import Coordinator

logger: logging.Logger = get_logger("nsq_fast.broker.redesigned.partition")

MAX_PARTITIONS = 255
MAX_SYNC_EVERY = 4000
MAX_RETENTION_DAYS = 60
DEFAULT_RETENTION_DAYS = 7
NO_PARTITION = -1
_DAY = 24 * 3600 * 1_000_000_000
RETAINED_RECORDS = 100_000
"""So many records that are done stay in a log, to be found again."""
_POLL = 0.01
CLEAN_INTERVAL = 60.0
"""Seconds between two looks for messages that are older than their retention."""


@dataclasses.dataclass
class TopicMeta:
    """How a topic was created.

    Attributes:
        sync_every: so many messages go to the disk itself at once, where there is a data path; 0: none does.
        retention_days: messages that all channels are done with go after so long; 0 is DEFAULT_RETENTION_DAYS.
        magic_code: tells it from another topic that had its name: data of that one are not its own.
        channels: those registered, where they are not made by SUB.
    """

    partition_num: int
    replica: int
    ordered: bool = False
    ext: bool = False
    multi_part: bool = False
    disable_channel_auto_create: bool = False
    sync_every: int = 0
    retention_days: int = 0
    magic_code: int = 0
    channels: list[str] = dataclasses.field(default_factory=list)

    @property
    def may_share_nodes(self) -> bool:
        """Whether a node may have several partitions of the topic."""
        return self.ordered or self.multi_part

    def nodes_for(self, partitions: int) -> int:
        """How many nodes so many partitions of the topic need."""
        return self.replica * (1 if self.may_share_nodes else partitions)

    def is_same(self, other: TopicMeta) -> bool:
        """Whether a topic that is created like that is the same."""
        mine, theirs = (dataclasses.replace(each, magic_code=0, channels=[]) for each in (self, other))
        return mine == theirs

    def public(self) -> dict[str, object]:
        return {
            "partition_num": self.partition_num,
            "replica": self.replica,
            "extend_support": self.ext,
            "ordered": self.ordered,
            "multi_part": self.multi_part,
            "disable_channel_auto_create": self.disable_channel_auto_create,
        }


class Decision(NamedTuple):
    """Under ``epoch`` the partition has this leader, or none, and these replicas are in sync."""

    epoch: int
    leader: str | None
    isr: tuple[str, ...]


class ReplicaFailed(Exception):
    """A replica in sync, of this node, cannot write; the OSError is the cause."""

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self.node = node


class Unreachable(NotWritable):
    """A replica in sync, of this node, does not answer."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self.node = node


class Partition:
    """One partition of a topic.

    Args:
        nodes: ids of the nodes that it stands on; the first is to lead.
        last: the last decision about it, where it has survived the process.

    Attributes:
        logs: of its replicas, in sync or not, by node; ``log``: of the one that serves.
        decision: the last one.
        stale: what nodes that are cut off know in its place.
        is_writable: whether the leader takes publishes.
        registered: the node that lookups show for publishers; None while the leader changes.
        is_new: whether it waits for its first leader.
        trace: what the node that serves it traces.
    """

    def __init__(
        self,
        state: ClusterState,
        topic: str,
        meta: TopicMeta,
        number: int,
        nodes: list[str],
        *,
        last: Decision | None = None,
        is_kind: bool = False,
    ) -> None:
        self._is_kind = is_kind
        self._state = state
        self.topic = topic
        self.meta = meta
        self.number = number
        self.name: str = f"{topic}-{number}"
        self.logs: dict[str, PartitionLog] = {}
        for node in nodes:
            self.add(node)
        self.decision: Decision = Decision(1, nodes[0], tuple(nodes))
        self.stale: dict[str, Decision] = {}
        self._failed: set[str] = set()
        self.is_new: bool = False
        if last is not None:
            self._restore(last)
        self.is_writable: bool = True
        self._serving = self.leader or nodes[0]
        self.registered: str | None = self._serving
        self.log: PartitionLog = self.logs[self._serving]
        self.channels: dict[str, PartitionChannel] = {}
        self.failed_count = 0
        self._syncing = Trouble(
            logger,
            f"failed to bring messages of {self.name} to the disk itself: %s; they are written, but a power loss may"
            " take them",
            f"messages of {self.name} reach the disk itself again",
        )
        self._traces: dict[str, Trace] = {}
        self.trace: Trace = self.trace_of(self._serving)

    @property
    def replicas(self) -> list[str]:
        """Ids of the nodes it stands on, in sync or not."""
        return list(self.logs)

    @property
    def leader(self) -> str | None:
        """Id of the node that serves it, which may be dead; None when there is none."""
        return None if self.is_new else self.decision.leader

    @property
    def in_sync(self) -> tuple[str, ...]:
        """Ids of the nodes that have every confirmed write."""
        return self.decision.isr

    @property
    def epoch(self) -> int:
        return self.decision.epoch

    @property
    def quorum(self) -> int:
        """How many replicas must be in sync for publishing (youzan/nsq: consistence, handleSyncResult)."""
        return 1 if self._is_kind else self.meta.replica // 2 + 1

    # --- decisions ---------------------------------------------------------------------------------------------------

    def _decide(self, leader: str | None, isr: tuple[str, ...]) -> None:
        self.decision = Decision(self.decision.epoch + 1, leader, isr)
        self._state.keeper.decided()

    def _restore(self, last: Decision) -> None:
        """Decide anew after all nodes have ended, by the last decision and the logs that are there.

        The longest log of the ISR leads: it has every confirmed write. A shorter one lacks a write that was on its way
        at the end, or was damaged: it catches up.
        """
        isr = tuple(node for node in last.isr if node in self.logs)
        self.decision = Decision(last.epoch, None, isr)
        if isr:
            end = max(self.logs[node].end for node in isr)
            whole = tuple(node for node in isr if self.logs[node].end == end)
            self._decide(last.leader if last.leader in whole else whole[0], whole)

    def elect(self, trusted: Container[str]) -> None:
        """Have the first in sync that is trusted lead in place of one that is not, or nobody; and ``shrink``."""
        _, leader, isr = self.decision
        if leader is None or leader not in trusted:
            found = next((node for node in isr if node in trusted), None)
            if found != leader:
                self._decide(found, isr)
        self.shrink(trusted)

    def shrink(self, trusted: Container[str]) -> None:
        """Take those that are not trusted out of the ISR, if there is a leader."""
        _, leader, isr = self.decision
        kept = tuple(node for node in isr if node in trusted)
        if leader in kept and kept != isr:
            self._decide(leader, kept)

    def leave(self, node: str) -> bool:
        """Take a replica out of the ISR that cannot write; False when it has to stay.

        It stays where half of the replicas or fewer are in sync; so does the leader (youzan/nsq: consistence/
        nsqlookup_coordinator.go, handleLeaveFromISR).
        """
        _, leader, isr = self.decision
        if node == leader or node not in isr or len(isr) <= len(self.logs) // 2:
            return False
        self._failed.add(node)
        self._decide(leader, tuple(each for each in isr if each != node))
        return True

    def catch_up(self, node: str) -> bool:
        """Let a replica have what the leader has, and be in sync; False when that cannot be now.

        One that could not write has to write all that it has: it may lack nothing, and be as unable as before.
        """
        _, leader, isr = self.decision
        if leader is None or not {leader, node} <= self._state.reachable:
            return False
        try:
            if node in self._failed:
                self.logs[node].rewrite()
            self.logs[node].copy(self.logs[leader])
        except OSError:
            return False
        self._failed.discard(node)
        if node not in isr:
            self._decide(leader, (*isr, node))
        return True

    def lead(self, node: str) -> None:
        assert node in self.in_sync
        self._decide(node, self.in_sync)

    def add(self, node: str) -> None:
        """Have a replica on one more node, which is not in sync yet."""
        if node not in self.logs:
            path = self._state.keeper.log_path(node, self.topic, self.number)
            self.logs[node] = PartitionLog(self.number, self.meta.ext, path, self.meta.magic_code)

    def drop(self, node: str) -> None:
        """Have no replica on a node that does not lead."""
        _, leader, isr = self.decision
        assert node != leader
        if node in isr:
            self._decide(leader, tuple(each for each in isr if each != node))
        self._failed.discard(node)
        log = self.logs.pop(node, None)
        if log is not None:
            # A file that cannot be removed is in nobody's way: the replica catches up with the leader if it is back.
            with contextlib.suppress(OSError):
                log.delete()

    def wait_for_leader(self) -> None:
        """Be without a leader, as a new partition is at first."""
        self.is_new, self.registered = True, None

    def serve(self) -> bool:
        """Let channels go on with the log of the leader, if it is another one than before; whether it is."""
        leader = self.leader
        is_another = leader is not None and leader != self._serving
        if leader is not None and is_another:
            self._serving, self.registered, self.is_writable = leader, None, True
            self.log = self.logs[leader]
            self._follow_trace()
            for channel in self.channels.values():
                channel.interrupt(self.log)
        return is_another

    # --- publishing --------------------------------------------------------------------------------------------------

    def append(self, node: str, drafts: Sequence[Draft]) -> list[Record]:
        """Store messages by what a node knows, as the leader, on every replica in sync; the records are confirmed.

        Raises NotLeader when it is not the leader; NotWritable when too few replicas are in sync; Unreachable,
        ReplicaFailed when another one does not answer, or cannot write; NotWritable, with an OSError as the cause, when
        this one cannot.
        """
        _, leader, isr = self.stale.get(node, self.decision)
        log = self.logs.get(node)
        if log is None or self.is_new:
            raise NotLeader
        if leader == node and not self.is_writable:
            raise NotWritable
        if leader != node or not self._state.has_lease(node):
            raise NotLeader
        if len(isr) < self.quorum:
            raise NotWritable
        begin = log.end
        try:
            records = log.append(drafts)
            try:
                for other in isr:
                    if other != node:
                        self._share(log, node, other)
            except Exception:
                log.truncate(begin)
                raise
        except OSError as error:
            raise NotWritable from error
        return records

    def _share(self, log: PartitionLog, node: str, other: str) -> None:
        if other not in self.logs or not self._state.can_reach(node, other):
            raise Unreachable(other)
        try:
            self.logs[other].copy(log)
        except OSError as error:
            raise ReplicaFailed(other) from error

    def published(self, records: Sequence[Record]) -> None:
        """Let the channels know of new records, and the log forget old ones."""
        if self.log.has_traced or self.trace.is_on:
            self.trace.published(records)
        for channel in self.channels.values():
            channel.notify()
        if self.meta.sync_every:
            self._sync()
        if len(self.log) > 2 * RETAINED_RECORDS:
            done = self._done(self.log.end)
            # Where the disk refuses it, the next publish tries again.
            with contextlib.suppress(OSError):
                for log in self.logs.values():
                    log.trim(done, RETAINED_RECORDS)

    def _done(self, default: int) -> int:
        """The first record that some channel is not done with."""
        return min((channel.confirmed.position for channel in self.channels.values()), default=default)

    def _sync(self) -> None:
        """Bring what was written to the disks themselves. A failure is logged once, and the next publish tries again.

        The messages are confirmed nevertheless, as on the real server (youzan/nsq: nsqd/topic.go, flushData).
        """
        with self._syncing.said():
            for_each(self.in_sync, lambda node: self.logs[node].sync(self.meta.sync_every))

    # --- what is old -------------------------------------------------------------------------------------------------

    def clean(self, now: int) -> None:
        """Drop the records that are older than the retention, as far as every channel is done with them.

        Without a channel nothing is dropped (youzan/nsq: nsqd/topic.go, TryCleanOldData). ``now`` is in nanoseconds.
        """
        old = self.log.at_time(now - (self.meta.retention_days or DEFAULT_RETENTION_DAYS) * _DAY)
        with contextlib.suppress(OSError):
            for log in self.logs.values():
                log.drop_before(min(self._done(0), old))

    def forget(self, offset: int) -> None:
        """Drop the records that begin before an offset, done or not: channels go on behind them."""
        for log in self.logs.values():
            log.drop_before(log.at_offset(offset))
        for channel in self.channels.values():
            if channel.confirmed.position < self.log.first:
                channel.set_position(self.log.first)

    # --- channels ----------------------------------------------------------------------------------------------------

    def channel(self, name: str) -> PartitionChannel:
        """The channel of that name; it is created if there is none."""
        channel = self.channels.get(name)
        if channel is None:
            channel = PartitionChannel(
                name,
                self.log,
                self.meta.ordered,
                lambda: self.delete_channel(name),
                self.trace,
                is_kind=self._is_kind,
            )
            self.channels[name] = channel
            if not channel.is_ephemeral:
                self._state.keeper.channels_changed(self)
        return channel

    def delete_channel(self, name: str) -> None:
        """Drop a channel, if there is one, and disconnect its clients."""
        channel = self.channels.pop(name, None)
        if channel is not None:
            if not channel.is_ephemeral:
                self._state.keeper.channels_changed(self)
            channel.is_ephemeral = False  # else it would be dropped again when they have gone
            channel.disconnect()

    def interrupt(self) -> None:
        """Disconnect every consumer: the leader is another one, or none."""
        for channel in self.channels.values():
            channel.interrupt()

    # --- what a node traces ------------------------------------------------------------------------------------------

    def trace_of(self, node: str) -> Trace:
        return self._traces.setdefault(node, Trace(self.topic, self.number))

    def forget_trace(self, node: str) -> None:
        """A node has ended, and with it what it was told to trace."""
        self._traces.pop(node, None)
        self._follow_trace()

    def _follow_trace(self) -> None:
        self.trace = self.trace_of(self._serving)
        for channel in self.channels.values():
            channel.trace = self.trace


class Keeper:
    """Sees to it that what the cluster knows survives the process; this one does not."""

    def log_path(self, node: str, topic: str, number: int) -> Path | None:
        """The file that a node keeps its log of a partition in; None where nothing survives."""
        return None

    def decided(self) -> None:
        """Topics, or decisions about partitions, are others now."""

    def channels_changed(self, partition: Partition) -> None:
        """A channel has come, or gone, or works in another way."""

    def topic_deleted(self, topic: str) -> None:
        """A topic is gone, and what there was of it."""


class ClusterState:
    """What the cluster knows.

    Attributes:
        topics: partitions by topic, each list in the order of their numbers.
        node_ids: every node, dead or alive.
        alive: the nodes that run.
        isolated: the nodes that nothing but clients can reach.
        lease_ends: until when those may lead, by the monotonic clock.
        leaving: the nodes that are to have nothing in the end.
        keeper: told of what has to survive the process.
    """

    def __init__(self) -> None:
        self.keeper: Keeper = Keeper()
        self.topics: dict[str, list[Partition]] = {}
        self.node_ids: list[str] = []
        self.alive: set[str] = set()
        self.isolated: set[str] = set()
        self.lease_ends: dict[str, float] = {}
        self.leaving: set[str] = set()

    @property
    def reachable(self) -> set[str]:
        """The nodes that the cluster can talk to."""
        return self.alive - self.isolated

    @property
    def staying(self) -> set[str]:
        """The nodes that may get partitions."""
        return self.reachable - self.leaving

    def can_reach(self, node: str, other: str) -> bool:
        """Whether a node can talk to another one."""
        return other in self.alive and not self.isolated.intersection((node, other))

    def has_lease(self, node: str) -> bool:
        """Whether a node may lead what it knows to lead."""
        return node not in self.lease_ends or time.monotonic() < self.lease_ends[node]

    def partition(self, topic: str, number: int) -> Partition | None:
        partitions = self.topics.get(topic, ())
        return partitions[number] if 0 <= number < len(partitions) else None

    def all_partitions(self) -> list[Partition]:
        return [partition for partitions in self.topics.values() for partition in partitions]

    def led_by(self, node: str) -> list[Partition]:
        return [partition for partition in self.all_partitions() if partition.leader == node]


class Node(Host):
    """One nsqd of the cluster: which partitions it has, and what it may do with them.

    Attributes:
        id: what the cluster knows it by. Set once its ports are known.

    Args:
        coordinator: decides what becomes of a replica that does not answer, or cannot write.
    """

    def __init__(self, options: NsqdOptions, coordinator: Coordinator) -> None:
        text = "failed to write messages: %s; publishes are refused"
        super().__init__(options, Trouble(logger, text, "messages can be written again"))
        self._coordinator = coordinator
        self._patience = coordinator.options.publish_patience
        self._waits: dict[tuple[str, str], float] = {}  # until when it waits, by the partition and the node
        self.id = ""
        self.state: ClusterState = coordinator.state
        self._scanner: Greenlet[..., None] | None = None

    def start(self) -> None:
        self._scanner = spawn(self._scan_loop)
        self._scanner.name = "nsqd-scan"

    def close(self) -> None:
        """End: what there is belongs to the cluster."""
        if self._scanner is not None:
            self._scanner.kill()
            self._scanner = None
        for partition in self.partitions:
            partition.forget_trace(self.id)

    kill = close

    @property
    def partitions(self) -> list[Partition]:
        """Those that stand on this node, as leader or replica."""
        return [partition for partition in self.state.all_partitions() if self.id in partition.logs]

    def find(self, topic: str, number: int) -> Partition:
        partition = self.state.partition(topic, number)
        if partition is None or self.id not in partition.logs:
            raise TopicNotExist
        return partition

    def default_partition(self, topic: str) -> int:
        """The number of some partition that this node leads, or NO_PARTITION."""
        led = (partition.number for partition in self.state.topics.get(topic, ()) if partition.leader == self.id)
        return next(led, NO_PARTITION)

    def require_leader(self, partition: Partition) -> None:
        if partition.leader != self.id:
            raise NotLeader

    def publish(self, partition: Partition, drafts: Sequence[Draft]) -> list[Record]:
        """Store messages on all replicas in sync; raises NotLeader, NotWritable."""
        try:
            records = self._append(partition, drafts)
        except (NotLeader, NotWritable) as refused:
            partition.failed_count += 1
            if isinstance(refused.__cause__, OSError):
                self.refused(refused.__cause__)
            raise
        self.stored()
        partition.published(records)
        return records

    def _append(self, partition: Partition, drafts: Sequence[Draft]) -> list[Record]:
        while True:
            try:
                return partition.append(self.id, drafts)
            except ReplicaFailed as failed:  # noqa: PERF203
                error = failed.__cause__
                assert isinstance(error, OSError)
                if not self._coordinator.replica_failed(partition, failed.node, error):
                    raise NotWritable from error
            except Unreachable as silent:
                if not self._patience:
                    raise
                self._wait_for(partition, silent.node)

    def _wait_for(self, partition: Partition, node: str) -> None:
        """Wait until a replica answers; NotLeader when it has not for too long, and it is out of sync then."""
        wait = partition.name, node
        give_up_at = self._waits.setdefault(wait, time.monotonic() + self._patience)
        while not (is_back := self.state.can_reach(self.id, node)) and time.monotonic() < give_up_at:
            sleep(_POLL)
        self._waits.pop(wait, None)
        if not is_back:
            self._coordinator.replica_failed(partition, node, TimeoutError(f"no answer for {self._patience:g} s"))
            raise NotLeader

    def _scan_loop(self) -> None:
        cleans_at = time.monotonic() + CLEAN_INTERVAL
        while True:
            sleep(self.options.queue_scan_interval)
            now = time.monotonic()
            for partition in self.state.led_by(self.id):
                if now >= cleans_at:
                    partition.clean(time.time_ns())
                for channel in list(partition.channels.values()):
                    channel.scan(now, 0.0)
            if now >= cleans_at:
                cleans_at = now + CLEAN_INTERVAL
