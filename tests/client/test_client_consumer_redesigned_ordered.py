"""Ordered partitions: one handler at a time, order verified; and consumers of a cluster whose leaders move and die."""

from __future__ import annotations

import re
import time
from time import monotonic, time_ns

import gevent
import msgspec
import pytest
from gevent.event import Event
from support.partitions import PartitionNsqd, answers, lookup_of, push_record, topology
from support.scripted_nsqd import heard, noting
from support.waiting import WAIT, holds, promptly, until

from nsq_fast import ClusterAdmin, LookupdHTTPClient, NsqdHTTPClient, Producer, RequeueMessage
from nsq_fast.client.http import HttpClient
from nsq_fast.errors import ConfigError, HttpError, InternalError, NotLeader, OrderViolated, PartitionBlocked

CONSUME = {"topic": "t", "channel": "c", "ordered": True, "requeue_delay": 20}
NSQD = PartitionNsqd


class Recorder:
    """A handler that writes down which sequence numbers it sees, and fails on some."""

    def __init__(self, *failing, error=ValueError):
        self.seen = []
        self.failing = set(failing)
        self.error = error

    def __call__(self, consumer, message):
        sequence = message.internal_id & ((1 << 50) - 1)
        self.seen.append(sequence)
        if sequence in self.failing:
            raise self.error("no")


def push(connection, *sequences, **options):
    for sequence in sequences:
        push_record(connection, sequence, **options)


def wait_answers(connection, word, expected):
    connection.wait_for(lambda: answers(connection, word) == expected)


def test_messages_have_their_place_and_rdy_is_one(nsqd, consume):
    seen = []
    consume(lambda _, m: seen.append((m.partition, m.internal_id, m.offset, m.raw_size)), found=topology({1: nsqd}))
    connection = nsqd.subscriber(1)
    assert connection.rdy == 1, "the server has one in flight whatever RDY says"
    push(connection, 3)
    wait_answers(connection, b"FIN", [3])
    assert seen == [(1, (1 << 50) + 3, 120, 40)]


def test_a_violation_is_told_and_delivered_by_default_and_a_redelivery_is_none(nsqd, consume, caplog):
    consumer = consume(Recorder(), found=topology({0: nsqd}))
    violations = heard(consumer, "on_order_violation")
    messages = heard(consumer, "on_order_violation", "message")
    connection = nsqd.subscriber(0)
    push(connection, 5, 5, 3, 4, 6)
    wait_answers(connection, b"FIN", [5, 5, 3, 4, 6])
    stats = consumer.stats()
    assert (stats.repeated, stats.order_violations) == (1, 1), "4 is in order after 3"
    (error,) = violations
    assert (error.partition, error.last, error.seen) == (0, (5, 200), (3, 120))
    assert messages[0].offset == 120
    assert "partition 0 went backwards" in caplog.text
    push(connection, 0, 1)  # back to its first message, as its topic is there still
    wait_answers(connection, b"FIN", [5, 5, 3, 4, 6, 0, 1])
    assert [error.seen for error in violations] == [(3, 120), (0, 0)]


def test_a_leader_that_has_lost_its_tail_is_one_violation(nsqd, consume):
    """It restarts as the leader without its last records, and stores new ones in their places."""
    handler = Recorder()
    consumer = consume(handler, found=topology({0: nsqd}))
    violations = heard(consumer, "on_order_violation")
    connection = nsqd.subscriber(0)
    push(connection, *range(1, 9))
    wait_answers(connection, b"FIN", [*range(1, 9)])
    connection.close()
    until(lambda: len(nsqd.connections) == 2)
    again = nsqd.subscriber(0)
    push(again, 6, 7, 8, body=b"new")  # other messages, with the ids and offsets of those that are lost
    push(again, 9)
    wait_answers(again, b"FIN", [6, 7, 8, 9])
    assert handler.seen == [*range(1, 9), 6, 7, 8, 9], "new messages are handled"
    assert [(error.last, error.seen) for error in violations] == [((8, 320), (6, 240))]


