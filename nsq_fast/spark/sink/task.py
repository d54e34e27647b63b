"""One task of a write: Arrow batches in, messages out, a report at the end.

The next batch is read, in a thread, while one is on its way: the hub goes on
meanwhile, answers heartbeats and takes replies, however long Spark needs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from gevent import get_hub
from gevent.event import AsyncResult

from nsq_fast.errors import BodyInvalid, ConfigError, NsqError, RowInvalid, WriteFailed
from nsq_fast.runtime import ColumnProducer, StoredRows
from nsq_fast.spark.options import SinkOptions

from .connect import new_producer
from .plan import Plan, Planner, Send
from .report import Place, TaskReport, receipts_as_batch, receipts_as_bytes
from .row_keys import RowKeys
from .rows import Rows
from .tracing import TaskTrace

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
        with TaskTrace(self._options.trace_log) as trace, new_producer(self._options, trace.log) as producer:
            try:
                self._write(producer, batches)
            except NsqError as error:
                raise self._failure(error) from error
        return self.report()

    def report(self) -> TaskReport:
        """What is stored by now."""
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
        tail = f"; of this task {stored} rows are stored{f', {unknown} may be' if unknown else ''}"
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
