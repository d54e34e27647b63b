"""A consumer on the embedded redesigned cluster: moves, deaths, start positions; these on a real nsqd, too."""

from __future__ import annotations

import pytest
from gevent.event import Event
from support.waiting import until

from nsq_fast import NsqdHTTPClient, Producer
from nsq_fast.client.http import HttpClient
from nsq_fast.names import Address


@pytest.fixture
def taking(cluster, start_consumer):
    """``taking(partitions, handler, **options)``: a consumer that is connected to all partitions of the topic t."""
    lookupds = [str(each.http_address) for each in cluster.lookupds]

    def start(partitions, handler, **options):
        options = {"max_in_flight": 20, **options}
        consumer = start_consumer("t", "ch", lookupd_http_addresses=lookupds, message_handler=handler, **options)
        until(lambda: sum(each.is_connected for each in consumer.stats().connections) == partitions)
        return consumer

    return start


@pytest.fixture
def publish(cluster):
    """``publish(partition, *bodies)`` to the topic t."""
    lookupds = [str(each.http_address) for each in cluster.lookupds]
    with Producer(lookupd_http_addresses=lookupds, lookupd_refresh_interval=0.05) as producer:
        yield lambda partition, *bodies: producer.multipublish("t", list(bodies), partition=partition)


@pytest.mark.parametrize("ordered", [True, False])
def test_partitions_are_followed_through_moves_and_deaths(cluster, taking, publish, ordered):
    count = 3 if ordered else 1
    cluster.create_topic("t", partitions=count, replicas=2, ordered=ordered, channels=["ch"])
    seen = {partition: [] for partition in range(count)}
    consumer = taking(count, lambda _, message: seen[message.partition].append(int(message.body)))

    def leader():
        """Where the consumer takes partition 0 from now."""
        found = (each for each in consumer.stats().connections if each.partition == 0 and each.is_connected)
        return next((each.address for each in found), None)

    for turn in range(3):
        for partition in seen:
            publish(partition, *(b"%d" % (turn * 50 + number) for number in range(50)))
        if turn == 0:
            cluster.move_leader("t", 0)
        elif turn == 1:
            cluster.kill_node(cluster.leader_of("t", 0))
        until(lambda: leader() == Address(*cluster.leader_of("t", 0).tcp_address))
    for numbers in seen.values():
        until(lambda numbers=numbers: len(set(numbers)) == 150)
        once = list(dict.fromkeys(numbers))
        assert not ordered or once == sorted(once)
    assert consumer.stats().order_violations == 0
    assert len(consumer.stats().connections) == count


def test_by_default_every_ordered_partition_has_its_rdy(cluster, taking, publish):
    """A handler that holds the message of one partition keeps no other waiting for its turn."""
    cluster.create_topic("t", partitions=3, replicas=1, ordered=True, channels=["ch"])
    release, seen = Event(), []
    handler = lambda _, message: (seen.append(message.partition), release.wait())  # noqa: E731
    consumer = taking(3, handler, max_in_flight=None, low_ready_idle_timeout=600)
    for partition in range(3):
        publish(partition, b"first", b"second")
    until(lambda: sorted(seen) == [0, 1, 2])
    assert [each.rdy for each in consumer.stats().connections] == [1, 1, 1]
    release.set()
    until(lambda: sorted(seen) == [0, 0, 1, 1, 2, 2])


def test_a_blocked_partition_blocks_no_other(cluster, taking, publish):
    cluster.create_topic("t", partitions=2, replicas=1, ordered=True, channels=["ch"])
    seen = []

    def handler(_, message):
        if message.body == b"bad":
            raise ValueError("no")
        seen.append(message.body)

    consumer = taking(2, handler, requeue_delay=5, attempts_threshold=2)
    publish(0, b"bad", b"behind")
    publish(1, b"a", b"b", b"c")
    until(lambda: consumer.stats().blocked >= 3)
    assert seen == [b"a", b"b", b"c"]


