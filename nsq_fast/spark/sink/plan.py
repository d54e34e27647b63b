"""Where the rows of one topic go, and in which commands: planned for the rows of an Arrow batch before any is sent."""

from __future__ import annotations

import json
import re
import secrets
from array import array
from collections.abc import Mapping
from hashlib import blake2b
from itertools import accumulate
from sys import byteorder
from typing import Any, NamedTuple, NoReturn

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.types import DataType, IntegerType, LongType, StringType, StructField, StructType

from nsq_fast._codec import Records, group_rows
from nsq_fast.client.trace import new_trace_id
from nsq_fast.columns import ColumnProducer, TopicLayout
from nsq_fast.config import MAX_PARTITION, MAX_TAG_SIZE, ProducerConfig
from nsq_fast.errors import BodyInvalid, ConfigError, NameInvalid, RowInvalid, counted
from nsq_fast.names import check_topic, is_valid_name
from nsq_fast.protocol.publishing import IDEMPOTENCE_HEADER, key_partitioner
from nsq_fast.spark.options import BINARY, SINK_COLUMNS, TEXT, WHOLE_NUMBERS, SinkOptions
from nsq_fast.spark.source import BODY

_PARTITIONED_ONLY = ("partition", "key", "trace_id", "headers", "tag")


class Send(NamedTuple):
    """Rows for one place.

    Attributes:
        numbers: of the rows, int32; None: all.
        partition: None: whichever the producer chooses.
        is_optional: servers that cannot trace take the rows without trace ids.
    """

    rows: Rows
    records: Records
    numbers: bytes | None
    partition: int | None
    is_optional: bool

    def describe(self, start: int, stop: int) -> str:
        """Which rows a part of it is, in words."""
        count = stop - start
        row = start if self.numbers is None else int.from_bytes(self.numbers[4 * start : 4 * start + 4], byteorder)
        return self.rows.describe(row) + (f" and {count - 1} others" if count > 1 else "")


class Plan(NamedTuple):
    """What is to be done with the rows of a topic.

    Attributes:
        deferred: (row, delay in ms) of those that are delivered later.
    """

    topic: str
    rows: Rows
    sends: list[Send]
    deferred: list[tuple[int, int]]


