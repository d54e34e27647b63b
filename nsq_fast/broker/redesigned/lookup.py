"""What an nsqlookupd of the cluster answers: who serves which partition, for reading and for writing.

For writing a partition is shown only where it may be written and has a channel;
for reading also where it can only be consumed. Nsqds of the original that have
registered stand beside them, without partitions, and are for reading only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from nsq_fast.broker.lookupd.registration_db import LookupDB, Peer

from .load import load_factors
from .state import ClusterState, Partition, TopicMeta

READ, WRITE = "r", "w"
NO_CHANNEL = "Topic has no channel, should init at least one for the new topic"
NO_TOPIC = "Key not found"

_SHOWN_WITH_LOADS = ("hostname", "broadcast_address", "tcp_port", "http_port")

PeerInfo = dict[str, Any]


class NoAnswer(Exception):
    """There is no answer; the text is the server's, its status 404."""


class Lookup:
    """Answers lookups.

    Args:
        state: what the cluster knows.
        db: what nsqds of the original have registered.
        peer: the node of an id, as answers show it.
        allow_no_channels: whether partitions without a channel may be written.
    """

    def __init__(
        self, state: ClusterState, db: LookupDB, peer: Callable[[str], PeerInfo], *, allow_no_channels: bool
    ) -> None:
        self._state = state
        self._db = db
        self._peer = peer
        self._allow_no_channels = allow_no_channels
        self._tombstones: set[tuple[str, str]] = set()

    def answer(self, topic: str, access: str, number: str, needs_meta: bool, now: float) -> dict[str, Any]:
        """The answer to /lookup; ``number`` is the partition asked for, or empty. Raises NoAnswer."""
        partitions = [item for item in self._state.topics.get(topic, ()) if number in ("", str(item.number))]
        originals = self._db.producers(topic, now)
        if access == WRITE and not originals and topic not in self._state.topics:
            raise NoAnswer(NO_TOPIC)
        found = {item.number: node for item in partitions if (node := self._node_of(item, access)) is not None}
        if access == WRITE:
            found = {number: node for number, node in found.items() if (topic, node) not in self._tombstones}
            found = self._writable(partitions, found, bool(originals))
            originals = []
        answer: dict[str, Any] = {
            "channels": self._channels(topic, partitions),
            "partitions": {str(key): self._peer(node) for key, node in found.items()},
            "producers": [*map(self._peer, sorted(set(found.values()))), *map(original_peer, originals)],
        }
        if access == WRITE and self._state.is_write_disabled:
            answer |= {"partitions": None, "producers": None}
        return {**answer, "meta": self._meta(topic).public()} if needs_meta else answer

    def _node_of(self, partition: Partition, access: str) -> str | None:
        node = partition.registered
        if node is None and access == READ:
            node = partition.leader
        return node if node in self._state.alive else None

    def _writable(self, partitions: list[Partition], found: dict[int, str], has_originals: bool) -> dict[int, str]:
        writable = {
            partition.number: found[partition.number]
            for partition in partitions
            if partition.number in found and (partition.channels or self._allow_no_channels)
        }
        if not writable and (found or has_originals):
            raise NoAnswer(NO_CHANNEL)
        return writable

    def _channels(self, topic: str, partitions: Iterable[Partition]) -> list[str]:
        names = {name for partition in partitions for name in partition.channels}
        return sorted(names.union(self._db.channels(topic)))

    def _meta(self, topic: str) -> TopicMeta:
        partitions = self._state.topics.get(topic)
        return partitions[0].meta if partitions else TopicMeta(0, 0)

    def set_tombstone(self, topic: str, address: str, is_set: bool) -> None:
        """Show a node, by host and HTTP port, no more to those who publish to a topic, or show it again.

        Only this nsqlookupd knows of it. Nothing happens where the node does not serve the topic.
        """
        for partition in self._state.topics.get(topic, ()):
            node = partition.registered
            if node is not None and node in self._state.alive:
                peer = self._peer(node)
                if address == f"{peer['broadcast_address']}:{peer['http_port']}":
                    (self._tombstones.add if is_set else self._tombstones.discard)((topic, node))

    def node_loads(self) -> list[dict[str, Any]]:
        """The rows of ``node_stat_list`` of /cluster/stats."""
        rows = []
        hour = time.localtime().tm_hour
        for node in self._state.node_ids:
            if node in self._state.alive:
                peer = {key: self._peer(node)[key] for key in _SHOWN_WITH_LOADS}
                leader, held = load_factors(*self._state.load_of(node, hour))
                rows.append({**peer, "leader_load_factor": leader, "node_load_factor": held})
        return rows

    # --- everything there is -----------------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """All topics."""
        return sorted({*self._state.topics, *self._db.topics()})

    def topic_metas(self) -> list[dict[str, Any]]:
        """All topics of the cluster, with how they were created."""
        rows = []
        for topic in sorted(self._state.topics):
            meta = self._meta(topic)
            shown = {key: value for key, value in meta.public().items() if key not in ("partition_num", "replica")}
            rows.append({"topic_name": topic, **shown, "registered_channels": meta.channels or None})
        return rows

    def debug(self) -> dict[str, list[dict[str, Any]]]:
        """What the nodes have registered, as /debug shows it."""
        shown: dict[str, list[dict[str, Any]]] = {}
        for partition in self._state.all_partitions():
            place = {"partitionID": str(partition.number)}
            node = partition.registered
            if node not in self._state.alive:
                continue
            marks = {"tombstoned": (partition.topic, node) in self._tombstones, "tombstoned_at": 0}
            peer = _registered(self._peer(node))
            shown.setdefault(f"topic:{partition.topic}", []).append({**place, **peer, **marks})
            for channel in partition.channels:
                row = {**place, "channelName": channel, "peerId": peer["id"]}
                shown.setdefault(f"channel:{partition.topic}:{partition.number}", []).append(row)
        for node in self._state.alive:
            row = _registered(self._peer(node))
            shown[f"peerInfo:{row['id']}"] = [row]
        return shown

    def channels(self, topic: str, number: str) -> list[str]:
        """The channels of a topic, or of one partition."""
        partitions = self._state.topics.get(topic, ())
        return self._channels(topic, [item for item in partitions if number in ("", str(item.number))])

    def nodes(self, now: float) -> list[dict[str, Any]]:
        """Every node that runs, with the partitions that are shown for it, and every nsqd of the original."""
        rows = [self._node_row(node) for node in self._state.node_ids if node in self._state.alive]
        for peer, topics in self._db.nodes(now):
            row = {**original_peer(peer), "tombstones": list(topics.values()), "topics": list(topics), "partitions": {}}
            rows.append(_without_ids(row))
        return rows

    def _node_row(self, node: str) -> dict[str, Any]:
        partitions: dict[str, list[str]] = {}
        for partition in self._state.all_partitions():
            if partition.registered == node:
                partitions.setdefault(partition.topic, []).append(str(partition.number))
        flags = [(topic, node) in self._tombstones for topic in partitions]
        return _without_ids(
            {**self._peer(node), "tombstones": flags, "topics": list(partitions), "partitions": partitions}
        )


def original_peer(peer: Peer) -> PeerInfo:
    """An nsqd of the original as the redesigned server shows it."""
    shown = {key: value for key, value in peer.public().items() if not key.startswith("topology_")}
    return {"id": peer.id, **shown, "distributed_id": ""}


def _registered(peer: PeerInfo) -> dict[str, Any]:
    shown = {key: peer[key] for key in ("id", *_SHOWN_WITH_LOADS, "version")}
    return {**shown, "last_update": time.time_ns()}


def _without_ids(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("id", "distributed_id")}
