"""One consumer of several topics, by name and by pattern: one max_in_flight, and each topic on its own otherwise."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import pytest
from support.partitions import PartitionNsqd, answers, push_record, topology
from support.waiting import WAIT, until

from nsq_fast import Consumer, LookupdHTTPClient, NsqdHTTPClient, Producer
from nsq_fast.errors import ConfigError

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


@pytest.mark.parametrize("options", [{}, {"concurrency": 3}, {"handler_threads": 2}, {"is_batch": True}], ids=str)
def test_messages_of_all_topics_come_and_say_which(make_nsqd, start_consumer, options):
    nsqds = [make_nsqd(), make_nsqd()]
    for number, nsqd in enumerate(nsqds):
        for topic in ("a", "b", "c"):
            publish(nsqd, topic, *(b"%s %d %d" % (topic.encode(), number, each) for each in range(200)))
    seen = Counter()

    def handle_batch(_, messages):
        assert len({message.topic for message in messages}) == 1
        seen.update((message.topic, message.body) for message in messages)

    handler = {"message_handler": lambda _, message: seen.update([(message.topic, message.body)])}
    options = dict(options)
    if options.pop("is_batch", False):
        handler = {"batch_handler": handle_batch, "concurrency": 1}
    addresses = [str(nsqd.tcp_address) for nsqd in nsqds]
    consumer = start_consumer(["a", "b"], "ch", addresses, max_in_flight=20, **handler, **options)
    until(lambda: len(seen) == 800)
    assert set(seen.values()) == {1}
    assert all(body.startswith(topic.encode()) for topic, body in seen)
    until(lambda: consumer.stats().totals.finished == 800)
    stats = consumer.stats()
    assert {topic: counters.finished for topic, counters in stats.topics.items()} == {"a": 400, "b": 400}
    assert sorted(each.topic for each in stats.connections) == ["a", "a", "b", "b"]
    assert consumer.topics == ("a", "b")
    assert consumer.topic == "a,b"


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
