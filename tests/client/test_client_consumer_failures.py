"""Handlers that raise, messages that fail too often or are too large, and what backoff makes of it."""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from math import inf, nan

import gevent
import pytest
from gevent.event import Event
from support.http import ask
from support.scripted_nsqd import heard, ignore, noting
from support.waiting import WAIT, holds, until
from support.wire import message_frame

from nsq_fast import ColumnSubscription, Consumer, ExponentialBackoff, RequeueMessage
from nsq_fast.client.give_up import Discard, LogMessage, PublishTo, WriteToFolder
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import ConfigError, MessageTooLarge, RemoteProtocolError
from nsq_fast.names import parse_address


def raising(error):
    def handler(consumer, message):
        if message.body == b"bad":
            raise error

    return handler


def requeues(conn):
    return [(int(command[1], 16), int(command[2])) for command in conn.commands if command[0] == b"REQ"]


def test_without_a_delay_it_grows_with_the_attempts(nsqd, consume):
    delays = {"requeue_jitter": 0.0, "requeue_base_delay": 0.5, "requeue_factor": 3.0, "requeue_max_delay": 2.0}
    consume(lambda _, m: m.requeue() if m.body == b"requeued" else raising(ValueError())(_, m), **delays)
    conn = nsqd.connection()
    for attempts in (1, 2, 3, 4):
        conn.push(attempts, body=b"bad", attempts=attempts)
    conn.push(5, body=b"requeued", attempts=2)  # by its handler, without a delay
    conn.wait_for(lambda: len(requeues(conn)) == 5)
    assert requeues(conn) == [(1, 500), (2, 1500), (3, 2000), (4, 2000), (5, 1500)]


A_MONTH = 30 * 24 * 3600 * 1000
OWN = 7


@pytest.mark.parametrize(
    ("delay", "milliseconds"),
    [
        (0.25, 250), (0, 0), (inf, A_MONTH), (1e300, A_MONTH),
        ("5", None), (b"5", None), ([5], None), (True, None), (-5, None), (-inf, None), (nan, None),
    ],
    ids=str,
)  # fmt: skip
def test_a_handler_may_ask_to_requeue_with_its_own_delay(nsqd, consume, delay, milliseconds):
    """None is too odd: a wrong one is refused where it is given, which fails the handler."""

    def handler(consumer, message):
        if message.body == b"bad":
            raise RequeueMessage(delay)

    told = heard(consume(handler, requeue_delay=OWN), "on_exception")
    conn = nsqd.connection()
    conn.push(1, body=b"bad")
    conn.push(2)
    conn.wait_for(lambda: conn.answered(b"FIN") == [2])
    if milliseconds is not None:
        assert not told, "asking to requeue is no error"
        assert requeues(conn) == [(1, milliseconds)]
    else:
        assert requeues(conn) == [(1, OWN)]
        assert isinstance(told[0], ConfigError)
        assert "must be a number of seconds, 0 or more, a timedelta, or None" in str(told[0])


class Odd(BaseException):
    """As outcomes of test runners are, and cancellations of other loops."""


