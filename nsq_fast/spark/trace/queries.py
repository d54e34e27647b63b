"""The tables and figures of traces, as Spark computes them: records, lives of messages, faults of order."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from nsq_fast.errors import ConfigError

from .schema import (
    BEGIN,
    COUNTS,
    DELIVERED,
    DURATIONS,
    FAULTS,
    GROUP,
    ID,
    KEY,
    LATEST_NS,
    LINE,
    LONGEST,
    MARK,
    MAX_ID,
    MOST_CHANNELS,
    MOST_EXAMPLES,
    MOST_GROUPS,
    MOST_SOURCES,
    PARTITION_SHIFT,
    POINTS,
    PROBLEM_LENGTH,
    SECOND,
    SERIES,
    SHARES,
    STORED,
    TABLES,
    Channel,
    Figures,
    Source,
    TraceGroup,
    TraceSettings,
    bucket_of,
    columns,
    ddl,
    expand,
    in_order,
    is_url,
    with_gaps,
)

# From the lines of trace logs to records: parsed by Spark itself, with a fixed schema.
#
# Lines are those of our clients, JSON, or those of a redesigned nsqd. A line may have anything before
# its record; blank lines are skipped. A line without a record is kept as a row with a
# ``problem``: nothing is dropped without a word, and no line stops the run.


_GLOB = re.compile(r"([\[\]{}*?,\\])")
_NEEDED = ("time", "topic", "internal_id", "trace_id")
_NEEDED_OF_CONSUME = ("channel", "local", "timestamp", "attempts")
_NAMES = tuple(field.split(" ", 1)[0] for field in LINE.split(", "))
_FROM_SERVER = {"event", "outcome", *_NEEDED, "partition", "offset", *_NEEDED_OF_CONSUME}


def read_logs(spark: SparkSession, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> DataFrame:
    """The records of trace logs: files, folders, patterns, compressed ones too; table ``records`` without ``batch``.

    Raises ConfigError when a path names nothing.
    """
    listed = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    try:
        return parse_lines(spark.read.text([hadoop_path(path) for path in expand(listed)]))
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        raise ConfigError(f"no trace log: {error}") from None


def stream_logs(spark: SparkSession, folder: str | os.PathLike[str], **options: str) -> DataFrame:
    """The same of a folder as a stream: a record for each line of each file that appears there.

    Files must appear complete, by a rename, as Spark's file source asks for. ``options`` are those of that source.
    """
    return parse_lines(spark.readStream.options(**options).text(os.fspath(folder)))


def hadoop_path(path: str) -> str:
    """A path that stands for itself, whatever characters it has."""
    return path if is_url(path) else _GLOB.sub(r"\\\1", path)


def parse_lines(lines: DataFrame, column: str = "value") -> DataFrame:
    """The records of lines, from a batch or a stream: of log files, or the bodies of messages (``column="body"``)."""
    text = F.col(column).cast("string")
    begin = F.greatest(F.lit(1), F.coalesce(F.nullif(F.locate(BEGIN, text), F.lit(0)), F.locate("{", text)))
    parsed = F.from_json(F.substr(text, begin), LINE, {"columnNameOfCorruptRecord": "_malformed"})
    rows = lines.where(F.length(F.trim(text)) > 0).select(
        parsed.alias("json"),
        server_record(text).alias("server"),
        text.alias("text"),
        F.input_file_name().alias("source"),
    )
    fields = {name: _field(name) for name in _NAMES}
    rows = rows.withColumn("is_good", F.coalesce(_is_record(fields), F.lit(False)))
    found = _record(fields)
    return rows.select(*(found[name].alias(name) for name in columns("records")))


def _field(name: str) -> Column:
    """A field of a line: of its JSON, unless it is a server's."""
    if name == "_malformed":
        return F.when(F.col("server").isNull(), F.col("json._malformed"))
    if name not in _FROM_SERVER:
        return F.col(f"json.{name}")
    return F.coalesce(F.col(f"server.{name}"), F.when(F.col("server").isNull(), F.col(f"json.{name}")))


