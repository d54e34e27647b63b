"""Messages whose time is over: no consumer waits for them, none is handled, none counts for ever."""

from __future__ import annotations

import struct
from collections import Counter
from datetime import timedelta
from time import monotonic

import gevent
import pytest
from gevent.event import Event
from support.scripted_nsqd import frame

from nsq_fast import Consumer, RequeueMessage
from nsq_fast.errors import ConfigError, ConnectionLost

CONSUME = {"topic": "t", "channel": "c", "max_reconnect_delay": 0.02}

QUICK = {"msg_timeout": 300}
"""What these servers say in reply to IDENTIFY. Nothing here depends on how late a timer fires."""


expired_of: dict[Consumer, list[int]] = {}
"""Numbers of the messages that each consumer has said were expired."""


def ignore(consumer, message):
    pass


def watched(consumer):
    """Note what it says was expired."""
    expired_of[consumer] = []
    consumer.on_expired.connect(lambda c, message: expired_of[c].append(int(message.id, 16)), weak=False)
    return consumer


def test_messages_that_are_never_answered_leave_in_flight_at_their_deadline(servers, consume):
    server = servers(QUICK)
    held = []
    consumer = watched(consume(lambda c, m: (m.enable_async(), held.append(m)), server))
    conn = server.connection()
    conn.push(*range(10))
    conn.wait_for(lambda: len(held) == 10)
    assert consumer.total_in_flight == 10
    conn.wait_for(lambda: consumer.total_in_flight == 0)
    assert expired_of[consumer] == list(range(10))
    stats = consumer.stats()
    assert (stats.totals.expired, stats.in_flight, stats.totals.finished) == (10, 0, 0)
    assert all(message.has_expired() for message in held)


def test_a_late_answer_is_sent_and_counted_once(servers, consume):
    server = servers(QUICK)
    held = []
    consumer = watched(consume(lambda c, m: (m.enable_async(), held.append(m)), server))
    conn = server.connection()
    conn.push(1)
    conn.wait_for(lambda: expired_of[consumer])
    conn.push(2)
    conn.wait_for(lambda: len(held) == 2)
    held[0].finish()
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    assert consumer.total_in_flight == 1


def test_no_handler_gets_a_message_whose_time_is_over(servers, consume):
    server = servers(QUICK)
    gate, handled = Event(), []
    consumer = watched(consume(lambda c, m: (handled.append(int(m.id, 16)), gate.wait()), server))
    conn = server.connection()
    conn.push(1, 2, 3)
    conn.wait_for(lambda: expired_of[consumer] == [1, 2, 3])
    assert consumer.stats().unstarted == 0
    conn.push(4)
    gate.set()
    conn.wait_for(lambda: handled == [1, 4])
    conn.wait_for(lambda: conn.answered(b"FIN") == [1, 4])
    assert not conn.answered(b"REQ")
    assert consumer.stats().totals.expired == 3


@pytest.mark.parametrize("kind", ["shared pool", "batches", "ordered", "iterated"])
def test_none_of_the_other_ways_to_handle_gets_one_either(servers, kind):
    version = {"version": "0.3.7-HA.1.9.9"} if kind == "ordered" else {}
    server = servers(QUICK | version, {b"SUB_ORDERED": frame(0, b"OK")})
    gate, handled, expired = Event(), [], []

    def handle(consumer, message):
        handled.append(int(message.id, 16))
        gate.wait()

    def handle_batch(consumer, messages):
        handled.extend(int(message.id, 16) for message in messages)
        gate.wait()

    options = {
        "shared pool": {"message_handler": handle, "concurrency": 1},
        "batches": {"batch_handler": handle_batch, "batch_size": 1},
        "ordered": {"message_handler": handle, "ordered": True, "partitions": [0]},
        "iterated": {},
    }[kind]
    consumer = Consumer("t", "c", str(server.address), max_in_flight=10, **options)
    consumer.on_expired.connect(lambda c, message: expired.append(int(message.id, 16)), weak=False)
    if kind == "iterated":
        gevent.spawn(lambda: [handle(consumer, message) for message in consumer])
    else:
        consumer.start(block=False)
    conn = server.connection()
    if kind == "ordered":
        conn.send(b"".join(ordered_frame(number) for number in (1, 2, 3)))
    else:
        conn.push(1, 2, 3)
    conn.wait_for(lambda: expired == [1, 2, 3])
    gate.set()
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    conn.push(4) if kind != "ordered" else conn.send(ordered_frame(4))
    conn.wait_for(lambda: handled == [1, 4])
    consumer.close(drain=False)


def ordered_frame(number):
    return frame(2, struct.pack(">qH", 1, 1) + b"%016x" % number + struct.pack(">QI", 100 * number, 100) + b"body")


