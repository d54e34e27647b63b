"""Batches, queues, giving up and Sentry, with a consumer as it is and with messages made by hand."""

from __future__ import annotations

import base64
import io
import json
import warnings
from contextlib import contextmanager

import gevent
import pytest
from support.waiting import WAIT, holds, until

from nsq_fast import gnsq
from nsq_fast.gnsq.contrib import (
    BatchHandler,
    ChannelHandler,
    JSONLogGiveupHandler,
    LogGiveupHandler,
    NsqdGiveupHandler,
    QueueHandler,
    SentryExceptionHandler,
)

BINARY = b"\xff\x00body"


def message(body: bytes = b"body") -> gnsq.Message:
    return gnsq.Message(7, 2, b"0123456789abcdef", body)


# Queues


@pytest.mark.parametrize("kind", [QueueHandler, ChannelHandler])
def test_a_queue_hands_messages_to_who_iterates_and_leaves_the_answer_to_them(scripted, make_consumer, kind):
    queue = kind()
    consumer = make_consumer()
    consumer.on_message.connect(queue)
    consumer.start(block=False)
    conn = scripted.connection()
    conn.push(1, 2)
    taken = [queue.get(timeout=WAIT), queue.get(timeout=WAIT)]
    holds(lambda: conn.answered(b"FIN") == [])
    for each in taken:
        each.finish()
    conn.wait_for(lambda: conn.answered(b"FIN") == [1, 2])


# Batches


@pytest.fixture
def batching(scripted, make_consumer):
    handlers = []

    def start(handler, max_in_flight=8):
        handlers.append(handler)
        consumer = make_consumer(max_in_flight=max_in_flight)
        consumer.on_message.connect(handler)
        consumer.start(block=False)
        scripted.connection().wait_rdy(max_in_flight)
        return scripted.connection()

    yield start
    for handler in handlers:
        handler.worker.kill()


def bodies(batch):
    return [each.body for each in batch]


def test_a_full_batch_is_handled_together_and_finished(batching):
    batches = []
    conn = batching(BatchHandler(3, lambda batch: batches.append(bodies(batch))), max_in_flight=100)
    conn.push(*range(6))
    conn.wait_for(lambda: sorted(conn.answered(b"FIN")) == [0, 1, 2, 3, 4, 5])
    assert batches == [[b"body"] * 3] * 2


def test_a_starved_consumer_ends_a_batch_early_with_a_warning(batching):
    batches = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        conn = batching(BatchHandler(100, lambda batch: batches.append(len(batch))), max_in_flight=8)
        conn.push(*range(8))
        conn.wait_for(lambda: len(conn.answered(b"FIN")) == 8)
    assert batches[0] == 7  # 85 % of what may be in flight
    assert any("starved" in str(each.message) for each in caught)


def test_a_batch_does_not_wait_longer_than_its_timeout(batching):
    batches = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handler = BatchHandler(5, lambda batch: batches.append(len(batch)), timeout=0.05)
        conn = batching(handler, max_in_flight=100)
        holds(lambda: not caught, 0.12)  # no message, no batch to wait for, no warning
        conn.push(1, 2)
        conn.wait_for(lambda: len(conn.answered(b"FIN")) == 2)
    assert sum(batches) == 2  # a slow machine may take one at a time: its batch waits no longer either
    assert any("timed out" in str(each.message) for each in caught)


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


def test_a_message_is_logged_as_text_or_as_bytes_as_the_file_wants_it():
    text, binary = io.StringIO(), io.BytesIO()
    for file in (text, binary):
        LogGiveupHandler(file.write)(None, message())
        LogGiveupHandler(file.write, newline=";")(None, message(BINARY))
    assert text.getvalue() == "body\n\\xff\x00body;"
    assert binary.getvalue() == b"body\n" + BINARY + b";"


def test_a_message_is_logged_as_json_whatever_its_body():
    lines = []
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


def test_giving_up_writes_and_finishes(scripted, make_consumer):
    lines = []
    consumer = make_consumer(message_handler=print)
    handler = LogGiveupHandler(lines.append)
    consumer.on_giving_up.connect(handler)
    finished = []
    consumer.on_finish.connect(lambda sender, message_id: finished.append(message_id), weak=False)
    consumer.start(block=False)
    conn = scripted.connection()
    conn.push(1, body=b"hopeless", attempts=9)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])
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


def test_without_sentry_it_says_what_is_missing():
    try:
        import sentry_sdk  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="sentry_sdk"):
            SentryExceptionHandler()


def test_a_queue_of_a_closing_consumer_gives_its_messages_back(scripted, make_consumer):
    queue = QueueHandler()
    consumer = make_consumer()
    consumer.on_message.connect(queue)
    consumer.start(block=False)
    conn = scripted.connection()
    conn.push(1)
    until(lambda: queue.qsize() == 1)
    closing = gevent.spawn(consumer.close, timeout=5)
    queue.get().finish()
    closing.get()
    assert conn.answered(b"FIN") == [1]
