"""What the cluster knows: its topics, their partitions, and which node leads each of them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from nsq_fast.broker.journal import for_each
from nsq_fast.broker.redesigned.channel import DeliveryTrace, PartitionChannel, PublishTrace, TraceSwitches
from nsq_fast.broker.redesigned.log import PartitionLog, Record
from nsq_fast.broker.redesigned.replication import Assignment, ReplicaSet
from nsq_fast.log_events import BROKER_WRITE_FAILED, BROKER_WRITE_RECOVERED

logger = logging.getLogger("nsq_fast.broker.redesigned.state")


# --- what the cluster knows ------------------------------------------------------------------------------------------
# Its topics, their partitions, and which node leads each of them.
# A partition stands on some nodes, its *replicas*; each has a log of its own (replication.py). A partition whose
# replicas in sync are all dead has no leader until one of them is back. Plain state: what happens when, is for the
# ``coordinator``.


MAX_PARTITIONS = 255
MAX_SYNC_EVERY = 4000
MAX_RETENTION_DAYS = 60
DEFAULT_RETENTION_DAYS = 7
_DAY = 24 * 3600 * 1_000_000_000
RETAINED_RECORDS = 100_000
"""So many records that are done stay in a log, to be found again."""
_MOST_RECORDS = 2 * RETAINED_RECORDS


@dataclasses.dataclass
class TopicMeta:
    """How a topic was created.

    Attributes:
        sync_every: so many messages go to the disk itself at once, where there is a data path; 0: none does.
        retention_days: messages that all channels are done with go after so long; 0 is DEFAULT_RETENTION_DAYS.
        suggested_load: what the real server would use to place it.
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
    suggested_load: int = 0
    magic_code: int = 0
    channels: list[str] = dataclasses.field(default_factory=list)

    @property
    def may_share_nodes(self) -> bool:
        """Whether a node may have several partitions of the topic."""
        return self.ordered or self.multi_part

    def is_same(self, other: TopicMeta) -> bool:
        """Whether a topic that is created like that is the same."""
        return dataclasses.replace(self, magic_code=0, channels=[]) == dataclasses.replace(
            other, magic_code=0, channels=[]
        )

    @property
    def retention(self) -> int:
        """How long messages stay that all channels are done with, in nanoseconds."""
        return (self.retention_days or DEFAULT_RETENTION_DAYS) * _DAY

    def public(self) -> dict[str, object]:
        """As lookups show it."""
        return {
            "partition_num": self.partition_num,
            "replica": self.replica,
            "extend_support": self.ext,
            "ordered": self.ordered,
            "multi_part": self.multi_part,
            "disable_channel_auto_create": self.disable_channel_auto_create,
        }


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


