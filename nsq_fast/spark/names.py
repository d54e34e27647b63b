"""The names of the columns of the source, for those parts that need neither pyspark nor pyarrow."""

from __future__ import annotations

HEADERS = "headers"
JSON, MAP = "json", "map"
HEADERS_AS = (JSON, MAP)
"""What the column of headers may be: the text of each header as it came, or its entries."""
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
