"""What differs between versions of PySpark: offsets without arguments, rows in place of Arrow, no data sources at all.

The first is played here on whatever version is installed; all tests of this folder run on each version in hosted CI.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import Row
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
from nsq_fast.spark.sink import as_batches
from nsq_fast.spark.source import spark_schema

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
    assert [each for each in caplog.messages if "the limit of a batch leaves" in each] == [
        f"topic {topic.name}: the limit of a batch leaves 4 rows for the next one. With the trigger availableNow"
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
    assert f"topic {TOPIC}: the limit of a batch leaves 4 rows for the next one." in caplog.text
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
    headed = spark_schema(["headers", "body"], "array")
    pairs = [Row(key="a", value=bytearray(b"1")), Row(key="b", value=None)]
    [batch] = as_batches(iter([(pairs, b"x"), (None, b"y")]), headed)
    assert batch["headers"].to_pylist() == [[{"key": "a", "value": b"1"}, {"key": "b", "value": None}], None]


def test_a_function_for_each_batch_publishes_its_rows(spark: SparkSession, broker: BrokerProcess) -> None:
    sink = foreach_batch_sink(topic="each", nsqd_tcp_addresses=broker.nsqd.tcp, **{"nsq.publish_timeout": 20})
    sink(spark.range(0, 1000, 1, 2).selectExpr("cast(id as string) body"), 0)
    assert sorted(taken(broker.nsqd.tcp, "each", 1000)) == sorted(numbered(1000))
    with pytest.raises(ConfigError, match="column 'price': unknown"):
        sink(spark.sql("select 'a' body, 1 price"), 1)
    with pytest.raises(ConfigError, match="unknown option 'tpoic'"):
        foreach_batch_sink(tpoic="t", nsqd_tcp_addresses="a")
    with pytest.raises(ConfigError, match=r"reportPath: is for df\.write and df\.writeStream only"):
        foreach_batch_sink(topic="t", nsqd_tcp_addresses="a", reportPath="/tmp/reports")
    with pytest.raises(Exception, match="row 0 of Arrow batch 0: body is null") as caught:
        sink(spark.sql("select cast(null as string) body"), 1)
    assert "Traceback" not in str(caught.value)


def test_a_worker_that_spark_keeps_is_not_searched_for_garbage_as_a_whole_after_each_task(
    spark: SparkSession, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gc

    # Not a forked one, of which nothing is searched anyway.
    monkeypatch.setattr(spark.sparkContext, "pythonExec", sys.executable)

    def spared(batches: Any) -> Any:
        for batch in batches:
            yield batch.from_pydict({"objects": [gc.get_freeze_count()]})

    of_driver = gc.get_freeze_count()
    sink = foreach_batch_sink(topic="spared", nsqd_tcp_addresses=broker.nsqd.tcp)
    sink(spark.range(0, 8, 1, 8).selectExpr("cast(id as string) body"), 0)
    found = spark.range(0, 8, 1, 8).mapInArrow(spared, "objects long").collect()
    assert max(row.objects for row in found) > 10_000  # most of what Python and Spark have imported there
    assert gc.get_freeze_count() <= of_driver  # nothing more in the driver


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


# Registering the format where Spark starts its workers with another Python than the driver's.


Python = Callable[[str], str]
ADVICE = f"set PYSPARK_PYTHON={sys.executable} in the environment before the session is made"


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Another Python: a shell script that starts this one."""

    def make(line: str) -> str:
        path = tmp_path / "python3"
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
        return str(path)

    return make


class Session:
    """A session, of which only the Python of its workers matters."""

    def __init__(self, python: str | None) -> None:
        self.registered: list[Any] = []
        self.dataSource = SimpleNamespace(register=self.registered.append)
        if python is not None:
            self._sc = SimpleNamespace(pythonExec=python)


NO_PACKAGES = f'exec {sys.executable} -I -S "$@"'
OLD = f"""exec {sys.executable} -c 'import sys; sys.version_info = (3, 8, 0); exec(sys.argv[1])' "$2" """


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (NO_PACKAGES, "has no nsq_fast"),
        (OLD, f"is Python 3.8, and the driver {sys.version_info[0]}.{sys.version_info[1]}"),
        ("exit 3", "ends with status 3, and says nothing"),
        ("kill -9 $$", "ends with status -9, and says nothing"),
    ],
)
def test_a_python_that_cannot_run_the_source_is_refused(python: Python, line: str, reason: str) -> None:
    session = Session(python(line))
    with pytest.raises(ConfigError) as refused:
        nsq_fast.spark.register(session)
    assert reason in str(refused.value)
    assert ADVICE in str(refused.value)
    assert "\n" not in str(refused.value)
    assert session.registered == []


def test_a_python_without_something_that_nsq_fast_depends_on_is_refused(python: Python, tmp_path: Path) -> None:
    (tmp_path / "gevent.py").write_text("raise ModuleNotFoundError('no gevent', name='gevent')\n")
    paths = ":".join(filter(None, [str(tmp_path), *sys.path]))
    with pytest.raises(ConfigError, match=r"has no gevent: set PYSPARK_PYTHON=.*, or install nsq-fast\[spark\] there"):
        nsq_fast.spark.register(Session(python(f'PYTHONPATH={paths} exec {sys.executable} "$@"')))


def test_a_python_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"python9, cannot be started \(.*No such file"):
        nsq_fast.spark.register(Session(str(tmp_path / "python9")))


def test_another_python_that_can_run_it_is_taken(python: Python) -> None:
    paths = ":".join(filter(None, sys.path))
    for found in (python(f'PYTHONPATH={paths} exec {sys.executable} "$@"'), sys.executable, None):
        session = Session(found)
        nsq_fast.spark.register(session)
        assert session.registered == [nsq_fast.spark.NsqDataSource]


def test_a_real_session_is_refused_in_a_line(
    spark: SparkSession, python: Python, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", python(NO_PACKAGES))
    with pytest.raises(ConfigError, match="has no nsq_fast"):
        nsq_fast.spark.register(spark)
