"""The HTTP routes of an nsqlookupd of the cluster (youzan/nsq: nsqlookupd/http.go)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nsq_fast.broker.go_integer import parse_integer
from nsq_fast.broker.http.debug import add_block_rate_route
from nsq_fast.broker.http.router import Request, Router, style_negotiated, style_text
from nsq_fast.errors import NotLeader
from nsq_fast.names import is_valid_name

from .cluster_http import ClusterRoutes, refusing, require_cluster_leader, topic_of
from .coordinator import Coordinator
from .log_level import set_log_level
from .lookup import READ, WRITE, Lookup, NoAnswer
from .state import MAX_RETENTION_DAYS, MAX_SYNC_EVERY, TopicMeta
from .targets import channel_of
from .targets import topic_of as valid_topic_of
from .topics import Topics
from .upkeep_http import add_runtime_routes

MAX_PARTITION_NUM = 255
MAX_REPLICATOR = 5
MAX_LOAD_FACTOR = 10000
_NOT_CREATED = "topic is not created"


class ClusterLookupRoutes:
    """Builds the WSGI application of an nsqlookupd.

    Args:
        cluster: the routes that are about nodes.
        listed_lookupds: gives the answer to /listlookup.
        is_leader: called to know whether this one takes administrative calls.
    """

    def __init__(
        self,
        lookup: Lookup,
        administration: Topics,
        coordinator: Coordinator,
        cluster: ClusterRoutes,
        listed_lookupds: Callable[[], dict[str, Any]],
        is_leader: Callable[[], bool],
        version: str,
    ) -> None:
        self._lookup = lookup
        self._admin = administration
        self._coordinator = coordinator
        self._cluster = cluster
        self._listed_lookupds = listed_lookupds
        self._is_leader = is_leader
        self._version = version

    def router(self) -> Router:
        """All routes."""
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
        router.add("POST", "/topic/create", self._create_topic)
        router.add("PUT", "/topic/create", self._create_topic)
        router.add("POST", "/topic/delete", self._delete_topic)
        router.add("POST", "/topic/partition/expand", self._expand_topic)
        router.add("POST", "/topic/meta/update", self._update_meta)
        router.add("POST", "/topic/tombstone", self._tombstone)
        router.add("POST", "/loglevel/set", set_log_level)
        add_runtime_routes(router)
        add_block_rate_route(router)
        router.add("POST", "/channel/create", self._create_channel)
        router.add("POST", "/channel/delete", self._delete_channel)
        router.add("POST", "/disable/write", self._disable_write)
        self._cluster.add_to(router)
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

    def _require_leader(self, request: Request) -> None:
        if not self._is_leader():
            raise request.refuse(400, NotLeader.code)


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