def test_a_violation_may_be_dropped_or_stop_the_consumer(nsqd, consume, caplog):
    handler = Recorder()
    consumer = consume(handler, found=topology({0: nsqd}), order_policy="drop")
    connection = nsqd.subscriber(0)
    push(connection, 5, 3, 3, 3)
    wait_answers(connection, b"REQ", [3, 3, 3])
    push(connection, 6)
    wait_answers(connection, b"FIN", [5, 6])
    assert handler.seen == [5, 6], "neither handled nor finished"
    assert consumer.stats().order_violations == 3
    assert caplog.text.count("partition 0 went backwards") == 2, "the first and the second"
    consumer = consume(handler, found=topology({1: nsqd}), order_policy="stop")
    connection = nsqd.subscriber(1)
    push(connection, 5)
    wait_answers(connection, b"FIN", [5])
    push(connection, 3)
    with pytest.raises(OrderViolated, match="partition 1 went backwards"):
        consumer.join(WAIT)
    assert handler.seen == [5, 6, 5]
    until(lambda: not connection.is_open)
    assert answers(connection, b"REQ") == [3]


# Failed messages


FAILING = [
    (Recorder(1), 200),
    (Recorder(1, error=lambda _: RequeueMessage(0.2)), 5000),
    (lambda *_: (each for each in ()), 200),
]


@pytest.mark.parametrize(("handler", "delay"), FAILING)
def test_a_failed_message_is_held_and_given_back_at_once_then(nsqd, consume, handler, delay):
    consumer = consume(handler, found=topology({0: nsqd}), requeue_delay=delay, max_backoff_duration=9)
    connection = nsqd.subscriber(0)
    began = monotonic()
    push(connection, 1)
    wait_answers(connection, b"REQ", [1])
    assert monotonic() - began >= 0.19
    assert connection.commands[-1][2] == b"0", "the server ignores a delay"
    assert consumer.stats().backoff_level == 0, "other partitions do not wait for this one"
    assert connection.rdy == 1
    assert consumer.stats().in_flight == 0


def test_a_message_is_held_no_longer_than_the_server_waits(nsqds, consume):
    nsqd = nsqds({"msg_timeout": 4000})
    consume(Recorder(1), found=topology({0: nsqd}), requeue_delay=60_000)
    connection = nsqd.subscriber(0)
    push(connection, 1)
    began = monotonic()
    wait_answers(connection, b"REQ", [1])
    assert monotonic() - began < 4.0
    assert b"TOUCH" not in connection.words()


def test_a_partition_that_moves_gives_back_its_own_held_message_and_no_other(nsqd, nsqds, consume):
    """And a close those that are left."""
    after, handler = nsqds(), Recorder(1)
    consumer = consume(handler, found=topology({0: nsqd, 1: nsqd}), requeue_delay=60_000)
    moving, staying = nsqd.subscriber(0), nsqd.subscriber(1)
    push(moving, 1)
    push(staying, 1)
    until(lambda: handler.seen == [1, 1])
    lookup_of(consumer).tell(topology({0: after, 1: nsqd}))
    wait_answers(moving, b"REQ", [1])
    after.subscriber(0)
    holds(lambda: not answers(staying, b"REQ"))
    with promptly():
        consumer.close(timeout=None)
    assert answers(staying, b"REQ") == [1]


def test_max_tries_skips_nothing(nsqd, consume):
    handler = Recorder()
    consume(handler, found=topology({0: nsqd}), max_tries=2)
    connection = nsqd.subscriber(0)
    push(connection, 1, attempts=9)
    wait_answers(connection, b"FIN", [1])
    assert handler.seen == [1]


# Blocked messages


def test_a_blocked_message_is_told_and_goes_on_being_tried(nsqd, consume, caplog):
    handler = Recorder(1)
    consumer = consume(handler, found=topology({0: nsqd}), attempts_threshold=3)
    blocked = heard(consumer, "on_blocked", "message")
    connection = nsqd.subscriber(0)
    for attempts in (3, 4, 5, 6, 7, 8):
        push(connection, 1, attempts=attempts)
    wait_answers(connection, b"REQ", [1] * 6)
    assert [message.attempts for message in blocked] == [4, 5, 6, 7, 8]
    assert consumer.stats().blocked == 5
    assert caplog.text.count("partition 0 is blocked") == 3, "for the 4th, 5th and 7th attempt"
    assert handler.seen == [1] * 6


