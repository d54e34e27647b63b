"""Lookup: the poller of greenlets against lookupds that work, lie, hang and come back, and topics that are found.

What holds on every loop stands in tests/client/test_client_lookup.py; what HTTP bounds, in test_client_lookup.py.
"""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import gevent
import pytest
from support.http_server import reply, scripted_http
from support.partitions import lookup_of, topology
from support.waiting import WAIT, holds, until

from nsq_fast import Consumer, LookupdHTTPClient, NsqdHTTPClient, Producer
from nsq_fast.broker import LookupdServer, NsqdOptions, NsqdServer, RedesignedCluster
from nsq_fast.client.admin import LookupPoller
from nsq_fast.config import LookupConfig
from nsq_fast.errors import ConfigError, LookupFailed, NoNsqd
from nsq_fast.names import Address
from nsq_fast.protocol.topology import Nsqd

FAST = LookupConfig(lookupd_poll_interval=0.05, lookupd_poll_jitter=0.0, lookupd_timeout=1.0)
CALM = LookupConfig(lookupd_poll_interval=60.0, lookupd_timeout=20.0, lookupd_refresh_interval=0.2)


def peer(port, version="1.3.0"):
    return {"broadcast_address": "10.0.0.1", "tcp_port": port, "http_port": port + 1, "version": version}


def producers(*ports):
    return {"channels": [], "producers": [peer(port) for port in ports]}


def listing(*addresses):
    return {"lookupdnodes": [{"NodeIP": each.host, "HttpPort": str(each.port)} for each in addresses]}


NOT_FOUND = reply(b'{"message":"NOT_FOUND"}', "404 Not Found")


class Routes:
    """A lookupd whose answers the test sets: an object for JSON, bytes to send, or a function of the question."""

    def __init__(self, answer):
        self.answer = answer
        self.lists = NOT_FOUND

    def __call__(self, question):
        answer = self.lists if question.target.startswith("/listlookup") else self.answer
        if callable(answer):
            return answer(question)
        if isinstance(answer, bytes):
            question.send(answer)
        else:
            question.answer(answer)
        return True


@contextmanager
def polling(*answers, config=CALM, **options):
    """A poller of lookupds that answer so, and these."""
    with scripted_http(*map(Routes, answers)) as servers:
        poller = LookupPoller([server.address for server in servers], config, **options)
        poller.start()
        try:
            yield poller, *servers
        finally:
            poller.stop()


def ports(topology):
    return None if topology is None else {nsqd.tcp.port for nsqd in topology.producers}


def hang(question):
    question.hang()


# What a poll finds


@pytest.mark.parametrize("access", ["r", "w"])
def test_the_role_metadata_and_accept_header_are_always_sent(access):
    questions = []

    def answer(question):
        questions.append(question)
        question.answer(producers(1))

    config = CALM.replace(lookupd_authorization="Bearer s3cret")
    with polling(answer, config=config, access=access) as (poller, _):
        poller.wait_topology("t#ephemeral", WAIT)
    assert questions[0].target == f"/lookup?topic=t%23ephemeral&access={access}&metainfo=true"
    assert "Accept: application/vnd.nsq; version=1.0\r\n" in questions[0].head
    assert "Authorization: Bearer s3cret\r\n" in questions[0].head
    assert "s3cret" not in repr(config)


def test_a_removed_topic_is_asked_for_no_more():
    heard = []
    with polling(producers(1), config=FAST, listener=lambda topic, _: heard.append(topic)) as (poller, _):
        poller.add_topic("a")
        poller.add_topic("b")
        until(lambda: {"a", "b"} <= set(heard))
        poller.remove_topic("a")
        heard.clear()
        until(lambda: heard.count("b") >= 3)
        assert "a" not in heard
        assert poller.topology("a") is None


# Bad answers


def cut(data):
    """Send this, and end the connection."""
    return lambda question: (question.send(data), question.end())


