"""The tables of traces by Spark: records parsed of lines, what ``sql`` computes of them, and figures taken of that."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from nsq_fast.errors import ConfigError

from . import sql
from .schema import (
    BEGIN,
    DELIVERED,
    DURATIONS,
    ID,
    LATEST_NS,
    LINE,
    LONGEST,
    MARK,
    MAX_ID,
    NOTHING_TRACED,
    PARTITION_SHIFT,
    POINTS,
    PROBLEM_LENGTH,
    SECOND,
    STORED,
    TABLES,
    Figures,
    TraceSettings,
    columns,
    ddl,
    expand,
    is_url,
)


def run(spark: SparkSession, query: str, **tables: DataFrame) -> DataFrame:
    """A query of ``sql`` on these tables."""
    return spark.sql(query.replace('"', "`"), **tables)


# From the lines of trace logs to records: parsed by Spark itself, with a fixed schema.
#
# Lines are those of our clients, JSON, or the [TRACE] lines of a redesigned nsqd (youzan/nsq: nsqd/tracer.go). A line
# may have anything before its record; blank lines are skipped. A line without a record is kept as a row with a
# ``problem``: nothing is dropped without a word, and no line stops the run.
#
# The event of a server's line is ``server``, its outcome what happened in the server's words: PUB, PUB_CLIENT,
# READ_QUEUE, START, ... A line of a delivery names no partition: the upper bits of its internal id do. No line names
# the nsqd that wrote it.


_GLOB = re.compile(r"([\[\]{}*?,\\])")
_NEEDED = ("time", "topic", "internal_id", "trace_id")
_NEEDED_OF_CONSUME = ("channel", "local", "timestamp", "attempts")
_NAMES = tuple(field.split(" ", 1)[0] for field in LINE.split(", "))


def read_logs(spark: SparkSession, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> DataFrame:
    """The records of trace logs: files, folders, patterns, compressed ones too; table ``records`` without ``batch``.

    Raises ConfigError when a path names nothing.
    """
    listed = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    names = [path if is_url(path) else _GLOB.sub(r"\\\1", path) for path in expand(listed)]
    try:
        return parse_lines(spark.read.text(names))
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        raise ConfigError(f"no trace log: {error}") from None


def stream_logs(spark: SparkSession, folder: str | os.PathLike[str], **options: str) -> DataFrame:
    """The same of a folder as a stream: a record for each line of each file that appears there.

    Files must appear complete, by a rename, as Spark's file source asks for. ``options`` are those of that source.
    """
    return parse_lines(spark.readStream.options(**options).text(os.fspath(folder)))


def parse_lines(lines: DataFrame, column: str = "value") -> DataFrame:
    """The records of lines, from a batch or a stream: of log files, or the bodies of messages (``column="body"``)."""
    text = F.col(column).cast("string")
    begin = f"greatest(1, coalesce(nullif(locate('{BEGIN}', text), 0), locate('{{', text)))"
    malformed = "map('columnNameOfCorruptRecord', '_malformed')"
    rows = lines.select(text.alias("text"), F.input_file_name().alias("source")).where("length(trim(text)) > 0")
    rows = rows.selectExpr(
        "text",
        "source",
        f"from_json(substr(text, {begin}), '{LINE}', {malformed}) AS json",
        f"{_server_record()} AS server",
    )
    rows = rows.selectExpr("text", "source", "server IS NOT NULL AS is_server", *map(_field, _NAMES))
    rows = rows.selectExpr("*", f"coalesce({_is_record()}, false) AS is_good")
    return rows.selectExpr(*_record())


def _put(group: int, kind: str = "string") -> str:
    return f"try_cast(regexp_extract(text, r'{STORED}', {group}) AS {kind})"


def _sent(group: int, kind: str = "string") -> str:
    return f"try_cast(regexp_extract(text, r'{DELIVERED}', {group}) AS {kind})"


_OF_SERVER = {  # of a message that was stored, and of one that was delivered
    "event": ("'server'", "'server'"),
    "time": (_put(7, "bigint"), _sent(9, "bigint")),
    "topic": (_put(1), _sent(1)),
    "partition": (_put(2, "int"), f"CAST(shiftright({_sent(4, 'bigint')}, {PARTITION_SHIFT}) AS int)"),
    "channel": ("CAST(NULL AS string)", _sent(2)),
    "local": ("CAST(NULL AS string)", f"CASE WHEN contains({_sent(8)}, ':') THEN {_sent(8)} END"),
    "internal_id": (_put(4, ID), _sent(4, ID)),
    "trace_id": (_put(3, ID), _sent(3, ID)),
    "offset": (_put(6, "bigint"), _sent(6, "bigint")),
    "timestamp": ("CAST(NULL AS bigint)", _sent(5, "bigint")),
    "attempts": ("CAST(NULL AS int)", _sent(10, "int")),
    "outcome": (f"CASE WHEN startswith({_put(5)}, ' put success') THEN 'PUB_CLIENT' ELSE 'PUB' END", _sent(7)),
}


def _server_record() -> str:
    stored, delivered = (
        "named_struct(" + ", ".join(f"'{name}', {ways[which]}" for name, ways in _OF_SERVER.items()) + ")"
        for which in (0, 1)
    )
    return (
        f"CASE WHEN contains(text, '{MARK}') THEN"
        f" CASE WHEN rlike(text, r'{DELIVERED}') THEN {delivered} WHEN rlike(text, r'{STORED}') THEN {stored} END END"
    )


def _field(name: str) -> str:
    """A field of a line: of its JSON, unless it is a server's."""
    of_json = f"CASE WHEN server IS NULL THEN json.`{name}` END"
    return f"{f'coalesce(server.`{name}`, {of_json})' if name in _OF_SERVER else of_json} AS `{name}`"


