"""RDY over several connections; connections that come, go and come back; the end of a consumer or producer."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
from time import monotonic
from types import SimpleNamespace

import gevent
import pytest
from gevent.event import Event
from support.http import ask
from support.scripted_nsqd import heard, ignore, noting
from support.waiting import WAIT, holds, promptly, until
from support.wire import frame, message_frame

from nsq_fast import Consumer, Producer
from nsq_fast.errors import ConnectFailed, ConnectionLost, SubFailed, WrongThread
from nsq_fast.names import Address

# RDY


def test_max_in_flight_above_max_rdy_count_works_and_may_change_at_any_time(servers, consume):
    server = servers({"max_rdy_count": 100})
    consumer = consume(lambda c, m: m.enable_async(), server, max_in_flight=5000)
    conn = server.connection()
    assert conn.rdy == 100
    for value in (3, 0, 10):
        consumer.max_in_flight = value
        conn.wait_rdy(value)
        assert consumer.max_in_flight == value
    with pytest.raises(ValueError, match="max_in_flight"):
        consumer.max_in_flight = -1
    conn.push(*range(8))
    conn.wait_for(lambda: consumer.total_in_flight == 8)
    assert not consumer.is_starved
    conn.push(8)
    conn.wait_for(lambda: consumer.is_starved)  # true once the handler has it, a moment after it arrived


def test_the_first_to_connect_leaves_room_for_those_on_their_way(servers, consume):
    gate = Event()
    early, late = servers(), servers(replies={b"SUB": lambda conn, command: gate.wait() and conn.send(frame(0, b"OK"))})
    consume(ignore, early, late)
    assert early.connection().rdy == 5
    gate.set()
    assert late.connection().rdy == 5
    assert early.connection().rdy == 5


def test_an_answer_that_comes_too_late_is_counted_and_told(make_nsqd):
    nsqd = make_nsqd()
    for what in ("topic", "channel"):
        assert ask(nsqd.http_address, "POST", f"/{what}/create?topic=t&channel=c").status == 200
    nsqd.stop()
    nsqd.start()  # nsqd looks at timeouts of a new channel only after 5 s, of one it starts with at once
    assert ask(nsqd.http_address, "POST", "/pub?topic=t", b"slow").status == 200
    attempts = []

    def handler(consumer, message):
        attempts.append(message.attempts)
        gevent.sleep(1.6 if message.attempts == 1 else 0)  # sleep: longer than the timeout of the message

    options = {"msg_timeout": 1.0, "concurrency": 2, "max_in_flight": 2}
    consumer = Consumer("t", "c", [nsqd.tcp_address], message_handler=handler, **options)
    errors = heard(consumer)
    with consumer:
        until(lambda: errors)
        assert [error.code for error in errors] == ["E_FIN_FAILED"]
        assert attempts == [1, 2]
        assert consumer.stats().totals.answers_failed == 1
        assert consumer.stats().backoff_level == 0


# Reconnecting


def test_a_server_that_accepts_and_closes_is_not_hammered(servers, consume):
    server = servers()
    server.is_refusing = True
    consume(ignore, server, max_reconnect_delay=0.2)
    gevent.sleep(0.5)  # sleep: attempts in that time are counted
    assert len(server.connections) <= 15
    server.wait_for(lambda: len(server.connections) >= 3)
    server.is_refusing = False
    number = len(server.connections)
    conn = server.wait_for(lambda: next((c for c in server.connections[number:] if c.rdy == 10), None))
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])


def test_a_refused_subscription_is_told_and_tried_again(servers, consume):
    server = servers(replies={b"SUB": frame(1, b"E_SUB_FAILED too many consumers")})
    errors = heard(consume(ignore, server, max_reconnect_delay=0.05))
    server.wait_for(lambda: len(errors) >= 2)
    assert isinstance(errors[0], SubFailed)
    del server.replies[b"SUB"]
    server.wait_for(lambda: server.connections[-1].rdy == 10)


def test_nsqds_that_are_not_there_or_say_nothing_hold_up_no_other(servers, consume, closed_port):
    here = servers()
    gone = SimpleNamespace(address=Address("127.0.0.1", closed_port))
    with socket.create_server(("127.0.0.1", 0)) as mute, promptly():  # the system accepts; nobody says a word
        silent = SimpleNamespace(address=Address(*mute.getsockname()))
        consumer = consume(ignore, gone, silent, here, max_reconnect_delay=0.05, connect_timeout=60.0)
        errors = heard(consumer)
        here.connection().push(1)
        here.connection().wait_for(lambda: here.connection().answered(b"FIN") == [1])
        with Producer([silent.address, here.address], connect_timeout=60.0) as producer:
            until(lambda: producer.stats()["connected"] == [str(here.address)])
        here.wait_for(lambda: len(errors) > 2)
        consumer.close(drain=False)
    refused = [error for error in errors if isinstance(error, ConnectFailed)]
    assert not any(error.__cause__ for error in refused), "the reason itself is told"


def test_what_a_lost_connection_had_is_not_handled_and_its_answers_are_counted_as_lost(servers, consume, caplog):
    """Also those that were queued when it ended."""
    caplog.set_level("INFO")
    server, release, handled, taken = servers(), Event(), [], []

    def handle(_, message):
        handled.append(int(message.id, 16))
        if message.body == b"later":
            message.enable_async()
            taken.append(message)
        else:
            release.wait()

    consumer = consume(handle, server, max_reconnect_delay=0.05)
    first = server.connection()
    first.push(1, 2, 3)
    first.wait_for(lambda: handled)
    first.close()
    second = server.connection(1)
    release.set()
    holds(lambda: handled == [1])
    assert consumer.stats().totals.answers_lost == 1
    second.push(4, 5, 6, body=b"later")
    until(lambda: len(taken) == 3)
    taken[0].finish()
    for message in taken[1:]:
        message.requeue(0)
    taken[0].responder.close(ConnectionLost("before they were sent, in the same turn of the loop"))
    totals = consumer.stats().totals
    assert (totals.answers_lost, totals.finished, totals.requeued) == (4, 0, 0)
    server.connection(2).wait_rdy(10)
    assert not {b"FIN", b"REQ"}.intersection(second.words())
    assert caplog.text.count("before the FIN of") == 2, "it is said where an answer is lost, and nowhere else"


# Lookup


def test_a_topic_that_appears_and_an_nsqd_that_restarts_are_found_without_waiting_for_a_poll(
    make_nsqd, make_lookupd, start_consumer, caplog
):
    """A lookupd forgets an nsqd that is away, and another nsqd has the topic then: so nothing is sought."""

    def publish(nsqd, topic, body):
        with Producer(str(nsqd.tcp_address)) as producer:
            producer.publish(topic, body)

    def has_both():
        found = ask(lookupd.http_address, "GET", "/lookup?topic=old")
        return found.status == 200 and len(found.json["producers"]) == 2

    caplog.set_level("INFO", "nsq_fast")
    lookupd = make_lookupd()
    away, other = (make_nsqd(lookupd) for _ in range(2))
    for nsqd in (away, other):
        publish(nsqd, "old", b"before")
    until(has_both)
    seen = []
    options = {"lookupd_http_addresses": str(lookupd.http_address), "lookupd_poll_interval": 600.0}
    consumer = start_consumer(["old", "young"], "c", message_handler=noting(seen), **options)
    until(lambda: seen == [b"before"] * 2 and "no nsqlookupd knows topic young yet" in caplog.text)
    publish(other, "young", b"first")
    until(lambda: b"first" in seen)
    assert caplog.text.count("no nsqlookupd knows topic young yet; asking again until one does") == 1
    assert caplog.text.count("topic young is known now: 1 nsqd, first") == 1
    away.stop()
    until(lambda: len(consumer.stats().connections) == 2)
    assert f"{away.tcp_address}: lookup names it no longer" in caplog.text
    away.start()
    publish(away, "old", b"after")
    until(lambda: b"after" in seen)


# The end: nothing acknowledged is lost, nothing waits longer than it must


SERVERS = 6
SLACK = 8.0
"""Seconds: a machine that is busy. Before, each server added two."""


class Held:
    """A handler that waits until it is released."""

    def __init__(self, released=None):
        self.running, self.released = [], released or Event()

    def __call__(self, consumer, message):
        self.running.append(message)
        self.released.wait(WAIT)


@pytest.mark.parametrize("delay", [None, 0.001], ids=["before CLOSE_WAIT", "behind it"])
def test_a_message_that_was_on_its_way_when_cls_came_goes_back_at_once(servers, consume, delay, monkeypatch):
    """nsqd delivers beside its reader of commands. A close without a timeout would wait for the answer for ever."""
    # The usual time passes while a busy machine runs something else.
    monkeypatch.setattr("nsq_fast.client.subscription.STRAGGLER_TIME", 0.5)

    def cls(conn, command):
        before = message_frame(7) if delay is None else b""
        conn.send(before + b"\x00\x00\x00\x0e\x00\x00\x00\x00CLOSE_WAIT")
        if delay is not None:
            gevent.spawn_later(delay, conn.push, 7)

    nsqd, handled = servers(replies={b"CLS": cls}), []
    consumer = consume(lambda c, m: handled.append(m), nsqd)
    conn = nsqd.connection()
    with gevent.Timeout(WAIT):
        consumer.close(timeout=None)
    conn.wait_for(lambda: not conn.is_open)
    assert conn.answered(b"REQ") == [7]
    assert not handled


def test_a_timeout_ends_the_wait_and_a_late_answer_says_so(nsqd, consume, caplog):
    kept = []
    consumer = consume(lambda c, m: (m.enable_async(), kept.append(m)))
    conn = nsqd.connection()
    conn.push(1)
    conn.wait_for(lambda: kept)
    began = monotonic()
    with promptly():
        consumer.close(timeout=0.1)
    assert monotonic() - began > 0.08
    assert "closed with 1 message unanswered" in caplog.text
    with pytest.raises(ConnectionLost):
        kept[0].finish()


@pytest.mark.parametrize(
    ("drain", "is_wished", "options"),
    [(True, True, {}), (True, True, {"handler_threads": 1}), (False, True, {"handler_threads": 1}), (False, False, {})],
    ids=str,
)
def test_what_is_unfinished_at_the_end_goes_back_where_that_is_wished(nsqd, consume, drain, is_wished, options, caplog):
    """And without ``drain`` nobody waits for handlers."""
    held = Held(threading.Event() if options else Event())
    consumer = consume(held, requeue_unfinished=is_wished, **options)
    conn = nsqd.connection()
    conn.push(1, 2)
    conn.wait_for(lambda: held.running)
    with promptly():
        consumer.close(drain=drain, timeout=0.1 if drain else None)
    conn.wait_for(lambda: sorted(conn.answered(b"REQ")) == ([1, 2] if is_wished else [2]))
    assert conn.words().index(b"CLS") < conn.words().index(b"REQ"), "else it may come again"
    assert {command[2] for command in conn.commands if command[0] == b"REQ"} == {b"0"}
    assert ("requeued 1 message that handlers have not finished" in caplog.text) is is_wished
    held.released.set()
    holds(lambda: conn.answered(b"FIN") == [], 0.01)


def test_messages_that_nobody_can_answer_any_more_hold_nothing_up(servers, consume, caplog):
    kept = []

    def keep(consumer, message):
        message.enable_async()
        message.touch()
        kept.append(message)

    server = servers({"msg_timeout": 10000})  # what is dropped is seen within a tenth of it
    consumer = consume(keep, server)
    conn = server.connection()
    conn.push(1, 2, 3)
    until(lambda: len(kept) == 3)
    with promptly():
        del kept[:2]
        closing = gevent.spawn(consumer.close)
        until(lambda: "closing waits for 1 message without a response" in caplog.text)
        kept.clear()
        closing.join(WAIT)
    assert sorted(conn.answered(b"REQ")) == [1, 2, 3]


@pytest.mark.parametrize(("word", "timeout"), [(b"IDENTIFY", None), (b"SUB", 0.2), (b"CLS", 0.1)])
def test_a_server_that_does_not_reply_does_not_hold_the_end_up(servers, consume, word, timeout):
    mute = servers(replies={word: b""})
    consumer = consume(ignore, mute, connect_timeout=60.0)
    mute.wait_for(lambda: mute.connections and (word == b"CLS" or word in mute.connections[0].words()))
    with promptly():
        consumer.close(timeout=timeout)


def test_closing_is_idempotent_and_told_once_whatever_a_receiver_does(nsqd, publish_nsqd, consume, new_producer):
    told = []

    def fail(sender):
        told.append(sender)
        raise gevent.GreenletExit if len(told) == 1 else RuntimeError("on purpose")

    consumer, producer = consume(ignore), new_producer(publish_nsqd())
    nsqd.connection()
    for each in (consumer, producer):
        each.on_close.connect(fail)
        for _ in range(3):
            each.close()
        assert each.join(0)
        assert not each.is_running
    assert told == [consumer, producer]


def test_no_greenlet_is_left(nsqd, consume):
    def names():
        gc.collect()
        ours = (each for each in gc.get_objects() if isinstance(each, gevent.Greenlet) and not each.dead)
        return sorted(each.name for each in ours if "nsq_fast" in each.name)

    before = names()
    consumer = consume(ignore, concurrency=3)
    nsqd.connection()
    assert names() != before
    consumer.close()
    until(lambda: names() == before)


# Called from where nothing can wait


def at_the_signal(close):
    signal.signal(signal.SIGUSR1, lambda number, frame: close())


def kill():
    os.kill(os.getpid(), signal.SIGUSR1)


def in_the_main_greenlet(close):
    at_the_signal(close)
    kill()


def while_the_hub_waits(close):
    at_the_signal(close)
    gevent.get_hub().threadpool.apply(kill)


def in_a_callback_of_the_loop_that_is_interrupted(close):
    at_the_signal(close)
    gevent.get_hub().loop.run_callback(kill)


def in_a_callback_of_the_loop(close):
    gevent.get_hub().loop.run_callback(close)


def in_a_timer(close):
    timer = gevent.get_hub().loop.timer(0.0)
    fired = Event()
    timer.start(lambda: (close(), fired.set()))
    assert fired.wait(WAIT)
    timer.close()


CALLS = [
    in_the_main_greenlet,
    while_the_hub_waits,
    in_a_callback_of_the_loop_that_is_interrupted,
    in_a_callback_of_the_loop,
    in_a_timer,
]


@pytest.fixture
def signals():
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("call", CALLS)
def test_a_consumer_closes(nsqd, consume, call):
    held = Held()
    consumer = consume(held)
    conn = nsqd.connection()
    conn.push(1)
    until(lambda: held.running)
    call(consumer.close)
    conn.wait_for(lambda: b"CLS" in conn.words())
    assert not consumer.join(0.01)  # the handler still runs
    held.released.set()
    assert consumer.join(WAIT)
    assert conn.answered(b"FIN") == [1]


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("call", CALLS)
def test_a_producer_closes(publish_nsqd, new_producer, call):
    """And publishes there, where it need not wait."""
    answer = Event()
    producer = new_producer(publish_nsqd(lambda peer, command: answer.wait() and peer.ok()))
    publishing = gevent.spawn(producer.publish, "t", b"x")
    until(lambda: producer.stats()["pending"] == 1)
    given = []
    call(lambda: given.append(producer.publish_nowait("t", b"x")))
    until(lambda: given)
    call(producer.close)
    until(lambda: not producer.is_running)
    assert not producer.join(0.01)  # the publishes are pending
    answer.set()
    assert producer.join(WAIT)
    assert [each.get(timeout=WAIT) for each in (publishing, *given)] == [b"OK"] * 2


WAITS = {
    "publish": lambda consumer, producer: producer.publish("t", b"x"),
    "publish with arguments": lambda consumer, producer: producer.publish("t", bytearray(b"x"), timeout=WAIT),
    "publish without room": lambda consumer, producer: producer.publish("t", b"x", raise_error=False),
    "multipublish": lambda consumer, producer: producer.multipublish("t", [b"x"]),
    "multipublish with arguments": lambda consumer, producer: producer.multipublish("t", (b"x",), timeout=WAIT),
    "Producer.join": lambda consumer, producer: producer.join(),
    "Consumer.join": lambda consumer, producer: consumer.join(0.01),
    "Consumer.start": lambda consumer, producer: consumer.start(),
    "iter": lambda consumer, producer: iter(consumer),
}


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("call", "wait"), [*((CALLS[3], wait) for wait in WAITS), *((call, "publish") for call in (CALLS[2], CALLS[4]))]
)
def test_what_has_to_wait_is_refused_in_the_hub(publish_nsqd, new_producer, consume, call, wait):
    answer = Event()
    server = publish_nsqd(lambda peer, command: (command.bodies == [b"first"] or answer.wait()) and peer.ok())
    producer = new_producer(server, **({"max_pending": 1} if wait == "publish without room" else {}))
    assert producer.publish("t", b"first") == b"OK"
    pending = gevent.spawn(producer.publish, "t", b"pending")
    until(lambda: producer.stats()["pending"] == 1)
    consumer = consume(None if wait == "iter" else ignore)
    raised = []

    def waits():
        try:
            WAITS[wait](consumer, producer)
        except BaseException as error:
            raised.append(error)

    call(waits)
    until(lambda: raised)
    assert isinstance(raised[0], WrongThread), raised
    assert "gevent.signal_handler" in str(raised[0])
    stats = producer.stats()
    assert (stats["pending"], stats["held"]) == (1, 1)
    answer.set()
    assert pending.get(timeout=WAIT) == b"OK"
    assert producer.publish("t", b"last") == b"OK"
    assert server.bodies == [b"first", b"pending", b"last"]


def test_a_consumer_of_frozen_servers(real_nsqd):
    """The timeout holds for all of it, however many servers there are."""
    servers = [real_nsqd() for _ in range(SERVERS)]
    addresses = [str(server.tcp_address) for server in servers]
    for drain, timeout in ((True, 2), (True, 0), (False, 0)):
        consumer = Consumer("t", "c", addresses, message_handler=ignore, max_in_flight=30)
        consumer.start(block=False)
        until(lambda consumer=consumer: sum(each.is_connected for each in consumer.stats().connections) == SERVERS)
        for server in servers:
            server.freeze()
        began = monotonic()
        consumer.close(drain=drain, timeout=timeout)
        assert monotonic() - began < timeout + SLACK
        for server in servers:
            server.thaw()
