"""What an nsqlookupd of the cluster answers, and its HTTP routes (youzan/nsq: nsqlookupd/http.go)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nsq_fast.broker.go import parse_integer
from nsq_fast.broker.http import Request, Router, required, style_negotiated, style_text
from nsq_fast.broker.lookupd import LookupDB, Peer
from nsq_fast.broker.redesigned.coordinator import SAME_NODE, Balancer, ClusterError, Coordinator, Topics
from nsq_fast.broker.redesigned.http import channel_of
from nsq_fast.broker.redesigned.http import topic_of as valid_topic_of
from nsq_fast.broker.redesigned.state import (
    MAX_RETENTION_DAYS,
    MAX_SYNC_EVERY,
    ClusterState,
    Partition,
    TopicMeta,
)
from nsq_fast.errors import NotLeader
from nsq_fast.names import is_valid_name

if TYPE_CHECKING:
    from nsq_fast.broker.redesigned.cluster import RedesignedCluster


# --- what an nsqlookupd of the cluster answers -----------------------------------------------------------------------
# Who serves which partition, for reading and for writing.
# For writing a partition is shown only where it may be written and has a channel; for reading also where it can only
# be consumed. Nsqds of the original that have registered stand beside them, without partitions, and are for reading
# only.


READ, WRITE = "r", "w"
MAX_PARTITION = 255
_NO_LOOKUPD = "lookup node id not found"
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
        """The rows of ``node_stat_list`` of /cluster/stats; a partition is as much to do as any other."""
        rows = []
        for node in self._state.node_ids:
            if node in self._state.alive:
                peer = {key: self._peer(node)[key] for key in _SHOWN_WITH_LOADS}
                held = [each for each in self._state.all_partitions() if node in each.in_sync]
                led = sum(each.leader == node for each in held)
                rows.append({**peer, "leader_load_factor": float(led), "node_load_factor": float(len(held))})
        return rows

    # --- everything there is -----------------------------------------------------------------------------------------

    def topics(self) -> list[str]:
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


# --- the HTTP routes of an nsqlookupd of the cluster -----------------------------------------------------------------
# youzan/nsq: nsqlookupd/http.go


MAX_PARTITION_NUM = 255
MAX_REPLICATOR = 5
MAX_LOAD_FACTOR = 10000
_NOT_CREATED = "topic is not created"


class ClusterLookupRoutes:
    """Builds the WSGI application of an nsqlookupd.

    Beside the real server's routes there are those below ``/embedded``, which kill and restart nodes, and move a leader
    without naming the nodes: for tests and demos.

    Args:
        listed_lookupds: gives the answer to /listlookup.
        is_leader: called to know whether this one takes administrative calls.
    """

    def __init__(
        self,
        lookup: Lookup,
        administration: Topics,
        coordinator: Coordinator,
        balancer: Balancer,
        cluster: RedesignedCluster,
        listed_lookupds: Callable[[], dict[str, Any]],
        is_leader: Callable[[], bool],
        version: str,
    ) -> None:
        self._lookup = lookup
        self._admin = administration
        self._coordinator = coordinator
        self._balancer = balancer
        self._cluster = cluster
        self._listed_lookupds = listed_lookupds
        self._is_leader = is_leader
        self._version = version

    def router(self) -> Router:
        router = Router()
        router.add("GET", "/ping", lambda request: "OK", style_text)
        for path, handler in (
            ("/info", lambda request: {"version": self._version, "ha_support": True}),
            ("/lookup", self._answer_lookup),
            ("/topics", self._topics),
            ("/channels", self._channels),
            ("/nodes", lambda request: {"producers": self._lookup.nodes(time.time())}),
            ("/listlookup", lambda request: self._listed_lookupds()),
            ("/debug", lambda request: self._lookup.debug()),
        ):
            router.add("GET", path, handler, style_negotiated)
        for path, handle in (
            ("/topic/create", self._create_topic),
            ("/topic/delete", self._delete_topic),
            ("/topic/partition/expand", self._expand_topic),
            ("/topic/partition/move", self._move_partition),
            ("/topic/meta/update", self._update_meta),
            ("/topic/tombstone", self._tombstone),
            ("/channel/create", self._create_channel),
            ("/channel/delete", self._delete_channel),
            ("/disable/write", self._disable_write),
            ("/cluster/node/remove", self._remove_node),
            ("/cluster/upgrade/begin", lambda request: self._upgrade(request, True)),
            ("/cluster/upgrade/done", lambda request: self._upgrade(request, False)),
            ("/cluster/balance/topn", lambda request: require_cluster_leader(request, self._is_leader)),
            ("/cluster/lookupd/tombstone", self._tombstone_lookupd),
            ("/embedded/leader/move", self._move_leader),
            ("/embedded/node/kill", self._kill_node),
            ("/embedded/node/restart", self._restart_node),
        ):
            router.add("POST", path, handle)
        router.add("PUT", "/topic/create", self._create_topic)
        router.add("GET", "/cluster/stats", self._cluster_stats)
        return router

    # --- looking up --------------------------------------------------------------------------------------------------

    def _answer_lookup(self, request: Request) -> dict[str, Any]:
        topic = topic_of(request)
        access = request.get("access") or READ
        if access not in (READ, WRITE):
            raise request.refuse(400, "INVALID_ACCESS_MODE")
        number, needs_meta = request.get("partition") or "", bool(request.get("metainfo"))
        try:
            return self._lookup.answer(topic, access, number, needs_meta, time.time())
        except NoAnswer as error:
            raise request.refuse(404, str(error)) from error

    def _topics(self, request: Request) -> dict[str, Any]:
        topics = {"topics": self._lookup.topics()}
        if request.get("metaInfo") == "true":
            return {"meta_info": self._lookup.topic_metas(), **topics}
        return topics

    def _channels(self, request: Request) -> dict[str, Any]:
        return {"channels": self._lookup.channels(topic_of(request), request.get("partition") or "")}

    # --- topics ------------------------------------------------------------------------------------------------------

    def _create_topic(self, request: Request) -> None:
        topic = topic_of(request)
        if not is_valid_name(topic):
            raise request.refuse(400, "INVALID_ARG_TOPIC")
        meta = TopicMeta(
            _number(request, "partition_num", MAX_PARTITION_NUM),
            _number(request, "replicator", MAX_REPLICATOR),
            ordered=_flag(request, "orderedmulti"),
            ext=_flag(request, "extend"),
            multi_part=_flag(request, "multipart"),
            disable_channel_auto_create=_flag(request, "disable_channel_auto_create"),
            suggested_load=_load(request),
            sync_every=_sync_every(request, 0),
            retention_days=_days(request, 0),
        )
        self._require_leader(request)
        with refusing(request):
            self._admin.create(topic, meta)

    def _delete_topic(self, request: Request) -> None:
        topic, which = topic_of(request), request.get("partition")
        if not which:
            raise request.refuse(400, "MISSING_ARG_TOPIC_PARTITION")
        if which != "**":
            raise request.refuse(400, "REMOVE_SINGLE_PARTITION_NOT_ALLOWED")
        require_cluster_leader(request, self._is_leader, 500)
        with refusing(request, 500):
            self._admin.delete(topic)

    def _tombstone(self, request: Request) -> None:
        """Whether there is such a topic, or node, is not looked at."""
        topic, node = topic_of(request), request.get("node")
        if not node:
            raise request.refuse(400, "MISSING_ARG_NODE")
        self._lookup.set_tombstone(topic, node, request.get("restore") != "true")

    def _expand_topic(self, request: Request) -> None:
        topic = topic_of(request)
        count = _number(request, "partition_num", MAX_PARTITION_NUM)
        require_cluster_leader(request, self._is_leader, 500)
        self._refuse_if(
            request,
            500,
            (not is_valid_name(topic), "invalid topic name"),
            (count >= MAX_PARTITION_NUM, "max partition allowed exceed"),
        )
        with refusing(request, 500):
            self._coordinator.require_stable()
        self._refuse_if(request, 500, (not self._admin.state.topics.get(topic), _NOT_CREATED))
        with refusing(request, 500):
            self._admin.expand(topic, count)

    def _update_meta(self, request: Request) -> None:
        topic = topic_of(request)
        replica = _number(request, "replicator", MAX_REPLICATOR) if request.get("replicator") else None
        sync_every, days = _sync_every(request, -1), _days(request, -1)
        require_cluster_leader(request, self._is_leader)
        self._check_meta(request, topic, sync_every, days)
        with refusing(request):
            self._admin.set_upkeep(topic, sync_every, days)
            if replica is not None:
                self._admin.set_replica(topic, replica)
            if _flag(request, "upgradeext"):
                self._admin.upgrade_to_ext(topic)
        disabled = request.get("disable_channel_auto_create")
        if disabled:
            self._admin.set_channel_auto_create(topic, disabled == "true")

    def _check_meta(self, request: Request, topic: str, sync_every: int, days: int) -> None:
        self._refuse_if(
            request,
            400,
            (not is_valid_name(topic), "invalid topic name"),
            (days > MAX_RETENTION_DAYS, "max retention days allowed exceed"),
            (sync_every > MAX_SYNC_EVERY, "max sync every allowed exceed"),
            (not self._admin.state.topics.get(topic), _NOT_CREATED),
        )

    def _refuse_if(self, request: Request, status: int, *checks: tuple[bool, str]) -> None:
        for is_wrong, text in checks:
            if is_wrong:
                raise request.refuse(status, text)

    # --- channels ----------------------------------------------------------------------------------------------------

    def _create_channel(self, request: Request) -> None:
        topic, channel = self._channel_of_topic(request)
        with refusing(request):
            self._admin.check_new_channel(topic, channel)
            require_cluster_leader(request, self._is_leader)
            self._admin.register_channel(topic, channel)

    def _delete_channel(self, request: Request) -> None:
        topic, channel = self._channel_of_topic(request)
        with refusing(request):
            if self._admin.has_registered(topic, channel):
                require_cluster_leader(request, self._is_leader)
                self._admin.unregister_channel(topic, channel)

    def _channel_of_topic(self, request: Request) -> tuple[str, str]:
        return valid_topic_of(request), channel_of(request)

    def _disable_write(self, request: Request) -> None:
        self._admin.state.is_write_disabled = request.get("type") == "all"

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _cluster_stats(self, request: Request) -> dict[str, Any]:
        if not self._is_leader():
            raise request.refuse(400, NotLeader.code)
        return {"stable": self._coordinator.is_stable, "node_stat_list": self._lookup.node_loads(), "topn_topics": []}

    def _remove_node(self, request: Request) -> None:
        """Whether there is such a node is not looked at."""
        require_cluster_leader(request, self._is_leader)
        self._balancer.empty(request.get("remove_node") or "")

    def _upgrade(self, request: Request, is_upgrading: bool) -> None:
        require_cluster_leader(request, self._is_leader)
        self._admin.state.is_upgrading = is_upgrading

    def _tombstone_lookupd(self, request: Request) -> None:
        node = request.get("node")
        if not node:
            raise request.refuse(400, "MISSING_ARG_NODE")
        tombstones = self._admin.state.lookupd_tombstones
        if request.get("restore"):
            if node not in tombstones:
                raise request.refuse(404, _NO_LOOKUPD)
            tombstones.remove(node)
        elif all(node != each["ID"] for each in self._listed_lookupds()["lookupdnodes"]):
            raise request.refuse(404, _NO_LOOKUPD)
        else:
            tombstones.add(node)

    def _move_partition(self, request: Request) -> None:
        topic, number = topic_of(request), _partition(request)
        origin, target = request.get("move_from") or "", request.get("move_to") or ""
        if origin == target:
            raise request.refuse(400, SAME_NODE)
        if self._admin.state.partition(topic, number) is None:
            raise request.refuse(400, NO_TOPIC)
        require_cluster_leader(request, self._is_leader)
        with refusing(request):
            self._coordinator.require_stable()
            is_leader = request.get("move_leader") == "true"
            if is_leader:  # the move of a replica checks itself
                self._coordinator.check(topic, number, origin, target, is_leader=True)
            self._coordinator.move(topic, number, origin, target, is_leader=is_leader)

    def _move_leader(self, request: Request) -> None:
        with refusing(request):
            self._coordinator.move_leader(topic_of(request), _partition(request))

    def _kill_node(self, request: Request) -> None:
        with refusing(request):
            self._cluster.kill_node(_node(request))

    def _restart_node(self, request: Request) -> None:
        with refusing(request):
            self._cluster.restart_node(_node(request))

    def _require_leader(self, request: Request) -> None:
        if not self._is_leader():
            raise request.refuse(400, NotLeader.code)


def require_cluster_leader(request: Request, is_leader: Callable[[], bool], status: int = 400) -> None:
    """Refuse a request to an nsqlookupd that does not lead; other routes of the real server say it in other words."""
    if not is_leader():
        raise request.refuse(status, "Not nsqlookup leader")


@contextmanager
def refusing(request: Request, status: int = 400) -> Iterator[None]:
    """Refuse a request with the text of a ClusterError."""
    try:
        yield
    except ClusterError as error:
        raise request.refuse(status, str(error)) from error


def topic_of(request: Request) -> str:
    """The topic that a request names. Refuses the request."""
    topic = required(request, "topic")
    if not topic:
        raise request.refuse(400, "MISSING_ARG_TOPIC")
    return topic


def _partition(request: Request) -> int:
    value = request.get("partition")
    if not value:
        raise request.refuse(400, "MISSING_ARG_TOPIC_PARTITION")
    try:
        number = parse_integer(value.encode())
    except ValueError:
        number = -1
    if not 0 <= number < MAX_PARTITION:
        raise request.refuse(400, "INVALID_ARG_TOPIC_PARTITION_NUM")
    return number


def _node(request: Request) -> int | str:
    node = required(request, "node")
    return int(node) if node.isdecimal() else node


def _number(request: Request, name: str, largest: int) -> int:
    value = request.get(name)
    if not value:
        raise request.refuse(400, f"MISSING_ARG_TOPIC_{name.upper()}")
    try:
        number = parse_integer(value.encode())
    except ValueError:
        number = 0
    if not 0 < number <= largest:
        raise request.refuse(400, f"INVALID_ARG_TOPIC_{name.upper()}")
    return number


def _sync_every(request: Request, default: int) -> int:
    return _integer(request, "syncdisk", default, "INVALID_ARG_TOPIC_SYNC_DISK")


def _days(request: Request, default: int) -> int:
    return _integer(request, "retention", default)


def _load(request: Request) -> int:
    text = "INVALID_ARG_TOPIC_LOAD_FACTOR"
    load = _integer(request, "suggestload", 0, text)
    if not 0 <= load <= MAX_LOAD_FACTOR:
        raise request.refuse(400, text)
    return load


def _integer(request: Request, name: str, default: int, text: str | None = None) -> int:
    """A whole number; refuses the request with a text, or with what is wrong."""
    value = request.get(name)
    if not value:
        return default
    try:
        return parse_integer(value.encode())
    except ValueError as error:
        raise request.refuse(400, text or str(error)) from error


def _flag(request: Request, name: str) -> bool:
    return request.get(name) == "true"
