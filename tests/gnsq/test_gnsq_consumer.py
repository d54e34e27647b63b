"""The drop-in consumer and reader: gnsq's arguments, attributes, signals and rules, without its failures."""

from __future__ import annotations

import gevent
import pytest
from gevent.event import Event
from support.scripted_nsqd import ScriptedNsqd, frame
from support.waiting import WAIT, holds, until

from nsq_fast import gnsq
from nsq_fast.gnsq import states
from nsq_fast.gnsq.contrib import QueueHandler
from nsq_fast.gnsq.errors import NSQException, NSQNoConnections, NSQRequeueMessage


def start(consumer):
    consumer.start(block=False)
    return consumer


def test_attributes_have_gnsqs_names_and_defaults():
    consumer = gnsq.Consumer("topic", "channel", "host", ["http://lookup:1/", "lookup:2"], heartbeat_interval=20)
    assert consumer.name == "gnsq.consumer.topic.channel"
    assert consumer.logger.name == consumer.name
    assert consumer.nsqd_tcp_addresses == {"host:4150"}
    assert sorted(client.address for client in consumer.lookupds) == ["http://lookup:1/", "http://lookup:2/"]
    assert next(consumer.iterlookupds) in consumer.lookupds
    assert consumer.conn_kwargs == {"heartbeat_interval": 20}
    assert (consumer.max_tries, consumer.max_in_flight, consumer.requeue_delay) == (5, 1, 0)
    assert (consumer.lookupd_poll_interval, consumer.lookupd_poll_jitter) == (60, 0.3)
    assert (consumer.low_ready_idle_timeout, consumer.max_backoff_duration) == (10, 128)
    assert consumer.backoff_on_requeue is True
    assert not consumer.is_running


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, ValueError),
        ({"nsqd_tcp_addresses": None, "lookupd_http_addresses": "l"}, TypeError),
        ({"nsqd_tcp_addresses": "n", "lookupd_http_addresses": None}, TypeError),
        ({"nsqd_tcp_addresses": "n:port"}, ValueError),
        ({"nsqd_tcp_addresses": "n", "no_such_option": 1}, ValueError),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, error):
    with pytest.raises(error):
        gnsq.Consumer("topic", "channel", **arguments)


def test_handlers_get_the_message_by_keyword_and_are_counted(scripted, make_consumer):
    heard = []
    consumer = make_consumer(message_handler=lambda sender, **given: heard.append((sender, sorted(given))))
    assert len(consumer.on_message.receivers) == 1
    start(consumer)
    scripted.connection().push(1)
    scripted.connection().wait_for(lambda: scripted.connection().answered(b"FIN") == [1])
    assert heard == [(consumer, ["message"])]


def test_it_says_that_it_is_gnsq_and_nsq_fast(scripted, make_consumer):
    start(make_consumer(message_handler=print))
    agent = scripted.connection().identify["user_agent"]
    assert agent.startswith("gnsq/1.0.2")
    assert "nsq_fast" in agent


def test_a_failure_is_requeued_with_the_consumers_delay_and_a_request_without(scripted, make_consumer):
    def handler(consumer, message):
        if message.body == b"fail":
            raise KeyError("bad")
        if message.body == b"raise":
            raise NSQRequeueMessage(False)
        message.requeue()

    start(make_consumer(message_handler=handler, requeue_delay=70))
    conn = scripted.connection()
    conn.push(1, body=b"fail")
    conn.push(2, body=b"raise")
    conn.push(3, body=b"requeue")
    conn.wait_for(lambda: len(conn.answered(b"REQ")) == 3)
    delays = {int(command[1], 16): command[2] for command in conn.commands if command[0] == b"REQ"}
    assert delays == {1: b"70", 2: b"70", 3: b"0"}


def test_options_changed_while_it_runs_hold_for_the_next_message(scripted, make_consumer):
    given_up = []
    consumer = make_consumer(message_handler=lambda consumer, message: 1 / 0)
    consumer.on_giving_up.connect(lambda consumer, message: given_up.append(message.attempts), weak=False)
    start(consumer)
    conn = scripted.connection()
    consumer.max_tries = 2
    consumer.requeue_delay = 33
    consumer.backoff_on_requeue = False
    conn.push(1, attempts=2)
    conn.push(2, attempts=3)
    conn.wait_for(lambda: conn.answered(b"FIN") == [2])
    assert conn.commands[-2:] == [(b"REQ", b"%016x" % 1, b"33"), (b"FIN", b"%016x" % 2)]
    assert given_up == [3]
    assert (consumer.max_tries, consumer.requeue_delay, consumer.backoff_on_requeue) == (2, 33, False)
    with pytest.raises(AttributeError):
        consumer.max_backoff_duration = 1


