"""For tests of the sink: batches in, and what the servers have of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from nsq_fast import ColumnSubscription
from nsq_fast.config import ConnectionConfig
from nsq_fast.names import Address
from nsq_fast.spark.options import SinkOptions
from nsq_fast.spark.sink.report import TaskReport
from nsq_fast.spark.sink.task import TaskWriter

CHANNEL = "check"


def batch(**columns: Any) -> pa.RecordBatch:
    """An Arrow batch of lists, or of arrays where the type matters."""
    return pa.record_batch(
        {name: values if isinstance(values, pa.Array) else pa.array(values) for name, values in columns.items()}
    )


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def write(batches: Iterable[pa.RecordBatch], **options: str) -> TaskReport:
    """Write them as one task would, with options as Spark gives them."""
    items = list(batches)
    names = {name.lower(): name for name in items[0].schema.names}
    return TaskWriter(SinkOptions.parse(options), names).write(iter(items))


def taken(address: Address, topic: str, count: int, **how: Any) -> list[bytes]:
    """Take ``count`` messages, or those that come, and see that no more do."""
    found: list[bytes] = []
    with ColumnSubscription(address, topic, CHANNEL, ConnectionConfig(output_buffer_timeout=25), **how) as source:
        source.set_rdy(2000)
        while columns := source.fetch(5.0 if len(found) < count else 0.3):
            if not columns.count:
                break
            offsets = memoryview(columns.body_offsets).cast("i")
            found += [columns.body[begin:end] for begin, end in itertools.pairwise(offsets)]
            source.finish(columns.ids)
    return found
