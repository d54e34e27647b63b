"""The figures of a report, taken from the tables: as many rows as a page can show, never more."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from .schema import GROUP, KEY, columns
from .tables import COUNTS, DURATIONS, percentiles, read_table, statistics

MOST_GROUPS = 200
MOST_CHANNELS = 12  # that get charts
MOST_POINTS = 120  # on the axis of time
MOST_EXAMPLES = 20
MOST_SOURCES = 30
SHARES = (1, 5, 10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 90, 92.5, 95, 97, 98, 99, 99.5, 99.7, 99.9, 99.97, 100)
FAULTS = ("lost", "duplicates", "violations")
SERIES = (0.5, 0.95, 0.99, 1.0)


class TraceGroup(msgspec.Struct, frozen=True):
    """A channel in a partition of a topic: counts and durations (nanoseconds) by name, as in table ``windows``."""

    topic: str
    partition: int | None
    channel: str
    counts: dict[str, int]
    durations: dict[str, int | None]


class Channel(msgspec.Struct, frozen=True):
    """What is drawn of a channel of a topic.

    Attributes:
        curves: by kind of duration, a percentile in nanoseconds for each of `SHARES`.
        times: begin of a bucket of time, and the percentiles `SERIES` of the latency of what was published in it.
    """

    topic: str
    channel: str
    messages: int
    curves: dict[str, list[int]]
    times: list[tuple[int, list[int] | None]]


class Source(msgspec.Struct, frozen=True):
    """A file of lines, and a line of it that holds no record."""

    name: str
    lines: int
    problems: int
    example: str | None


class Figures(msgspec.Struct, frozen=True):
    """All that a report shows.

    Attributes:
        lines, problems, records, publishes: over all sources.
        unconsumed: publishes to topics of which no delivery was recorded.
        unpublished: messages that were delivered, with no record of their producer.
        totals: over all groups; ``groups`` are those with faults first, no more than `MOST_GROUPS`.
        examples: by kind of fault, the first few.
    """

    lines: int
    problems: int
    records: int
    publishes: int
    begin_ns: int
    end_ns: int
    window_ns: int
    grace_ns: int
    judged_by: str
    unconsumed: dict[str, int]
    unpublished: int
    late: int
    totals: dict[str, int]
    group_count: int
    groups: list[TraceGroup]
    channels: list[Channel]
    slowest: list[dict[str, Any]]
    examples: dict[str, list[dict[str, Any]]]
    skews: list[dict[str, Any]]
    sources: list[Source]

    @property
    def lanes(self) -> list[TraceGroup]:
        """The former name of ``groups``, for one version."""
        warnings.warn("Figures.lanes is now Figures.groups", DeprecationWarning, stacklevel=2)
        return self.groups


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
    return sorted(
        found, key=lambda group: (group.topic, group.channel, -1 if group.partition is None else group.partition)
    )


def _channels(lives: DataFrame, window_ns: int) -> list[Channel]:
    by = ("topic", "channel")
    shares = tuple(share / 100 for share in SHARES)
    curves = [percentiles(f"{each}_ns", shares).alias(each) for each in DURATIONS]
    spread = [F.min("window_ns").alias("first"), F.max("window_ns").alias("last"), F.count("*").alias("messages")]
    rows = lives.groupBy(*by).agg(*spread, *curves).orderBy(F.desc("messages"), *by).limit(MOST_CHANNELS).collect()
    if not rows:
        return []
    bucket_ns = _bucket(min(row["first"] for row in rows), max(row["last"] for row in rows), window_ns)
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


def _bucket(first_ns: int, last_ns: int, window_ns: int) -> int:
    """So many windows that the axis has no more points than it can show."""
    windows = (last_ns - first_ns) // window_ns + 1
    return window_ns * -(-windows // MOST_POINTS)


def _series(
    lives: DataFrame, by: Sequence[str], bucket_ns: int
) -> dict[tuple[str, str], list[tuple[int, list[int] | None]]]:
    begin = F.col("published_ns") - F.pmod("published_ns", F.lit(bucket_ns))
    grouped = lives.groupBy(*by, begin.alias("begin")).agg(percentiles("latency_ns", SERIES).alias("values"))
    found: dict[tuple[str, str], list[tuple[int, list[int] | None]]] = {}
    for row in grouped.orderBy("begin").collect():
        series = found.setdefault((row["topic"], row["channel"]), [])
        if series and row["begin"] - series[-1][0] > bucket_ns:
            series.append((series[-1][0] + bucket_ns, None))  # nothing was published: a gap in the line
        series.append((row["begin"], row["values"]))
    return found


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