def test_a_message_that_a_receiver_fails_to_bury_is_kept(scripted, make_consumer):
    consumer = make_consumer(message_handler=print)

    @consumer.on_giving_up.connect
    def bury(consumer, message):
        raise OSError("the graveyard is closed")

    start(consumer)
    scripted.connection().push(1, attempts=9)
    scripted.connection().wait_for(lambda: scripted.connection().answered(b"REQ") == [1])
    assert scripted.connection().answered(b"FIN") == []


def test_a_slow_handler_holds_up_neither_heartbeats_nor_its_own_fin_at_the_end(scripted, make_consumer):
    release, begun = Event(), Event()

    def handler(consumer, message):
        begun.set()
        release.wait()

    consumer = start(make_consumer(message_handler=handler))
    conn = scripted.connection()
    conn.push(1, 2)
    begun.wait()
    conn.send(b"\x00\x00\x00\x0f\x00\x00\x00\x00_heartbeat_")
    conn.wait_for(lambda: b"NOP" in conn.words())
    closing = gevent.spawn(consumer.close)
    conn.wait_for(lambda: conn.answered(b"REQ") == [2])
    release.set()
    closing.get()
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])


def test_join_and_close_of_a_consumer_that_never_started_return(make_consumer):
    consumer = make_consumer(message_handler=print)
    consumer.close()
    assert consumer.join()


def test_starting_needs_a_receiver(make_consumer):
    with pytest.raises(RuntimeError, match="no receivers"):
        make_consumer().start()


def test_a_receiver_may_stop_listening_and_a_muted_signal_calls_nobody(scripted, make_consumer):
    seen = []
    consumer = make_consumer()
    first = consumer.on_message.connect(lambda consumer, message: seen.append("first"), weak=False)
    consumer.on_message.connect(lambda consumer, message: seen.append("second"), weak=False)
    start(consumer)
    conn = scripted.connection()
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    assert sorted(seen) == ["first", "second"]
    consumer.on_message.disconnect(first)
    conn.push(2)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1, 2])
    assert sorted(seen) == ["first", "second", "second"]


def test_one_more_nsqd_can_be_added_while_it_runs(scripted, make_consumer):
    other = ScriptedNsqd()
    consumer = start(make_consumer(message_handler=print))
    scripted.connection()
    consumer.connect_to_nsqd(*other.address)
    assert other.connection().rdy is not None
    assert str(other.address) in consumer.nsqd_tcp_addresses
    consumer.query_nsqd()
    consumer.query_lookupd()
    consumer.redistribute_ready_state()
    assert len(other.connections) == 1
    other.stop()


# Subclasses


def test_a_subclass_may_queue_messages_and_handle_them_later(scripted, make_consumer):
    class Queueing(gnsq.Consumer):
        def handle_message(self, conn, message):
            kept.append((conn, message))

    kept, seen = [], []
    consumer = make_consumer(Queueing, message_handler=lambda consumer, message: seen.append(message.body))
    start(consumer)
    conn = scripted.connection()
    conn.push(1, 2)
    until(lambda: len(kept) == 2)
    assert seen == []
    gnsq.Consumer.handle_message(consumer, *kept[0])
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    assert seen == [b"body"]


def test_a_subclass_may_wrap_the_handling(scripted, make_consumer):
    class Wrapping(gnsq.Consumer):
        def _handle_message(self, message):
            seen.append("before")
            super()._handle_message(message)
            seen.append("after")

    def handler(consumer, message):
        seen.append("handler")
        if message.body == b"bad":
            raise KeyError("bad")

    seen = []
    start(make_consumer(Wrapping, message_handler=handler))
    conn = scripted.connection()
    conn.push(1)
    conn.push(2, body=b"bad")
    conn.wait_for(lambda: conn.answered(b"FIN") == [1] and conn.answered(b"REQ") == [2])
    assert seen == ["before", "handler", "after", "before", "handler"]


