"""The figures of an nsqd: as /stats gives them, and as they are pushed to statsd."""

from __future__ import annotations

import gc
import logging
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from gevent import Greenlet, sleep, socket, spawn

from nsq_fast._lazy import get_logger
from nsq_fast.broker.channel import Channel
from nsq_fast.broker.net import split_listen_address
from nsq_fast.broker.nsqd import Nsqd
from nsq_fast.broker.queue import latency_stats
from nsq_fast.broker.topic import Topic
from nsq_fast.log_events import BROKER_STATSD_FAILED
from nsq_fast.names import is_ephemeral

logger: logging.Logger = get_logger("nsq_fast.broker.stats")


# --- /stats, as JSON and as text (nsqio/nsq: nsqd/stats.go, TopicStats and ChannelStats; nsqd/http.go, printStats) ---


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
        "backend_depth": len(channel.backend),
        "in_flight_count": channel.in_flight_count,
        "deferred_count": len(channel.deferred),
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


def text_lines(
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


# --- statsd ----------------------------------------------------------------------------------------------------------


_CHANNEL_GAUGES = {
    "depth": "depth",
    "backend_depth": "backend_depth",
    "in_flight_count": "in_flight_count",
    "deferred_count": "deferred_count",
    "clients": "client_count",
}
_CHANNEL_COUNTERS = ("message_count", "requeue_count", "timeout_count")


def key_prefix(prefix: str, address: str, port: int) -> str:
    """The prefix of all keys: ``%s`` stands for host and port, and a dot ends it."""
    host = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    filled = prefix.replace("%s", host.replace(".", "_").replace(":", "_"))
    return filled if not filled or filled.endswith(".") else filled + "."


class StatsdPusher:
    """Pushes over UDP every ``statsd_interval`` seconds, in the background (nsqio/nsq: nsqd/statsd.go, statsdLoop).

    Args:
        prefix: as ``key_prefix`` makes it.
    """

    def __init__(self, nsqd: Nsqd, prefix: str) -> None:
        self._nsqd = nsqd
        self._prefix = prefix
        self._last: dict[str, int] = {}
        self._greenlet: Greenlet[..., Any] | None = None

    def start(self) -> None:
        self._greenlet = spawn(self._run)

    def stop(self) -> None:
        """End without a last push, as the original does."""
        if self._greenlet is not None:
            self._greenlet.kill()
            self._greenlet = None

    def metrics(self) -> list[str]:
        return [f"{self._prefix}{line}" for line in self._lines()]

    def _run(self) -> None:
        options = self._nsqd.options
        while True:
            sleep(options.statsd_interval)
            try:
                self._push(options.statsd_address, options.statsd_udp_packet_size)
            except OSError as error:
                logger.warning("statsd at %s: %s", options.statsd_address, error, extra=BROKER_STATSD_FAILED)

    def _push(self, address: str, packet_size: int) -> None:
        family, kind, protocol, _, target = socket.getaddrinfo(*split_listen_address(address), type=socket.SOCK_DGRAM)[
            0
        ]
        sock = socket.socket(family, kind, protocol)
        try:
            for packet in packets(self.metrics(), packet_size):
                sock.sendto(packet, target)
        finally:
            sock.close()

    def _lines(self) -> Iterator[str]:
        for topic in topic_stats(self._nsqd, "", "", False) or ():
            if not self._excluded(topic["topic_name"]):
                yield from self._topic(topic)
        if self._nsqd.options.statsd_mem_stats:
            yield from self._memory()

    def _topic(self, topic: dict[str, Any]) -> Iterator[str]:
        key = f"topic.{topic['topic_name']}"
        yield self._counter(f"{key}.message_count", topic["message_count"])
        yield self._counter(f"{key}.message_bytes", topic["message_bytes"])
        yield f"{key}.depth:{topic['depth']}|g"
        yield f"{key}.backend_depth:{topic['backend_depth']}|g"
        yield from _latency_gauges(key, topic)
        for channel in topic["channels"]:
            if not self._excluded(channel["channel_name"]):
                yield from self._channel(f"{key}.channel.{channel['channel_name']}", channel)

    def _channel(self, key: str, channel: dict[str, Any]) -> Iterator[str]:
        for name in _CHANNEL_COUNTERS:
            yield self._counter(f"{key}.{name}", channel[name])
        for name, field in _CHANNEL_GAUGES.items():
            yield f"{key}.{name}:{channel[field]}|g"
        yield from _latency_gauges(key, channel)

    def _memory(self) -> Iterator[str]:
        figures = memory_stats()
        runs = figures.pop("gc_total_runs")
        yield from (f"mem.{name}:{value}|g" for name, value in figures.items())
        yield self._counter("mem.gc_runs", runs)

    def _counter(self, key: str, value: int) -> str:
        before = self._last.get(key, 0)
        self._last[key] = value
        return f"{key}:{value - before}|c"

    def _excluded(self, name: str) -> bool:
        return self._nsqd.options.statsd_exclude_ephemeral and is_ephemeral(name)


def _latency_gauges(key: str, figures: dict[str, Any]) -> Iterator[str]:
    for each in figures["e2e_processing_latency"]["percentiles"] or ():
        yield f"{key}.e2e_processing_latency_{each['quantile'] * 100:.0f}:{int(each['value'])}|g"


def packets(lines: Iterable[str], size: int) -> Iterator[bytes]:
    """Lines gathered into packets of at most ``size`` bytes; no line is cut."""
    packet = b""
    for line in lines:
        data = f"{line}\n".encode()
        if packet and len(packet) + len(data) > size:
            yield packet
            packet = b""
        packet += data
    if packet:
        yield packet
