"""Pushes an nsqd's figures to a statsd over UDP (nsqio/nsq: nsqd/statsd.go, statsdLoop)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from gevent import Greenlet, sleep, socket, spawn

from nsq_fast.broker.net.listener import split_listen_address
from nsq_fast.log_events import BROKER_STATSD_FAILED
from nsq_fast.names import is_ephemeral

from .nsqd import Nsqd
from .stats import memory_stats, topic_stats

logger = logging.getLogger("nsq_fast.broker.nsqd.statsd")

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
    """Pushes every ``statsd_interval`` seconds, in the background.

    Args:
        prefix: as ``key_prefix`` makes it.
    """

    def __init__(self, nsqd: Nsqd, prefix: str) -> None:
        self._nsqd = nsqd
        self._prefix = prefix
        self._last: dict[str, int] = {}
        self._greenlet: Greenlet[..., Any] | None = None

    def start(self) -> None:
        """Begin; the first push comes after one interval."""
        self._greenlet = spawn(self._run)

    def stop(self) -> None:
        """End without a last push, as the original does."""
        if self._greenlet is not None:
            self._greenlet.kill()
            self._greenlet = None

    def metrics(self) -> list[str]:
        """The lines of one push. Counters count from the push before."""
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