def test_a_blocked_message_may_go_to_a_policy_in_place_of_the_handler(nsqd, consume, caplog):
    handler, given_up = Recorder(), []

    def policy(consumer, message):
        if message.body == b"full":
            raise OSError("disk full")
        given_up.append(message.body)

    consumer = consume(handler, found=topology({0: nsqd}), attempts_threshold=3, blocked_policy=policy)
    connection = nsqd.subscriber(0)
    push(connection, 1, attempts=4, body=b"full")
    wait_answers(connection, b"REQ", [1])
    assert "ends that" not in caplog.text, "max_tries ends nothing in an ordered partition"
    push(connection, 1, attempts=5, body=b"bad")
    wait_answers(connection, b"FIN", [1])
    assert given_up == [b"bad"]
    assert handler.seen == []
    assert consumer.stats().given_up == 1


def test_a_message_that_is_too_old_does_not_hold_up_its_partition(nsqd, consume):
    handler = Recorder(4)
    consumer = consume(handler, found=topology({0: nsqd}), max_age=3600)
    connection = nsqd.subscriber(0)
    push(connection, 1, timestamp=time_ns())
    wait_answers(connection, b"FIN", [1])
    push(connection, 2, attempts=50)
    wait_answers(connection, b"FIN", [1, 2])
    push(connection, 3, timestamp=time_ns())
    wait_answers(connection, b"FIN", [1, 2, 3])
    push(connection, 4, timestamp=time_ns())
    wait_answers(connection, b"REQ", [4])
    assert handler.seen == [1, 3, 4]
    assert (consumer.stats().outdated, consumer.stats().blocked) == (1, 0)


def test_a_blocked_message_may_stop_the_consumer_or_be_tried_at_once(nsqd, consume):
    handler, options = Recorder(1), {"attempts_threshold": 3, "requeue_delay": 60_000}
    consume(handler, found=topology({0: nsqd}), blocked_policy="retry", **options)
    push(nsqd.subscriber(0), 1, attempts=4)
    wait_answers(nsqd.subscriber(0), b"REQ", [1])
    assert handler.seen == [1]
    consumer = consume(handler, found=topology({1: nsqd}), blocked_policy="stop", **options)
    connection = nsqd.subscriber(1)
    push(connection, 1, attempts=4)
    with pytest.raises(PartitionBlocked, match=r"is delivered, attempt 4$"):
        consumer.join(WAIT)
    assert handler.seen == [1]
    assert answers(connection, b"REQ") == [1]


# One handler at a time


class Counting:
    """A handler that notes how many of it run at once, in all and for each partition."""

    def __init__(self):
        self.release = Event()
        self.running = []
        self.overlaps = 0
        self.most = 0

    def __call__(self, consumer, message):
        message = message[0] if isinstance(message, list) else message
        self.overlaps += message.partition in self.running
        self.running.append(message.partition)
        self.most = max(self.most, len(self.running))
        self.release.wait()
        self.running.remove(message.partition)


@pytest.mark.parametrize("kind", ["handler", "batch_handler"])
@pytest.mark.parametrize("concurrency", [None, 4])
def test_partitions_are_handled_side_by_side_and_each_in_order(nsqd, consume, kind, concurrency):
    handler = Counting()
    consume(found=topology({0: nsqd, 1: nsqd}), concurrency=concurrency, **{kind: handler})
    first, second = nsqd.subscriber(0), nsqd.subscriber(1)
    for sequence in (1, 2, 3):  # a server that times the messages out sends more than one
        push(first, sequence)
        push(second, sequence)
    until(lambda: handler.most == 2)
    holds(lambda: handler.most == 2)
    handler.release.set()
    for connection in (first, second):
        wait_answers(connection, b"FIN", [1, 2, 3])
    assert (handler.most, handler.overlaps) == (2, 0)


