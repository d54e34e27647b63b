"""One message there and back through each kind of server that there is: what `make quick` knows of servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.cluster import Standalone
from support.servers import RealLookupd, RealNsqd
from support.waiting import until

from nsq_fast import Consumer, NsqdHTTPClient, Producer
from nsq_fast.broker import Broker, RedesignedCluster

pytestmark = pytest.mark.round_trip
BODIES = [b"%d" % number for number in range(100)]


@pytest.fixture
def embedded_original() -> Iterator[str]:
    with Broker() as broker:
        yield str(broker.lookupd.http_address)


@pytest.fixture
def embedded_redesigned() -> Iterator[str]:
    with RedesignedCluster(nodes=1, lookupds=1) as cluster:
        cluster.create_topic("t", partitions=1, replicas=1, channels=["c"])
        yield str(cluster.lookupds[0].http_address)


@pytest.fixture
def real_original(real_nsqd: Callable[..., RealNsqd], real_lookupd: Callable[..., RealLookupd]) -> str:
    lookupd = real_lookupd()
    nsqd = real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    with NsqdHTTPClient(*nsqd.http_address) as client:
        client.create_topic("t")
        client.create_channel("t", "c")
    return str(lookupd.http_address)


@pytest.fixture
def real_redesigned(standalone_nsqd: Standalone) -> str:
    standalone_nsqd.create_topic("t")
    return str(standalone_nsqd.lookupd_address)


@pytest.mark.parametrize(
    "servers", ["embedded_original", "embedded_redesigned", "real_original", "real_redesigned"], ids=str
)
def test_what_is_published_is_consumed_once(servers: str, request: pytest.FixtureRequest) -> None:
    lookupd: str = request.getfixturevalue(servers)
    handled: list[bytes] = []

    def handle(_consumer: Any, message: Any) -> None:
        handled.append(message.body)

    with Producer(lookupd_http_addresses=[lookupd]) as producer:
        producer.multipublish("t", BODIES[1:])
        producer.publish("t", BODIES[0])
    with Consumer("t", "c", (), [lookupd], message_handler=handle, max_in_flight=10) as consumer:
        until(lambda: len(handled) >= len(BODIES))
    assert sorted(handled) == sorted(BODIES)
    assert consumer.stats().totals.finished == len(BODIES)
