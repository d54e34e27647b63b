"""The lines of trace logs as Arrow batches of records, file by file."""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import pyarrow as pa

from nsq_fast.errors import ConfigError
from nsq_fast.spark.trace.paths import expand, is_url
from nsq_fast.spark.trace.schema import PROBLEM_LENGTH

from .lines import Line, record_of

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
