"""The drop-in consumer, reader, producer and what is built on them: gnsq's arguments, attributes, signals and rules."""

from __future__ import annotations

import base64
import io
import json
import pickle
import socket
import sys
import warnings
from contextlib import contextmanager

import gevent
import pytest
from gevent.event import Event
from support.http_server import scripted_http
from support.scripted_nsqd import ScriptedNsqd
from support.waiting import WAIT, holds, promptly, until
from support.wire import frame

import nsq_fast
from nsq_fast import gnsq
from nsq_fast.errors import BodyInvalid
from nsq_fast.gnsq import states
from nsq_fast.gnsq.contrib import (
    BatchHandler,
    ChannelHandler,
    JSONLogGiveupHandler,
    LogGiveupHandler,
    NsqdGiveupHandler,
    QueueHandler,
    SentryExceptionHandler,
)
from nsq_fast.gnsq.errors import (
    NSQBadMessage,
    NSQBadTopic,
    NSQException,
    NSQInvalid,
    NSQNoConnections,
    NSQRequeueMessage,
)


@pytest.fixture
def make_consumer(nsqd):
    """Make a consumer of the scripted nsqd, not started; closed after the test."""
    made = []

    def make(kind=gnsq.Consumer, **options):
        defaults = {"nsqd_tcp_addresses": str(nsqd.address), "max_in_flight": 10, "max_backoff_duration": 0}
        made.append(kind("topic", "channel", **{**defaults, **options}))
        return made[-1]

    yield make
    for consumer in made:
        consumer.close(drain=False)


def do_nothing(consumer, message):
    """A handler."""


def start(nsqd, consumer):
    """Start a consumer; its connection at the nsqd."""
    consumer.start(block=False)
    return nsqd.connection()


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


def test_handlers_get_the_message_by_keyword_and_are_counted(nsqd, make_consumer):
    heard = []
    consumer = make_consumer(message_handler=lambda sender, **given: heard.append((sender, sorted(given))))
    assert len(consumer.on_message.receivers) == 1
    conn = start(nsqd, consumer)
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    assert heard == [(consumer, ["message"])]


def test_it_says_that_it_is_gnsq_and_nsq_fast(nsqd, make_consumer):
    agent = start(nsqd, make_consumer(message_handler=do_nothing)).identify["user_agent"]
    assert agent.startswith("gnsq/1.0.2")
    assert "nsq_fast" in agent


def test_a_failure_is_requeued_with_the_consumers_delay_and_a_request_without(nsqd, make_consumer):
    def handler(consumer, message):
        if message.body == b"fail":
            raise KeyError("bad")
        if message.body == b"raise":
            raise NSQRequeueMessage(False)
        message.requeue()

    conn = start(nsqd, make_consumer(message_handler=handler, requeue_delay=70))
    conn.push(1, body=b"fail")
    conn.push(2, body=b"raise")
    conn.push(3, body=b"requeue")
    conn.wait_for(lambda: len(conn.answered(b"REQ")) == 3)
    delays = {int(command[1], 16): command[2] for command in conn.commands if command[0] == b"REQ"}
    assert delays == {1: b"70", 2: b"70", 3: b"0"}


def test_options_changed_while_it_runs_hold_for_the_next_message(nsqd, make_consumer):
    given_up = []
    consumer = make_consumer(message_handler=lambda consumer, message: 1 / 0)
    consumer.on_giving_up.connect(lambda consumer, message: given_up.append(message.attempts), weak=False)
    conn = start(nsqd, consumer)
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


def test_a_consumer_that_was_never_started_ends_and_one_without_receivers_does_not_start(make_consumer):
    consumer = make_consumer(message_handler=do_nothing)
    consumer.close()
    assert consumer.join()
    with pytest.raises(RuntimeError, match="no receivers"):
        make_consumer().start()


def test_a_receiver_may_stop_listening_and_a_muted_signal_calls_nobody(nsqd, make_consumer):
    seen = []
    consumer = make_consumer()
    first = consumer.on_message.connect(lambda consumer, message: seen.append("first"), weak=False)
    consumer.on_message.connect(lambda consumer, message: seen.append("second"), weak=False)
    conn = start(nsqd, consumer)
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    assert sorted(seen) == ["first", "second"]
    consumer.on_message.disconnect(first)
    conn.push(2)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1, 2])
    assert sorted(seen) == ["first", "second", "second"]


