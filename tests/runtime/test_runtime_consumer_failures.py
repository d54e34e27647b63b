"""Handlers that raise, messages that fail too often, and what backoff makes of it."""

from __future__ import annotations

import json
import logging

import gevent
import gevent.event
import pytest
from gevent.event import Event
from support.scripted_nsqd import ScriptedNsqd
from support.waiting import WAIT, holds, until

from nsq_fast import Consumer, RequeueMessage
from nsq_fast.client.give_up import Discard, LogMessage, PublishTo, WriteToFolder


def raising(error):
    def handler(consumer, message):
        if message.body == b"bad":
            raise error

    return handler


def ignore(consumer, message):
    pass


def requeues(conn):
    return [(int(command[1], 16), int(command[2])) for command in conn.commands if command[0] == b"REQ"]


class Publisher:
    def __init__(self, error=None):
        self.published = []
        self.error = error

    def publish(self, topic, body):
        if self.error is not None:
            raise self.error
        self.published.append((topic, body))


def test_an_exception_requeues_the_message_and_is_told(nsqd, consume, caplog):
    told = []
    consumer = consume(raising(ValueError("broken")), requeue_delay=1234)
    consumer.on_exception.connect(lambda c, message, error: told.append((message.id, str(error))), weak=False)
    conn = nsqd.connection()
    conn.push(1, body=b"bad")
    conn.push(2)
    conn.wait_for(lambda: conn.answered(b"FIN") == [2])
    assert requeues(conn) == [(1, 1234)]
    assert told == [(b"%016x" % 1, "broken")]
    assert "broken" in caplog.text


def test_without_a_delay_it_grows_with_the_attempts(nsqd, consume):
    consume(
        raising(ValueError()), requeue_jitter=0.0, requeue_base_delay=0.5, requeue_factor=3.0, requeue_max_delay=2.0
    )
    conn = nsqd.connection()
    for attempts in (1, 2, 3, 4):
        conn.push(attempts, body=b"bad", attempts=attempts)
    conn.wait_for(lambda: len(requeues(conn)) == 4)
    assert requeues(conn) == [(1, 500), (2, 1500), (3, 2000), (4, 2000)]


def test_a_handler_may_ask_to_requeue_with_its_own_delay(nsqd, consume):
    told = []
    consumer = consume(raising(RequeueMessage(0.25)))
    consumer.on_exception.connect(lambda c, **values: told.append(values), weak=False)
    conn = nsqd.connection()
    conn.push(1, body=b"bad")
    conn.wait_for(lambda: requeues(conn) == [(1, 250)])
    assert not told, "asking to requeue is no error"


@pytest.mark.parametrize("delay", [-5, float("inf"), float("-inf"), float("nan"), 1e300])
def test_no_delay_is_too_odd_to_requeue_with(nsqd, consume, delay):
    consume(raising(RequeueMessage(delay)))
    conn = nsqd.connection()
    conn.push(1, body=b"bad")
    conn.push(2)
    conn.wait_for(lambda: conn.answered(b"FIN") == [2])
    assert len(requeues(conn)) == 1


def test_a_message_requeued_without_a_delay_by_its_handler_gets_the_computed_one(nsqd, consume):
    consume(lambda consumer, message: message.requeue(), requeue_jitter=0.0)
    conn = nsqd.connection()
    conn.push(1, attempts=3)
    conn.wait_for(lambda: requeues(conn) == [(1, 4000)])


@pytest.mark.parametrize("error", [gevent.GreenletExit(), gevent.Timeout(3)])
def test_no_base_exception_loses_a_message_or_a_worker(nsqd, consume, error):
    consume(raising(error), requeue_delay=7)
    conn = nsqd.connection()
    conn.push(1, body=b"bad")
    conn.push(2)
    conn.wait_for(lambda: conn.answered(b"FIN") == [2])
    assert requeues(conn) == [(1, 7)]


def test_an_interrupt_goes_to_the_main_greenlet_and_the_message_back(nsqd, consume, no_unseen_errors):
    consume(raising(KeyboardInterrupt()), requeue_delay=7)
    conn = nsqd.connection()
    conn.push(1, body=b"bad")
    with pytest.raises(KeyboardInterrupt):
        Event().wait(WAIT)
    no_unseen_errors.clear()
    conn.push(2)
    conn.wait_for(lambda: conn.answered(b"FIN") == [2])
    assert requeues(conn) == [(1, 7)]


