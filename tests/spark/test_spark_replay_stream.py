"""Queries and batches of the replayable reader in a session: triggers, limits, progress, slices, what is lost."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.spark_ledger import account, read_sink
from support.spark_marks import LIMIT, poll
from support.spark_publisher import Publisher
from support.spark_replay import Topic

from nsq_fast.broker import ClusterProcess
from nsq_fast.spark.versions import TELLS_START


class Query:
    """Queries from one topic into one Parquet sink, with one checkpoint."""

    def __init__(self, spark: Any, folder: Path, topic: Topic) -> None:
        self._spark = spark
        self._folder = folder
        self._options = {**topic.options, "startingOffsets": "earliest"}

    def start(self, trigger: dict[str, Any] | None = None, **options: str) -> Any:
        """Start one. ``trigger``: as for ``DataStreamWriter.trigger``."""
        rows = self._spark.readStream.format("nsq").options(**{**self._options, **options}).load()
        writer = rows.writeStream.format("parquet").option("path", str(self._folder / "sink"))
        writer = writer.option("checkpointLocation", str(self._folder / "checkpoint"))
        return (writer.trigger(**trigger) if trigger else writer).start()

    def run(self, trigger: dict[str, Any], **options: str) -> list[int]:
        """Start one that ends by itself; the rows of its batches."""
        query = self.start(trigger, **options)
        assert query.awaitTermination(int(LIMIT))
        return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]

    def bodies(self) -> list[bytes]:
        """What arrived."""
        table = read_sink(self._folder / "sink")
        return [] if table is None else table["body"].to_pylist()


@pytest.fixture
def query(spark: Any, tmp_path: Path, topic: Topic) -> Query:
    return Query(spark, tmp_path, topic)


AVAILABLE_NOW = {"availableNow": True}


def test_available_now_reads_what_there_is_exactly_and_goes_on_from_there(query: Query, topic: Topic) -> None:
    first = topic.fill(2500, label="first")
    # Older versions of PySpark ask for one batch; see docs/spark.md.
    batches = query.run(AVAILABLE_NOW, maxOffsetsPerTrigger="1000")
    assert batches == ([1000, 1000, 500] if TELLS_START else [2500])
    account(first, query.bodies()).check()
    assert query.run(AVAILABLE_NOW) == []
    second = topic.fill(700, label="second")
    assert query.run(AVAILABLE_NOW) == [700]
    account(first + second, query.bodies()).check()


def test_available_now_stops_where_it_began_although_more_is_published(
    query: Query, topic: Topic, tmp_path: Path
) -> None:
    publisher = Publisher(tmp_path, "p", topic.name, 2000, lookupd_http_addresses=topic.lookupd)
    try:
        poll(lambda: len(publisher.stored) > 1000)
        before = len(publisher.stored)
        read = sum(query.run(AVAILABLE_NOW, maxOffsetsPerTrigger="500"))
        assert before <= read < len(publisher.stored)
        publisher.stop()
    finally:
        publisher.kill()
    query.run(AVAILABLE_NOW)
    account(publisher.stored, query.bodies()).check()


def test_once_reads_all_in_one_batch_whatever_the_limit(query: Query, topic: Topic) -> None:
    topic.fill(900)
    assert query.run({"once": True}, maxOffsetsPerTrigger="100") == [900]


def test_a_stream_goes_on_and_tells_how_far_it_is(query: Query, topic: Topic) -> None:
    running = query.start({"processingTime": "0 seconds"}, maxOffsetsPerTrigger="400")
    try:
        bodies = topic.fill(1000, label="one")
        poll(lambda: len(query.bodies()) == 1000)
        bodies += topic.fill(10, label="two")
        poll(lambda: len(query.bodies()) == 1010)
        account(bodies, query.bodies()).check()
        poll(lambda: sum(each["numInputRows"] for each in running.recentProgress) == 1010)
        batches = [each for each in running.recentProgress if each["numInputRows"]]
        if not TELLS_START:  # nor asks for the progress of a source
            return
        assert max(each["numInputRows"] for each in batches) == 400
        told = [json.loads(each["sources"][0]["latestOffset"]) for each in batches]
        backlogs = [each["backlogBytes"][topic.name] for each in told]
        assert all(each.keys() == {"0", "1"} for each in backlogs)
        assert backlogs[-1] == {"0": 0, "1": 0}
        assert max(each["0"] for each in backlogs) > 0
        assert told[-1][topic.name]["0"] == topic.stats(0)["backend_depth"]
        assert told[-1]["metrics"]["maxOffsetsBehindLatest"] == 0
        assert max(each["metrics"]["maxOffsetsBehindLatest"] for each in told) > 0
        assert told[-1]["metrics"]["bytesPerSecond"] > 0  # of the batches before
    finally:
        running.stop()


def test_a_batch_is_a_slice(spark: Any, topic: Topic) -> None:
    topic.fill(300, label="before")
    at = {str(partition): topic.stats(partition)["backend_depth"] for partition in (0, 1)}
    time.sleep(0.002)  # sleep: times are in milliseconds
    between = time.time_ns() // 1_000_000
    time.sleep(0.002)  # sleep: times are in milliseconds
    topic.fill(200, label="after")

    def rows(**options: str) -> Any:
        return spark.read.format("nsq").options(**topic.options, **options).load()

    assert rows().count() == 500
    assert rows(minPartitions="6").rdd.getNumPartitions() >= 6
    assert (
        rows(minPartitions="6", columns="partition,offset").selectExpr("count(distinct partition, offset)").first()[0]
        == 500
    )
    later = rows(startingOffsets=json.dumps(at), columns="body,timestamp").collect()
    assert {bytes(row.body[:5]) for row in later} == {b"after"}  # a bytearray with PySpark 4.0
    assert rows(startingTimestamp=str(between)).count() == 200
    assert rows(endingTimestamp=str(between)).count() == 300
    assert topic.channels(0)["spark"]["depth"] == 250  # left where it was


def test_what_retention_has_taken_ends_a_query_or_not(query: Query, topic: Topic, cluster: ClusterProcess) -> None:
    topic.fill(100, label="read")
    assert query.run(AVAILABLE_NOW) == [100]
    gone, kept = topic.fill(100, label="gone"), topic.fill(100, label="kept")
    behind = topic.stats(0)["backend_depth"]
    size = behind // 150
    cluster.forget_log(topic.name, 0, 100 * size)
    running = query.start(AVAILABLE_NOW)
    with pytest.raises(Exception, match=rf"partition 0: offsets {50 * size} up to {100 * size} are lost"):
        running.awaitTermination(int(LIMIT))
    assert query.run(AVAILABLE_NOW, failOnDataLoss="false") == [150]
    expected = {*gone[1::2], *kept}
    assert {body for body in query.bodies() if not body.startswith(b"read")} == expected


def test_a_query_with_the_offsets_of_another_source_says_so(
    query: Query, topic: Topic, tmp_path: Path, spark: Any
) -> None:
    other = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    writer = other.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination(int(LIMIT))
    topic.fill(10)
    with pytest.raises(Exception, match="checkpointLocation: its offset"):
        query.run(AVAILABLE_NOW)