def test_a_start_position_on_the_leader_of_each_partition(cluster, taking, publish):
    cluster.create_topic("t", partitions=2, replicas=1, ordered=True, channels=["ch"])
    seen = {0: [], 1: []}
    handler = lambda _, message: seen[message.partition].append(message.offset)  # noqa: E731
    first = taking(2, handler)
    for partition in (0, 1):
        publish(partition, b"a", b"b", b"c")
    until(lambda: len(seen[0]) == len(seen[1]) == 3)
    first.close()
    offsets, seen = seen, {0: [], 1: []}
    position = {0: f"offset:{offsets[0][1]}", 1: f"offset:{offsets[1][0]}"}
    taking(2, handler, start_position=position, start_position_policy="each_start")
    until(lambda: list(dict.fromkeys(seen[1])) == offsets[1] and offsets[0][-1] in seen[0])
    assert list(dict.fromkeys(seen[0])) == offsets[0][1:]


# Where a channel begins: on the embedded cluster and on a real nsqd


@pytest.fixture(params=["embedded", "redesigned"])
def place(request):
    """A topic "t" of one partition without a channel "new": how to publish to it, its lookups, and its leader."""
    if request.param == "embedded":
        cluster = request.getfixturevalue("cluster")
        cluster.create_topic("t", partitions=1, replicas=1, channels=["old"])
        lookups = [str(each.http_address) for each in cluster.lookupds]
        leader = cluster.leader_of("t", 0).http_address
    else:
        standalone = request.getfixturevalue("standalone_nsqd")
        standalone.create_topic("t", "old")
        lookups = [str(standalone.lookupd_address)]
        leader = standalone.http_address
    with Producer((), lookups) as producer:
        yield producer, lookups, leader


@pytest.fixture
def begin(place, start_consumer):
    """Start a consumer of "t" that notes the bodies it has seen, and wait until it is ready; give both."""

    def start(channel, position, **options):
        seen = []
        handler = lambda _, message: seen.append(message.body)  # noqa: E731
        options = {"message_handler": handler, "start_position": position, **options}
        consumer = start_consumer("t", channel, (), place[1], **options)
        until(lambda: consumer.total_ready_count > 0)
        return consumer, seen

    return start


def finished(consumer, count):
    until(lambda: consumer.stats().totals.finished == count)


def publish_twenty(place, channel):
    """Until the channel knows of all of them: to a real nsqd, its end lies before the others for up to two seconds."""

    def depth():
        (topic,) = client.stats("t")["topics"]
        return next(each["depth"] for each in topic["channels"] if each["channel_name"] == channel)

    producer, _, leader = place
    producer.multipublish("t", [b"%d" % number for number in range(20)])
    with NsqdHTTPClient(*leader) as client:
        until(lambda: depth() == 20)


def test_a_channel_begins_where_start_position_says_once(place, begin):
    producer = place[0]
    producer.multipublish("t", [b"before", b"before"])
    first, seen = begin("new", "end")
    producer.publish("t", b"1")
    finished(first, 1)
    assert seen == [b"1"]
    second, seen_by_second = begin("new", "end")  # another instance
    producer.publish("t", b"2")
    until(lambda: seen[1:] + seen_by_second == [b"2"])
    until(lambda: first.stats().totals.finished + second.stats().totals.finished == 2)
    first.close()
    second.close()
    producer.multipublish("t", [b"3", b"4"])
    third, seen = begin("new", "end")  # a restart
    finished(third, 2)
    assert seen == [b"3", b"4"]


def test_what_comes_once_a_channel_was_made_at_the_end_is_not_skipped(place, begin, monkeypatch):
    producer, ask = place[0], HttpClient.ask

    async def publish_after_creation(self, loop, method, path, *arguments, **options):
        reply = await ask(self, loop, method, path, *arguments, **options)
        if path == "/channel/create":
            producer.publish("t", b"1")
        return reply

    producer.publish("t", b"before")
    monkeypatch.setattr(HttpClient, "ask", publish_after_creation)
    consumer, seen = begin("new", "end")
    finished(consumer, 1)
    assert seen == [b"1"]


@pytest.mark.parametrize("channel", ["old", "new"])
def test_it_skips_what_waited_at_each_start_and_where_nobody_has_begun(place, begin, channel):
    producer = place[0]
    options = {"start_position_policy": "each_start"} if channel == "new" else {}
    if channel == "new":
        begin("new", "end", **options)[0].close()
    publish_twenty(place, channel)
    _, seen = begin(channel, "end", **options)
    producer.publish("t", b"last")
    until(lambda: b"last" in seen)
    assert len(seen) < 20, "a real server sends what it had read already"
