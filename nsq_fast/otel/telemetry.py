"""Telemetry: what a program hands its producers and handlers to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from nsq_fast.errors import ConfigError

try:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.propagate import get_global_textmap
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import TracerProvider
except ImportError as error:
    raise ImportError("nsq_fast.otel needs opentelemetry-api: pip install 'nsq-fast[otel]'") from error

from .carriers import WRAPPINGS
from .instruments import Instruments
from .processing import Processing
from .publishing import METHODS, Publishing

P = TypeVar("P")
H = TypeVar("H", bound=Callable[..., Any])


class Telemetry:
    """Spans and metrics for producers and handlers of ``nsq_fast``, ``nsq_fast.threads`` and ``nsq_fast.aio``.

    Args:
        context: how the context of a publish gets to who processes its message. ``"headers"``: in extended headers,
            of redesigned topics with ``extend``. ``"envelope"``: in front of the body, for all servers; every consumer
            of the topic must know of it. None: it does not; spans of consumers then have no parent.
        trace_id: whether the lower 64 bits of a span's trace id become the redesigned trace id of its message. Needs
            servers with partitions; publishes return receipts then.
        tracer_provider, meter_provider, propagator: None: those that the program has set.

    Raises ConfigError for a ``context`` that is none of these.
    """

    def __init__(
        self,
        context: str | None = None,
        *,
        trace_id: bool = False,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        propagator: TextMapPropagator | None = None,
    ) -> None:
        if context not in WRAPPINGS:
            raise ConfigError(f"context={context!r}: must be 'headers', 'envelope' or None")
        instruments = Instruments(tracer_provider, meter_provider)
        propagator = propagator or get_global_textmap()
        self._publishing = Publishing(instruments, propagator, WRAPPINGS[context], trace_id)
        self._processing = Processing(instruments, propagator, WRAPPINGS[context])

    def instrument(self, producer: P) -> P:
        """Have each publish of a producer make a span; returns the producer.

        A publish that returns at once has its span end when its result is there. A batch has one span.

        Raises ConfigError when it is no producer, or was instrumented before.
        """
        if not all(hasattr(producer, name) for name in METHODS) or isinstance(producer, type):
            raise ConfigError(f"{producer!r} is no Producer: instrument takes those of nsq_fast, .threads and .aio")
        if METHODS[0] in vars(producer):
            raise ConfigError(f"{producer!r} was instrumented before: each publish would make two spans")
        self._publishing.instrument(producer)
        return producer

    def handler(self, handler: H) -> H:
        """A ``message_handler`` that makes a span of each call, as which a coroutine function stays one.

        The span is a child of the one that published the message, and linked to it. What the handler raises ends it
        as an error, but for RequeueMessage. It is the current span while the handler runs.
        """
        return self._processing.around(handler, is_batch=False)  # type: ignore[return-value]

    def batch_handler(self, handler: H) -> H:
        """A ``batch_handler`` that makes a span of each call, linked to all that published its messages."""
        return self._processing.around(handler, is_batch=True)  # type: ignore[return-value]

    def receive(self, consumer: Any) -> Iterator[Any] | AsyncIterator[Any]:
        """The messages of a consumer that is iterated, by ``for`` or, of ``nsq_fast.aio``, by ``async for``.

        Each makes a span of its receipt. Use ``process`` in the body of the loop.
        """
        return self._processing.receive(consumer)

    def process(self, consumer: Any, message: Any) -> AbstractContextManager[Any]:
        """``with telemetry.process(consumer, message) as message``: a span, as ``handler`` makes one.

        What it gives is the message without its envelope, if it has one.
        """
        return self._processing.message(consumer, message)
