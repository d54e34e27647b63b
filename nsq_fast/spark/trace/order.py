"""Whether messages of a partition were finished in the order in which they lie in it.

Judged, within topic, partition and channel, are messages that were finished by their first delivery, in the order of
their FINs. One of them violates the order when its internal id is below, or its offset before, that of any finished
earlier. What is delivered again may come late without breaking a promise, so it is neither judged nor compared with.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from .schema import GROUP, columns
from .settings import TraceSettings

COLUMNS = (*GROUP, "internal_id", "trace_id", "offset", "window_ns", "finished_ns")
CARRIED = (
    "topic string, partition int, channel string, internal_id decimal(20,0), trace_id decimal(20,0), offset bigint,"
    " window_ns bigint, finished_ns bigint"
)


def judged(lives: DataFrame, settings: TraceSettings) -> DataFrame:
    """The finishes that the order is judged by."""
    if settings.order == "off":
        return lives.where(F.lit(False)).select(*COLUMNS)
    is_judged = F.col("is_first_delivery") & (F.lit(settings.order == "ids") | F.col("is_ordered"))
    return lives.where(is_judged).select(*COLUMNS)


def violations_of(finishes: DataFrame) -> DataFrame:
    """Table ``violations`` without ``batch``, of what `judged` gave."""
    earlier = (
        Window.partitionBy(*GROUP)
        .orderBy("finished_ns", "internal_id", "offset")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    compared = finishes.withColumns(
        {"after_internal_id": F.max("internal_id").over(earlier), "after_offset": F.max("offset").over(earlier)}
    )
    is_back = (F.col("internal_id") < F.col("after_internal_id")) | (F.col("offset") < F.col("after_offset"))
    return compared.where(is_back).select(*columns("violations"))


def carried(finishes: DataFrame, until_ns: int) -> DataFrame:
    """What is kept of ``finishes`` to judge later ones: those from ``until_ns`` on, one for the rest of a group."""
    reached = finishes.where(F.col("finished_ns") < until_ns).groupBy(*GROUP)
    summary = reached.agg(
        F.max("internal_id").alias("internal_id"),
        F.max("offset").alias("offset"),
        F.max("finished_ns").alias("finished_ns"),
    ).withColumns({"trace_id": F.lit(None).cast("decimal(20,0)"), "window_ns": F.lit(None).cast("bigint")})
    return finishes.where(F.col("finished_ns") >= until_ns).unionByName(summary.select(*COLUMNS))
