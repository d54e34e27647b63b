"""Signals of single messages: heard once, when the answer is queued, however the message was answered."""

from __future__ import annotations

import pytest

from nsq_fast import Message
from nsq_fast.errors import RequeueMessage


def listen(message, heard):
    def receiver(name):
        def receive(sender, **values):
            assert sender is message
            heard.append((name, message.body, values))

        return receive

    for name in ("on_finish", "on_requeue", "on_touch"):
        getattr(message, name).connect(receiver(name), weak=False)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda message: None, [("on_finish", {})]),
        (lambda message: message.finish(), [("on_finish", {})]),
        (lambda message: message.requeue(7, backoff=False), [("on_requeue", {"timeout": 7, "backoff": False})]),
        (lambda message: message.touch(), [("on_touch", {}), ("on_finish", {})]),
    ],
)
def test_the_receivers_of_a_message_hear_its_answer_and_no_other(nsqd, consume, answer, expected):
    heard = []

    def handler(consumer, message):
        if message.body == b"listened to":
            listen(message, heard)
        answer(message)

    consume(handler, max_in_flight=4)
    conn = nsqd.connection()
    conn.push(1)
    conn.push(2, body=b"listened to")
    conn.push(3)
    conn.wait_for(lambda: len(conn.answered(b"FIN")) + len(conn.answered(b"REQ")) == 3)
    assert heard == [(name, b"listened to", values) for name, values in expected]


def test_a_message_that_a_handler_fails_on_tells_of_its_requeue(nsqd, consume):
    heard = []

    def handler(consumer, message):
        listen(message, heard)
        raise RequeueMessage(0.25, backoff=False)

    consume(handler, max_in_flight=4)
    conn = nsqd.connection()
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"REQ") == [1])
    assert [(name, values) for name, _, values in heard] == [("on_requeue", {"timeout": 250, "backoff": False})]


def test_a_message_without_a_connection_has_no_signals():
    with pytest.raises(AttributeError):
        _ = Message(1, 1, b"0" * 16, b"body").on_finish
