"""Rows: what columns of frames become, that the buffers are the same ones, and that Spark takes the types."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timezone
from inspect import signature
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from support.waiting import PROCESS

from nsq_fast._codec import encode_message
from nsq_fast._frame import ColumnReader, Columns
from nsq_fast.spark.arrow_rows import arrow_schema, to_batch
from nsq_fast.spark.options import HEADERS_AS, NAMES
from nsq_fast.spark.schema import spark_schema

T0 = 1_700_000_000_123_456_789
ID = bytes(range(16))
IN_UTC: Any = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
PLACE: dict[str, Any] = {"topic": "t", "partition": 3, "nsqd": "host:4150", "is_redesigned": True}


def columns(*frames: bytes, ext: bool = True, detail: bool = True) -> Columns:
    return ColumnReader(ext=ext, detail=detail).feed(b"".join(frames))


def full(number: int, ext: bytes = b"{}", version: int = 4) -> bytes:
    options: dict[str, Any] = {"ext_version": version, "ext": ext, "offset": number * 100, "raw_size": 100}
    return encode_message(T0 + number * 1000, number + 1, ID, b"body %d" % number, **options)


def test_the_format_and_its_schema_need_no_arrow() -> None:
    """Spark asks for them in Pythons that read nothing, and importing pyarrow would be half of their CPU."""
    code = "import sys, nsq_fast.spark.source as s; s.spark_schema(); sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PROCESS, check=False).returncode == 0


def test_the_two_schemas_are_the_same() -> None:
    assert tuple(arrow_schema().names) == NAMES == tuple(spark_schema().names)
    assert to_arrow_schema(spark_schema(), **IN_UTC) == arrow_schema()
    assert from_arrow_schema(arrow_schema()) == spark_schema()
    for headers_as in HEADERS_AS:
        assert to_arrow_schema(spark_schema(headers_as=headers_as), **IN_UTC) == arrow_schema(headers_as=headers_as)
    assert spark_schema(("body", "topic")).simpleString() == "struct<body:binary,topic:string>"


def test_a_row_of_a_redesigned_server() -> None:
    batch = to_batch(columns(full(7, b'{"k":"v"}')), **PLACE)
    assert batch.schema == arrow_schema()
    batch.validate(full=True)
    (row,) = batch.to_pylist()
    assert row == {
        "topic": "t",
        "partition": 3,
        "message_id": ID,
        "internal_id": int.from_bytes(ID[:8], "big"),
        "trace_id": int.from_bytes(ID[8:], "big"),
        "timestamp": datetime(2023, 11, 14, 22, 13, 20, 123463, tzinfo=timezone.utc),
        "attempts": 8,
        "offset": 700,
        "size": 100,
        "headers": '{"k":"v"}',
        "body": b"body 7",
        "nsqd": "host:4150",
    }


def test_a_row_of_an_original_server_has_no_more_than_it_says() -> None:
    place = {**PLACE, "partition": None, "is_redesigned": False}
    batch = to_batch(columns(encode_message(T0, 65535, ID, b"x"), ext=False, detail=False), **place)
    batch.validate(full=True)
    (row,) = batch.to_pylist()
    nulls = {name for name, value in row.items() if value is None}
    assert nulls == {"partition", "internal_id", "trace_id", "offset", "size", "headers"}
    assert (row["attempts"], row["message_id"], row["body"]) == (65535, ID, b"x")


def test_ids_are_reinterpreted_as_signed() -> None:
    message = encode_message(T0, 1, b"\xff" * 15 + b"\xfe", b"", ext_version=0, offset=0, raw_size=0)
    (row,) = to_batch(columns(message), **PLACE).to_pylist()
    assert (row["internal_id"], row["trace_id"]) == (-1, -2)


@pytest.mark.parametrize(("first", "count"), [(0, 10), (3, 4), (0, 0), (10, 0), (9, None), (0, None)])
def test_a_part_of_the_rows(first: int, count: int | None) -> None:
    whole = columns(*(full(n, b'{"n":%d}' % n, 4) if n % 2 else full(n, b"", 0) for n in range(10)))
    batch = to_batch(whole, first=first, count=count, **PLACE)
    batch.validate(full=True)
    end = 10 if count is None else first + count
    assert batch.column("body").to_pylist() == [b"body %d" % n for n in range(first, end)]
    assert batch.column("message_id").to_pylist() == [ID] * (end - first)
    assert batch.column("offset").to_pylist() == [n * 100 for n in range(first, end)]
    assert batch.column("headers").to_pylist() == [f'{{"n":{n}}}' if n % 2 else None for n in range(first, end)]
    assert [each.microsecond - 123456 for each in batch.column("timestamp").to_pylist()] == [*range(first, end)]


@pytest.mark.parametrize(("first", "count"), [(0, 3), (3, None), (-1, 1), (1, -1)])
def test_rows_that_there_are_not(first: int, count: int | None) -> None:
    with pytest.raises(ValueError, match="rows"):
        to_batch(columns(full(1), full(2)), first=first, count=count, **PLACE)


def test_headers_are_null_where_there_is_no_json() -> None:
    batch = to_batch(
        columns(full(0, b"", 0), full(1, b"a-tag", 2), full(2, b"{}"), full(3, b"")), ("headers",), **PLACE
    )
    assert batch.column(0).to_pylist() == [None, None, "{}", ""]
    only_json = to_batch(columns(full(1, b'{"a":1}'), full(2, '{"ä":1}'.encode())), ("headers",), **PLACE)
    assert only_json.column(0).to_pylist() == ['{"a":1}', '{"ä":1}']


def test_a_header_that_is_no_text_is_made_one() -> None:
    batch = to_batch(columns(full(1, b'{"a":"\xff"}'), full(2)), ("headers",), **PLACE)
    batch.validate(full=True)
    assert batch.column(0).to_pylist() == ['{"a":"\ufffd"}', "{}"]


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        (b'{"k":"v","\\u00e4":"\xc3\xb6 \\n"}', [("k", "v"), ("ä", "ö \n")]),
        (b'{"number":1.50,"yes":true,"list":[1, "2"]}', [("number", "1.50"), ("yes", "true"), ("list", '[1, "2"]')]),
        (b'{"none":null}', [("none", None)]),
        (b'{"twice":"1","twice":"2"}', [("twice", "2")]),
        (b"{}", []),
        (b"", None),
        (b"[1]", None),
        (b'{"k":"v"', None),
        (b'{"k":"\\ud800"}', None),
        (b'{"k":"\xff"}', [("k", "\ufffd")]),
    ],
)
def test_headers_as_a_map(text: bytes, entries: Any) -> None:
    messages = columns(full(0, b'{"a":"b"}'), full(1, text), full(2, b"a-tag", 2), full(3, text))
    batch = to_batch(messages, ("body", "headers"), "map", **PLACE)
    batch.validate(full=True)
    assert batch.schema == arrow_schema(("body", "headers"), "map")
    assert batch.column("headers").to_pylist() == [[("a", "b")], entries, None, entries]
    as_with_kafka = to_batch(messages, ("headers",), "array", **PLACE).column(0)
    as_with_kafka.validate(full=True)
    pairs = entries and [{"key": key, "value": value and value.encode()} for key, value in entries]
    assert as_with_kafka.to_pylist() == [[{"key": "a", "value": b"b"}], pairs, None, pairs]


def test_headers_as_a_map_where_no_message_can_have_any() -> None:
    frames = columns(encode_message(T0, 1, ID, b"x"), ext=False, detail=False)
    batch = to_batch(frames, ("headers",), "map", **PLACE)
    assert batch.column(0).to_pylist() == [None]


def test_bodies_and_ids_are_not_copied() -> None:
    source = columns(*(full(n) for n in range(100)))
    batch = to_batch(source, **PLACE)
    for name, column in (("body", source.body), ("message_id", source.ids)):
        assert batch.column(name).buffers()[2].address == pa.py_buffer(column).address
    assert batch.column("offset").buffers()[1].address == pa.py_buffer(source.offsets).address


@pytest.mark.parametrize("size", [1, 2, 3, 1023, 1024, 1025])
def test_what_is_the_same_in_each_row(size: int) -> None:
    batch = to_batch(columns(*(full(n) for n in range(size))), ("topic", "partition", "nsqd"), **PLACE)
    batch.validate(full=True)
    assert batch.to_pydict() == {"topic": ["t"] * size, "partition": [3] * size, "nsqd": ["host:4150"] * size}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    assert pa.ipc.open_stream(sink.getvalue()).read_all().to_batches() == [batch]
