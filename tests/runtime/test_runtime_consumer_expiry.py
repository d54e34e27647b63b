"""Messages whose time is over: no consumer waits for them, none is handled, none counts for ever."""

from __future__ import annotations

from time import monotonic

import gevent
import pytest
from gevent.event import Event
from support.waiting import promptly

from nsq_fast import Consumer

CONSUME = {"topic": "t", "channel": "c", "max_reconnect_delay": 0.02}

QUICK = {"msg_timeout": 300}
"""What these servers say in reply to IDENTIFY. Nothing here depends on how late a timer fires."""

expired_of = {}
"""Numbers of the messages that each consumer has said were expired."""


class Keep:
    """A handler that keeps its messages, which are answered later."""

    def __init__(self):
        self.held = []

    def __call__(self, consumer, message):
        message.enable_async()
        self.held.append(message)


@pytest.fixture
def watched(consume):
    """As ``consume``; notes what the consumer says was expired."""

    def start(handler, *nsqds, **options):
        consumer = consume(handler, *nsqds, **options)
        expired_of[consumer] = []
        consumer.on_expired.connect(lambda c, message: expired_of[c].append(int(message.id, 16)), weak=False)
        return consumer

    return start


def test_messages_that_are_never_answered_leave_in_flight_at_their_deadline(servers, watched, monkeypatch, caplog):
    monkeypatch.setattr("nsq_fast.client.deadlines.LOG_PAUSE", 600.0)
    server, keep = servers(QUICK), Keep()
    consumer = watched(keep, server)
    conn = server.connection()
    conn.push(*range(10))
    conn.wait_for(lambda: len(keep.held) == 10)
    assert consumer.total_in_flight == 10
    conn.wait_for(lambda: consumer.total_in_flight == 0)
    assert expired_of[consumer] == list(range(10))
    stats = consumer.stats()
    assert (stats.totals.expired, stats.in_flight, stats.totals.finished) == (10, 0, 0)
    assert all(message.has_expired() for message in keep.held)
    conn.push(10)
    conn.wait_for(lambda: len(keep.held) == 11)
    keep.held[0].finish()  # a late answer is sent, and counted once
    conn.wait_for(lambda: conn.answered(b"FIN") == [0])
    assert consumer.total_in_flight == 1
    with promptly():
        consumer.close(timeout=30)  # it waits for nothing that has expired
    assert expired_of[consumer] == list(range(11))
    assert caplog.text.count("were not answered before their msg_timeout was over") == 1, "however many follow soon"


def test_touch_moves_the_deadline(servers, watched):
    server, keep = servers(QUICK), Keep()
    consumer = watched(keep, server)
    conn = server.connection()
    conn.push(1, 2)
    conn.wait_for(lambda: len(keep.held) == 2)
    end = monotonic() + 0.6
    while monotonic() < end:
        keep.held[0].touch()
        gevent.sleep(0.02)  # sleep: touches again and again
    assert expired_of[consumer] == [2]
    conn.wait_for(lambda: expired_of[consumer] == [2, 1])


def test_asynchronous_messages_of_lost_connections_count_until_they_expire(servers, watched):
    server, keep = servers(QUICK), Keep()
    consumer = watched(keep, server)
    conn = server.connection()
    conn.push(*range(10))
    conn.wait_for(lambda: len(keep.held) == 10)
    conn.close()
    server.wait_for(lambda: consumer.stats().orphaned == 10)
    assert server.connection(1).rdy == 10
    assert expired_of[consumer] == list(range(10))
    assert consumer.stats().totals.expired == 10
    assert consumer.stats().orphaned == 0


# Handlers that are too slow


def test_a_handler_that_does_not_end_is_sent_nothing_more_until_it_does(servers, watched):
    server, gate = servers(QUICK), Event()
    consumer = watched(lambda c, m: gate.wait(), server)
    conn = server.connection()
    conn.push(1)
    conn.wait_rdy(0)
    conn.wait_for(lambda: expired_of[consumer] == [1])
    assert conn.rdy == 0
    gate.set()
    conn.wait_for(lambda: conn.rdy)


def test_no_more_is_asked_for_than_handlers_begin_with_in_time_and_one_warning_says_so(servers, consume, caplog):
    def handler(consumer, message):
        gevent.sleep(0.2)  # sleep: a fifth of the timeout of a message

    server = servers({"msg_timeout": 1000})
    consume(handler, server, max_in_flight=100)
    conn = server.connection()
    conn.wait_rdy(100)
    conn.push(1, 2, 3)
    conn.wait_for(lambda: conn.rdy < 10)
    assert conn.rdy >= 1
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 3)
    for number in range(4, 8):
        conn.push(number)
        conn.wait_for(lambda number=number: number in conn.answered(b"FIN"))
    (warning,) = [record.getMessage() for record in caplog.records if "too slow" in record.getMessage()]
    assert "max_in_flight=100" in warning
    assert "msg_timeout=1 s" in warning


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
