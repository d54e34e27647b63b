"""Spans of publishes: the methods of one producer, around which they are put."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from time import monotonic
from typing import Any

from gevent.event import AsyncResult
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import Span, set_span_in_context

from .carriers import Wrapping, of_batch
from .instruments import Instruments

METHODS = ("publish", "publish_nowait", "multipublish")
LARGEST_ID = 2**64 - 1
"""Of a redesigned trace id, which has half the bits of OpenTelemetry's; 0 is none."""


class Publishing:
    """Puts a span around each publish of the producers that it is shown.

    Args:
        wrapping: how context travels.
        gives_trace_id: whether the trace id of a span becomes that of its message.
    """

    def __init__(
        self, instruments: Instruments, propagator: TextMapPropagator, wrapping: Wrapping, gives_trace_id: bool
    ) -> None:
        self._instruments = instruments
        self._propagator = propagator
        self._wrapping = wrapping
        self._gives_trace_id = gives_trace_id

    def instrument(self, producer: Any) -> None:
        """Replace the methods of this producer, and of no other."""
        for name in METHODS:
            setattr(producer, name, self._around(getattr(producer, name), is_batch=name == "multipublish"))

    def _around(self, method: Callable[..., Any], is_batch: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def publish(topic: str, body: Any, *arguments: Any, **options: Any) -> Any:
            ended, call = self._begin(method, topic, body, arguments, options, is_batch)
            try:
                result = call()
            except BaseException as error:
                ended(error)
                raise
            if isinstance(result, AsyncResult):
                result.rawlink(lambda each: ended(each.exception))
            elif hasattr(result, "add_done_callback"):
                result.add_done_callback(lambda each: ended(_error_of(each)))
            else:
                ended(None)
            return result

        @functools.wraps(method)
        async def publish_and_wait(topic: str, body: Any, *arguments: Any, **options: Any) -> Any:
            ended, call = self._begin(method, topic, body, arguments, options, is_batch)
            try:
                result = await call()
            except BaseException as error:
                ended(error)
                raise
            ended(None)
            return result

        return publish_and_wait if inspect.iscoroutinefunction(method) else publish

    def _begin(
        self,
        method: Callable[..., Any],
        topic: str,
        body: Any,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        is_batch: bool,
    ) -> tuple[Callable[[BaseException | None], None], Callable[[], Any]]:
        """Begin a span. Returns what ends it, and the call that it is about, which may give an awaitable."""
        if is_batch:
            body = of_batch(body)
        count = len(body) if is_batch and isinstance(body, list) else 1
        span, began = self._span(str(topic), body, count if is_batch else None, options), monotonic()
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        if carrier:
            wrapped, headers = self._wrapping.wrap(body, options.get("headers"), carrier)
            body, options = wrapped, options if headers is None else {**options, "headers": headers}
        trace_id = span.get_span_context().trace_id & LARGEST_ID
        if self._gives_trace_id and trace_id and options.get("trace_id") is None:
            options = {**options, "trace_id": trace_id}

        def ended(error: BaseException | None) -> None:
            self._instruments.published(span, str(topic), count, monotonic() - began, error)

        return ended, functools.partial(method, topic, body, *arguments, **options)

    def _span(self, topic: str, body: Any, count: int | None, options: dict[str, Any]) -> Span:
        attributes: dict[str, Any] = {}
        if count is not None:
            attributes["messaging.batch.message_count"] = count
        elif isinstance(body, (bytes, bytearray, memoryview)):
            attributes["messaging.message.body.size"] = len(body)
        if options.get("partition") is not None:
            attributes["messaging.destination.partition.id"] = str(options["partition"])
        return self._instruments.span("publish", topic, attributes)


def _error_of(future: Any) -> BaseException | None:
    """What a Future has ended with."""
    try:
        error: BaseException | None = future.exception()
    except BaseException as cancelled:
        return cancelled
    return error
