"""What the listener shows of real queries to Prometheus, and what the dashboard and the alert rules ask of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry
from support.journal import CHANNEL, TOPIC, Server
from support.spark_replay import Topic
from support.waiting import until

from nsq_fast.spark import MetricsListener
from nsq_fast.spark.versions import TELLS_START

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples" / "prometheus"
Value = Callable[..., float | None]


@pytest.fixture
def registry(spark: SparkSession) -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry()
    listener = MetricsListener(registry)
    spark.streams.addListener(listener)
    yield registry
    spark.streams.removeListener(listener)


def run(spark: SparkSession, folder: Path, name: str, options: dict[str, str], then: Any = None) -> Any:
    frame = spark.readStream.format("nsq").options(**options).load()
    query = frame.writeStream.queryName(name).option("checkpointLocation", str(folder / name))
    return (query.foreachBatch(then) if then else query.format("noop")).start()


@pytest.mark.parametrize("server", ["ours"], indirect=True)
def test_the_figures_of_queries_of_both_kinds(
    spark: SparkSession, server: Server, topic: Topic, tmp_path: Path, registry: CollectorRegistry
) -> None:
    def value(name: str, query: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"nsq_fast_spark_{name}", {"query": query, **labels})

    def of_source(name: str, query: str, place: str = "") -> float | None:
        return value(name, query, source="0", place=place)

    server.publish(300)
    journalled = {"topic": TOPIC, "channel": CHANNEL, "journal": str(tmp_path / "kept"), **server.options}
    queries = [
        run(spark, tmp_path, "journalled", {**journalled, "maxOffsetsPerTrigger": "100"}),
        run(spark, tmp_path, "replayed", {**topic.options, "startingOffsets": "earliest"}),
    ]
    try:
        topic.fill(200)
        until(lambda: value("rows_total", "journalled") == 300 and value("rows_total", "replayed") == 200)
        assert value("batches_total", "journalled") == 3
        for name in ("journalled", "replayed"):
            assert value("running", name, source="", place="") == 1
            assert value("batch_seconds", name, source="", place="")
            assert value("batch_timestamp_seconds", name, source="", place="")
        if TELLS_START:
            (nsqd,) = [f"{host}:{port}" for host, port in [server.tcp]]
            assert of_source("backlog_messages", "journalled", nsqd) == 100  # when the last batch was planned
            assert of_source("journal_bytes", "journalled")
            assert {of_source("backlog_bytes", "replayed", f"{topic.name}/p{each}") for each in (0, 1)} == {0}
            for name in ("journalled", "replayed"):
                assert of_source("lookup_age_seconds", name) is not None
                assert of_source("unknown_topics", name) == 0
                assert of_source("bytes_per_second", name) is not None
        asked_for_are_known(registry)
    finally:
        for query in queries:
            query.stop()
    until(lambda: value("running", "journalled", source="", place="") == 0)
    assert value("failures_total", "journalled") == 0
    assert of_source("journal_bytes", "journalled") is None  # nobody knows any more

    def fails(batch: Any, number: int) -> None:
        raise OSError("the sink is full")

    server.publish(1)
    run(spark, tmp_path, "failing", {**journalled, "orphans": "warn"}, fails)
    until(lambda: value("failures_total", "failing") == 1)


def asked_for_are_known(registry: CollectorRegistry) -> None:
    known = {f"{each.name}{'_total' if each.type == 'counter' else ''}" for each in registry.collect()}
    panels = json.loads((EXAMPLES / "spark-dashboard.json").read_text())["panels"]
    texts = [target["expr"] for panel in panels for target in panel["targets"]]
    texts.append((EXAMPLES / "alerts.yml").read_text())
    asked = set(re.findall(r"\bnsq_fast_spark_\w+", "\n".join(texts)))
    assert len(asked) > 8
    assert asked <= known
