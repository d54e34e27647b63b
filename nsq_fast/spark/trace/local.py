"""The figures of a report from trace logs on this machine, by DuckDB, without tables that stay."""

from __future__ import annotations

import bz2
import gzip
import json
import math
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import IO, Annotated, Any
from urllib.parse import quote

import duckdb
import msgspec
import pyarrow as pa

from nsq_fast.errors import ConfigError

from . import sql
from .schema import (
    BEGIN,
    DELIVERED,
    ID,
    LATEST_NS,
    LONGEST,
    MARK,
    MAX_ID,
    NOTHING_TRACED,
    PARTITION_SHIFT,
    PROBLEM_LENGTH,
    SECOND,
    STORED,
    TABLES,
    Figures,
    TraceSettings,
    expand,
    is_url,
)

Tell = Callable[[str, float], object]


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
        try:
            with duckdb.connect(str(Path(folder, "traces")), config=limits) as connection:
                return _Computation(connection, settings or TraceSettings(), tell).figures(paths)
        except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
            (reason, *_) = str(error).splitlines()
            raise ConfigError(f"memory={memory!r}, temporary folder {folder}: {reason}") from error


def _bytes(memory: str) -> str:
    """A size as Spark's options have it, as DuckDB's."""
    number, unit = memory.rstrip("bBkKmMgGtT"), memory.lstrip("0123456789").lower().removesuffix("b")
    if not number.isdigit() or unit not in _UNITS:
        raise ConfigError(f"memory={memory!r}: must be a number with k, m, g or t, such as 1g")
    if float(number) * 1024 ** (_UNITS.index(unit) + 1) >= 2**63:
        raise ConfigError(f"memory={memory!r}: is more than any machine has")
    return f"{number}{unit.upper()}iB"


_UNITS = ("k", "m", "g", "t")


class _Tables(dict[str, str]):
    """Tables in a query stand under their names."""

    def __missing__(self, name: str) -> str:
        return name


class _Computation:
    """One report, in one database."""

    dialect = sql.DUCKDB

    def __init__(self, connection: Any, settings: TraceSettings, tell: Tell) -> None:
        self._connection = connection
        self._settings = settings
        self._tell = tell

    def figures(self, paths: Sequence[str]) -> Figures:
        """Read, compute, take the figures."""
        self._read(paths)
        end_ns = self.rows("SELECT max(time_ns) AS end_ns FROM {records}")[0]["end_ns"]
        if end_ns is None:
            raise ConfigError(NOTHING_TRACED)
        settings = self._settings
        steps = {
            "channels": sql.CHANNELS,
            "lives": sql.lives(self.dialect, settings, end_ns),
            "finishes": sql.judged(settings),
            "violations": sql.VIOLATIONS,
            "lost": sql.LOST,
            "duplicates": sql.DUPLICATES,
            "slowest": sql.slowest(self.dialect, settings.slowest),
            "skews": sql.skews(settings),
            "late": "SELECT * FROM {lives} WHERE false",
        }
        for number, (table, query) in enumerate(steps.items()):
            self._tell("joining", number / len(steps))
            self._connection.execute(f"CREATE TABLE {table} AS {query.format_map(_Tables())}")
        self._tell("counting", 0.0)
        run = {"window_ns": settings.window_ns, "grace_ns": settings.grace_ns, "judged_by": settings.order}
        return sql.figures(self, run)

    def rows(self, query: str) -> list[dict[str, Any]]:
        found = self._connection.execute(query.format_map(_Tables()))
        names = [column[0] for column in found.description]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
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
            internal_id=_number(found[4], MAX_ID),
            trace_id=_number(found[3], MAX_ID),
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
        internal_id=_number(found[4], MAX_ID),
        trace_id=_number(found[3], MAX_ID),
        offset=_number(found[6], _MOST_LONG),
        outcome="PUB_CLIENT" if found[5].startswith(" put success") else "PUB",
    )


def _number(text: str, most: int) -> int | None:
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(most)):  # Python reads none of thousands of digits
        return None
    found = int(digits)
    return found if found <= most else None


# The lines of trace logs as Arrow batches of records, file by file.


ROWS = 50_000
_OPENERS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open}
_OTHERS = {".zst", ".lz4", ".snappy", ".deflate"}  # that Spark reads
_EMPTY = Line()
_OF_URIS = "/_-!.~'()*,;:$&+=@"  # what stands for itself in a path of a URI

_KINDS = {"string": pa.string(), "bigint": pa.int64(), "int": pa.int32(), ID: pa.uint64()}
SCHEMA = pa.schema([(name, _KINDS[kind]) for name, kind in (each.split(" ", 1) for each in TABLES["records"])])
_OF_LINES = {"time_ns": "time", "published_ns": "timestamp", "consumer": "local"}  # where a line has other names
_FIELDS = [attrgetter(_OF_LINES.get(name, name)) for name in SCHEMA.names if name not in ("source", "problem")]

Told = Callable[[float], object]


def read_records(paths: Sequence[str], tell: Told) -> Iterator[pa.RecordBatch]:
    """The records of files, folders and patterns on this machine. Raises ConfigError for what is none of these.

    ``tell`` is called with the share of the bytes that is read, from 0 to 1.
    """
    sizes = {}
    for file in map(Path, expand(_local(paths))):
        with _readable(file):
            sizes[file] = file.stat().st_size
    total = sum(sizes.values()) or 1
    before = 0
    for file, size in sizes.items():
        with _readable(file), file.open("rb") as raw:
            for batch in _batches(file, raw):
                yield batch
                tell((before + raw.tell()) / total)
        before += size


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise ConfigError for what is compressed badly, or was removed since it was listed."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


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
    for text in _split(opener(raw) if opener else raw):
        found = record_of(text)
        lines.append(found or _EMPTY)
        problems.append(None if found else text.decode(errors="replace")[:PROBLEM_LENGTH])
        if len(lines) == ROWS:
            yield _batch(lines, problems, source)
            lines, problems = [], []
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
    columns = [*([field(line) for line in lines] for field in _FIELDS), [source] * len(lines), problems]
    arrays = [_array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:  # half of a pair of surrogates, which JSON can hold: Java writes a question mark for it
        return pa.array([text and text.encode(errors="replace").decode() for text in values], kind)