class Partition:
    """One partition of a topic.

    Args:
        replicas: ids of the nodes that it stands on; the first is to lead.
        last: the last decision about it, where it has survived the process.

    Attributes:
        set: its replicas, and which of them are in sync.
        is_writable: whether the leader takes publishes.
        registered: the node that lookups show for publishers; None while the leader changes.
        is_new: whether it waits for its first leader.
        trace: logs traced messages that are published.
    """

    def __init__(
        self,
        topic: str,
        meta: TopicMeta,
        number: int,
        replicas: list[str],
        keeper: Keeper,
        *,
        last: Assignment | None = None,
        is_kind: bool = False,
    ) -> None:
        self._is_kind = is_kind
        self._keeper = keeper
        self.is_new = False
        self.topic = topic
        self.meta = meta
        self.number = number
        self.set = ReplicaSet(
            replicas,
            lambda node: PartitionLog(number, meta.ext, keeper.log_path(node, topic, number), meta.magic_code),
            keeper.decided,
        )
        if last is not None:
            self.set.restore(last)
        self.is_writable = True
        self._serving = self.leader or replicas[0]
        self.registered: str | None = self._serving
        self.log = self.set.replicas[self._serving].log
        self.channels: dict[str, PartitionChannel] = {}
        self.failed_count = 0
        self._is_sync_failing = False
        self._switches: dict[str, TraceSwitches] = {}
        self.trace = PublishTrace(topic, number, self.switches_of(self._serving))

    @property
    def replicas(self) -> list[str]:
        """Ids of the nodes it stands on, in sync or not."""
        return list(self.set.replicas)

    @property
    def leader(self) -> str | None:
        """Id of the node that serves it, which may be dead; None when there is none."""
        return None if self.is_new else self.set.assignment.leader

    @property
    def in_sync(self) -> tuple[str, ...]:
        """Ids of the nodes that have every confirmed write."""
        return self.set.assignment.isr

    @property
    def epoch(self) -> int:
        """The number of the last decision about leader and replicas in sync."""
        return self.set.assignment.epoch

    @property
    def quorum(self) -> int:
        """How many replicas must be in sync for publishing (youzan/nsq: consistence, handleSyncResult)."""
        return 1 if self._is_kind else self.meta.replica // 2 + 1

    @property
    def name(self) -> str:
        """Topic and number, as the server writes them."""
        return f"{self.topic}-{self.number}"

    def channel(self, name: str) -> PartitionChannel:
        """The channel of that name; it is created if there is none."""
        channel = self.channels.get(name)
        if channel is None:
            channel = PartitionChannel(
                name,
                self.log,
                self.meta.ordered,
                lambda: self.delete_channel(name),
                DeliveryTrace(self.topic, name, self.trace.switches),
                is_kind=self._is_kind,
            )
            self.channels[name] = channel
            if not channel.is_ephemeral:
                self._keeper.channels_changed(self)
        return channel

    def delete_channel(self, name: str) -> None:
        """Drop a channel, if there is one, and disconnect its clients."""
        channel = self.channels.pop(name, None)
        if channel is not None:
            if not channel.is_ephemeral:
                self._keeper.channels_changed(self)
            channel.is_ephemeral = False  # else it would be dropped again when they have gone
            channel.disconnect()

    def wait_for_leader(self) -> None:
        """Be without a leader, as a new partition is at first."""
        self.is_new, self.registered = True, None

    def serve(self) -> None:
        """Let channels go on with the log of the leader, if it is another one than before."""
        leader = self.leader
        if leader is not None and leader != self._serving:
            self._serving, self.registered, self.is_writable = leader, None, True
            self.log = self.set.replicas[leader].log
            self._follow_switches()
            for channel in self.channels.values():
                channel.interrupt(self.log)

    def switches_of(self, node: str) -> TraceSwitches:
        """What a node traces of it, where it leads."""
        return self._switches.setdefault(node, TraceSwitches())

    def forget_switches(self, node: str) -> None:
        """A node has ended, and with it what it was told to trace."""
        self._switches.pop(node, None)
        self._follow_switches()

    def _follow_switches(self) -> None:
        self.trace.switches = self.switches_of(self._serving)
        for channel in self.channels.values():
            channel.trace.switches = self.trace.switches

    def published(self, records: Sequence[Record]) -> None:
        """Let the channels know of new records, and the log forget old ones."""
        log = self.log
        if log.has_traced or self.trace.switches.is_on:
            self.trace.stored(records)
        for channel in self.channels.values():
            channel.notify()
        if self.meta.sync_every:
            self._sync()
        if len(log) > _MOST_RECORDS:
            done = min((channel.confirmed.position for channel in self.channels.values()), default=log.end)
            # Where the disk refuses it, the next publish tries again.
            with contextlib.suppress(OSError):
                for replica in self.set.replicas.values():
                    replica.log.trim(done, RETAINED_RECORDS)

    def _sync(self) -> None:
        """Bring what was written to the disks themselves. A failure is logged once, and the next publish tries again.

        The messages are confirmed nevertheless, as on the real server (youzan/nsq: nsqd/topic.go, flushData).
        """
        try:
            for_each(self.in_sync, lambda node: self.set.replicas[node].log.sync(self.meta.sync_every))
        except OSError as error:
            if not self._is_sync_failing:
                logger.error(
                    "failed to bring messages of %s to the disk itself: %s; they are written, but a power loss may take"
                    " them",
                    self.name, error, extra=BROKER_WRITE_FAILED,
                )  # fmt: skip
            self._is_sync_failing = True
        else:
            if self._is_sync_failing:
                logger.warning("messages of %s reach the disk itself again", self.name, extra=BROKER_WRITE_RECOVERED)
            self._is_sync_failing = False

    def depth_size(self, channel: PartitionChannel) -> int:
        """The bytes from where a channel is to the end of the log."""
        return self.log.end_offset - self.log.offset_of(channel.confirmed.position)

    def clean(self, now: int) -> None:
        """Drop the records that are older than the retention, as far as every channel is done with them.

        Without a channel nothing is dropped (youzan/nsq: nsqd/topic.go, TryCleanOldData). ``now`` is in nanoseconds.
        """
        done = min((channel.confirmed.position for channel in self.channels.values()), default=0)
        old = self.log.at_time(now - self.meta.retention)
        with contextlib.suppress(OSError):
            for replica in self.set.replicas.values():
                replica.log.drop_before(min(done, old))

    def forget(self, offset: int) -> None:
        """Drop the records that begin before an offset, done or not: channels go on behind them."""
        for replica in self.set.replicas.values():
            replica.log.drop_before(replica.log.at_offset(offset))
        for channel in self.channels.values():
            if channel.confirmed.position < self.log.first:
                channel.set_position(self.log.first)

    def interrupt(self) -> None:
        """Disconnect every consumer: the leader is another one, or none."""
        for channel in self.channels.values():
            channel.interrupt()


class ClusterState:
    """The topics of the cluster.

    Attributes:
        topics: partitions by topic, each list in the order of their numbers.
        node_ids: every node, dead or alive.
        alive: the nodes that run.
        isolated: the nodes that nothing but clients can reach.
        leaving: the nodes that are to have nothing in the end.
        is_upgrading: whether an administrator is upgrading the servers: nothing is moved meanwhile.
        lookupd_tombstones: ids of the nsqlookupds that /listlookup does not show.
        is_write_disabled: whether an administrator has stopped all publishing.
        keeper: told of what has to survive the process.
    """

    def __init__(self) -> None:
        self.keeper: Keeper = Keeper()
        self.topics: dict[str, list[Partition]] = {}
        self.node_ids: list[str] = []
        self.alive: set[str] = set()
        self.isolated: set[str] = set()
        self.leaving: set[str] = set()
        self.is_upgrading = False
        self.lookupd_tombstones: set[str] = set()
        self.is_write_disabled = False

    @property
    def staying(self) -> set[str]:
        """The nodes that may get partitions."""
        return self.reachable - self.leaving

    @property
    def reachable(self) -> set[str]:
        """The nodes that the cluster can talk to."""
        return self.alive - self.isolated

    def can_reach(self, node: str, other: str) -> bool:
        """Whether a node can talk to another one."""
        return other in self.alive and not self.isolated.intersection((node, other))

    def partition(self, topic: str, number: int) -> Partition | None:
        partitions = self.topics.get(topic, ())
        return partitions[number] if 0 <= number < len(partitions) else None

    def all_partitions(self) -> list[Partition]:
        """Every partition of every topic."""
        return [partition for partitions in self.topics.values() for partition in partitions]

    def led_by(self, node_id: str) -> list[Partition]:
        return [partition for partition in self.all_partitions() if partition.leader == node_id]
