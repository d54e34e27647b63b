"""Ordered partitions: order verified, failed messages held, blocked ones left to a policy, one handler at a time."""

from __future__ import annotations

from time import monotonic

import pytest
from gevent.event import Event
from support.partitions import PartitionNsqd, answers, push_record, topology
from support.waiting import WAIT, holds, promptly, until

from nsq_fast import RequeueMessage
from nsq_fast.errors import OrderViolated, PartitionBlocked

CONSUME = {"topic": "t", "channel": "c", "ordered": True, "requeue_delay": 20}

NSQD = PartitionNsqd


def hear(consumer, name):
    """What a signal tells, as a list that grows."""
    heard = []
    getattr(consumer, name).connect(lambda sender, **values: heard.append(values), weak=False)
    return heard


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


def test_messages_have_their_place_and_rdy_is_one(nsqd, consume):
    seen = []
    consume(lambda _, m: seen.append((m.partition, m.internal_id, m.offset, m.raw_size)), found=topology({1: nsqd}))
    connection = nsqd.subscriber(1)
    assert connection.rdy == 1, "the server has one in flight whatever RDY says"
    push_record(connection, 3)
    connection.wait_for(lambda: answers(connection, b"FIN") == [3])
    assert seen == [(1, (1 << 50) + 3, 120, 40)]


def test_a_redelivery_is_no_violation_and_counted(nsqd, consume):
    handler = Recorder()
    consumer = consume(handler, found=topology({0: nsqd}))
    connection = nsqd.subscriber(0)
    for sequence in (1, 1, 2):
        push_record(connection, sequence)
    connection.wait_for(lambda: answers(connection, b"FIN") == [1, 1, 2])
    assert (consumer.stats().repeated, consumer.stats().order_violations) == (1, 0)


def test_a_violation_is_told_and_delivered_by_default(nsqd, consume, caplog):
    handler = Recorder()
    consumer = consume(handler, found=topology({0: nsqd}))
    violations = hear(consumer, "on_order_violation")
    connection = nsqd.subscriber(0)
    for sequence in (5, 3, 4, 6):
        push_record(connection, sequence)
    connection.wait_for(lambda: answers(connection, b"FIN") == [5, 3, 4, 6])
    assert consumer.stats().order_violations == 1, "4 is in order after 3"
    (told,) = violations
    assert (told["error"].partition, told["error"].last, told["error"].seen) == (0, (5, 200), (3, 120))
    assert told["message"].offset == 120
    assert "partition 0 went backwards" in caplog.text


def test_the_ledger_survives_a_move_of_the_leader(nsqd, consume):
    other = PartitionNsqd()
    try:
        consumer = consume(Recorder(), found=topology({0: nsqd}))
        connection = nsqd.subscriber(0)
        push_record(connection, 5)
        connection.wait_for(lambda: answers(connection, b"FIN") == [5])
        consumer._subscriptions.lookup.answer = topology({0: other})
        connection.close()
        connection = other.subscriber(0)
        push_record(connection, 5)
        push_record(connection, 4)
        connection.wait_for(lambda: answers(connection, b"FIN") == [5, 4])
        assert (consumer.stats().repeated, consumer.stats().order_violations) == (1, 1)
    finally:
        other.stop()


def test_a_leader_that_has_lost_its_tail_is_one_violation(nsqd, consume):
    """It restarts as the leader without its last records, and stores new ones in their places."""
    handler = Recorder()
    consumer = consume(handler, found=topology({0: nsqd}))
    violations = hear(consumer, "on_order_violation")
    connection = nsqd.subscriber(0)
    for sequence in range(1, 9):
        push_record(connection, sequence)
    connection.wait_for(lambda: answers(connection, b"FIN") == [*range(1, 9)])
    connection.close()
    until(lambda: len(nsqd.connections) == 2)
    again = nsqd.subscriber(0)
    for sequence in range(6, 9):  # other messages, with the ids and offsets of those that are lost
        push_record(again, sequence, body=b"new %d" % sequence)
    push_record(again, 9)
    again.wait_for(lambda: answers(again, b"FIN") == [6, 7, 8, 9])
    assert handler.seen == [*range(1, 9), 6, 7, 8, 9], "new messages are handled"
    (told,) = violations
    assert (told["error"].last, told["error"].seen) == ((8, 320), (6, 240))
    assert consumer.stats().order_violations == 1


