"""The figures of an nsqd as /stats gives them, as JSON and as text.

nsqio/nsq: nsqd/stats.go, TopicStats and ChannelStats; nsqd/http.go, printStats.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

from .channel import Channel
from .latency import latency_stats
from .nsqd import Nsqd
from .topic import Topic


def topic_stats(nsqd: Nsqd, topic: str, channel: str, include_clients: bool) -> list[dict[str, Any]] | None:
    """The figures of all topics, or of one; with all channels, or one. None when the one topic does not exist."""
    if topic and topic not in nsqd.topics:
        return None
    topics = [nsqd.topics[topic]] if topic else sorted(nsqd.topics.values(), key=lambda item: item.name)
    return [_topic(item, channel, include_clients, topic) for item in topics if not channel or channel in item.channels]


def producer_stats(nsqd: Nsqd, topic: str) -> list[dict[str, Any]] | None:
    """The figures of every client that has published; None when there is none."""
    return [_of_topic(client.stats(), topic) for client in nsqd.clients if client.pub_counts] or None


def memory_stats() -> dict[str, int]:
    """The process's memory, under the names of Go's figures, as far as they mean anything here."""
    return {
        "heap_objects": sys.getallocatedblocks(),
        "heap_idle_bytes": 0,
        "heap_in_use_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "heap_released_bytes": 0,
        "gc_pause_usec_100": 0,
        "gc_pause_usec_99": 0,
        "gc_pause_usec_95": 0,
        "next_gc_bytes": 0,
        "gc_total_runs": sum(generation["collections"] for generation in gc.get_stats()),
    }


def render_text(
    nsqd: Nsqd,
    topics: list[dict[str, Any]],
    producers: list[dict[str, Any]],
    memory: dict[str, int] | None,
    health: str,
) -> str:
    """All of it as the original's text."""
    return "\n".join(_lines(nsqd, topics, producers, memory, health)) + "\n"


def _topic(topic: Topic, channel: str, include_clients: bool, only_topic: str) -> dict[str, Any]:
    channels = [topic.channels[channel]] if channel else sorted(topic.channels.values(), key=lambda item: item.name)
    return {
        "topic_name": topic.name,
        "channels": [_channel(item, include_clients, only_topic) for item in channels],
        "depth": topic.depth,
        "backend_depth": topic.backend_depth,
        "message_count": topic.message_count,
        "message_bytes": topic.message_bytes,
        "paused": topic.is_paused,
        "e2e_processing_latency": latency_stats(each.latency for each in topic.channels.values()),
    }


def _channel(channel: Channel, include_clients: bool, only_topic: str) -> dict[str, Any]:
    clients = [_of_topic(client.stats(), only_topic) for client in channel.clients.values()]
    return {
        "channel_name": channel.name,
        "depth": channel.depth,
        "backend_depth": len(channel.backlog.backend),
        "in_flight_count": channel.in_flight_count,
        "deferred_count": len(channel.backlog.deferred),
        "message_count": channel.message_count,
        "requeue_count": channel.requeue_count,
        "timeout_count": channel.timeout_count,
        "client_count": len(clients),
        "clients": clients if include_clients else None,
        "paused": channel.is_paused,
        "e2e_processing_latency": latency_stats([channel.latency]),
    }


def _of_topic(client: dict[str, Any], topic: str) -> dict[str, Any]:
    """A client's figures; of its publishes those to ``topic``, or the first as in the original."""
    counts = [count for count in client.pop("pub_counts", None) or () if not topic or count["topic"] == topic][:1]
    return {**client, "pub_counts": counts} if counts else client


def _lines(
    nsqd: Nsqd,
    topics: list[dict[str, Any]],
    producers: list[dict[str, Any]],
    memory: dict[str, int] | None,
    health: str,
) -> Iterator[str]:
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(nsqd.started_at))
    python = ".".join(map(str, sys.version_info[:3]))
    yield f"nsqd v{nsqd.options.version} (built w/python{python})"
    yield f"start_time {started}"
    yield f"uptime {_duration(time.time() - nsqd.started_at)}"
    yield f"\nHealth: {health}"
    if memory is not None:
        yield "\nMemory:"
        yield from (f"   {name:<25}\t{value}" for name, value in memory.items())
    yield "\nTopics:" if topics else "\nTopics: None"
    for number, topic in enumerate(topics):
        if number:
            yield ""
        yield from _topic_lines(topic)
    yield "\nProducers:" if producers else "\nProducers: None"
    yield from (f"   {_client_line(client)}" for client in producers)


def _topic_lines(topic: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{'*P ' if topic['paused'] else '   '}[{topic['topic_name']:<15}] depth: {topic['depth']:<5}"
        f" be-depth: {topic['backend_depth']:<5} msgs: {topic['message_count']:<8} e2e%: {_latency(topic)}"
    )
    for channel in topic["channels"]:
        yield (
            f"   {'*P ' if channel['paused'] else '   '}[{channel['channel_name']:<25}] depth: {channel['depth']:<5}"
            f" be-depth: {channel['backend_depth']:<5} inflt: {channel['in_flight_count']:<4}"
            f" def: {channel['deferred_count']:<4} re-q: {channel['requeue_count']:<5}"
            f" timeout: {channel['timeout_count']:<5} msgs: {channel['message_count']:<8} e2e%: {_latency(channel)}"
        )
        yield from (f"        {_client_line(client)}" for client in channel["clients"] or ())


def _latency(figures: dict[str, Any]) -> str:
    return ", ".join(_human(each["value"]) for each in figures["e2e_processing_latency"]["percentiles"] or ())


def _human(nanoseconds: float) -> str:
    """nsqio/nsq: internal/stringy/template.go, NanoSecondToHuman."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds > size:
            return f"{nanoseconds / size:.1f}{unit}"
    return f"{nanoseconds:.1f}ns"


def _client_line(client: dict[str, Any]) -> str:
    port = client["remote_address"].rpartition(":")[2]
    head = f"[{client['version']} {client['hostname'] + ':' + port + ' ' + client['user_agent']:<21}]"
    connected = _duration(float(int(time.time() - client["connect_ts"])))
    counts = client.get("pub_counts")
    if counts:
        total = sum(count["count"] for count in counts)
        topics = ",".join(f"{count['topic']}={count['count']}" for count in counts)
        return f"{head} msgs: {total:<8} topics: {topics} connected: {connected}"
    return (
        f"{head} state: {client['state']} inflt: {client['in_flight_count']:<4} rdy: {client['ready_count']:<4}"
        f" fin: {client['finish_count']:<8} re-q: {client['requeue_count']:<8} msgs: {client['message_count']:<8}"
        f" connected: {connected}"
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    if hours:
        return f"{hours}h{minutes}m{rest:.9g}s"
    return f"{minutes}m{rest:.9g}s" if minutes else f"{rest:.9g}s"