LIES = {
    "html": reply(b"<html>It works!</html>"),
    "status 500": reply(b"{}", "500 Internal Server Error"),
    "status 302": reply(b"", "302 Found", "Location: http://127.0.0.1:1/lookup\r\n"),
    "no such route": NOT_FOUND,
    "closes at once": cut(b""),
    "closes within the body": cut(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"),
    "hangs": hang,
    "huge": reply(b'{"channels":[' + b'"c",' * 500_000 + b'"c"],"producers":[]}'),
    "too many": producers(*range(1, 500)),
}
BOUNDED = FAST.replace(lookupd_max_producers=100)


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_lookupd_is_ignored_and_logged_once(lie, caplog):
    with polling(producers(1), LIES[lie], config=BOUNDED) as (poller, good, bad):
        assert ports(poller.wait_topology("t", WAIT)) == {1}
        until(lambda: bad.count("/lookup") >= 2 and good.count("/lookup") >= 4)
        assert ports(poller.topology("t")) == {1}
    failures = [record for record in caplog.records if str(bad.address) in record.getMessage()]
    assert [record.levelno for record in failures] == [logging.WARNING]
    said = {"too many": "names 499 nsqds, more than lookupd_max_producers=100 allows", "huge": "a reply of more than"}
    assert said.get(lie, "") in failures[0].getMessage()


@pytest.mark.parametrize("lie", ["html", "hangs", "closes at once", "status 500", "huge"])
def test_when_every_lookupd_fails_what_was_known_stays(lie):
    heard = []
    with polling(producers(1), config=BOUNDED, listener=lambda _, new: heard.append(new)) as (poller, lookupd):
        known = poller.wait_topology("t", WAIT)
        lookupd.script.answer = LIES[lie]
        count = lookupd.count("/lookup")
        until(lambda: lookupd.count("/lookup") >= count + 2)
        before = len(heard)
        until(lambda: lookupd.count("/lookup") >= count + 3)
        assert len(heard) == before
        assert poller.topology("t") == known
        lookupd.script.answer = producers(2)
        until(lambda: ports(poller.topology("t")) == {2})


def test_a_failing_lookupd_is_asked_less_often_and_promoted_when_it_answers(caplog):
    caplog.set_level(logging.INFO, "nsq_fast.lookup")
    with polling(producers(1), reply(b"", "500 Oh"), config=FAST) as (poller, good, bad):
        poller.add_topic("t")
        until(lambda: good.count("/lookup") >= 24)
        assert 2 <= bad.count("/lookup") <= 8
        bad.script.answer = producers(2)
        until(lambda: ports(poller.topology("t")) == {1, 2})
        asked, others = bad.count("/lookup"), good.count("/lookup")
        until(lambda: good.count("/lookup") >= others + 8)
        assert bad.count("/lookup") - asked >= 6
    fails, again = [text for text in map(str, caplog.messages) if str(bad.address) in text]
    assert "fails" in fails
    assert "answers again" in again


def test_refreshes_without_end_are_a_poll_each_interval():
    with polling(producers(1)) as (poller, lookupd):
        poller.wait_topology("t", WAIT)
        before, began = lookupd.count("/lookup"), time.monotonic()
        while lookupd.count("/lookup") < before + 4:
            poller.refresh("t")
            gevent.sleep(0.001)  # sleep: refreshes again and again
        assert time.monotonic() - began > 2 * CALM.lookupd_refresh_interval


# Growing by /listlookup


def test_the_lookupds_of_a_cluster_are_learnt_from_a_seed_and_forgotten_when_they_are_listed_no_more():
    with scripted_http(Routes(producers(1)), Routes(producers(2))) as (seed, other):
        seed.script.lists = listing(seed.address, other.address)
        poller = LookupPoller([seed.address], FAST)
        poller.start()
        poller.add_topic("t")
        until(lambda: ports(poller.topology("t")) == {1, 2})
        assert poller.lookupds == (f"http://{seed.address}", f"http://{other.address}")
        seed.script.lists = listing()
        until(lambda: poller.lookupds == (f"http://{seed.address}",))  # never the configured ones
        seed.script.lists = listing(*(Address("127.0.0.1", port) for port in range(1, 1000)))
        until(lambda: len(poller.lookupds) > 1)
        assert len(poller.lookupds) <= 64
        poller.stop()


@pytest.mark.parametrize("answer", [NOT_FOUND, reply(b""), reply(b"<html>"), hang, listing()], ids=range(5))
def test_without_listlookup_the_configured_addresses_serve(answer, caplog):
    with scripted_http(Routes(producers(1))) as [seed]:
        seed.script.lists = answer
        poller = LookupPoller([seed.address], CALM)
        poller.start()
        assert ports(poller.wait_topology("t", WAIT)) == {1}
        holds(lambda: poller.lookupds == (f"http://{seed.address}",))
        poller.stop()


# All nsqds


def test_nodes_of_lookupds_that_fail_are_an_error():
    def is_too_old():
        try:
            poller.nodes(0.05)
        except LookupFailed:
            return True
        return False

    with polling(reply(b"<html>")) as (poller, lookupd):
        with pytest.raises(LookupFailed, match="malformed"):
            poller.nodes(WAIT)
        lookupd.script.answer = producers()
        assert poller.nodes(WAIT) == ()
        lookupd.script.answer = hang
        until(is_too_old)


# Arguments


@pytest.mark.parametrize("given", ["h:1", "http://h:1", "http://h:1/", " h:1 ,", ("h", 1)])
def test_a_lookupd_may_be_given_as_text_or_as_a_pair(given):
    assert LookupPoller(given).lookupds == ("http://h:1",)


@pytest.mark.parametrize(
    "bad", ["", [], "ftp://h:1", "http://h:1/path", "http://user:secret@h:1", "h:0", "h:x", "http://:1", [1], 5, None]
)
def test_addresses_that_cannot_be_used_are_refused(bad):
    with pytest.raises(ConfigError) as error:
        LookupPoller(bad)
    assert "secret" not in str(error.value)


# Consumers of several topics, by name and by pattern, and ``discovery_filter``: what is consumed, and where


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


def test_a_consumer_is_back_soon_when_its_only_nsqd_restarts(start_consumer, caplog):
    """One lookupd says first that nobody has the topic, while the last word of the other still names the nsqd."""
    with ExitStack() as stack:
        lookupds = [stack.enter_context(LookupdServer()) for _ in range(2)]
        registered = [str(each.tcp_address) for each in lookupds]
        nsqd = stack.enter_context(NsqdServer(NsqdOptions(lookupd_tcp_addresses=registered)))
        publish(nsqd, "t", b"before")
        seen = []
        where = {"lookupd_http_addresses": [str(each.http_address) for each in lookupds], "lookupd_poll_interval": 600}
        start_consumer("t", "ch", message_handler=lambda _, message: seen.append(message.body), **where)
        until(lambda: seen == [b"before"])
        nsqd.stop()
        until(lambda: "no nsqlookupd knows topic t yet" in caplog.text)
        nsqd.start()
        publish(nsqd, "t", b"after")
        until(lambda: seen == [b"before", b"after"])


def test_a_topic_that_can_have_none_of_the_partitions_does_not_end_the_others(nsqds, consume):
    nsqd, errors = nsqds(), []
    consumer = consume(lambda c, m: None, found=topology({}), topic=["small", "large"], partitions=[2])
    consumer.on_error.connect(lambda c, error: errors.append(str(error)), weak=False)
    lookup = lookup_of(consumer)
    for _ in range(2):
        lookup.tell(topology({0: nsqd}), "small")
    assert errors == ["topic small: partitions=[2]: the topic has partitions 0 to 0"]
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
    consumer = start_consumer(topic, "ch", message_handler=handler, **lookups, **QUICK_LOOKUP)
    until(lambda: sum(map(len, seen.values())) == 200)
    for number in range(2):
        assert seen["a", number] == list(range(number, 100, 2))
        assert sorted(seen["b", number]) == list(range(number, 100, 2))
    assert consumer.stats().order_violations == 0
    assert {name: each.received for name, each in consumer.stats().topics.items()} == {"a": 100, "b": 100}


FAST_LOOKUP: dict[str, Any] = {"lookupd_poll_interval": 0.05, "lookupd_poll_jitter": 0.0}


class Zones:
    """An nsqlookupd, and an nsqd in each of two zones."""

    def __init__(self, lookupd: Any, nsqds: dict[str, Any]) -> None:
        self.lookupd = Address(*lookupd.http_address)
        self.tcp = {zone: Address(*each.tcp_address) for zone, each in nsqds.items()}
        self.http = {zone: Address(*each.http_address) for zone, each in nsqds.items()}

    def depth(self, zone: str, topic: str) -> int:
        with NsqdHTTPClient(*self.http[zone]) as client:
            found = [each for each in client.stats()["topics"] if each["topic_name"] == topic]
        return sum(each["message_count"] for each in found)


@pytest.fixture
def zones(family: str, make_nsqd: Callable[..., Any], make_lookupd: Callable[..., Any]) -> Zones:
    lookupd = make_lookupd()
    flags = [f"-lookupd-tcp-address={lookupd.tcp_address}", "-topology-region=r"]
    if family == "original":
        flags.append("-enable-experiment=topology-aware-consumption")
    return Zones(lookupd, {zone: make_nsqd(*flags, f"-topology-zone={zone}") for zone in "ab"})


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
    options: dict[str, Any] = {"lookupd_http_addresses": [zones.lookupd], **FAST_LOOKUP}
    handle = lambda _, message: taken.append(message.body)  # noqa: E731
    in_a = {"topology_zone": "a"}
    consumer = start_consumer("topic", "channel", message_handler=handle, discovery_filter=in_a, **options)
    with Producer(discovery_filter=lambda nsqd: nsqd.topology_zone == "a", **options) as producer:
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
    consumer = start_consumer("topic", "channel", message_handler=lambda *_: None, **nowhere, **FAST_LOOKUP)
    until(lambda: "discovery_filter leaves none of the 2 nsqds" in caplog.text)
    assert not consumer.stats().connections
    with Producer(**nowhere, **FAST_LOOKUP) as producer:
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

    options: dict[str, Any] = {"lookupd_http_addresses": [zones.lookupd], "discovery_filter": keep, **FAST_LOOKUP}
    consumer = start_consumer("topic", "channel", message_handler=lambda *_: None, **options)
    until(lambda: len(asked) > 2)
    assert not consumer.stats().connections
    assert caplog.text.count("discovery_filter failed for topic") == 1
    with Producer(**options) as producer:
        until(lambda: "discovery_filter failed: ValueError('wrong')" in refusal(producer))


def test_partitions_of_other_nodes_are_left_out_and_named(
    cluster: RedesignedCluster,
    lookups: dict[str, Any],
    start_consumer: Callable[..., Consumer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster.create_topic("topic", 3, channels=["channel"])
    leader = cluster.nsqds[0].tcp_address
    options: dict[str, Any] = {"discovery_filter": lambda nsqd: nsqd.tcp == leader, **lookups, **FAST_LOOKUP}
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