def _is_record(fields: Mapping[str, Column]) -> Column:
    """Whether a line of these fields is what a producer, a consumer or a server wrote; null counts as no."""
    is_consume = fields["event"] == "consume"
    is_delivery = is_consume | (fields["event"] == "receive")
    checks = [
        fields["_malformed"].isNull(),
        *(fields[name].isNotNull() for name in _NEEDED),
        *(fields[name].between(0, F.lit(str(MAX_ID)).cast(ID)) for name in ("internal_id", "trace_id")),
        fields["time"].between(0, LATEST_NS),
        fields["timestamp"].isNull() | fields["timestamp"].between(0, LATEST_NS),
        fields["handling_time"].isNull() | fields["handling_time"].between(0, LONGEST),
        F.col("server").isNotNull() | fields["nsqd"].isNotNull(),
        # A message whose time of publish nobody says would belong to no window.
        F.col("server.channel").isNull() | fields["timestamp"].isNotNull(),
        (F.col("server").isNotNull() & (fields["event"] == "server"))
        | fields["event"].isin("publish", "receive")
        | (is_consume & fields["outcome"].isin("FIN", "REQ", "TIMEOUT")),
        *(~is_delivery | fields[name].isNotNull() for name in _NEEDED_OF_CONSUME),
    ]
    whole = checks[0]
    for check in checks[1:]:
        whole = whole & check
    return whole


def _good(value: Column) -> Column:
    return F.when(F.col("is_good"), value)


def _record(fields: Mapping[str, Column]) -> dict[str, Column]:
    """The columns of table ``records`` by name, of the fields of a line."""
    same = ("event", "topic", "partition", "channel", "internal_id", "trace_id", "nsqd", "offset", "size")
    return {
        **{name: _good(fields[name]) for name in (*same, "attempts", "outcome")},
        "time_ns": _good(fields["time"]),
        "published_ns": _good(fields["timestamp"]),
        "handling_ns": _good(F.round(fields["handling_time"] * SECOND).cast("bigint")),
        "consumer": _good(fields["local"]),
        "source": F.col("source"),
        "problem": F.when(~F.col("is_good"), F.substring("text", 1, PROBLEM_LENGTH)),
    }


# The [TRACE] lines of a redesigned nsqd as records, parsed by Spark itself (youzan/nsq: nsqd/tracer.go).
#
# Their event is ``server``, their outcome what happened in the server's words: PUB, PUB_CLIENT, READ_QUEUE, START, ...
# A line of a delivery names no partition: the upper bits of its internal id do. No line names the nsqd that wrote it.


def server_record(text: Column) -> Column:
    """The record of a line as a struct of the names in ``schema.LINE``; null for any other line."""
    return F.when(F.contains(text, F.lit(MARK)), F.coalesce(_delivered(text), _stored(text)))


def _stored(text: Column) -> Column:
    def group(number: int) -> Column:
        return F.regexp_extract(text, STORED, number)

    is_answered = F.startswith(group(5), F.lit(" put success"))
    record = F.struct(
        F.lit("server").alias("event"),
        group(7).try_cast("bigint").alias("time"),
        group(1).alias("topic"),
        group(2).try_cast("int").alias("partition"),
        F.lit(None).cast("string").alias("channel"),
        F.lit(None).cast("string").alias("local"),
        group(4).try_cast(ID).alias("internal_id"),
        group(3).try_cast(ID).alias("trace_id"),
        group(6).try_cast("bigint").alias("offset"),
        F.lit(None).cast("bigint").alias("timestamp"),
        F.lit(None).cast("int").alias("attempts"),
        F.when(is_answered, "PUB_CLIENT").otherwise("PUB").alias("outcome"),
    )
    return F.when(F.rlike(text, F.lit(STORED)), record)


