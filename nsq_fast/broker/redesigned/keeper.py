"""Has what a cluster knows survive its process: written down as it changes, and brought back.

In the data path::

    nsqd<n>/cluster.json                  topics, and the last decision about each partition: the same on every node
    nsqd<n>/t.<topic>/<number>.log        what that node has of the partition (log.py)
    nsqd<n>/t.<topic>/<number>.channels   where its channels are, as that node was last told
    *.bad                                 what was damaged, as it was found

Nodes are named by their numbers here, as their ids hold ports, which may be others next time. A JSON file is one line,
and its CRC-32 in a line of its own; it is replaced as a whole.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
from gevent import Greenlet, sleep, spawn

from nsq_fast._lazy import get_logger
from nsq_fast.broker.channel import ranges_of
from nsq_fast.broker.journal import Trouble, for_each, read_json, write_json
from nsq_fast.broker.options import ClusterOptions
from nsq_fast.broker.redesigned.channel import PartitionChannel
from nsq_fast.broker.redesigned.log import PartitionLog
from nsq_fast.broker.redesigned.partition import ClusterState, Decision, Keeper, Partition, TopicMeta
from nsq_fast.broker.store import NOT_OF_CLUSTER
from nsq_fast.broker.store import Store as DataPath
from nsq_fast.log_events import BROKER_METADATA_INVALID

logger: logging.Logger = get_logger("nsq_fast.broker.redesigned.keeper")


_STATE = "cluster.json"
_LOSS = "another node may know, or messages come again"
_PREFIX = "t."
"""Keeps a topic called ".." where it belongs."""


class StoredChannel(msgspec.Struct):
    """Where a channel is: everything before ``position`` is done, and so are the ranges ``ahead`` of it."""

    position: int
    ahead: list[tuple[int, int]] = []
    ordered: bool = False
    paused: bool = False
    skipped: bool = False


class StoredPartition(msgspec.Struct):
    """The last decision about a partition, nodes by their numbers; and the names of its channels."""

    replicas: list[int]
    epoch: int
    leader: int | None
    isr: list[int]
    channels: list[str] = []


class StoredTopic(msgspec.Struct):
    """A topic, and its partitions in the order of their numbers."""

    meta: TopicMeta
    partitions: list[StoredPartition]


class StoredCluster(msgspec.Struct):
    """The content of cluster.json; the copy with the greatest ``version`` is the one that counts."""

    version: int = 0
    topics: dict[str, StoredTopic] = {}


class DiskKeeper(Keeper):
    """Writes decisions at once, and where channels are every ``interval`` seconds.

    An error of the disk is logged once, and writing is tried again at the next turn: the cluster goes on.

    Args:
        state: what survives.
        path: the data path, which is locked against others.
        options: of the cluster.
        interval: seconds between two looks at the channels.
    """

    def __init__(
        self, state: ClusterState, path: str | os.PathLike[str], options: ClusterOptions, interval: float
    ) -> None:
        """Raises OSError, DataPathError, when the path cannot be used."""
        self._path = Path(path)
        self._path.mkdir(parents=True, exist_ok=True)
        self._lock = DataPath(os.fspath(path), NOT_OF_CLUSTER)
        self._state = state
        self._options = options
        self._interval = interval
        self._version = 0
        self._is_saved = True
        self._is_silent = False
        self._trouble = Trouble(
            logger,
            f"failed to write what the cluster knows: %s; it is tried again every {interval:g} s",
            "what the cluster knows can be written again",
        )
        self._saved_channels: dict[tuple[int, str, int], dict[str, StoredChannel]] = {}
        self._left_out: dict[str, StoredTopic] = {}
        self._loop: Greenlet[..., None] | None = None

    # --- what the state tells ----------------------------------------------------------------------------------------

    def log_path(self, node: str, topic: str, number: int) -> Path | None:
        return self._folder(self._number(node), topic) / f"{number}.log"

    def decided(self) -> None:
        self._is_saved = False
        if not self._is_silent:
            self._try(self._save_decisions)

    def channels_changed(self, partition: Partition) -> None:
        if not self._is_silent:
            self._try(lambda: self._save_channels(partition))
            self.decided()

    def topic_deleted(self, topic: str) -> None:
        for node in self._nodes:
            shutil.rmtree(self._folder(node, topic), ignore_errors=True)
        self._saved_channels = {key: saved for key, saved in self._saved_channels.items() if key[1] != topic}

    # --- coming and going --------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Bring topics back as they were, with what the nodes have of them; and begin to look at channels."""
        self._state.keeper = self
        self._state.topics.clear()
        self._is_silent = True
        copies = [read_json(self._node_folder(node) / _STATE, StoredCluster, _LOSS) for node in self._nodes]
        stored = max((copy for copy in copies if copy), key=lambda copy: copy.version, default=StoredCluster())
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
            for log in partition.logs.values():
                log.close()
        self._lock.close()
        self._state.keeper = Keeper()

    def _run(self) -> None:
        while True:
            sleep(self._interval)
            self._try(self._save_all)

    def _restored(self, name: str, topic: StoredTopic) -> list[Partition]:
        ids = self._state.node_ids
        partitions: list[Partition] = []
        for number, stored in enumerate(topic.partitions):
            replicas = [ids[node] for node in stored.replicas if node < len(ids)]
            if not replicas:
                logger.error(
                    "topic %s is left out: partition %d stood on the nodes %s, and there are only %d",
                    name, number, stored.replicas, len(ids), extra=BROKER_METADATA_INVALID,
                )  # fmt: skip
                return []
            leader = ids[stored.leader] if stored.leader is not None and stored.leader < len(ids) else None
            last = Decision(stored.epoch, leader, tuple(ids[node] for node in stored.isr if node < len(ids)))
            partitions.append(
                Partition(self._state, name, topic.meta, number, replicas, last=last, is_kind=self._options.kind)
            )
            self._restore_channels(partitions[-1], stored)
        return partitions

    def _restore_channels(self, partition: Partition, last: StoredPartition) -> None:
        """Bring channels back as the leader knows them; where it does not, they get every message again."""
        node = self._number(partition.leader or partition.replicas[0])
        path = self._folder(node, partition.topic) / f"{partition.number}.channels"
        known = read_json(path, dict[str, StoredChannel], _LOSS) or {}
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
            name: StoredTopic(partitions[0].meta, [self._stored(each) for each in partitions])
            for name, partitions in self._state.topics.items()
            if partitions
        }
        content = StoredCluster(self._version, topics)

        def write(node: int) -> None:
            write_json(self._node_folder(node) / _STATE, content, sync=True)

        for_each(self._nodes, write)
        self._is_saved = True

    def _stored(self, partition: Partition) -> StoredPartition:
        epoch, leader, isr = partition.decision
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
                # Not synced: one that a power loss breaks only makes messages come again.
                path = self._folder(node, partition.topic) / f"{partition.number}.channels"
                write_json(path, channels, sync=False)
                self._saved_channels[key] = channels

        for_each(map(self._number, partition.in_sync), write)

    @property
    def _nodes(self) -> range:
        return range(len(self._state.node_ids))

    def _folder(self, node: int, topic: str) -> Path:
        return self._node_folder(node) / f"{_PREFIX}{topic}"

    def _node_folder(self, node: int) -> Path:
        return self._path / f"nsqd{node}"

    def _number(self, node: str) -> int:
        return self._state.node_ids.index(node)

    def _try(self, write: Callable[[], None]) -> None:
        with self._trouble.said():
            write()


def _go_to(channel: PartitionChannel, stored: StoredChannel, log: PartitionLog) -> None:
    """Go on where a channel was, as far as the log has that."""
    channel.empty()
    position = max(log.first, min(stored.position, log.end))
    ahead = {number for first, end in stored.ahead for number in range(first, end)}
    channel.confirmed.reset(position)
    channel.confirmed.ahead.update(number for number in ahead if position < number < log.end)
    channel.interrupt()
