"""A stream of a topic's log, and what its filters leave out before they read."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.spark_compiled import compiled
from support.spark_ledger import account, read_sink
from support.spark_marks import LIMIT, poll
from support.spark_replay import Topic

from nsq_fast.broker import ClusterProcess
from nsq_fast.errors import ConfigError, LookupFailed
from nsq_fast.spark import source as choice
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.replay import FilteringBatchReader
from nsq_fast.spark.replay import batch as filters
from nsq_fast.spark.replay.logs import Log, Record, Resolver
from nsq_fast.spark.versions import PUSHES_FILTERS, TELLS_START

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Queries and batches of the replayable reader in a session: triggers, limits, progress, slices, what is lost.


class Query:
    """Queries from one topic into one Parquet sink, with one checkpoint."""

    def __init__(self, spark: Any, folder: Path, topic: Topic) -> None:
        self._spark = spark
        self._folder = folder
        self._options = {**topic.options, "startingOffsets": "earliest"}

    def start(self, trigger: dict[str, Any] | None = None, **options: str) -> Any:
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


def test_once_reads_all_in_one_batch_whatever_the_limit(spark: SparkSession, query: Query, topic: Topic) -> None:
    bodies = topic.fill(900)
    with compiled(spark):
        assert query.run({"once": True}, maxOffsetsPerTrigger="100") == [900]
    account(bodies, query.bodies()).check()


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


def test_a_query_with_the_offsets_of_another_source_says_so(
    query: Query, topic: Topic, tmp_path: Path, spark: Any
) -> None:
    other = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    writer = other.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination(int(LIMIT))
    topic.fill(10)
    with pytest.raises(Exception, match="checkpointLocation: its offset"):
        query.run(AVAILABLE_NOW)


# Filters of a query make the slice of a batch smaller, and never leave out a row that passes them.


needs_pushing = pytest.mark.skipif(not PUSHES_FILTERS, reason="PySpark 4.0 tells no source what it filters for")

PARTITION, OFFSET, TIMESTAMP, TOPIC = ("partition",), ("offset",), ("timestamp",), ("topic",)

SECOND = 10**9

NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)

NOON_NS = int(NOON.timestamp()) * SECOND

SETTING = "spark.sql.python.filterPushdown.enabled"


def rows_of(topic: Topic, *wanted: Any, **given: str) -> list[dict[str, Any]]:
    """What is read where Spark hands these filters on."""
    reader = FilteringBatchReader(
        SourceOptions.parse({**topic.options, "pushFilters": "true", "columns": "*", **given})
    )
    pushed = list(wanted)
    assert list(reader.pushFilters(pushed)) == pushed  # Spark filters again
    return [row for piece in reader.partitions() for batch in reader.read(piece) for row in batch.to_pylist()]


@needs_pushing
def test_only_what_the_filters_ask_for_is_read(topic: Topic) -> None:
    from pyspark.sql import datasource as of

    topic.fill(400)
    rows = rows_of(topic)
    assert len(rows) == 400
    assert rows_of(topic, of.EqualTo(PARTITION, 1)) == [row for row in rows if row["partition"] == 1]
    assert rows_of(topic, of.EqualTo(PARTITION, 5)) == []
    places = sorted({row["offset"] for row in rows})
    for low, high in ((places[3], places[50]), (places[3] + 1, places[50] - 1), (0, places[0]), (places[-1], 10**15)):
        found = rows_of(topic, of.GreaterThanOrEqual(OFFSET, low), of.LessThanOrEqual(OFFSET, high))
        assert found == [row for row in rows if low <= row["offset"] <= high]
    for one in (of.EqualTo(OFFSET, places[7]), of.EqualNullSafe(OFFSET, places[7])):
        assert rows_of(topic, one) == [row for row in rows if row["offset"] == places[7]]
    found = rows_of(topic, of.LessThanOrEqual(OFFSET, places[7]), of.In(OFFSET, (places[9], places[3], places[5])))
    assert found == [row for row in rows if places[3] <= row["offset"] <= places[7]]
    assert rows_of(topic, of.In(PARTITION, (4, 1)), of.LessThan(PARTITION, 4)) == rows_of(
        topic, of.EqualTo(PARTITION, 1)
    )
    assert rows_of(topic, of.LessThan(OFFSET, 5), of.GreaterThan(OFFSET, 5)) == []
    later = {"startingOffsets": f'{{"0": {places[9]}, "1": {places[20]}}}'}  # what the options say holds, too
    assert rows_of(topic, of.GreaterThan(OFFSET, places[12]), **later) == [
        row for row in rows if row["offset"] >= (places[13], places[20])[row["partition"]]
    ]


@needs_pushing
def test_what_sets_no_bounds_leaves_nothing_out(topic: Topic) -> None:
    from pyspark.sql import datasource as of

    topic.fill(10)
    unknown: list[Any] = [
        of.Not(of.EqualTo(OFFSET, 7)),
        of.IsNotNull(OFFSET),
        of.EqualNullSafe(OFFSET, None),
        of.In(OFFSET, (1, None)),
        of.In(OFFSET, ()),
        of.EqualTo(("offset", "x"), 7),
        of.EqualTo(("size",), 7),
        of.StringStartsWith(TOPIC, "a"),
        of.In(TOPIC, ("a", None)),
        of.Not(of.EqualTo(TOPIC, "a")),
        of.GreaterThan(TIMESTAMP, NOON.replace(tzinfo=None)),
        of.GreaterThan(OFFSET, 7.5),
    ]
    assert len(rows_of(topic, *unknown)) == 10


@needs_pushing
def test_of_several_topics_those_are_read_that_the_filters_name(cluster: ClusterProcess) -> None:
    from pyspark.sql import datasource as of

    topics = []
    for name in ("of_a", "of_b", "of_c"):
        cluster.create_topic(name, partitions=2, replicas=1, multi_part=True)
        topics.append(Topic(name, str(cluster.lookupds[0].http)))
        topics[-1].fill(4)
    reader = FilteringBatchReader(
        SourceOptions.parse({**topics[0].options, "topic": "of_a,of_b,of_c", "pushFilters": "true"})
    )
    for wanted in (
        [of.EqualTo(TOPIC, "of_b")],
        [of.EqualNullSafe(TOPIC, "of_b")],
        [of.In(TOPIC, ("of_a", "of_b")), of.In(TOPIC, ("of_b", "of_c"))],
    ):
        reader.pushFilters(wanted)
        assert {piece.topic for piece in reader.partitions()} == {"of_b"}
    reader.pushFilters([of.EqualTo(TOPIC, "another")])
    assert reader.partitions() == []


@needs_pushing
def test_a_range_of_times_is_found_in_the_logs(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql import datasource as of

    for part in range(30):
        topic.fill(4, label=f"part{part}")
    rows = rows_of(topic)
    middle = sorted(row["timestamp"] for row in rows)[60]
    hour = timedelta(hours=1)
    assert rows_of(topic, of.GreaterThan(TIMESTAMP, middle)) == rows  # all within the margin
    assert rows_of(topic, of.GreaterThan(TIMESTAMP, middle + hour)) == []
    assert rows_of(topic, of.LessThan(TIMESTAMP, middle - hour)) == []
    monkeypatch.setattr(filters, "MARGIN", 0)
    assert rows_of(topic, of.GreaterThanOrEqual(TIMESTAMP, middle)) == [r for r in rows if r["timestamp"] >= middle]
    assert rows_of(topic, of.LessThan(TIMESTAMP, middle)) == [row for row in rows if row["timestamp"] < middle]
    assert rows_of(topic, of.EqualTo(TIMESTAMP, middle)) == [row for row in rows if row["timestamp"] == middle]


class SilentLogs:
    """An nsqd that knows its first record only, as one that has just become the leader."""

    def record_at(self, log: Log, partition: int, offset: int) -> Record:
        return Record(offset, 1, NOON_NS)

    def record_number(self, log: Log, partition: int, number: int) -> None:
        return None


def test_while_nsqd_cannot_tell_the_times_nothing_is_left_out_and_none_is_taken_for_the_end() -> None:
    logs: Any = SilentLogs()
    nsqd: Any = "127.0.0.1:1"
    log = Log(100, 900, 8, nsqd, is_ordered=False, is_ext=False, has_fixed_channels=False, channels={})
    where = {"topic": "t", "channel": "c", "lookupd_http_addresses": "127.0.0.1:1"}
    options = SourceOptions.parse({**where, "startingTimestamp": str(NOON_NS // 10**6 + 1000)})
    assert Resolver(options, logs).surely_before(0, log, NOON_NS + SECOND) == log.start
    assert Resolver(options, logs).first_at(0, log, NOON_NS + SECOND) is None
    with pytest.raises(LookupFailed, match=r"127\.0\.0\.1:1: cannot tell which record of partition 0"):
        Resolver(options, logs).starting({0: log}, None)


@needs_pushing
def test_spark_hands_filters_on_where_it_is_told_to(spark: SparkSession, topic: Topic) -> None:
    topic.fill(400)
    source = spark.read.format("nsq").options(**topic.options, columns="*")
    orders, whole = source.option("pushFilters", "true").load(), source.option("pushFilters", "false").load()
    plain = whole.where("partition = 1 and offset > 1000").count()
    assert whole.where("partition = 1").rdd.getNumPartitions() == 2
    with pytest.raises(Exception, match=SETTING) as refusal:
        orders.count()
    assert "Traceback" not in str(refusal.value)
    spark.conf.set(SETTING, "true")
    try:
        assert orders.count() == 400
        chosen = orders.where("partition = 1 and offset > 1000")
        assert (chosen.rdd.getNumPartitions(), chosen.count()) == (1, plain)
        recent = orders.where("timestamp > current_timestamp() - interval 1 hour")
        assert (recent.rdd.getNumPartitions(), recent.count()) == (2, 400)
        old = orders.where("timestamp < current_timestamp() - interval 1 hour")
        assert (old.rdd.getNumPartitions(), old.count()) == (1, 0)  # a partition of Spark's own making
        assert whole.where("partition = 1").count() == 200  # a source without the option is as before
    finally:
        spark.conf.unset(SETTING)


def test_the_option_is_refused_where_it_can_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"topic": "t", "channel": "c", "lookupd_http_addresses": "127.0.0.1:1", "pushFilters": "true"}
    monkeypatch.setattr(choice, "PUSHES_FILTERS", True)
    with pytest.raises(ConfigError, match="pushFilters: the journalled reader cannot honour it"):
        choice.choose(SourceOptions.parse({**where, "reader": "journalled"}), is_stream=False)
    with pytest.raises(ConfigError, match=r"pushFilters: is for spark\.read only"):
        choice.choose(SourceOptions.parse({**where, "reader": "replayable"}), is_stream=True)
    monkeypatch.setattr(choice, "PUSHES_FILTERS", False)
    with pytest.raises(ConfigError, match=r"pushFilters: .* from PySpark 4\.1 on"):
        choice.choose(SourceOptions.parse({**where, "reader": "replayable"}), is_stream=False)