def _delivered(text: Column) -> Column:
    def group(number: int) -> Column:
        return F.regexp_extract(text, DELIVERED, number)

    partition = F.shiftright(group(4).try_cast("bigint"), PARTITION_SHIFT)
    record = F.struct(
        F.lit("server").alias("event"),
        group(9).try_cast("bigint").alias("time"),
        group(1).alias("topic"),
        partition.cast("int").alias("partition"),
        group(2).alias("channel"),
        F.when(F.contains(group(8), F.lit(":")), group(8)).alias("local"),
        group(4).try_cast(ID).alias("internal_id"),
        group(3).try_cast(ID).alias("trace_id"),
        group(6).try_cast("bigint").alias("offset"),
        group(5).try_cast("bigint").alias("timestamp"),
        group(10).try_cast("int").alias("attempts"),
        group(7).alias("outcome"),
    )
    return F.when(F.rlike(text, F.lit(DELIVERED)), record)


# From records to lives: what became of one message in one channel of its topic.
#
# Each publish is put into every channel that is known for its topic, and grouped with the deliveries by topic,
# partition, internal id, trace id and channel. That takes one grouping, in which a null partition equals another, and
# one shuffle.


_OUTCOMES = ("FIN", "REQ", "TIMEOUT")
_OF_DELIVERIES = ("receive", "consume")
"""A delivery has a record of its receipt, and one of its outcome: of some one, or the other, is missing. A handler that
hangs, or dies, leaves a receipt alone; logs of older versions have outcomes alone."""
_STORED, _SENT, _FINISHED = ("PUB", "PUB_CLIENT"), ("START",), ("FIN", "FIN_INTERNAL")
"""What an nsqd logs of a message, also where its clients log nothing: that it was stored, sent and finished."""


def channels_of(records: DataFrame) -> DataFrame:
    """The channels known for each topic: those in which something was delivered. Columns topic, channel."""
    return records.where(_is_of_channel()).select("topic", "channel").distinct()


def lives_of(records: DataFrame, channels: DataFrame, settings: TraceSettings, end_ns: int) -> DataFrame:
    """Table ``lives`` without ``batch``.

    Args:
        channels: what `channels_of` gave, of these records or of earlier ones too.
        end_ns: until when the logs tell all. What was published at least ``grace`` before that, and never finished,
            is lost.
    """
    groups = _events(records, channels).repartition(*KEY).groupBy(*KEY, "channel").agg(*_aggregates())
    server_clock = F.min("delivered_published_ns").over(Window.partitionBy(*KEY))  # whichever channel it came to
    deadline = F.lit(end_ns - settings.grace_ns)
    lives = groups.withColumns(
        {
            "published_ns": F.coalesce(server_clock, "stored_ns", "logged_ns"),
            "received_ns": F.col("first_received_ns"),
            "finished_ns": F.col("finish.time_ns"),
            "handling_ns": F.col("finish.handling_ns"),
            "consumer": F.coalesce("finish.consumer", "last_receipt.consumer"),
            "last_outcome": F.col("last.outcome"),
            "is_published": F.coalesce("stored_ns", "logged_ns").isNotNull(),
            "is_first_delivery": _is_first_delivery(),
            **_redeliveries(),
        }
    )
    lives = lives.withColumns(
        {
            "window_ns": F.col("published_ns") - F.pmod("published_ns", F.lit(settings.window_ns)),
            "acknowledged_ns": F.col("stored_ns") - F.col("delivered_published_ns"),
            "in_queue_ns": F.col("received_ns") - F.col("delivered_published_ns"),
            "latency_ns": F.col("finished_ns") - F.col("delivered_published_ns"),
            "state": F.when(F.col("finishes") > 0, "finished")
            .when(F.col("published_ns") <= deadline, "lost")
            .otherwise("pending"),
        }
    )
    return lives.selectExpr(*columns("lives"))