def test_a_killed_worker_gives_its_message_back(nsqd, consume):
    running = []

    def handler(consumer, message):
        running.append(gevent.getcurrent())
        if message.body == b"bad":
            Event().wait()

    consume(handler, requeue_delay=7)
    conn = nsqd.connection()
    conn.push(1, body=b"bad")
    conn.wait_for(lambda: running)
    gevent.kill(running[0])
    conn.push(2)
    conn.wait_for(lambda: conn.answered(b"FIN") == [2])
    assert requeues(conn) == [(1, 7)]


# Giving up


def test_too_many_attempts_go_to_the_policy_and_not_to_the_handler(nsqd, consume):
    handled, given_up, told = [], [], []
    consumer = consume(
        lambda consumer, message: handled.append(message.attempts),
        max_tries=2,
        give_up=lambda consumer, message: given_up.append((consumer.topic, message.attempts)),
    )
    consumer.on_giving_up.connect(lambda c, message: told.append(message.attempts), weak=False)
    conn = nsqd.connection()
    conn.push(1, attempts=2)
    conn.push(2, attempts=3)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1, 2])
    assert (handled, given_up, told) == ([2], [("topic", 3)], [3])
    assert consumer.stats().given_up == 1


def test_zero_tries_means_no_limit(nsqd, consume):
    handled = []
    consume(lambda consumer, message: handled.append(message.attempts), max_tries=0)
    conn = nsqd.connection()
    conn.push(1, attempts=65535)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    assert handled == [65535]


@pytest.mark.parametrize(
    "options",
    [{"kind": "message_handler"}, {"kind": "message_handler", "handler_threads": 1}, {"kind": "batch_handler"}],
    ids=["handler", "threads", "batches"],
)
def test_a_message_that_fails_for_long_is_warned_of(nsqd, start_consumer, options, caplog):
    def fail(consumer, message):
        raise ValueError("no")

    start_consumer(
        "topic",
        "channel",
        str(nsqd.address),
        max_tries=0,
        attempts_threshold=3,
        **{options.pop("kind"): fail},
        **options,
    )
    conn = nsqd.connection()
    for attempts in range(1, 12):
        conn.push(attempts, attempts=attempts)
    conn.wait_for(lambda: len(conn.answered(b"REQ")) == 11)
    warned = [each.getMessage() for each in caplog.records if "has failed in" in each.getMessage()]
    assert [text.split("in its ")[1] for text in warned] == [
        f"{attempts}th attempt; max_tries=0 sets no end" for attempts in (4, 5, 7, 11)
    ]


def test_a_policy_that_fails_keeps_the_message(nsqd, consume):
    consume(ignore, max_tries=1, give_up=PublishTo("dead", producer=Publisher(OSError("no nsqd"))), requeue_delay=3)
    conn = nsqd.connection()
    conn.push(1, attempts=2)
    conn.wait_for(lambda: requeues(conn) == [(1, 3)])
    assert b"FIN" not in conn.words()


def test_a_dead_letter_is_finished_only_when_it_is_published(nsqd, consume):
    stored = gevent.event.Event()

    class SlowPublisher(Publisher):
        def publish(self, topic, body):
            stored.wait()
            super().publish(topic, body)

    publisher = SlowPublisher()
    consume(ignore, max_tries=1, give_up=PublishTo("dead", producer=publisher))
    conn = nsqd.connection()
    conn.push(1, attempts=2, body=b"letter")
    holds(lambda: b"FIN" not in conn.words())
    stored.set()
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    assert publisher.published == [("dead", b"letter")]


def test_a_message_may_go_to_the_end_of_its_own_topic_and_be_converted(nsqd, consume):
    publisher = Publisher()
    policy = PublishTo(producer=publisher, convert=lambda message: b"%d:%s" % (message.attempts, message.body))
    consume(ignore, max_tries=1, give_up=policy)
    conn = nsqd.connection()
    conn.push(1, attempts=2, body=b"again")
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    assert publisher.published == [("topic", b"2:again")]


def test_a_given_up_message_is_written_to_a_folder(nsqd, consume, tmp_path):
    consume(ignore, max_tries=1, give_up=WriteToFolder(tmp_path / "given-up"))
    conn = nsqd.connection()
    conn.push(1, attempts=2, body=b"\x00binary\xff")
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    files = {path.suffix: path for path in (tmp_path / "given-up").iterdir()}
    assert set(files) == {".body", ".json"}
    assert files[".body"].read_bytes() == b"\x00binary\xff"
    about = json.loads(files[".json"].read_text())
    assert (about["topic"], about["channel"], about["attempts"]) == ("topic", "channel", 2)
    assert bytes.fromhex(about["id"]) == b"%016x" % 1


def test_a_given_up_message_is_logged(nsqd, consume, caplog):
    consume(ignore, max_tries=1, give_up=LogMessage(logging.getLogger("dead"), logging.CRITICAL))
    conn = nsqd.connection()
    conn.push(1, attempts=2, body=b"words")
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    (record,) = [each for each in caplog.records if each.name == "dead"]
    assert record.levelno == logging.CRITICAL
    assert "words" in record.getMessage()


