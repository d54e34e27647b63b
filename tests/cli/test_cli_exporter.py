"""`nsq-fast exporter`: what Prometheus reads of servers of both dialects."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest
from support.exporter import Shown, exporter
from support.servers import RealLookupd, RealNsqd
from support.waiting import WAIT, promptly, until

from nsq_fast import Consumer, Message, NsqdHTTPClient, Producer
from nsq_fast.broker import Broker, RedesignedCluster
from nsq_fast.cli import main
from nsq_fast.client.http import parse_endpoint
from nsq_fast.config import LookupConfig
from nsq_fast.exporter import Cluster, Families


class Collected:
    def __init__(self, metrics: list[Any]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Any]:
        return self._metrics


def shown(metrics: list[Any]) -> Shown:
    registry = CollectorRegistry()
    registry.register(Collected(metrics))  # type: ignore[arg-type]
    return Shown(generate_latest(registry).decode())


def cluster_of(lookupd: object, timeout: float = WAIT) -> Cluster:
    config = LookupConfig(lookupd_timeout=timeout)
    return Cluster([], [parse_endpoint(str(lookupd), 0)], timeout=timeout, lookup_config=config)


@pytest.mark.slow
def test_a_real_cluster_is_shown(real_nsqd: Callable[..., RealNsqd], real_lookupd: Callable[..., RealLookupd]) -> None:
    lookupd = real_lookupd()
    flags = (f"-lookupd-tcp-address={lookupd.tcp_address}", "-e2e-processing-latency-percentile=0.5,0.99")
    first, second = real_nsqd(*flags), real_nsqd(*flags)
    held: list[Message] = []

    def handle(consumer: Consumer, message: Message) -> None:
        if message.body == b"held":
            message.enable_async()
            held.append(message)

    for nsqd, bodies in ((first, [b"held", b"done"]), (second, [b"done"])):
        with NsqdHTTPClient(*nsqd.http_address) as client:
            client.create_topic("orders")
            for channel in ("billing", "waiting", "tail#ephemeral"):
                client.create_channel("orders", channel)
        with Producer(str(nsqd.tcp_address)) as producer:
            for body in bodies:
                producer.publish("orders", body)
    addresses = [str(each.tcp_address) for each in (first, second)]
    consumer = Consumer("orders", "billing", addresses, message_handler=handle, max_in_flight=4)
    consumer.start(block=False)
    with exporter("--lookupd", str(lookupd.http_address)) as read:
        now = until(lambda: (now := Shown(read("/metrics")))("channel_messages_total", channel="billing") == 3 and now)
        until(lambda: held)
        now = until(lambda: (now := Shown(read("/metrics")))("channel_in_flight", channel="billing") == 1 and now)
        assert read("/healthz") == "ok\n"
    consumer.close(drain=False)
    name = str(first.http_address)
    assert now("nsqd_up") == 2
    assert now("nsqlookupd_up", nsqlookupd=str(lookupd.http_address)) == 1
    assert now("channel_clients", channel="billing") == 2
    assert [now("channel_depth", channel=each) for each in ("billing", "waiting")] == [0, 3]
    assert now("topic_messages_total", topic="orders") == 3
    assert now("topic_messages_total", topic="orders", nsqd=name) == 2
    assert now("channel_messages_total", channel="tail#ephemeral") is None
    assert now("channel_paused", channel="billing") == 0
    latencies = [now("channel_e2e_latency_seconds", channel="billing", quantile=each) for each in ("0.5", "0.99")]
    assert all(each is not None and 0 < each < 3600 for each in latencies)


def test_the_partitions_of_a_redesigned_cluster_are_shown_once() -> None:
    with RedesignedCluster(nodes=4, lookupds=1, kind=True) as servers:
        lookupd = str(servers.lookupds[0].http_address)
        servers.create_topic("orders", 2, 2, channels=["billing"])
        with Producer(lookupd_http_addresses=lookupd) as producer:
            for number in range(4):
                producer.publish("orders", b"%d" % number, partition=number % 2)
        now = shown(cluster_of(lookupd).scrape())
    assert now("nsqd_up") == 4
    assert now("topic_messages_total", topic="orders") == 4
    assert [now("topic_messages_total", topic="orders", partition=each) for each in "01"] == [2, 2]
    assert now("channel_depth", topic="orders", channel="billing") == 4


def test_a_frozen_nsqd_is_shown_as_away_and_keeps_nobody_waiting(
    real_nsqd: Callable[..., RealNsqd], real_lookupd: Callable[..., RealLookupd]
) -> None:
    lookupd = real_lookupd()
    frozen, well = (real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}") for _ in range(2))
    with NsqdHTTPClient(*well.http_address) as client:
        client.create_topic("orders")
    cluster = cluster_of(lookupd.http_address, timeout=2.0)
    until(lambda: shown(cluster.scrape())("nsqd_up") == 2)
    frozen.freeze()
    try:
        with promptly():
            now = shown(cluster.scrape())
        up = [now("nsqd_up", nsqd=str(each.http_address)) for each in (frozen, well)]
        assert up == [0, 1]
        assert now("topic_depth", topic="orders") == 0
    finally:
        frozen.thaw()
    until(lambda: shown(cluster.scrape())("nsqd_up") == 2)
    well.kill()  # lookup forgets it: it is remembered here
    until(lambda: shown(cluster.scrape())("nsqd_up", nsqd=str(well.http_address)) == 0)


def test_where_lookup_is_away_the_nsqds_that_were_known_are_asked(nsq_broker: Broker) -> None:
    nsqd, lookupd = nsq_broker.nsqd, nsq_broker.lookupd
    cluster = cluster_of(lookupd.http_address)
    until(lambda: shown(cluster.scrape())("nsqd_up") == 1)
    lookupd.stop()
    until(lambda: shown(cluster.scrape())("nsqlookupd_up") == 0)
    assert shown(cluster.scrape())("nsqd_up", nsqd=str(nsqd.http_address)) == 1


def test_ephemeral_names_are_left_out_unless_wanted() -> None:
    channel = {"channel_name": "c#ephemeral", "depth": 3}
    topics = [{"topic_name": "t", "depth": 1, "channels": [channel]}, {"topic_name": "t#ephemeral", "depth": 7}]
    for with_ephemeral, topic, found in ((False, 1, None), (True, 8, 3)):
        families = Families(with_ephemeral)
        families.add_stats("nsqd", {"topics": topics})
        now = shown(families.all())
        assert (now("topic_depth"), now("channel_depth")) == (topic, found)


@pytest.mark.parametrize(
    ("channel", "clients"), [({"client_count": 2}, 2), ({"client_num": 3}, 3), ({"clients": [{}]}, 1), ({}, 0)]
)
def test_clients_are_counted_by_every_version(channel: dict[str, Any], clients: int) -> None:
    families = Families()
    topic = {"topic_name": "t", "channels": [{"channel_name": "c", "depth_ts_nano": 5_000_000_000, **channel}]}
    families.add_stats("nsqd", {"topics": [topic]})
    now = shown(families.all())
    assert (now("channel_clients"), now("channel_oldest_timestamp_seconds")) == (clients, 5.0)


def test_an_address_that_is_taken_is_named(closed_port: int) -> None:
    taken = f"127.0.0.1:{closed_port}"
    result = CliRunner().invoke(main, ["exporter", "--nsqd", "127.0.0.1:4151", "--http", taken])
    assert result.exit_code == 2
    assert "cannot listen there" in result.output


def test_it_says_which_extra_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    result = CliRunner().invoke(main, ["exporter", "--http", "127.0.0.1:0"])
    assert result.exit_code == 1
    assert "pip install 'nsq-fast[metrics]'" in result.output