def _is_record() -> str:
    """Whether a line of these fields is what a producer, a consumer or a server wrote; null counts as no."""
    checks = [
        "_malformed IS NULL",
        *(f"`{name}` IS NOT NULL" for name in _NEEDED),
        *(f"{name} BETWEEN 0 AND CAST('{MAX_ID}' AS {ID})" for name in ("internal_id", "trace_id")),
        f"`time` BETWEEN 0 AND {LATEST_NS}",
        f"(`timestamp` IS NULL OR `timestamp` BETWEEN 0 AND {LATEST_NS})",
        f"(handling_time IS NULL OR handling_time BETWEEN 0 AND {LONGEST})",
        "(is_server OR nsqd IS NOT NULL)",
        # A message whose time of publish nobody says would belong to no window.
        "(NOT is_server OR channel IS NULL OR `timestamp` IS NOT NULL)",
        "((is_server AND event = 'server') OR event IN ('publish', 'receive')"
        " OR (event = 'consume' AND outcome IN ('FIN', 'REQ', 'TIMEOUT')))",
        *(f"(event NOT IN ('consume', 'receive') OR `{name}` IS NOT NULL)" for name in _NEEDED_OF_CONSUME),
    ]
    return " AND ".join(checks)


def _record() -> list[str]:
    named = {
        "time_ns": "`time`",
        "published_ns": "`timestamp`",
        "handling_ns": f"CAST(round(handling_time * {SECOND}) AS bigint)",
        "consumer": "local",
    }
    good = {
        name: f"CASE WHEN is_good THEN {named.get(name, f'`{name}`')} END"
        for name in columns("records")
        if name not in ("source", "problem")
    }
    problem = f"CASE WHEN NOT is_good THEN substring(text, 1, {PROBLEM_LENGTH}) END"
    return [f"{value} AS `{name}`" for name, value in {**good, "source": "source", "problem": problem}.items()]


# Compute the tables from lives and records, and write them.


STATE = "state"  # the folder that a stream keeps, beside its tables, what it has not decided in


def write_tables(
    spark: SparkSession, records: DataFrame, folder: str | os.PathLike[str], settings: TraceSettings | None = None
) -> None:
    """Compute all tables of `TABLES` and write them as Parquet below ``folder``, one folder each.

    Each is computed from those before it as they were written, so that lines are parsed once and nothing is held in
    memory. What an earlier call wrote is replaced. Raises ConfigError when there is no record in the logs.
    """
    settings = settings or TraceSettings()
    if Path(folder, STATE).exists():  # a batch would count its messages twice
        raise ConfigError(f"{folder}: a stream writes its tables there; give another folder")
    writer = BatchWriter(spark, folder, 0)
    records = writer.write("records", records)
    end_ns = records.agg(F.max("time_ns")).first()[0]
    if end_ns is None:
        raise ConfigError(NOTHING_TRACED)
    lives = writer.write("lives", lives_of(records, run(spark, sql.CHANNELS, records=records), settings, end_ns))
    finishes = run(spark, sql.judged(settings), lives=lives)
    violations = writer.write("violations", run(spark, sql.VIOLATIONS, finishes=finishes))
    write_derived(writer, records, records, lives, violations, settings)
    writer.write("late", lives.limit(0))
    writer.write("runs", run_of(spark, settings, end_ns))