def test_discard_calls_back_first(nsqd, consume):
    seen = []
    consume(ignore, max_tries=1, give_up=Discard(lambda consumer, message: seen.append(message.body)))
    conn = nsqd.connection()
    conn.push(1, attempts=2)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    assert seen == [b"body"]


def test_a_batch_is_cleared_of_what_is_given_up(nsqd):
    batches, given_up = [], []
    consumer = Consumer(
        "topic",
        "channel",
        str(nsqd.address),
        max_in_flight=10,
        max_tries=2,
        batch_handler=lambda consumer, messages: batches.append([message.attempts for message in messages]),
        give_up=lambda consumer, message: given_up.append(message.attempts),
    )
    with consumer:
        conn = nsqd.connection()
        conn.push(1, attempts=3)
        conn.push(2, attempts=1)
        conn.wait_for(lambda: sorted(conn.answered(b"FIN")) == [1, 2])
    assert ([each for batch in batches for each in batch], given_up) == ([1], [3])


# Backoff


def test_a_failure_stops_the_flow_and_a_success_of_the_probe_restores_it(nsqd, consume):
    consumer = consume(raising(ValueError()), max_backoff_duration=0.1, requeue_delay=0)
    conn = nsqd.connection()
    conn.push(1, body=b"bad")
    conn.wait_rdy(0)
    assert consumer.stats().backoff_level == 1
    conn.wait_rdy(1)
    conn.push(2)
    conn.wait_rdy(10)
    assert consumer.stats().backoff_level == 0


def test_many_failures_at_once_count_once(nsqd, consume):
    consumer = consume(raising(ValueError()), max_backoff_duration=30, requeue_delay=0)
    conn = nsqd.connection()
    conn.push(*range(8), body=b"bad")
    conn.wait_for(lambda: len(requeues(conn)) == 8)
    assert consumer.stats().backoff_level == 1


@pytest.mark.parametrize(
    ("error", "options", "backs_off"),
    [
        (ValueError(), {"max_backoff_duration": 0}, False),
        (RequeueMessage(), {"backoff_on_requeue": False}, False),
        (RequeueMessage(), {"backoff_on_requeue": True}, True),
        (RequeueMessage(backoff=False), {"backoff_on_requeue": True}, False),
        (RequeueMessage(backoff=True), {"backoff_on_requeue": False}, True),
    ],
)
def test_what_counts_as_a_failure(nsqd, consume, error, options, backs_off):
    consumer = consume(raising(error), **({"max_backoff_duration": 30} | options))
    conn = nsqd.connection()
    conn.push(1, body=b"bad")
    conn.wait_for(lambda: requeues(conn))
    assert (consumer.stats().backoff_level > 0) is backs_off


def test_answering_too_late_is_no_failure_for_backoff(nsqd, consume):
    consumer = consume(ignore, max_backoff_duration=30)
    errors = []
    consumer.on_error.connect(lambda c, error: errors.append(error.code), weak=False)
    conn = nsqd.connection()
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"FIN"))
    conn.send(b"\x00\x00\x00\x10\x00\x00\x00\x01E_FIN_FAILED")
    conn.wait_for(lambda: errors == ["E_FIN_FAILED"])
    assert consumer.stats().totals.answers_failed == 1
    assert consumer.stats().backoff_level == 0


# Deadlines


def test_touch_is_never_sent_unless_asked_for():
    server = ScriptedNsqd({"msg_timeout": 100})

    def handler(consumer, message):
        gevent.sleep(0.2)  # sleep: twice as long as the timeout of the message

    with Consumer("t", "c", str(server.address), message_handler=handler):
        conn = server.connection()
        conn.push(1)
        conn.wait_for(lambda: conn.answered(b"FIN"))
        assert b"TOUCH" not in conn.words()
    server.stop()


def test_auto_touch_ends_at_max_msg_timeout_and_the_log_warns(caplog):
    server = ScriptedNsqd({"msg_timeout": 1000, "max_msg_timeout": 2000})

    def handler(consumer, message):
        until(lambda: "is still being handled" in caplog.text)
        gevent.sleep(1.0)  # sleep: two times in which it could be touched

    with Consumer("t", "c", str(server.address), auto_touch=True, message_handler=handler):
        conn = server.connection()
        conn.push(1)
        conn.wait_for(lambda: conn.answered(b"FIN"))
        assert 1 <= len(conn.answered(b"TOUCH")) <= 6
    assert caplog.text.count("is still being handled") == 1
    server.stop()
