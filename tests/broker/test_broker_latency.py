"""End-to-end processing latency: the window alone, and the figures of ours and of the original's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.http import ask
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import NsqdOptions
from nsq_fast.broker.executable import parse_flags
from nsq_fast.broker.nsqd import Nsqd
from nsq_fast.broker.queue import ACCURACY, LatencyWindow, latency_stats
from nsq_fast.broker.stats import StatsdPusher
from nsq_fast.errors import ConfigError


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def quantiles(*windows: LatencyWindow | None) -> list[float]:
    return [each["value"] for each in latency_stats(windows)["percentiles"]]


def test_quantiles_are_near_the_true_ones() -> None:
    window = LatencyWindow((0.99, 0.5), 600.0)
    for n in range(1, 1001):
        window.add(n * 1_000_000)
    assert quantiles(window) == pytest.approx([990e6, 500e6], rel=ACCURACY)


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


def test_windows_count_together_and_stay_as_they_were() -> None:
    one, other = LatencyWindow((0.5,), 60.0), LatencyWindow((0.5,), 60.0)
    for n in range(100):
        one.add(1000 + n)
        other.add(9000 + n)
    assert latency_stats([one, None, other])["count"] == 200
    assert latency_stats([one])["count"] == 100
    assert latency_stats([None]) == latency_stats([]) == {"count": 0, "percentiles": None}


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


def test_without_percentiles_nothing_is_measured(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd()
    WireClient(server.tcp_address).publish("t", b"1")
    assert shown(server)["e2e_processing_latency"] == {"count": 0, "percentiles": None}


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
