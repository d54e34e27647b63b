"""The names of the columns of the source, for those parts that need neither pyspark nor pyarrow."""

from __future__ import annotations

HEADERS = "headers"
NAMES: tuple[str, ...] = (
    "topic",
    "partition",
    "message_id",
    "internal_id",
    "trace_id",
    "timestamp",
    "attempts",
    "offset",
    "size",
    HEADERS,
    "body",
    "nsqd",
)
"""All columns, in their order."""