def test_a_subclass_may_override_what_hears_of_events(scripted, make_consumer):
    class Listening(gnsq.Consumer):
        def handle_error(self, conn, error):
            heard.append(type(error).__name__)
            super().handle_error(conn, error)

        def handle_response(self, conn, response):
            heard.append(response)

        def handle_finish(self, conn, message_id):
            heard.append(("finish", message_id))

        def handle_requeue(self, conn, message_id, timeout, backoff):
            heard.append(("requeue", message_id, timeout))

    heard = []
    start(
        make_consumer(Listening, message_handler=lambda consumer, message: message.attempts > 1 and message.requeue(4))
    )
    conn = scripted.connection()
    conn.send(frame(0, b"_heartbeat_") + frame(1, b"E_FIN_FAILED no"))
    conn.push(1)
    conn.push(2, attempts=2)
    conn.wait_for(lambda: len(heard) == 4)
    ids = [b"%016x" % 1, b"%016x" % 2]
    assert sorted(map(str, heard)) == sorted(
        map(str, [b"_heartbeat_", "FinFailed", ("finish", ids[0]), ("requeue", ids[1], 4)])
    )


def make_reader(make_consumer, **options):
    with pytest.deprecated_call():
        return make_consumer(gnsq.Reader, **options)


def test_a_reader_with_async_leaves_all_answers_to_the_program(scripted, make_consumer):
    kept = []
    reader = make_reader(make_consumer, message_handler=lambda reader, message: kept.append(message), **{"async": True})
    start(reader)
    conn = scripted.connection()
    conn.push(1)
    until(lambda: kept)
    holds(lambda: conn.answered(b"FIN") == [], 0.01)
    kept[0].finish()
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])


def test_a_reader_handles_as_many_at_once_as_it_was_told(scripted, make_consumer):
    running, peak, release = [], [], Event()

    def handler(reader, message):
        running.append(message)
        peak.append(len(running))
        release.wait()
        running.pop()

    start(make_reader(make_consumer, message_handler=handler, max_concurrency=3))
    conn = scripted.connection()
    conn.push(*range(6))
    until(lambda: len(running) == 3)
    release.set()
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 6)
    assert max(peak) == 3


def test_a_reader_publishes_over_a_connection_it_has(nsq_broker):
    seen = []
    with pytest.deprecated_call():
        reader = gnsq.Reader("topic", "channel", str(nsq_broker.nsqd.tcp_address))
    reader.on_message.connect(lambda reader, message: seen.append(message.body), weak=False)
    with pytest.raises(NSQNoConnections), pytest.deprecated_call():
        reader.publish("topic", b"too early")
    start(reader)
    until(lambda: reader.total_ready_count)
    with pytest.deprecated_call():
        reader.publish("topic", b"hello")
    until(lambda: seen == [b"hello"])
    reader.close()


# What programs' tests look at


def test_the_states_of_a_backoff(scripted, make_consumer):
    consumer = make_consumer(message_handler=lambda consumer, message: None, max_in_flight=50, max_backoff_duration=9)
    start(consumer)
    assert consumer._redistributed_ready_event.wait(WAIT)
    (conn,) = consumer._connections
    assert consumer._connections[conn] == states.RUNNING
    timer = consumer._message_backoffs[conn]
    timer.failure()
    consumer._start_backoff(conn)
    consumer._redistribute_ready_state()
    assert (consumer._connections[conn], consumer.total_ready_count) == (states.BACKOFF, 0)
    consumer._start_throttled(conn)
    consumer._redistribute_ready_state()
    assert (consumer._connections[conn], consumer.total_ready_count) == (states.THROTTLED, 1)
    consumer._complete_backoff(conn)
    assert consumer._connections[conn] == states.BACKOFF
    timer.success()
    assert timer.is_reset()
    consumer._complete_backoff(conn)
    consumer._redistribute_ready_state()
    assert (consumer._connections[conn], consumer.total_ready_count) == (states.RUNNING, 50)


def test_is_starved_means_that_handlers_hold_what_there_is(scripted, make_consumer):
    starved = []
    queue = QueueHandler()
    consumer = make_consumer(max_in_flight=4)
    consumer.on_message.connect(queue)

    @consumer.on_message.connect
    def look(consumer, message):
        starved.append(consumer.is_starved)

    start(consumer)
    scripted.connection().wait_rdy(4)
    scripted.connection().push(1, 2, 3, 4)
    until(lambda: len(starved) == 4)
    assert starved[:3] == [False, False, False]
    assert consumer.is_starved
    assert (consumer.total_in_flight, consumer.total_ready_count) == (4, 4)
    for _ in range(4):
        queue.get().finish()
    assert not consumer.is_starved


def test_an_exception_of_gnsq_is_one_of_ours():
    assert issubclass(gnsq.errors.NSQRequeueMessage, NSQException)
    assert NSQRequeueMessage().backoff is None
