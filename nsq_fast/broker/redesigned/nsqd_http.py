"""The HTTP routes of a node of the cluster.

Every route that names a topic takes ``partition``; without it the server's
default partition is meant. Publishing and reading are negotiated (see ``http``).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

import msgspec

from nsq_fast.broker.client import TRACE_ID_KEY
from nsq_fast.broker.http.router import Request, Router, style_negotiated, style_text, style_v1
from nsq_fast.broker.lookupd.http import required, topic_and_channel
from nsq_fast.broker.nsqd.config import Settings
from nsq_fast.broker.nsqd.host_http import HostRoutes
from nsq_fast.errors import NotLeader, ServerError, TopicNotExist
from nsq_fast.names import Address, is_valid_name

from .arguments import parse_integer
from .channel import PartitionChannel
from .log import PARTITION_SHIFT, Draft, Record
from .node import NO_PARTITION, Node
from .positions import COUNT, OFFSET, Position, parse_position, sequence_of
from .publishing import checked_draft, parse_trace_id
from .state import Partition
from .stats import partition_stats

_HEADER_PREFIX = "X-Nsqext-"
_CHANNEL_SWITCHES = ("pause", "unpause", "skip", "unskip", "empty")
_SEARCH_MODES = {"count": COUNT, "virtual_offset": OFFSET}


class _Target(NamedTuple):
    partition: Partition
    channel: PartitionChannel


class NodeRoutes(HostRoutes):
    """Builds the WSGI application of a node."""

    def __init__(self, node: Node, addresses: Callable[[], tuple[Address | None, Address | None]], settings: Settings):
        super().__init__(node, addresses, settings)
        self._node = node

    def router(self) -> Router:
        """All routes."""
        router = Router()
        router.add("GET", "/ping", self.ping, style_text)
        router.add("GET", "/info", self.info, style_negotiated)
        router.add("GET", "/stats", self._stats, style_negotiated)
        router.add("GET", "/coordinator/stats", self._coordinator_stats)
        router.add("POST", "/pub", self._pub, style_negotiated)
        router.add("POST", "/pub_ext", self._pub_ext, style_negotiated)
        router.add("POST", "/pubtrace", self._pub_trace, style_v1)
        router.add("POST", "/mpub", self._mpub, style_negotiated)
        router.add("GET", "/message/get", self._get_message)
        router.add("POST", "/message/finish", self._finish_message)
        for route in ("/message/trace/enable", "/message/trace/disable", "/channel/fixconfirmed"):
            router.add("POST", route, lambda request: None)
        router.add("POST", "/channel/create", self._create_channel)
        router.add("POST", "/channel/delete", self._delete_channel)
        router.add("POST", "/channel/setoffset", self._set_offset)
        router.add("POST", "/channel/setorder", self._set_order)
        for switch in _CHANNEL_SWITCHES:
            router.add("POST", f"/channel/{switch}", self._switch(switch))
        router.add("GET", "/config/*", self.get_config)
        router.add("PUT", "/config/*", self.put_config)
        router.add("POST", "/disable/write", self._disable_write)
        return router

    def info(self, request: Request) -> dict[str, Any]:
        """GET /info."""
        tcp, http = self._addresses()
        return {
            "version": self._node.options.version,
            "broadcast_address": self._node.options.broadcast_address,
            "hostname": socket.gethostname(),
            "http_port": -1 if http is None else http.port,
            "tcp_port": -1 if tcp is None else tcp.port,
            "start_time": int(self._node.started_at),
            "ha_support": True,
        }

    # --- figures -----------------------------------------------------------------------------------------------------

    def _stats(self, request: Request) -> Any:
        topic, number, channel = (request.get(name) or "" for name in ("topic", "partition", "channel"))
        leader_only = (request.get("leaderOnly") or "").lower() in ("1", "t", "true")
        needs_clients = request.get("needClients") == "true" or bool(topic and not request.get("needClients"))
        rows = [
            partition_stats(partition, self._node, channel, needs_clients)
            for partition in self._node.partitions
            if (not topic or topic == partition.topic)
            and (not number or number == str(partition.number))
            and (not leader_only or partition.leader == self._node.id)
        ]
        started = int(self._node.started_at)
        return {
            "version": self._node.options.version,
            "health": self.health(),
            "start_time": started,
            "topics": rows,
        }

    def _coordinator_stats(self, request: Request) -> Any:
        topic, number = request.get("topic"), request.get("partition")
        return {
            "rpc_stats": {},
            "ErrStats": {},
            "topic_coord_stats": [
                {
                    "node": "",
                    "name": partition.topic,
                    "partition": partition.number,
                    "isr_stats": [{"hostname": "", "node_id": node} for node in self._in_sync(partition)],
                    "catchup_stats": None,
                }
                for partition in self._node.partitions
                if (not topic or topic == partition.topic) and (not number or number == str(partition.number))
            ],
        }

    def _in_sync(self, partition: Partition) -> list[str]:
        return [node for node in partition.replicas if node in self._node.state.alive]

    # --- publishing --------------------------------------------------------------------------------------------------

    def _pub(self, request: Request) -> str:
        body, partition = self._message(request)
        self._publish(request, partition, [Draft(body)])
        return "OK"

    def _pub_trace(self, request: Request) -> Any:
        body, partition = self._message(request)
        with _refusing(request):
            trace_id = parse_trace_id(request.get("trace_id") or "")
        [record] = self._publish(request, partition, [Draft(body, trace_id)])
        return _receipt(record)

    def _pub_ext(self, request: Request) -> Any:
        body, partition = self._message(request)
        header = self._header(request)
        with _refusing(request):
            draft = checked_draft(msgspec.json.encode(header), body, partition)
        [record] = self._publish(request, partition, [draft])
        return _receipt(record) if TRACE_ID_KEY in header else "OK"

    def _header(self, request: Request) -> dict[str, Any]:
        try:
            header: dict[str, Any] = msgspec.json.decode(unquote_plus(request.get("ext") or ""), type=dict[str, Any])
        except msgspec.MsgspecError:
            raise request.refuse(400, "E_INVALID_JSON_HEADER") from None
        return header | request.headers_with_prefix(_HEADER_PREFIX)

    def _message(self, request: Request) -> tuple[bytes, Partition]:
        body = request.body(self._node.options.max_msg_size, "MSG_TOO_BIG")
        if not body:
            raise request.refuse(406, "MSG_EMPTY")
        try:
            return body, self._partition(request)
        except Exception as error:
            raise request.refuse(404, TopicNotExist.code) from error

    def _mpub(self, request: Request) -> str:
        request.check_length(self._node.options.max_body_size, "BODY_TOO_BIG")
        partition = self._partition(request)
        body = request.body(self._node.options.max_body_size, "BODY_TOO_BIG")
        split = self.split_lines if request.get("binary") is None else self.split_binary
        self._publish(request, partition, [Draft(message) for message in split(request, body)])
        return "OK"

    def _publish(self, request: Request, partition: Partition, drafts: list[Draft]) -> list[Record]:
        with _refusing(request):
            return self._node.publish(partition, drafts)

    # --- channels ----------------------------------------------------------------------------------------------------

    def _create_channel(self, request: Request) -> None:
        _, name = topic_and_channel(request)
        partition = self._led_partition(request)
        if partition.meta.disable_channel_auto_create:
            text = f"channel {name} not registered. channel should be initialized before use."
            raise request.refuse(403, text)
        partition.channel(name)

    def _delete_channel(self, request: Request) -> None:
        target = self._target(request)
        target.partition.delete_channel(target.channel.name)

    def _switch(self, name: str) -> Callable[[Request], None]:
        return lambda request: getattr(self._target(request).channel, name)()

    def _set_offset(self, request: Request) -> None:
        target = self._target(request)
        body = request.body(self._node.options.max_msg_size, "MSG_TOO_BIG")
        if not body:
            raise request.refuse(406, "MSG_EMPTY")
        try:
            position = parse_position(body.decode("utf-8", "replace"))
        except ValueError as error:
            raise request.refuse(400, str(error)) from error
        try:
            target.channel.set_position(sequence_of(position, target.partition.log))
        except ValueError as error:
            raise request.refuse(500, str(error)) from error

    def _set_order(self, request: Request) -> None:
        target = self._target(request)
        order = request.get("order")
        if order not in ("true", "false"):
            raise request.refuse(400, "INVALID_OPTION")
        target.channel.set_ordered(order == "true")

    # --- messages ----------------------------------------------------------------------------------------------------

    def _get_message(self, request: Request) -> dict[str, Any]:
        mode = request.get("search_mode") or ""
        try:
            value = parse_integer((request.get("search_pos") or "").encode(), "ParseInt")
            number = (
                value >> PARTITION_SHIFT if mode == "id" else parse_integer((request.get("partition") or "").encode())
            )
            partition = self._node.find(request.get("topic") or "", number)
        except (ValueError, ServerError) as error:
            raise request.refuse(400, str(error)) from error
        record = self._search(request, partition, mode, value)
        if record is None:
            raise request.refuse(404, "commit log EOF")
        return {
            "id": record.internal_id,
            "trace_id": record.trace_id,
            "body": record.body.decode("utf-8", "replace"),
            "timestamp": record.timestamp,
            "attempts": 0,
            "offset": record.offset,
            "queue_cnt_index": record.sequence + 1,
            "ext": record.header.decode() if request.get("needext") == "true" else "",
        }

    def _search(self, request: Request, partition: Partition, mode: str, value: int) -> Record | None:
        if mode == "id":
            sequence = partition.log.at_id(value)
        elif mode in _SEARCH_MODES:
            sequence = sequence_of(Position(_SEARCH_MODES[mode], value), partition.log)
        else:
            raise request.refuse(400, "search mode should be one of id/count/virtual_offset")
        records = partition.log.read(sequence, 1)
        return records[0] if records else None

    def _finish_message(self, request: Request) -> None:
        target = self._target(request)
        try:
            internal_id = parse_integer((request.get("msgid") or "").encode(), "ParseInt")
        except ValueError as error:
            raise request.refuse(400, str(error)) from error
        if not target.channel.finish_anywhere(internal_id):
            raise request.refuse(400, "Message ID not in flight")

    def _disable_write(self, request: Request) -> None:
        self._node.state.is_write_disabled = request.get("type") == "all"

    # --- what a request is about -------------------------------------------------------------------------------------

    def _partition(self, request: Request) -> Partition:
        topic = required(request, "topic")
        if not is_valid_name(topic):
            raise request.refuse(400, "INVALID_ARG_TOPIC")
        try:
            number = parse_integer((request.get("partition") or str(NO_PARTITION)).encode())
        except ValueError as error:
            raise request.refuse(400, str(error)) from error
        with _refusing(request, status=404):
            return self._node.find(topic, self._node.default_partition(topic) if number == NO_PARTITION else number)

    def _led_partition(self, request: Request) -> Partition:
        partition = self._partition(request)
        with _refusing(request):
            self._node.require_leader(partition)
        return partition

    def _target(self, request: Request) -> _Target:
        _, name = topic_and_channel(request)
        partition = self._partition(request)
        channel = partition.channels.get(name)
        if channel is None:
            raise request.refuse(404, "CHANNEL_NOT_FOUND")
        if partition.leader != self._node.id:
            raise request.refuse(400, NotLeader.code)
        return _Target(partition, channel)


@contextmanager
def _refusing(request: Request, *, status: int = 400) -> Iterator[None]:
    try:
        yield
    except ServerError as error:
        raise request.refuse(status, error.code) from error


def _receipt(record: Record) -> dict[str, Any]:
    return {
        "status": "OK",
        "id": record.internal_id,
        "trace_id": str(record.trace_id),
        "queue_offset": record.offset,
        "rawsize": record.size,
    }