def test_a_dropped_violation_is_neither_handled_nor_finished(nsqd, consume):
    handler = Recorder()
    consumer = consume(handler, found=topology({0: nsqd}), order_policy="drop")
    connection = nsqd.subscriber(0)
    push_record(connection, 5)
    push_record(connection, 3)
    connection.wait_for(lambda: answers(connection, b"REQ") == [3])
    push_record(connection, 6)
    connection.wait_for(lambda: answers(connection, b"FIN") == [5, 6])
    assert handler.seen == [5, 6]
    assert consumer.stats().order_violations == 1


def test_a_violation_may_stop_the_consumer(nsqd, consume):
    handler = Recorder()
    consumer = consume(handler, found=topology({0: nsqd}), order_policy="stop")
    connection = nsqd.subscriber(0)
    push_record(connection, 5)
    connection.wait_for(lambda: answers(connection, b"FIN") == [5])
    push_record(connection, 3)
    with pytest.raises(OrderViolated, match="partition 0 went backwards"):
        consumer.join(WAIT)
    assert handler.seen == [5]
    until(lambda: not connection.is_open)
    assert answers(connection, b"REQ") == [3]


# Failed messages


def test_a_failed_message_is_held_and_given_back_at_once_then(nsqd, consume):
    consumer = consume(Recorder(1), found=topology({0: nsqd}), requeue_delay=200, max_backoff_duration=10)
    connection = nsqd.subscriber(0)
    began = monotonic()
    push_record(connection, 1)
    connection.wait_for(lambda: answers(connection, b"REQ") == [1])
    assert monotonic() - began >= 0.19
    assert connection.commands[-1][2] == b"0", "the server ignores a delay"
    assert consumer.stats().backoff_level == 0, "other partitions do not wait for this one"
    assert connection.rdy == 1
    assert consumer.stats().in_flight == 0


def test_a_delay_that_the_handler_wants_is_held_too(nsqd, consume):
    consume(Recorder(1, error=lambda _: RequeueMessage(0.1)), found=topology({0: nsqd}), requeue_delay=5000)
    connection = nsqd.subscriber(0)
    push_record(connection, 1)
    connection.wait_for(lambda: answers(connection, b"REQ") == [1])
    assert connection.commands[-1][2] == b"0"


def test_a_message_is_held_no_longer_than_the_server_waits(consume):
    nsqd = PartitionNsqd({"msg_timeout": 4000})
    try:
        consume(Recorder(1), found=topology({0: nsqd}), requeue_delay=60_000)
        connection = nsqd.subscriber(0)
        push_record(connection, 1)
        began = monotonic()
        connection.wait_for(lambda: answers(connection, b"REQ") == [1])
        assert monotonic() - began < 4.0
        assert b"TOUCH" not in connection.words()
    finally:
        nsqd.stop()


def test_closing_gives_held_messages_back(nsqd, consume):
    consumer = consume(Recorder(1), found=topology({0: nsqd}), requeue_delay=60_000)
    connection = nsqd.subscriber(0)
    push_record(connection, 1)
    until(lambda: consumer.stats().in_flight == 1 and consumer.stats().unstarted == 0)
    with promptly():
        consumer.close(timeout=None)
    assert answers(connection, b"REQ") == [1]


def test_max_tries_skips_nothing(nsqd, consume):
    handler = Recorder()
    consume(handler, found=topology({0: nsqd}), max_tries=2)
    connection = nsqd.subscriber(0)
    push_record(connection, 1, attempts=9)
    connection.wait_for(lambda: answers(connection, b"FIN") == [1])
    assert handler.seen == [1]


# Blocked messages


def test_a_blocked_message_is_told_and_goes_on_being_tried(nsqd, consume, caplog):
    handler = Recorder(1)
    consumer = consume(handler, found=topology({0: nsqd}), attempts_threshold=3)
    blocked = hear(consumer, "on_blocked")
    connection = nsqd.subscriber(0)
    for attempts in (3, 4, 5, 6, 7, 8):
        push_record(connection, 1, attempts=attempts)
    connection.wait_for(lambda: answers(connection, b"REQ") == [1] * 6)
    assert [each["message"].attempts for each in blocked] == [4, 5, 6, 7, 8]
    assert consumer.stats().blocked == 5
    assert caplog.text.count("partition 0 is blocked") == 3, "for the 4th, 5th and 7th attempt"
    assert handler.seen == [1] * 6