class Planner:
    """Plans for one task.

    Args:
        traces_all: rows without a trace id get one, where servers can trace.
        keys: gives the rows idempotence keys; None: they get none.
    """

    def __init__(self, producer: ColumnProducer, *, traces_all: bool, keys: RowKeys | None = None) -> None:
        self._producer = producer
        self._config: ProducerConfig = producer.config
        self._traces_all = traces_all
        self._keys = keys
        self._partition_of = key_partitioner(self._config.key_strategy)

    def plan(self, topic: str, rows: Rows) -> Plan:
        """Raises RowInvalid for a row that the servers of its topic cannot take; NoNsqd when there are none."""
        layout = self._producer.layout(topic)
        if self._keys is not None:
            check_headers(topic, layout.is_ext if layout.is_partitioned else False)
        if layout.is_partitioned:
            _check_partitioned(rows, layout)
        else:
            _check_plain(rows)
        records = self._records(topic, rows, layout)
        is_optional = self._traces_all and rows.column("trace_id") is None
        deferred = _deferred(rows)
        targets = self._targets(rows, layout, {row for row, _ in deferred})
        if targets is None:
            return Plan(topic, rows, [Send(rows, records, None, None, is_optional)], deferred)
        codes, in_turn = targets
        groups = group_rows(number_bytes(codes), in_turn + 2)[: in_turn + 1]
        sends = [
            Send(rows, records, numbers, None if code == in_turn else code, is_optional)
            for code, numbers in enumerate(groups)
            if numbers
        ]
        return Plan(topic, rows, sends, deferred)

    # What is said

    def _records(self, topic: str, rows: Rows, layout: TopicLayout) -> Records:
        traces = self._trace_ids(rows, layout)
        offsets, body = binary_buffers(rows.body)
        extras: dict[str, Any] = {}
        if self._keys is not None or rows.column("headers") is not None or rows.column("tag") is not None:
            headers = self._headers(topic, rows, traces)
            extras["header_offsets"] = array("i", accumulate(map(len, headers), initial=0))
            extras["headers"] = b"".join(headers)
        elif traces is not None:
            extras["trace_ids"] = memoryview(traces.buffers()[1])[8 * traces.offset : 8 * (traces.offset + len(rows))]
        records = Records(offsets, body, **extras)
        if extras and (row := records.find_misfit(limit := self._config.max_msg_size)) >= 0:
            rows.refuse(row, f"body of {records.size_of(row)} bytes with trace id or headers is above {limit}")
        return records

    def _trace_ids(self, rows: Rows, layout: TopicLayout) -> pa.Array | None:
        """A trace id for each row, 0 for none; None when no row has one."""
        found = rows.column("trace_id")
        if not self._traces_all or not layout.is_partitioned:
            return None if found is None else found.fill_null(0)
        made = pa.array([new_trace_id() for _ in range(len(rows))], pa.int64())
        return made if found is None else pc.coalesce(found, made)

    def _headers(self, topic: str, rows: Rows, traces: pa.Array | None) -> list[bytes]:
        count = len(rows)
        headers, tags = _values(rows, "headers", count), _values(rows, "tag", count)
        trace_ids = [None] * count if traces is None else traces.to_pylist()
        of_rows = list(zip(rows.numbers_in_task(), rows.body.to_pylist(), strict=True)) if self._keys else []
        found: list[bytes] = []
        try:
            for header, tag, trace_id in zip(headers, tags, trace_ids, strict=True):
                fields = _fields(header)
                if self._keys is not None:
                    self._keys.add_to(fields, *of_rows[len(found)], tag)
                found.append(self._producer.header(topic, fields, tag, trace_id % 2**64 if trace_id else None))
        except (ConfigError, BodyInvalid, TypeError, ValueError) as error:
            rows.refuse(len(found), str(error))
        return found

    # Where it goes

    def _targets(self, rows: Rows, layout: TopicLayout, late: set[int]) -> tuple[pa.Array, int] | None:
        """A code for each row, and the one that stands for any partition; None: that is where all of them go.

        A lower code is a partition, the next higher one that of the ``late`` rows, which are deferred.
        """
        partition, key = rows.column("partition"), rows.column("key")
        if partition is None and key is None and not late:
            return None
        codes = pa.nulls(len(rows), pa.int32()) if partition is None else partition.cast(pa.int32())
        if key is not None:
            codes = pc.coalesce(codes, self._partitions_of(key, layout.partition_num))
        highest = pc.max(codes).as_py()
        in_turn = layout.partition_num or (0 if highest is None else highest + 1)
        codes = codes.fill_null(in_turn)
        if late:
            is_late = pa.array([row in late for row in range(len(rows))])
            codes = pc.if_else(is_late, pa.scalar(in_turn + 1, pa.int32()), codes)
        return codes, in_turn

    def _partitions_of(self, key: pa.Array, partition_num: int) -> pa.Array:
        """The partition of each key. Equal keys are hashed once."""
        coded = key.dictionary_encode()
        found = [self._partition_of(each, partition_num) for each in coded.dictionary.to_pylist()]
        return pa.array(found, pa.int32()).take(coded.indices)


def _check_plain(rows: Rows) -> None:
    for name in _PARTITIONED_ONLY:
        column = rows.column(name)
        if column is not None:
            why = "servers without partitions know no such thing; leave it null"
            rows.refuse_where(pc.is_valid(column), f"{name}={{}}: {why}", column)


def _check_partitioned(rows: Rows, layout: TopicLayout) -> None:
    defer, partition, key = (rows.column(name) for name in ("defer_ms", "partition", "key"))
    if defer is not None:
        why = "defer_ms={}: servers with partitions cannot delay a publish; leave it null"
        rows.refuse_where(pc.greater(defer, 0), why, defer)
    if partition is not None and layout.partition_num:
        why = f"partition={{}}: the topic has {counted(layout.partition_num, 'partition')}"
        rows.refuse_where(pc.greater_equal(partition, layout.partition_num), why, partition)
    if key is not None and not layout.partition_num:
        why = "key={}: the number of partitions is unknown without lookupd_http_addresses"
        rows.refuse_where(pc.is_valid(key), why, key)
    for name in ("headers", "tag"):
        column = rows.column(name)
        if column is not None and layout.is_ext is False:
            why = f"{name}={{}}: the topic carries no extended headers; leave it null, or create it with extend"
            rows.refuse_where(pc.is_valid(column), why, column)


def _deferred(rows: Rows) -> list[tuple[int, int]]:
    column = rows.column("defer_ms")
    if column is None:
        return []
    return [(row, delay) for row, delay in enumerate(column.to_pylist()) if delay]


