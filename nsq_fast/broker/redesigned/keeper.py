"""Has what a cluster knows survive its process, in a data path: written down as it changes, and brought back."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gevent import Greenlet, sleep, spawn

from nsq_fast.broker.nsqd.gaps import ranges_of
from nsq_fast.log_events import BROKER_METADATA_INVALID, BROKER_WRITE_FAILED, BROKER_WRITE_RECOVERED

from .channel import PartitionChannel
from .log import File, PartitionLog
from .options import ClusterOptions
from .replication import Assignment
from .state import ClusterState, KeepsNothing, Partition, TopicMeta
from .store import ClusterStore, StoredChannel, StoredCluster, StoredPartition, StoredTopic, for_each

logger = logging.getLogger("nsq_fast.broker.redesigned.keeper")


class DiskKeeper:
    """Writes decisions at once, and where channels are every ``interval`` seconds.

    An error of the disk is logged once, and writing is tried again at the next turn: the cluster goes on.

    Args:
        state: what survives.
        store: the data path.
        options: of the cluster.
        interval: seconds between two looks at the channels.
    """

    def __init__(self, state: ClusterState, store: ClusterStore, options: ClusterOptions, interval: float) -> None:
        self._state = state
        self._store = store
        self._options = options
        self._interval = interval
        self._version = 0
        self._is_saved = True
        self._is_silent = False
        self._is_failing = False
        self._saved_channels: dict[tuple[int, str, int], dict[str, StoredChannel]] = {}
        self._left_out: dict[str, StoredTopic] = {}
        self._loop: Greenlet[..., None] | None = None

    # --- what the state tells ----------------------------------------------------------------------------------------

    def log_file(self, node: str, topic: str, number: int, magic_code: int) -> File | None:
        """Where a node keeps its log of a partition."""
        return self._store.log_file(self._number(node), topic, number, magic_code)

    def decided(self) -> None:
        """Write down topics and decisions."""
        self._is_saved = False
        if not self._is_silent:
            self._try(self._save_decisions)

    def channels_changed(self, partition: Partition) -> None:
        """Write down where the channels of a partition are."""
        if not self._is_silent:
            self._try(lambda: self._save_channels(partition))
            self.decided()

    def topic_deleted(self, topic: str) -> None:
        """Remove what there is of a topic."""
        self._store.delete_topic(topic, range(len(self._state.node_ids)))
        self._saved_channels = {key: saved for key, saved in self._saved_channels.items() if key[1] != topic}

    # --- coming and going --------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Bring topics back as they were, with what the nodes have of them; and begin to look at channels."""
        self._state.keeper = self
        self._state.topics.clear()
        self._is_silent = True
        stored = self._store.load(range(len(self._state.node_ids)))
        self._version = stored.version
        for name, topic in stored.topics.items():
            partitions = self._restored(name, topic)
            if partitions:
                self._state.topics[name] = partitions
            else:
                self._left_out[name] = topic  # it is written down again: its nodes may be there the next time
        self._is_silent = False
        self._loop = spawn(self._run)
        self._loop.name = "cluster-keeper"

    def freeze(self) -> None:
        """Write down no more decisions: nodes end now because the cluster does."""
        self._is_silent = True
        if self._loop is not None:
            self._loop.kill()

    def close(self, *, save: bool) -> None:
        """End, after ``freeze``; ``save`` to write down where channels are."""
        if save:
            self._try(self._save_all)
        for partition in self._state.all_partitions():
            for replica in partition.set.replicas.values():
                replica.log.close()
        self._store.close()
        self._state.keeper = KeepsNothing()

    def _run(self) -> None:
        while True:
            sleep(self._interval)
            self._try(self._save_all)

    def _restored(self, name: str, topic: StoredTopic) -> list[Partition]:
        meta = TopicMeta(**topic.meta)  # type: ignore[arg-type]
        ids = self._state.node_ids
        partitions: list[Partition] = []
        for number, stored in enumerate(topic.partitions):
            replicas = [ids[node] for node in stored.replicas if node < len(ids)]
            if not replicas:
                logger.error(
                    "topic %s is left out: partition %d stood on the nodes %s, and there are only %d",
                    name,
                    number,
                    stored.replicas,
                    len(ids),
                    extra=BROKER_METADATA_INVALID,
                )
                return []
            leader = ids[stored.leader] if stored.leader is not None and stored.leader < len(ids) else None
            last = Assignment(stored.epoch, leader, tuple(ids[node] for node in stored.isr if node < len(ids)))
            partitions.append(Partition(name, meta, number, replicas, self, last=last, is_kind=self._options.kind))
            self._restore_channels(partitions[-1], stored)
        return partitions

    def _restore_channels(self, partition: Partition, last: StoredPartition) -> None:
        """Bring channels back as the leader knows them; where it does not, they get every message again."""
        node = self._number(partition.leader or partition.replicas[0])
        known = self._store.load_channels(node, partition.topic, partition.number)
        for name in (*known, *(name for name in last.channels if name not in known)):
            channel = partition.channel(name)
            stored = known.get(name) or StoredChannel(partition.log.first, ordered=partition.meta.ordered)
            channel.is_ordered, channel.is_paused = stored.ordered, stored.paused
            _go_to(channel, stored, partition.log)
            channel.is_skipped = stored.skipped

    # --- writing -----------------------------------------------------------------------------------------------------

    def _save_all(self) -> None:
        decisions = [] if self._is_saved else [self._save_decisions]
        for_each([*decisions, self._save_all_channels], lambda save: save())

    def _save_all_channels(self) -> None:
        for_each(self._state.all_partitions(), self._save_channels)

    def _save_decisions(self) -> None:
        self._version += 1
        topics = self._left_out | {
            name: StoredTopic(dataclasses.asdict(partitions[0].meta), [self._stored(each) for each in partitions])
            for name, partitions in self._state.topics.items()
            if partitions
        }
        self._store.save(StoredCluster(self._version, topics), range(len(self._state.node_ids)))
        self._is_saved = True

    def _stored(self, partition: Partition) -> StoredPartition:
        epoch, leader, isr = partition.set.assignment
        return StoredPartition(
            [self._number(node) for node in partition.replicas],
            epoch,
            None if leader is None else self._number(leader),
            [self._number(node) for node in isr],
            [channel.name for channel in partition.channels.values() if not channel.is_ephemeral],
        )

    def _save_channels(self, partition: Partition) -> None:
        """Tell every node in sync where the channels are, if that is not what it was told last."""
        channels = {
            name: StoredChannel(
                channel.confirmed.position,
                ranges_of(channel.confirmed.ahead),
                channel.is_ordered,
                channel.is_paused,
                channel.is_skipped,
            )
            for name, channel in partition.channels.items()
            if not channel.is_ephemeral
        }

        def write(node: int) -> None:
            key = (node, partition.topic, partition.number)
            if self._saved_channels.get(key) != channels:
                self._store.save_channels(*key, channels)
                self._saved_channels[key] = channels

        for_each(map(self._number, partition.in_sync), write)

    def _number(self, node: str) -> int:
        return self._state.node_ids.index(node)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._is_failing:
                logger.error(
                    "failed to write what the cluster knows: %s; it is tried again every %g s",
                    error,
                    self._interval,
                    extra=BROKER_WRITE_FAILED,
                )
            self._is_failing = True
        else:
            if self._is_failing:
                logger.warning("what the cluster knows can be written again", extra=BROKER_WRITE_RECOVERED)
            self._is_failing = False


def _go_to(channel: PartitionChannel, stored: StoredChannel, log: PartitionLog) -> None:
    """Go on where a channel was, as far as the log has that."""
    channel.empty()
    position = max(log.first, min(stored.position, log.end))
    ahead = {number for first, end in stored.ahead for number in range(first, end)}
    channel.confirmed.reset(position)
    channel.confirmed.ahead.update(number for number in ahead if position < number < log.end)
    channel.interrupt()


@contextmanager
def ending(keeper: DiskKeeper | None, *, save: bool) -> Iterator[None]:
    """Inside all nodes end, which is nothing to write down; ``save`` to write down where the channels are then."""
    if keeper is not None:
        keeper.freeze()
    yield
    if keeper is not None:
        keeper.close(save=save)
