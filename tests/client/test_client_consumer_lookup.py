"""What consumers and producers make of what lookup says: topics by name and by pattern, and ``discovery_filter``."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from support.partitions import lookup_of, topology
from support.scripted_nsqd import heard, noting
from support.waiting import WAIT, until

from nsq_fast import Consumer, LookupdHTTPClient, NsqdHTTPClient, Producer
from nsq_fast.broker import LookupdServer, NsqdOptions, NsqdServer, RedesignedCluster
from nsq_fast.errors import ConfigError, NoNsqd
from nsq_fast.protocol.topology import Nsqd

ORDERS = re.compile("orders_.*")
QUICK: dict[str, Any] = {
    "lookupd_poll_interval": 0.05, "lookupd_poll_jitter": 0.0, "lookupd_refresh_interval": 0.05,
}  # fmt: skip


def publish(nsqd, topic, *bodies):
    with Producer(str(nsqd.tcp_address)) as producer:
        producer.multipublish(topic, list(bodies))


# By name


def test_a_consumer_is_back_soon_when_its_only_nsqd_restarts(start_consumer, caplog):
    """One lookupd says first that nobody has the topic, while the last word of the other still names the nsqd."""
    with ExitStack() as stack:
        lookupds = [stack.enter_context(LookupdServer()) for _ in range(2)]
        registered = [str(each.tcp_address) for each in lookupds]
        nsqd = stack.enter_context(NsqdServer(NsqdOptions(lookupd_tcp_addresses=registered)))
        publish(nsqd, "t", b"before")
        seen = []
        where = {"lookupd_http_addresses": [str(each.http_address) for each in lookupds], "lookupd_poll_interval": 600}
        start_consumer("t", "ch", message_handler=noting(seen), **where)
        until(lambda: seen == [b"before"])
        nsqd.stop()
        until(lambda: "no nsqlookupd knows topic t yet" in caplog.text)
        nsqd.start()
        publish(nsqd, "t", b"after")
        until(lambda: seen == [b"before", b"after"])


def test_a_topic_that_can_have_none_of_the_partitions_does_not_end_the_others(nsqds, consume):
    nsqd = nsqds()
    consumer = consume(lambda c, m: None, found=topology({}), topic=["small", "large"], partitions=[2])
    errors = heard(consumer)
    lookup = lookup_of(consumer)
    for _ in range(2):
        lookup.tell(topology({0: nsqd}), "small")
    assert [*map(str, errors)] == ["topic small: partitions=[2]: the topic has partitions 0 to 0"]
    lookup.tell(topology({0: nsqd, 1: nsqd, 2: nsqd}), "large")
    assert nsqd.subscriber(2).commands[1][:2] == (b"SUB", b"large")
    assert consumer.is_running
    hopeless = consume(lambda c, m: None, found=topology({}), topic=["a", "b"], partitions=[2])
    for topic in ("a", "b"):
        assert hopeless.is_running
        lookup_of(hopeless).tell(topology({0: nsqd}), topic)
    with pytest.raises(ConfigError, match="topic a: partitions"):
        hopeless.join(WAIT)


# By pattern


def test_topics_that_match_are_taken_up_and_left_as_they_come_and_go(make_nsqd, make_lookupd, start_consumer, caplog):
    caplog.set_level(logging.INFO)
    lookupd = make_lookupd()
    nsqd = make_nsqd(lookupd, broadcast_address="127.0.0.1")
    lookup = {"lookupd_http_addresses": str(lookupd.http_address), **QUICK}
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
    with LookupdHTTPClient(*lookupd.http_address) as admin:
        admin.delete_topic("orders_us")  # and the connections stay
    until(lambda: "topic orders_us is listed no longer" in caplog.text)
    publish(make_nsqd(lookupd, broadcast_address="127.0.0.1"), "orders_us", b"fifth")
    until(lambda: ("orders_us", b"fifth") in seen)
    assert consumer.stats().totals.received == len(seen) == 5


@pytest.mark.parametrize(
    "addresses", [{"nsqd_tcp_addresses": "h"}, {"nsqd_tcp_addresses": "h", "lookupd_http_addresses": "h"}], ids=len
)
def test_a_pattern_needs_lookup_and_nothing_else(addresses):
    with pytest.raises(ConfigError, match="a pattern of topics takes what lookup lists"):
        Consumer(ORDERS, "ch", **addresses)


# The redesigned NSQ


@pytest.mark.parametrize("topic", [["a", "b"], re.compile("a|b")], ids=["names", "pattern"])
def test_ordered_and_unordered_topics_of_a_cluster(cluster, lookups, start_consumer, topic):
    cluster.create_topic("a", partitions=2, ordered=True, channels=["ch"])
    cluster.create_topic("b", partitions=2, channels=["ch"])
    seen = defaultdict(list)
    with Producer(**lookups) as producer:
        for number in range(100):
            for name in ("a", "b"):
                producer.publish(name, b"%d" % number, partition=number % 2)
    handler = lambda _, message: seen[message.topic, message.partition].append(int(message.body))  # noqa: E731
    consumer = start_consumer(topic, "ch", message_handler=handler, **lookups, **QUICK)
    until(lambda: sum(map(len, seen.values())) == 200)
    for number in range(2):
        assert seen["a", number] == list(range(number, 100, 2))
        assert sorted(seen["b", number]) == list(range(number, 100, 2))
    assert consumer.stats().order_violations == 0
    assert {name: each.received for name, each in consumer.stats().topics.items()} == {"a": 100, "b": 100}


def refusal(producer: Producer, **where: Any) -> str:
    """What is said to a publish that may not wait."""
    with pytest.raises(NoNsqd) as caught:
        producer.publish("topic", b"body", block=False, **where)
    return str(caught.value)


def test_clients_use_the_nsqds_that_discovery_filter_leaves_and_say_so_where_it_leaves_none(
    family: str,
    make_nsqd: Callable[..., Any],
    make_lookupd: Callable[..., Any],
    start_consumer: Callable[..., Consumer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def consume(keep: Any, topic: str = "topic") -> Consumer:
        return start_consumer(topic, "channel", message_handler=noting(taken), discovery_filter=keep, **options)

    def fail(nsqd: Nsqd) -> bool:
        asked.append(nsqd)
        raise ValueError("wrong")

    caplog.set_level(logging.INFO)
    taken: list[bytes] = []
    asked: list[Nsqd] = []
    lookupd = make_lookupd()
    flags = {"enable_experiment": "topology-aware-consumption"} if family == "original" else {}
    nsqds = {zone: make_nsqd(lookupd, topology_region="r", topology_zone=zone, **flags) for zone in "ab"}
    options: dict[str, Any] = {"lookupd_http_addresses": [lookupd.http_address], **QUICK}
    for each in nsqds.values():
        with NsqdHTTPClient(*each.http_address) as client:
            client.create_topic("topic")
    with LookupdHTTPClient(*lookupd.http_address) as client:  # nsqds register after they have answered
        until(lambda: [nsqd["topics"] for nsqd in client.nodes()["producers"]] == [["topic"], ["topic"]])
    in_a = consume({"topology_zone": "a"})
    with Producer(discovery_filter=lambda nsqd: nsqd.topology_zone == "a", **options) as producer:
        for number in range(20):
            producer.publish("topic", b"%d" % number)
        assert producer.stats()["connected"] == [str(nsqds["a"].tcp_address)]
    until(lambda: len(taken) == 20)
    assert [each.address for each in in_a.stats().connections] == [nsqds["a"].tcp_address]
    in_c = consume({"topology_zone": "c"})
    until(lambda: "discovery_filter leaves none of the 2 nsqds" in caplog.text)
    with Producer(discovery_filter={"topology_zone": "c"}, **options) as producer:
        until(lambda: "discovery_filter leaves none of the 2" in refusal(producer))
    assert caplog.text.count("topic topic: discovery_filter leaves none") == 1
    assert "no nsqlookupd knows topic" not in caplog.text
    of_one_that_fails = consume(fail)
    until(lambda: len(asked) > 2)
    assert caplog.text.count("discovery_filter failed for topic") == 1
    with Producer(discovery_filter=fail, **options) as producer:
        until(lambda: "discovery_filter failed: ValueError('wrong')" in refusal(producer))
    assert not in_c.stats().connections + of_one_that_fails.stats().connections


def test_partitions_of_other_nodes_are_left_out_and_named(
    cluster: RedesignedCluster,
    lookups: dict[str, Any],
    start_consumer: Callable[..., Consumer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster.create_topic("topic", 3, channels=["channel"])
    leader = cluster.nsqds[0].tcp_address
    options: dict[str, Any] = {"discovery_filter": lambda nsqd: nsqd.tcp == leader, **lookups, **QUICK}
    taken: list[int | None] = []
    handle = lambda _, message: taken.append(message.partition)  # noqa: E731
    consumer = start_consumer("topic", "channel", message_handler=handle, **options)
    until(lambda: any(each.is_connected for each in consumer.stats().connections))
    (own,) = (each.partition for each in consumer.stats().connections)
    others = sorted({0, 1, 2} - {own})
    assert f"discovery_filter leaves out the leaders of partitions {others[0]}, {others[1]}" in caplog.text
    with Producer(**options) as producer:
        for _ in range(6):
            producer.publish("topic", b"body")
        assert "discovery_filter leaves out the leaders of partitions" in refusal(producer, partition=others[0])
    until(lambda: len(taken) == 6)
    assert set(taken) == {own}
