"""The figures of a report, taken from the tables: as many rows as a page can show, never more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from .schema import COUNTS, DURATIONS, GROUP, KEY, columns
from .shown import (
    FAULTS,
    MOST_CHANNELS,
    MOST_EXAMPLES,
    MOST_GROUPS,
    MOST_SOURCES,
    SERIES,
    SHARES,
    Channel,
    Figures,
    Source,
    TraceGroup,
    bucket_of,
    in_order,
    with_gaps,
)
from .tables import percentiles, read_table, statistics


def figures_of(spark: SparkSession, folder: str | os.PathLike[str]) -> Figures:
    """Take the figures from tables. Raises ConfigError when there are none."""
    tables = _Tables(spark, folder)
    sources, lines, problems = _sources(tables["records"])
    counted = tables["records"].agg(F.count_if(F.col("event") == "publish"), F.min("time_ns"), F.max("time_ns")).first()
    publishes, begin_ns, end_ns = counted or (0, 0, 0)
    run = tables["runs"].orderBy(F.desc("batch")).first()
    groups = statistics(tables["lives"], tables["violations"])
    totals = groups.agg(F.count("*").alias("groups"), *(F.sum(name).alias(name) for name in COUNTS)).first()
    return Figures(
        lines=lines,
        problems=problems,
        records=lines - problems,
        publishes=publishes,
        begin_ns=begin_ns or 0,
        end_ns=end_ns or 0,
        window_ns=run["window_ns"] if run else 0,
        grace_ns=run["grace_ns"] if run else 0,
        judged_by=run["judged_by"] if run else "off",
        unconsumed=_unconsumed(tables["records"]),
        unpublished=tables["lives"].where(~F.col("is_published")).count(),
        late=tables["late"].count(),
        totals={name: int(totals[name] or 0) if totals else 0 for name in COUNTS},
        group_count=totals["groups"] if totals else 0,
        groups=_groups(groups),
        channels=_channels(tables["lives"], run["window_ns"] if run else 1),
        slowest=_slowest(tables["slowest"]),
        examples={kind: _examples(tables[kind]) for kind in FAULTS},
        skews=_skews(tables["skews"]),
        sources=sources,
    )


class _Tables:
    """Tables by name, each read once."""

    def __init__(self, spark: SparkSession, folder: str | os.PathLike[str]) -> None:
        self._spark, self._folder = spark, folder

    def __getitem__(self, name: str) -> DataFrame:
        return read_table(self._spark, self._folder, name)


def _sources(records: DataFrame) -> tuple[list[Source], int, int]:
    grouped = records.groupBy("source").agg(F.count("*").alias("lines"), F.count("problem").alias("problems"))
    rows = grouped.orderBy(F.desc("problems"), F.desc("lines"), "source").limit(MOST_SOURCES).collect()
    bad = records.where(F.col("problem").isNotNull()).groupBy("source").agg(F.min("problem").alias("example"))
    examples = {row["source"]: row["example"] for row in bad.limit(MOST_SOURCES).collect()} if rows else {}
    lines, problems = grouped.agg(F.sum("lines"), F.sum("problems")).first() or (0, 0)
    sources = [Source(row["source"], row["lines"], row["problems"], examples.get(row["source"])) for row in rows]
    return sources, lines or 0, problems or 0


def _unconsumed(records: DataFrame) -> dict[str, int]:
    by_topic = records.where(F.col("event").isNotNull()).groupBy("topic")
    counted = by_topic.agg(F.count("*").alias("records"), F.count("channel").alias("deliveries"))
    rows = counted.where("deliveries = 0").orderBy(F.desc("records"), "topic").limit(MOST_GROUPS).collect()
    return {row["topic"]: row["records"] for row in rows}


def _groups(groups: DataFrame) -> list[TraceGroup]:
    faults = F.lit(0)
    for kind in FAULTS:
        faults = faults + F.col(kind)
    most = groups.orderBy(F.desc(faults), F.desc("messages"), *GROUP).limit(MOST_GROUPS).collect()
    durations = [name for name in columns("windows") if name.endswith("_ns") and name != "window_ns"]
    found = [
        TraceGroup(
            row["topic"],
            row["partition"],
            row["channel"],
            {name: int(row[name]) for name in COUNTS},
            {name: row[name] for name in durations},
        )
        for row in most
    ]
    return in_order(found)


def _channels(lives: DataFrame, window_ns: int) -> list[Channel]:
    by = ("topic", "channel")
    shares = tuple(share / 100 for share in SHARES)
    curves = [percentiles(f"{each}_ns", shares).alias(each) for each in DURATIONS]
    spread = [F.min("window_ns").alias("first"), F.max("window_ns").alias("last"), F.count("*").alias("messages")]
    rows = lives.groupBy(*by).agg(*spread, *curves).orderBy(F.desc("messages"), *by).limit(MOST_CHANNELS).collect()
    if not rows:
        return []
    bucket_ns = bucket_of(min(row["first"] for row in rows), max(row["last"] for row in rows), window_ns)
    drawn = _any_of((F.col("topic") == row["topic"]) & (F.col("channel") == row["channel"]) for row in rows)
    times = _series(lives.where(drawn), by, bucket_ns)
    return [
        Channel(
            row["topic"],
            row["channel"],
            row["messages"],
            {each: row[each] for each in DURATIONS if row[each]},
            times[row["topic"], row["channel"]],
        )
        for row in sorted(rows, key=lambda row: (row["topic"], row["channel"]))
    ]


def _any_of(conditions: Any) -> Column:
    found = F.lit(False)
    for condition in conditions:
        found = found | condition
    return found


def _series(
    lives: DataFrame, by: Sequence[str], bucket_ns: int
) -> dict[tuple[str, str], list[tuple[int, list[int] | None]]]:
    begin = F.col("published_ns") - F.pmod("published_ns", F.lit(bucket_ns))
    grouped = lives.groupBy(*by, begin.alias("begin")).agg(percentiles("latency_ns", SERIES).alias("values"))
    found: dict[tuple[str, str], list[tuple[int, list[int]]]] = {}
    for row in grouped.orderBy("begin").collect():
        found.setdefault((row["topic"], row["channel"]), []).append((row["begin"], row["values"]))
    return {channel: with_gaps(rows, bucket_ns) for channel, rows in found.items()}


def _slowest(slowest: DataFrame) -> list[dict[str, Any]]:
    rows = slowest.orderBy(F.desc("latency_ns"), *GROUP, "internal_id").limit(MOST_EXAMPLES).collect()
    return [_plain(row.asDict(recursive=True)) for row in rows]


def _examples(table: DataFrame) -> list[dict[str, Any]]:
    return [
        _plain(row.asDict()) for row in table.orderBy("window_ns", *GROUP, "internal_id").limit(MOST_EXAMPLES).collect()
    ]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """With ids as whole numbers."""
    ids = {name for name in row if name.endswith(KEY[:2])}
    return {name: int(value) if name in ids and value is not None else value for name, value in row.items()}


def _skews(skews: DataFrame) -> list[dict[str, Any]]:
    merged = skews.groupBy("side", "nsqd", "host").agg(
        F.sum("messages").alias("messages"), F.max("worst_ns").alias("worst_ns")
    )
    return [row.asDict() for row in merged.orderBy(F.desc("worst_ns")).limit(MOST_EXAMPLES).collect()]
