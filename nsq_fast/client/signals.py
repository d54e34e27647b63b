"""Signals that cost nothing until somebody connects to them.

A ``LazySignal`` in a class body gives each instance a blinker signal of its
own, made when the attribute is first read. ``emit`` sends it; on a fast path
the sender asks ``is_heard`` once for many events.
"""

from __future__ import annotations

import logging
from _thread import get_ident
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, overload

from nsq_fast._codec import Message
from nsq_fast._lazy import get_logger
from nsq_fast.log_events import RECEIVER_FAILED

if TYPE_CHECKING:
    import blinker

logger: logging.Logger = get_logger(__name__)

_emitting: set[Any] = set()  # greenlets that are calling receivers

caller: Callable[[], object] = get_ident
"""Who calls, where a receiver may wait: gevent's side of the port puts ``getcurrent`` here. A receiver on asyncio
cannot wait for what has called it."""


class LazySignal:
    """A blinker signal as an attribute: ``consumer.on_error.connect(receiver)``. The sender is the instance."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> LazySignal: ...

    @overload
    def __get__(self, instance: object, owner: type) -> blinker.Signal: ...

    def __get__(self, instance: object | None, owner: type) -> LazySignal | blinker.Signal:
        if instance is None:
            return self
        import blinker

        signal = blinker.Signal(doc=self.__doc__)
        instance.__dict__[self._name] = signal  # found before this descriptor from now on
        return signal


def is_heard(sender: object, name: str) -> bool:
    """Whether anybody is connected to the signal ``name`` of ``sender``."""
    signal = sender.__dict__.get(name)
    return signal is not None and bool(signal.receivers)


def emit(sender: object, name: str, **values: Any) -> None:
    """Call the receivers of a signal. One that raises is logged and harms neither the others nor the caller."""
    send(sender.__dict__.get(name), name, sender, values)


def send(signal: blinker.Signal | None, name: str, sender: object, values: dict[str, Any]) -> None:
    """As ``emit``, for a signal that is not an attribute of its sender; None when nobody asked for it."""
    if signal is None or not signal.receivers:
        return
    current = caller()
    is_outermost = current not in _emitting
    _emitting.add(current)
    try:
        for receiver in receivers(signal, sender):
            _call(receiver, sender, name, values)
    finally:
        if is_outermost:
            _emitting.discard(current)


def receivers(signal: blinker.Signal, sender: object) -> list[Callable[..., Any]]:
    """Whom to call now; nobody while the signal is muted."""
    return [] if signal.is_muted else list(signal.receivers_for(sender))


def _call(receiver: Callable[..., Any], sender: object, name: str, values: dict[str, Any]) -> None:
    try:
        receiver(sender, **values)
    except Exception:
        logger.exception("a receiver of %s failed: %r", name, receiver, extra=RECEIVER_FAILED)


def is_emitting() -> bool:
    """Whether the caller is, however deep, a receiver of a signal: it must not wait for what sent it."""
    return caller() in _emitting


# Signals of single messages, as gnsq has them: ``message.on_finish``, ``on_requeue``, ``on_touch``.
#
# Hardly any program uses them, so messages know nothing of them: the responder of a message (its connection) keeps
# those that somebody asked for, until the message is answered. The sender is the message.


class MessageSignals:
    """The signals of one message."""

    on_finish: LazySignal = LazySignal("on_finish(): a FIN was queued")
    on_requeue: LazySignal = LazySignal("on_requeue(timeout, backoff): a REQ was queued; timeout in ms")
    on_touch: LazySignal = LazySignal("on_touch(): a TOUCH was queued")

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
