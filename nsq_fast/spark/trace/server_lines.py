"""The [TRACE] lines of a redesigned nsqd as records, parsed by Spark itself (youzan/nsq: nsqd/tracer.go).

Their event is ``server``, their outcome what happened in the server's words: PUB, PUB_CLIENT, READ_QUEUE, START, ...
A line of a delivery names no partition: the upper bits of its internal id do. No line names the nsqd that wrote it.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from .schema import ID
from .server_patterns import DELIVERED, MARK, PARTITION_SHIFT, STORED


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
