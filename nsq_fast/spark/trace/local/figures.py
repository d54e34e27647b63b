"""The figures of a report from trace logs on this machine, without tables that stay."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import duckdb

from nsq_fast.errors import ConfigError
from nsq_fast.spark.trace.schema import COUNTS, DURATIONS, KEY, POINTS, columns
from nsq_fast.spark.trace.settings import TraceSettings
from nsq_fast.spark.trace.shown import (
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

from .queries import GROUPS, KEYS, NULLS_FIRST, statements
from .records import read_records

Tell = Callable[[str, float], object]
_SPREAD = [name for name in columns("windows") if name.endswith("_ns") and name != "window_ns"]
_BATCH = {"batch": 0}  # what tables of Spark say of rows that no stream wrote
_EVENT = ("event", "at_ns", "received_ns", "attempts", "outcome", "nsqd", "consumer")


def local_figures(
    logs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    settings: TraceSettings | None = None,
    memory: str = "1g",
    tell: Tell = lambda stage, share: None,
) -> Figures:
    """The figures that `write_tables` and `figures_of` give of these logs, without Spark.

    Percentiles are exact. Raises ConfigError when there is no record in the logs, or they are not on this machine.

    Args:
        memory: about the most that DuckDB takes; what does not fit goes to a temporary folder.
        tell: called with the name of the stage, and the share of it that is done.
    """
    paths = [os.fspath(each) for each in ([logs] if isinstance(logs, (str, os.PathLike)) else logs)]
    with tempfile.TemporaryDirectory(prefix="nsq_fast_traces_") as folder:
        limits = {"memory_limit": _bytes(memory), "temp_directory": folder, "preserve_insertion_order": False}
        with duckdb.connect(str(Path(folder, "traces")), config=limits) as connection:
            return _Computation(connection, settings or TraceSettings(), tell).figures(paths)


def _bytes(memory: str) -> str:
    """A size as Spark's options have it, as DuckDB's."""
    number, unit = memory.rstrip("bBkKmMgGtT"), memory.lstrip("0123456789").lower().removesuffix("b")
    if not number.isdigit() or unit not in ("k", "m", "g", "t"):
        raise ConfigError(f"memory={memory!r}: must be a number with k, m, g or t, such as 1g")
    return f"{number}{unit.upper()}iB"


class _Computation:
    """One report, in one database."""

    def __init__(self, connection: Any, settings: TraceSettings, tell: Tell) -> None:
        self._connection = connection
        self._settings = settings
        self._tell = tell

    def figures(self, paths: Sequence[str]) -> Figures:
        """Read, compute, take the figures."""
        self._read(paths)
        ((publishes, begin_ns, end_ns),) = self._rows(
            "SELECT count(*) FILTER (event = 'publish'), min(time_ns), max(time_ns) FROM records"
        )
        if end_ns is None:
            raise ConfigError(
                "nothing was traced: the logs hold no record of a publish or a consumer (see nsq_fast.runtime.trace)"
            )
        steps = statements(self._settings, end_ns)
        for number, statement in enumerate(steps):
            self._tell("joining", number / len(steps))
            self._connection.execute(statement)
        self._tell("counting", 0.0)
        sources, lines, problems = self._sources()
        groups, totals, group_count = self._groups()
        return Figures(
            lines=lines,
            problems=problems,
            records=lines - problems,
            publishes=publishes,
            begin_ns=begin_ns,
            end_ns=end_ns,
            window_ns=self._settings.window_ns,
            grace_ns=self._settings.grace_ns,
            judged_by=self._settings.order,
            unconsumed=self._unconsumed(),
            unpublished=self._rows("SELECT count(*) FROM lives WHERE NOT is_published")[0][0],
            late=0,
            totals=totals,
            group_count=group_count,
            groups=groups,
            channels=self._channels(),
            slowest=self._slowest(),
            examples={kind: self._examples(kind) for kind in FAULTS},
            skews=self._skews(),
            sources=sources,
        )

    def _read(self, paths: Sequence[str]) -> None:
        self._tell("reading", 0.0)
        is_made = False
        for batch in read_records(paths, lambda share: self._tell("reading", share)):
            self._connection.register("batch", batch)
            verb = "INSERT INTO records" if is_made else "CREATE TABLE records AS"
            self._connection.execute(f"{verb} SELECT * FROM batch")
            is_made = True
        if not is_made:
            raise ConfigError("nothing was traced: the logs are empty")

    def _rows(self, query: str) -> list[Any]:
        rows: list[Any] = self._connection.execute(query).fetchall()
        return rows

    def _dicts(self, query: str, names: Iterable[str]) -> list[dict[str, Any]]:
        named = list(names)
        rows = self._rows(f"SELECT {', '.join(_quoted(name) for name in named)} {query}")
        return [dict(zip(named, row, strict=True)) for row in rows]

    def _sources(self) -> tuple[list[Source], int, int]:
        rows = self._rows(
            "SELECT source, count(*), count(problem), min(problem) FROM records GROUP BY source"
            f" ORDER BY count(problem) DESC, count(*) DESC, source LIMIT {MOST_SOURCES}"
        )
        ((lines, problems),) = self._rows("SELECT count(*), count(problem) FROM records")
        return [Source(*row) for row in rows], lines, problems

    def _unconsumed(self) -> dict[str, int]:
        return dict(
            self._rows(
                "SELECT topic, count(*) FROM records WHERE event IS NOT NULL GROUP BY topic HAVING count(channel) = 0"
                f" ORDER BY count(*) DESC, topic LIMIT {MOST_GROUPS}"
            )
        )

    def _groups(self) -> tuple[list[TraceGroup], dict[str, int], int]:
        """Those that are shown, the totals of all, and how many there are."""
        points = ", ".join(map(str, POINTS))
        self._connection.execute(f"""
