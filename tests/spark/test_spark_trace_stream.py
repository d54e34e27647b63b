"""The stream writes what a batch writes: also after a restart, or a crash within a micro-batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import trace_logs
from support.trace_logs import SECOND
from support.waiting import until

from nsq_fast.broker import BrokerProcess
from nsq_fast.client.admin import NsqdHTTPClient
from nsq_fast.client.trace import TraceRecord
from nsq_fast.spark.trace import (
    TraceSettings,
    parse_lines,
    read_logs,
    read_table,
    stream_logs,
    stream_tables,
    write_tables,
)
from nsq_fast.spark.trace.queries import BatchWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = TraceSettings(window=5, grace=30, lateness=2)
COMPARED = ("lives", "windows", "lost", "duplicates", "violations", "skews", "slowest")
PARTS = 3


def records() -> list[TraceRecord]:
    """Three runs with planted faults, ten minutes apart: each is decided while the next one comes."""
    log: dict[Any, list[TraceRecord]] = {}
    for number in range(PARTS):
        part = trace_logs.good_log(130, seed=number)
        planted = trace_logs.plant(part)
        if number < PARTS - 1:
            for place in {(place[0], place[1], "", place[3]) for place in planted.pending}:
                del part[place]
        for place, found in part.items():
            log[(*place, number)] = [moved(record, number) for record in found]
    return trace_logs.records_of(log)


def moved(record: Any, number: int) -> TraceRecord:
    later = number * 600 * SECOND
    changes: dict[str, Any] = {
        "time": record.time + later,
        "internal_id": record.internal_id + number * 1000,
        "trace_id": record.trace_id + number * 1_000_000,
    }
    if record.offset is not None:
        changes["offset"] = record.offset + number * 10**8
    if hasattr(record, "timestamp"):
        changes["timestamp"] = record.timestamp + later
    return trace_logs.changed(record, **changes)


def place_of(record: Any) -> tuple[Any, ...]:
    return (record.topic, record.partition, getattr(record, "channel", ""), record.internal_id)


class Feed:
    """Files of records in the order of time, put where a stream looks for them, some at a time."""

    def __init__(self, folder: Path, files: int) -> None:
        self.folder = folder / "logs"
        self.folder.mkdir()
        lines = [f"{record}\n" for record in records()]
        size = -(-len(lines) // files)
        self._waiting = [lines[start : start + size] for start in range(0, len(lines), size)]
        self._count = 0

    def give(self, files: int = 10**6) -> None:
        for _ in range(min(files, len(self._waiting))):
            path = self.folder / f"part{self._count:03}.log"
            hidden = path.with_name(f".{path.name}")
            hidden.write_text("".join(self._waiting.pop(0)))
            os.utime(hidden, (10**9 + self._count, 10**9 + self._count))
            hidden.rename(path)
            self._count += 1


@pytest.fixture(scope="module")
def batch(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batch")
    path = folder / "all.log"
    path.write_text("".join(f"{record}\n" for record in records()))
    write_tables(spark, read_logs(spark, path), folder / "tables", SETTINGS)
    return folder / "tables"


@pytest.fixture(scope="module")
def expected(spark: SparkSession, batch: Path) -> dict[str, list[str]]:
    """What the tables of the batch hold."""
    return {table: rows(spark, batch, table) for table in COMPARED}


def run_stream(spark: SparkSession, feed: Feed) -> Path:
    """Write tables of what is there, in micro-batches of two files; they and the checkpoint are beside the feed."""
    tables, checkpoint = feed.folder.with_name("tables"), feed.folder.with_name("checkpoint")
    logs = stream_logs(spark, feed.folder, maxFilesPerTrigger="2")
    query = stream_tables(logs, tables, checkpoint, SETTINGS, availableNow=True)
    try:
        query.awaitTermination()
    finally:
        query.stop()
    return tables


def rows(spark: SparkSession, folder: Path, table: str) -> list[str]:
    """What a table holds of decided messages, in an order of its own."""
    found = read_table(spark, folder, table).drop("batch")
    if table in ("lives", "windows"):
        end = records()[-1].time - SECOND
        found = found.where(f"window_ns < {end // SECOND // 10 * 10 * SECOND}")
    if table == "slowest":
        found = found.orderBy("latency_ns", ascending=False).limit(SETTINGS.slowest)
    if table == "skews":
        found = found.groupBy("side", "nsqd", "host").agg({"messages": "sum", "worst_ns": "max"})
    return sorted(map(repr, found.collect()))


def check(spark: SparkSession, expected: dict[str, list[str]], stream: Path) -> None:
    for table in COMPARED:
        assert expected[table], table
        assert rows(spark, stream, table) == expected[table], table
    assert read_table(spark, stream, "late").count() == 0


def test_a_stream_that_is_started_again_writes_what_a_batch_writes(
    spark: SparkSession, expected: dict[str, list[str]], batch: Path, tmp_path: Path
) -> None:
    feed = Feed(tmp_path, 4)
    feed.give(2)
    tables = run_stream(spark, feed)
    decided = read_table(spark, tables, "lives").count()
    assert 0 < decided < read_table(spark, batch, "lives").count()
    refuses_tables_of_another_query(spark, feed, tables, tmp_path / "other")
    feed.give()
    check(spark, expected, run_stream(spark, feed))


def refuses_tables_of_another_query(spark: SparkSession, feed: Feed, tables: Path, checkpoint: Path) -> None:
    query = stream_tables(stream_logs(spark, feed.folder), tables, checkpoint, SETTINGS, availableNow=True)
    with pytest.raises(Exception, match="not those of this checkpoint"):
        query.awaitTermination()


def test_a_crash_within_a_micro_batch_changes_nothing(
    spark: SparkSession,
    expected: dict[str, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed = Feed(tmp_path, 3)
    feed.give()
    write = BatchWriter.write

    def crash(self: BatchWriter, name: str, found: Any) -> Any:
        written = write(self, name, found)
        if name == "slowest" and self._batch == 1:
            raise RuntimeError("crashed on purpose")
        return written

    monkeypatch.setattr(BatchWriter, "write", crash)
    with pytest.raises(Exception, match="crashed on purpose"):
        run_stream(spark, feed)
    monkeypatch.undo()
    check(spark, expected, run_stream(spark, feed))


def test_what_comes_after_its_window_was_decided_is_told(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path, 2)
    place = ("orders", 0, "audit", 101)
    late = next(str(each) for each in records() if place_of(each) == place)
    feed._waiting = [[line for line in lines if late not in line] for lines in feed._waiting]
    feed._waiting.append([f"{late}\n"])
    feed.give()
    tables = run_stream(spark, feed)
    found = read_table(spark, tables, "late").collect()
    assert [(row.topic, row.partition, row.channel, int(row.internal_id)) for row in found] == [place]
    assert found[0].finishes == 1
    assert place in {
        (row.topic, row.partition, row.channel, int(row.internal_id))
        for row in read_table(spark, tables, "lost").collect()
    }


def test_records_may_come_through_nsq_itself(
    spark: SparkSession, expected: dict[str, list[str]], tmp_path: Path
) -> None:
    with BrokerProcess(lookupd=False) as broker:
        client = NsqdHTTPClient.from_url(f"http://{broker.nsqd.http}")
        client.create_topic("traces")
        client.create_channel("traces", "spark")
        bodies = [str(record).encode() for record in records()]
        client.multipublish("traces", bodies, binary=True)
        until(lambda: client.stats("traces")["topics"][0]["channels"][0]["depth"] == len(bodies))
        lines = (
            spark.readStream.format("nsq")
            .option("nsqd_tcp_addresses", str(broker.nsqd.tcp))
            .option("nsqd_http_addresses", str(broker.nsqd.http))
            .option("topic", "traces")
            .option("channel", "spark")
            .option("journal", str(tmp_path / "journal"))
            .load()
        )
        query = stream_tables(
            parse_lines(lines, "body"), tmp_path / "tables", tmp_path / "checkpoint", SETTINGS, availableNow=True
        )
        query.awaitTermination()
    check(spark, expected, tmp_path / "tables")
