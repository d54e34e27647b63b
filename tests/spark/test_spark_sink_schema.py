"""Which DataFrames may be written, and how the options of the sink are read."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)

from nsq_fast.errors import ConfigError
from nsq_fast.spark.options import SinkOptions
from nsq_fast.spark.sink.plan import COLUMNS, column_names
from nsq_fast.spark.sink.writer import ArrowWriter, stream_writer

TYPES: dict[str, DataType] = {
    "binary": BinaryType(),
    "string": StringType(),
    "tinyint": ByteType(),
    "smallint": ShortType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "long": LongType(),
    "double": DoubleType(),
    "array<binary>": ArrayType(BinaryType()),
    "map<string,string>": MapType(StringType(), StringType()),
    "map<string,int>": MapType(StringType(), IntegerType()),
}


def schema(text: str) -> StructType:
    """Columns as ``name type, ...``."""
    found = StructType()
    for each in text.split(", "):
        name, kind = each.split(" ")
        found.add(name, TYPES[kind])
    return found


def names(text: str, topic: str | None = "t", key_strategy: str = "murmur3") -> dict[str, str]:
    return column_names(schema(text), topic=topic, key_strategy=key_strategy)


def test_every_column_in_every_type_that_it_may_have() -> None:
    assert names("body binary") == {"body": "body"}
    assert names("BODY string, Topic string, trace_ID long", None) == {
        "body": "BODY",
        "topic": "Topic",
        "trace_id": "trace_ID",
    }
    everything = (
        "body binary, topic string, partition int, key string, trace_id long, headers string, tag string, defer_ms int"
    )
    assert set(names(everything)) == set(COLUMNS)
    for kind in ("tinyint", "smallint", "int", "bigint"):
        assert names(f"body string, partition {kind}, trace_id {kind}, defer_ms {kind}")
        assert names(f"body string, key {kind}", key_strategy="hashcode")
    assert names("body string, headers map<string,string>, key binary")
    assert names("body string, key string", key_strategy="hashcode")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("value binary", "column 'value': unknown; the columns are body, topic, partition, key"),
        ("topic string", "column 'body' is missing"),
        ("body int", "column 'body': is int; must be binary, string"),
        ("body array<binary>", "column 'body': is array<binary>"),
        ("body binary, Body string", "'Body': there twice, as 'body' too"),
        ("body binary, partition string", "column 'partition': is string; must be byte, short, integer, long"),
        (
            "body binary, headers map<string,int>",
            "column 'headers': is map<string,int>; must be string, map<string,string>",
        ),
        ("body binary, defer_ms double", "column 'defer_ms': is double"),
        ("body binary, key int", "column 'key': is int; key_strategy 'murmur3' takes string, binary"),
    ],
)
def test_other_columns_are_refused(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        names(text)


def test_bytes_are_no_key_of_javas() -> None:
    with pytest.raises(ConfigError, match="key_strategy 'hashcode' takes string"):
        names("body string, key binary", key_strategy="hashcode")


def test_a_topic_is_needed() -> None:
    with pytest.raises(ConfigError, match="topic: give the option, or a column"):
        names("body string", None)
    assert names("body string, topic string", None)


def test_writers_check_at_load_and_travel() -> None:
    options = SinkOptions.parse({"topic": "t", "nsqd_tcp_addresses": "127.0.0.1:4150", "nsq.auth_secret": "hush"})
    for kind in (ArrowWriter, stream_writer):
        make: Any = kind
        with pytest.raises(ConfigError, match=r'mode\("append"\)'):
            make(options, schema("body string"), True)
        with pytest.raises(ConfigError, match="unknown"):
            make(options, schema("body string, foo int"), False)
        copy = pickle.loads(pickle.dumps(make(options, schema("body string"), False)))
        assert copy.options == options
        assert copy.names == {"body": "body"}
    assert "hush" not in repr(options)