def test_a_blocked_message_may_be_retried_at_once(nsqd, consume):
    consume(Recorder(1), found=topology({0: nsqd}), attempts_threshold=3, requeue_delay=60_000, blocked_policy="retry")
    connection = nsqd.subscriber(0)
    push_record(connection, 1, attempts=4)
    connection.wait_for(lambda: answers(connection, b"REQ") == [1])


def test_a_blocked_message_may_go_to_a_policy_in_place_of_the_handler(nsqd, consume):
    handler, given_up = Recorder(), []

    def policy(consumer, message):
        given_up.append(message.body)

    consumer = consume(handler, found=topology({0: nsqd}), attempts_threshold=3, blocked_policy=policy)
    connection = nsqd.subscriber(0)
    push_record(connection, 1, attempts=4, body=b"bad")
    connection.wait_for(lambda: answers(connection, b"FIN") == [1])
    assert given_up == [b"bad"]
    assert handler.seen == []
    assert consumer.stats().given_up == 1


def test_a_policy_that_fails_keeps_the_message(nsqd, consume):
    def policy(consumer, message):
        raise OSError("disk full")

    consume(Recorder(), found=topology({0: nsqd}), attempts_threshold=3, blocked_policy=policy)
    connection = nsqd.subscriber(0)
    push_record(connection, 1, attempts=4)
    connection.wait_for(lambda: answers(connection, b"REQ") == [1])
    assert b"FIN" not in connection.words()


def test_a_blocked_message_may_stop_the_consumer(nsqd, consume):
    handler = Recorder()
    consumer = consume(handler, found=topology({0: nsqd}), attempts_threshold=3, blocked_policy="stop")
    connection = nsqd.subscriber(0)
    push_record(connection, 1, attempts=4)
    with pytest.raises(PartitionBlocked, match="delivered for the 4th time"):
        consumer.join(WAIT)
    assert handler.seen == []
    assert answers(connection, b"REQ") == [1]


# One handler at a time


class Counting:
    """A handler that notes how many of it run at once, in all and for each partition."""

    def __init__(self, release):
        self.release = release
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


@pytest.mark.parametrize("kind", ["message_handler", "batch_handler"])
@pytest.mark.parametrize("concurrency", [None, 4])
def test_partitions_are_handled_side_by_side_and_each_in_order(nsqd, consume, kind, concurrency):
    release = Event()
    handler = Counting(release)
    options = {"batch_handler": handler} if kind == "batch_handler" else {"handler": handler}
    consume(found=topology({0: nsqd, 1: nsqd}), concurrency=concurrency, **options)
    first, second = nsqd.subscriber(0), nsqd.subscriber(1)
    for sequence in (1, 2, 3):  # a server that times the messages out sends more than one
        push_record(first, sequence)
        push_record(second, sequence)
    until(lambda: handler.most == 2)
    holds(lambda: handler.most == 2)
    release.set()
    for connection in (first, second):
        connection.wait_for(lambda connection=connection: answers(connection, b"FIN") == [1, 2, 3])
    assert (handler.most, handler.overlaps) == (2, 0)


@pytest.mark.parametrize("concurrency", [None, 4])
def test_the_new_leader_waits_for_a_handler_of_the_old_one(nsqd, consume, concurrency):
    other = PartitionNsqd()
    try:
        release = Event()
        handler = Counting(release)
        consumer = consume(handler, found=topology({0: nsqd}), concurrency=concurrency)
        push_record(nsqd.subscriber(0), 1)
        until(lambda: handler.running)
        consumer._subscriptions.lookup.answer = topology({0: other})
        nsqd.subscriber(0).close()
        connection = other.subscriber(0)
        push_record(connection, 1)
        until(lambda: consumer.stats().unstarted)
        holds(lambda: handler.most == 1)
        release.set()
        connection.wait_for(lambda: answers(connection, b"FIN") == [1])
        assert handler.overlaps == 0
    finally:
        other.stop()


def test_iterating_over_an_ordered_topic(nsqd, consume):
    consumer = consume(found=topology({0: nsqd}), attempts_threshold=3, blocked_policy=lambda consumer, message: None)
    with consumer:
        consumer._subscriptions.lookup.tell(topology({0: nsqd}))
        connection = nsqd.subscriber(0)
        push_record(connection, 1, attempts=4)
        push_record(connection, 2)
        push_record(connection, 3)
        seen = []
        for message in consumer:
            seen.append(message.offset)
            if len(seen) == 2:
                message.finish()
                break
        connection.wait_for(lambda: sorted(answers(connection, b"FIN")) == [1, 2, 3])
    assert seen == [80, 120]
