"""The outcome of a write: of one task, for its commit message, and of all tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from nsq_fast.runtime import Receipt
from nsq_fast.spark.versions import WriterCommitMessage

Place = tuple[str, int | None]
"""A topic and a partition; None where the server chose it, or has none."""

RECEIPTS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("nsqd", pa.string()),
        ("internal_id", pa.int64()),
        ("trace_id", pa.int64()),
        ("offset", pa.int64()),
        ("size", pa.int32()),
    ]
)
"""Receipts as a table. The ids are unsigned numbers taken as signed, as the source's are."""


@dataclass(frozen=True)
class TaskReport(WriterCommitMessage):
    """The commit message of one task.

    Attributes:
        rows: messages that it stored; a retried send may have stored some of them twice.
        places: how many of them went to each topic and partition.
        partition_id, attempt: of the task; None outside of Spark.
        receipts: of its traced rows, as an Arrow stream of ``RECEIPTS``; empty for none.
    """

    rows: int
    places: dict[Place, int]
    partition_id: int | None = None
    attempt: int | None = None
    receipts: bytes = field(default=b"", repr=False)

    def receipt_table(self) -> pa.Table:
        """The receipts."""
        if not self.receipts:
            return RECEIPTS.empty_table()
        return pa.ipc.open_stream(self.receipts).read_all()


@dataclass(frozen=True)
class WriteReport:
    """All tasks of a write.

    Attributes:
        rows, places: as of a task.
        tasks: how many tasks finished; ``failed`` did not: what they stored is not known here, and is stored again
            if the write is run again.
        receipts: of all traced rows.
    """

    rows: int
    places: dict[Place, int]
    tasks: int
    failed: int
    receipts: pa.Table = field(repr=False)

    @classmethod
    def of(cls, messages: Sequence[WriterCommitMessage | None]) -> WriteReport:
        """From what Spark hands to commit and abort: None for a task that failed."""
        reports = [message for message in messages if isinstance(message, TaskReport)]
        places: Counter[Place] = Counter()
        for report in reports:
            places.update(report.places)
        return cls(
            rows=sum(report.rows for report in reports),
            places=dict(places),
            tasks=len(reports),
            failed=len(messages) - len(reports),
            receipts=pa.concat_tables([report.receipt_table() for report in reports] or [RECEIPTS.empty_table()]),
        )

    def as_json(self) -> dict[str, Any]:
        """All but the receipts, of which it has the number, for a file."""
        places = [
            {"topic": topic, "partition": partition, "rows": rows}
            for (topic, partition), rows in sorted(self.places.items(), key=lambda item: str(item[0]))
        ]
        return {
            "rows": self.rows,
            "tasks": self.tasks,
            "failed": self.failed,
            "places": places,
            "receipts": self.receipts.num_rows,
        }

    def __str__(self) -> str:
        topics: Counter[str] = Counter()
        for (topic, _), rows in self.places.items():
            topics[topic] += rows
        shares = ", ".join(f"{topic}: {rows}" for topic, rows in sorted(topics.items()))
        return f"{self.rows} rows by {self.tasks} tasks{f' ({shares})' if shares else ''}"


def receipts_as_batch(topic: str, receipts: Sequence[Receipt]) -> pa.RecordBatch:
    """Receipts of a topic in the layout of ``RECEIPTS``: some 40 bytes each, where objects would take hundreds."""
    columns = {
        "topic": [topic] * len(receipts),
        "partition": [each.partition for each in receipts],
        "nsqd": [str(each.nsqd) for each in receipts],
        "internal_id": [_signed(each.internal_id) for each in receipts],
        "trace_id": [_signed(each.trace_id) for each in receipts],
        "offset": [each.offset for each in receipts],
        "size": [each.size for each in receipts],
    }
    return pa.record_batch(columns, schema=RECEIPTS)


def receipts_as_bytes(batches: Sequence[pa.RecordBatch]) -> bytes:
    """Receipts as an Arrow stream; empty for none."""
    if not batches:
        return b""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, RECEIPTS) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return bytes(sink.getvalue())


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
