"""The figures of a report from trace logs on this machine, without tables that stay."""

from __future__ import annotations

import bz2
import gzip
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any
from urllib.parse import quote

import duckdb
import msgspec
import pyarrow as pa

from nsq_fast.errors import ConfigError

from .schema import (
    BEGIN,
    COUNTS,
    DELIVERED,
    DURATIONS,
    FAULTS,
    GROUP,
    KEY,
    LATEST_NS,
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
    Channel,
    Figures,
    Source,
    TraceGroup,
    TraceSettings,
    bucket_of,
    columns,
    expand,
    in_order,
    is_url,
    with_gaps,
)

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
                "nothing was traced: the logs hold no record of a publish or a consumer (see nsq_fast.client.trace)"
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


# SQL that makes lives and violations of records. Each statement is that of the same name in ``queries``.
#
# DuckDB puts nulls last where Spark puts them first: the order of nulls is written out wherever one can be.


KEYS = ", ".join(KEY)
GROUPS = ", ".join(GROUP)
NULLS_FIRST = ", ".join(f"{name} NULLS FIRST" for name in GROUP)

_STORED = "(event = 'server' AND outcome IN ('PUB', 'PUB_CLIENT'))"
_IS_PUBLISH = f"(event = 'publish' OR {_STORED})"
_IS_OF_CHANNEL = f"(event IN ('receive', 'consume') OR (event = 'server' AND NOT {_STORED}))"
_IS_LOGGED_FINISH = "(event = 'server' AND outcome IN ('FIN', 'FIN_INTERNAL'))"
# Structs are compared field by field; a null would be the largest, and is the smallest in Spark.
_FINISH = (
    "{time_ns: time_ns, attempts: coalesce(attempts, -1), handling_ns: coalesce(handling_ns, -1),"
    " consumer: coalesce(consumer, '')}"
)
_EVENT_COLUMNS = f'{KEYS}, event, time_ns, nsqd, "offset", size, published_ns, attempts, outcome, handling_ns'


