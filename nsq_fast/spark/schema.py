"""The columns that the source gives, in Spark's types. Their rows, in Arrow's: ``arrow_rows``.

Spark asks for these in Pythons that read nothing, for which importing pyarrow would be half of their CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VarcharType,
)

from nsq_fast.errors import ConfigError

from .options import JSON, NAMES, REDACTED, column_type

_PAIR = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
_KINDS: tuple[DataType, ...] = (
    StringType(),
    IntegerType(),
    LongType(),
    BinaryType(),
    TimestampType(),
    MapType(StringType(), StringType()),
    ArrayType(_PAIR),
)
_TYPES = {kind.simpleString(): kind for kind in _KINDS}


def spark_schema(names: Sequence[str] = NAMES, headers_as: str = JSON) -> StructType:
    """The Spark schema of these columns, in this order. Every column may be null."""
    return StructType([StructField(name, _TYPES[column_type(name, headers_as)]) for name in names])


# The options of a table that was made by ``CREATE TABLE ... USING nsq OPTIONS (...)``.
#
# Spark gives them to ``schema`` when the table is made: each twice, as ``topic``
# and as ``option.topic``, among properties of the catalog's own (``provider``,
# ``owner``). When the table is read or written it gives no options at all, only
# the schema that is in the catalog (seen with 4.0 to 4.3). So the options are kept
# there, in the metadata of the columns. Spark carries it to readers; to writers it
# does with a column that is converted on INSERT, as one of ``BODY`` always is.


BODY = VarcharType(2**31 - 1)
"""The type of the body in a table that is made to be written: a text of any length, which is converted to a string."""

_OPTION = "option."
_KEY = "nsq"


def table_options(options: Mapping[str, str]) -> dict[str, str] | None:
    """The options of a table that is being made; None when it is none. Raises ConfigError for a secret."""
    found = {key[len(_OPTION) :]: value for key, value in options.items() if key.lower().startswith(_OPTION)}
    if not found:
        return None
    secrets = sorted(key for key in found if REDACTED.search(key))
    if secrets:
        raise ConfigError(
            f"{secrets[0]}: the catalog would keep it in clear with the table; use CREATE TEMP VIEW, or spark.read"
        )
    return found


def with_options(schema: StructType, options: Mapping[str, str]) -> StructType:
    """The schema of a table, with its options in it."""
    kept = {_KEY: json.dumps(dict(sorted(options.items())))}
    return StructType([StructField(each.name, each.dataType, each.nullable, kept) for each in schema.fields])


def options_in(options: Mapping[str, str], schema: StructType) -> Mapping[str, str]:
    """The options, or, where Spark gives none, those in the schema of a table. Raises ConfigError without any."""
    if options:
        return options
    for field in schema.fields:
        if _KEY in field.metadata:
            found: dict[str, str] = json.loads(field.metadata[_KEY])
            return found
    raise ConfigError(
        "no option is given: Spark passes those of a table on only when CREATE TABLE names no columns; leave them out,"
        " and choose them with the option columns"
    )