@pytest.mark.parametrize(
    "error", [gevent.GreenletExit(), gevent.Timeout(3), GeneratorExit(), Odd()], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("options", [{}, {"handler_threads": 1}], ids=str)
def test_no_base_exception_loses_a_message_or_a_worker(nsqd, consume, error, options, caplog):
    told = heard(consume(raising(error), requeue_delay=7, **options), "on_exception")
    conn = nsqd.connection()
    conn.push(1, body=b"bad")
    conn.push(2)
    conn.wait_for(lambda: conn.answered(b"FIN") == [2])
    assert requeues(conn) == [(1, 7)]
    is_killed = isinstance(error, gevent.GreenletExit)
    assert told == ([] if is_killed else [error])
    assert ("was killed" if is_killed else "handler failed on message") in caplog.text


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


# Giving up


@pytest.mark.parametrize("options", [{}, {"handler_threads": 1}, {"is_batch": True}], ids=str)
def test_a_message_that_fails_for_long_is_warned_of(nsqd, consume, options, caplog):
    def fail(consumer, message):
        raise ValueError("no")

    options = dict(options)
    handler = {"batch_handler": fail} if options.pop("is_batch", False) else {"handler": fail}
    consume(max_tries=0, attempts_threshold=3, **handler, **options)
    conn = nsqd.connection()
    for attempts in range(1, 12):
        conn.push(attempts, attempts=attempts)
    conn.wait_for(lambda: len(conn.answered(b"REQ")) == 11)
    warned = [each.getMessage() for each in caplog.records if "has failed in" in each.getMessage()]
    assert [text.split("failed in ")[1] for text in warned] == [
        f"attempt {attempts}; max_tries=0 sets no end" for attempts in (4, 5, 7, 11)
    ]


class Publisher:
    """Stands for a producer; publishes once ``stored`` is set, or fails."""

    def __init__(self, error=None):
        self.published, self.stored, self._error = [], Event(), error

    def publish(self, topic, body):
        self.stored.wait()
        if self._error is not None:
            raise self._error
        self.published.append((topic, body))


def test_a_policy_that_fails_keeps_the_message(nsqd, consume):
    publisher = Publisher(OSError("no nsqd"))
    publisher.stored.set()
    consume(ignore, max_tries=1, give_up=PublishTo("dead", producer=publisher), requeue_delay=3)
    conn = nsqd.connection()
    conn.push(1, attempts=2)
    conn.wait_for(lambda: requeues(conn) == [(1, 3)])
    assert b"FIN" not in conn.words()


@pytest.mark.parametrize(
    ("consumed", "dead", "is_told"),
    [
        (["orders", "dead"], "dead", True),
        (re.compile("orders.*"), "orders_dead", True),
        (re.compile("orders.*"), "dead", False),
        (["orders", "returns"], "dead", False),
        (["orders", "returns"], None, False),
        ("orders", "orders", False),
    ],
)
@pytest.mark.parametrize("option", ["give_up", "max_age_policy", "blocked_policy"])
def test_who_consumes_its_own_dead_letters_is_told(closed_port, caplog, consumed, dead, is_told, option):
    policy = {option: PublishTo(dead)}
    servers = {"lookupd_http_addresses": f"127.0.0.1:{closed_port}"}
    consumer = Consumer(consumed, "c", message_handler=ignore, **servers, **policy)
    consumer.start(block=False)
    consumer.close()
    told = [each for each in caplog.records if getattr(each, "event", None) == "give_up_circular"]
    assert len(told) == is_told


@pytest.mark.parametrize(
    ("topic", "convert", "published"),
    [
        ("dead", None, ("dead", b"letter")),
        (None, lambda message: b"%d:%s" % (message.attempts, message.body), ("topic", b"2:letter")),
    ],
    ids=["dead letters", "the end of its own topic"],
)
def test_a_dead_letter_is_finished_only_when_it_is_published(nsqd, consume, topic, convert, published):
    publisher = Publisher()
    consume(ignore, max_tries=1, give_up=PublishTo(topic, producer=publisher, convert=convert))
    conn = nsqd.connection()
    conn.push(1, attempts=2, body=b"letter")
    holds(lambda: b"FIN" not in conn.words())
    publisher.stored.set()
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    assert publisher.published == [published]


def test_policies_write_log_and_call_back(nsqd, consume, tmp_path, caplog):
    seen = []
    folder = tmp_path / "given-up"
    policies = {
        b"1": WriteToFolder(folder),
        b"2": LogMessage(logging.getLogger("dead"), logging.CRITICAL),
        b"3": Discard(noting(seen)),
    }
    consume(ignore, max_tries=1, give_up=lambda consumer, message: policies[message.body](consumer, message))
    conn = nsqd.connection()
    for number in (1, 2, 3):
        conn.push(number, attempts=2, body=b"%d" % number)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1, 2, 3])
    files = {path.suffix: path for path in folder.iterdir()}
    assert set(files) == {".body", ".json"}
    assert files[".body"].read_bytes() == b"1"
    about = json.loads(files[".json"].read_text())
    assert (about["topic"], about["channel"], about["attempts"]) == ("topic", "channel", 2)
    assert bytes.fromhex(about["id"]) == b"%016x" % 1
    (record,) = [each for each in caplog.records if each.name == "dead"]
    assert record.levelno == logging.CRITICAL
    assert "2" in record.getMessage()
    assert seen == [b"3"]


def test_a_full_disk_keeps_the_message_and_no_half_of_it(nsqd, consume, tmp_path, caplog, capfd):
    written = tmp_path / f"topic.channel.{1:016x}.body"
    part = written.with_name(f"{written.name}.part")
    consume(ignore, max_tries=1, give_up=WriteToFolder(tmp_path), requeue_delay=3)
    part.symlink_to("/dev/full")
    conn = nsqd.connection()
    conn.push(1, attempts=2)
    conn.wait_for(lambda: requeues(conn) == [(1, 3)])
    assert list(tmp_path.iterdir()) == []
    assert "give-up policy failed on message" in caplog.text
    assert "No space left" not in capfd.readouterr().err, "the log has it"
    conn.push(1, attempts=3)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    assert written.exists()
    assert not part.exists()


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


