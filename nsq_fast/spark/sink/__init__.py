"""The sink: rows of a DataFrame become messages. Arrow batches go in, MPUB commands go out; no object for each row."""

from __future__ import annotations

from .report import TaskReport, WriteReport
from .schema import table_schema
from .writer import ArrowWriter, StreamArrowWriter

__all__ = ["ArrowWriter", "StreamArrowWriter", "TaskReport", "WriteReport", "table_schema"]
