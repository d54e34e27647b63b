"""The same tables from a stream of records.

A window of time is decided when the watermark, the time of the latest record less ``lateness``, has passed its end by
``grace``. Each micro-batch writes what it decided, computed by the same functions as in a batch, and keeps the rest:
records of open messages, the channels known, and how far the order of each group has come. Spark's own state could
not hold channels that appear later, nor judge order.

Micro-batch n writes ``<table>/batch=n``, replaced as a whole, and then its state, beside that of n - 1. After a crash
Spark runs n again from its checkpoint, with the same records and the state of n - 1. So each record counts once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from nsq_fast.errors import ConfigError

from . import sql
from .queries import STATE, BatchWriter, lives_of, run, run_of, write_derived
from .schema import KEY, TABLES, TraceSettings, columns

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_RECORDS = ", ".join(TABLES["records"])
_LIVES = ", ".join(TABLES["lives"])
_CHANNELS = "topic string, channel string"
_FINISHES = (
    "topic string, partition int, channel string, internal_id decimal(20,0), trace_id decimal(20,0), offset bigint,"
    " window_ns bigint, finished_ns bigint"
)
_PROGRESS = "batch bigint, query string, watermark_ns bigint, decided_ns bigint"


def stream_tables(
    records: DataFrame,
    folder: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    settings: TraceSettings | None = None,
    **trigger: Any,
) -> StreamingQuery:
    """Start a query that writes the tables below ``folder``.

    Args:
        records: a stream, of `stream_logs` or of `parse_lines`; of the nsq source too, with ``column="body"``.
        checkpoint: folder of the query's own; to be kept together with the tables.
        trigger: of ``writeStream``, such as ``processingTime="10 seconds"`` or ``availableNow=True``.

    Messages that were delivered after their window was decided are in table ``late`` with what came then, and count
    nowhere else. The query fails with ConfigError where the tables belong to another one.
    """
    batches = _Batches(os.fspath(folder), settings or TraceSettings())
    writer = records.writeStream.foreachBatch(batches).option("checkpointLocation", os.fspath(checkpoint))
    return (writer.trigger(**trigger) if trigger else writer).start()


class _Progress(NamedTuple):
    """How far a stream has come: windows that begin before ``decided_ns`` are decided."""

    batch: int = -1
    query: str = ""
    watermark_ns: int = 0
    decided_ns: int = 0


class _Batches:
    """What is done with each micro-batch."""

    def __init__(self, folder: str, settings: TraceSettings) -> None:
        self._folder = folder
        self._settings = settings

    def __call__(self, records: DataFrame, batch: int) -> None:
        spark = records.sparkSession
        state = _State(spark, self._folder, batch, _query_of(spark))
        if state.progress.batch < batch:
            _Batch(state, BatchWriter(spark, self._folder, batch), self._settings).run(records)


def _query_of(spark: SparkSession) -> str:
    try:
        return spark.sparkContext.getLocalProperty("sql.streaming.queryId") or ""
    except AttributeError:  # Spark Connect does not tell
        return ""


class _State:
    """What earlier micro-batches left, and where this one leaves its own: two slots, by turns.

    Attributes:
        progress: after the last micro-batch that was completed.
    """

    def __init__(self, spark: SparkSession, folder: str, batch: int, query: str) -> None:
        self.spark, self.query = spark, query
        self._folder, self._batch = f"{folder}/{STATE}", batch
        slots = [self._read(slot, "progress", _PROGRESS) for slot in (0, 1)]
        self.progress = max((_Progress(*row) for row in slots[0].unionAll(slots[1]).collect()), default=_Progress())
        self._check(folder)

    def _check(self, folder: str) -> None:
        last = self.progress
        is_other = last.query not in ("", self.query) or last.batch > self._batch
        if is_other or last.batch < self._batch - 1:
            raise ConfigError(
                f"{folder}: its tables are not those of this checkpoint: they end with batch {last.batch} of query"
                f" {last.query or 'none'}, this is batch {self._batch} of {self.query}; give a new folder, or both new"
            )

    def read(self, name: str, schema: str) -> DataFrame:
        """What the last micro-batch left under a name; nothing before the first."""
        return self._read(self.progress.batch % 2, name, schema) if self.progress.batch >= 0 else self._none(schema)

    def write(self, name: str, rows: DataFrame, schema: str = "") -> DataFrame:
        """Leave something for the next, and return what was written when its schema is given."""
        rows.write.mode("overwrite").parquet(f"{self._folder}/{self._batch % 2}/{name}")
        return self._read(self._batch % 2, name, schema) if schema else rows

    def complete(self, watermark_ns: int, decided_ns: int) -> None:
        """Everything is written: from here on this micro-batch will not be repeated."""
        values = (self._batch, self.query, watermark_ns, decided_ns)
        names = (column.split(" ")[0] for column in _PROGRESS.split(", "))
        row = [F.lit(value).alias(name) for name, value in zip(names, values, strict=True)]
        self.write("progress", self.spark.range(1).select(*row).coalesce(1))

    def _read(self, slot: int, name: str, schema: str) -> DataFrame:
        try:
            return self.spark.read.schema(schema).parquet(f"{self._folder}/{slot}/{name}")
        except AnalysisException as error:
            if error.getCondition() != "PATH_NOT_FOUND":
                raise
            return self._none(schema)

    def _none(self, schema: str) -> DataFrame:
        return self.spark.createDataFrame([], schema)


class _Batch:
    def __init__(self, state: _State, writer: BatchWriter, settings: TraceSettings) -> None:
        self._state = state
        self._writer = writer
        self._settings = settings
        self._before = state.progress
        self._open_ns = state.progress.decided_ns  # windows from here on were open when it began

    def run(self, stream: DataFrame) -> None:
        new = self._writer.write("records", stream)
        watermark_ns, decided_ns, has_old = self._advance(new)
        events = new.where(F.col("event").isNotNull())
        in_time, late = self._divide(events) if has_old else (events, None)
        records = self._state.read("open", _RECORDS).unionByName(in_time)
        known = self._run(sql.CHANNELS, records=in_time).unionByName(self._state.read("channels", _CHANNELS)).distinct()
        channels = self._state.write("channels", known, _CHANNELS)
        lives = lives_of(records, channels, self._settings, watermark_ns)
        lives = lives.withColumn("window_ns", F.greatest("window_ns", F.lit(self._open_ns)))
        lives = self._state.write("lives", lives, _LIVES)
        decided, undecided = lives.where(F.col("window_ns") < decided_ns), lives.where(F.col("window_ns") >= decided_ns)
        violations = self._judge(lives, undecided, watermark_ns, decided_ns)
        write_derived(self._writer, new, records, self._writer.write("lives", decided), violations, self._settings)
        late_lives = lives_of(late, channels, self._settings, watermark_ns) if late is not None else lives.limit(0)
        self._writer.write("late", late_lives.where(F.col("deliveries") > 0))
        self._writer.write("runs", run_of(self._state.spark, self._settings, watermark_ns))
        self._state.write("open", _still_open(records, undecided, channels, decided_ns))
        self._state.complete(watermark_ns, decided_ns)

    def _run(self, query: str, **tables: DataFrame) -> DataFrame:
        return run(self._state.spark, query, **tables)

    def _advance(self, new: DataFrame) -> tuple[int, int, bool]:
        """The watermark, the begin of the first window that is not decided then, and whether a record may be late."""
        latest, oldest = new.agg(F.max("time_ns"), F.min(_window_time())).first() or (None, None)
        watermark_ns = max(self._before.watermark_ns, (latest or 0) - self._settings.lateness_ns)
        window_ns = self._settings.window_ns
        decided_ns = (watermark_ns - self._settings.grace_ns) // window_ns * window_ns
        return watermark_ns, max(self._before.decided_ns, decided_ns), oldest is not None and oldest < self._open_ns

    def _divide(self, new: DataFrame) -> tuple[DataFrame, DataFrame]:
        """Records of messages that are not decided, and of those that are."""
        is_old = _window_time() < self._open_ns
        old, open_keys = new.where(is_old), _keys(self._state.read("open", _RECORDS))
        known, late = (old.join(open_keys, F.expr(_SAME_MESSAGE), how) for how in ("left_semi", "left_anti"))
        return new.where(~is_old).unionByName(known), late

    def _judge(self, lives: DataFrame, undecided: DataFrame, watermark_ns: int, decided_ns: int) -> DataFrame:
        """Write the violations of what is decided now; keep what later ones must be compared with."""
        query = sql.judged(self._settings)
        finishes = self._run(query, lives=lives).unionByName(self._state.read("order", _FINISHES))
        found = self._run(sql.VIOLATIONS, finishes=finishes)
        is_new = (F.col("window_ns") >= self._open_ns) & (F.col("window_ns") < decided_ns)
        first_open = self._run(query, lives=undecided).agg(F.min("finished_ns")).first() or (None,)
        until_ns = min(watermark_ns, first_open[0] if first_open[0] is not None else watermark_ns)
        is_decided = F.coalesce(F.col("window_ns") < decided_ns, F.lit(True))
        self._state.write("order", self._run(sql.carried(until_ns), finishes=finishes.where(is_decided)))
        return self._writer.write("violations", found.where(is_new))


def _window_time() -> Column:
    """What says which window a record is of: when its message was published, or when it was written."""
    return F.coalesce("published_ns", "time_ns")


_SAME_MESSAGE = " AND ".join(f"{name} <=> key_{name}" for name in KEY)


def _keys(rows: DataFrame) -> DataFrame:
    return rows.selectExpr(*(f"{name} AS key_{name}" for name in KEY)).distinct()


def _still_open(records: DataFrame, undecided: DataFrame, channels: DataFrame, decided_ns: int) -> DataFrame:
    """The records of messages that are not decided, and publishes to topics that nobody consumes yet."""
    of_lives = records.join(_keys(undecided), F.expr(_SAME_MESSAGE), "left_semi")
    young = records.where(f"{sql.IS_PUBLISH} AND time_ns >= {decided_ns}")
    return of_lives.unionByName(young.join(channels, "topic", "left_anti")).selectExpr(*columns("records"))