@pytest.mark.parametrize("concurrency", [None, 4])
def test_the_new_leader_waits_for_a_handler_of_the_old_one(nsqd, nsqds, consume, concurrency):
    other, handler = nsqds(), Counting()
    consumer = consume(handler, found=topology({0: nsqd}), concurrency=concurrency)
    push(nsqd.subscriber(0), 5)
    until(lambda: handler.running)
    lookup_of(consumer).answer = topology({0: other})
    nsqd.subscriber(0).close()
    connection = other.subscriber(0)
    push(connection, 5)
    until(lambda: consumer.stats().unstarted)
    holds(lambda: handler.most == 1)
    handler.release.set()
    push(connection, 4)
    wait_answers(connection, b"FIN", [5, 4])
    assert handler.overlaps == 0
    assert consumer.stats().order_violations == 1, "what was seen is remembered over a move"


def test_iterating_over_an_ordered_topic(nsqd, consume):
    """Each is finished at once, not with the answer to a heartbeat: this server sends none."""
    consumer = consume(found=topology({0: nsqd}), attempts_threshold=3, blocked_policy=lambda consumer, message: None)
    seen = []

    def iterate():
        for message in consumer:
            seen.append(message.offset)
            if len(seen) == 4:
                message.finish()
                return

    with consumer:
        lookup_of(consumer).tell(topology({0: nsqd}))
        connection = nsqd.subscriber(0)
        taker = gevent.spawn(iterate)
        push(connection, 1, attempts=4)
        wait_answers(connection, b"FIN", [1])
        for sequence in (2, 3, 4, 5):
            push(connection, sequence)
            until(lambda sequence=sequence: seen[-1:] == [sequence * 40])
            connection.wait_for(lambda sequence=sequence: sequence - 1 in answers(connection, b"FIN"))
        taker.join(WAIT)
        wait_answers(connection, b"FIN", [1, 2, 3, 4, 5])
    assert seen == [80, 120, 160, 200]


def test_a_start_position_on_the_leader_of_each_partition(cluster, lookups, start_consumer):
    def consume(**options):
        seen = {0: [], 1: []}
        handler = lambda _, message: seen[message.partition].append(message.offset)  # noqa: E731
        return start_consumer("t", "ch", message_handler=handler, **lookups, **options), seen

    cluster.create_topic("t", partitions=2, replicas=1, ordered=True, channels=["ch"])
    first, offsets = consume()
    with Producer(**lookups) as producer:
        for partition in (0, 1):
            producer.multipublish("t", [b"a", b"b", b"c"], partition=partition)
    until(lambda: len(offsets[0]) == len(offsets[1]) == 3)
    first.close()
    position = {0: f"offset:{offsets[0][1]}", 1: f"offset:{offsets[1][0]}"}
    _, seen = consume(start_position=position, start_position_policy="each_start")
    until(lambda: list(dict.fromkeys(seen[1])) == offsets[1] and offsets[0][-1] in seen[0])
    assert list(dict.fromkeys(seen[0])) == offsets[0][1:]


@pytest.mark.parametrize("position", ["offset:0", "count:1", "timestamp:1700000000"])
def test_a_partition_to_which_nothing_was_published_is_consumed_from_any_position(cluster, start_consumer, position):
    """Servers refuse to set a position in an empty log."""
    seen = []
    lookups = [str(each.http_address) for each in cluster.lookupds]
    cluster.create_topic("t", partitions=1, replicas=1, channels=["other"])
    consumer = start_consumer("t", "new", (), lookups, start_position=position, message_handler=noting(seen))
    until(lambda: consumer.total_ready_count > 0)
    assert [each.is_done for each in ClusterAdmin(lookups).set_offset("t", "new", position)] == [True]
    with Producer((), lookups) as producer:
        producer.publish("t", b"first")
    until(lambda: seen == [b"first"])


