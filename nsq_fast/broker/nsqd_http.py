"""The HTTP routes of nsqd (nsqio/nsq: nsqd/http.go)."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import msgspec

from nsq_fast.broker.channel import Channel
from nsq_fast.broker.http import Reply, Request, Router, style_text, style_v1
from nsq_fast.broker.nsqd import Host, Nsqd
from nsq_fast.broker.stats import memory_stats, producer_stats, text_lines, topic_stats
from nsq_fast.broker.topic import Topic
from nsq_fast.errors import ConfigError
from nsq_fast.names import Address

# --- what the HTTP faces of the original's nsqd and of the redesigned one have in common -----------------------------


_LOOKUPDS = "nsqlookupd_tcp_addresses"
_SIZE = 4
_SMALLEST_MESSAGE = 5  # in an MPUB body: a length and one byte


Addresses = Callable[[], tuple[Address | None, Address | None]]


class HostRoutes:
    """Handlers for ``Router`` that every nsqd has, and what others are made of.

    Args:
        addresses: called for the TCP and HTTP address of the server.
        set_lookupds: called with the new addresses of nsqlookupds when they are changed.
    """

    def __init__(self, host: Host, addresses: Addresses, set_lookupds: Callable[[list[str]], None]):
        self._host = host
        self._addresses = addresses
        self._set_lookupds = set_lookupds

    def health(self) -> str:
        """What /ping answers: OK, or what is wrong."""
        return "OK" if self._host.error is None else f"NOK - {self._host.error}"

    def ping(self, request: Request) -> str:
        if self._host.error is not None:
            raise request.refuse(500, self.health())
        return self.health()

    def vitals(self) -> dict[str, Any]:
        started_at = int(self._host.started_at)
        return {"version": self._host.options.version, "health": self.health(), "start_time": started_at}

    def info(self, request: Request) -> dict[str, Any]:
        options = self._host.options
        tcp, http = self._addresses()
        return {
            "version": options.version,
            "broadcast_address": options.broadcast_address,
            "hostname": socket.gethostname(),
            "http_port": http.port or -1 if http else -1,  # that of a Unix socket, too
            "tcp_port": tcp.port or -1 if tcp else -1,
            "start_time": int(self._host.started_at),
            **self._more_info(),
        }

    def _more_info(self) -> dict[str, Any]:
        options = self._host.options
        return {
            "max_heartbeat_interval": round(options.max_heartbeat_interval * 1e9),
            "max_output_buffer_size": options.max_output_buffer_size,
            "max_output_buffer_timeout": round(options.max_output_buffer_timeout * 1e9),
            "max_deflate_level": options.max_deflate_level,
            "topology_zone": options.topology_zone,
            "topology_region": options.topology_region,
        }

    def split_lines(self, request: Request, body: bytes) -> list[bytes]:
        lines = [line for line in body.split(b"\n") if line]
        if lines and max(map(len, lines)) > self._host.options.max_msg_size:
            raise request.refuse(413, "MSG_TOO_BIG")
        return lines

    def split_binary(self, request: Request, body: bytes) -> list[bytes]:
        """The messages of a body that is one of MPUB."""
        count = int.from_bytes(body[:_SIZE], "big", signed=True)
        most = (self._host.options.max_body_size - _SIZE) // _SMALLEST_MESSAGE
        if len(body) < _SIZE or not 0 < count <= most:
            raise request.refuse(413, "BAD_BODY")
        bodies = []
        at = _SIZE
        for _ in range(count):
            size = int.from_bytes(body[at : at + _SIZE], "big", signed=True)
            at += _SIZE
            message = body[at : at + max(size, 0)]
            if not 0 < size == len(message) or size > self._host.options.max_msg_size:
                raise request.refuse(413, "BAD_MESSAGE")
            bodies.append(message)
            at += size
        return bodies

    def get_config(self, request: Request) -> list[str]:
        """GET /config/<option>: of the one that can be changed (nsqio/nsq: nsqd/http.go, doConfig)."""
        if request.argument != _LOOKUPDS:
            raise request.refuse(400, "INVALID_OPTION")
        return list(self._host.options.lookupd_tcp_addresses)

    def put_config(self, request: Request) -> list[str]:
        body = request.body(self._host.options.max_msg_size, "INVALID_VALUE")
        if not body:
            raise request.refuse(413, "INVALID_VALUE")
        if request.argument == _LOOKUPDS:
            try:
                addresses = msgspec.json.decode(body, type=list[str] | None) or []
                self._host.set_options(lookupd_tcp_addresses=tuple(addresses))
            except (msgspec.MsgspecError, ConfigError):
                raise request.refuse(400, "INVALID_VALUE") from None
            self._set_lookupds(addresses)
        return self.get_config(request)


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class NsqdRoutes(HostRoutes):
    def __init__(self, nsqd: Nsqd, addresses: Addresses, set_lookupds: Callable[[list[str]], None]):
        super().__init__(nsqd, addresses, set_lookupds)
        self._nsqd = nsqd

    def router(self) -> Router:
        rows = (
            ("GET", "/info", self.info),
            ("GET", "/stats", self._stats),
            ("POST", "/pub", self._pub),
            ("POST", "/mpub", self._mpub),
            ("POST", "/topic/create", self._create_topic),
            ("POST", "/topic/delete", lambda request: self._nsqd.delete_topic(request.required("topic"))),
            ("POST", "/topic/empty", self._empty_topic),
            ("POST", "/topic/pause", lambda request: self._any_topic(request).set_paused(True)),
            ("POST", "/topic/unpause", lambda request: self._any_topic(request).set_paused(False)),
            ("POST", "/channel/create", self._create_channel),
            ("POST", "/channel/delete", self._delete_channel),
            ("POST", "/channel/empty", lambda request: self._channel(request).empty()),
            ("POST", "/channel/pause", lambda request: self._channel(request).set_paused(True)),
            ("POST", "/channel/unpause", lambda request: self._channel(request).set_paused(False)),
            ("GET", "/config/*", self.get_config),
            ("PUT", "/config/*", self.put_config),
        )
        return Router((style_text, [("GET", "/ping", self.ping)]), (style_v1, rows), is_quick=self._is_quick)

    def _is_quick(self, request: Request) -> bool:
        topic = self._nsqd.topics.get(request.get("topic") or "")
        is_publish = request.path == "/pub" and request.method == "POST"
        return is_publish and topic is not None and not self._nsqd.waits_for_disk(topic, 1)

    def _stats(self, request: Request) -> Any:
        topic, channel = request.get("topic") or "", request.get("channel") or ""
        include_clients = _BOOLEANS.get(request.get("include_clients") or "", True)
        include_memory = _BOOLEANS.get(request.get("include_mem") or "", True)
        topics = topic_stats(self._nsqd, topic, channel, include_clients)
        # As the original does, a topic that does not exist leaves the producers out.
        producers = producer_stats(self._nsqd, topic) if include_clients and topics is not None else None
        memory = memory_stats() if include_memory else None
        if request.get("format") != "json":
            lines = text_lines(self._nsqd, topics or [], producers or [], memory, self.health())
            return "".join(f"{line}\n" for line in lines)
        return {
            **self.vitals(),
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
        return self._publish(request, lambda: topic.put(body, defer_ms))

    def _defer(self, request: Request) -> int:
        if request.get("defer") is None:
            return 0
        milliseconds = request.integer("defer", "INVALID_DEFER")
        if not 0 <= milliseconds <= self._nsqd.options.max_req_timeout * 1000:
            raise request.refuse(400, "INVALID_DEFER")
        return milliseconds

    def _mpub(self, request: Request) -> str:
        request.check_length(self._nsqd.options.max_body_size, "BODY_TOO_BIG")
        topic = self._created_topic(request)
        binary = request.get("binary")
        body = request.body(self._nsqd.options.max_body_size, "BODY_TOO_BIG")
        if binary is not None and _BOOLEANS.get(binary, True):
            bodies = self.split_binary(request, body)
        else:
            bodies = self.split_lines(request, body)
        return self._publish(request, lambda: topic.put_many(bodies))

    def _publish(self, request: Request, put: Callable[[], None]) -> str:
        """What the disk refuses is refused as what comes too late (nsqio/nsq: nsqd/http.go, doPUB and doMPUB)."""
        try:
            put()
        except OSError as error:
            self._nsqd.refused(error)
            raise request.refuse(503, "EXITING") from error
        self._nsqd.stored()
        return "OK"

    def _create_topic(self, request: Request) -> None:
        self._created_topic(request)

    def _empty_topic(self, request: Request) -> None:
        self._nsqd.existing_topic(request.valid("topic", "INVALID_TOPIC")).empty()

    def _create_channel(self, request: Request) -> None:
        topic, channel = self._named(request)
        topic.get_channel(channel)

    def _delete_channel(self, request: Request) -> None:
        topic, channel = self._named(request)
        topic.delete_channel(channel)

    def _created_topic(self, request: Request) -> Topic:
        return self._nsqd.get_topic(request.valid("topic", "INVALID_TOPIC"))

    def _any_topic(self, request: Request) -> Topic:
        return self._nsqd.existing_topic(request.required("topic"))

    def _named(self, request: Request) -> tuple[Topic, str]:
        topic, channel = request.valid("topic"), request.valid("channel")
        return self._nsqd.existing_topic(topic), channel

    def _channel(self, request: Request) -> Channel:
        topic, channel = self._named(request)
        return topic.existing_channel(channel)


def require_tls(https_port: int) -> Callable[[Request], Reply]:
    """The application that plain HTTP gets where TLS is required: 403 for everything."""
    headers = [("Content-Type", "application/json; charset=utf-8"), ("X-Nsq-Content-Type", "nsq; version=1.0")]
    reply = Reply(403, headers, b'{"message": "TLS_REQUIRED", "https_port": %d}' % https_port)
    return lambda request: reply
