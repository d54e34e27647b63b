"""Filters of a query make the slice of a batch smaller, and never leave out a row that passes them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from support.spark_replay import Topic

from nsq_fast.broker import ClusterProcess
from nsq_fast.errors import ConfigError, LookupFailed
from nsq_fast.spark import source as choice
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.replay import FilteringBatchReader
from nsq_fast.spark.replay import batch as filters
from nsq_fast.spark.replay.batch import MARGIN, Bounds, Range, bounds_of
from nsq_fast.spark.replay.logs import Log, Record, Resolver
from nsq_fast.spark.versions import PUSHES_FILTERS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
def test_the_bounds_that_filters_set() -> None:
    from pyspark.sql import datasource as of

    def offsets(*wanted: Any) -> Range:
        assert bounds_of(wanted)[::2] == Bounds()[::2]
        return bounds_of(wanted).offsets

    assert offsets(of.EqualTo(OFFSET, 7)) == offsets(of.EqualNullSafe(OFFSET, 7)) == Range(7, 7)
    assert offsets(of.GreaterThan(OFFSET, 7), of.LessThan(OFFSET, 20)) == Range(8, 19)
    assert offsets(of.GreaterThanOrEqual(OFFSET, 7), of.GreaterThan(OFFSET, 3)) == Range(7, None)
    assert offsets(of.LessThanOrEqual(OFFSET, 7), of.In(OFFSET, (9, 3, 5))) == Range(3, 7)
    assert bounds_of([of.In(PARTITION, (4, 2)), of.LessThan(PARTITION, 4)]) == Bounds(Range(2, 3))
    assert bounds_of([of.EqualTo(TOPIC, "a")]).topics == bounds_of([of.EqualNullSafe(TOPIC, "a")]).topics == {"a"}
    assert bounds_of([of.In(TOPIC, ("a", "b")), of.In(TOPIC, ("b", "c"))]).topics == {"b"}


@needs_pushing
def test_what_sets_no_bounds() -> None:
    from pyspark.sql import datasource as of

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
    assert bounds_of(unknown) == bounds_of([]) == Bounds()


@needs_pushing
def test_bounds_of_times_leave_room_for_clocks_that_differ() -> None:
    from pyspark.sql import datasource as of

    found = bounds_of([of.GreaterThan(TIMESTAMP, NOON), of.LessThanOrEqual(TIMESTAMP, NOON + timedelta(seconds=1))])
    assert found.times == Range(NOON_NS + 1000 - MARGIN, NOON_NS + SECOND + 1000 + MARGIN)
    assert MARGIN == 600 * SECOND


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
    assert rows_of(topic, of.LessThan(OFFSET, 5), of.GreaterThan(OFFSET, 5)) == []
    later = {"startingOffsets": f'{{"0": {places[9]}, "1": {places[20]}}}'}  # what the options say holds, too
    assert rows_of(topic, of.GreaterThan(OFFSET, places[12]), **later) == [
        row for row in rows if row["offset"] >= (places[13], places[20])[row["partition"]]
    ]


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
    reader.pushFilters([of.EqualTo(TOPIC, "of_b")])
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


def test_nothing_is_left_out_while_nsqd_cannot_tell_the_times() -> None:
    logs: Any = SilentLogs()
    nsqd: Any = None
    log = Log(100, 900, 8, nsqd, is_ordered=False, is_ext=False, has_fixed_channels=False, channels={})
    options = SourceOptions.parse({"topic": "t", "channel": "c", "lookupd_http_addresses": "127.0.0.1:1"})
    assert Resolver(options, logs).surely_before(0, log, NOON_NS + SECOND) == log.start
    assert Resolver(options, logs).first_at(0, log, NOON_NS + SECOND) is None


def test_a_time_is_not_taken_for_the_end_while_nsqd_cannot_tell_the_times() -> None:
    logs: Any = SilentLogs()
    nsqd: Any = "127.0.0.1:1"
    log = Log(100, 900, 8, nsqd, is_ordered=False, is_ext=False, has_fixed_channels=False, channels={})
    where = {"topic": "t", "channel": "c", "lookupd_http_addresses": "127.0.0.1:1"}
    options = SourceOptions.parse({**where, "startingTimestamp": str(NOON_NS // 10**6 + 1000)})
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
