"""The columns that the source gives, filled from decoded frames without a copy.

Buffers of ``Columns`` are in Arrow's layout already and are only wrapped here.
New buffers are made for what Spark has in another type (timestamps in
microseconds, attempts in 32 bits) and for what is the same in each row.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa

from nsq_fast._codec import MESSAGE_ID_SIZE
from nsq_fast._frame import Columns

from .options import ARRAY, HEADERS, HEADERS_AS, JSON, MAP, NAMES, column_type

JSON_HEADER = 4
"""The version of an ext header that is JSON."""

_TIMESTAMP = pa.timestamp("us", tz="UTC")
_TEXT_BY_NAME = pa.map_(pa.string(), pa.string())
_PAIRS = pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())])))
_TYPES: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "binary": pa.binary(),
    "timestamp": _TIMESTAMP,
    HEADERS_AS[MAP]: _TEXT_BY_NAME,
    HEADERS_AS[ARRAY]: _PAIRS,
}


@lru_cache
def arrow_schema(names: tuple[str, ...] = NAMES, headers_as: str = JSON) -> pa.Schema:
    return pa.schema([(name, _TYPES[column_type(name, headers_as)]) for name in names])


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a batch: a part of some columns, and what is the same in each of them."""

    columns: Columns
    topic: str
    partition: int | None
    nsqd: str
    is_redesigned: bool
    first: int
    count: int

    def wrap(self, kind: pa.DataType, *buffers: Any) -> pa.Array:
        wrapped = [None, *(pa.py_buffer(buffer) for buffer in buffers)]
        return pa.Array.from_buffers(kind, self.count, wrapped, offset=self.first)

    def repeat(self, kind: pa.DataType, value: str | int | None) -> pa.Array:
        if value is None:
            return pa.nulls(self.count, kind)
        return _repeated(value, 1 << self.count.bit_length()).slice(0, self.count)


@lru_cache(maxsize=64)
def _repeated(value: str | int, count: int) -> pa.Array:
    # pa.repeat would do, but needs ten times as long, and pandas to be imported.
    if isinstance(value, int):
        return pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(array("i", [value]) * count)])
    text = value.encode()
    offsets = array("i", (len(text) * row for row in range(count + 1)))
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(text * count)])


def to_batch(
    columns: Columns,
    names: Sequence[str] = NAMES,
    headers_as: str = JSON,
    *,
    topic: str,
    partition: int | None,
    nsqd: str,
    is_redesigned: bool,
    first: int = 0,
    count: int | None = None,
) -> pa.RecordBatch:
    """Make a batch of ``count`` rows (None: all that follow) from row ``first`` of ``columns`` on.

    ``is_redesigned``: whether ids hold an internal and a trace id. Raises ValueError for rows beyond the last.
    """
    left = columns.count - first
    count = left if count is None else count
    if first < 0 or not 0 <= count <= left:
        raise ValueError(f"rows {first} to {first + count} of {columns.count}")
    rows = _Rows(columns, topic, partition, nsqd, is_redesigned, first, count)
    fill = _FILL[headers_as]
    schema = arrow_schema(tuple(names), headers_as)
    return pa.RecordBatch.from_arrays([fill[name](rows) for name in names], schema=schema)


def _message_ids(rows: _Rows) -> pa.Array:
    return rows.wrap(pa.binary(), _id_offsets(rows.first + rows.count), rows.columns.ids)


_known_id_offsets = array("i")


def _id_offsets(count: int) -> memoryview:
    """0, 16, 32...: Spark has no binary of fixed size. Kept, as it is the same for every batch."""
    global _known_id_offsets
    if len(_known_id_offsets) <= count:
        _known_id_offsets = array("i", range(0, MESSAGE_ID_SIZE * (2 * count + 1), MESSAGE_ID_SIZE))
    return memoryview(_known_id_offsets)


def _internal_ids(rows: _Rows) -> pa.Array:
    return rows.wrap(pa.int64(), rows.columns.internal_ids) if rows.is_redesigned else pa.nulls(rows.count, pa.int64())