class Steps:
    """A strategy: pauses of its own, and the levels that were asked for."""

    jitter = 0.0

    def __init__(self, *pauses):
        self.levels = set()
        self._pauses = pauses

    def duration(self, level):
        self.levels.add(level)
        return self._pauses[min(level, len(self._pauses)) - 1]


@pytest.fixture
def by_connection(servers, consume):
    """Two nsqds and a consumer of both, which tries again with one message after so many seconds."""

    def make(pause, scope="connection", **options):
        both = servers(), servers()
        steps = {"backoff_strategy": Steps(pause), "max_backoff_duration": 600, "requeue_delay": 0, **options}
        consumer = consume(raising(ValueError()), *both, backoff_scope=scope, **steps)
        for each in both:
            each.connection().wait_rdy(5)
        return consumer, *both

    return make


@pytest.mark.parametrize("scope", ["connection", "consumer"])
def test_failures_pause_their_own_connection_or_all(by_connection, scope, caplog):
    consumer, bad, good = by_connection(600.0, scope=scope)
    bad.connection().push(1, body=b"bad")
    bad.connection().wait_rdy(0)
    good.connection().wait_rdy(10 if scope == "connection" else 0)  # what one may not have is not left over
    stats = {each.address: each for each in consumer.stats().connections}
    assert stats[bad.address].backoff_level == 1
    assert 500 < stats[bad.address].backoff_left <= 600
    assert stats[good.address].backoff_level == consumer.stats().backoff_level == (scope == "consumer")
    told = next(each.getMessage() for each in caplog.records if each.getMessage().startswith("backoff level 1"))
    assert told.startswith(f"backoff level 1: pausing{f' of {bad.address}' if scope == 'connection' else ''} for ")


def test_after_the_pause_one_message_shows_whether_things_are_better(by_connection):
    consumer, bad, good = by_connection(0.1)
    bad.connection().push(1, body=b"bad")
    bad.connection().wait_rdy(1)
    good.connection().wait_rdy(9)
    bad.connection().push(2)
    bad.connection().wait_rdy(5)
    good.connection().wait_rdy(5)
    assert all(each.backoff_level == 0 for each in consumer.stats().connections)


def test_a_connection_that_was_lost_is_tried_with_one_message_first(by_connection):
    consumer, lost, good = by_connection(0.1, max_reconnect_delay=0.01)
    lost.connection().close()
    again = lost.connection(1)
    again.wait_rdy(1)
    levels = {each.address: each.backoff_level for each in consumer.stats().connections}
    assert levels == {lost.address: 1, good.address: 0}
    again.push(1)
    again.wait_rdy(5)


def test_what_is_no_strategy_is_refused():
    for options, text in (
        ({"backoff_scope": "node"}, "backoff_scope='node': must be one of consumer, connection"),
        ({"backoff_strategy": 5}, "backoff_strategy=5: must have duration"),
        ({"backoff_strategy": Steps(-1.0)}, "must have duration"),
        ({"backoff_strategy": ExponentialBackoff(jitter=2.0)}, "jitter, 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=text):
            Consumer("t", "c", "127.0.0.1", **options)


# Deadlines


def test_auto_touch_ends_at_max_msg_timeout_and_the_log_warns(servers, consume, caplog):
    def handler(consumer, message):
        until(lambda: "is still being handled" in caplog.text)
        gevent.sleep(1.0)  # sleep: two times in which it could be touched

    server = servers({"msg_timeout": 1000, "max_msg_timeout": 2000})
    consume(handler, server, auto_touch=True)
    conn = server.connection()
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"FIN"))
    assert 1 <= len(conn.answered(b"TOUCH")) <= 6
    assert caplog.text.count("is still being handled") == 1


LIMIT = 4096
LARGE = b"x" * 3_000_000


@pytest.fixture
def served(make_nsqd):
    """An nsqd whose messages may be larger than the client's limit."""
    return make_nsqd(max_msg_size=10_000_000, max_body_size=20_000_000)


def publish(server, *bodies):
    for body in bodies:
        assert ask(server.http_address, "POST", "/pub?topic=t", body).body == b"OK"


def large_comes_back(server):
    """To a consumer without that limit, and nothing else does."""
    received = []
    with Consumer("t", "c", str(server.tcp_address), message_handler=noting(received), max_tries=0):
        until(lambda: received)
    return received == [LARGE]


