"""What moves leaders: creation of topics, moves on request, and who takes over from a node that has died.

A move goes through the stages that clients of a real cluster see: the old leader
takes no more publishes; its consumers lose their connections and it is no longer
the leader; the new one begins to serve, then to take publishes; lookups show it.
"""

from __future__ import annotations

from collections.abc import Iterable

from gevent import sleep, spawn_later
from gevent.lock import Semaphore

from nsq_fast.errors import NsqError

from .state import MAX_PARTITIONS, ClusterState, Partition, TopicMeta

NO_NODE = "ErrType:9 ErrCode:1 : No node is available for topic"


class ClusterError(NsqError):
    """The cluster refuses what an administrator asks for; the text is what the server would answer."""


class Coordinator:
    """Decides who leads what.

    Args:
        move_step: seconds each stage of a move takes.
        takeover_delay: seconds after its death until others take over what a node led.
    """

    def __init__(self, state: ClusterState, move_step: float, takeover_delay: float) -> None:
        self.state = state
        self._move_step = move_step
        self._takeover_delay = takeover_delay
        self._moving = Semaphore()

    @property
    def is_stable(self) -> bool:
        """Whether every partition has a leader that is alive, and none is being moved."""
        partitions = self.state.all_partitions()
        return not self._moving.locked() and all(partition.leader in self.state.alive for partition in partitions)

    # --- topics ------------------------------------------------------------------------------------------------------

    def create_topic(self, topic: str, meta: TopicMeta) -> None:
        """Create a topic; nothing happens when it exists just so. Raises ClusterError."""
        existing = self.state.topics.get(topic)
        if existing:
            if existing[0].meta.public() != meta.public():
                raise ClusterError("already exist")
            return
        needed = meta.replica if meta.may_share_nodes else meta.replica * meta.partition_num
        if needed > len(self.state.alive):
            raise ClusterError(NO_NODE)
        if meta.partition_num >= MAX_PARTITIONS:
            raise ClusterError("max partition allowed exceed")
        self.state.topics[topic] = []
        self._add_partitions(topic, meta, meta.partition_num)

    def expand_topic(self, topic: str, partition_num: int) -> None:
        """Give a topic more partitions. Raises ClusterError."""
        partitions = self._partitions(topic)
        meta = partitions[0].meta
        if partition_num < len(partitions):
            raise ClusterError("the partition number can not be reduced")
        if not meta.may_share_nodes and meta.replica * partition_num > len(self.state.alive):
            raise ClusterError(NO_NODE)
        meta.partition_num = partition_num
        self._add_partitions(topic, meta, partition_num)

    def upgrade_to_ext(self, topic: str) -> None:
        """Let a topic have ext headers from now on; consumers that cannot read them are disconnected."""
        for partition in self._partitions(topic):
            partition.meta.ext = partition.log.is_ext = True
            for channel in partition.channels.values():
                channel.disconnect(lambda client: not client.gets_ext)

    def set_replica(self, topic: str, count: int) -> None:
        """Let a topic stand on more nodes, or on fewer. Raises ClusterError."""
        for partition in self._partitions(topic):
            partition.meta.replica = count
            spare = [node for node in self.state.node_ids if node not in partition.replicas]
            partition.replicas += [node for node in spare if node in self.state.alive]
            partition.replicas.sort(key=lambda node: node != partition.leader)
            del partition.replicas[count:]

    def register_channel(self, topic: str, channel: str) -> None:
        """Create a channel of a topic whose channels SUB does not create. Raises ClusterError."""
        meta = self._partitions(topic)[0].meta
        if not meta.disable_channel_auto_create:
            raise ClusterError(f"channel auto create NOT disabled in topic {topic}")
        if channel in meta.channels:
            raise ClusterError(f"channel {channel} already registered")
        meta.channels.append(channel)
        for partition in self._partitions(topic):
            partition.channel(channel)

    def unregister_channel(self, topic: str, channel: str) -> None:
        """Delete such a channel; nothing happens for other topics. Raises ClusterError."""
        meta = self._partitions(topic)[0].meta
        if not meta.disable_channel_auto_create:
            return
        if channel not in meta.channels:
            raise ClusterError(f"channel {channel} not registered")
        meta.channels.remove(channel)
        for partition in self._partitions(topic):
            partition.delete_channel(channel)

    def delete_topic(self, topic: str) -> None:
        """Drop a topic with its messages, and disconnect its consumers. Raises ClusterError."""
        for partition in self._partitions(topic):
            partition.interrupt()
        del self.state.topics[topic]

    def _partitions(self, topic: str) -> list[Partition]:
        if topic not in self.state.topics:
            raise ClusterError("Key not found")
        return self.state.topics[topic]

    def _add_partitions(self, topic: str, meta: TopicMeta, count: int) -> None:
        partitions = self.state.topics[topic]
        while len(partitions) < count:
            replicas = self._place(partitions, meta)
            partitions.append(Partition(topic, meta, len(partitions), replicas))
            for channel in meta.channels:
                partitions[-1].channel(channel)

    def _place(self, siblings: list[Partition], meta: TopicMeta) -> list[str]:
        """The nodes for one more partition: those with the least to do, the first of them to lead."""
        everything = self.state.all_partitions()

        def load(node: str) -> tuple[int, ...]:
            return (
                _count(node in partition.replicas for partition in siblings) if not meta.may_share_nodes else 0,
                _count(node == partition.leader for partition in siblings),
                _count(node == partition.leader for partition in everything),
                _count(node in partition.replicas for partition in everything),
                self.state.node_ids.index(node),
            )

        leader, *others = sorted(self.state.alive, key=load)
        others.sort(key=lambda node: (load(node)[0], load(node)[3], load(node)[4]))
        return [leader, *others[: meta.replica - 1]]

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
            raise ClusterError("the cluster is unstable")
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
            raise ClusterError("the cluster is unstable")
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
        sleep(self._move_step)
        if target not in self.state.alive:
            raise ClusterError("the cluster is unstable")
        partition.interrupt()
        if target not in partition.replicas:
            # Its data is copied there, and leaves the node it comes from.
            partition.replicas[partition.replicas.index(str(partition.leader))] = target
        self._lead(partition, target)
        sleep(self._move_step)
        partition.is_writable = True
        sleep(self._move_step)

    def _lead(self, partition: Partition, node: str | None) -> None:
        partition.leader = node
        partition.registered = None

    def _register(self, partition: Partition) -> None:
        if partition.leader in self.state.alive:
            partition.registered = partition.leader

    # --- deaths ------------------------------------------------------------------------------------------------------

    def node_started(self, node: str) -> None:
        """A node runs: it leads the partitions that have no other living replica."""
        self.state.alive.add(node)
        self._elect()

    def node_ended(self, node: str) -> None:
        """A node has gone, well or badly: after a while others lead what it led."""
        self.state.alive.discard(node)
        for partition in self.state.led_by(node):
            partition.interrupt()
            partition.registered = None
        spawn_later(self._takeover_delay, self._elect)

    def _elect(self) -> None:
        for partition in self.state.all_partitions():
            if partition.leader not in self.state.alive:
                candidates = [node for node in partition.replicas if node in self.state.alive]
                if not candidates:
                    continue
                self._lead(partition, candidates[0])
                partition.is_writable = True
            if not self._moving.locked():
                self._register(partition)


def _count(truths: Iterable[bool]) -> int:
    return sum(truths)