def test_an_option_keeps_messages_whose_time_is_over(servers, consume):
    server = servers(QUICK)
    gate, handled = Event(), []
    consumer = watched(consume(lambda c, m: (handled.append(int(m.id, 16)), gate.wait()), server, drop_expired=False))
    conn = server.connection()
    conn.push(1, 2)
    conn.wait_for(lambda: expired_of[consumer] == [1, 2])
    gate.set()
    conn.wait_for(lambda: conn.answered(b"FIN") == [1, 2])


def test_touch_moves_the_deadline(servers, consume):
    server = servers(QUICK)
    held = []
    consumer = watched(consume(lambda c, m: (m.enable_async(), held.append(m)), server))
    conn = server.connection()
    conn.push(1, 2)
    conn.wait_for(lambda: len(held) == 2)
    end = monotonic() + 0.6
    while monotonic() < end:
        held[0].touch()
        gevent.sleep(0.02)  # sleep: touches again and again
    assert expired_of[consumer] == [2]
    conn.wait_for(lambda: expired_of[consumer] == [2, 1])


def test_more_messages_from_the_server_show_that_the_oldest_were_taken_back(servers, consume):
    server = servers({"msg_timeout": 60000})
    gate = Event()
    consumer = watched(consume(lambda c, m: gate.wait(), server, max_in_flight=3))
    conn = server.connection()
    conn.push(1, 2, 3)
    conn.wait_for(lambda: consumer.total_in_flight == 3)
    conn.push(4)
    conn.wait_for(lambda: consumer.total_in_flight == 4)
    assert not expired_of[consumer], "these came just now: the server sends more than it may"
    gate.set()


def test_close_waits_for_nothing_that_has_expired(servers, consume):
    server = servers(QUICK)
    held = []
    consumer = watched(consume(lambda c, m: (m.enable_async(), held.append(m)), server))
    conn = server.connection()
    conn.push(1)
    conn.wait_for(lambda: held)
    began = monotonic()
    consumer.close(timeout=30)
    assert monotonic() - began < 15
    assert expired_of[consumer] == [1]


def test_close_gives_back_what_the_program_has_dropped(servers, consume):
    server = servers()
    dropped = []

    def handler(consumer, message):
        message.enable_async()
        dropped.append(message.id)

    consumer = watched(consume(handler, server))
    conn = server.connection()
    conn.push(1, 2)
    conn.wait_for(lambda: len(dropped) == 2)
    began = monotonic()
    consumer.close(timeout=30)
    assert monotonic() - began < 15
    assert conn.answered(b"REQ") == [1, 2]


# Lost connections


def test_asynchronous_messages_of_lost_connections_count_until_they_expire(servers, consume):
    server = servers(QUICK)
    held = []
    consumer = watched(consume(lambda c, m: (m.enable_async(), held.append(m)), server))
    conn = server.connection()
    conn.push(*range(10))
    conn.wait_for(lambda: len(held) == 10)
    conn.close()
    server.wait_for(lambda: consumer.stats().orphaned == 10)
    assert server.connection(1).rdy == 10
    assert expired_of[consumer] == list(range(10))
    assert consumer.stats().totals.expired == 10
    assert consumer.stats().orphaned == 0


def test_asynchronous_messages_of_lost_connections_count_until_they_are_answered(servers, consume):
    server = servers()
    held = []
    consumer = watched(consume(lambda c, m: (m.enable_async(), held.append(m)), server))
    conn = server.connection()
    conn.push(*range(10))
    conn.wait_for(lambda: len(held) == 10)
    conn.close()
    again = server.wait_for(lambda: server.connections[1:])[0]
    for message in held[:4]:
        with pytest.raises(ConnectionLost):
            message.finish()
    again.wait_rdy(4)
    assert consumer.stats().orphaned == 6


def test_what_no_handler_has_begun_with_does_not_count_after_the_connection_is_lost(servers, consume):
    server = servers()
    gate = Event()
    consumer = watched(consume(lambda c, m: gate.wait(), server, concurrency=2))
    conn = server.connection()
    conn.push(*range(10))
    conn.wait_for(lambda: consumer.stats().unstarted == 8)
    conn.close()
    server.connection(1).wait_rdy(8)
    gate.set()
    server.connection(1).wait_rdy(10)


# Handlers that are too slow


def test_a_handler_that_does_not_end_is_sent_nothing_more_until_it_does(servers, consume):
    server = servers(QUICK)
    gate = Event()
    consumer = watched(consume(lambda c, m: gate.wait(), server))
    conn = server.connection()
    conn.push(1)
    conn.wait_rdy(0)
    conn.wait_for(lambda: expired_of[consumer] == [1])
    assert conn.rdy == 0
    gate.set()
    conn.wait_for(lambda: conn.rdy)