@pytest.mark.slow
def test_the_rest_goes_on_and_the_policy_gets_it_in_the_end(served, start_consumer, caplog):
    publish(served, b"one", LARGE, b"two")
    handled, given_up, errors = [], [], []
    consumer = start_consumer(
        "t", "c", [served.tcp_address], message_handler=noting(handled),
        give_up=lambda c, m: given_up.append(m), max_frame_size=LIMIT, max_tries=2, requeue_delay=0, max_in_flight=5,
    )  # fmt: skip
    consumer.on_exception.connect(lambda _, message, error: errors.append((message.attempts, error)), weak=False)
    until(lambda: given_up)
    publish(served, b"three")
    until(lambda: len(handled) == 3)
    assert set(handled) == {b"one", b"two", b"three"}
    (message,) = given_up
    assert (message.attempts, message.body, message.is_truncated, message.body_size) == (3, b"", True, len(LARGE))
    assert [attempts for attempts, _ in errors] == [1, 2]
    assert all(isinstance(error, MessageTooLarge) and f"max_frame_size={LIMIT}" in str(error) for _, error in errors)
    assert f"max_frame_size={LIMIT}" in caplog.text
    assert [connection.counters.received for connection in consumer.stats().connections] == [6]
    assert "disconnected" not in "".join(record.getMessage() for record in caplog.records if record.levelno > 20)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WriteToFolder, PublishTo])
def test_policies_that_keep_the_body_leave_it_with_nsqd(served, kind, tmp_path):
    publish(served, LARGE)
    policy = WriteToFolder(tmp_path / "given-up") if kind is WriteToFolder else PublishTo("dead-letters")
    errors = []
    # A message that nsqd sends while the consumer closes comes back after its timeout only.
    options = {"max_tries": 1, "requeue_delay": 0, "max_in_flight": 5, "max_backoff_duration": 0, "msg_timeout": 1.0}
    options |= {"message_handler": ignore, "give_up": policy, "max_frame_size": LIMIT}
    consumer = Consumer("t", "c", str(served.tcp_address), **options)
    consumer.on_exception.connect(lambda _, message, error: errors.append(message.attempts), weak=False)
    with consumer:
        until(lambda: 3 in errors)
    assert large_comes_back(served)


@pytest.mark.slow
def test_batches_and_iteration_never_see_it(served, start_consumer):
    publish(served, LARGE, *(b"%d" % number for number in range(20)))
    seen, given_up, bodies = [], [], []
    options = {"max_frame_size": LIMIT, "max_tries": 1, "requeue_delay": 0, "max_in_flight": 50}
    options["give_up"] = lambda c, message: given_up.append(message)
    where = ("t", "c", [served.tcp_address])
    first = start_consumer(*where, batch_handler=lambda c, messages: seen.extend(messages), **options)
    until(lambda: given_up and len(seen) == 20)
    first.close()
    assert not any(message.is_truncated for message in seen)
    publish(served, LARGE, b"last")
    for message in start_consumer(*where, **options):
        bodies.append(message.body)
        if len(given_up) == 2:
            break
        publish(served, b"more")
    assert set(bodies) <= {b"last", b"more"}


@pytest.mark.slow
def test_a_column_subscription_gives_it_back_and_goes_on(served, caplog, monkeypatch):
    monkeypatch.setattr("nsq_fast.columns.SKIPPED_DELAY_MS", 0)
    publish(served, b"one", LARGE, b"two")
    address = parse_address(str(served.tcp_address), 4150)
    # What nsqd sends once more while the subscription closes comes back after its timeout only.
    config = ConnectionConfig(max_frame_size=LIMIT, msg_timeout=1.0)
    with ColumnSubscription(address, "t", "c", config) as subscription:
        subscription.set_rdy(10)
        columns = subscription.fetch(10.0, at_least=2)
        assert columns.body in (b"onetwo", b"twoone")
        subscription.finish(columns.ids)
        until(lambda: subscription.fetch(0.01) is not None and caplog.text.count(f"max_frame_size={LIMIT}") >= 2)
    assert subscription.unfinished == []
    assert large_comes_back(served)


@pytest.mark.slow
def test_a_server_that_ignores_rdy_is_left_before_it_takes_the_memory(nsqd, consume):
    release = Event()
    consumer = consume(lambda c, m: release.wait())
    errors = heard(consumer)
    conn = nsqd.connection()
    conn.wait_rdy(10)
    flood = b"".join(message_frame(number, b"x" * 100_000) for number in range(100))

    def send():
        with suppress(OSError):
            for _ in range(100):  # a gigabyte
                conn.send(flood)

    sender = gevent.spawn(send)
    until(lambda: errors)
    assert isinstance(errors[0], RemoteProtocolError)
    assert "the server ignores RDY" in str(errors[0])
    held = max(connection.in_flight + connection.unstarted for connection in consumer.stats().connections)
    assert held <= 250
    sender.kill()
    release.set()
