"""RDY over several connections, and connections that come, go and come back."""

from __future__ import annotations

from types import SimpleNamespace

import gevent
import pytest
from gevent.event import Event
from support.scripted_nsqd import frame
from support.waiting import holds, until

from nsq_fast import Consumer
from nsq_fast.errors import ConnectFailed, ConnectionLost, SubFailed
from nsq_fast.names import Address


def ignore(consumer, message):
    pass


def keep(consumer, message):
    message.enable_async()


# RDY


def test_max_in_flight_above_max_rdy_count_works(servers, consume):
    server = servers({"max_rdy_count": 100})
    consume(ignore, server, max_in_flight=5000)
    conn = server.connection()
    assert conn.rdy == 100
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])


def test_max_in_flight_is_shared_over_connections(servers, consume):
    first, second = servers(), servers()
    consumer = consume(ignore, first, second, max_in_flight=11)
    first.connection().wait_for(lambda: first.connection().rdy + second.connection().rdy == 11)
    assert {first.connection().rdy, second.connection().rdy} == {5, 6}
    assert consumer.total_ready_count == 11


def test_a_share_is_handed_on_only_as_its_messages_are_answered(servers, consume):
    old, new = servers(), servers()
    new.is_refusing = True
    kept = []
    handler = lambda c, m: (m.enable_async(), kept.append(m))  # noqa: E731
    consumer = consume(handler, old, new, max_reconnect_delay=0.05)
    first = old.connection()
    first.wait_rdy(10)
    first.push(*range(10))
    first.wait_for(lambda: len(kept) == 10)
    new.is_refusing = False
    first.wait_rdy(5)
    holds(lambda: new.connections[-1].rdy is None, 0.4)
    for message in kept[:4]:
        message.finish()
    second = new.connections[-1]
    second.wait_rdy(4)
    for message in kept[4:]:
        message.finish()
    second.wait_rdy(5)
    assert consumer.total_ready_count == 10


def test_the_first_to_connect_leaves_room_for_those_on_their_way(servers, consume):
    gate = Event()
    early, late = servers(), servers(replies={b"SUB": lambda conn, command: gate.wait() and conn.send(frame(0, b"OK"))})
    consume(ignore, early, late)
    assert early.connection().rdy == 5
    gate.set()
    assert late.connection().rdy == 5
    assert early.connection().rdy == 5


def test_room_is_not_kept_for_one_that_could_not_be_reached(servers, consume):
    here, gone = servers(), servers()
    gone.stop()
    consume(ignore, here, gone)
    here.connection().wait_rdy(10)


def test_with_fewer_than_connections_each_gets_its_turn(servers, consume):
    nsqds = [servers() for _ in range(3)]
    consume(ignore, *nsqds, max_in_flight=1, low_ready_idle_timeout=0.05)
    for each in nsqds:
        each.wait_for(lambda each=each: each.connections and (b"RDY", b"1") in each.connections[0].commands)


def test_a_lost_connection_gives_its_share_to_the_others(servers, consume):
    first, second = servers(), servers()
    consume(ignore, first, second, max_reconnect_delay=60)
    conn = first.connection()
    conn.wait_rdy(5)
    lost = second.connection()
    second.is_refusing = True
    lost.close()
    conn.wait_rdy(10)


def test_max_in_flight_can_be_changed_at_any_time(servers, consume):
    server = servers()
    consumer = consume(ignore, server)
    conn = server.connection()
    for value in (3, 0, 25):
        consumer.max_in_flight = value
        conn.wait_rdy(value)
        assert consumer.max_in_flight == value
    with pytest.raises(ValueError, match="max_in_flight"):
        consumer.max_in_flight = -1
    assert consumer.max_in_flight == 25


def test_pause_and_resume(servers, consume):
    server = servers()
    consumer = consume(ignore, server)
    conn = server.connection()
    consumer.pause()
    conn.wait_rdy(0)
    assert consumer.is_paused
    consumer.resume()
    conn.wait_rdy(10)
    assert not consumer.is_paused


def test_is_starved_tells_a_batching_handler_to_go_on(servers, consume):
    server = servers()
    consumer = consume(keep, server)
    conn = server.connection()
    conn.push(*range(8))
    conn.wait_for(lambda: consumer.total_in_flight == 8)
    assert not consumer.is_starved
    conn.push(8)
    conn.wait_for(lambda: consumer.is_starved)  # true once the handler has it, a moment after it arrived


def test_what_a_running_handler_holds_of_a_lost_connection_still_counts(servers, consume):
    server, release = servers(), Event()
    consumer = consume(lambda c, m: release.wait(), server, max_in_flight=3, concurrency=2)
    conn = server.connection()
    conn.push(1, 2)
    until(lambda: consumer.stats().in_flight == 2 and not consumer.stats().unstarted)
    conn.close()
    again = server.connection(1)
    assert again.rdy == 1
    release.set()
    again.wait_rdy(3)


def test_backoff_concerns_all_connections(servers, consume):
    def fail(consumer, message):
        raise ValueError("no")

    first, second = servers(), servers()
    consume(fail, first, second, max_backoff_duration=0.3, requeue_delay=0)
    first.connection().wait_rdy(5)
    second.connection().wait_rdy(5)
    first.connection().push(1)
    first.connection().wait_rdy(0)
    second.connection().wait_rdy(0)
    first.wait_for(lambda: first.connection().rdy + second.connection().rdy == 1)


# Reconnecting