def _lives(settings: TraceSettings, end_ns: int) -> str:
    return f"""
CREATE TABLE lives AS
WITH channels AS (SELECT DISTINCT topic, channel FROM records WHERE {_IS_OF_CHANNEL}),
events AS (
    SELECT {_EVENT_COLUMNS}, channels.channel, consumer
    FROM (SELECT * EXCLUDE (channel) FROM records WHERE {_IS_PUBLISH}) JOIN channels USING (topic)
    UNION ALL
    SELECT {_EVENT_COLUMNS}, channel, consumer FROM records WHERE {_IS_OF_CHANNEL}
),
groups AS (
    SELECT {KEYS}, channel,
        min(time_ns) FILTER (event = 'publish') AS stored_ns,
        min(time_ns) FILTER ({_STORED}) AS logged_ns,
        min(published_ns) AS delivered_published_ns,
        coalesce(min(nsqd) FILTER (event = 'publish'), min(nsqd)) AS nsqd,
        min("offset") AS "offset",
        min(size) AS size,
        greatest(
            count(*) FILTER (event = 'consume'),
            count(*) FILTER (event = 'receive'),
            count(*) FILTER (event = 'server' AND outcome = 'START')
        ) AS deliveries,
        greatest(
            count(*) FILTER (event = 'consume' AND outcome = 'FIN'), count(*) FILTER ({_IS_LOGGED_FINISH})
        ) AS finishes,
        count(*) FILTER (event = 'consume' AND outcome = 'REQ') AS requeues,
        count(*) FILTER (event = 'consume' AND outcome = 'TIMEOUT') AS timeouts,
        coalesce(max(attempts), 0) AS most_attempts,
        min(time_ns) FILTER (event = 'consume') AS first_answered_ns,
        min(CASE WHEN event = 'receive' THEN time_ns ELSE time_ns - handling_ns END) AS received_ns,
        coalesce(bool_or(event IN ('receive', 'consume') AND "offset" IS NOT NULL), false) AS is_ordered,
        coalesce(
            min({_FINISH}) FILTER (event = 'consume' AND outcome = 'FIN'), min({_FINISH}) FILTER ({_IS_LOGGED_FINISH})
        ) AS finish,
        max({{attempts: attempts, time_ns: time_ns, outcome: outcome}}) FILTER (event = 'consume') AS last,
        max({{attempts: attempts, time_ns: time_ns, consumer: consumer}}) FILTER (event = 'receive') AS last_receipt
    FROM events GROUP BY {KEYS}, channel
),
judged AS (
    SELECT *,
        coalesce(
            min(delivered_published_ns) OVER (PARTITION BY {KEYS}), stored_ns, logged_ns
        ) AS published_ns,
        coalesce(last.outcome, '') AS last_answer,
        requeues - (last_answer = 'REQ')::INT AS redelivered_req,
        timeouts - (last_answer = 'TIMEOUT')::INT AS redelivered_timeout,
        greatest(most_attempts, deliveries, 1) - 1 AS redelivered
    FROM groups
)
SELECT topic, partition, channel, internal_id, trace_id, nsqd, "offset", size,
    published_ns - published_ns % {settings.window_ns} AS window_ns,
    published_ns,
    stored_ns - delivered_published_ns AS acknowledged_ns,
    received_ns,
    finish.time_ns AS finished_ns,
    received_ns - delivered_published_ns AS in_queue_ns,
    nullif(finish.handling_ns, -1) AS handling_ns,
    finish.time_ns - delivered_published_ns AS latency_ns,
    deliveries, finishes, redelivered_req, redelivered_timeout,
    redelivered - redelivered_req - redelivered_timeout AS redelivered_unknown,
    last.outcome AS last_outcome,
    coalesce(nullif(finish.consumer, ''), last_receipt.consumer) AS consumer,
    CASE WHEN finishes > 0 THEN 'finished' WHEN published_ns <= {end_ns - settings.grace_ns} THEN 'lost'
        ELSE 'pending' END AS state,
    coalesce(stored_ns, logged_ns) IS NOT NULL AS is_published,
    is_ordered,
    coalesce(finish.attempts = 1 AND finish.time_ns = first_answered_ns, false) AS is_first_delivery
FROM judged"""


def _violations(settings: TraceSettings) -> str:
    is_judged = {"off": "false", "ids": "is_first_delivery", "offsets": "is_first_delivery AND is_ordered"}
    return f"""
CREATE TABLE violations AS
SELECT {", ".join(f'"{name}"' for name in columns("violations"))} FROM (
    SELECT *, max(internal_id) OVER earlier AS after_internal_id, max("offset") OVER earlier AS after_offset
    FROM lives WHERE {is_judged[settings.order]}
    WINDOW earlier AS (
        PARTITION BY {GROUPS} ORDER BY finished_ns NULLS FIRST, internal_id, "offset" NULLS FIRST
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )
) WHERE internal_id < after_internal_id OR "offset" < after_offset"""


def statements(settings: TraceSettings, end_ns: int) -> tuple[str, ...]:
    """What is to be run, one after the other. ``end_ns``: until when the logs tell all."""
    return _lives(settings, end_ns), _violations(settings)


# One line of a trace log as a record, by the rules of ``queries``.


_Time = Annotated[int, msgspec.Meta(ge=0, le=LATEST_NS)]
_Long = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Int = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
_Id = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST)]


