"""The sink: rows of a DataFrame become messages. Arrow batches go in, MPUB commands go out; no object for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsq_fast._lazy import lazy_names

if TYPE_CHECKING:
    from .foreach import foreach_batch_sink as foreach_batch_sink
    from .report import TaskReport as TaskReport
    from .report import WriteReport as WriteReport
    from .schema import table_schema as table_schema
    from .writer import ArrowWriter as ArrowWriter
    from .writer import stream_writer as stream_writer

# Lazily: the writers need more of PySpark than 3.5 has.
_HOME = {
    "ArrowWriter": "writer",
    "TaskReport": "report",
    "WriteReport": "report",
    "foreach_batch_sink": "foreach",
    "stream_writer": "writer",
    "table_schema": "schema",
}

__all__ = [*_HOME]

__getattr__ = lazy_names(__name__, _HOME)
