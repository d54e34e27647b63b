"""What OpenTelemetry's SDK exports, kept in memory, and what is asked of spans."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nsq_fast.otel import Telemetry

from .waiting import until


class Exported:
    """An SDK of its own, and what it exports."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.tracer_provider.get_tracer("test")
        self._reader = InMemoryMetricReader()
        self._meter_provider = MeterProvider([self._reader])

    def telemetry(self, context: str | None = None, **options: Any) -> Telemetry:
        return Telemetry(context, tracer_provider=self.tracer_provider, meter_provider=self._meter_provider, **options)

    def spans(self, name: str) -> list[ReadableSpan]:
        """Those of this name that have ended."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def span(self, name: str) -> ReadableSpan:
        """The one of this name, as soon as it has ended."""
        (span,) = until(lambda: self.spans(name), about=lambda: self._exporter.get_finished_spans())
        return span

    def metrics(self) -> dict[str, dict[str, float]]:
        """Name -> operation -> sum of a counter, or count of a histogram."""
        data = self._reader.get_metrics_data()
        found: dict[str, dict[str, float]] = {}
        for metric in (
            each for resource in data.resource_metrics for scope in resource.scope_metrics for each in scope.metrics
        ):
            for point in metric.data.data_points:
                operation = point.attributes["messaging.operation.name"]
                value = getattr(point, "count", None) or getattr(point, "value", 0)
                found.setdefault(metric.name, {}).setdefault(operation, 0)
                found[metric.name][operation] += value
        return found


def ids(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def links(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def parent(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def check_process(published: ReadableSpan, processed: ReadableSpan) -> None:
    """The one is the parent of the other, and linked."""
    assert ids(processed)[0] == ids(published)[0]
    assert parent(processed) == ids(published)[1]
    assert links(processed) == [ids(published)]