def test_no_more_is_asked_for_than_handlers_begin_with_in_time_and_one_warning_says_so(servers, consume, caplog):
    server = servers({"msg_timeout": 1000})

    def handler(consumer, message):
        gevent.sleep(0.2)  # sleep: a fifth of the timeout of a message

    watched(consume(handler, server, max_in_flight=100))
    conn = server.connection()
    conn.wait_rdy(100)
    conn.push(1, 2, 3)
    conn.wait_for(lambda: conn.rdy < 10)
    assert conn.rdy >= 1
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 3)
    for number in range(4, 8):
        conn.push(number)
        conn.wait_for(lambda number=number: number in conn.answered(b"FIN"))
    warnings = [record.getMessage() for record in caplog.records if "too slow" in record.getMessage()]
    assert len(warnings) == 1
    assert "max_in_flight=100" in warnings[0]
    assert "msg_timeout=1 s" in warnings[0]


def test_quick_handlers_are_not_held_back(servers, consume):
    server = servers(QUICK)
    seen = Counter()
    watched(consume(lambda c, m: seen.update([m.id]), server, max_in_flight=100))
    conn = server.connection()
    for first in range(0, 1000, 50):
        conn.push(*range(first, first + 50))
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 1000)
    assert conn.rdy == 100
    assert {command[1] for command in conn.commands if command[0] == b"RDY"} == {b"100"}


# RequeueMessage


@pytest.mark.parametrize("delay", ["5", b"5", [5], True, object()])
def test_a_wrong_delay_is_refused_where_it_is_given(delay):
    with pytest.raises(ConfigError, match=r"RequeueMessage: delay=.*must be a number of seconds, a timedelta, or None"):
        RequeueMessage(delay)


def test_a_timedelta_is_a_delay(servers, consume):
    def handler(consumer, message):
        raise RequeueMessage(timedelta(milliseconds=1500))

    server = servers()
    watched(consume(handler, server))
    conn = server.connection()
    conn.push(1)
    assert conn.wait_for(lambda: [command for command in conn.commands if command[0] == b"REQ"]) == [
        (b"REQ", b"%016x" % 1, b"1500")
    ]


def test_a_handler_with_a_wrong_delay_fails_and_its_message_is_requeued(servers, consume):
    def handler(consumer, message):
        raise RequeueMessage("5")

    server = servers()
    consumer = watched(consume(handler, server))
    conn = server.connection()
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"REQ") == [1])
    assert consumer.total_in_flight == 0


def test_a_fault_of_ours_requeues_the_message(servers, consume, monkeypatch):
    server = servers()
    consumer = watched(consume(lambda c, m: 1 / 0, server))

    def broken(*args):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(consumer.acknowledger, "failed", broken)
    conn = server.connection()
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"REQ") == [1])
    assert consumer.total_in_flight == 0


# The default of max_in_flight


def test_by_default_each_connection_has_one(servers):
    nsqds = [servers() for _ in range(3)]
    with Consumer("t", "c", [str(each.address) for each in nsqds], message_handler=lambda c, m: None) as consumer:
        for each in nsqds:
            each.connection().wait_rdy(1)
        assert consumer.max_in_flight == consumer.stats().max_in_flight == 3


def test_a_number_below_that_of_the_connections_is_obeyed_and_one_warning_says_so(servers, caplog):
    nsqds = [servers() for _ in range(3)]
    addresses = [str(each.address) for each in nsqds]
    with Consumer("t", "c", addresses, message_handler=lambda c, m: None, max_in_flight=2) as consumer:
        nsqds[0].wait_for(lambda: sum(each.is_connected for each in consumer.stats().connections) == 3)
        nsqds[0].wait_for(lambda: consumer.total_ready_count == 2)
        assert consumer.max_in_flight == 2
        consumer.max_in_flight = None
        for each in nsqds:
            each.connection().wait_rdy(1)
        assert consumer.max_in_flight == 3
    text = "max_in_flight=2 is less than the number of connections, 3"
    assert [text in record.getMessage() for record in caplog.records].count(True) == 1


def test_enough_for_all_gives_no_warning(servers, caplog):
    nsqds = [servers() for _ in range(2)]
    with Consumer(
        "t", "c", [str(each.address) for each in nsqds], message_handler=lambda c, m: None, max_in_flight=2
    ) as consumer:
        for each in nsqds:
            each.connection().wait_rdy(1)
        assert consumer.max_in_flight == 2
    assert "less than the number of connections" not in caplog.text


@pytest.mark.parametrize("value", [-1, 1.5, "many", True])
def test_a_wrong_max_in_flight_is_refused(value):
    with pytest.raises(ConfigError, match="max_in_flight"):
        Consumer("t", "c", "127.0.0.1:1", message_handler=lambda c, m: None, max_in_flight=value)
