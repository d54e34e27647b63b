"""``discovery_filter`` of consumers and producers, on servers of both families."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
from support.servers import RealLookupd, RealNsqd
from support.waiting import until

from nsq_fast import Consumer, LookupdHTTPClient, NsqdHTTPClient, Producer
from nsq_fast.broker import LookupdServer, NsqdOptions, NsqdServer, RedesignedCluster
from nsq_fast.errors import NoNsqd
from nsq_fast.names import Address
from nsq_fast.protocol.topology import Nsqd

FAST: dict[str, Any] = {"lookupd_poll_interval": 0.05, "lookupd_poll_jitter": 0.0}


class Zones(NamedTuple):
    """An nsqlookupd, and an nsqd in each of two zones."""

    lookupd: Address
    tcp: dict[str, Address]
    http: dict[str, Address]

    def depth(self, zone: str, topic: str) -> int:
        with NsqdHTTPClient(*self.http[zone]) as client:
            found = [each for each in client.stats()["topics"] if each["topic_name"] == topic]
        return sum(each["message_count"] for each in found)


@pytest.fixture(params=["embedded", "original"])
def zones(request: pytest.FixtureRequest) -> Iterator[Zones]:
    with ExitStack() as stack:
        if request.param == "embedded":
            lookupd = stack.enter_context(LookupdServer())
            options = {"lookupd_tcp_addresses": (str(lookupd.tcp_address),)}
            servers = {
                zone: stack.enter_context(NsqdServer(NsqdOptions(topology_zone=zone, **options))) for zone in "ab"
            }
            yield Zones(
                lookupd.http_address,
                {zone: each.tcp_address for zone, each in servers.items()},
                {zone: each.http_address for zone, each in servers.items()},
            )
            return
        real_lookupd: RealLookupd = request.getfixturevalue("real_lookupd")()
        make: Callable[..., RealNsqd] = request.getfixturevalue("real_nsqd")
        flags = [f"-lookupd-tcp-address={real_lookupd.tcp_address}", "-enable-experiment=topology-aware-consumption"]
        real = {zone: make(*flags, f"-topology-zone={zone}", "-topology-region=r") for zone in "ab"}
        yield Zones(
            Address(*real_lookupd.http_address),
            {zone: Address(*each.tcp_address) for zone, each in real.items()},
            {zone: Address(*each.http_address) for zone, each in real.items()},
        )


def create(zones: Zones, topic: str) -> None:
    for address in zones.http.values():
        with NsqdHTTPClient(*address) as client:
            client.create_topic(topic)
    with LookupdHTTPClient(*zones.lookupd) as lookupd:  # nsqds register after they have answered
        until(lambda: [topic in nsqd["topics"] for nsqd in lookupd.nodes()["producers"]].count(True) == len(zones.http))


def refusal(producer: Producer, **where: Any) -> str:
    """What is said to a publish that may not wait."""
    with pytest.raises(NoNsqd) as caught:
        producer.publish("topic", b"body", block=False, **where)
    return str(caught.value)


def test_consumers_and_producers_stay_in_their_zone(zones: Zones, start_consumer: Callable[..., Consumer]) -> None:
    create(zones, "topic")
    taken: list[bytes] = []
    consumer = start_consumer(
        "topic",
        "channel",
        lookupd_http_addresses=[zones.lookupd],
        message_handler=lambda _, message: taken.append(message.body),
        discovery_filter={"topology_zone": "a"},
        **FAST,
    )
    with Producer(
        lookupd_http_addresses=[zones.lookupd], discovery_filter=lambda nsqd: nsqd.topology_zone == "a", **FAST
    ) as producer:
        for number in range(20):
            producer.publish("topic", b"%d" % number)
        assert producer.stats()["connected"] == [str(zones.tcp["a"])]
    until(lambda: len(taken) == 20)
    assert [each.address for each in consumer.stats().connections] == [zones.tcp["a"]]
    assert (zones.depth("a", "topic"), zones.depth("b", "topic")) == (20, 0)


def test_a_wait_for_want_of_nsqds_in_the_zone_names_the_filter(
    zones: Zones, start_consumer: Callable[..., Consumer], caplog: pytest.LogCaptureFixture
) -> None:
    create(zones, "topic")
    caplog.set_level(logging.INFO)
    nowhere: dict[str, Any] = {"lookupd_http_addresses": [zones.lookupd], "discovery_filter": {"topology_zone": "c"}}
    consumer = start_consumer("topic", "channel", message_handler=lambda *_: None, **nowhere, **FAST)
    until(lambda: "discovery_filter leaves none of the 2 nsqds" in caplog.text)
    assert not consumer.stats().connections
    with Producer(**nowhere, **FAST) as producer:
        until(lambda: "discovery_filter leaves none of the 2" in refusal(producer))
    assert caplog.text.count("topic topic: discovery_filter leaves none") == 1
    assert "no nsqlookupd knows topic" not in caplog.text


def test_a_filter_that_fails_is_named_once_and_uses_no_nsqd(
    zones: Zones, start_consumer: Callable[..., Consumer], caplog: pytest.LogCaptureFixture
) -> None:
    create(zones, "topic")
    asked: list[Nsqd] = []

    def keep(nsqd: Nsqd) -> bool:
        asked.append(nsqd)
        raise ValueError("wrong")

    consumer = start_consumer(
        "topic",
        "channel",
        message_handler=lambda *_: None,
        lookupd_http_addresses=[zones.lookupd],
        discovery_filter=keep,
        **FAST,
    )
    until(lambda: len(asked) > 2)
    assert not consumer.stats().connections
    assert caplog.text.count("discovery_filter failed for topic") == 1
    with Producer(lookupd_http_addresses=[zones.lookupd], discovery_filter=keep, **FAST) as producer:
        until(lambda: "discovery_filter failed: ValueError('wrong')" in refusal(producer))


def test_partitions_of_other_nodes_are_left_out_and_named(
    cluster: RedesignedCluster, start_consumer: Callable[..., Consumer], caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create_topic("topic", 3, channels=["channel"])
    leaders = cluster.nsqds[0].tcp_address
    lookupds = [str(each.http_address) for each in cluster.lookupds]
    options: dict[str, Any] = {"lookupd_http_addresses": lookupds, **FAST}
    keep = {"discovery_filter": lambda nsqd: nsqd.tcp == leaders}
    taken: list[int | None] = []
    consumer = start_consumer(
        "topic", "channel", message_handler=lambda _, message: taken.append(message.partition), **options, **keep
    )
    until(lambda: any(each.is_connected for each in consumer.stats().connections))
    (own,) = (each.partition for each in consumer.stats().connections)
    others = sorted({0, 1, 2} - {own})
    assert f"discovery_filter leaves out the leaders of partitions {others[0]}, {others[1]}" in caplog.text
    with Producer(**options, **keep) as producer:
        for _ in range(6):
            producer.publish("topic", b"body")
        assert "discovery_filter leaves out the leaders of partitions" in refusal(producer, partition=others[0])
    until(lambda: len(taken) == 6)
    assert set(taken) == {own}
