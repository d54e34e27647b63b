"""The figures of streams that read NSQ, for Prometheus: in the driver, from what Spark tells after each batch.

spark.streams.addListener(nsq_fast.spark.MetricsListener())
prometheus_client.start_http_server(8000)
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from pyspark.sql.streaming.listener import StreamingQueryListener

_PREFIX = "nsq_fast_spark_"
_COUNTERS = {
    "batches": "Micro-batches that are done.",
    "rows": "Rows of these batches.",
    "failures": "Times that the query has ended with an error.",
}
_GAUGES = {
    "running": "1 while the query runs.",
    "batch_seconds": "What the last batch took.",
    "batch_timestamp_seconds": "When Spark last told of a batch.",
    "backlog_messages": "Journalled: messages in the channel when the last batch was planned, by nsqd or partition.",
    "backlog_bytes": "Replayable: bytes of the logs in no batch yet when the last one was planned, by partition.",
    "bytes_per_second": "What was read, over the last minute or more.",
    "lookup_age_seconds": "Since when no server has answered.",
    "unknown_topics": "Topics of which no server has been heard.",
    "journal_bytes": "Journalled: room that batches take.",
    "journal_age_seconds": "Journalled: how long the oldest batch has waited for Spark to commit it.",
}
_OF_SOURCE = {
    "bytes_per_second": "bytesPerSecond",
    "lookup_age_seconds": "lookupAgeSeconds",
    "journal_bytes": "journalBytes",
    "journal_age_seconds": "journalAgeSeconds",
}
Places = dict[tuple[str, str], float]
"""Values by source of the query and place in it: both empty for what is the query's."""


class MetricsListener(StreamingQueryListener):
    """Give it to ``spark.streams.addListener``. ``registry``: where Prometheus reads; a registry takes one.

    PySpark before 4.2 asks no source for its figures: of these there are none then, and of the batches all.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._figures: dict[str, dict[str, Places]] = {}
        registry.register(self)

    # What Spark calls

    def onQueryStarted(self, event: Any) -> None:
        self._keep(event.id, event.name, {"running": {("", ""): 1.0}})

    def onQueryProgress(self, event: Any) -> None:
        progress = event.progress
        self._keep(progress.id, progress.name, _figures(progress), batches=1, rows=progress.numInputRows)

    def onQueryIdle(self, event: Any) -> None:
        """There is no batch to tell of."""

    def onQueryTerminated(self, event: Any) -> None:
        name = self._names.get(str(event.id))
        self._keep(event.id, name, {"running": {("", ""): 0.0}}, failures=event.exception is not None)

    def _keep(self, id: Any, name: str | None, figures: dict[str, Places], **counts: int) -> None:
        with self._lock:
            name = self._names.setdefault(str(id), name or str(id))
            self._figures[name] = figures
            for kind in _COUNTERS:
                self._counts[kind, name] = self._counts.get((kind, name), 0) + counts.get(kind, 0)

    # What Prometheus calls

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            counts, figures = dict(self._counts), dict(self._figures)
        for kind, text in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + kind, text, labels=("query",))
            for (each, name), count in counts.items():
                if each == kind:
                    counter.add_metric((name,), count)
            yield counter
        for kind, text in _GAUGES.items():
            gauge = GaugeMetricFamily(_PREFIX + kind, text, labels=("query", "source", "place"))
            for name, found in figures.items():
                for (source, place), value in found.get(kind, {}).items():
                    gauge.add_metric((name, source, place), value)
            yield gauge


def _figures(progress: Any) -> dict[str, Places]:
    found: dict[str, Places] = {kind: {} for kind in _GAUGES}
    found["running"]["", ""] = 1.0
    found["batch_seconds"]["", ""] = progress.durationMs.get("triggerExecution", 0) / 1000
    found["batch_timestamp_seconds"]["", ""] = time.time()
    for number, source in enumerate(progress.sources):
        latest = json.loads(source.latestOffset or "null")
        metrics = latest.get("metrics") if isinstance(latest, Mapping) else None
        if not metrics or "lookupAgeSeconds" not in metrics:
            continue  # another's, or of a PySpark that does not ask
        for kind, key in _OF_SOURCE.items():
            if key in metrics:
                found[kind][str(number), ""] = metrics[key]
        found["unknown_topics"][str(number), ""] = len(metrics.get("unknownTopics", ()))
        for place, messages in latest.get("backlog", {}).items():
            found["backlog_messages"][str(number), place] = messages
        for topic, partitions in latest.get("backlogBytes", {}).items():
            for partition, size in partitions.items():
                found["backlog_bytes"][str(number), f"{topic}/p{partition}"] = size
    return found
