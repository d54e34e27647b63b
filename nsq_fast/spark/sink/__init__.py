"""Writing: what Spark calls, in each task and once in a process of the driver; what a task does; what it reports.

A task takes Arrow batches and sends messages. The next batch is read, in a
thread, while one is on its way: the hub goes on meanwhile, answers heartbeats
and takes replies, however long Spark needs.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple

import pyarrow as pa
from gevent import get_hub
from gevent.event import AsyncResult
from pyspark import TaskContext
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from nsq_fast._lazy import get_logger
from nsq_fast.client.trace import LOGGER_NAME, TraceLog, log_to_file
from nsq_fast.columns import ColumnProducer, StoredRows
from nsq_fast.config import Config
from nsq_fast.errors import BodyInvalid, ConfigError, NsqError, RowInvalid, WriteFailed, counted
from nsq_fast.log_events import SPARK_BATCH_WRITTEN, SPARK_REPORT_FAILED, SPARK_WRITE_ABORTED
from nsq_fast.protocol.publishing import Receipt
from nsq_fast.spark.options import SinkOptions, as_texts
from nsq_fast.spark.versions import (
    STREAMS_ARROW,
    DataSourceArrowWriter,
    StreamWriterBase,
    WriterCommitMessage,
    plain_errors,
    spare_modules,
)

from .plan import Plan, Planner, RowKeys, Rows, Send, column_names, keys_of_batch, keys_of_stream, new_write

logger: logging.Logger = get_logger(__name__)


# More rows of one partition leave together, because a partition has one command on its way at a time.
_PINNED_SHARE = 2


class _Sent(NamedTuple):
    """A command on its way, or through.

    Attributes:
        rows: how many.
        describe: says which, for an error.
    """

    result: AsyncResult[Any]
    topic: str
    rows: int
    describe: Callable[[], str]


class TaskWriter:
    """Writes the rows of one task.

    Args:
        names: column -> what the batches call it.
        keys: gives the rows idempotence keys; None: they get none.
    """

    def __init__(self, options: SinkOptions, names: Mapping[str, str], keys: RowKeys | None = None) -> None:
        self._options = options
        self._keys = keys
        self._names = names
        self._on_way: deque[_Sent] = deque()
        self._places: Counter[Place] = Counter()
        self._receipts: list[pa.RecordBatch] = []

    def write(self, batches: Iterator[pa.RecordBatch]) -> TaskReport:
        """Write all of them; return when the servers have every row.

        Raises RowInvalid for a row that cannot be written, WriteFailed when a server refuses or cannot be reached.
        Either says how many rows are stored all the same.
        """
        spare_modules()
        with TaskTrace(self._options.trace_log) as trace, new_producer(self._options, trace.log) as producer:
            try:
                self._write(producer, batches)
            except NsqError as error:
                raise self._failure(error) from error
        return self.report()

    def report(self) -> TaskReport:
        return TaskReport(
            rows=sum(self._places.values()), places=dict(self._places), receipts=receipts_as_bytes(self._receipts)
        )

    def _write(self, producer: ColumnProducer, batches: Iterator[pa.RecordBatch]) -> None:
        planner = Planner(producer, traces_all=self._options.traces_all, keys=self._keys)
        first = 0
        for number, batch in enumerate(read_ahead(batches)):
            if batch.num_rows:
                for plan in self._plans(planner, Rows.of_batch(batch, self._names, number, first)):
                    self._send(producer, plan)
            first += batch.num_rows
            self._settle(wait=False)
        self._settle(wait=True)

    def _plans(self, planner: Planner, rows: Rows) -> list[Plan]:
        """Everything that is to be sent of a batch: all of it is checked before any is."""
        topic = self._options.topic
        rows.check(self._options.producer.max_msg_size)
        parts = rows.by_topic() if topic is None else {topic: rows}
        return [planner.plan(name, part) for name, part in parts.items()]

    # Sending

    def _send(self, producer: ColumnProducer, plan: Plan) -> None:
        for send in plan.sends:
            self._send_rows(producer, plan.topic, send)
        for row, delay in plan.deferred:
            body = plan.rows.body[row].as_py()
            result = producer.publish(plan.topic, body, delay, raise_error=False)
            self._add(_Sent(result, plan.topic, 1, partial(plan.rows.describe, row)))

    def _send_rows(self, producer: ColumnProducer, topic: str, send: Send) -> None:
        config, start = producer.config, 0
        most = config.linger_max_messages * (1 if send.partition is None else _PINNED_SHARE)
        size = min(config.linger_max_bytes, config.max_body_size)
        for stop in send.records.cut(most, size, send.numbers):
            result = producer.publish_rows(
                topic,
                send.records,
                send.numbers,
                start,
                stop,
                partition=send.partition,
                is_trace_optional=send.is_optional,
            )
            self._add(_Sent(result, topic, stop - start, partial(send.describe, start, stop)))
            start = stop

    def _add(self, sent: _Sent) -> None:
        self._on_way.append(sent)
        if self._on_way[0].result.ready():
            self._settle(wait=False)

    # Outcomes

    def _settle(self, *, wait: bool) -> None:
        """Book those that are through, or, if ``wait``, all. Raises the error of the first that failed."""
        while self._on_way and (wait or self._on_way[0].result.ready()):
            sent = self._on_way[0]
            stored = sent.result.get()
            self._on_way.popleft()
            self._book(sent, stored)

    def _book(self, sent: _Sent, stored: Any) -> None:
        if isinstance(stored, StoredRows):
            self._places[sent.topic, stored.partition] += sent.rows
            if stored.receipts:
                self._receipts.append(receipts_as_batch(sent.topic, stored.receipts))
        else:
            self._places[sent.topic, None] += sent.rows

    def _failure(self, error: NsqError) -> NsqError:
        """What to raise for an error, once it is known what became of everything that was sent."""
        failed: list[tuple[_Sent, BaseException]] = []
        for sent in self._on_way:
            sent.result.wait()
            cause = sent.result.exception
            if cause is None:
                self._book(sent, sent.result.value)
            else:
                failed.append((sent, cause))
        self._on_way.clear()
        stored = sum(self._places.values())
        unknown = sum(sent.rows for sent, cause in failed if getattr(cause, "possibly_stored", False))
        maybe = f", {unknown:,} may be" if unknown else ""
        tail = f"; of this task {counted(stored, 'row')} {'is' if stored == 1 else 'are'} stored{maybe}"
        first: BaseException = error
        if failed and not isinstance(error, RowInvalid):
            sent, first = failed[0]
            tail = f" ({sent.describe()}){tail}"
        return _raised(first, f"{first}{tail}", stored, unknown)


def _raised(error: BaseException, text: str, stored: int, unknown: int) -> NsqError:
    if isinstance(error, (RowInvalid, BodyInvalid, ConfigError)):
        return type(error)(text)
    return WriteFailed(text, rows_stored=stored, rows_unknown=unknown, possibly_stored=bool(stored or unknown))


def read_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches; the next one is read in a thread of the hub's while one is worked at."""
    threads = get_hub().threadpool
    coming = threads.spawn(_next, batches)
    while (batch := coming.get()) is not None:
        if isinstance(batch, BaseException):
            raise batch
        coming = threads.spawn(_next, batches)
        yield batch


