"""RDY over several connections, and connections that come, go and come back: scripted nsqds and whole ones."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import gevent
import pytest
from gevent.event import Event
from support.http import ask
from support.partitions import topology
from support.scripted_nsqd import frame
from support.waiting import holds, promptly, until

from nsq_fast import Consumer, Producer
from nsq_fast.errors import ConnectFailed, ConnectionLost, SubFailed
from nsq_fast.names import Address


def ignore(consumer, message):
    pass


def publish(server, topic, bodies):
    answer = ask(server.http_address, "POST", f"/mpub?topic={topic}", b"\n".join(bodies))
    assert answer.status == 200, answer.body


def addresses(servers):
    return [str(server.tcp_address) for server in servers]


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
    publish(nsqd, "t", [b"slow"])
    attempts, errors = [], []

    def handler(consumer, message):
        attempts.append(message.attempts)
        gevent.sleep(1.6 if message.attempts == 1 else 0)  # sleep: longer than the timeout of the message

    options = {"msg_timeout": 1.0, "concurrency": 2, "max_in_flight": 2}
    consumer = Consumer("t", "c", addresses([nsqd]), message_handler=handler, **options)
    consumer.on_error.connect(lambda c, error: errors.append(error.code), weak=False)
    with consumer:
        until(lambda: errors)
        assert errors == ["E_FIN_FAILED"]
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
    errors = []
    consumer = consume(ignore, server, max_reconnect_delay=0.05)
    consumer.on_error.connect(lambda c, error: errors.append(error), weak=False)
    server.wait_for(lambda: len(errors) >= 2)
    assert isinstance(errors[0], SubFailed)
    del server.replies[b"SUB"]
    server.wait_for(lambda: server.connections[-1].rdy == 10)


def test_nsqds_that_are_not_there_or_say_nothing_hold_up_no_other(servers, consume, closed_port):
    here, errors = servers(), []
    gone = SimpleNamespace(address=Address("127.0.0.1", closed_port))
    with socket.create_server(("127.0.0.1", 0)) as mute, promptly():  # the system accepts; nobody says a word
        silent = SimpleNamespace(address=Address(*mute.getsockname()))
        consumer = consume(ignore, gone, silent, here, max_reconnect_delay=0.05, connect_timeout=60.0)
        consumer.on_error.connect(lambda c, error: errors.append(error), weak=False)
        here.connection().push(1)
        here.connection().wait_for(lambda: here.connection().answered(b"FIN") == [1])
        with Producer([silent.address, here.address], connect_timeout=60.0) as producer:
            until(lambda: producer.stats()["connected"] == [str(here.address)])
        here.wait_for(lambda: len(errors) > 2)
        consumer.close(drain=False)
    refused = [error for error in errors if isinstance(error, ConnectFailed)]
    assert not any(error.__cause__ for error in refused), "the reason itself is told"


def test_unstarted_messages_of_a_lost_connection_are_not_handled(servers, consume):
    server, release, handled = servers(), Event(), []
    consumer = consume(lambda c, m: (handled.append(int(m.id, 16)), release.wait()), server)
    conn = server.connection()
    conn.push(1, 2, 3)
    conn.wait_for(lambda: handled)
    conn.close()
    server.connection(1)
    release.set()
    holds(lambda: handled == [1])
    assert consumer.stats().totals.answers_lost == 1


def test_answers_that_were_queued_when_their_connection_ended_are_counted_as_lost(servers, consume):
    server, taken = servers(), []
    consumer = consume(lambda c, m: (m.enable_async(), taken.append(m)), server, max_reconnect_delay=0.05)
    server.connection().push(1, 2, 3)
    until(lambda: len(taken) == 3)
    taken[0].finish()
    for message in taken[1:]:
        message.requeue(0)
    taken[0].responder.close(ConnectionLost("before they were sent, in the same turn of the loop"))
    totals = consumer.stats().totals
    assert (totals.answers_lost, totals.finished, totals.requeued) == (3, 0, 0)
    server.connection(1).wait_rdy(10)
    assert not {b"FIN", b"REQ"}.intersection(server.connections[0].words())


# Lookup


def test_found_nsqds_are_connected_once_and_kept_while_they_live(servers, consume):
    first, second, third = servers(), servers(), servers()
    consumer = consume(ignore, found=topology({}, first))
    lookup = consumer._subscriptions.lookup
    lookup.tell(topology({}, first, second))
    first.connection().wait_rdy(5)
    second.connection().wait_rdy(5)
    second.connection().close()
    second.wait_for(lambda: lookup.refreshed)  # at once
    second.connection(1)
    lookup.tell(topology({}, second, third))
    third.connection()
    conn = first.connection()
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    conn.close()
    first.wait_for(lambda: len(consumer.stats().connections) == 2)
    holds(lambda: len(first.connections) == 1, 0.2)
    assert consumer.stats().totals.finished == 1, "what it did is not forgotten"
    lookup.tell(topology({}, first, second, third))
    first.connection(1)
    consumer.close()
    assert lookup.is_stopped


def test_a_consumer_that_is_older_than_its_topic_finds_it_soon(make_nsqd, make_lookupd, caplog):
    """With default options: lookup is polled once a minute when the topic is known, not while it is not."""
    lookupd = make_lookupd()
    nsqd = make_nsqd(f"--lookupd-tcp-address={lookupd.tcp_address}")
    seen = []
    lookups = str(lookupd.http_address)
    with Consumer("young", "c", lookupd_http_addresses=lookups, message_handler=lambda _, m: seen.append(m.body)):
        until(lambda: "no nsqlookupd knows topic young yet" in caplog.text)
        with Producer(str(nsqd.tcp_address)) as producer:
            producer.publish("young", b"first")
        until(lambda: seen == [b"first"])
    assert caplog.text.count("topic young is known now") == 1
