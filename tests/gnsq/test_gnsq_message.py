"""gnsq.Message: anything may be id and body, answers go to its signals, and what a consumer gets is one too."""

from __future__ import annotations

import pytest

from nsq_fast import Message as CoreMessage
from nsq_fast import gnsq


def heard_by(message):
    heard = []

    def listen(name):
        def receive(sender, **values):
            heard.append((name, sender is message, values))

        getattr(message, name).connect(receive, weak=False)

    for name in ("on_finish", "on_requeue", "on_touch"):
        listen(name)
    return heard


def test_it_keeps_what_it_was_made_of():
    message = gnsq.Message(1, 2, "id", "text")
    assert (message.timestamp, message.attempts, message.id, message.body) == (1, 2, "id", "text")
    assert not message.has_responded()
    assert not message.is_async()
    message.enable_async()
    assert message.is_async()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda message: message.finish(), ("on_finish", True, {})),
        (lambda message: message.requeue(), ("on_requeue", True, {"timeout": 0, "backoff": True})),
        (lambda message: message.requeue(9, backoff=False), ("on_requeue", True, {"timeout": 9, "backoff": False})),
    ],
)
def test_it_is_answered_once(answer, expected):
    message = gnsq.Message(1, 2, "id", "text")
    heard = heard_by(message)
    message.touch()
    answer(message)
    assert message.has_responded()
    for again in (message.finish, message.requeue, message.touch):
        with pytest.raises(gnsq.errors.NSQException):
            again()
    assert heard == [("on_touch", True, {}), expected]


def test_what_a_consumer_hands_over_is_an_instance():
    assert isinstance(CoreMessage(1, 1, b"0" * 16, b"body"), gnsq.Message)
    assert isinstance(gnsq.Message(1, 1, "id", "body"), CoreMessage)
    assert not isinstance("message", gnsq.Message)
