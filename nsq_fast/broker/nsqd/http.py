"""The HTTP routes of nsqd (nsqio/nsq: nsqd/http.go)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from nsq_fast.broker.errors import Exiting, NotFound
from nsq_fast.broker.http.arguments import required, topic_and_channel
from nsq_fast.broker.http.debug import add_block_rate_route, add_debug_routes
from nsq_fast.broker.http.router import Request, Router, style_text
from nsq_fast.names import Address, is_valid_name

from .config import Settings
from .host_http import HostRoutes
from .nsqd import Nsqd
from .stats import memory_stats, producer_stats, render_text, topic_stats
from .topic import Topic

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_INTEGER = re.compile(r"[+-]?[0-9]+\Z")


class NsqdRoutes(HostRoutes):
    """Builds the WSGI application of an nsqd."""

    def __init__(self, nsqd: Nsqd, addresses: Callable[[], tuple[Address | None, Address | None]], settings: Settings):
        super().__init__(nsqd, addresses, settings)
        self._nsqd = nsqd

    def router(self) -> Router:
        """All routes."""
        router = Router()
        router.add("GET", "/ping", self.ping, style_text)
        router.add("GET", "/info", self.info)
        router.add("GET", "/stats", self._stats)
        router.add("POST", "/pub", self._pub)
        router.add("POST", "/mpub", self._mpub)
        router.add("POST", "/topic/create", self._create_topic)
        router.add("POST", "/topic/delete", self._delete_topic)
        router.add("POST", "/topic/empty", self._empty_topic)
        router.add("POST", "/topic/pause", lambda request: self._any_topic(request).pause())
        router.add("POST", "/topic/unpause", lambda request: self._any_topic(request).unpause())
        router.add("POST", "/channel/create", self._create_channel)
        router.add("POST", "/channel/delete", self._delete_channel)
        router.add("POST", "/channel/empty", lambda request: self._channel(request).empty())
        router.add("POST", "/channel/pause", lambda request: self._channel(request).pause())
        router.add("POST", "/channel/unpause", lambda request: self._channel(request).unpause())
        router.add("GET", "/config/*", self.get_config)
        router.add("PUT", "/config/*", self.put_config)
        add_debug_routes(router)
        add_block_rate_route(router)
        return router

    def _stats(self, request: Request) -> Any:
        topic, channel = request.get("topic") or "", request.get("channel") or ""
        include_clients = _BOOLEANS.get(request.get("include_clients") or "", True)
        include_memory = _BOOLEANS.get(request.get("include_mem") or "", True)
        topics = topic_stats(self._nsqd, topic, channel, include_clients)
        # As the original does, a topic that does not exist leaves the producers out.
        producers = producer_stats(self._nsqd, topic) if include_clients and topics is not None else None
        memory = memory_stats() if include_memory else None
        if request.get("format") != "json":
            return render_text(self._nsqd, topics or [], producers or [], memory, self.health())
        return {
            "version": self._nsqd.options.version,
            "health": self.health(),
            "start_time": int(self._nsqd.started_at),
            "topics": topics,
            **({} if memory is None else {"memory": memory}),
            "producers": producers,
        }

    def _pub(self, request: Request) -> str:
        body = request.body(self._nsqd.options.max_msg_size, "MSG_TOO_BIG")
        if not body:
            raise request.refuse(400, "MSG_EMPTY")
        topic = self._created_topic(request)
        defer_ms = self._defer(request)
        with self._publishing(request):
            topic.put(body, defer_ms)
        return "OK"

    def _defer(self, request: Request) -> int:
        text = request.get("defer")
        if text is None:
            return 0
        if not _INTEGER.match(text) or not 0 <= int(text) <= self._nsqd.options.max_req_timeout * 1000:
            raise request.refuse(400, "INVALID_DEFER")
        return int(text)

    def _mpub(self, request: Request) -> str:
        request.check_length(self._nsqd.options.max_body_size, "BODY_TOO_BIG")
        topic = self._created_topic(request)
        binary = request.get("binary")
        body = request.body(self._nsqd.options.max_body_size, "BODY_TOO_BIG")
        if binary is not None and _BOOLEANS.get(binary, True):
            bodies = self.split_binary(request, body)
        else:
            bodies = self.split_lines(request, body)
        with self._publishing(request):
            topic.put_many(bodies)
        return "OK"

    @contextmanager
    def _publishing(self, request: Request) -> Iterator[None]:
        """Refuse a publish that fails, for whatever reason, as nsqio/nsq does: nsqd/http.go, doPUB and doMPUB."""
        try:
            with _refusing_when_exiting(request):
                yield
        except OSError as error:
            self._nsqd.error = error
            raise request.refuse(503, "EXITING") from error
        self._nsqd.error = None

    def _create_topic(self, request: Request) -> None:
        self._created_topic(request)

    def _delete_topic(self, request: Request) -> None:
        with _refusing_when_missing(request, "TOPIC_NOT_FOUND"):
            self._nsqd.delete_topic(required(request, "topic"))

    def _empty_topic(self, request: Request) -> None:
        if not is_valid_name(required(request, "topic")):
            raise request.refuse(400, "INVALID_TOPIC")
        self._any_topic(request).empty()

    def _create_channel(self, request: Request) -> None:
        _, channel = topic_and_channel(request)
        self._any_topic(request).get_channel(channel)

    def _delete_channel(self, request: Request) -> None:
        _, channel = topic_and_channel(request)
        topic = self._any_topic(request)
        with _refusing_when_missing(request, "CHANNEL_NOT_FOUND"):
            topic.delete_channel(channel)

    def _created_topic(self, request: Request) -> Topic:
        topic = required(request, "topic")
        if not is_valid_name(topic):
            raise request.refuse(400, "INVALID_TOPIC")
        with _refusing_when_exiting(request):
            return self._nsqd.get_topic(topic)

    def _any_topic(self, request: Request) -> Topic:
        with _refusing_when_missing(request, "TOPIC_NOT_FOUND"):
            return self._nsqd.existing_topic(required(request, "topic"))

    def _channel(self, request: Request) -> Any:
        _, channel = topic_and_channel(request)
        topic = self._any_topic(request)
        with _refusing_when_missing(request, "CHANNEL_NOT_FOUND"):
            return topic.existing_channel(channel)


def require_tls(https_port: int) -> Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]:
    """The application that plain HTTP gets where TLS is required: 403 for everything."""
    body = b'{"message": "TLS_REQUIRED", "https_port": %d}' % https_port
    headers = [
        ("Content-Type", "application/json; charset=utf-8"),
        ("X-Nsq-Content-Type", "nsq; version=1.0"),
        ("Content-Length", str(len(body))),
    ]

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("403 Forbidden", headers)
        return [body]

    return application


@contextmanager
def _refusing_when_missing(request: Request, text: str) -> Iterator[None]:
    try:
        yield
    except NotFound as error:
        raise request.refuse(404, text) from error


@contextmanager
def _refusing_when_exiting(request: Request) -> Iterator[None]:
    try:
        yield
    except Exiting as error:
        raise request.refuse(503, "EXITING") from error
