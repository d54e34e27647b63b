"""The HTTP routes of a node of the cluster (youzan/nsq: nsqdserver/http.go).

Every route that names a topic takes ``partition``; without it the server's
default partition is meant. Publishing and reading are negotiated (see ``http``).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote_plus

import msgspec

from nsq_fast.broker.client import TRACE_ID_KEY
from nsq_fast.broker.go_integer import parse_integer
from nsq_fast.broker.http.router import Request, Router, style_negotiated, style_text, style_v1
from nsq_fast.broker.nsqd.config import Settings
from nsq_fast.broker.nsqd.host_http import HostRoutes
from nsq_fast.errors import TopicNotExist
from nsq_fast.names import Address

from .channel_http import ChannelRoutes
from .log import Draft, Record
from .node import NO_PARTITION, Node
from .publishing import checked_draft, parse_trace_id
from .state import Partition
from .stats import partition_stats, stats_text
from .targets import find_partition, refusing, require_leader
from .upkeep_http import UpkeepRoutes

_HEADER_PREFIX = "X-Nsqext-"


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
        router.add("POST", "/message/trace/enable", lambda request: self._switch_trace(request, True))
        router.add("POST", "/message/trace/disable", lambda request: self._switch_trace(request, False))
        ChannelRoutes(self._node).add_to(router)
        UpkeepRoutes(self._node).add_to(router)
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
        if request.get("format") != "json":
            return stats_text(rows, self._node)
        return {
            "version": self._node.options.version,
            "health": self.health(),
            "start_time": started,
            "topics": rows,
        }

    def _coordinator_stats(self, request: Request) -> Any:
        topic, number = request.get("topic"), request.get("partition")
        try:
            wanted = parse_integer(number.encode()) if number else NO_PARTITION
        except ValueError as error:
            raise request.refuse(400, "INVALID_REQUEST") from error
        return {
            "rpc_stats": _NO_RPCS,
            "ErrStats": _NO_ERRORS,
            "topic_coord_stats": [
                {
                    "node": "",
                    "name": partition.topic,
                    "partition": partition.number,
                    "epoch": partition.epoch,
                    "isr_stats": _node_rows(partition.in_sync),
                    "catchup_stats": _node_rows(set(partition.replicas).difference(partition.in_sync)) or None,
                }
                for partition in self._node.partitions
                if topic == partition.topic and wanted in (NO_PARTITION, partition.number)
            ],
        }

    # --- publishing --------------------------------------------------------------------------------------------------

    def _pub(self, request: Request) -> str:
        body, partition = self._message(request)
        self._publish_one(request, partition, Draft(body))
        return "OK"

    def _pub_trace(self, request: Request) -> Any:
        body, partition = self._message(request)
        require_leader(request, self._node, partition)
        with refusing(request):
            trace_id = parse_trace_id(request.get("trace_id") or "")
        return _receipt(self._publish_one(request, partition, Draft(body, trace_id)))

    def _pub_ext(self, request: Request) -> Any:
        body, partition = self._message(request)
        require_leader(request, self._node, partition)
        header = self._header(request)
        with refusing(request):
            draft = checked_draft(msgspec.json.encode(header), body, partition)
        record = self._publish_one(request, partition, draft)
        return _receipt(record) if TRACE_ID_KEY in header else "OK"

    def _header(self, request: Request) -> dict[str, Any]:
        try:
            text = unquote_plus(request.get("ext") or "")
            # A null is a header without keys.
            header: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any] | None) or {}
        except msgspec.MsgspecError:
            raise request.refuse(400, "E_INVALID_JSON_HEADER") from None
        return header | request.headers_with_prefix(_HEADER_PREFIX)

    def _message(self, request: Request) -> tuple[bytes, Partition]:
        body = request.body(self._node.options.max_msg_size, "MSG_TOO_BIG")
        if not body:
            raise request.refuse(406, "MSG_EMPTY")
        try:
            return body, find_partition(request, self._node)
        except Exception as error:
            raise request.refuse(404, TopicNotExist.code) from error

    def _mpub(self, request: Request) -> str:
        request.check_length(self._node.options.max_body_size, "BODY_TOO_BIG")
        partition = find_partition(request, self._node)
        body = request.body(self._node.options.max_body_size, "BODY_TOO_BIG")
        split = self.split_lines if request.get("binary") is None else self.split_binary
        self._publish(request, partition, [Draft(message) for message in split(request, body)])
        return "OK"

    def _publish_one(self, request: Request, partition: Partition, draft: Draft) -> Record:
        [record] = self._publish(request, partition, [draft])
        partition.trace.answered(record, request.remote_address)
        return record

    def _publish(self, request: Request, partition: Partition, drafts: list[Draft]) -> list[Record]:
        with refusing(request):
            return self._node.publish(partition, drafts)

    def _switch_trace(self, request: Request, is_on: bool) -> None:
        """Trace a topic, or a channel of it, on this node; what is not here is left out without a word."""
        topic, channel = request.get("topic"), request.get("channel")
        for partition in self._node.partitions:
            switches = partition.switches_of(self._node.id)
            if partition.topic == topic and not channel:
                switches.switch(is_on)
            elif partition.topic == topic and channel in partition.channels:
                switches.switch_channel(str(channel), is_on, slow=request.get("slow") == "true")

    def _disable_write(self, request: Request) -> None:
        self._node.state.is_write_disabled = request.get("type") == "all"


def _receipt(record: Record) -> dict[str, Any]:
    return {
        "status": "OK",
        "id": record.internal_id,
        "trace_id": str(record.trace_id),
        "queue_offset": record.offset,
        "rawsize": record.size,
    }


_NO_RPCS = dict.fromkeys(
    (
        "RPCCalls",
        "RPCTime",
        "BytesWritten",
        "BytesRead",
        *(f"{kind}{what}" for kind in ("Read", "Write", "Dial", "Accept") for what in ("Calls", "Errors")),
    ),
    0,
)
_NO_ERRORS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "WriteEpochError",
            "WriteNotLeaderError",
            "WriteQuorumError",
            "WriteBusyError",
            "RpcCheckFailed",
            "LeadershipError",
            "TopicCoordMissingError",
            "LocalErr",
        ),
        0,
    ),
    "OtherCoordErrs": {},
}


def _node_rows(nodes: Iterable[str]) -> list[dict[str, str]]:
    return [{"hostname": "", "node_id": node} for node in nodes]