def test_one_more_nsqd_can_be_added_while_it_runs(nsqd, make_consumer):
    other = ScriptedNsqd()
    consumer = make_consumer(message_handler=do_nothing)
    start(nsqd, consumer)
    consumer.connect_to_nsqd(*other.address)
    assert other.connection().rdy is not None
    assert str(other.address) in consumer.nsqd_tcp_addresses
    consumer.query_nsqd()
    consumer.query_lookupd()
    consumer.redistribute_ready_state()
    assert len(other.connections) == 1
    other.stop()


def test_query_lookupd_asks_at_once(nsqd, make_consumer):
    found = {"broadcast_address": nsqd.address.host, "tcp_port": nsqd.address.port, "http_port": 1}
    with scripted_http(lambda question: question.answer({"producers": [found]})) as (lookupd,):
        lookup = {"lookupd_http_addresses": str(lookupd.address), "lookupd_poll_interval": 600}
        consumer = make_consumer(nsqd_tcp_addresses=(), message_handler=do_nothing, **lookup)
        start(nsqd, consumer)
        asked = lookupd.count("/lookup")
        until(lambda: consumer.query_lookupd() or lookupd.count("/lookup") > asked)  # not if it has asked just now
        consumer.close()


# Subclasses


def test_a_subclass_may_queue_messages_and_handle_them_later_and_wrap_the_handling(nsqd, make_consumer):
    class Ours(gnsq.Consumer):
        def handle_message(self, conn, message):
            kept.append((conn, message))

        def _handle_message(self, message):
            seen.append("before")
            super()._handle_message(message)
            seen.append("after")

    def handler(consumer, message):
        seen.append("handler")
        if message.body == b"bad":
            raise KeyError("bad")

    kept, seen = [], []
    consumer = make_consumer(Ours, message_handler=handler)
    conn = start(nsqd, consumer)
    conn.push(1)
    conn.push(2, body=b"bad")
    until(lambda: len(kept) == 2)
    assert seen == []
    for each in kept:
        gnsq.Consumer.handle_message(consumer, *each)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1] and conn.answered(b"REQ") == [2])
    assert seen == ["before", "handler", "after", "before", "handler"]


def test_a_subclass_may_override_what_hears_of_events(nsqd, make_consumer):
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
    consumer = make_consumer(Listening, message_handler=lambda _, message: message.attempts > 1 and message.requeue(4))
    conn = start(nsqd, consumer)
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


def test_a_reader_handles_as_many_at_once_as_it_was_told_and_with_async_leaves_answers_to_the_program(
    nsqd, make_consumer
):
    running, begun, release = [], [], Event()

    def handler(reader, message):
        running.append(message)
        begun.append((message, len(running)))
        release.wait()
        running.pop()

    reader = make_reader(make_consumer, message_handler=handler, max_concurrency=3, **{"async": True})
    conn = start(nsqd, reader)
    conn.push(*range(6))
    until(lambda: len(running) == 3)
    release.set()
    until(lambda: len(begun) == 6)
    assert max(count for _, count in begun) == 3
    holds(lambda: conn.answered(b"FIN") == [], 0.01)
    for message, _ in begun:
        message.finish()
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 6)


def test_a_reader_publishes_over_a_connection_it_has(nsq_broker):
    seen = []
    with pytest.deprecated_call():
        reader = gnsq.Reader("topic", "channel", str(nsq_broker.nsqd.tcp_address))
    reader.on_message.connect(lambda reader, message: seen.append(message.body), weak=False)
    with pytest.raises(NSQNoConnections), pytest.deprecated_call():
        reader.publish("topic", b"too early")
    reader.start(block=False)
    until(lambda: reader.total_ready_count)
    with pytest.deprecated_call():
        reader.publish("topic", b"hello")
    until(lambda: seen == [b"hello"])
    reader.close()


