"""The end of a consumer: nothing acknowledged is lost, nothing waits longer than it must."""

from __future__ import annotations

import threading
from time import monotonic

import gevent
import pytest
from gevent.event import Event
from support.scripted_nsqd import ScriptedNsqd, message_frame
from support.waiting import WAIT, holds, promptly, until

from nsq_fast import Consumer
from nsq_fast.errors import ConnectionLost


def started(nsqd, handler, **options):
    options = {"max_in_flight": 10, "max_backoff_duration": 0} | options
    consumer = Consumer("topic", "channel", str(nsqd.address), message_handler=handler, **options)
    consumer.start(block=False)
    return consumer


def ignore(consumer, message):
    pass


def test_running_handlers_finish_and_unstarted_messages_go_back(nsqd):
    release, running = Event(), []
    consumer = started(nsqd, lambda c, m: (running.append(m), release.wait()))
    conn = nsqd.connection()
    conn.push(1, 2, 3)
    conn.wait_for(lambda: running)
    closer = gevent.spawn(consumer.close)
    conn.wait_for(lambda: conn.answered(b"REQ") == [2, 3])
    assert (b"REQ", b"%016x" % 2, b"0") in conn.commands
    assert not closer.ready()
    release.set()
    closer.join(WAIT)
    assert closer.ready()
    assert conn.answered(b"FIN") == [1]
    assert conn.words().index(b"CLS") < conn.words().index(b"REQ")


def test_the_last_fin_is_sent_before_the_connection_ends(nsqd):
    consumer = started(nsqd, lambda c, m: gevent.spawn(c.close))
    conn = nsqd.connection()
    conn.push(1)
    conn.wait_for(lambda: not conn.is_open)
    assert conn.answered(b"FIN") == [1]
    assert consumer.join(WAIT)


def test_messages_that_arrive_before_close_wait_go_back():
    def cls(conn, command):
        conn.send(message_frame(7) + b"\x00\x00\x00\x0e\x00\x00\x00\x00CLOSE_WAIT")

    nsqd = ScriptedNsqd(replies={b"CLS": cls})
    handled = []
    consumer = started(nsqd, lambda c, m: handled.append(m))
    conn = nsqd.connection()
    consumer.close()
    conn.wait_for(lambda: not conn.is_open)
    assert conn.answered(b"REQ") == [7]
    assert not handled
    nsqd.stop()


def test_asynchronous_messages_may_still_be_answered(nsqd):
    kept = []
    consumer = started(nsqd, lambda c, m: (m.enable_async(), kept.append(m)))
    conn = nsqd.connection()
    conn.push(1)
    conn.wait_for(lambda: kept)
    closer = gevent.spawn(consumer.close)
    conn.wait_for(lambda: b"CLS" in conn.words())
    kept[0].finish()
    closer.join(WAIT)
    assert closer.ready()
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])


def test_a_timeout_ends_the_wait_and_a_late_answer_says_so(nsqd, caplog):
    kept = []
    consumer = started(nsqd, lambda c, m: (m.enable_async(), kept.append(m)))
    conn = nsqd.connection()
    conn.push(1)
    conn.wait_for(lambda: kept)
    began = monotonic()
    with promptly():
        consumer.close(timeout=0.1)
    assert monotonic() - began > 0.08
    assert "1 messages unanswered" in caplog.text
    with pytest.raises(ConnectionLost):
        kept[0].finish()


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("options", [{}, {"handler_threads": 1}], ids=["greenlet", "thread"])
def test_what_is_unfinished_at_the_end_goes_back_where_that_is_wished(nsqd, drain, options, caplog):
    release, running = threading.Event(), []
    wait = release.wait if options else Event().wait

    def handle(consumer, message):
        if not running.append(message):
            wait(WAIT)

    consumer = started(nsqd, handle, requeue_unfinished=True, **options)
    conn = nsqd.connection()
    conn.push(1, 2)
    conn.wait_for(lambda: running)
    with promptly():
        consumer.close(drain=drain, timeout=0.1)
    conn.wait_for(lambda: sorted(conn.answered(b"REQ")) == [1, 2])
    assert {command[2] for command in conn.commands if command[0] == b"REQ"} == {b"0"}
    assert "requeued 1 messages that handlers have not finished" in caplog.text
    assert conn.answered(b"FIN") == []
    release.set()


