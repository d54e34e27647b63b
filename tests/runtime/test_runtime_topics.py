"""Consumers of several topics, by name and by pattern, and ``discovery_filter``: what is consumed, and where."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
from support.partitions import PartitionNsqd, answers, push_record, topology
from support.servers import RealLookupd, RealNsqd
from support.waiting import WAIT, until

from nsq_fast import Consumer, LookupdHTTPClient, NsqdHTTPClient, Producer
from nsq_fast.broker import LookupdServer, NsqdOptions, NsqdServer, RedesignedCluster
from nsq_fast.errors import ConfigError, NoNsqd
from nsq_fast.names import Address
from nsq_fast.protocol.topology import Nsqd

ORDERS = re.compile("orders_.*")
QUICK_LOOKUP = {"lookupd_poll_interval": 0.2, "lookupd_poll_jitter": 0.0, "lookupd_refresh_interval": 0.05}


def publish(nsqd, topic, *bodies):
    with Producer(str(nsqd.tcp_address)) as producer:
        producer.multipublish(topic, list(bodies))


@pytest.fixture
def discovered(make_nsqd, make_lookupd):
    """An nsqd, its nsqlookupd, and the options of clients that find it."""
    lookupd = make_lookupd()
    nsqd = make_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    return nsqd, lookupd, {"lookupd_http_addresses": str(lookupd.http_address), **QUICK_LOOKUP}


# By name


def test_an_unknown_topic_is_said_and_the_others_go_on(discovered, start_consumer, caplog):
    nsqd, _, lookup = discovered
    publish(nsqd, "known", b"one")
    seen = []
    handler = lambda _, message: seen.append((message.topic, message.body))  # noqa: E731
    start_consumer(["unknown", "known"], "ch", message_handler=handler, **lookup)
    until(lambda: seen == [("known", b"one")])
    until(lambda: "no nsqlookupd knows topic unknown yet" in caplog.text)
    publish(nsqd, "unknown", b"two")
    until(lambda: seen == [("known", b"one"), ("unknown", b"two")])


def test_a_topic_that_can_have_none_of_the_partitions_does_not_end_the_others(consume):
    nsqd, errors = PartitionNsqd(), []
    consumer = consume(lambda c, m: None, found=topology({}), topic=["small", "large"], partitions=[2])
    consumer.on_error.connect(lambda c, error: errors.append(str(error)), weak=False)
    lookup = consumer._subscriptions.lookup
    for _ in range(2):
        lookup.tell(topology({0: nsqd}), "small")
    assert errors == ["topic small: partitions=[2]: the topic has partitions 0 to 0"]
    lookup.tell(topology({0: nsqd, 1: nsqd, 2: nsqd}), "large")
    assert nsqd.subscriber(2).commands[1][:2] == (b"SUB", b"large")
    assert consumer.is_running
    hopeless = consume(lambda c, m: None, found=topology({}), topic=["a", "b"], partitions=[2])
    for topic in ("a", "b"):
        assert hopeless.is_running
        hopeless._subscriptions.lookup.tell(topology({0: nsqd}), topic)
    with pytest.raises(ConfigError, match="topic a: partitions"):
        hopeless.join(WAIT)
    nsqd.stop()


# By pattern


def test_topics_that_match_are_taken_up_and_left_as_they_come_and_go(discovered, start_consumer, caplog):
    nsqd, lookupd, lookup = discovered
    seen = []
    handler = lambda _, message: seen.append((message.topic, message.body))  # noqa: E731
    consumer = start_consumer(ORDERS, "ch", message_handler=handler, **lookup)
    said = "lookup lists no topic that matches 'orders_.*'; asking again until that changes"
    until(lambda: said in caplog.text)
    publish(nsqd, "orders_eu", b"first")
    publish(nsqd, "letters", b"not chosen")
    until(lambda: seen == [("orders_eu", b"first")])
    assert caplog.text.count(said) == 1
    publish(nsqd, "orders_us", b"second")
    until(lambda: ("orders_us", b"second") in seen)
    assert sorted(consumer.topics) == ["orders_eu", "orders_us"]
    with LookupdHTTPClient(*lookupd.http_address) as admin:
        admin.delete_topic("orders_eu")
    with NsqdHTTPClient(*nsqd.http_address) as admin:
        admin.delete_topic("orders_eu")
        until(lambda: consumer.topics == ("orders_us",))
        # A consumer that connected again would have created the topic again.
        assert [topic["topic_name"] for topic in admin.stats()["topics"]] == ["letters", "orders_us"]
    for topic, body in (("orders_us", b"third"), ("orders_eu", b"fourth")):
        publish(nsqd, topic, body)
        until(lambda topic=topic, body=body: (topic, body) in seen)
    assert consumer.stats().totals.received == len(seen) == 4


@pytest.mark.parametrize(
    "addresses", [{"nsqd_tcp_addresses": "h"}, {"nsqd_tcp_addresses": "h", "lookupd_http_addresses": "h"}], ids=len
)
def test_a_pattern_needs_lookup_and_nothing_else(addresses):
    with pytest.raises(ConfigError, match="a pattern of topics takes what lookup lists"):
        Consumer(ORDERS, "ch", **addresses)


# The redesigned NSQ


def test_the_order_of_each_topic_is_its_own(consume):
    nsqds = {topic: PartitionNsqd() for topic in ("a", "b")}
    seen = []
    handler = lambda _, message: seen.append((message.topic, message.offset))  # noqa: E731
    consumer = consume(handler, found=topology({}), topic=["a", "b"])
    for topic, nsqd in nsqds.items():
        consumer._subscriptions.lookup.tell(topology({0: nsqd}, ordered=True), topic)
    a, b = (nsqd.subscriber(0) for nsqd in nsqds.values())
    for connection, numbers in ((a, (50, 51)), (b, (1, 2)), (a, (52,)), (b, (3,))):
        for number in numbers:
            push_record(connection, number)
            until(lambda connection=connection, number=number: number in answers(connection, b"FIN"))
    assert seen == [("a", 2000), ("a", 2040), ("b", 40), ("b", 80), ("a", 2080), ("b", 120)]
    assert consumer.stats().order_violations == 0
    for nsqd in nsqds.values():
        nsqd.stop()


@pytest.mark.parametrize("topic", [["a", "b"], re.compile("a|b")], ids=["names", "pattern"])
def test_ordered_and_unordered_topics_of_a_cluster(cluster, start_consumer, topic):
    cluster.create_topic("a", partitions=2, ordered=True, channels=["ch"])
    cluster.create_topic("b", partitions=2, channels=["ch"])
    lookupds = [str(each.http_address) for each in cluster.lookupds]
    seen = defaultdict(list)
    with Producer(lookupd_http_addresses=lookupds) as producer:
        for number in range(100):
            for name in ("a", "b"):
                producer.publish(name, b"%d" % number, partition=number % 2)
    handler = lambda _, message: seen[message.topic, message.partition].append(int(message.body))  # noqa: E731
    consumer = start_consumer(topic, "ch", lookupd_http_addresses=lookupds, message_handler=handler, **QUICK_LOOKUP)
    until(lambda: sum(map(len, seen.values())) == 200)
    for number in range(2):
        assert seen["a", number] == list(range(number, 100, 2))
        assert sorted(seen["b", number]) == list(range(number, 100, 2))
    assert consumer.stats().order_violations == 0
    assert {name: each.received for name, each in consumer.stats().topics.items()} == {"a": 100, "b": 100}


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
