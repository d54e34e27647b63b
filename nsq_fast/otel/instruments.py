"""Spans and metrics as OpenTelemetry's conventions for messaging have them: names, kinds and attributes.

https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/, and messaging-metrics, of version 1.27.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider, get_meter
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider, get_tracer, use_span

from nsq_fast._version import __version__
from nsq_fast.errors import RequeueMessage

LIBRARY = "nsq_fast"
TYPES = {"publish": "send", "receive": "receive", "process": "process"}
"""What is done, as NSQ calls it -> as the conventions do."""

KINDS = {"publish": SpanKind.PRODUCER, "receive": SpanKind.CLIENT, "process": SpanKind.CONSUMER}

Attributes = dict[str, Any]


class Instruments:
    """Makes spans, and counts.

    Args:
        tracer_provider, meter_provider: None: those that the program has set.
    """

    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        self._tracer = get_tracer(LIBRARY, __version__, tracer_provider)
        meter = get_meter(LIBRARY, __version__, meter_provider)
        self._sent = meter.create_counter("messaging.client.sent.messages", "{message}", "Messages published.")
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages handed to the program."
        )
        self._published = meter.create_histogram("messaging.client.operation.duration", "s", "What publishes took.")
        self._processed = meter.create_histogram("messaging.process.duration", "s", "What handlers took.")

    def span(
        self,
        operation: str,
        topic: str,
        attributes: Attributes,
        *,
        parent: Context | None = None,
        links: Sequence[Link] = (),
        start_time: int | None = None,
    ) -> Span:
        """Begin a span; ``start_time`` in ns since the epoch, None: now."""
        return self._tracer.start_span(
            f"{operation} {topic}",
            context=parent,
            kind=KINDS[operation],
            attributes={**described(operation, topic), **attributes},
            links=list(links),
            start_time=start_time,
        )

    @contextmanager
    def processing(
        self, topic: str, attributes: Attributes, count: int, parent: Context | None, links: Sequence[Link]
    ) -> Iterator[Span]:
        """The span in which messages are processed is the current one; what is raised in it ends it."""
        span, began = self.span("process", topic, attributes, parent=parent, links=links), monotonic()
        common = described("process", topic)
        self._consumed.add(count, common)
        try:
            with use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
                yield span
        except BaseException as error:
            common |= failed(span, error)
            raise
        finally:
            span.end()
            self._processed.record(monotonic() - began, common)

    def received(self, topic: str, attributes: Attributes, links: Sequence[Link], start_time: int) -> None:
        """A message was handed to a program that iterates."""
        self.span("receive", topic, attributes, links=links, start_time=start_time).end()
        self._consumed.add(1, described("receive", topic))

    def published(self, span: Span, topic: str, count: int, seconds: float, error: BaseException | None) -> None:
        """A publish has ended, and its span ends with it."""
        common = described("publish", topic)
        if error is not None:
            common |= failed(span, error)
            if getattr(error, "possibly_stored", False):
                span.set_attribute("nsq.possibly_stored", True)
        span.end()
        self._sent.add(count, common)
        self._published.record(seconds, common)


def described(operation: str, topic: str) -> Attributes:
    """What spans and metrics have in common."""
    return {
        "messaging.system": "nsq",
        "messaging.operation.name": operation,
        "messaging.operation.type": TYPES[operation],
        "messaging.destination.name": topic,
    }


def failed(span: Span, error: BaseException) -> Mapping[str, Any]:
    """Note on a span what was raised; returns the attribute for metrics. To ask for a requeue is no failure."""
    if isinstance(error, RequeueMessage):
        span.set_attribute("nsq.requeued", True)
        return {}
    kind = type(error).__qualname__
    span.record_exception(error)
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, str(error)))
    return {"error.type": kind}
