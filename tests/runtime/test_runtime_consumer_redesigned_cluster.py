"""A consumer on the embedded redesigned cluster: moves, deaths, start positions, headers, old nsqds."""

from __future__ import annotations

import gzip
import struct

import gevent
import pytest
from gevent.event import Event
from support.waiting import WAIT, until

from nsq_fast import NsqdHTTPClient, Producer
from nsq_fast._codec import encode_frame, mpub, pub_ext
from nsq_fast.client.http import HttpClient
from nsq_fast.errors import OrderedSubRequired
from nsq_fast.names import Address

CONSUME = {"channel": "ch", "max_in_flight": 20}


def lookupds(cluster):
    return [str(each.http_address) for each in cluster.lookupds]


def send(cluster, topic, partition, *commands):
    """Publish on a connection of its own to the leader; wait for every OK."""
    with gevent.Timeout(WAIT), gevent.socket.create_connection(cluster.leader_of(topic, partition).tcp_address) as sock:
        sock.sendall(b"  V2" + b"".join(commands))
        stream = sock.makefile("rb")
        for _ in commands:
            size = struct.unpack(">I", stream.read(4))[0]
            assert stream.read(size)[:6] == encode_frame(0, b"OK")[4:10]


def publish(cluster, topic, partition, *bodies):
    until(lambda: cluster.leader_of(topic, partition).is_running)
    send(cluster, topic, partition, mpub(topic, list(bodies), partition))


def connected(consumer, count):
    until(lambda: sum(each.is_connected for each in consumer.stats().connections) == count)


def leader(consumer, partition):
    """Where the consumer takes a partition from now."""
    return next(
        (each.address for each in consumer.stats().connections if each.partition == partition and each.is_connected),
        None,
    )


@pytest.mark.parametrize("ordered", [True, False])
def test_partitions_are_followed_through_moves_and_deaths(cluster, consume, ordered):
    cluster.create_topic("t", partitions=3 if ordered else 1, replicas=2, ordered=ordered, channels=["ch"])
    partitions = range(3 if ordered else 1)
    seen = {partition: [] for partition in partitions}
    consumer = consume(
        lambda _, message: seen[message.partition].append(int(message.body)),
        topic="t",
        lookupd_http_addresses=lookupds(cluster),
    )
    connected(consumer, len(partitions))
    for turn in range(3):
        for partition in partitions:
            publish(cluster, "t", partition, *(b"%d" % (turn * 50 + number) for number in range(50)))
        if turn == 0:
            cluster.move_leader("t", 0)
        elif turn == 1:
            cluster.kill_node(cluster.leader_of("t", 0))
        until(lambda: leader(consumer, 0) == Address(*cluster.leader_of("t", 0).tcp_address))
    for partition in partitions:
        until(lambda partition=partition: len(set(seen[partition])) == 150)
        if ordered:
            once = list(dict.fromkeys(seen[partition]))
            assert once == sorted(once)
    assert consumer.stats().order_violations == 0
    assert len(consumer.stats().connections) == len(partitions)


def test_by_default_every_ordered_partition_has_its_rdy(cluster, consume):
    """A handler that holds the message of one partition keeps no other waiting for its turn."""
    cluster.create_topic("t", partitions=3, replicas=1, ordered=True, channels=["ch"])
    release, seen = Event(), []

    def handler(_, message):
        seen.append(message.partition)
        release.wait()

    consumer = consume(
        handler, topic="t", lookupd_http_addresses=lookupds(cluster), max_in_flight=None, low_ready_idle_timeout=600
    )
    connected(consumer, 3)
    for partition in range(3):
        publish(cluster, "t", partition, b"first", b"second")
    until(lambda: sorted(seen) == [0, 1, 2])
    assert [each.rdy for each in consumer.stats().connections] == [1, 1, 1]
    release.set()
    until(lambda: sorted(seen) == [0, 0, 1, 1, 2, 2])


def test_an_ordered_topic_says_what_to_set(cluster, consume):
    cluster.create_topic("t", partitions=2, replicas=1, ordered=True, channels=["ch"])
    consumer = consume(lambda _, message: None, topic="t", lookupd_http_addresses=lookupds(cluster), ordered=False)
    with pytest.raises(OrderedSubRequired, match="ordered=True"):
        consumer.join(WAIT)


def test_a_blocked_partition_blocks_no_other(cluster, consume):
    cluster.create_topic("t", partitions=2, replicas=1, ordered=True, channels=["ch"])
    seen = []

    def handler(_, message):
        if message.body == b"bad":
            raise ValueError("no")
        seen.append(message.body)

    consumer = consume(
        handler, topic="t", lookupd_http_addresses=lookupds(cluster), requeue_delay=5, attempts_threshold=2
    )
    connected(consumer, 2)
    publish(cluster, "t", 0, b"bad", b"behind")
    publish(cluster, "t", 1, b"a", b"b", b"c")
    until(lambda: consumer.stats().blocked >= 3)
    assert seen == [b"a", b"b", b"c"]


