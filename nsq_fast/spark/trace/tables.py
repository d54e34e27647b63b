"""Compute the tables from lives and records, and write them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from nsq_fast.errors import ConfigError

from .lives import channels_of, lives_of
from .order import judged, violations_of
from .schema import COUNTS, DURATIONS, GROUP, KEY, POINTS, TABLES, columns, ddl
from .settings import TraceSettings

ACCURACY = 10_000  # percentiles are off by at most one rank in so many; exact up to so many messages
STATE = "state"  # the folder that a stream keeps, beside its tables, what it has not decided in


def write_tables(
    spark: SparkSession, records: DataFrame, folder: str | os.PathLike[str], settings: TraceSettings | None = None
) -> None:
    """Compute all tables of `TABLES` and write them as Parquet below ``folder``, one folder each.

    Each is computed from those before it as they were written, so that lines are parsed once and nothing is held in
    memory. What an earlier call wrote is replaced. Raises ConfigError when there is no record in the logs.
    """
    settings = settings or TraceSettings()
    refuse_stream(folder)
    writer = BatchWriter(spark, folder, 0)
    records = writer.write("records", records)
    end_ns = records.agg(F.max("time_ns")).first()[0]
    if end_ns is None:
        raise ConfigError(
            "nothing was traced: the logs hold no record of a publish or a consumer (see nsq_fast.runtime.trace)"
        )
    lives = writer.write("lives", lives_of(records, F.broadcast(channels_of(records)), settings, end_ns))
    violations = writer.write("violations", violations_of(judged(lives, settings)))
    write_derived(writer, records, lives, violations, settings)
    writer.write("late", lives.limit(0))
    writer.write("runs", run_of(spark, settings, end_ns))


def write_derived(
    writer: BatchWriter,
    records: DataFrame,
    lives: DataFrame,
    violations: DataFrame,
    settings: TraceSettings,
    events: DataFrame | None = None,
) -> None:
    """The tables that need nothing but the lives and violations of a batch, and its records.

    ``events`` are the records of these lives, where they are not in ``records``.
    """
    writer.write("windows", statistics(lives, violations, "window_ns"))
    writer.write("lost", lives.where(F.col("state") == "lost"))
    writer.write("duplicates", lives.where(F.col("finishes") > 1))
    writer.write("slowest", slowest_of(lives, records if events is None else events, settings.slowest))
    writer.write("skews", skews_of(lives, records, settings))


def run_of(spark: SparkSession, settings: TraceSettings, end_ns: int) -> DataFrame:
    """The row of table ``runs``."""
    return spark.range(1).select(
        F.lit(settings.window_ns).alias("window_ns"),
        F.lit(settings.grace_ns).alias("grace_ns"),
        F.lit(settings.order).alias("judged_by"),
        F.lit(end_ns).alias("end_ns"),
    )


class BatchWriter:
    """Writes the part of each table that one batch makes up: ``<table>/batch=<number>``, replaced as a whole."""

    def __init__(self, spark: SparkSession, folder: str | os.PathLike[str], batch: int) -> None:
        self._spark = spark
        self._folder = str(folder)
        self._batch = batch

    def write(self, table: str, rows: DataFrame) -> DataFrame:
        """Write, and return what was written."""
        path = f"{self._folder}/{table}/batch={self._batch}"
        exact = [f"CAST({name} AS {kind}) AS {name}" for name, kind in (each.split(" ", 1) for each in TABLES[table])]
        rows.selectExpr(*exact).write.mode("overwrite").parquet(path)
        return self._spark.read.schema(", ".join(TABLES[table])).parquet(path)


def read_table(spark: SparkSession, folder: str | os.PathLike[str], table: str) -> DataFrame:
    """A table that `write_tables` or `stream_tables` wrote: all its batches. Raises ConfigError when there is none."""
    path = f"{folder}/{table}"
    if "://" not in path and not Path(path).is_dir():
        raise ConfigError(f"{folder}: no traces were written there")
    return spark.read.schema(ddl(table)).parquet(path)


def refuse_stream(folder: str | os.PathLike[str]) -> None:
    """Raise ConfigError where the tables belong to a stream: a batch would count its messages twice."""
    if Path(folder, STATE).exists():
        raise ConfigError(f"{folder}: a stream writes its tables there; give another folder")


def statistics(lives: DataFrame, violations: DataFrame, *more: str) -> DataFrame:
    """Counts, and percentiles of durations, by topic, partition, channel, and the columns ``more``.

    Percentiles are values that occur: the smallest that no less than so many per cent are equal to or below.
    """
    names = (*GROUP, *more)
    messages = lives.select(
        *names, "state", "finishes", *COUNTS[-3:], *(f"{each}_ns" for each in DURATIONS), F.lit(0).alias("violation")
    )
    wrong = violations.select(*names, F.lit(1).alias("violation"))
    rows = messages.unionByName(wrong, allowMissingColumns=True)
    counted = rows.groupBy(*names).agg(
        F.count("state").alias("messages"),
        *(F.count_if(F.col("state") == state).alias(state) for state in ("finished", "pending", "lost")),
        F.count_if(F.col("finishes") > 1).alias("duplicates"),
        F.sum("violation").alias("violations"),
        *(F.sum(name).alias(name) for name in COUNTS[-3:]),
        *(percentiles(f"{each}_ns", POINTS).alias(each) for each in DURATIONS),
    )
    return counted.select(*names, *COUNTS, *_spread())


def _spread() -> Iterator[Column]:
    for each in DURATIONS:
        for number, point in enumerate(("p50", "p95", "p99", "max")):
            yield F.col(each)[number].alias(f"{each}_{point}_ns")


def percentiles(name: str, points: tuple[float, ...]) -> Column:
    """An array of the percentiles of a column, nulls left out; null when there is nothing else."""
    return F.percentile_approx(name, list(points), ACCURACY)


def slowest_of(lives: DataFrame, records: DataFrame, count: int) -> DataFrame:
    """The lives with the longest latency, with what is recorded of them in the order of their time."""
    top = lives.where(F.col("latency_ns").isNotNull()).orderBy(F.desc("latency_ns"), *GROUP, "internal_id").limit(count)
    event = F.struct(
        "event",
        F.col("time_ns").alias("at_ns"),
        (F.col("time_ns") - F.col("handling_ns")).alias("received_ns"),
        "attempts",
        "outcome",
        "nsqd",
        "consumer",
    )
    found = records.where(F.col("event").isNotNull()).select(
        *(F.col(name).alias(f"record_{name}") for name in (*KEY, "channel")), event.alias("one")
    )
    is_channel = F.col("record_channel").isNull() | (F.col("record_channel") == F.col("channel"))
    joined = found.join(F.broadcast(top), same_message("record_") & is_channel)
    names = columns("lives")
    key = (*KEY, "channel")
    others = [F.first(name).alias(name) for name in names if name not in key]
    events = F.sort_array(F.collect_list(F.struct(F.col("one.at_ns"), "one"))).getField("one").alias("events")
    return joined.groupBy(*key).agg(*others, events).select(*columns("slowest"))


def same_message(prefix: str) -> Column:
    """Whether the columns of `KEY`, and those with the prefix, are of one message; a null partition is one."""
    same = F.lit(True)
    for name in KEY:
        same = same & F.col(name).eqNullSafe(F.col(f"{prefix}{name}"))
    return same


def skews_of(lives: DataFrame, records: DataFrame, settings: TraceSettings) -> DataFrame:
    """Where clocks contradict each other: of a consumer's host and an nsqd, or of an nsqd and its producers."""
    early = F.col("published_ns") - (F.col("time_ns") - F.col("handling_ns"))
    host = F.regexp_replace("consumer", r":\d+$", "")
    consumers = records.where((F.col("event") == "consume") & (early > settings.skew_tolerance_ns)).select(
        F.lit("consumer").alias("side"), "nsqd", host.alias("host"), early.alias("early_ns"), F.lit(1).alias("one")
    )
    message = F.struct(*KEY)
    producers = lives.where(-F.col("acknowledged_ns") > settings.skew_tolerance_ns).select(
        F.lit("producer").alias("side"),
        "nsqd",
        F.lit(None).cast("string").alias("host"),
        (-F.col("acknowledged_ns")).alias("early_ns"),
        message.alias("message"),
    )
    by = ("side", "nsqd", "host")
    counted = [
        consumers.groupBy(*by).agg(F.count("one").alias("messages"), F.max("early_ns").alias("worst_ns")),
        producers.groupBy(*by).agg(F.count_distinct("message").alias("messages"), F.max("early_ns").alias("worst_ns")),
    ]
    return counted[0].unionByName(counted[1])