def _values(rows: Rows, name: str, count: int) -> list[Any]:
    column = rows.column(name)
    return [None] * count if column is None else column.to_pylist()


def _fields(header: Any) -> dict[str, Any]:
    """The fields of a header that came as JSON, as a map, or as Kafka's connector has it."""
    if header is None:
        return {}
    if not isinstance(header, str):
        pairs = [_pair(each) for each in header]
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError(f"headers={str(header)[:60]}: a name is there twice")
        return found
    try:
        fields = msgspec.json.decode(header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"headers={header[:60]!r}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"headers={header[:60]!r}: must be a JSON object")
    return fields


def _pair(entry: Any) -> tuple[str, str | None]:
    if isinstance(entry, tuple):  # of a map
        return entry
    if entry is None or entry["key"] is None:
        raise ValueError(f"headers: {entry}: a header needs a name")
    value = entry["value"]
    return entry["key"], None if value is None else value.decode()


# One Arrow batch as the sink sees it: its columns under our names, and the rows that cannot be published.
#
# Those rows are found before anything of the batch is sent. Checks are made on
# whole columns; a Python object is made only of the row that is at fault.


_NUMBERS = frozenset({"partition", "trace_id", "defer_ms"})
_SHOWN = 60


class Rows:
    """Rows of an Arrow batch: all of it, or those of one topic.

    Args:
        columns: by our names.
        number: of the batch in its task, from 0.
        first: number of the batch's first row in its task, from 0.
        origin: what the rows are numbered in the batch; None: as here.
    """

    def __init__(
        self, columns: Mapping[str, pa.Array], number: int, first: int, origin: pa.Array | None = None
    ) -> None:
        self.body: Any = columns["body"]
        self.number = number
        self._first = first
        self._columns = columns
        self._origin = origin

    @classmethod
    def of_batch(cls, batch: pa.RecordBatch, names: Mapping[str, str], number: int, first: int = 0) -> Rows:
        """A whole batch. ``names``: column -> what the batch calls it."""
        columns = {name: batch.column(spelt) for name, spelt in names.items()}
        columns["body"] = columns["body"].cast(pa.binary())
        for name in _NUMBERS & columns.keys():
            columns[name] = columns[name].cast(pa.int64())
        return cls(columns, number, first)

    def __len__(self) -> int:
        return len(self.body)

    def column(self, name: str) -> pa.Array | None:
        """A column; None where there is none, or nothing in it."""
        found = self._columns.get(name)
        return None if found is None or found.null_count == len(found) else found

    def refuse(self, row: int, why: str) -> NoReturn:
        """Raise RowInvalid for a row."""
        raise RowInvalid(f"{self.describe(row)}: {why}")

    def describe(self, row: int) -> str:
        """Which row: its number in the batch, and its key where it has one."""
        try:
            key = self._columns["key"][row].as_py() if "key" in self._columns else None
        except UnicodeDecodeError as error:
            key = error.object
        named = "" if key is None else f" (key {_shortened(key)})"
        return f"row {row if self._origin is None else self._origin[row]} of Arrow batch {self.number}{named}"

    def numbers_in_task(self) -> list[int]:
        """The number of each row in its task."""
        own = range(len(self)) if self._origin is None else self._origin.to_pylist()
        return [self._first + number for number in own]

    def refuse_where(self, mask: pa.Array, why: str, column: pa.Array | None = None) -> None:
        """Raise RowInvalid for the first row where ``mask`` is true, if any; ``{}`` in ``why`` is its value."""
        row = int(pc.index(mask, True).as_py())
        if row >= 0:
            self.refuse(row, why if column is None else why.replace("{}", _shortened(column[row].as_py())))

    def check(self, max_size: int) -> None:
        """Raise RowInvalid for the first row at fault, as far as a row shows it by itself.

        Args:
            max_size: of a body.
        """
        if self.body.null_count:
            self.refuse_where(pc.is_null(self.body), "body is null")
        records = Records(*binary_buffers(self.body))
        if (row := records.find_misfit(max_size)) >= 0:
            size = records.size_of(row)
            self.refuse(row, f"body of {size} bytes is above max_msg_size={max_size}" if size else "body is empty")
        for name in ("key", "headers", "tag"):
            self._check_text(name)
        self._check_ranges()
        self._check_pairs()

    def _check_text(self, name: str) -> None:
        """Raise RowInvalid for the first row whose text is not UTF-8: a string of Spark's may hold any bytes."""
        column = self.column(name)
        if column is None:
            return
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            for row in range(len(column)):
                try:
                    column[row].as_py()
                except UnicodeDecodeError as error:  # noqa: PERF203  # no other way tells which row it is
                    self.refuse(row, f"{name}={_shortened(error.object)}: must be UTF-8")
            raise

    def _check_ranges(self) -> None:
        partition, defer, tag = (self.column(name) for name in ("partition", "defer_ms", "tag"))
        if partition is not None:
            outside = pc.or_(pc.less(partition, 0), pc.greater(partition, MAX_PARTITION))
            self.refuse_where(outside, f"partition={{}}: must be 0 to {MAX_PARTITION}", partition)
        if defer is not None:
            self.refuse_where(pc.less(defer, 0), "defer_ms={}: must be 0 or more", defer)
        if tag is not None:
            sizes = pc.utf8_length(tag)
            outside = pc.or_(pc.equal(sizes, 0), pc.greater(sizes, MAX_TAG_SIZE))
            self.refuse_where(outside, f"tag={{}}: must have 1 to {MAX_TAG_SIZE} characters", tag)

    def _check_pairs(self) -> None:
        key, partition = self.column("key"), self.column("partition")
        if key is not None and partition is not None:
            both = pc.and_(pc.is_valid(key), pc.is_valid(partition))
            self.refuse_where(both, "partition={}: the key names the partition; leave one of them null", partition)

    def by_topic(self) -> dict[str, Rows]:
        """The rows of each topic in the column ``topic``. Raises RowInvalid for a name that is none."""
        column = self._columns["topic"]
        if column.null_count:
            self.refuse_where(pc.is_null(column), "topic is null")
        self._check_text("topic")
        coded = column.dictionary_encode()
        topics = coded.dictionary.to_pylist()
        for number, topic in enumerate(topics):
            if not is_valid_name(topic):
                self.refuse(pc.index(coded.indices, number).as_py(), _why_invalid(topic))
        if len(topics) == 1:
            return {topics[0]: self}
        groups = map(as_numbers, group_rows(number_bytes(coded.indices), len(topics)))
        return {topic: self._part(rows) for topic, rows in zip(topics, groups, strict=True)}

    def _part(self, rows: pa.Array) -> Rows:
        return Rows({name: column.take(rows) for name, column in self._columns.items()}, self.number, self._first, rows)


def _why_invalid(topic: str) -> str:
    try:
        return check_topic(topic)
    except NameInvalid as error:
        return str(error)


def as_numbers(rows: bytes) -> pa.Array:
    """Row numbers as an array, of a buffer of int32."""
    return pa.Array.from_buffers(pa.int32(), len(rows) // 4, [None, pa.py_buffer(rows)])


def number_bytes(numbers: pa.Array) -> memoryview:
    """The other way round: the buffer of an array of int32 without nulls."""
    return memoryview(numbers.buffers()[1])[4 * numbers.offset : 4 * (numbers.offset + len(numbers))]


def binary_buffers(column: pa.Array) -> tuple[memoryview, Any]:
    """Offsets and data of a binary array without nulls, as ``Records`` takes them."""
    _, offsets, data = column.buffers()
    part = memoryview(offsets)[4 * column.offset : 4 * (column.offset + len(column) + 1)]
    return part, b"" if data is None else data


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# Idempotence keys of rows: those of a task that is tried again are the same, so that consumers can drop its copies.
#
# A key names the write, the task and the row's number in the task, and holds a digest of what is published. Without the
# digest a task that has other rows at its second attempt (a stage that is not deterministic, a stream that is split
# differently after a restart) would publish new messages under keys that consumers know, and they would be lost.


_SIZE = 8  # bytes of a name or digest
# What Spark tells each task of a streaming query. apache/spark: MicroBatchExecution, BATCH_ID_KEY; StreamExecution,
# QUERY_ID_KEY.
_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"


class RowKeys:
    """The keys of the rows of one task.

    Args:
        write: what all attempts at the write have in common, and no other write has.
        task: the number of the task's part of the rows.
    """

    def __init__(self, write: str, task: int) -> None:
        self._prefix = f"{write}-{task}-"

    def add_to(self, fields: dict[str, Any], row: int, body: bytes, tag: str | None) -> None:
        """Put the key of a row into its headers, in place of one that a message had which the row was made of.

        Args:
            row: its number in the task, from 0.
        """
        digest = blake2b(body, digest_size=_SIZE)
        digest.update(json.dumps([fields, tag], sort_keys=True).encode())
        fields[IDEMPOTENCE_HEADER] = f"{self._prefix}{row}-{digest.hexdigest()}"


def new_write() -> str:
    return secrets.token_hex(_SIZE)


def keys_of_batch(write: str) -> RowKeys:
    """The keys of the task that runs here, of a write of a batch."""
    return RowKeys(write, _context().partitionId())


def keys_of_stream() -> RowKeys:
    """The same of a micro-batch: a restart of the query from its checkpoint gives them again."""
    context = _context()
    query, batch = (context.getLocalProperty(name) for name in (_QUERY_ID, _BATCH_ID))
    if not query or batch is None:
        raise ConfigError("idempotenceKey=true: this Spark does not tell its tasks which micro-batch they belong to")
    write = blake2b(f"{query}/{batch}".encode(), digest_size=_SIZE).hexdigest()
    return RowKeys(write, context.partitionId())


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise ConfigError("idempotenceKey=true: there is no task of Spark here whose rows could have keys")
    return context


def check_headers(topic: str, is_ext: bool | None) -> None:
    """Raise ConfigError for a topic whose messages have no headers. ``is_ext``: None where nobody says."""
    if is_ext is False:
        raise ConfigError(
            f"idempotenceKey=true: messages of topic {topic} have no extended headers to hold a key; leave the option"
            " out, or create the topic with extend"
        )


# What a DataFrame may have to be written: the columns, and their types. Checked before a task runs.


_IN_TABLES = {"body": BODY, "partition": IntegerType(), "trace_id": LongType(), "defer_ms": LongType()}
"""Types in a table of SQL; the others are strings."""

_KEYS_OF = {"murmur3": (TEXT, BINARY), "hashcode": (TEXT, *WHOLE_NUMBERS)}


def column_names(schema: StructType, *, topic: str | None, key_strategy: str) -> dict[str, str]:
    """Column -> what the DataFrame calls it: names are matched as Spark matches them, whatever their case.

    Args:
        topic: the option, which takes every row; None: the column says it.
    Raises ConfigError for a column that is missing, unknown, there twice, or of another type.
    """
    found: dict[str, str] = {}
    for field in schema.fields:
        name = field.name.lower()
        if name not in SINK_COLUMNS:
            raise ConfigError(f"column {field.name!r}: unknown; the columns are {', '.join(SINK_COLUMNS)}")
        if name in found:
            raise ConfigError(f"column {field.name!r}: there twice, as {found[name]!r} too")
        if (kind := _spelt(field.dataType)) not in SINK_COLUMNS[name]:
            raise ConfigError(f"column {field.name!r}: is {kind}; must be {', '.join(SINK_COLUMNS[name])}")
        if name == "key" and kind not in (allowed := _KEYS_OF[key_strategy]):
            raise ConfigError(f"column 'key': is {kind}; key_strategy {key_strategy!r} takes {', '.join(allowed)}")
        found[name] = field.name
    if "body" not in found:
        raise ConfigError("column 'body' is missing: it holds the messages, as binary or string")
    if topic is None and "topic" not in found:
        raise ConfigError("topic: give the option, or a column 'topic'")
    return found


def table_schema(options: SinkOptions) -> StructType:
    """The columns of a table that is made to be written: those of the option ``columns``, or the body and the topic.

    Raises ConfigError for an unknown column.
    """
    names = options.columns or (("body",) if options.topic is not None else ("body", "topic"))
    unknown = [name for name in names if name not in SINK_COLUMNS]
    if unknown:
        raise ConfigError(f"columns: {unknown[0]!r} is unknown; the columns are {', '.join(SINK_COLUMNS)}")
    if "body" not in names or (options.topic is None and "topic" not in names):
        raise ConfigError("columns: the body is required, and the topic unless there is the option topic")
    return StructType([StructField(name, _IN_TABLES.get(name, StringType())) for name in names])


def _spelt(kind: DataType) -> str:
    """A type as Spark writes it, without what texts are compared by, and the fields of a pair in one order."""
    text = re.sub(r" collate \w+", "", kind.simpleString())
    return text.replace("<value:binary,key:string>", "<key:string,value:binary>")
