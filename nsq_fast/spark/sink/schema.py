"""What a DataFrame may have to be written: the columns, and their types. Checked before a task runs."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from nsq_fast.errors import ConfigError
from nsq_fast.spark.options import SinkOptions
from nsq_fast.spark.tables import BODY

_WHOLE_NUMBERS: tuple[type[DataType], ...] = (ByteType, ShortType, IntegerType, LongType)

COLUMNS: MappingProxyType[str, tuple[type[DataType], ...]] = MappingProxyType(
    {
        "body": (BinaryType, StringType),
        "topic": (StringType,),
        "partition": _WHOLE_NUMBERS,
        "key": (StringType, BinaryType, *_WHOLE_NUMBERS),
        "trace_id": _WHOLE_NUMBERS,
        "headers": (StringType, MapType),
        "tag": (StringType,),
        "defer_ms": _WHOLE_NUMBERS,
    }
)
"""Column -> the types that it may have."""

_IN_TABLES: MappingProxyType[str, DataType] = MappingProxyType(
    {
        "body": BODY,
        "topic": StringType(),
        "partition": IntegerType(),
        "key": StringType(),
        "trace_id": LongType(),
        "headers": StringType(),
        "tag": StringType(),
        "defer_ms": LongType(),
    }
)
"""Column -> its type in a table of SQL."""

_KEYS_OF: MappingProxyType[str, tuple[type[DataType], ...]] = MappingProxyType(
    {"murmur3": (StringType, BinaryType), "hashcode": (StringType, *_WHOLE_NUMBERS)}
)


def column_names(schema: StructType, *, topic: str | None, key_strategy: str) -> dict[str, str]:
    """Column -> what the DataFrame calls it: names are matched as Spark matches them, whatever their case.

    Args:
        topic: the option, which takes every row; None: the column says it.
    Raises ConfigError for a column that is missing, unknown, there twice, or of another type.
    """
    found: dict[str, str] = {}
    for field in schema.fields:
        name = field.name.lower()
        if name not in COLUMNS:
            raise ConfigError(f"column {field.name!r}: unknown; the columns are {', '.join(COLUMNS)}")
        if name in found:
            raise ConfigError(f"column {field.name!r}: there twice, as {found[name]!r} too")
        _check_type(field.name, field.dataType, COLUMNS[name])
        found[name] = field.name
    if "body" not in found:
        raise ConfigError("column 'body' is missing: it holds the messages, as binary or string")
    if topic is None and "topic" not in found:
        raise ConfigError("topic: give the option, or a column 'topic'")
    if "key" in found:
        _check_key(schema[found["key"]].dataType, key_strategy)
    return found


def table_schema(options: SinkOptions) -> StructType:
    """The columns of a table that is made to be written: those of the option ``columns``, or the body and the topic.

    Raises ConfigError for an unknown column.
    """
    names = options.columns or (("body",) if options.topic is not None else ("body", "topic"))
    unknown = [name for name in names if name not in _IN_TABLES]
    if unknown:
        raise ConfigError(f"columns: {unknown[0]!r} is unknown; the columns are {', '.join(COLUMNS)}")
    if "body" not in names or (options.topic is None and "topic" not in names):
        raise ConfigError("columns: the body is required, and the topic unless there is the option topic")
    return StructType([StructField(name, _IN_TABLES[name]) for name in names])


def _check_type(name: str, kind: DataType, allowed: tuple[type[DataType], ...]) -> None:
    if not isinstance(kind, allowed) or not _is_text_map(kind):
        known = ", ".join(dict.fromkeys(map(_shown, allowed)))
        raise ConfigError(f"column {name!r}: is {kind.simpleString()}; must be {known}")


def _is_text_map(kind: DataType) -> bool:
    """Whether a map is one of texts; whatever is no map is all right."""
    return not isinstance(kind, MapType) or all(isinstance(each, StringType) for each in (kind.keyType, kind.valueType))


def _check_key(kind: DataType, strategy: str) -> None:
    allowed = _KEYS_OF[strategy]
    if not isinstance(kind, allowed):
        known = ", ".join(map(_shown, allowed))
        raise ConfigError(f"column 'key': is {kind.simpleString()}; key_strategy {strategy!r} takes {known}")


def _shown(kind: Any) -> str:
    return "map<string,string>" if kind is MapType else str(kind.typeName())