def lives_of(records: DataFrame, channels: DataFrame, settings: TraceSettings, end_ns: int) -> DataFrame:
    """Table ``lives``: see ``sql.lives``."""
    query = sql.lives(sql.SPARK, settings, end_ns)
    return exactly("lives", run(records.sparkSession, query, records=records, channels=channels))


def write_derived(
    writer: BatchWriter,
    records: DataFrame,
    events: DataFrame,
    lives: DataFrame,
    violations: DataFrame,
    settings: TraceSettings,
) -> None:
    """The tables that need nothing but the lives and violations of a batch, and its records.

    ``events`` are the records of these lives, of which some may be of an earlier batch.
    """
    spark = writer.spark
    counted = run(spark, sql.statistics(sql.SPARK, "window_ns"), lives=lives, violations=violations)
    spread = [f"{each}[{number}] AS {each}_{point}_ns" for each in DURATIONS for number, point in enumerate(POINTS)]
    writer.write("windows", counted.selectExpr("*", *spread))
    writer.write("lost", run(spark, sql.LOST, lives=lives))
    writer.write("duplicates", run(spark, sql.DUPLICATES, lives=lives))
    writer.write("slowest", run(spark, sql.slowest(sql.SPARK, settings.slowest), lives=lives, records=events))
    writer.write("skews", run(spark, sql.skews(settings), lives=lives, records=records))


def run_of(spark: SparkSession, settings: TraceSettings, end_ns: int) -> DataFrame:
    values = f"{settings.window_ns} AS window_ns, {settings.grace_ns} AS grace_ns, '{settings.order}' AS judged_by"
    return spark.sql(f"SELECT {values}, {end_ns} AS end_ns")


def exactly(table: str, rows: DataFrame) -> DataFrame:
    named = (each.split(" ", 1) for each in TABLES[table])
    return rows.selectExpr(*(f"CAST({name} AS {kind}) AS {name}" for name, kind in named))


class BatchWriter:
    """Writes the part of each table that one batch makes up: ``<table>/batch=<number>``, replaced as a whole."""

    def __init__(self, spark: SparkSession, folder: str | os.PathLike[str], batch: int) -> None:
        self.spark = spark
        self._folder = str(folder)
        self._batch = batch

    def write(self, table: str, rows: DataFrame) -> DataFrame:
        """Write, and return what was written."""
        path = f"{self._folder}/{table}/batch={self._batch}"
        exactly(table, rows).write.mode("overwrite").parquet(path)
        return self.spark.read.schema(", ".join(TABLES[table])).parquet(path)


def read_table(spark: SparkSession, folder: str | os.PathLike[str], table: str) -> DataFrame:
    """A table that `write_tables` or `stream_tables` wrote: all its batches. Raises ConfigError when there is none."""
    path = f"{folder}/{table}"
    if "://" not in path and not Path(path).is_dir():
        raise ConfigError(f"{folder}: no traces were written there")
    return spark.read.schema(ddl(table)).parquet(path)


class _Tables:
    """The tables in a folder, for the figures."""

    dialect = sql.SPARK

    def __init__(self, spark: SparkSession, folder: str | os.PathLike[str]) -> None:
        self._spark, self._folder = spark, folder

    def rows(self, query: str) -> list[dict[str, Any]]:
        named = {name: read_table(self._spark, self._folder, name) for name in set(re.findall(r"{(\w+)}", query))}
        return [row.asDict(recursive=True) for row in run(self._spark, query, **named).collect()]


def figures_of(spark: SparkSession, folder: str | os.PathLike[str]) -> Figures:
    """Take the figures from tables. Raises ConfigError when there are none."""
    tables = _Tables(spark, folder)
    runs = tables.rows("SELECT window_ns, grace_ns, judged_by FROM {runs} ORDER BY batch DESC LIMIT 1")
    return sql.figures(tables, runs[0] if runs else {"window_ns": 1, "grace_ns": 0, "judged_by": "off"})
