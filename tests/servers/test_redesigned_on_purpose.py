"""Where the embedded cluster differs from the real one on purpose: docs/broker.md. Each test runs on both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import pytest
from support.cluster import RedesignedCluster as RealRedesignedCluster
from support.http import ask
from support.redesigned import Consumer, sized
from support.wire import WireClient

from nsq_fast.broker import RedesignedCluster
from nsq_fast.names import Address


class Node(NamedTuple):
    """Where an nsqd listens."""

    tcp_address: Address
    http_address: Address


class Site(NamedTuple):
    """A cluster of one node with a topic, ``t``, and its channel ``ch``."""

    is_ours: bool
    lookupd: Address
    node: Node


@pytest.fixture(scope="module", params=["embedded", "real"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if request.param == "real":
        request.getfixturevalue("wants_real")
        cluster = RealRedesignedCluster(tmp_path_factory.mktemp("on_purpose"), 1, 1)
        try:
            cluster.create_topic("t")
            leader = cluster.leader()
            assert leader is not None
            yield Site(False, leader, Node(cluster.nsqds[0].tcp_address, cluster.nsqds[0].http_address))
        finally:
            cluster.stop()
        return
    with RedesignedCluster(1, 1, readiness=0.0) as embedded:
        embedded.create_topic("t", channels=["ch"])
        node = embedded.nsqds[0]
        yield Site(True, embedded.lookupds[0].http_address, Node(node.tcp_address, node.http_address))


pytestmark = pytest.mark.timeout(1800)


def publish(site: Site, *bodies: bytes) -> None:
    client = WireClient(site.node.tcp_address)
    for body in bodies:
        assert client.command(b"PUB t 0\n" + sized(body)) == b"OK"
    client.close()


def test_a_message_that_comes_back_is_next_here(site: Site) -> None:
    publish(site, b"1", b"2", b"3")
    with closing(Consumer(site.node, "SUB t ch 0", rdy=1)) as consumer:
        consumer.requeue(consumer.receive())
        got = []
        for _ in range(3):
            frame = consumer.receive()
            got.append(frame.body)
            consumer.finish(frame)
    assert sorted(got) == [b"1", b"2", b"3"]
    assert got[0] == (b"1" if site.is_ours else b"2")


def test_quotes_in_a_message_are_escaped_here(site: Site) -> None:
    answer = ask(site.lookupd, "POST", "/topic/create?topic=u&partition_num=1&replicator=1&retention=x")
    quoted = rb"\"x\"" if site.is_ours else b'"x"'
    assert answer.body == b'{"message":"strconv.Atoi: parsing %b: invalid syntax"}' % quoted


def test_the_epoch_is_shown_here(site: Site) -> None:
    [row] = ask(site.node.http_address, "GET", "/coordinator/stats?topic=t&partition=0").json["topic_coord_stats"]
    assert ("epoch" in row) is site.is_ours


def test_a_route_of_metrics_is_missing_here(site: Site) -> None:
    assert ask(site.node.http_address, "GET", "/metric").status == (404 if site.is_ours else 200)


def test_a_rate_limit_has_no_effect_here(site: Site) -> None:
    path = "/channel/ratelimit?topic=t&partition=0&channel=ch&ratekilobytes=1"
    assert ask(site.node.http_address, "POST", path).status == 200
    bodies = [b"%d" % number + b"x" * 4_000 for number in range(5)]
    with closing(Consumer(site.node, "SUB t ch 0")) as consumer:
        began = time.monotonic()
        publish(site, *bodies)
        assert sorted(consumer.receive().body for _ in bodies) == bodies
        # 4 kB may exceed the limit at once; each of those behind them waits for a second, the most that it may.
        assert site.is_ours or time.monotonic() - began > 3.0
