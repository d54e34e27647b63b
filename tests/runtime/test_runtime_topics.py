"""One consumer of several topics, by name and by pattern: one max_in_flight, and each topic on its own otherwise."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gevent.event import Event
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.cluster import Standalone
from support.partitions import PartitionNsqd, answers, push_record, topology
from support.scripted_nsqd import ScriptedConnection, ScriptedNsqd
from support.waiting import holds, until

from nsq_fast import Consumer, LookupdHTTPClient, NsqdHTTPClient, Producer
from nsq_fast.broker import RedesignedCluster
from nsq_fast.client.give_up import PublishTo, WriteToFolder
from nsq_fast.client.subscriptions import TopicSubscriptions
from nsq_fast.client.trace import TraceLog
from nsq_fast.errors import ConfigError, NsqError
from nsq_fast.protocol.topology import Nsqd, Topology

Factory = Callable[..., Any]
ORDERS = re.compile("orders_.*")
QUICK_LOOKUP = {"lookupd_poll_interval": 0.2, "lookupd_poll_jitter": 0.0, "lookupd_refresh_interval": 0.05}


def publish(nsqd: Any, topic: str, *bodies: bytes) -> None:
    with Producer(str(nsqd.tcp_address)) as producer:
        producer.multipublish(topic, list(bodies))


def topic_of(connection: ScriptedConnection) -> str:
    return next((each[1].decode() for each in connection.commands if each[0].startswith(b"SUB")), "")


def of_topic(server: ScriptedNsqd, topic: str) -> ScriptedConnection:
    """The connection of a topic, once it has subscribed."""
    return until(lambda: next((each for each in server.connections if topic_of(each) == topic), None))


# By name


@pytest.mark.parametrize("options", [{}, {"concurrency": 3}, {"handler_threads": 2}], ids=str)
def test_messages_of_all_topics_come_and_say_which(
    make_nsqd: Factory, start_consumer: Factory, options: dict[str, Any]
) -> None:
    nsqds = [make_nsqd(), make_nsqd()]
    for number, nsqd in enumerate(nsqds):
        for topic in ("a", "b", "c"):
            publish(nsqd, topic, *(b"%s %d %d" % (topic.encode(), number, each) for each in range(200)))
    seen: Counter[tuple[str | None, bytes]] = Counter()
    consumer = start_consumer(
        ["a", "b"],
        "ch",
        [str(nsqd.tcp_address) for nsqd in nsqds],
        message_handler=lambda _, message: seen.update([(message.topic, message.body)]),
        max_in_flight=20,
        **options,
    )
    until(lambda: len(seen) == 800)
    assert set(seen.values()) == {1}
    assert all(body.startswith(topic.encode()) for topic, body in seen)
    until(lambda: consumer.stats().totals.finished == 800)
    stats = consumer.stats()
    assert {topic: counters.finished for topic, counters in stats.topics.items()} == {"a": 400, "b": 400}
    assert sorted(each.topic for each in stats.connections) == ["a", "a", "b", "b"]
    assert consumer.topics == ("a", "b")
    assert consumer.topic == "a,b"


def test_a_batch_holds_messages_of_one_topic(make_nsqd: Factory, start_consumer: Factory) -> None:
    nsqd = make_nsqd()
    for topic in ("a", "b"):
        publish(nsqd, topic, *(b"%d" % number for number in range(300)))
    batches: list[set[str | None]] = []
    counts: Counter[str | None] = Counter()

    def handle(_: Consumer, messages: list[Any]) -> None:
        batches.append({message.topic for message in messages})
        counts.update(message.topic for message in messages)

    start_consumer(["a", "b"], "ch", str(nsqd.tcp_address), batch_handler=handle, concurrency=1, max_in_flight=100)
    until(lambda: counts == {"a": 300, "b": 300})
    assert all(len(topics) == 1 for topics in batches)


def test_a_consumer_of_several_topics_can_be_iterated(make_nsqd: Factory, start_consumer: Factory) -> None:
    nsqd = make_nsqd()
    for topic in ("a", "b"):
        publish(nsqd, topic, *(b"%d" % number for number in range(50)))
    seen: Counter[str | None] = Counter()
    for message in start_consumer(["a", "b"], "ch", str(nsqd.tcp_address)):
        seen[message.topic] += 1
        if seen == {"a": 50, "b": 50}:
            break


@settings(max_examples=15, deadline=None)
@given(
    topics=st.integers(1, 4),
    nsqds=st.integers(1, 3),
    limits=st.lists(st.integers(0, 12), min_size=1, max_size=3),
)
def test_the_sum_of_rdy_over_topics_never_exceeds_max_in_flight(topics: int, nsqds: int, limits: list[int]) -> None:
    servers = [ScriptedNsqd() for _ in range(nsqds)]
    names = [f"t{number}" for number in range(topics)]
    addresses = [str(server.address) for server in servers]
    consumer = Consumer(names, "ch", addresses, message_handler=lambda c, m: None, max_in_flight=limits[0])
    most = max(limits)

    def total() -> int:
        return sum(each.rdy or 0 for server in servers for each in server.connections)

    try:
        consumer.start(block=False)
        until(lambda: sum(len(server.connections) for server in servers) == topics * nsqds)
        for limit in limits:
            consumer.max_in_flight = limit
            until(lambda limit=limit: consumer.total_ready_count == limit and total() == limit)
            assert total() <= most
    finally:
        consumer.close(drain=False)
        for server in servers:
            server.stop()


def test_no_more_are_held_than_max_in_flight_over_all_topics(make_nsqd: Factory, start_consumer: Factory) -> None:
    nsqd = make_nsqd()
    for topic in ("a", "b", "c"):
        publish(nsqd, topic, *(b"%d" % number for number in range(40)))
    held: list[Any] = []

    def handle(consumer: Consumer, message: Any) -> None:
        message.enable_async()
        held.append(message)
        assert len(held) <= 7
        assert consumer.total_in_flight <= 7

    consumer = start_consumer(["a", "b", "c"], "ch", str(nsqd.tcp_address), message_handler=handle, max_in_flight=7)
    for _ in range(120):
        until(lambda: held)
        held.pop(0).finish()
    until(lambda: consumer.stats().totals.finished == 120)
    assert consumer.stats().totals.requeued == 0


def test_an_unknown_topic_is_said_and_the_others_go_on(
    make_nsqd: Factory, make_lookupd: Factory, start_consumer: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    lookupd = make_lookupd()
    nsqd = make_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    publish(nsqd, "known", b"one")
    seen: list[tuple[str | None, bytes]] = []
    start_consumer(
        ["unknown", "known"],
        "ch",
        lookupd_http_addresses=str(lookupd.http_address),
        message_handler=lambda _, message: seen.append((message.topic, message.body)),
        **QUICK_LOOKUP,
    )
    until(lambda: seen == [("known", b"one")])
    until(lambda: "no nsqlookupd knows topic unknown yet" in caplog.text)
    publish(nsqd, "unknown", b"two")
    until(lambda: seen == [("known", b"one"), ("unknown", b"two")])


def test_a_topic_that_can_have_none_of_the_partitions_does_not_end_the_others(
    consume: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    nsqd = PartitionNsqd()
    errors: list[Exception] = []
    consumer = consume(lambda c, m: None, found=topology({}), topic=["small", "large"], partitions=[2])
    consumer.on_error.connect(lambda c, error: errors.append(error), weak=False)
    lookup = consumer._subscriptions.lookup
    for _ in range(2):
        lookup.tell(topology({0: nsqd}), "small")
    assert [str(error) for error in errors] == ["topic small: partitions=[2]: the topic has partitions 0 to 0"]
    lookup.tell(topology({0: nsqd, 1: nsqd, 2: nsqd}), "large")
    assert topic_of(nsqd.subscriber(2)) == "large"
    assert consumer.is_running
    nsqd.stop()


def test_a_consumer_ends_when_nothing_can_come_of_any_topic(consume: Factory) -> None:
    nsqd = PartitionNsqd()
    consumer = consume(lambda c, m: None, found=topology({}), topic=["a", "b"], partitions=[2])
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({0: nsqd}), "a")
    assert consumer.is_running
    lookup.tell(topology({0: nsqd}), "b")
    with pytest.raises(ConfigError, match="topic a: partitions"):
        consumer.join(timeout=20)
    nsqd.stop()


def test_a_failed_message_goes_to_the_policy_with_its_own_topic(
    make_nsqd: Factory, start_consumer: Factory, tmp_path: Path
) -> None:
    nsqd = make_nsqd()
    publish(nsqd, "a", b"bad")
    publish(nsqd, "b", b"bad")
    folder = tmp_path / "given up"
    again: list[str | None] = []

    def handle(_: Consumer, message: Any) -> None:
        if message.body == b"bad":
            raise ValueError("no")
        again.append(message.topic)

    def give_up(consumer: Consumer, message: Any) -> None:
        WriteToFolder(folder)(consumer, message)
        with Producer(str(nsqd.tcp_address)) as producer:
            PublishTo(producer=producer, convert=lambda message: b"good")(consumer, message)

    consumer = start_consumer(
        ["a", "b"],
        "ch",
        str(nsqd.tcp_address),
        message_handler=handle,
        give_up=give_up,
        max_tries=1,
        requeue_delay=0,
    )
    until(lambda: sorted(map(str, again)) == ["a", "b"])
    until(lambda: consumer.given_up == 2)
    assert sorted(path.name.partition(".")[0] for path in folder.glob("*.body")) == ["a", "b"]


def test_closing_gives_back_what_no_handler_has_begun_of_each_topic(servers: Factory, consume: Factory) -> None:
    server, began, go_on = servers(), [], Event()

    def handle(_: Consumer, message: Any) -> None:
        began.append(message.topic)
        go_on.wait()

    consumer = consume(handle, server, topic=["a", "b"], max_in_flight=10)
    for topic in ("a", "b"):
        connection = of_topic(server, topic)
        connection.wait_rdy(5)
        connection.push(1, 2, 3)
    until(lambda: sorted(began) == ["a", "b"])
    consumer.close(timeout=0)
    for topic in ("a", "b"):
        assert of_topic(server, topic).answered(b"REQ") == [2, 3]
    go_on.set()


# By pattern


def test_topics_that_match_are_taken_up_and_left_as_they_come_and_go(
    make_nsqd: Factory, make_lookupd: Factory, start_consumer: Factory
) -> None:
    lookupd = make_lookupd()
    nsqd = make_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    publish(nsqd, "orders_eu", b"first")
    publish(nsqd, "letters", b"not chosen")
    seen: list[tuple[str | None, bytes]] = []
    consumer = start_consumer(
        ORDERS,
        "ch",
        lookupd_http_addresses=str(lookupd.http_address),
        message_handler=lambda _, message: seen.append((message.topic, message.body)),
        **QUICK_LOOKUP,
    )
    until(lambda: seen == [("orders_eu", b"first")])
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
    publish(nsqd, "orders_us", b"third")
    until(lambda: ("orders_us", b"third") in seen)
    publish(nsqd, "orders_eu", b"fourth")
    until(lambda: ("orders_eu", b"fourth") in seen)
    assert consumer.stats().totals.received == 4
    assert len(seen) == 4


def test_a_pattern_that_nothing_matches_is_said_once(
    make_nsqd: Factory, make_lookupd: Factory, start_consumer: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    lookupd = make_lookupd()
    nsqd = make_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    seen: list[bytes] = []
    start_consumer(
        ORDERS,
        "ch",
        lookupd_http_addresses=str(lookupd.http_address),
        message_handler=lambda _, message: seen.append(message.body),
        **QUICK_LOOKUP,
    )
    said = "lookup lists no topic that matches 'orders_.*'; asking again until that changes"
    until(lambda: said in caplog.text)
    publish(nsqd, "orders_eu", b"x")
    until(lambda: seen == [b"x"])
    assert caplog.text.count(said) == 1


def found_at(nsqd: ScriptedNsqd) -> Topology:
    return Topology(producers=(Nsqd(nsqd.address, nsqd.address),))


def test_a_topic_stays_while_a_lookupd_that_may_list_it_does_not_answer(servers: Factory, consume: Factory) -> None:
    server = servers()
    consumer = consume(
        lambda c, m: None, found=Topology(), topic=ORDERS, lookupd_poll_interval=0.02, lookupd_poll_jitter=0.0
    )
    lookup = consumer._subscriptions.lookup
    lookup.listing = replace(lookup.listing, names=frozenset({"orders_eu"}))
    until(lambda: consumer.topics == ("orders_eu",))
    lookup.tell(found_at(server), "orders_eu")
    of_topic(server, "orders_eu").wait_rdy(10)
    lookup.listing = replace(lookup.listing, names=frozenset(), is_whole=False)
    holds(lambda: consumer.topics == ("orders_eu",), 0.2)
    lookup.listing = replace(lookup.listing, is_whole=True)
    until(lambda: lookup.added == [])
    # What it still delivers is handled, until it ends the connection.
    connection = of_topic(server, "orders_eu")
    connection.push(1)
    connection.wait_for(lambda: connection.answered(b"FIN") == [1])
    assert consumer.topics == ("orders_eu",)
    connection.close()
    until(lambda: consumer.topics == ())
    assert len(server.connections) == 1
    assert consumer.stats().totals.finished == 1


def test_a_topic_that_is_listed_again_is_taken_up_again(servers: Factory, consume: Factory) -> None:
    server = servers()
    consumer = consume(
        lambda c, m: None, found=Topology(), topic=ORDERS, lookupd_poll_interval=0.02, lookupd_poll_jitter=0.0
    )
    lookup = consumer._subscriptions.lookup
    listed, nothing = replace(lookup.listing, names=frozenset({"orders_eu"})), lookup.listing
    for _ in range(2):
        lookup.listing = listed
        until(lambda: lookup.added == ["orders_eu"])
        lookup.tell(found_at(server), "orders_eu")
        of_topic(server, "orders_eu").wait_rdy(10)
        lookup.listing = nothing
        until(lambda: lookup.added == [])
    lookup.listing = listed
    until(lambda: lookup.added == ["orders_eu"])
    lookup.tell(found_at(server), "orders_eu")
    assert len(server.connections) == 1  # it was kept
    server.connections[0].close()
    until(lambda: len(server.connections) == 2)
    server.connections[1].wait_rdy(10)


@pytest.mark.parametrize(
    "addresses", [{"nsqd_tcp_addresses": "h"}, {"nsqd_tcp_addresses": "h", "lookupd_http_addresses": "h"}], ids=len
)
def test_a_pattern_needs_lookup_and_nothing_else(addresses: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a pattern of topics takes what lookup lists"):
        Consumer(ORDERS, "ch", **addresses)


# The redesigned NSQ


def test_the_order_of_each_topic_is_its_own(consume: Factory) -> None:
    nsqds = {topic: PartitionNsqd() for topic in ("a", "b")}
    seen: list[tuple[str | None, int]] = []
    consumer = consume(
        lambda _, message: seen.append((message.topic, message.offset)), found=topology({}), topic=["a", "b"]
    )
    lookup = consumer._subscriptions.lookup
    for topic, nsqd in nsqds.items():
        lookup.tell(topology({0: nsqd}, ordered=True), topic)
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
def test_ordered_and_unordered_topics_of_a_cluster(
    cluster: RedesignedCluster, start_consumer: Factory, topic: Any
) -> None:
    cluster.create_topic("a", partitions=2, ordered=True, channels=["ch"])
    cluster.create_topic("b", partitions=2, channels=["ch"])
    lookupds = [str(each.http_address) for each in cluster.lookupds]
    seen: defaultdict[tuple[str | None, int | None], list[int]] = defaultdict(list)
    with Producer(lookupd_http_addresses=lookupds) as producer:
        for number in range(100):
            for name in ("a", "b"):
                producer.publish(name, b"%d" % number, partition=number % 2)
    consumer = start_consumer(
        topic,
        "ch",
        lookupd_http_addresses=lookupds,
        message_handler=lambda _, message: seen[message.topic, message.partition].append(int(message.body)),
        **QUICK_LOOKUP,
    )
    until(lambda: sum(map(len, seen.values())) == 200)
    for number in range(2):
        assert seen["a", number] == list(range(number, 100, 2))
        assert sorted(seen["b", number]) == list(range(number, 100, 2))
    assert consumer.stats().order_violations == 0
    assert {name: each.received for name, each in consumer.stats().topics.items()} == {"a": 100, "b": 100}


@pytest.mark.parametrize(
    ("topic", "ordered"),
    [(["a", "b"], False), (["a", "b"], True), (re.compile("a|b"), True)],
    ids=["names", "ordered", "ordered-pattern"],
)
def test_topics_of_a_real_redesigned_nsqd(
    standalone_nsqd: Standalone, start_consumer: Factory, topic: Any, ordered: bool
) -> None:
    for name in ("a", "b"):
        standalone_nsqd.create_topic(name, "ch")
    lookup = str(standalone_nsqd.lookupd_address)
    seen: defaultdict[str | None, list[int]] = defaultdict(list)
    consumer = start_consumer(
        topic,
        "ch",
        lookupd_http_addresses=lookup,
        ordered=ordered,
        message_handler=lambda _, message: seen[message.topic].append(int(message.body)),
        **QUICK_LOOKUP,
    )
    # A server that is asked for order in a channel that it reads already takes back what it has sent.
    until(lambda: sum(each.is_connected for each in consumer.stats().connections) == 2)
    with Producer(lookupd_http_addresses=lookup) as producer:
        for number in range(100):
            for name in ("a", "b"):
                producer.publish(name, b"%d" % number)
    until(lambda: sum(map(len, seen.values())) == 200)
    assert {name: sorted(found) for name, found in seen.items()} == {name: list(range(100)) for name in "ab"}
    if ordered:
        assert all(found == sorted(found) for found in seen.values())
    assert consumer.stats().order_violations == 0


def test_the_trace_log_names_the_topic_of_each_message(consume: Factory, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nsq_fast.trace")
    nsqds = {topic: PartitionNsqd() for topic in ("a", "b")}
    trace = TraceLog()
    trace.enable("b")
    consumer = consume(lambda c, m: None, found=topology({}), topic=["a", "b"], trace=trace)
    for topic, nsqd in nsqds.items():
        consumer._subscriptions.lookup.tell(topology({0: nsqd}), topic)
    for nsqd in nsqds.values():
        connection = nsqd.subscriber(0)
        push_record(connection, 1)
        until(lambda connection=connection: answers(connection, b"FIN") == [1])

    def traced() -> list[str]:
        return [record.msg.topic for record in caplog.records if record.name == "nsq_fast.trace"]

    until(lambda: len(traced()) >= 2)
    assert traced() == ["b", "b"]  # its receipt, and its outcome
    for nsqd in nsqds.values():
        nsqd.stop()


def test_what_lookup_says_of_a_topic_costs_no_look_at_all_others(
    consume: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: Counter[str] = Counter()
    is_hopeless = TopicSubscriptions.hopeless.fget
    assert is_hopeless is not None

    def hopeless(subscriptions: TopicSubscriptions) -> NsqError | None:
        looks[subscriptions.topic] += 1
        return is_hopeless(subscriptions)  # type: ignore[no-any-return]

    monkeypatch.setattr(TopicSubscriptions, "hopeless", property(hopeless))
    topics = [f"t{number}" for number in range(100)]
    consumer = consume(lambda c, m: None, found=topology({}), topic=topics)
    looks.clear()
    for topic in topics:
        consumer._subscriptions.lookup.tell(topology({}), topic)
    assert 0 < looks.total() <= 3 * len(topics)