CREATE TABLE groups AS
SELECT lanes.*, coalesce(wrong.violations, 0) AS violations FROM (
    SELECT {GROUPS}, count(*) AS messages,
        {", ".join(f"count(*) FILTER (state = '{state}') AS {state}" for state in ("finished", "pending", "lost"))},
        count(*) FILTER (finishes > 1) AS duplicates,
        {", ".join(f"sum({name}) AS {name}" for name in COUNTS[-3:])},
        {", ".join(f"quantile_disc({each}_ns, [{points}]) AS {each}" for each in DURATIONS)}
    FROM lives GROUP BY {GROUPS}
) AS lanes LEFT JOIN (SELECT {GROUPS}, count(*) AS violations FROM violations GROUP BY {GROUPS}) AS wrong
ON lanes.topic = wrong.topic AND lanes.channel = wrong.channel
AND lanes.partition IS NOT DISTINCT FROM wrong.partition""")
        sums = self._rows(f"SELECT count(*), {', '.join(f'sum({name})' for name in COUNTS)} FROM groups")[0]
        rows = self._rows(
            f"SELECT {', '.join((GROUPS, *COUNTS, *DURATIONS))} FROM groups"
            f" ORDER BY {' + '.join(FAULTS)} DESC, messages DESC, {NULLS_FIRST} LIMIT {MOST_GROUPS}"
        )
        return [*in_order(map(_group, rows))], dict(zip(COUNTS, map(_whole, sums[1:]), strict=True)), sums[0]

    def _channels(self) -> list[Channel]:
        shares = ", ".join(str(share / 100) for share in SHARES)
        rows = self._rows(
            "SELECT topic, channel, count(*), min(window_ns), max(window_ns),"
            f" {', '.join(f'quantile_disc({each}_ns, [{shares}])' for each in DURATIONS)} FROM lives"
            f" GROUP BY topic, channel ORDER BY count(*) DESC, topic, channel LIMIT {MOST_CHANNELS}"
        )
        if not rows:
            return []
        bucket_ns = bucket_of(min(row[3] for row in rows), max(row[4] for row in rows), self._settings.window_ns)
        return [
            Channel(
                topic,
                channel,
                messages,
                {name: values for name, values in zip(DURATIONS, curves, strict=True) if values},
                self._series(topic, channel, bucket_ns),
            )
            for topic, channel, messages, _, _, *curves in sorted(rows, key=lambda row: row[:2])
        ]

    def _series(self, topic: str, channel: str, bucket_ns: int) -> list[tuple[int, list[int] | None]]:
        points = ", ".join(map(str, SERIES))
        rows = self._connection.execute(
            f"SELECT published_ns - published_ns % {bucket_ns} AS begin, quantile_disc(latency_ns, [{points}])"
            " FROM lives WHERE topic = ? AND channel = ? GROUP BY begin ORDER BY begin",
            [topic, channel],
        ).fetchall()
        return with_gaps(rows, bucket_ns)

    def _slowest(self) -> list[dict[str, Any]]:
        most = min(self._settings.slowest, MOST_EXAMPLES)
        names = columns("lives")
        order = f"latency_ns DESC, {NULLS_FIRST}, internal_id, trace_id"
        rows = self._dicts(f"FROM lives WHERE latency_ns IS NOT NULL ORDER BY {order} LIMIT {most}", names)
        return [{**row, "events": self._events(row), **_BATCH} for row in rows]

    def _events(self, life: dict[str, Any]) -> list[dict[str, Any]]:
        same = " AND ".join(f"{name} IS NOT DISTINCT FROM ?" for name in KEY)
        rows = self._connection.execute(
            "SELECT event, time_ns, time_ns - handling_ns, attempts, outcome, nsqd, consumer FROM records"
            f" WHERE event IS NOT NULL AND {same} AND (channel IS NULL OR channel = ?)",
            [*(life[name] for name in KEY), life["channel"]],
        ).fetchall()
        events = [dict(zip(_EVENT, row, strict=True)) for row in rows]
        # As Spark sorts structs: null is the smallest.
        return sorted(
            events, key=lambda each: [(value is not None, value) for value in (each["at_ns"], *each.values())]
        )

    def _examples(self, kind: str) -> list[dict[str, Any]]:
        found = {
            "lost": ("lives", "FROM lives WHERE state = 'lost'"),
            "duplicates": ("lives", "FROM lives WHERE finishes > 1"),
            "violations": ("violations", "FROM violations"),
        }
        table, query = found[kind]
        order = f"window_ns NULLS FIRST, {NULLS_FIRST}, internal_id, trace_id"
        rows = self._dicts(f"{query} ORDER BY {order} LIMIT {MOST_EXAMPLES}", columns(table))
        return [{**row, **_BATCH} for row in rows]

    def _skews(self) -> list[dict[str, Any]]:
        tolerance = self._settings.skew_tolerance_ns
        names = ("side", "nsqd", "host", "messages", "worst_ns")
        return self._dicts(
            f"""
