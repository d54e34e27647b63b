"""Topics of the cluster: created, expanded, changed and deleted, and where their partitions are placed."""

from __future__ import annotations

import time

from gevent import sleep

from .balancing import ring
from .coordinator import Coordinator
from .load import load_factors
from .moves import ClusterError
from .options import ClusterOptions
from .state import MAX_PARTITIONS, MAX_SYNC_EVERY, ClusterState, Partition, TopicMeta

_POLL = 0.005
_SAME_LOAD = 0.5
"""Nodes whose load factors differ by less have the same to do (youzan/nsq: data_placement_mgr.go, LeaderLessLoader)."""
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
            self._coordinator.moves.fit_replicas(partition)
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
        hour = time.localtime().tm_hour
        loads = {node: load_factors(*self.state.load_of(node, hour)) for node in free}
        leader, *others = sorted(free, key=lambda node: (int(loads[node][0] / _SAME_LOAD), *self._counts(node)))
        others.sort(key=lambda node: (int(loads[node][1] / _SAME_LOAD), *reversed(self._counts(node))))
        return [leader, *others[: meta.replica - 1]]

    def _counts(self, node: str) -> tuple[int, int]:
        """How many partitions a node leads, or is to lead, and how many it has."""
        everything = self.state.all_partitions()
        leads = sum(node == (partition.leader or partition.replicas[0]) for partition in everything)
        return leads, sum(node in partition.replicas for partition in everything)