def _trace_ids(rows: _Rows) -> pa.Array:
    return rows.wrap(pa.int64(), rows.columns.trace_ids) if rows.is_redesigned else pa.nulls(rows.count, pa.int64())


def _timestamps(rows: _Rows) -> pa.Array:
    return rows.wrap(pa.timestamp("ns", tz="UTC"), rows.columns.timestamps).cast(_TIMESTAMP, safe=False)


def _offsets(rows: _Rows) -> pa.Array:
    found = rows.columns.offsets
    return pa.nulls(rows.count, pa.int64()) if found is None else rows.wrap(pa.int64(), found)


def _sizes(rows: _Rows) -> pa.Array:
    found = rows.columns.sizes
    return pa.nulls(rows.count, pa.int32()) if found is None else rows.wrap(pa.int32(), found)


def _headers(rows: _Rows) -> pa.Array:
    versions = rows.columns.ext_versions
    if versions is None:
        return pa.nulls(rows.count, pa.string())
    versions = versions[rows.first : rows.first + rows.count]
    found = rows.wrap(pa.string(), rows.columns.ext_offsets, rows.columns.ext)
    try:
        found.validate(full=True)
    except pa.ArrowInvalid:  # invalid UTF-8: Java would replace parts of it, and not the same parts everywhere
        bodies = rows.wrap(pa.binary(), rows.columns.ext_offsets, rows.columns.ext)
        found = pa.array([body.decode("utf-8", "replace") for body in bodies.to_pylist()], pa.string())
    if versions.count(JSON_HEADER) == rows.count:
        return found
    import pyarrow.compute as pc  # here: few of the Pythons that import this module need it

    kinds = pa.Array.from_buffers(pa.uint8(), rows.count, [None, pa.py_buffer(versions)])
    return pc.if_else(pc.equal(kinds, JSON_HEADER), found, None)


def _parsed_headers(rows: _Rows, entries: Callable[[str], Any], kind: pa.DataType) -> pa.Array:
    known: dict[str | None, Any] = {None: None}
    found = []
    for text in _headers(rows).to_pylist():  # many messages have the same ones
        if text not in known:
            known[text] = entries(text)
        found.append(known[text])
    return pa.array(found, kind)


def _pairs(text: str) -> list[dict[str, Any]] | None:
    entries = _entries(text)
    if entries is None:
        return None
    return [{"key": key, "value": None if value is None else value.encode()} for key, value in entries]


def _entries(text: str) -> list[tuple[str, str | None]] | None:
    """What a header holds; None when it is no JSON object, or nested too deeply. Any value but a text is its JSON."""
    try:
        values = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        return [(name, _text(bytes(value))) for name, value in values.items()]
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _text(value: bytes) -> str | None:
    if value == b"null":
        return None
    return msgspec.json.decode(value, type=str) if value.startswith(b'"') else value.decode()


_FILL_JSON: Mapping[str, Callable[[_Rows], pa.Array]] = {
    "topic": lambda rows: rows.repeat(pa.string(), rows.topic),
    "partition": lambda rows: rows.repeat(pa.int32(), rows.partition),
    "message_id": _message_ids,
    "internal_id": _internal_ids,
    "trace_id": _trace_ids,
    "timestamp": _timestamps,
    "attempts": lambda rows: rows.wrap(pa.uint16(), rows.columns.attempts).cast(pa.int32()),
    "offset": _offsets,
    "size": _sizes,
    HEADERS: _headers,
    "body": lambda rows: rows.wrap(pa.binary(), rows.columns.body_offsets, rows.columns.body),
    "nsqd": lambda rows: rows.repeat(pa.string(), rows.nsqd),
}
_FILL: Mapping[str, Mapping[str, Callable[[_Rows], pa.Array]]] = {
    JSON: _FILL_JSON,
    MAP: {**_FILL_JSON, HEADERS: lambda rows: _parsed_headers(rows, _entries, _TEXT_BY_NAME)},
    ARRAY: {**_FILL_JSON, HEADERS: lambda rows: _parsed_headers(rows, _pairs, _PAIRS)},
}
