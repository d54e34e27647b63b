"""Message: made by a program or by an NsqdTCPClient. A Consumer's messages count as instances of it.

A consumer's messages are the compiled core's, which carry the same methods and
signals; ``isinstance(message, gnsq.Message)`` is true of both.
"""

from __future__ import annotations

from typing import Any

from nsq_fast import _codec
from nsq_fast.client.signals import MessageSignals, SignalBook


class Unconnected:
    """The responder of a message that belongs to no connection: it sends signals, and nothing to a server."""

    def __init__(self) -> None:
        self._signals = SignalBook()

    def finish(self, message: _codec.Message) -> None:
        self._signals.finished((message,))

    def requeue(self, message: _codec.Message, time_ms: int | None = None, backoff: bool = True) -> None:
        self._signals.requeued(message, time_ms or 0, backoff)

    def touch(self, message: _codec.Message) -> None:
        self._signals.touched(message)

    def signals_of(self, message: _codec.Message) -> MessageSignals:
        return self._signals.of(message)


class _AnyMessage(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _codec.Message)


_NO_ID = bytes(_codec.MESSAGE_ID_SIZE)


class Message(_codec.Message, metaclass=_AnyMessage):
    """A message with ``id`` and ``body`` as they were given, of whatever type and length they are."""

    def __init__(self, timestamp: int, attempts: int, id: Any, body: Any) -> None:
        super().__init__(timestamp, attempts, _NO_ID, b"", responder=Unconnected())
        self._given_id = id
        self._given_body = body

    @property
    def id(self) -> Any:
        """What FIN, REQ and TOUCH send back."""
        return self._given_id

    @property
    def body(self) -> Any:
        """What was published."""
        return self._given_body
