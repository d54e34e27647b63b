"""The HTTP routes of nsqlookupd, over a ``LookupDB`` (nsqio/nsq: nsqlookupd/http.go)."""

from __future__ import annotations

import time
from typing import Any

from nsq_fast.broker.http.arguments import required, topic_and_channel
from nsq_fast.broker.http.debug import add_profile_routes
from nsq_fast.broker.http.router import Request, Router, style_text
from nsq_fast.names import is_valid_name

from .registration_db import LookupDB, Peer, Producer

# What Go's UnixNano gives for the zero time; clients of /debug see it for "never".
_NEVER_NS = -6795364578871345152


class LookupdRoutes:
    """Builds the WSGI application of an nsqlookupd."""

    def __init__(self, db: LookupDB, version: str) -> None:
        self._db = db
        self._version = version

    def router(self) -> Router:
        """All routes."""
        router = Router()
        router.add("GET", "/ping", self._ping, style_text)
        router.add("GET", "/info", self._info)
        router.add("GET", "/lookup", self._lookup)
        router.add("GET", "/topics", self._topics)
        router.add("GET", "/channels", self._channels)
        router.add("GET", "/nodes", self._nodes)
        router.add("GET", "/debug", self._debug)
        router.add("POST", "/topic/create", self._create_topic)
        router.add("POST", "/topic/delete", self._delete_topic)
        router.add("POST", "/topic/tombstone", self._tombstone)
        router.add("POST", "/channel/create", self._create_channel)
        router.add("POST", "/channel/delete", self._delete_channel)
        add_profile_routes(router, "/debug/pprof")
        return router

    def _ping(self, request: Request) -> str:
        return "OK"

    def _info(self, request: Request) -> dict[str, Any]:
        return {"version": self._version}

    def _lookup(self, request: Request) -> dict[str, Any]:
        topic = required(request, "topic")
        if not self._db.has_topic(topic):
            raise request.refuse(404, "TOPIC_NOT_FOUND")
        producers = [peer.public() for peer in self._db.producers(topic, time.time())]
        return {"channels": self._db.channels(topic), "producers": producers}

    def _topics(self, request: Request) -> dict[str, Any]:
        return {"topics": self._db.topics()}

    def _channels(self, request: Request) -> dict[str, Any]:
        return {"channels": self._db.channels(required(request, "topic"))}

    def _nodes(self, request: Request) -> dict[str, Any]:
        return {"producers": [_node(peer, topics) for peer, topics in self._db.nodes(time.time())]}

    def _debug(self, request: Request) -> dict[str, Any]:
        return {
            f"{category}:{topic}:{channel}": [_debug_producer(producer) for producer in producers]
            for category, topic, channel, producers in self._db.registrations()
            if producers
        }

    def _create_topic(self, request: Request) -> None:
        topic = required(request, "topic")
        if not is_valid_name(topic):
            raise request.refuse(400, "INVALID_ARG_TOPIC")
        self._db.add_topic(topic)

    def _delete_topic(self, request: Request) -> None:
        self._db.remove_topic(required(request, "topic"))

    def _tombstone(self, request: Request) -> None:
        self._db.tombstone(required(request, "topic"), required(request, "node"), time.time())

    def _create_channel(self, request: Request) -> None:
        self._db.add_channel(*topic_and_channel(request))

    def _delete_channel(self, request: Request) -> None:
        if not self._db.remove_channel(*topic_and_channel(request)):
            raise request.refuse(404, "CHANNEL_NOT_FOUND")


def _node(peer: Peer, topics: dict[str, bool]) -> dict[str, Any]:
    return {**peer.public(), "tombstones": list(topics.values()), "topics": list(topics)}


def _debug_producer(producer: Producer) -> dict[str, Any]:
    peer = producer.peer
    shown = {"id": peer.id, **peer.public(), "last_update": int(peer.last_update * 1e9)}
    del shown["remote_address"]
    tombstoned_at = producer.tombstoned_at
    shown["tombstoned"] = tombstoned_at is not None
    shown["tombstoned_at"] = _NEVER_NS if tombstoned_at is None else int(tombstoned_at * 1e9)
    return shown
