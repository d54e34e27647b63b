"""Spans of what is consumed: of handlers, and of messages that a program takes by itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from time import monotonic, time_ns
from typing import Any

from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import Link, get_current_span

from .carriers import Wrapping
from .instruments import Instruments


class Processing:
    """Puts spans around handlers. Arguments are those of ``Publishing``."""

    def __init__(self, instruments: Instruments, propagator: TextMapPropagator, wrapping: Wrapping) -> None:
        self._instruments = instruments
        self._propagator = propagator
        self._wrapping = wrapping

    def around(self, handler: Callable[..., Any], is_batch: bool) -> Callable[..., Any]:
        """The handler of a consumer, with a span around each call."""
        begin = self.batch if is_batch else self.message

        @functools.wraps(handler)
        def handle(consumer: Any, item: Any) -> Any:
            with begin(consumer, item) as opened:
                return handler(consumer, opened)

        @functools.wraps(handler)
        async def handle_and_wait(consumer: Any, item: Any) -> Any:
            with begin(consumer, item) as opened:
                return await handler(consumer, opened)

        return handle_and_wait if _is_coroutine_function(handler) else handle

    @contextmanager
    def message(self, consumer: Any, message: Any) -> Iterator[Any]:
        """A span for one message: a child of the one that published it, where that is known, and linked to it."""
        opened, carrier = self._wrapping.unwrap(message)
        parent = self._propagator.extract(carrier) if carrier else None
        links = [] if parent is None else _links(parent)
        attributes = _described(consumer, message, opened)
        with self._instruments.processing(_topic(consumer, message), attributes, 1, parent, links):
            yield opened

    @contextmanager
    def batch(self, consumer: Any, messages: list[Any]) -> Iterator[list[Any]]:
        """A span for a list of messages, linked to those that published them."""
        pairs = [self._wrapping.unwrap(message) for message in messages]
        links = [link for _, carrier in pairs if carrier for link in _links(self._propagator.extract(carrier))]
        attributes = {**_subscription(consumer), "messaging.batch.message_count": len(messages)}
        topic = _topic(consumer, messages[0]) if messages else str(consumer.topic)
        with self._instruments.processing(topic, attributes, len(messages), None, links):
            yield [opened for opened, _ in pairs]

    def receive(self, consumer: Any) -> Iterator[Any] | AsyncIterator[Any]:
        """The messages of a consumer that is iterated, with a span for the receipt of each."""
        return self._receive_later(consumer) if hasattr(consumer, "__aiter__") else self._receive(consumer)

    def _receive(self, consumer: Any) -> Iterator[Any]:
        for message in consumer:
            yield self._received(consumer, message)

    async def _receive_later(self, consumer: Any) -> AsyncIterator[Any]:
        async for message in consumer:
            yield self._received(consumer, message)

    def _received(self, consumer: Any, message: Any) -> Any:
        """From when it came to now. The span is linked to the one that published the message."""
        opened, carrier = self._wrapping.unwrap(message)
        links = _links(self._propagator.extract(carrier)) if carrier else []
        waited = max(0.0, monotonic() - message.received_at) if message.received_at else 0.0
        attributes = _described(consumer, message, opened)
        self._instruments.received(_topic(consumer, message), attributes, links, time_ns() - int(1e9 * waited))
        return opened


def _is_coroutine_function(handler: Any) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(type(handler), "__call__", None))  # noqa: B004


def _topic(consumer: Any, message: Any) -> str:
    """Its own: a consumer may have several."""
    return str(message.topic or consumer.topic)


def _links(context: Any) -> list[Link]:
    published_by = get_current_span(context).get_span_context()
    return [Link(published_by)] if published_by.is_valid else []


def _subscription(consumer: Any) -> dict[str, Any]:
    return {"messaging.destination.subscription.name": str(consumer.channel)}


def _described(consumer: Any, message: Any, opened: Any) -> dict[str, Any]:
    attributes = {
        **_subscription(consumer),
        "messaging.message.id": _name(message.id),
        "messaging.message.body.size": len(opened.body),
        "nsq.message.attempts": message.attempts,
    }
    if message.partition is not None:
        attributes["messaging.destination.partition.id"] = str(message.partition)
    return attributes


def _name(message_id: bytes) -> str:
    """In letters: as it is where it is plain, in hex otherwise."""
    text = message_id.decode("ascii", "replace")
    return text if text.isalnum() and text.isascii() else message_id.hex()
