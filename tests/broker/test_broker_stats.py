"""Figures: latency quantiles, and what is pushed to statsd."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gevent import Timeout, socket
from support.http import ask
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import NsqdOptions, NsqdServer
from nsq_fast.broker.executable import parse_flags
from nsq_fast.broker.nsqd import Nsqd
from nsq_fast.broker.queue import ACCURACY, LatencyWindow, latency_stats
from nsq_fast.broker.stats import StatsdPusher, key_prefix, packets
from nsq_fast.errors import ConfigError


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def quantiles(*windows: LatencyWindow | None) -> list[float]:
    return [each["value"] for each in latency_stats(windows)["percentiles"]]


def test_what_is_older_than_the_window_does_not_count() -> None:
    clock = Clock()
    window = LatencyWindow((1.0,), 60.0, clock)
    window.add(1000)
    clock.now += 31
    window.add(2000)
    assert latency_stats([window])["count"] == 2
    clock.now += 30
    assert latency_stats([window])["count"] == 1
    assert quantiles(window) == pytest.approx([2000], rel=ACCURACY)
    clock.now += 1000
    assert latency_stats([window]) == {"count": 0, "percentiles": [{"quantile": 1.0, "value": 0.0}]}


@pytest.mark.parametrize("run", [True, False], ids=["a run of FINs", "one FIN"])
def test_figures_of_a_server(start_nsqd: Callable[..., Any], run: bool) -> None:
    server = start_nsqd(e2e_processing_latency_percentiles=(0.5, 1.0, 0.95))
    client = WireClient(server.tcp_address)
    client.subscribe("t", "c", 2)
    for body in (b"1", b"2"):
        WireClient(server.tcp_address).publish("t", body)
    ids = [client.frame().id for _ in range(2)]
    client.send(b"".join(b"FIN %b%b\n" % (id, b"" if run else b" ") for id in ids))
    until(lambda: shown(server)["channels"][0]["e2e_processing_latency"]["count"] == 2)
    topic = shown(server)
    for latency in (topic["e2e_processing_latency"], topic["channels"][0]["e2e_processing_latency"]):
        assert latency["count"] == 2
        assert [each["quantile"] for each in latency["percentiles"]] == [1.0, 0.95, 0.5]
        values = [each["value"] for each in latency["percentiles"]]
        assert values == sorted(values, reverse=True)
        assert 0 < values[-1] < 3600e9
    text = ask(server.http_address, "GET", "/stats?topic=t").body.decode()
    assert text.count(" e2e%: ") == 2
    assert all(len(line.split(" e2e%: ")[1].split(", ")) == 3 for line in text.splitlines() if " e2e%: " in line)


def shown(server: Any) -> Any:
    [topic] = ask(server.http_address, "GET", "/stats?format=json&topic=t").json["topics"]
    return topic


def test_gauges_of_statsd() -> None:
    nsqd = Nsqd(NsqdOptions(e2e_processing_latency_percentiles=(0.99, 0.5), statsd_mem_stats=False))
    nsqd.start()
    channel = nsqd.get_topic("t").get_channel("c")
    assert channel.latency is not None
    channel.latency.add(1000)
    lines = [line.partition(":") for line in StatsdPusher(nsqd, "").metrics()]
    values = {key: value for key, _, value in lines if "e2e" in key}
    nsqd.close()
    assert set(values) == {
        f"topic.t.{part}e2e_processing_latency_{percent}" for part in ("", "channel.c.") for percent in (99, 50)
    }
    for value in values.values():
        number, _, kind = value.partition("|")
        assert (int(number), kind) == (pytest.approx(1000, rel=2 * ACCURACY), "g")


@pytest.mark.parametrize("values", [(0.0,), (1.1,), (0.5, -1.0), ("x",), 0.5])
def test_percentiles_out_of_range_are_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match="e2e_processing_latency_percentiles"):
        NsqdOptions(e2e_processing_latency_percentiles=values)


def test_flags() -> None:
    flags = ["-e2e-processing-latency-percentile=0.5,0.99", "--e2e-processing-latency-percentile", "1.0",
             "-e2e-processing-latency-window-time=30s"]  # fmt: skip
    options = NsqdOptions(**{
        name: None if name == "data_path" else value
        for name, value in parse_flags("nsqd", flags).items()
        if name not in ("log_level", "log_prefix", "notes")
    })  # fmt: skip
    assert options.e2e_processing_latency_percentiles == (1.0, 0.99, 0.5)
    assert options.e2e_processing_latency_window_time == 30.0
    with pytest.raises(ConfigError):
        parse_flags("nsqd", ["-e2e-processing-latency-percentile=high"])


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