def test_without_drain_nobody_waits_for_handlers(nsqd):
    release, running = Event(), []
    consumer = started(nsqd, lambda c, m: (running.append(m), release.wait()))
    conn = nsqd.connection()
    conn.push(1, 2)
    conn.wait_for(lambda: running)
    with promptly():
        consumer.close(drain=False, timeout=None)
    assert conn.answered(b"REQ") == [2]
    release.set()
    holds(lambda: conn.answered(b"FIN") == [], 0.01)


def test_close_inside_a_handler_does_not_wait_for_itself(nsqd):
    consumer = started(nsqd, lambda c, m: c.close(timeout=None))
    conn = nsqd.connection()
    conn.push(1, 2)
    assert consumer.join(WAIT)
    assert (conn.answered(b"FIN"), conn.answered(b"REQ")) == ([1], [2])


def test_close_inside_a_receiver_does_not_wait_for_itself(nsqd):
    consumer = started(nsqd, ignore)
    consumer.on_response.connect(lambda c, response: c.close(), weak=False)
    conn = nsqd.connection()
    conn.send(b"\x00\x00\x00\x0f\x00\x00\x00\x00_heartbeat_")
    assert consumer.join(WAIT)


def test_close_inside_the_loop_ends_it(nsqd):
    consumer = Consumer("topic", "channel", str(nsqd.address), max_in_flight=5)
    bodies = []

    def loop():
        for message in consumer:
            bodies.append(message.body)
            consumer.close()

    greenlet = gevent.spawn(loop)
    conn = nsqd.connection()
    conn.push(1, 2)
    greenlet.join(WAIT)
    assert greenlet.ready()
    assert consumer.join(WAIT)
    assert (conn.answered(b"FIN"), conn.answered(b"REQ")) == ([1], [2])
    assert len(bodies) == 1


def test_a_server_without_close_wait_does_not_hold_the_end_up():
    nsqd = ScriptedNsqd(replies={b"CLS": b""})
    consumer = started(nsqd, ignore)
    nsqd.connection()
    with promptly():
        consumer.close(timeout=0.1)
    nsqd.stop()


def test_closing_while_connecting(nsqd):
    mute = ScriptedNsqd(replies={b"IDENTIFY": b""})
    consumer = started(mute, ignore, connect_timeout=60.0)
    mute.wait_for(lambda: mute.connections)
    with promptly():
        consumer.close(timeout=None)
    mute.stop()


def test_closing_while_subscribing():
    mute = ScriptedNsqd(replies={b"SUB": b""})
    consumer = started(mute, ignore, connect_timeout=60.0)
    mute.wait_for(lambda: mute.connections and b"SUB" in mute.connections[0].words())
    with promptly():
        consumer.close(timeout=0.2)
    mute.stop()


def test_closing_when_nothing_is_connected(nsqd, caplog):
    nsqd.stop()
    consumer = started(nsqd, ignore)
    until(lambda: "cannot connect" in caplog.text)
    consumer.close()


def test_closing_is_idempotent_and_told_once(nsqd):
    told = []
    consumer = started(nsqd, ignore)
    consumer.on_close.connect(lambda c: told.append(c), weak=False)
    nsqd.connection()
    for _ in range(3):
        consumer.close()
    assert told == [consumer]
    assert not consumer.is_running


def test_closing_what_was_never_started(nsqd):
    Consumer("topic", "channel", str(nsqd.address)).close()


def test_start_blocks_until_closed(nsqd):
    consumer = Consumer("topic", "channel", str(nsqd.address), message_handler=ignore)
    running = gevent.spawn(consumer.start)
    nsqd.connection()
    assert consumer.is_running
    assert not consumer.join(0.01)
    consumer.close()
    running.join(WAIT)
    assert running.ready()


def test_with_closes(nsqd):
    with Consumer("topic", "channel", str(nsqd.address), message_handler=ignore) as consumer:
        conn = nsqd.connection()
        conn.push(1)
        conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    assert not consumer.is_running
    assert b"CLS" in conn.words()


def test_no_greenlet_is_left(nsqd):
    import gc

    from greenlet import greenlet

    def names():
        gc.collect()
        return sorted(
            each.name
            for each in gc.get_objects()
            if isinstance(each, greenlet)
            and isinstance(each, gevent.Greenlet)
            and not each.dead
            and "nsq_fast" in each.name
        )

    before = names()
    consumer = started(nsqd, ignore, concurrency=3)
    nsqd.connection()
    assert names() != before
    consumer.close()
    until(lambda: names() == before)