@pytest.mark.parametrize(
    ("options", "absence"),
    [
        *(
            ({"start_position": "offset:0", "start_position_policy": policy}, "long")
            for policy in ("once", "each_start")
        ),
        *(({"order_policy": policy}, absence) for policy in ("drop", "stop") for absence in ("short", "long")),
    ],
    ids=str,
)
def test_a_topic_that_is_made_anew_is_consumed_from_its_start_and_its_order_begins_anew(
    cluster, start_consumer, options, absence
):
    """What was published before the consumer is there again comes, too, and nothing twice: whether lookup was asked
    while the topic was away, or only its nsqd has said that it is not there."""

    def make_topic():
        is_ordered = "order_policy" in options
        channels = ["c" if is_ordered else "other"]
        cluster.create_topic("t", partitions=1, replicas=1, channels=channels, ordered=is_ordered)

    seen = []
    lookups = [str(each.http_address) for each in cluster.lookupds]
    if absence == "short":
        options = {"lookupd_poll_interval": 600, **options}
    make_topic()
    with Producer((), lookups) as producer, LookupdHTTPClient.from_url(lookups[0]) as client:
        for body in (b"1", b"2"):
            producer.publish("t", body, partition=0)
        consumer = start_consumer("t", "c", (), lookups, message_handler=noting(seen), **options)
        violations = heard(consumer, "on_order_violation")
        until(lambda: seen == [b"1", b"2"])
        client.delete_topic("t", partition="**")
        said = ("not_connected", "E_TOPIC_NOT_EXIST") if absence == "short" else ("lookup_empty", "")
        until(lambda: consumer.progress().reason == said[0] and said[1] in consumer.progress().detail)
        make_topic()
        for body in (b"3", b"4"):
            producer.publish("t", body, partition=0)
        until(lambda: seen == [b"1", b"2", b"3", b"4"])
    assert violations == []


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
        options = {"message_handler": noting(seen), "start_position": position, **options}
        consumer = start_consumer("t", channel, (), place[1], **options)
        until(lambda: consumer.total_ready_count > 0)
        return consumer, seen

    return start


def finished(consumer, count):
    until(lambda: consumer.stats().totals.finished == count)


def publish_known(place, channel, bodies):
    """Until the channel, where nothing waits, knows of all. To a real nsqd, the ends of channels and of the topic lie
    before the newest messages for up to two seconds."""

    def depth():
        (topic,) = client.stats("t")["topics"]
        return next(each["depth"] for each in topic["channels"] if each["channel_name"] == channel)

    producer, _, leader = place
    producer.multipublish("t", bodies)
    with NsqdHTTPClient(*leader) as client:
        until(lambda: depth() == len(bodies))


def publish_twenty(place, channel):
    publish_known(place, channel, [b"%d" % number for number in range(20)])


def test_a_channel_begins_where_start_position_says_once(place, begin):
    producer = place[0]
    publish_known(place, "old", [b"before", b"before"])
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

    publish_known(place, "old", [b"before"])
    monkeypatch.setattr(HttpClient, "ask", publish_after_creation)
    consumer, seen = begin("new", "end")
    finished(consumer, 1)
    assert seen == [b"1"]


@pytest.mark.parametrize("place", ["embedded"], indirect=True)
def test_stats_that_cannot_be_read_are_a_mistake_of_the_server(place, start_consumer, monkeypatch):
    ask, garbage = HttpClient.ask, [b'{"topics": [{"channels": "\xff"}]}', b'{"topics": 1}', b"{"]

    async def ask_for_garbage(self, loop, method, path, *arguments, **options):
        reply = await ask(self, loop, method, path, *arguments, **options)
        return msgspec.structs.replace(reply, body=garbage.pop()) if path == "/stats" and garbage else reply

    monkeypatch.setattr(HttpClient, "ask", ask_for_garbage)
    consumer = start_consumer(
        "t", "new", (), place[1], message_handler=lambda *_: None, start_position="end", max_reconnect_delay=0.1
    )
    errors = heard(consumer)
    until(lambda: consumer.total_ready_count > 0)
    assert not garbage
    assert len(errors) >= 3
    assert not [error for error in errors if isinstance(error, InternalError)]


