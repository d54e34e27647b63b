"""What differs between versions of PySpark: offsets without arguments, rows in place of Arrow, no data sources at all.

The first is played here on whatever version is installed; all tests of this folder run on each version in hosted CI.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import BinaryType, LongType, MapType, StringType, StructField, StructType
from support.journal import CHANNEL, TOPIC, Server
from support.spark_replay import Topic
from support.spark_sink import numbered, taken

import nsq_fast.spark
from nsq_fast.broker import BrokerProcess
from nsq_fast.errors import ConfigError
from nsq_fast.spark import foreach_batch_sink
from nsq_fast.spark.journal import JournalStreamReader
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.replay import ReplayStreamReader
from nsq_fast.spark.sink.writer import as_batches

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(reader: Any, start: dict[str, Any], end: dict[str, Any]) -> list[bytes]:
    """The rows of a batch."""
    pieces = reader.partitions(start, end)
    return [body for piece in pieces for batch in reader.read(piece) for body in batch["body"].to_pylist()]


def test_the_replayable_reader_knows_itself_where_it_is(topic: Topic, caplog: pytest.LogCaptureFixture) -> None:
    given = {**topic.options, "channel": "new", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "6"}
    options = SourceOptions.parse(given)
    reader = ReplayStreamReader(options)
    bodies = topic.fill(10)
    end = reader.latestOffset()  # before the question where it begins
    at, found = reader.initialOffset(), []
    for rows in (6, 4, 0):
        batch = run(reader, at, end)
        assert len(batch) == rows
        at, found = end, found + batch
        end = reader.latestOffset()
    assert sorted(found) == bodies
    assert [each for each in caplog.messages if "rows are left" in each] == [
        f"topic {topic.name}: the limit of a batch: 4 rows are left for the next one. With the trigger availableNow"
        " PySpark before 4.2 runs one batch: start the query again for them, or leave maxOffsetsPerTrigger out"
    ]
    more = topic.fill(8, label="more")
    restarted = ReplayStreamReader(options)
    end = restarted.latestOffset()  # nobody has told where it was: all there is
    assert sorted(run(restarted, at, end)) == more
    after = topic.fill(8, label="after")
    at, end = end, restarted.latestOffset()
    assert len(run(restarted, at, end)) == 6  # now it knows
    assert sorted(run(restarted, at, end) + run(restarted, end, restarted.latestOffset())) == after


@pytest.mark.parametrize("server", ["ours"], indirect=True)
def test_the_journal_knows_where_its_reader_was(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"topic": TOPIC, "channel": CHANNEL, "reader": "journalled", "columns": "body", **server.options}
    options = SourceOptions.parse({**given, "journal": str(tmp_path), "maxOffsetsPerTrigger": "6"})
    bodies = server.publish(10)
    reader = JournalStreamReader(options)
    start = reader.initialOffset()
    first = reader.latestOffset()
    assert (first["j"], first["batch"]) == (start["j"], 1)
    found = run(reader, start, first)
    assert len(found) == 6
    assert f"topic {TOPIC}: the limit of a batch: 4 rows are left for the next one." in caplog.text
    restarted = JournalStreamReader(options)
    assert run(restarted, start, first) == found  # run again, as after a kill
    restarted = JournalStreamReader(options)
    second = restarted.latestOffset()
    assert (second["j"], second["batch"]) == (start["j"], 2)
    found += run(restarted, first, second)
    restarted.commit(first)
    assert sorted(found) == sorted(bodies)
    again = JournalStreamReader(options)
    assert again.latestOffset() == second
    other = JournalStreamReader(options)
    other.initialOffset()
    server.publish(1, prefix="x")
    other.backlog.fresh()
    assert other.latestOffset()["j"] != start["j"]
    with pytest.raises(ConfigError, match="2 queries have used it"):
        JournalStreamReader(options).latestOffset()


def test_rows_become_arrow_batches_as_spark_would_make_them() -> None:
    schema = StructType(
        [
            StructField("body", BinaryType()),
            StructField("key", StringType()),
            StructField("trace_id", LongType()),
            StructField("headers", MapType(StringType(), StringType())),
        ]
    )
    rows = [(bytearray(b"%d" % n), None if n % 2 else "k", n, {"a": "b"} if n else None) for n in range(12_000)]
    batches = list(as_batches(iter(rows), schema))
    assert [batch.num_rows for batch in batches] == [10_000, 2_000]
    assert batches[0].to_pylist()[:2] == [
        {"body": b"0", "key": "k", "trace_id": 0, "headers": None},
        {"body": b"1", "key": None, "trace_id": 1, "headers": [("a", "b")]},
    ]
    assert list(as_batches(iter([]), schema)) == []


def test_a_function_for_each_batch_publishes_its_rows(spark: SparkSession, broker: BrokerProcess) -> None:
    sink = foreach_batch_sink(topic="each", nsqd_tcp_addresses=broker.nsqd.tcp, **{"nsq.publish_timeout": 20})
    sink(spark.range(0, 1000, 1, 2).selectExpr("cast(id as string) body"), 0)
    assert sorted(taken(broker.nsqd.tcp, "each", 1000)) == sorted(numbered(1000))
    with pytest.raises(ConfigError, match="column 'price': unknown"):
        sink(spark.sql("select 'a' body, 1 price"), 1)
    with pytest.raises(ConfigError, match="unknown option 'tpoic'"):
        foreach_batch_sink(tpoic="t", nsqd_tcp_addresses="a")


@pytest.mark.parametrize("server", ["ours"], indirect=True)
@pytest.mark.parametrize("is_original", [True, False], ids=["journalled", "replayable"])
def test_a_batch_is_read_without_data_sources(
    spark: SparkSession, server: Server, topic: Topic, tmp_path: Path, is_original: bool
) -> None:
    """As on 3.5, where `.ci/spark_3.py` is the test."""
    if is_original:
        bodies = server.publish(1000)
        options = {**server.options, "topic": TOPIC, "channel": CHANNEL, "consume": True, "journal": tmp_path / "kept"}
    else:
        bodies = topic.fill(1000)
        options = {**topic.options, "minPartitions": 5}
    rows = nsq_fast.spark.read_batch(spark, columns="timestamp,body", **options)
    assert rows.schema == spark.read.format("nsq").options(**options, columns="timestamp,body").load().schema
    for _ in range(2):  # the same, whenever it is looked at
        assert sorted(bytes(row.body) for row in rows.collect()) == sorted(bodies)
    assert is_original or rows.rdd.getNumPartitions() >= 5
    with pytest.raises(ConfigError, match="unknown option 'tpoic'"):
        nsq_fast.spark.read_batch(spark, tpoic="t")


def test_a_version_without_data_sources_is_told_what_works() -> None:
    with pytest.raises(ImportError, match=r"PySpark 3\.5\.9 has no Python data sources: there .*read_batch reads"):
        nsq_fast.spark.register(SimpleNamespace(version="3.5.9"))
    assert nsq_fast.spark._missing("nsq_fast.spark", "pyarrow").endswith("pip install 'nsq-fast[spark]'")
