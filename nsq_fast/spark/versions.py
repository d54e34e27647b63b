"""What PySpark's versions have of data sources, in one place; stand-ins for names that older ones lack.

| | 3.5 | 4.0 | 4.1 | 4.2 and newer |
|---|---|---|---|---|
| sources, sinks | - | yes | yes | yes |
| a streaming sink takes | - | rows | Arrow | Arrow |
| a batch is told what rows the query filters for | - | no | yes | yes |
| a source is told where to go on, and how much it may read | - | no | no | yes |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamWriterBase
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

    TELLS_START = STREAMS_ARROW = PUSHES_FILTERS = True
else:
    try:
        from pyspark.sql import datasource
        from pyspark.sql.datasource import WriterCommitMessage
    except ImportError:  # 3.5: ``foreach_batch_sink`` alone works
        datasource = WriterCommitMessage = object

    STREAMS_ARROW = hasattr(datasource, "DataSourceStreamArrowWriter")
    PUSHES_FILTERS = hasattr(getattr(datasource, "DataSourceReader", None), "pushFilters")
    StreamWriterBase = getattr(
        datasource, "DataSourceStreamArrowWriter", getattr(datasource, "DataSourceStreamWriter", object)
    )

    try:
        from pyspark.sql.streaming.datasource import (
            ReadAllAvailable,
            ReadLimit,
            ReadMaxRows,
            SupportsTriggerAvailableNow,
        )

        TELLS_START = True
    except ImportError:
        TELLS_START = False

        class ReadLimit:
            """How much a batch may have."""

        @dataclass
        class ReadAllAvailable(ReadLimit):
            """All that there is."""

        @dataclass
        class ReadMaxRows(ReadLimit):
            """So many rows."""

            max_rows: int

        class SupportsTriggerAvailableNow:
            """Spark reads one batch of all there is by itself."""


__all__ = [
    "PUSHES_FILTERS",
    "STREAMS_ARROW",
    "TELLS_START",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "StreamWriterBase",
    "SupportsTriggerAvailableNow",
    "WriterCommitMessage",
]


def default_limit(rows: int | None) -> Any:
    """The limit of an option in rows."""
    return ReadAllAvailable() if rows is None else ReadMaxRows(rows)
