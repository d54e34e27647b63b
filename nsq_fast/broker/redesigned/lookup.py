"""What an nsqlookupd of the cluster answers: its HTTP routes (youzan/nsq: nsqlookupd/http.go).

For writing a partition is shown only where it may be written and has a channel; for reading also where it can only be
consumed. Nsqds of the original that have registered stand beside them, without partitions, and are for reading only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from nsq_fast.broker.http import Request, Router, style_negotiated, style_text, style_v1
from nsq_fast.broker.message import ClusterError
from nsq_fast.broker.redesigned.coordinator import NO_TOPIC
from nsq_fast.broker.redesigned.partition import MAX_RETENTION_DAYS, MAX_SYNC_EVERY, Partition, TopicMeta
from nsq_fast.errors import NotLeader
from nsq_fast.names import is_valid_name

if TYPE_CHECKING:
    from nsq_fast.broker.redesigned.cluster import ClusterLookupdServer, RedesignedCluster

READ, WRITE = "r", "w"
MAX_PARTITION_NUM = 255
MAX_REPLICATOR = 5
NO_CHANNEL = "Topic has no channel, should init at least one for the new topic"
_NOT_CREATED = "topic is not created"
_PLACE = ("hostname", "broadcast_address", "tcp_port", "http_port")


class ClusterLookupRoutes:
    """The routes of one nsqlookupd of a cluster."""

    def __init__(self, server: ClusterLookupdServer, cluster: RedesignedCluster) -> None:
        self._server = server
        self._cluster = cluster
        self._state = cluster.state
        self._db = server.db
        self._coordinator = cluster.coordinator
        self._tombstones: set[tuple[str, str]] = set()

    def router(self) -> Router:
        version = self._server.options.version
        negotiated = (
            ("GET", "/info", lambda request: {"version": version, "ha_support": True}),
            ("GET", "/lookup", self._lookup),
            ("GET", "/topics", self._topics),
            ("GET", "/channels", self._channels),
            ("GET", "/nodes", lambda request: {"producers": self._nodes()}),
            ("GET", "/listlookup", lambda request: self._cluster.listed_lookupds()),
        )
        rows = (
            ("POST", "/topic/create", self._create_topic),
            ("PUT", "/topic/create", self._create_topic),
            ("POST", "/topic/delete", _failing(self._delete_topic)),
            ("POST", "/topic/partition/expand", _failing(self._expand_topic)),
            ("POST", "/topic/partition/move", self._move_partition),
            ("POST", "/topic/meta/update", self._update_meta),
            ("POST", "/topic/tombstone", self._tombstone),
            ("POST", "/channel/create", self._create_channel),
            ("POST", "/channel/delete", self._delete_channel),
            ("POST", "/cluster/node/remove", self._remove_node),
            ("GET", "/cluster/stats", self._cluster_stats),
        )
        return Router(
            (style_text, [("GET", "/ping", lambda request: "OK")]), (style_negotiated, negotiated), (style_v1, rows)
        )

    # --- looking up --------------------------------------------------------------------------------------------------

    def _lookup(self, request: Request) -> dict[str, Any]:
        topic, access = _topic(request), request.get("access") or READ
        if access not in (READ, WRITE):
            raise request.refuse(400, "INVALID_ACCESS_MODE")
        partitions = self._partitions(request, topic)
        originals = self._db.producers(topic, time.time())
        if access == WRITE and not originals and topic not in self._state.topics:
            raise request.refuse(404, NO_TOPIC)
        found = {each.number: node for each in partitions if (node := self._node_of(each, access)) is not None}
        if access == WRITE:
            found = {number: node for number, node in found.items() if (topic, node) not in self._tombstones}
            has_any = bool(found or originals)
            is_open = self._cluster.options.allow_write_with_nochannels
            open_ones = {each.number for each in partitions if each.channels or is_open}
            found = {number: node for number, node in found.items() if number in open_ones}
            if has_any and not found:
                raise request.refuse(404, NO_CHANNEL)
            originals = []
        answer: dict[str, Any] = {
            "channels": self._channels_of(topic, partitions),
            "partitions": {str(number): self._peer(node) for number, node in found.items()},
            "producers": [*map(self._peer, sorted(set(found.values()))), *map(_original, originals)],
        }
        if request.get("metainfo"):
            answer["meta"] = self._meta(topic).public()
        return answer

    def _partitions(self, request: Request, topic: str) -> list[Partition]:
        number = request.get("partition") or ""
        return [each for each in self._state.topics.get(topic, ()) if number in ("", str(each.number))]

    def _node_of(self, partition: Partition, access: str) -> str | None:
        node = partition.registered
        if node is None and access == READ:
            node = partition.leader
        return node if node in self._state.alive else None

    def _peer(self, node: str) -> dict[str, Any]:
        return self._cluster.node(node).peer()

    def _channels_of(self, topic: str, partitions: Iterable[Partition]) -> list[str]:
        return sorted({name for each in partitions for name in each.channels}.union(self._db.channels(topic)))

    def _meta(self, topic: str) -> TopicMeta:
        partitions = self._state.topics.get(topic)
        return partitions[0].meta if partitions else TopicMeta(0, 0)

    def _topics(self, request: Request) -> dict[str, Any]:
        topics = {"topics": sorted({*self._state.topics, *self._db.topics()})}
        if request.get("metaInfo") != "true":
            return topics
        rows = []
        for topic in sorted(self._state.topics):
            meta = self._meta(topic)
            shown = {key: value for key, value in meta.public().items() if key not in ("partition_num", "replica")}
            rows.append({"topic_name": topic, **shown, "registered_channels": meta.channels or None})
        return {"meta_info": rows, **topics}

    def _channels(self, request: Request) -> dict[str, Any]:
        topic = _topic(request)
        return {"channels": self._channels_of(topic, self._partitions(request, topic))}

    def _nodes(self) -> list[dict[str, Any]]:
        """Every node that runs, with the partitions that are shown for it, and every nsqd of the original."""
        rows = []
        for node in self._running():
            shown: dict[str, list[str]] = {}
            for each in self._state.all_partitions():
                if each.registered == node:
                    shown.setdefault(each.topic, []).append(str(each.number))
            flags = [(topic, node) in self._tombstones for topic in shown]
            rows.append({**self._peer(node), "tombstones": flags, "topics": list(shown), "partitions": shown})
        for peer, topics in self._db.nodes(time.time()):
            marks = {"tombstones": list(topics.values()), "topics": list(topics), "partitions": {}}
            rows.append({**_original(peer), **marks})
        return [{key: value for key, value in row.items() if key not in ("id", "distributed_id")} for row in rows]

    def _running(self) -> list[str]:
        return [node for node in self._state.node_ids if node in self._state.alive]

    # --- topics ------------------------------------------------------------------------------------------------------

    def _create_topic(self, request: Request) -> None:
        topic = _topic(request)
        if not is_valid_name(topic):
            raise request.refuse(400, "INVALID_ARG_TOPIC")
        meta = TopicMeta(
            _number(request, "partition_num", MAX_PARTITION_NUM),
            _number(request, "replicator", MAX_REPLICATOR),
            ordered=_flag(request, "orderedmulti"),
            ext=_flag(request, "extend"),
            multi_part=_flag(request, "multipart"),
            disable_channel_auto_create=_flag(request, "disable_channel_auto_create"),
            sync_every=_sync_every(request, 0),
            retention_days=request.integer("retention", default=0),
        )
        if not self._leads():
            raise NotLeader
        self._coordinator.create(topic, meta)

    def _delete_topic(self, request: Request) -> None:
        topic, which = _topic(request), request.get("partition")
        if not which:
            raise request.refuse(400, "MISSING_ARG_TOPIC_PARTITION")
        if which != "**":
            raise request.refuse(400, "REMOVE_SINGLE_PARTITION_NOT_ALLOWED")
        self._require_leader()
        self._coordinator.delete(topic)

    def _tombstone(self, request: Request) -> None:
        """Show a node, by host and HTTP port, no more to those who publish to a topic, or show it again.

        Only this nsqlookupd knows of it. Whether there is such a topic, or node, is not looked at.
        """
        topic, address = _topic(request), request.get("node")
        if not address:
            raise request.refuse(400, "MISSING_ARG_NODE")
        for partition in self._state.topics.get(topic, ()):
            node = partition.registered
            if node is not None and node in self._state.alive:
                peer = self._peer(node)
                if address == f"{peer['broadcast_address']}:{peer['http_port']}":
                    is_shown = request.get("restore") == "true"
                    (self._tombstones.discard if is_shown else self._tombstones.add)((topic, node))

    def _expand_topic(self, request: Request) -> None:
        topic = _topic(request)
        count = _number(request, "partition_num", MAX_PARTITION_NUM)
        self._require_leader()
        if not is_valid_name(topic):
            raise ClusterError("invalid topic name")
        if count >= MAX_PARTITION_NUM:
            raise ClusterError("max partition allowed exceed")
        self._coordinator.require_stable()
        if not self._state.topics.get(topic):
            raise ClusterError(_NOT_CREATED)
        self._coordinator.expand(topic, count)

    def _update_meta(self, request: Request) -> None:
        topic = _topic(request)
        replica = _number(request, "replicator", MAX_REPLICATOR) if request.get("replicator") else None
        sync_every, days = _sync_every(request, -1), request.integer("retention", default=-1)
        self._require_leader()
        for is_wrong, text in (
            (not is_valid_name(topic), "invalid topic name"),
            (days > MAX_RETENTION_DAYS, "max retention days allowed exceed"),
            (sync_every > MAX_SYNC_EVERY, "max sync every allowed exceed"),
            (not self._state.topics.get(topic), _NOT_CREATED),
        ):
            if is_wrong:
                raise ClusterError(text)
        self._coordinator.update(
            topic,
            replica=replica,
            sync_every=sync_every,
            retention_days=days,
            upgrade_ext=_flag(request, "upgradeext"),
        )
        disabled = request.get("disable_channel_auto_create")
        if disabled:
            self._coordinator.set_channel_auto_create(topic, disabled == "true")

    def _create_channel(self, request: Request) -> None:
        topic, channel = request.valid("topic", is_filled=True), request.valid("channel", is_filled=True)
        self._coordinator.check_new_channel(topic, channel)
        self._require_leader()
        self._coordinator.register_channel(topic, channel)

    def _delete_channel(self, request: Request) -> None:
        topic, channel = request.valid("topic", is_filled=True), request.valid("channel", is_filled=True)
        if self._coordinator.has_registered(topic, channel):
            self._require_leader()
            self._coordinator.unregister_channel(topic, channel)

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _cluster_stats(self, request: Request) -> dict[str, Any]:
        """Loads are numbers of partitions: one is as much to do as any other."""
        if not self._leads():
            raise NotLeader
        rows = []
        for node in self._running():
            place = {key: self._peer(node)[key] for key in _PLACE}
            held = [each for each in self._state.all_partitions() if node in each.in_sync]
            led = sum(each.leader == node for each in held)
            rows.append({**place, "leader_load_factor": float(led), "node_load_factor": float(len(held))})
        return {"stable": self._coordinator.is_stable, "node_stat_list": rows, "topn_topics": []}

    def _remove_node(self, request: Request) -> None:
        """Whether there is such a node is not looked at."""
        self._require_leader()
        self._coordinator.empty(request.get("remove_node") or "")

    def _move_partition(self, request: Request) -> None:
        topic, number = (
            _topic(request),
            _in_range(request, "partition", "PARTITION", range(MAX_PARTITION_NUM), "PARTITION_NUM"),
        )
        origin, target = request.get("move_from") or "", request.get("move_to") or ""
        if origin == target:
            raise ClusterError("move to and from node can not be the same")
        partition = self._state.partition(topic, number)
        if partition is None:
            raise ClusterError(NO_TOPIC)
        self._require_leader()
        self._coordinator.move(partition, origin, target, is_leader=_flag(request, "move_leader"))

    def _leads(self) -> bool:
        return next((each for each in self._cluster.lookupds if each.is_running), None) is self._server

    def _require_leader(self) -> None:
        """Refuse a request where this one does not lead; other routes of the real server say it in other words."""
        if not self._leads():
            raise ClusterError("Not nsqlookup leader")


def _failing(handle: Callable[[Request], None]) -> Callable[[Request], None]:
    """A handler: what the cluster refuses is a failure of the server."""

    def fail(request: Request) -> None:
        try:
            handle(request)
        except ClusterError as error:
            raise request.refuse(500, str(error)) from error

    return fail


def _original(peer: Any) -> dict[str, Any]:
    """An nsqd of the original as the redesigned server shows it."""
    shown = {key: value for key, value in peer.public().items() if not key.startswith("topology_")}
    return {"id": peer.id, **shown, "distributed_id": ""}


# --- arguments of requests; each refuses the request -----------------------------------------------------------------


def _topic(request: Request) -> str:
    return request.required("topic", is_filled=True)


def _number(request: Request, name: str, largest: int) -> int:
    return _in_range(request, name, name.upper(), range(1, largest + 1), name.upper())


def _in_range(request: Request, name: str, missing: str, numbers: range, invalid: str) -> int:
    if not request.get(name):
        raise request.refuse(400, f"MISSING_ARG_TOPIC_{missing}")
    number = request.integer(name, f"INVALID_ARG_TOPIC_{invalid}")
    if number not in numbers:
        raise request.refuse(400, f"INVALID_ARG_TOPIC_{invalid}")
    return number


def _sync_every(request: Request, default: int) -> int:
    return request.integer("syncdisk", "INVALID_ARG_TOPIC_SYNC_DISK", default)


def _flag(request: Request, name: str) -> bool:
    return request.get(name) == "true"