FROM (
    SELECT 'consumer' AS side, nsqd, regexp_replace(consumer, ':\\d+$', '') AS host, count(*) AS messages,
        max(published_ns - (time_ns - handling_ns)) AS worst_ns
    FROM records WHERE event = 'consume' AND published_ns - (time_ns - handling_ns) > {tolerance} GROUP BY ALL
    UNION ALL
    SELECT 'producer', nsqd, NULL, count(DISTINCT ({KEYS})), max(-acknowledged_ns)
    FROM lives WHERE -acknowledged_ns > {tolerance} GROUP BY nsqd
) ORDER BY worst_ns DESC, side, nsqd, host LIMIT {MOST_EXAMPLES}""",
            names,
        )


def _group(row: Sequence[Any]) -> TraceGroup:
    topic, partition, channel = row[:3]
    counts = dict(zip(COUNTS, map(_whole, row[3 : 3 + len(COUNTS)]), strict=True))
    spread: list[int | None] = []
    for values in row[3 + len(COUNTS) :]:
        spread += values or [None] * len(POINTS)
    return TraceGroup(topic, partition, channel, counts, dict(zip(_SPREAD, spread, strict=True)))


def _whole(value: Any) -> int:
    return int(value or 0)


def _quoted(name: str) -> str:
    return f'"{name}"'
