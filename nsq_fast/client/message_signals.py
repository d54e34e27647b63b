"""Signals of single messages, as gnsq has them: ``message.on_finish``, ``on_requeue``, ``on_touch``.

Hardly any program uses them, so messages know nothing of them: the responder
of a message (its connection) keeps those that somebody asked for, until the
message is answered. The sender is the message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nsq_fast._codec import Message

from .signals import LazySignal, send


class MessageSignals:
    """The signals of one message."""

    on_finish = LazySignal("on_finish(): a FIN was queued")
    on_requeue = LazySignal("on_requeue(timeout, backoff): a REQ was queued; timeout in ms")
    on_touch = LazySignal("on_touch(): a TOUCH was queued")

    def __init__(self, message: Message) -> None:
        self.message = message

    def send(self, name: str, **values: Any) -> None:
        """Tell the receivers of the signal ``name``."""
        send(self.__dict__.get(name), name, self.message, values)


class SignalBook:
    """The signals of those messages of one responder for which somebody asked.

    Attributes:
        entries: by the id() of the message; empty when nobody asked.
    """

    def __init__(self) -> None:
        self.entries: dict[int, MessageSignals] = {}

    def of(self, message: Message) -> MessageSignals:
        """The signals of a message, kept until it is answered."""
        entry = self.entries.get(id(message))  # the entry holds the message, so its id is not used again
        if entry is None:
            entry = self.entries[id(message)] = MessageSignals(message)
        return entry

    def finished(self, messages: Iterable[Message]) -> None:
        """The FINs of these messages are queued."""
        for message in messages:
            self._end(message, "on_finish")

    def requeued(self, message: Message, time_ms: int, backoff: bool) -> None:
        """The REQ of a message is queued."""
        self._end(message, "on_requeue", timeout=time_ms, backoff=backoff)

    def touched(self, message: Message) -> None:
        """The TOUCH of a message is queued."""
        entry = self.entries.get(id(message))
        if entry is not None:
            entry.send("on_touch")

    def _end(self, message: Message, name: str, **values: Any) -> None:
        entry = self.entries.pop(id(message), None)
        if entry is not None:
            entry.send(name, **values)