def _next(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch | BaseException | None:
    """The next batch; None at the end. An error is returned: one raised in a thread would be printed, too."""
    try:
        return next(batches, None)
    except BaseException as error:
        return error


# The sink as a function for ``foreachBatch``: for PySpark 3.5, which has no Python data sources, and every other.


def foreach_batch_sink(**options: Any) -> Callable[[Any, int], None]:
    """What ``writeStream.foreachBatch`` takes: it publishes each row of a micro-batch, checked as by the sink.

        df.writeStream.foreachBatch(foreach_batch_sink(topic="orders", lookupd_http_addresses="...")).start()

    Options are those of the sink but reportPath; write one with a dot as ``**{"nsq.publish_timeout": 30}``. For a batch
    that is no stream: ``foreach_batch_sink(...)(df, 0)``. Raises ConfigError for the options at once, and for the
    columns when called; the error of a task otherwise. The guarantee is the sink's: at least once.
    """
    parsed = SinkOptions.parse(as_texts(options))
    if parsed.report_path is not None:
        raise ConfigError("reportPath: is for df.write and df.writeStream only; a log record says how many rows")

    def write(frame: Any, batch: int) -> None:
        names = column_names(frame.schema, topic=parsed.topic, key_strategy=parsed.producer.key_strategy)
        write_name = new_write()

        def publish(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            keys = keys_of_batch(write_name) if parsed.idempotence_key else None
            report = plain_errors(TaskWriter(parsed, names, keys).write)(iter(batches))
            yield pa.record_batch({"rows": pa.array([report.rows], pa.int64())})

        tasks = frame.mapInArrow(publish, "rows long").collect()
        logger.info(
            "batch-%d: %s by %s",
            batch,
            counted(sum(task.rows for task in tasks), "row"),
            counted(len(tasks), "task"),
            extra=SPARK_BATCH_WRITTEN,
        )

    return write


# The trace log of a task: a file of its own in a folder that many tasks share.


class TaskTrace:
    """Writes ``publish-HOST-PID-RANDOM.jsonl`` in a folder; the name begins with a dot until it is complete.

    So whoever watches the folder (Spark's file source does not see names with a dot) reads whole files. A process
    that is killed leaves the name with the dot.

    Args:
        folder: made when it is not there; None: nothing is written.

    Attributes:
        log: for a producer; it is on for all topics if there is a folder.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._handler: logging.Handler | None = None
        self._name = f"publish-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        # Not one of logging's own, so that two tasks in a process do not share it.
        self._logger = logging.Logger(LOGGER_NAME, logging.INFO)
        self.log: TraceLog = TraceLog(self._logger)

    def __enter__(self) -> TaskTrace:
        if self._folder is not None:
            os.makedirs(self._folder, exist_ok=True)
            self._handler = log_to_file(self._path(f".{self._name}"), 0, 0, log=self._logger)
            self.log.enable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        self._logger.removeHandler(self._handler)
        self._handler.close()
        path = self._path(f".{self._name}")
        with suppress(FileNotFoundError):
            if os.path.getsize(path):
                os.replace(path, self._path(self._name))
            else:
                os.remove(path)

    def _path(self, name: str) -> str:
        assert self._folder is not None
        return os.path.join(self._folder, name)


def new_producer(options: SinkOptions, trace: TraceLog) -> ColumnProducer:
    """A producer, not started, for the servers and with the client options of a sink."""
    return ColumnProducer(
        [str(address) for address in options.servers.nsqd_tcp],
        [str(endpoint) for endpoint in options.servers.lookupd_http],
        trace=trace,
        **_values(options.producer),
        **_values(options.connection),
        **_values(options.lookup),
    )


def _values(config: Config) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}


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
        return f"{counted(self.rows, 'row')} by {counted(self.tasks, 'task')}{f' ({shares})' if shares else ''}"


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


# What Spark calls.


ROWS = 10_000
"""Of an Arrow batch that is made of rows."""


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
                import pyarrow.parquet as pq  # here: most tasks write none

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