# start() and close()


@pytest.mark.parametrize("is_looked_up", [False, True])
def test_a_consumer_that_was_started_has_its_channel(nsq_broker, closed_port, is_looked_up):
    """gnsq's start returns when each nsqd is connected, or could not be (gnsq/consumer.py, connect_to_nsqd)."""
    gnsq.NsqdHTTPClient(*nsq_broker.nsqd.http_address).create_topic("topic")
    lookupd = gnsq.LookupdClient(*nsq_broker.lookupd.http_address)
    until(lambda: "topic" in lookupd.topics()["topics"])
    consumer = gnsq.Consumer(
        "topic",
        "channel",
        [f"127.0.0.1:{closed_port}"]
        if is_looked_up
        else [str(nsq_broker.nsqd.tcp_address), f"127.0.0.1:{closed_port}"],
        str(nsq_broker.lookupd.http_address) if is_looked_up else (),
        message_handler=lambda consumer, message: None,
    )
    consumer.start(block=False)
    assert "channel" in nsq_broker.nsqd.nsqd.existing_topic("topic").channels
    consumer.close()


def test_close_waits_for_a_handler_that_has_responded(nsqd, make_consumer):
    """It uses what the program has."""
    may_end, ended = Event(), []

    def handle(consumer, message):
        message.finish()
        may_end.wait()
        ended.append(message.body)

    consumer = make_consumer(message_handler=handle)
    conn = start(nsqd, consumer)
    conn.push(1, body=b"body")
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    closing = gevent.spawn(consumer.close)
    holds(lambda: not closing.ready())
    may_end.set()
    closing.get(timeout=WAIT)
    assert ended == [b"body"]


def test_a_receiver_of_on_response_hears_of_heartbeats(nsqd, make_consumer):
    heard = []
    consumer = make_consumer(message_handler=do_nothing)
    consumer.on_response.connect(lambda consumer, response: heard.append(response), weak=False)
    conn = start(nsqd, consumer)
    conn.send(frame(0, b"_heartbeat_"))
    conn.wait_for(lambda: b"NOP" in conn.words())
    until(lambda: heard == [b"_heartbeat_"])


def test_a_start_waits_no_longer_than_its_timeout_for_an_nsqd_that_hangs():
    with socket.create_server(("127.0.0.1", 0)) as hung:
        address = f"127.0.0.1:{hung.getsockname()[1]}"
        consumer = gnsq.Consumer("topic", "channel", address, message_handler=do_nothing, timeout=0.1)
        with promptly():
            consumer.start(block=False)
        assert consumer.is_running
        consumer.close()


def test_a_closed_consumer_stays_closed_when_it_is_started(make_consumer, caplog):
    """As in gnsq, whose start warns and joins then."""
    consumer = make_consumer(message_handler=lambda consumer, message: None)
    consumer.start(block=False)
    consumer.close()
    consumer.start(block=False)
    with promptly():
        consumer.start()
    assert not consumer.is_running
    assert [record.getMessage() for record in caplog.records if "already" in record.getMessage()] == [
        f"{consumer.name}: already closed"
    ] * 2


# What programs' tests look at


def test_the_states_of_a_backoff(nsqd, make_consumer):
    consumer = make_consumer(message_handler=lambda consumer, message: None, max_in_flight=50, max_backoff_duration=9)
    start(nsqd, consumer)
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


def test_is_starved_means_that_handlers_hold_what_there_is(nsqd, make_consumer):
    starved = []
    queue = QueueHandler()
    consumer = make_consumer(max_in_flight=4)
    consumer.on_message.connect(queue)

    @consumer.on_message.connect
    def look(consumer, message):
        starved.append(consumer.is_starved)

    conn = start(nsqd, consumer)
    conn.wait_rdy(4)
    conn.push(1, 2, 3, 4)
    until(lambda: len(starved) == 4)
    assert starved[:3] == [False, False, False]
    assert consumer.is_starved
    assert (consumer.total_in_flight, consumer.total_ready_count) == (4, 4)
    for _ in range(4):
        queue.get().finish()
    assert not consumer.is_starved


