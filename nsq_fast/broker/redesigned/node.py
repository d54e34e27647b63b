"""The state of one nsqd of the cluster: which partitions it has, and what it may do with them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from gevent import Greenlet, sleep, spawn

from nsq_fast.broker.nsqd import Host
from nsq_fast.broker.options import NsqdOptions
from nsq_fast.broker.redesigned.log import Draft, Record
from nsq_fast.broker.redesigned.replication import Replica, ReplicaFailed
from nsq_fast.broker.redesigned.state import ClusterState, Partition
from nsq_fast.errors import NotLeader, NotWritable, TopicNotExist
from nsq_fast.log_events import BROKER_WRITE_FAILED, BROKER_WRITE_RECOVERED

logger = logging.getLogger("nsq_fast.broker.redesigned.node")

NO_PARTITION = -1
CLEAN_INTERVAL = 60.0
"""Seconds between two looks for messages that are older than their retention."""


class Node(Host):
    """One nsqd of the cluster.

    Attributes:
        id: what the cluster knows it by. Set once its ports are known.
        state: what the cluster knows.

    Args:
        replica_failed: called with a partition and a node that cannot write its replica; whether it is not in sync any
            more.
    """

    def __init__(
        self, options: NsqdOptions, state: ClusterState, replica_failed: Callable[[Partition, str, OSError], bool]
    ) -> None:
        super().__init__(options)
        self._replica_failed = replica_failed
        self.id = ""
        self.state = state
        self._scanner: Greenlet[..., None] | None = None

    def start(self) -> None:
        """Begin to scan for timeouts."""
        self._scanner = spawn(self._scan_loop)
        self._scanner.name = "nsqd-scan"

    def close(self) -> None:
        """End: what there is belongs to the cluster."""
        if self._scanner is not None:
            self._scanner.kill()
            self._scanner = None
        for partition in self.partitions:
            partition.forget_switches(self.id)

    kill = close

    @property
    def partitions(self) -> list[Partition]:
        """Those that stand on this node, as leader or replica."""
        return [partition for partition in self.state.all_partitions() if self.id in partition.replicas]

    def find(self, topic: str, number: int) -> Partition:
        """A partition that stands on this node; raises TopicNotExist."""
        partition = self.state.partition(topic, number)
        if partition is None or self.id not in partition.set.replicas:
            raise TopicNotExist
        return partition

    def default_partition(self, topic: str) -> int:
        """The number of some partition that this node leads, or NO_PARTITION."""
        led = (partition.number for partition in self.state.topics.get(topic, ()) if partition.leader == self.id)
        return next(led, NO_PARTITION)

    def require_leader(self, partition: Partition) -> None:
        """Raise NotLeader unless this node leads the partition."""
        if partition.leader != self.id:
            raise NotLeader

    def publish(self, partition: Partition, drafts: Sequence[Draft]) -> list[Record]:
        """Store messages on all replicas in sync; raises NotLeader, NotWritable.

        It goes by what this node knows: one that cannot be reached may take itself for the leader, and confirms
        nothing that it cannot store on the others.
        """
        try:
            records = self._append(partition, drafts)
        except (NotLeader, NotWritable) as error:
            partition.failed_count += 1
            if isinstance(error.__cause__, OSError):
                self._disk_failed(error.__cause__)
            raise
        if self.error is not None:
            self.error = None
            logger.warning("messages can be written again", extra=BROKER_WRITE_RECOVERED)
        partition.published(records)
        return records

    def _append(self, partition: Partition, drafts: Sequence[Draft]) -> list[Record]:
        while True:
            replica = partition.set.replicas.get(self.id)
            if replica is None or partition.is_new or self.state.is_write_disabled:
                raise NotLeader
            if not partition.is_writable and replica.assignment.leader == self.id:
                raise NotWritable
            try:
                return replica.append(drafts, partial(self._reach, partition), partition.quorum)
            except ReplicaFailed as failed:
                error = failed.__cause__
                assert isinstance(error, OSError)
                if not self._replica_failed(partition, failed.node, error):
                    raise NotWritable from error

    def _disk_failed(self, error: OSError) -> None:
        if self.error is None:
            logger.error("failed to write messages: %s; publishes are refused", error, extra=BROKER_WRITE_FAILED)
        self.error = error

    def _reach(self, partition: Partition, node: str) -> Replica | None:
        return partition.set.replicas.get(node) if self.state.can_reach(self.id, node) else None

    def _scan_loop(self) -> None:
        cleans_at = time.monotonic() + CLEAN_INTERVAL
        while True:
            sleep(self.options.queue_scan_interval)
            now = time.monotonic()
            if now >= cleans_at:
                cleans_at = now + CLEAN_INTERVAL
                for partition in self.state.led_by(self.id):
                    partition.clean(time.time_ns())
            for partition in self.state.led_by(self.id):
                for channel in list(partition.channels.values()):
                    channel.scan(now, 0.0)
