"""From the lines of trace logs to records: parsed by Spark itself, with a fixed schema.

Lines are those of our clients, JSON, or those of a redesigned nsqd (``server_lines``). A line may have anything before
its record; blank lines are skipped. A line without a record is kept as a row with a
``problem``: nothing is dropped without a word, and no line stops the run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from nsq_fast.errors import ConfigError

from .paths import expand, is_url
from .schema import BEGIN, ID, LATEST_NS, LINE, LONGEST, MAX_ID, PROBLEM_LENGTH, columns
from .server_lines import server_record
from .settings import SECOND

_GLOB = re.compile(r"([\[\]{}*?,\\])")
_NEEDED = ("time", "topic", "internal_id", "trace_id")
_NEEDED_OF_CONSUME = ("channel", "local", "timestamp", "attempts")
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
    rows = rows.withColumn("is_good", F.coalesce(_is_record(), F.lit(False)))
    fields = _fields()
    return rows.select(*(fields[name].alias(name) for name in columns("records")))


def _field(name: str) -> Column:
    """A field of a line: of its JSON, unless it is a server's."""
    if name == "_malformed":
        return F.when(F.col("server").isNull(), F.col("json._malformed"))
    if name not in _FROM_SERVER:
        return F.col(f"json.{name}")
    return F.coalesce(F.col(f"server.{name}"), F.when(F.col("server").isNull(), F.col(f"json.{name}")))


def _is_record() -> Column:
    """Whether a line is what a producer, a consumer or a server wrote; null counts as no."""
    is_consume = _field("event") == "consume"
    is_delivery = is_consume | (_field("event") == "receive")
    checks = [
        _field("_malformed").isNull(),
        *(_field(name).isNotNull() for name in _NEEDED),
        *(_field(name).between(0, F.lit(str(MAX_ID)).cast(ID)) for name in ("internal_id", "trace_id")),
        _field("time").between(0, LATEST_NS),
        _field("timestamp").isNull() | _field("timestamp").between(0, LATEST_NS),
        _field("handling_time").isNull() | _field("handling_time").between(0, LONGEST),
        F.col("server").isNotNull() | _field("nsqd").isNotNull(),
        # A message whose time of publish nobody says would belong to no window.
        F.col("server.channel").isNull() | _field("timestamp").isNotNull(),
        (F.col("server").isNotNull() & (_field("event") == "server"))
        | _field("event").isin("publish", "receive")
        | (is_consume & _field("outcome").isin("FIN", "REQ", "TIMEOUT")),
        *(~is_delivery | _field(name).isNotNull() for name in _NEEDED_OF_CONSUME),
    ]
    whole = checks[0]
    for check in checks[1:]:
        whole = whole & check
    return whole


def _good(value: Column) -> Column:
    return F.when(F.col("is_good"), value)


def _fields() -> dict[str, Column]:
    same = ("event", "topic", "partition", "channel", "internal_id", "trace_id", "nsqd", "offset", "size")
    return {
        **{name: _good(_field(name)) for name in (*same, "attempts", "outcome")},
        "time_ns": _good(_field("time")),
        "published_ns": _good(_field("timestamp")),
        "handling_ns": _good(F.round(_field("handling_time") * SECOND).cast("bigint")),
        "consumer": _good(_field("local")),
        "source": F.col("source"),
        "problem": F.when(~F.col("is_good"), F.substring("text", 1, PROBLEM_LENGTH)),
    }