def test_a_lost_connection_is_made_again(servers, consume):
    server = servers()
    errors = []
    consumer = consume(ignore, server)
    consumer.on_error.connect(lambda c, error: errors.append(error), weak=False)
    server.connection().close()
    conn = server.connection(1)
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    assert isinstance(errors[0], ConnectionLost)
    assert consumer.stats().totals.finished == 1


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


def test_a_server_that_closes_after_sub_is_not_hammered(servers, consume):
    server = servers(replies={b"SUB": lambda conn, command: (conn.send(frame(0, b"OK")), conn.close())})
    consume(ignore, server, max_reconnect_delay=0.2)
    gevent.sleep(0.5)  # sleep: attempts in that time are counted
    assert len(server.connections) <= 15
    server.wait_for(lambda: len(server.connections) >= 3)


def test_a_refused_subscription_is_told_and_tried_again(servers, consume, caplog):
    server = servers(replies={b"SUB": frame(1, b"E_SUB_FAILED too many consumers")})
    errors = []
    consumer = consume(ignore, server, max_reconnect_delay=0.05)
    consumer.on_error.connect(lambda c, error: errors.append(error), weak=False)
    server.wait_for(lambda: len(errors) >= 2)
    assert isinstance(errors[0], SubFailed)
    del server.replies[b"SUB"]
    server.wait_for(lambda: server.connections[-1].rdy == 10)


def test_an_nsqd_that_is_not_there_does_not_stop_the_others(servers, consume, closed_port, caplog):
    gone, here = SimpleNamespace(address=Address("127.0.0.1", closed_port)), servers()
    errors = []
    consumer = consume(ignore, gone, here, max_reconnect_delay=0.05)
    consumer.on_error.connect(lambda c, error: errors.append(error), weak=False)
    here.connection().wait_rdy(10)
    here.wait_for(lambda: len(errors) > 2)
    assert not any(isinstance(error, ConnectFailed) and error.__cause__ for error in errors), (
        "the reason itself is told"
    )


def test_unstarted_messages_of_a_lost_connection_are_not_handled(servers, consume):
    server, release, handled = servers(), Event(), []

    def handler(consumer, message):
        handled.append(message.id)
        release.wait()

    consumer = consume(handler, server)
    conn = server.connection()
    conn.push(1, 2, 3)
    conn.wait_for(lambda: handled)
    conn.close()
    server.connection(1)
    release.set()
    holds(lambda: handled == [b"%016x" % 1])
    assert consumer.stats().totals.answers_lost == 1


@pytest.mark.parametrize("garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n", frame(2, b"short"), frame(7, b"what")])
def test_garbage_leads_to_a_new_connection(servers, consume, garbage):
    server = servers()
    consume(ignore, server)
    server.connection().send(garbage)
    conn = server.connection(1)
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])


def test_silence_of_two_heartbeats_leads_to_a_new_connection(servers, consume):
    server = servers()
    consume(ignore, server, heartbeat_interval=1.0)
    server.connection()
    server.connection(1)


# Lookup


made_lookups = []


class FakeLookup:
    """Stands for LookupPoller: tells its listener what the test says."""

    def __init__(self, lookupds, config, access, listener):
        self.listener = listener
        self.refreshed = 0
        self.is_stopped = False
        self.errors = 0
        made_lookups.append(self)

    def add_topic(self, topic, is_sought=True):
        self.topic = topic

    def start(self, *where):
        pass

    def stop(self):
        self.is_stopped = True

    def refresh(self, topic=None, later=0.0):
        self.refreshed += 1

    def tell(self, *nsqds):
        from nsq_fast.protocol.topology import Nsqd, Topology

        self.listener(self.topic, Topology(producers=tuple(Nsqd(tcp=each.address) for each in nsqds)))


@pytest.fixture
def lookup(monkeypatch):
    monkeypatch.setattr("nsq_fast.client.lookup.LookupPoller", FakeLookup)

    def start(**options):
        consumer = consume_found(**options)
        return consumer, made_lookups[-1]

    consumers = []

    def consume_found(**options):
        consumer = Consumer(
            "t", "c", lookupd_http_addresses="lookup:4161", message_handler=ignore, max_in_flight=10, **options
        )
        consumers.append(consumer)
        consumer.start(block=False)
        return consumer

    yield start
    for consumer in consumers:
        consumer.close(drain=False)


def test_found_nsqds_are_connected_once(servers, lookup):
    first, second = servers(), servers()
    _, poller = lookup()
    poller.tell(first)
    poller.tell(first, second)
    first.connection().wait_rdy(5)
    second.connection().wait_rdy(5)
    assert len(first.connections) == 1


def test_losing_a_found_nsqd_asks_lookup_at_once(servers, lookup):
    server = servers()
    _, poller = lookup()
    poller.tell(server)
    server.connection().close()
    server.wait_for(lambda: poller.refreshed)
    server.connection(1)


def test_a_live_connection_is_kept_when_lookup_forgets_it_but_not_made_again(servers, lookup):
    server, other = servers(), servers()
    consumer, poller = lookup()
    poller.tell(server)
    conn = server.connection()
    poller.tell(other)
    other.connection()
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    conn.close()
    server.wait_for(lambda: len(consumer.stats().connections) == 1)
    holds(lambda: len(server.connections) == 1, 0.2)
    assert consumer.stats().totals.finished == 1, "what it did is not forgotten"
    poller.tell(server, other)
    server.connection(1)


def test_closing_stops_lookup(servers, lookup):
    consumer, poller = lookup()
    consumer.close()
    assert poller.is_stopped