def is_publish() -> Column:
    """Whether a record is of a publish, by the producer's log or the server's: it is of every channel."""
    return (F.col("event") == "publish") | _is_logged(*_STORED)


def _is_logged(*states: str) -> Column:
    """Whether a record is of an nsqd that logs one of these states."""
    return (F.col("event") == "server") & F.col("outcome").isin(*states)


def _is_of_channel() -> Column:
    return F.col("event").isin(*_OF_DELIVERIES) | ((F.col("event") == "server") & ~_is_logged(*_STORED))


def _events(records: DataFrame, channels: DataFrame) -> DataFrame:
    """Deliveries, and publishes once for each channel."""
    of_both = ("event", "time_ns", "nsqd", "offset", "size", "published_ns", "attempts", "outcome", "handling_ns")
    names = (*KEY, *of_both, "channel", "consumer")
    publishes = records.where(is_publish()).drop("channel").join(F.broadcast(channels), "topic")
    deliveries = records.where(_is_of_channel())
    return publishes.selectExpr(*names).unionByName(deliveries.selectExpr(*names))


def _aggregates() -> list[Column]:
    is_publish = F.col("event") == "publish"
    is_outcome, is_receipt = F.col("event") == "consume", F.col("event") == "receive"
    received = F.when(is_receipt, F.col("time_ns")).otherwise(F.col("time_ns") - F.col("handling_ns"))
    by_outcome = {name: F.count_if(is_outcome & (F.col("outcome") == name)).cast("int") for name in _OUTCOMES}
    is_sent, is_logged_finish = _is_logged(*_SENT), _is_logged(*_FINISHED)
    finish = F.struct("time_ns", "attempts", "handling_ns", "consumer")
    first_finish = F.min(F.when(is_outcome & (F.col("outcome") == "FIN"), finish))
    return [
        F.min(F.when(is_publish, F.col("time_ns"))).alias("stored_ns"),
        F.min(F.when(_is_logged(*_STORED), F.col("time_ns"))).alias("logged_ns"),
        F.min("published_ns").alias("delivered_published_ns"),
        F.coalesce(F.min(F.when(is_publish, F.col("nsqd"))), F.min("nsqd")).alias("nsqd"),
        F.min("offset").alias("offset"),
        F.min("size").alias("size"),
        F.greatest(F.count_if(is_outcome), F.count_if(is_receipt), F.count_if(is_sent)).cast("int").alias("deliveries"),
        F.greatest(by_outcome["FIN"], F.count_if(is_logged_finish).cast("int")).alias("finishes"),
        by_outcome["REQ"].alias("requeues"),
        by_outcome["TIMEOUT"].alias("timeouts"),
        F.coalesce(F.max("attempts"), F.lit(0)).alias("most_attempts"),
        F.min(F.when(is_outcome, F.col("time_ns"))).alias("first_answered_ns"),
        F.min(received).alias("first_received_ns"),
        F.coalesce(F.bool_or((is_outcome | is_receipt) & F.col("offset").isNotNull()), F.lit(False)).alias(
            "is_ordered"
        ),
        F.coalesce(first_finish, F.min(F.when(is_logged_finish, finish))).alias("finish"),
        F.max(F.when(is_outcome, F.struct("attempts", "time_ns", "outcome"))).alias("last"),
        F.max(F.when(is_receipt, F.struct("attempts", "time_ns", "consumer"))).alias("last_receipt"),
    ]


def _is_first_delivery() -> Column:
    finish_is_first = (F.col("finish.attempts") == 1) & (F.col("finish.time_ns") == F.col("first_answered_ns"))
    return F.coalesce(finish_is_first, F.lit(False))