# Batches, queues, giving up and Sentry, with a consumer as it is and with messages made by hand.


BINARY = b"\xff\x00body"


def message(body: bytes = b"body") -> gnsq.Message:
    return gnsq.Message(7, 2, b"0123456789abcdef", body)


# Queues


@pytest.mark.parametrize("kind", [QueueHandler, ChannelHandler])
def test_a_queue_hands_messages_to_who_iterates_and_leaves_the_answer_to_them(nsqd, make_consumer, kind):
    queue = kind()
    consumer = make_consumer()
    consumer.on_message.connect(queue)
    conn = start(nsqd, consumer)
    conn.push(1, 2)
    taken = [queue.get(timeout=WAIT), queue.get(timeout=WAIT)]
    holds(lambda: conn.answered(b"FIN") == [])
    for each in taken:
        each.finish()
    conn.wait_for(lambda: conn.answered(b"FIN") == [1, 2])


# Batches


@pytest.fixture
def batching(nsqd, make_consumer):
    handlers = []

    def begin(handler, max_in_flight=8):
        handlers.append(handler)
        consumer = make_consumer(max_in_flight=max_in_flight)
        consumer.on_message.connect(handler)
        conn = start(nsqd, consumer)
        conn.wait_rdy(max_in_flight)
        return conn

    yield begin
    for handler in handlers:
        handler.worker.kill()