class Line(msgspec.Struct, gc=False):
    """What a line holds; None for what it does not say. Times are in nanoseconds, but for ``handling_time`` (s)."""

    event: str | None = None
    time: _Time | None = None
    topic: str | None = None
    partition: _Int | None = None
    channel: str | None = None
    nsqd: str | None = None
    local: str | None = None
    internal_id: _Id | None = None
    trace_id: _Id | None = None
    offset: _Long | None = None
    size: _Long | None = None
    timestamp: _Time | None = None
    attempts: _Int | None = None
    outcome: str | None = None
    handling_time: _Seconds | None = None

    @property
    def handling_ns(self) -> int | None:
        """The time of the handler, halves rounded up."""
        if self.handling_time is None:
            return None
        exact = self.handling_time * SECOND
        whole = math.floor(exact)
        return whole + (exact - whole >= 0.5)


_BEGIN = BEGIN.encode()
_MARK = MARK.encode()
_PUT, _DELIVERED = re.compile(STORED, re.ASCII), re.compile(DELIVERED, re.ASCII)
_TEXTS = {"event", "topic", "channel", "nsqd", "local", "outcome"}
_MOST_INT, _MOST_LONG = 2**31 - 1, 2**63 - 1
_OUTCOMES = {"FIN", "REQ", "TIMEOUT"}
_decode: Callable[[bytes], Line] = msgspec.json.Decoder(Line).decode


def record_of(text: bytes) -> Line | None:
    """The record of a line; None when it holds none."""
    if _MARK in text:
        found = _server_record(text.decode(errors="replace"))
        if found is not None:
            return found if _is_placed(found) and _has_window(found) else None
    begin = text.find(_BEGIN)
    if begin < 0:
        begin = max(text.find(b"{"), 0)
    try:
        line = _decode(text[begin:])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        lenient = _leniently(text[begin:])
        if lenient is None:
            return None
        line = lenient
    return line if _is_placed(line) and _is_of_client(line) else None


def _is_placed(line: Line) -> bool:
    return (
        line.time is not None
        and line.topic is not None
        and line.internal_id is not None
        and line.trace_id is not None
        and line.internal_id <= MAX_ID
        and line.trace_id <= MAX_ID
        and (line.timestamp is None or line.timestamp <= LATEST_NS)
    )


def _has_window(line: Line) -> bool:
    """Whether a server's line of a delivery says when the message was published."""
    return line.channel is None or line.timestamp is not None


def _is_of_client(line: Line) -> bool:
    if line.nsqd is None:
        return False
    if line.event == "publish":
        return True
    if line.event != "receive" and (line.event != "consume" or line.outcome not in _OUTCOMES):
        return False
    return None not in (line.channel, line.local, line.timestamp, line.attempts)


def _leniently(text: bytes) -> Line | None:
    """A line that something follows, or whose names are no strings."""
    try:
        found, _ = json.JSONDecoder().raw_decode(text.decode(errors="replace"))
        if not isinstance(found, dict):
            return None
        known = {name: found[name] for name in Line.__struct_fields__ if name in found}
        return msgspec.convert(
            {name: _as_text(value) if name in _TEXTS else value for name, value in known.items()}, Line
        )
    except (ValueError, RecursionError):  # msgspec.ValidationError is one
        return None


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _server_record(text: str) -> Line | None:
    """The record of a redesigned nsqd's line; None for any other. A number that is out of range is missing."""
    found = _DELIVERED.search(text)
    if found is not None:
        internal_id = _number(found[4], _MOST_LONG)
        return Line(
            event="server",
            time=_number(found[9], LATEST_NS),
            topic=found[1],
            partition=None if internal_id is None else internal_id >> PARTITION_SHIFT,
            channel=found[2],
            local=found[8] if ":" in found[8] else None,
            internal_id=int(found[4]),
            trace_id=int(found[3]),
            offset=_number(found[6], _MOST_LONG),
            timestamp=_number(found[5], _MOST_LONG),
            attempts=_number(found[10], _MOST_INT),
            outcome=found[7],
        )
    found = _PUT.search(text)
    if found is None:
        return None
    return Line(
        event="server",
        time=_number(found[7], LATEST_NS),
        topic=found[1],
        partition=_number(found[2], _MOST_INT),
        internal_id=int(found[4]),
        trace_id=int(found[3]),
        offset=_number(found[6], _MOST_LONG),
        outcome="PUB_CLIENT" if found[5].startswith(" put success") else "PUB",
    )