def _redeliveries() -> dict[str, Column]:
    """How often it was delivered again, by cause.

    It was delivered as often as there are records of it, or as its highest number of attempts says: deliveries whose
    consumer died, or lost its connection, left no record. A REQ or a TIMEOUT caused one redelivery, unless nothing came
    after it. The rest has no cause that is recorded.
    """
    last = F.coalesce(F.col("last.outcome"), F.lit(""))
    requeued = F.col("requeues") - (last == "REQ").cast("int")
    timed_out = F.col("timeouts") - (last == "TIMEOUT").cast("int")
    again = F.greatest("most_attempts", "deliveries", F.lit(1)) - 1
    return {
        "redelivered_req": requeued.cast("int"),
        "redelivered_timeout": timed_out.cast("int"),
        "redelivered_unknown": (again - requeued - timed_out).cast("int"),
    }


# Whether messages of a partition were finished in the order in which they lie in it.
#
# Judged, within topic, partition and channel, are messages that were finished by their first delivery, in the order of
# their FINs. One of them violates the order when its internal id is below, or its offset before, that of any finished
# earlier. What is delivered again may come late without breaking a promise, so it is neither judged nor compared with.


COLUMNS = (*GROUP, "internal_id", "trace_id", "offset", "window_ns", "finished_ns")
CARRIED = (
    "topic string, partition int, channel string, internal_id decimal(20,0), trace_id decimal(20,0), offset bigint,"
    " window_ns bigint, finished_ns bigint"
)


def judged(lives: DataFrame, settings: TraceSettings) -> DataFrame:
    """The finishes that the order is judged by."""
    if settings.order == "off":
        return lives.where(F.lit(False)).selectExpr(*COLUMNS)
    is_judged = F.col("is_first_delivery") & (F.lit(settings.order == "ids") | F.col("is_ordered"))
    return lives.where(is_judged).selectExpr(*COLUMNS)


def violations_of(finishes: DataFrame) -> DataFrame:
    """Table ``violations`` without ``batch``, of what `judged` gave."""
    earlier = (
        Window.partitionBy(*GROUP)
        .orderBy("finished_ns", "internal_id", "offset")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    compared = finishes.withColumns(
        {"after_internal_id": F.max("internal_id").over(earlier), "after_offset": F.max("offset").over(earlier)}
    )
    is_back = (F.col("internal_id") < F.col("after_internal_id")) | (F.col("offset") < F.col("after_offset"))
    return compared.where(is_back).selectExpr(*columns("violations"))


def carried(finishes: DataFrame, until_ns: int) -> DataFrame:
    """What is kept of ``finishes`` to judge later ones: those from ``until_ns`` on, one for the rest of a group."""
    reached = finishes.where(F.col("finished_ns") < until_ns).groupBy(*GROUP)
    summary = reached.agg(
        F.max("internal_id").alias("internal_id"),
        F.max("offset").alias("offset"),
        F.max("finished_ns").alias("finished_ns"),
    ).withColumns({"trace_id": F.lit(None).cast("decimal(20,0)"), "window_ns": F.lit(None).cast("bigint")})
    return finishes.where(F.col("finished_ns") >= until_ns).unionByName(summary.selectExpr(*COLUMNS))


# Compute the tables from lives and records, and write them.


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
            "nothing was traced: the logs hold no record of a publish or a consumer (see nsq_fast.client.trace)"
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
    return counted.selectExpr(*names, *COUNTS, *_spread())


def _spread() -> Iterator[str]:
    for each in DURATIONS:
        for number, point in enumerate(("p50", "p95", "p99", "max")):
            yield f"{each}[{number}] AS {each}_{point}_ns"


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
    others = [F.expr(f"first({name}) AS {name}") for name in names if name not in key]
    events = F.sort_array(F.collect_list(F.struct(F.col("one.at_ns"), "one"))).getField("one").alias("events")
    return joined.groupBy(*key).agg(*others, events).selectExpr(*columns("slowest"))


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


# The figures of a report, taken from the tables: as many rows as a page can show, never more.


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
