"""The writers that Spark calls: ``write`` in every task, ``commit`` or ``abort`` once in a process of the driver."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from nsq_fast.errors import ConfigError
from nsq_fast.log_events import SPARK_BATCH_WRITTEN, SPARK_REPORT_FAILED, SPARK_WRITE_ABORTED
from nsq_fast.spark.options import SinkOptions
from nsq_fast.spark.versions import STREAMS_ARROW, StreamWriterBase, WriterCommitMessage, plain_errors

from .plan import RowKeys, column_names, keys_of_batch, keys_of_stream, new_write
from .task import TaskReport, TaskWriter, WriteReport

logger: logging.Logger = logging.getLogger(__name__)

ROWS = 10_000


class _Writer:
    """What both writers share. Made in several processes of the driver, and pickled: making one writes nothing.

    The one that was made for a write goes to all of its tasks, as often as they are tried.

    Raises ConfigError for columns that cannot be written, for a folder that can take no reports, and for ``overwrite``.
    """

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise ConfigError('mode "overwrite": messages cannot be taken back; write with mode("append")')
        if options.report_path is not None:
            _check_folder(options.report_path)
        self.options: SinkOptions = options
        self.names: dict[str, str] = column_names(
            schema, topic=options.topic, key_strategy=options.producer.key_strategy
        )

    @plain_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskReport:
        """Publish the rows of a task. Returns when servers have confirmed all of them."""
        keys = self._keys() if self.options.idempotence_key else None
        report = TaskWriter(self.options, self.names, keys).write(iter(iterator))
        context = TaskContext.get()
        if context is None:
            return report
        return replace(report, partition_id=context.partitionId(), attempt=context.attemptNumber())

    def _keys(self) -> RowKeys:
        raise NotImplementedError

    def _committed(self, messages: Sequence[WriterCommitMessage | None], name: str) -> WriteReport:
        report = WriteReport.of(messages)
        logger.info("%s: %s", name, report, extra=SPARK_BATCH_WRITTEN)
        self._keep(report, name, is_committed=True)
        return report

    def _aborted(self, messages: Sequence[WriterCommitMessage | None], name: str) -> WriteReport:
        report = WriteReport.of(messages)
        logger.warning(
            "%s was aborted: %s are stored and stay so; of %d that failed it is not known here what they stored."
            " A row that is written again is there twice",
            name,
            report,
            report.failed,
            extra=SPARK_WRITE_ABORTED,
        )
        self._keep(report, name, is_committed=False)
        return report

    def _keep(self, report: WriteReport, name: str, *, is_committed: bool) -> None:
        folder = self.options.report_path
        if folder is None:
            return
        stem = os.path.join(folder, f"{name}-{secrets.token_hex(4)}")
        try:
            os.makedirs(folder, exist_ok=True)
            if report.receipts.num_rows:
                pq.write_table(report.receipts, f"{stem}.parquet")
            with open(f"{stem}.json.part", "w", encoding="utf-8") as file:
                json.dump({"committed": is_committed, **report.as_json()}, file)
            os.replace(f"{stem}.json.part", f"{stem}.json")
        except OSError as error:
            # Raised, it would have the rows, which are stored, written once more.
            logger.warning("%s has no report in %s: %s", name, folder, error, extra=SPARK_REPORT_FAILED)


def _check_folder(folder: str) -> None:
    """Before anything is published: make the folder, or raise ConfigError."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"reportPath={folder!r}: cannot be made: {error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"reportPath={folder!r}: cannot be written")


class ArrowWriter(_Writer, DataSourceArrowWriter):
    """The writer of ``df.write``."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        self._write_name = new_write()

    def _keys(self) -> RowKeys:
        return keys_of_batch(self._write_name)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """All tasks are through: everything is stored already; say how much."""
        self._committed(messages, "write")

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """A task failed for good: nothing can be taken back; say what is stored."""
        self._aborted(messages, "write")


class StreamArrowWriter(_Writer, StreamWriterBase):
    """The writer of ``df.writeStream``: each micro-batch is a write."""

    def _keys(self) -> RowKeys:
        return keys_of_stream()

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        self._committed(messages, f"batch-{batchId}")

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        self._aborted(messages, f"batch-{batchId}")


class StreamRowWriter(StreamArrowWriter):
    """The same for PySpark 4.0, which hands over rows."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        self.schema = schema

    def write(self, iterator: Iterator[Any]) -> TaskReport:
        return super().write(as_batches(iterator, self.schema))


def stream_writer(options: SinkOptions, schema: StructType, overwrite: bool) -> StreamArrowWriter:
    return (StreamArrowWriter if STREAMS_ARROW else StreamRowWriter)(options, schema, overwrite)


def as_batches(rows: Iterator[Any], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Rows, which are tuples, as Arrow batches of up to ``ROWS``."""
    arrow = to_arrow_schema(schema)
    while part := list(islice(rows, ROWS)):
        columns = zip(arrow.types, zip(*part, strict=True), strict=True)
        yield pa.record_batch([pa.array(values, kind) for kind, values in columns], schema=arrow)