def test_a_blocked_message_goes_to_the_dead_letters(cluster, consume):
    cluster.create_topic("t", partitions=1, replicas=1, ordered=True, channels=["ch"])
    seen, dead = [], []

    def handler(_, message):
        if message.body == b"bad":
            raise ValueError("no")
        seen.append(message.body)

    consumer = consume(
        handler,
        topic="t",
        lookupd_http_addresses=lookupds(cluster),
        requeue_delay=5,
        attempts_threshold=2,
        blocked_policy=lambda _, message: dead.append(message.body),
    )
    connected(consumer, 1)
    publish(cluster, "t", 0, b"bad", b"behind")
    until(lambda: seen == [b"behind"])
    assert dead == [b"bad"]


def test_headers_and_compressed_bodies(cluster, consume):
    cluster.create_topic("t", partitions=1, replicas=1, ext=True, channels=["ch"])
    seen = []
    consumer = consume(
        lambda _, message: seen.append((message.body, message.headers.get("k"))),
        topic="t",
        lookupd_http_addresses=lookupds(cluster),
    )
    connected(consumer, 1)
    compressed = pub_ext("t", b'{"nsq.client.compress":"1","nsq.msg.size":"5"}', gzip.compress(b"hello"), 0)
    send(cluster, "t", 0, compressed, pub_ext("t", b'{"k":"v"}', b"plain", 0))
    until(lambda: seen == [(b"hello", None), (b"plain", "v")])


def test_a_start_position_on_the_leader_of_each_partition(cluster, consume):
    cluster.create_topic("t", partitions=2, replicas=1, ordered=True, channels=["ch"])
    seen = {0: [], 1: []}
    first = consume(
        lambda _, message: seen[message.partition].append(message.offset),
        topic="t",
        lookupd_http_addresses=lookupds(cluster),
    )
    connected(first, 2)
    for partition in (0, 1):
        publish(cluster, "t", partition, b"a", b"b", b"c")
    until(lambda: len(seen[0]) == len(seen[1]) == 3)
    first.close()
    offsets = {partition: list(each) for partition, each in seen.items()}
    seen[0].clear()
    seen[1].clear()
    consume(
        lambda _, message: seen[message.partition].append(message.offset),
        topic="t",
        lookupd_http_addresses=lookupds(cluster),
        start_position={0: f"offset:{offsets[0][1]}", 1: f"offset:{offsets[1][0]}"},
        start_position_policy="each_start",
    )
    until(lambda: list(dict.fromkeys(seen[1])) == offsets[1] and offsets[0][-1] in seen[0])
    assert list(dict.fromkeys(seen[0])) == offsets[0][1:]


# On the embedded cluster and on a real nsqd


@pytest.mark.parametrize("server", ["embedded", "redesigned"])
def test_a_topic_that_no_lookup_knows_is_named_at_once(server, request, start_consumer, caplog):
    if server == "embedded":
        lookup = request.getfixturevalue("cluster").lookupds[0].http_address
    else:
        lookup = request.getfixturevalue("standalone_nsqd").lookupd_address
    start_consumer("unknown", "ch", (), [str(lookup)], message_handler=lambda _, message: None)
    until(lambda: any("knows topic unknown yet" in each.getMessage() for each in caplog.records))


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
        consumer = start_consumer(
            "t", channel, (), place[1], message_handler=lambda _, message: seen.append(message.body),
            start_position=position, **options,
        )  # fmt: skip
        until(lambda: consumer.total_ready_count > 0)
        return consumer, seen

    return start


def finished(consumer, count):
    until(lambda: consumer.stats().totals.finished == count)


def publish_twenty(place, channel):
    """Until the channel knows of all of them: to a real nsqd, its end lies before the others for up to two seconds."""
    producer, _, leader = place
    producer.multipublish("t", [b"%d" % number for number in range(20)])
    with NsqdHTTPClient(*leader) as client:
        until(lambda: depths(client)[channel] == 20)


def depths(client):
    (topic,) = client.stats("t")["topics"]
    return {channel["channel_name"]: channel["depth"] for channel in topic["channels"]}


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
    producer = place[0]
    ask = HttpClient.ask

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


def test_at_each_start_it_skips_what_waited(place, begin):
    producer = place[0]
    first, _ = begin("new", "end", start_position_policy="each_start")
    first.close()
    publish_twenty(place, "new")
    second, seen = begin("new", "end", start_position_policy="each_start")
    producer.publish("t", b"last")
    until(lambda: b"last" in seen)
    assert len(seen) < 20, "a real server sends what it had read already"
    second.close()


def test_a_channel_that_nobody_has_used_yet_begins_there_too(place, begin):
    producer = place[0]
    publish_twenty(place, "old")
    _, seen = begin("old", "end")
    producer.publish("t", b"last")
    until(lambda: b"last" in seen)
    assert len(seen) < 20, "a real server sends what it had read already"