@pytest.mark.parametrize("way", ["consumer", "admin"])
@pytest.mark.parametrize("place", ["embedded"], indirect=True)  # a real one takes positions in a cluster only
def test_a_position_beyond_the_end_is_told_and_is_the_end(place, begin, caplog, way):
    def end_of_log():
        (row,) = client.stats("t")["topics"]
        return row["message_count"] == stored and row["backend_depth"]

    def told():
        return [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "start_position_beyond"]

    producer, lookups, leader = place
    producer.multipublish("t", [b"before"] * 3)
    positions = [("offset:{end}", False), ("offset:{beyond}", True), ("count:6", False), ("count:8", True)]
    with NsqdHTTPClient(*leader) as client:
        for stored, (position, is_beyond) in enumerate(positions, 3):
            end = until(end_of_log)
            channel, position = f"new{stored}", position.format(end=end, beyond=end + 1)
            consumer, seen = begin(channel, position if way == "consumer" else "end")
            if way == "admin":
                assert all(result.is_done for result in ClusterAdmin(lookups).set_offset("t", channel, position))
            producer.publish("t", b"1")
            finished(consumer, 1)
            consumer.close()
            assert seen == [b"1"]
            said = f"{channel}.*was to begin at {position}, beyond the end of the log"
            assert [bool(re.search(said, text)) for text in told()] == [True] * is_beyond
            caplog.clear()


@pytest.mark.parametrize("place", ["embedded"], indirect=True)
def test_a_position_in_the_future_is_told(place, begin, caplog):
    ahead = int(time.time()) + 3600
    place[0].publish("t", b"before")
    begin("new", f"timestamp:{ahead}")
    (said,) = [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "start_position_beyond"]
    assert f"timestamp:{ahead}" in said


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


@pytest.mark.parametrize("place", ["redesigned"], indirect=True)
def test_a_position_that_only_a_cluster_can_find_closes_a_consumer_of_an_nsqd_without_one(place, start_consumer):
    place[0].publish("t", b"before")
    consumer = start_consumer("t", "new", (), place[1], message_handler=lambda *_: None, start_position="count:1")
    with pytest.raises(ConfigError, match=r"start_position='count:1': refused by t at .*: Not supported while"):
        consumer.join(timeout=WAIT)


@pytest.mark.parametrize("policy", ["once", "each_start"])
def test_a_position_in_a_channel_that_has_to_be_registered_closes_the_consumer_unless_it_is(
    cluster, lookups, start_consumer, policy
):
    cluster.create_topic("t", partitions=2, replicas=1, channels=["known"], disable_channel_auto_create=True)
    with Producer((), **lookups) as producer:
        producer.publish("t", b"before", partition=0)
    options = {"start_position": "offset:0", "start_position_policy": policy, **lookups}
    seen = []
    start_consumer("t", "known", message_handler=noting(seen), **options)
    until(lambda: seen == [b"before"])
    consumer = start_consumer("t", "new", message_handler=lambda *_: None, **options)
    with pytest.raises(ConfigError, match=r"start_position='offset:0': refused by t at .*: channel new not registered"):
        consumer.join(timeout=WAIT)


@pytest.mark.parametrize("place", ["embedded"], indirect=True)
@pytest.mark.parametrize(
    ("status", "text"), [(400, "E_FAILED_ON_NOT_LEADER"), (500, "INTERNAL_ERROR"), (404, "TOPIC_NOT_FOUND")]
)
def test_a_refusal_that_is_of_this_moment_is_said_and_tried_again(
    place, start_consumer, monkeypatch, caplog, status, text
):
    ask, refusals = HttpClient.ask, [text, text]

    async def refuse(self, loop, method, path, *arguments, **options):
        if path == "/channel/setoffset" and refusals:
            raise HttpError(f"{self.endpoint}{path}", status, refusals.pop())
        return await ask(self, loop, method, path, *arguments, **options)

    monkeypatch.setattr(HttpClient, "ask", refuse)
    place[0].publish("t", b"before")
    seen = []
    consumer = start_consumer(
        "t", "new", (), place[1], message_handler=noting(seen), start_position="count:1", max_reconnect_delay=0.1
    )
    errors = heard(consumer)
    until(lambda: seen == [b"before"])
    assert not refusals
    kind = NotLeader if status == 400 else HttpError
    assert [type(each) for each in errors] == [HttpError] * 2
    said = [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "subscription_failed"]
    assert ("start_position could not be set" if kind is NotLeader else text) in said[0]
