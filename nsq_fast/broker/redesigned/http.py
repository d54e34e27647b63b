"""The HTTP routes of a node of the cluster (youzan/nsq: nsqdserver/http.go).

Every route that names a topic takes ``partition``; without it the server's default partition is meant. Publishing and
reading are negotiated (see ``http``). There are the routes that clients and nsqadmin use.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote_plus

import msgspec

from nsq_fast.broker.client import TRACE_ID_KEY
from nsq_fast.broker.http import Request, Router, style_negotiated, style_text, style_v1
from nsq_fast.broker.nsqd_http import HostRoutes
from nsq_fast.broker.redesigned.channel import PartitionChannel
from nsq_fast.broker.redesigned.commands import (
    COUNT,
    OFFSET,
    Position,
    checked_draft,
    parse_position,
    parse_trace_id,
    sequence_of,
)
from nsq_fast.broker.redesigned.log import PARTITION_SHIFT, Draft, Record
from nsq_fast.broker.redesigned.partition import NO_PARTITION, Node, Partition
from nsq_fast.errors import ServerError, TopicNotExist

_SEARCH_MODES = {"count": COUNT, "virtual_offset": OFFSET}
_HEADER_PREFIX = "X-Nsqext-"
_HOURS = 22
"""So many hours of figures /message/historystats has."""


class NodeRoutes(HostRoutes):
    _host: Node

    def _more_info(self) -> dict[str, Any]:
        return {"ha_support": True}

    def router(self) -> Router:
        negotiated = (
            ("GET", "/info", self.info),
            ("GET", "/stats", self._stats),
            ("POST", "/pub", self._pub),
            ("POST", "/pub_ext", self._pub_ext),
            ("POST", "/mpub", self._mpub),
        )
        rows = (
            ("POST", "/pubtrace", self._pub_trace),
            ("GET", "/config/*", self.get_config),
            ("PUT", "/config/*", self.put_config),
            ("GET", "/coordinator/stats", self._coordinator_stats),
            ("GET", "/message/get", self._get_message),
            ("POST", "/message/finish", self._finish_message),
            ("GET", "/message/historystats", self._history_stats),
            ("POST", "/message/trace/enable", lambda request: self._switch_trace(request, True)),
            ("POST", "/message/trace/disable", lambda request: self._switch_trace(request, False)),
            ("POST", "/channel/create", self._create_channel),
            ("POST", "/channel/delete", self._delete_channel),
            ("POST", "/channel/setoffset", self._set_offset),
            ("POST", "/channel/setorder", self._set_order),
            ("POST", "/channel/ratelimit", self._limit_rate),
            ("POST", "/channel/skipZanTest", self._skip_test_messages),
            ("POST", "/channel/unskipZanTest", self._skip_test_messages),
            ("POST", "/channel/pause", lambda request: self._channel(request)[1].set_paused(True)),
            ("POST", "/channel/unpause", lambda request: self._channel(request)[1].set_paused(False)),
            ("POST", "/channel/skip", lambda request: self._channel(request)[1].set_skipped(True)),
            ("POST", "/channel/unskip", lambda request: self._channel(request)[1].set_skipped(False)),
            ("POST", "/channel/empty", lambda request: self._channel(request)[1].empty()),
        )
        return Router((style_text, [("GET", "/ping", self.ping)]), (style_negotiated, negotiated), (style_v1, rows))

    # --- what a request is about -------------------------------------------------------------------------------------
    # youzan/nsq: internal/http_api/topic_channel_args.go; nsqdserver/http.go, getExistingTopicChannelFromQuery

    def _partition(self, request: Request) -> Partition:
        """The partition that a request names, or the default one of its topic."""
        topic = request.valid("topic", is_filled=True)
        return self._find(request, topic, request.integer("partition", default=NO_PARTITION))

    def _named(self, request: Request) -> tuple[Partition, str]:
        topic = request.valid("topic", is_filled=True)
        number = request.integer("partition", default=NO_PARTITION)
        channel = request.valid("channel", is_filled=True)
        return self._find(request, topic, number), channel

    def _find(self, request: Request, topic: str, number: int) -> Partition:
        try:
            return self._host.find(topic, self._host.default_partition(topic) if number == NO_PARTITION else number)
        except TopicNotExist as error:
            raise request.refuse(404, error.code) from error

    def _channel(self, request: Request, *, is_led: bool = True) -> tuple[Partition, PartitionChannel]:
        """The channel that a request names, of a partition that the node leads."""
        partition, name = self._named(request)
        if name not in partition.channels:
            raise request.refuse(404, "CHANNEL_NOT_FOUND")
        if is_led:
            self._host.require_leader(partition)
        return partition, partition.channels[name]

    # --- figures -----------------------------------------------------------------------------------------------------

    def _stats(self, request: Request) -> Any:
        node = self._host
        topic, number, channel = (request.get(name) or "" for name in ("topic", "partition", "channel"))
        leader_only = (request.get("leaderOnly") or "").lower() in ("1", "t", "true")
        needs_clients = request.get("needClients") == "true" or bool(topic and not request.get("needClients"))
        rows = [
            _partition_stats(partition, node, channel, needs_clients)
            for partition in node.partitions
            if (not topic or topic == partition.topic)
            and (not number or number == str(partition.number))
            and (not leader_only or partition.leader == node.id)
        ]
        if request.get("format") != "json":
            return _stats_text(rows, node)
        return {**self.vitals(), "topics": rows}

    def _coordinator_stats(self, request: Request) -> Any:
        topic = request.get("topic")
        wanted = request.integer("partition", "INVALID_REQUEST", NO_PARTITION)
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
                    "catchup_stats": _node_rows(partition.logs.keys() - set(partition.in_sync)) or None,
                }
                for partition in self._host.partitions
                if topic == partition.topic and wanted in (NO_PARTITION, partition.number)
            ],
        }

    def _history_stats(self, request: Request) -> dict[str, Any]:
        """What nsqadmin asks for; nothing is counted by the hour."""
        if request.get("topic"):
            self._partition(request)
            return {"hourly_pub_size": [0] * _HOURS}
        rows = [
            {"topic_name": partition.topic, "topic_partition": str(partition.number), "hourly_pub_size": 0}
            for partition in self._host.partitions
            if partition.leader == self._host.id
        ]
        return {"node_hourly_pub_size_stats": rows or None}

    # --- publishing --------------------------------------------------------------------------------------------------

    def _pub(self, request: Request) -> str:
        body, partition = self._message(request)
        self._publish_one(request, partition, Draft(body))
        return "OK"

    def _pub_trace(self, request: Request) -> Any:
        body, partition = self._message(request)
        self._host.require_leader(partition)
        trace_id = parse_trace_id(request.get("trace_id") or "")
        return _receipt(self._publish_one(request, partition, Draft(body, trace_id)))

    def _pub_ext(self, request: Request) -> Any:
        body, partition = self._message(request)
        self._host.require_leader(partition)
        try:
            text = unquote_plus(request.get("ext") or "")
            # A null is a header without keys.
            header: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any] | None) or {}
        except (msgspec.MsgspecError, RecursionError):
            raise request.refuse(400, "E_INVALID_JSON_HEADER") from None
        header |= request.headers_with_prefix(_HEADER_PREFIX)
        draft = checked_draft(msgspec.json.encode(header), body, partition)
        record = self._publish_one(request, partition, draft)
        return _receipt(record) if TRACE_ID_KEY in header else "OK"

    def _message(self, request: Request) -> tuple[bytes, Partition]:
        body = request.body(self._host.options.max_msg_size, "MSG_TOO_BIG")
        if not body:
            raise request.refuse(406, "MSG_EMPTY")
        try:
            return body, self._partition(request)
        except Exception as error:
            raise request.refuse(404, TopicNotExist.code) from error

    def _mpub(self, request: Request) -> str:
        request.check_length(self._host.options.max_body_size, "BODY_TOO_BIG")
        partition = self._partition(request)
        body = request.body(self._host.options.max_body_size, "BODY_TOO_BIG")
        split = self.split_lines if request.get("binary") is None else self.split_binary
        self._host.publish(partition, [Draft(message) for message in split(request, body)])
        return "OK"

    def _publish_one(self, request: Request, partition: Partition, draft: Draft) -> Record:
        [record] = self._host.publish(partition, [draft])
        partition.trace.published([record], request.remote_address)
        return record

    # --- messages ----------------------------------------------------------------------------------------------------

    def _get_message(self, request: Request) -> dict[str, Any]:
        mode = request.get("search_mode") or ""
        value = request.integer("search_pos", function="ParseInt")
        number = value >> PARTITION_SHIFT if mode == "id" else request.integer("partition")
        try:
            partition = self._host.find(request.get("topic") or "", number)
        except ServerError as error:
            raise request.refuse(400, "topic does not exist") from error
        record = _search(request, partition, mode, value)
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

    def _finish_message(self, request: Request) -> None:
        partition, channel = self._channel(request, is_led=False)
        internal_id = request.integer("msgid", "INVALID_REQUEST", function="ParseInt")
        self._host.require_leader(partition)
        if not channel.finish_anywhere(internal_id):
            raise request.refuse(500, "ErrType:7 ErrCode:0 : Message ID not in flight")

    def _switch_trace(self, request: Request, is_on: bool) -> None:
        """Trace a topic, or a channel of it, on this node; what is not here is left out without a word."""
        topic, channel = request.get("topic"), request.get("channel")
        for partition in self._host.partitions:
            trace = partition.trace_of(self._host.id)
            if partition.topic == topic and not channel:
                trace.is_on = is_on
            elif partition.topic == topic and channel in partition.channels:
                names = trace.slow_channels if request.get("slow") == "true" else trace.channels
                (names.add if is_on else names.discard)(str(channel))

    # --- channels ----------------------------------------------------------------------------------------------------

    def _create_channel(self, request: Request) -> None:
        partition, name = self._named(request)
        self._host.require_leader(partition)
        if partition.meta.disable_channel_auto_create:
            text = f"channel {name} not registered. channel should be initialized before use."
            raise request.refuse(403, text)
        partition.channel(name)

    def _delete_channel(self, request: Request) -> None:
        """Nothing happens where there is no such channel."""
        partition, name = self._named(request)
        self._host.require_leader(partition)
        if partition.meta.disable_channel_auto_create:
            text = f"topic {partition.topic} has channel auto create disabled. channel {name} cuold not be deleted"
            raise request.refuse(403, f"{text} localy in nsqd.")
        partition.delete_channel(name)

    def _skip_test_messages(self, request: Request) -> None:
        """Checked, and without effect: no message is for tests only."""
        partition, name = self._named(request)
        if not partition.meta.ext:
            raise request.refuse(400, "INVALID_REQUEST")
        if name not in partition.channels:
            raise request.refuse(404, "CHANNEL_NOT_FOUND")

    def _set_offset(self, request: Request) -> None:
        partition, channel = self._channel(request, is_led=False)
        body = request.body(self._host.options.max_msg_size, "MSG_TOO_BIG")
        if not body:
            raise request.refuse(406, "MSG_EMPTY")
        try:
            position = parse_position(body.decode("utf-8", "replace"))
        except ValueError as error:
            raise request.refuse(400, str(error)) from error
        self._host.require_leader(partition)
        try:
            channel.set_position(sequence_of(position, partition.log))
        except ValueError as error:
            raise request.refuse(500, str(error)) from error

    def _set_order(self, request: Request) -> None:
        _, channel = self._channel(request, is_led=False)
        order = request.get("order")
        if order not in ("true", "false"):
            raise request.refuse(400, "INVALID_OPTION")
        channel.set_ordered(order == "true")

    def _limit_rate(self, request: Request) -> None:
        """The limit is checked, and has no effect."""
        self._channel(request, is_led=False)
        request.integer("ratekilobytes", "INVALID_OPTION")


def _search(request: Request, partition: Partition, mode: str, value: int) -> Record:
    if mode == "id":
        sequence = partition.log.at_id(value)
    elif mode in _SEARCH_MODES:
        try:
            sequence = sequence_of(Position(_SEARCH_MODES[mode], value), partition.log)
        except ValueError as error:
            raise request.refuse(404, str(error)) from error
    else:
        raise request.refuse(400, "search mode should be one of id/count/virtual_offset")
    records = partition.log.read(sequence, 1)
    if not records and mode == "virtual_offset":
        raise request.refuse(500, "INTERNAL_ERROR")  # the real server panics
    if not records:
        raise request.refuse(404, "commit log end of file")
    return records[0]


def _receipt(record: Record) -> dict[str, Any]:
    return {
        "status": "OK",
        "id": record.internal_id,
        "trace_id": str(record.trace_id),
        "queue_offset": record.offset,
        "rawsize": record.size,
    }


# --- figures ----------------------------------------------------------------------------------------------------------

# What the broker does not measure; clients of /stats want the keys to be there.
_NO_LATENCY = {"count": 0, "percentiles": None}
_NO_BUCKETS = [0] * 12
_SHORT = {
    "depth": "depth",
    "backend_depth": "be-depth",
    "in_flight_count": "inflt",
    "deferred_count": "def",
    "requeue_count": "re-q",
    "timeout_count": "timeout",
    "message_count": "msgs",
    "ready_count": "rdy",
    "finish_count": "fin",
}
_OF_CHANNEL = (*list(_SHORT)[:6], "message_count")
_EPOCH = "1970-01-01 00:00:00 +0000 UTC"


def _partition_stats(partition: Partition, node: Node, channel: str, needs_clients: bool) -> dict[str, Any]:
    """The row of a partition; with all its channels, or with one if it has that."""
    channels = [partition.channels[channel]] if channel in partition.channels else [*partition.channels.values()]
    meta = partition.meta
    return {
        "topic_name": partition.topic,
        "topic_full_name": partition.name,
        "topic_partition": str(partition.number),
        "channels": [_channel_stats(item, partition, node, needs_clients) for item in channels],
        "channel_num": len(channels),
        # The real server's depth is where the log ends, whatever it has forgotten.
        "depth": partition.log.end_offset,
        "backend_depth": partition.log.end_offset,
        "backend_start": partition.log.start_offset,
        "message_count": partition.log.end,
        "is_leader": partition.leader == node.id and partition.is_writable,
        "hourly_pubsize": 0,
        "client_pub_stats": None,
        "client_num": 0,
        "msg_size_stats": [0] * 16,
        "msg_write_latency_stats": [0] * 16,
        "is_multi_ordered": meta.ordered,
        "is_multi_part": meta.multi_part,
        "is_ext": meta.ext,
        "is_channel_auto_create_disabled": meta.disable_channel_auto_create,
        "statsd_name": f"{partition.topic}.{partition.number}" if meta.may_share_nodes else partition.topic,
        "pub_failed_cnt": partition.failed_count,
        "e2e_processing_latency": _NO_LATENCY,
    }


def _channel_stats(channel: PartitionChannel, partition: Partition, node: Node, needs_clients: bool) -> dict[str, Any]:
    clients = list(channel.clients.values()) if partition.leader == node.id else []
    depth_size = partition.log.end_offset - partition.log.offset_of(channel.confirmed.position)
    oldest = partition.log.read(channel.confirmed.position, 1)
    timestamp = oldest[0].timestamp if oldest else 0
    return {
        "channel_name": channel.name,
        "backlogs": channel.depth,
        "depth": channel.depth,
        "depth_size": depth_size,
        "depth_ts": _time_text(timestamp),
        "depth_ts_nano": timestamp,
        "backend_depth": channel.depth,  # messages: youzan/nsq: nsqd/stats.go, NewChannelStats
        "hourly_subsize": 0,
        "in_flight_count": channel.in_flight_count,
        "deferred_count": len(channel.deferred),
        "deferred_from_delay_count": 0,
        "message_count": partition.log.end,
        "requeue_count": channel.requeue_count,
        "timeout_count": channel.timeout_count,
        "clients": [client.stats() for client in clients] if needs_clients and clients else None,
        "client_num": len(clients),
        "paused": channel.is_paused,
        "skipped": channel.is_skipped,
        "zan_test_skipped": False,
        "delayed_queue_count": 0,
        "delayed_queue_recent": _EPOCH,
        "delayed_queue_recent_nano": 0,
        "e2e_processing_latency": _NO_LATENCY,
        "msg_consume_latency_stats": _NO_BUCKETS,
        "msg_delivery_latency_stats": _NO_BUCKETS,
    }


def _stats_text(rows: list[dict[str, Any]], node: Node) -> str:
    """The figures for people (youzan/nsq: nsqdserver/http.go, printStats)."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(node.started_at))
    lines = [
        f"nsqd v{node.options.version}",
        f"start_time {started}",
        f"uptime {time.time() - node.started_at:.3f}s",
        "",
    ]
    if not rows:
        return "\n".join([*lines, "NO_TOPICS", ""])
    lines.append("Health: OK" if node.error is None else f"Health: NOK - {node.error}")
    for row in rows:
        lines += ["", f"   [{row['topic_name']:<15}] {_in_words(row, 'depth', 'backend_depth', 'message_count')}"]
        for channel in row["channels"]:
            mark = "   *P " if channel["paused"] else "      "
            lines.append(f"{mark}[{channel['channel_name']:<25}] {_in_words(channel, *_OF_CHANNEL)}")
            for client in channel["clients"] or ():
                shown = _in_words(client, "in_flight_count", "ready_count", "finish_count", "requeue_count")
                lines.append(f"        [{client['client_id']} {client['remote_address']:<21}] {shown}")
    return "\n".join([*lines, ""])


def _in_words(row: dict[str, Any], *keys: str) -> str:
    return " ".join(f"{_SHORT[key]}: {row[key]:<5}" for key in keys)


def _time_text(timestamp: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S +0000 UTC", time.gmtime(timestamp // 1_000_000_000))


_NO_RPCS = dict.fromkeys(
    ["RPCCalls", "RPCTime", "BytesWritten", "BytesRead"]
    + [f"{kind}{what}" for kind in ("Read", "Write", "Dial", "Accept") for what in ("Calls", "Errors")],
    0,
)
_ERRORS = (
    "WriteEpochError WriteNotLeaderError WriteQuorumError WriteBusyError RpcCheckFailed LeadershipError"
    " TopicCoordMissingError LocalErr"
)
_NO_ERRORS: dict[str, Any] = {**dict.fromkeys(_ERRORS.split(), 0), "OtherCoordErrs": {}}


def _node_rows(nodes: Iterable[str]) -> list[dict[str, str]]:
    return [{"hostname": "", "node_id": node} for node in nodes]