@pytest.fixture
def warned():
    """The texts of all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(each.message) for each in caught]


def test_a_full_batch_is_handled_together_and_finished(batching):
    batches = []
    conn = batching(BatchHandler(3, lambda batch: batches.append(len(batch))), max_in_flight=100)
    conn.push(*range(6))
    conn.wait_for(lambda: sorted(conn.answered(b"FIN")) == [0, 1, 2, 3, 4, 5])
    assert batches == [3, 3]


def test_a_starved_consumer_ends_a_batch_early_with_a_warning(batching, warned):
    batches = []
    conn = batching(BatchHandler(100, lambda batch: batches.append(len(batch))), max_in_flight=8)
    conn.push(*range(8))
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 8)
    assert batches[0] == 7  # 85 % of what may be in flight
    assert any("starved" in text for text in warned())


def test_a_batch_does_not_wait_longer_than_its_timeout(batching, warned):
    batches = []
    conn = batching(BatchHandler(5, lambda batch: batches.append(len(batch)), timeout=0.05), max_in_flight=100)
    holds(lambda: not warned(), 0.12)  # no message, no batch to wait for, no warning
    conn.push(1, 2)
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 2)
    assert sum(batches) == 2  # a slow machine may take one at a time: its batch waits no longer either
    assert any("timed out" in text for text in warned())


def test_what_fails_in_a_batch_is_requeued_and_told(batching):
    told = []

    def handle_message(each):
        if each.body == b"bad":
            raise KeyError("bad")
        return each.body

    def handle_message_error(error, each):
        told.append((type(error), each.body))
        raise ValueError("the error handler fails too")

    conn = batching(BatchHandler(3, lambda batch: None, handle_message, handle_message_error=handle_message_error), 100)
    conn.push(1, 2)
    conn.push(3, body=b"bad")
    conn.wait_for(lambda: sorted(conn.answered(b"FIN")) == [1, 2] and conn.answered(b"REQ") == [3])
    assert told == [(KeyError, b"bad")]


def test_a_batch_that_fails_is_requeued_whole(batching):
    class Failing(BatchHandler):
        def handle_batch(self, batch):
            batch[0].finish()
            raise KeyError("bad")

        def handle_batch_error(self, error, messages, batch):
            told.append((len(messages), len(batch)))

    told = []
    conn = batching(Failing(3, spawn=1), 100)
    conn.push(1, 2, 3)
    conn.wait_for(lambda: len(conn.answered(b"REQ")) == 2)
    assert conn.answered(b"FIN") == [1]
    assert told == [(3, 3)]


# Giving up


def test_a_message_is_logged_as_text_or_as_bytes_as_the_file_wants_it_or_as_json_whatever_its_body():
    text, binary, lines = io.StringIO(), io.BytesIO(), []
    for file in (text, binary):
        LogGiveupHandler(file.write)(None, message())
        LogGiveupHandler(file.write, newline=";")(None, message(BINARY))
    assert text.getvalue() == "body\n\\xff\x00body;"
    assert binary.getvalue() == b"body\n" + BINARY + b";"
    for body in (b"body", BINARY):
        JSONLogGiveupHandler(lines.append)(None, message(body))
    first, second = map(json.loads, lines)
    assert first == {"timestamp": 7, "attempts": 2, "id": "0123456789abcdef", "body": "body"}
    assert base64.b64decode(second["body_base64"]) == BINARY


def test_a_message_is_published_to_hosts_in_turn(nsq_broker):
    made = []

    class Client(gnsq.NsqdHTTPClient):
        def __init__(self, host):
            made.append(host)
            super().__init__("127.0.0.1", nsq_broker.nsqd.http_address.port)

    handler = NsqdGiveupHandler("graveyard", ["one", "two"], Client)
    handler(None, message())
    assert made == ["one", "two"]
    assert nsq_broker.nsqd.nsqd.existing_topic("graveyard").message_count == 1
    with pytest.raises(ValueError, match="at least one"):
        NsqdGiveupHandler("graveyard", [])


def test_giving_up_writes_and_finishes_unless_the_receiver_fails(nsqd, make_consumer):
    def write(line):
        if line == "full\n":
            raise OSError("the disk is full")
        lines.append(line)

    lines, finished = [], []
    consumer = make_consumer(message_handler=do_nothing)
    handler = LogGiveupHandler(write)
    consumer.on_giving_up.connect(handler)
    consumer.on_finish.connect(lambda sender, message_id: finished.append(message_id), weak=False)
    conn = start(nsqd, consumer)
    conn.push(1, body=b"hopeless", attempts=9)
    conn.push(2, body=b"full", attempts=9)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1] and conn.answered(b"REQ") == [2])
    assert lines == ["hopeless\n"]
    assert finished == [b"%016x" % 1], "as gnsq has it, a message that is given up is finished"


# Sentry


class Sentry:
    """As much of sentry_sdk as is used."""

    def __init__(self):
        self.told = []

    @contextmanager
    def new_scope(self):
        self.told.append([])
        yield self

    def set_context(self, name, value):
        self.told[-1].append((name, value))

    def capture_exception(self, error):
        self.told[-1].append(error)


class Raven:
    """As much of raven as is used."""

    def __init__(self):
        self.told = []

    def captureException(self, exc_info, extra):
        kind, error, traceback = exc_info
        assert kind is type(error)
        assert traceback is error.__traceback__ is not None
        self.told.append([*extra.items(), error])


@pytest.mark.parametrize("client", [Sentry(), Raven()])
def test_an_exception_is_reported_with_its_message(client):
    with pytest.raises(KeyError) as raised:
        raise KeyError("bad")
    error = raised.value
    SentryExceptionHandler(client)(None, message(BINARY), error)
    about = {"id": "0123456789abcdef", "timestamp": 7, "attempts": 2, "body": "\\xff\x00body"}
    assert client.told == [[("message", about), error]]


def test_without_sentry_it_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentry_sdk", None)
    with pytest.raises(ImportError, match="sentry_sdk"):
        SentryExceptionHandler()


# The drop-in producer: gnsq's arguments and errors, and no publish that hangs or poisons a connection.


@pytest.fixture
def producer(nsq_broker):
    producer = gnsq.Producer(str(nsq_broker.nsqd.tcp_address))
    producer.start()
    yield producer
    producer.close()


def test_it_publishes_what_it_is_given(producer, nsq_broker):
    assert producer.publish("topic", data=b"one") == b"OK"
    assert producer.multipublish("topic", messages=(b"%d" % n for n in range(3))) == b"OK"
    results = [producer.publish("topic", b"x", raise_error=False) for _ in range(10)]
    results.append(producer.multipublish("topic", [b"a", b"b"], raise_error=False))
    gevent.joinall(results, raise_error=True)
    assert [result.get() for result in results] == [b"OK"] * 11
    assert nsq_broker.nsqd.nsqd.existing_topic("topic").message_count == 16


def test_attributes_of_the_producer_have_gnsqs_names():
    producer = gnsq.Producer("host", 7, timeout=3)
    assert producer.nsqd_tcp_addresses == {"host:4150"}
    assert producer.max_backoff_duration == 7
    assert producer.conn_kwargs == {"timeout": 3}
    assert producer.connection_config.connect_timeout == 3
    assert not producer.is_running


def test_a_refused_publish_raises_the_servers_error_and_ours(nsqd):
    nsqd.replies[b"PUB"] = lambda conn, command: conn.send(frame(1, b"E_BAD_TOPIC no such name"))
    producer = gnsq.Producer(str(nsqd.address))
    producer.start()
    with pytest.raises(NSQBadTopic, match="no such name") as caught:
        producer.publish("topic", b"x")
    assert isinstance(caught.value, nsq_fast.errors.PublishFailed)
    assert type(caught.value.__cause__) is NSQBadTopic
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, NSQBadTopic)
    assert str(again) == str(caught.value)
    result = producer.publish("topic", b"x", raise_error=False)
    with pytest.raises(NSQBadTopic):
        result.get(timeout=WAIT)
    assert isinstance(result.exception, NSQBadTopic)
    producer.close()


def test_what_is_wrong_with_a_publish_is_said_and_harms_no_other(producer):
    assert producer.publish("topic", b"x") == b"OK"
    with pytest.raises(ValueError, match="topic"):
        producer.publish("no topic", b"x")
    with pytest.raises(TypeError, match="str"):
        producer.publish("topic", "text")
    with pytest.raises(NSQInvalid):
        producer.publish("topic", b"x", defer=-1000)
    assert producer.publish("topic", b"x", defer=1000, timeout=WAIT) == b"OK"


def test_a_body_that_no_server_takes_raises_what_the_server_would_say(producer):
    for body in (b"", b"x" * (1 << 20) + b"x"):
        with pytest.raises(NSQBadMessage) as caught:
            producer.publish("topic", body)
        assert isinstance(caught.value, BodyInvalid)
        with pytest.raises(NSQBadMessage):
            producer.multipublish("topic", [b"x", body])
        promises = [
            producer.publish("topic", body, raise_error=False),
            producer.multipublish("topic", [body], raise_error=False),
        ]
        for promise in promises:
            with pytest.raises(NSQBadMessage):
                promise.get(timeout=WAIT)
    assert producer.publish("topic", b"x") == b"OK"


def test_before_its_start_and_after_its_end_it_raises():
    producer = gnsq.Producer("127.0.0.1:1")
    with pytest.raises(NSQException, match="not running"):
        producer.publish("topic", b"x")
    producer.close()
    with pytest.raises(NSQException, match="closed"):
        producer.start()


def test_no_connection_raises_and_never_hangs(closed_port, nsq_broker):
    producer = gnsq.Producer(f"127.0.0.1:{closed_port}")
    producer.start()
    for options in ({"block": False}, {"timeout": 0}, {"timeout": 0.05}):
        with promptly(), pytest.raises(NSQNoConnections):
            producer.publish("topic", b"x", **options)
    with promptly(), pytest.raises(NSQNoConnections):
        producer.publish("topic", b"x", timeout=0.05, raise_error=False).get()
    producer.connect_to_nsqd(*nsq_broker.nsqd.tcp_address)  # one more can be published to while it runs
    assert producer.publish("topic", b"x", timeout=WAIT) == b"OK"
    producer.close()


def test_a_producer_that_was_started_publishes_without_waiting(nsq_broker, closed_port):
    """gnsq's start returns when each nsqd is connected, or could not be (gnsq/producer.py, connect_to_nsqd)."""
    producer = gnsq.Producer([str(nsq_broker.nsqd.tcp_address), f"127.0.0.1:{closed_port}"])
    producer.start()
    assert producer.publish("topic", b"x", block=False) == b"OK"
    assert producer.publish("topic", b"x", timeout=0) == b"OK"
    producer.close()