def _number(text: str, most: int) -> int | None:
    found = int(text)
    return found if found <= most else None


# The lines of trace logs as Arrow batches of records, file by file.


ROWS = 50_000
_OPENERS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open}
_OTHERS = {".zst", ".lz4", ".snappy", ".deflate"}  # that Spark reads
_EMPTY = Line()
_OF_URIS = "/_-!.~'()*,;:$&+=@"  # what stands for itself in a path of a URI

SCHEMA = pa.schema(
    [
        ("event", pa.string()),
        ("time_ns", pa.int64()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("channel", pa.string()),
        ("internal_id", pa.uint64()),
        ("trace_id", pa.uint64()),
        ("nsqd", pa.string()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("published_ns", pa.int64()),
        ("attempts", pa.int32()),
        ("outcome", pa.string()),
        ("handling_ns", pa.int64()),
        ("consumer", pa.string()),
        ("source", pa.string()),
        ("problem", pa.string()),
    ]
)
"""Table ``records``, with ids as unsigned numbers."""

Told = Callable[[float], object]


def read_records(paths: Sequence[str], tell: Told) -> Iterator[pa.RecordBatch]:
    """The records of files, folders and patterns on this machine. Raises ConfigError for what is none of these.

    ``tell`` is called with the share of the bytes that is read, from 0 to 1.
    """
    files = [Path(name) for name in expand(_local(paths))]
    total = sum(file.stat().st_size for file in files) or 1
    before = 0
    for file in files:
        with file.open("rb") as raw:
            for batch in _batches(file, raw):
                yield batch
                tell((before + raw.tell()) / total)
        before += file.stat().st_size


def _local(paths: Sequence[str]) -> Sequence[str]:
    for path in paths:
        if is_url(path):
            raise ConfigError(f"{path}: --local reads files of this machine; fetch it, or leave --local out")
    return paths


def _batches(file: Path, raw: IO[bytes]) -> Iterator[pa.RecordBatch]:
    if file.suffix in _OTHERS:
        raise ConfigError(f"{file}: --local reads plain, .gz and .bz2 files; uncompress it, or leave --local out")
    opener = _OPENERS.get(file.suffix)
    lines: list[Line] = []
    problems: list[str | None] = []
    source = "file://" + "".join(char if ord(char) > 127 else quote(char, safe=_OF_URIS) for char in str(file))
    try:
        for text in _split(opener(raw) if opener else raw):
            found = record_of(text)
            lines.append(found or _EMPTY)
            problems.append(None if found else text.decode(errors="replace")[:PROBLEM_LENGTH])
            if len(lines) == ROWS:
                yield _batch(lines, problems, source)
                lines, problems = [], []
    except (OSError, EOFError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    if lines:
        yield _batch(lines, problems, source)


def _split(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines that are not blank; a carriage return ends one, too."""
    for line in stream:
        parts = (line,) if b"\r" not in line else line.split(b"\r")
        for part in parts:
            text = part.rstrip(b"\n")
            if text.strip(b" "):
                yield text


def _batch(lines: list[Line], problems: list[str | None], source: str) -> pa.RecordBatch:
    columns = [
        [line.event for line in lines],
        [line.time for line in lines],
        [line.topic for line in lines],
        [line.partition for line in lines],
        [line.channel for line in lines],
        [line.internal_id for line in lines],
        [line.trace_id for line in lines],
        [line.nsqd for line in lines],
        [line.offset for line in lines],
        [line.size for line in lines],
        [line.timestamp for line in lines],
        [line.attempts for line in lines],
        [line.outcome for line in lines],
        [line.handling_ns for line in lines],
        [line.local for line in lines],
        [source] * len(lines),
        problems,
    ]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
