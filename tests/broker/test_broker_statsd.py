"""The figures pushed to statsd: names, kinds, packets, and that they arrive; ours and the original's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from gevent import Timeout, socket
from support.http import ask

from nsq_fast.broker import NsqdOptions, NsqdServer
from nsq_fast.broker.stats import StatsdPusher, key_prefix, packets


@pytest.fixture
def statsd() -> Iterator[Any]:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    yield sock
    sock.close()


def pushed(statsd: Any, last: str) -> list[str]:
    """The lines that arrive, up to the one whose key ends in ``last``."""
    lines: list[str] = []
    with Timeout(20, TimeoutError(f"no {last} in {lines}")):
        while not any(line.split(":")[0].endswith(last) for line in lines):
            lines += statsd.recv(65536).decode().splitlines()
    return lines


METRICS = [
    "topic.t.message_count:3|c",
    "topic.t.message_bytes:5|c",
    "topic.t.depth:0|g",
    "topic.t.backend_depth:0|g",
    "topic.t.channel.c.message_count:3|c",
    "topic.t.channel.c.depth:3|g",
    "topic.t.channel.c.backend_depth:0|g",
    "topic.t.channel.c.in_flight_count:0|g",
    "topic.t.channel.c.deferred_count:0|g",
    "topic.t.channel.c.requeue_count:0|c",
    "topic.t.channel.c.timeout_count:0|c",
    "topic.t.channel.c.clients:0|g",
]
MEMORY = [
    "mem.heap_objects|g",
    "mem.heap_idle_bytes|g",
    "mem.heap_in_use_bytes|g",
    "mem.heap_released_bytes|g",
    "mem.gc_pause_usec_100|g",
    "mem.gc_pause_usec_99|g",
    "mem.gc_pause_usec_95|g",
    "mem.next_gc_bytes|g",
    "mem.gc_runs|c",
]


@pytest.fixture(params=["embedded", pytest.param("real", marks=pytest.mark.slow)])
def pushing_nsqd(request: pytest.FixtureRequest, statsd: Any) -> Iterator[Any]:
    host, port = statsd.getsockname()
    if request.param == "real":  # it divides by its interval less one second
        yield request.getfixturevalue("real_nsqd")(f"-statsd-address={host}:{port}", "-statsd-interval=1100ms")
        return
    with NsqdServer(NsqdOptions(statsd_address=f"{host}:{port}", statsd_interval=0.2)) as server:
        yield server


def test_figures_are_pushed(pushing_nsqd: Any, statsd: Any) -> None:
    address = pushing_nsqd.http_address
    ask(address, "POST", "/topic/create?topic=t")
    ask(address, "POST", "/channel/create?topic=t&channel=c")
    ask(address, "POST", "/mpub?topic=t", b"a\nbb\ncc")
    lines = pushed(statsd, "mem.gc_runs")
    prefix = f"nsq.127_0_0_1_{address.port}."
    assert all(line.startswith(prefix) for line in lines)
    bare = [line.removeprefix(prefix) for line in lines]
    assert sorted(line for line in bare if line.startswith("topic")) == sorted(METRICS)
    assert [re.sub(r":\d+", "", line) for line in bare if line.startswith("mem")] == MEMORY


def test_counters_count_from_the_push_before() -> None:
    with NsqdServer(NsqdOptions(statsd_mem_stats=False)) as server:
        pusher = StatsdPusher(server.nsqd, "p.")
        server.nsqd.get_topic("t").put(b"12345")
        assert "p.topic.t.message_count:1|c" in pusher.metrics()
        server.nsqd.get_topic("t").put(b"12345")
        server.nsqd.get_topic("t").put(b"12345")
        assert pusher.metrics()[:3] == [
            "p.topic.t.message_count:2|c",
            "p.topic.t.message_bytes:10|c",
            "p.topic.t.depth:3|g",
        ]


def test_what_is_ephemeral_can_be_left_out() -> None:
    with NsqdServer(NsqdOptions(statsd_mem_stats=False, statsd_exclude_ephemeral=True)) as server:
        server.nsqd.get_topic("e#ephemeral")
        server.nsqd.get_topic("t").get_channel("c#ephemeral")
        keys = {line.split(":")[0] for line in StatsdPusher(server.nsqd, "").metrics()}
        assert keys == {"topic.t.message_count", "topic.t.message_bytes", "topic.t.depth", "topic.t.backend_depth"}


def test_prefix() -> None:
    assert key_prefix("nsq.%s", "a.example", 4151) == "nsq.a_example_4151."
    assert key_prefix("mine.", "a", 1) == "mine."
    assert key_prefix("%s", "::1", 1) == "[__1]_1."
    assert key_prefix("", "a", 1) == ""


def test_no_line_is_cut_and_no_packet_too_long() -> None:
    lines = [f"key{number}:1|c" for number in range(100)]
    made = list(packets(lines, 64))
    assert all(len(packet) <= 64 and packet.endswith(b"\n") for packet in made)
    assert b"".join(made).decode().splitlines() == lines
    assert list(packets(["x" * 100], 64)) == [b"x" * 100 + b"\n"]
    assert list(packets([], 64)) == []
