"""The figures of a node as /stats gives them: a row for each partition, under the server's JSON names."""

from __future__ import annotations

import time
from typing import Any

from .channel import PartitionChannel
from .node import Node
from .state import Partition

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


def partition_stats(partition: Partition, node: Node, channel: str, needs_clients: bool) -> dict[str, Any]:
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
    depth_size = partition.depth_size(channel)
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


def stats_text(rows: list[dict[str, Any]], node: Node) -> str:
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
