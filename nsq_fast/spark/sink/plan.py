"""Where the rows of one topic go, and in which commands: planned for the rows of an Arrow batch before any is sent."""

from __future__ import annotations

from array import array
from itertools import accumulate
from sys import byteorder
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from nsq_fast._codec import Records, group_rows
from nsq_fast.config import ProducerConfig
from nsq_fast.errors import BodyInvalid, ConfigError
from nsq_fast.protocol.partitioner import key_partitioner
from nsq_fast.runtime import ColumnProducer, TopicLayout, new_trace_id

from .row_keys import RowKeys, check_headers
from .rows import Rows, binary_buffers, number_bytes

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
        (_check_partitioned if layout.is_partitioned else _check_plain)(rows, layout)
        records = self._records(topic, rows, layout)
        is_optional = self._traces_all and rows.column("trace_id") is None
        deferred = _deferred(rows)
        targets = self._targets(rows, layout, [row for row, _ in deferred])
        if targets is None:
            return Plan(topic, rows, [Send(rows, records, None, None, is_optional)], deferred)
        groups = group_rows(number_bytes(targets.codes), targets.in_turn + 2)[: targets.in_turn + 1]
        sends = [
            Send(rows, records, numbers, None if code == targets.in_turn else code, is_optional)
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

    def _targets(self, rows: Rows, layout: TopicLayout, deferred: list[int]) -> _Targets | None:
        """Where each row goes; None: all of them in turn."""
        partition, key = rows.column("partition"), rows.column("key")
        if partition is None and key is None and not deferred:
            return None
        codes = pa.nulls(len(rows), pa.int32()) if partition is None else partition.cast(pa.int32())
        if key is not None:
            codes = pc.coalesce(codes, self._partitions_of(rows, key, layout.partition_num))
        highest = pc.max(codes).as_py()
        in_turn = layout.partition_num or (0 if highest is None else highest + 1)
        codes = codes.fill_null(in_turn)
        if deferred:
            late = set(deferred)
            is_late = pa.array([row in late for row in range(len(rows))])
            codes = pc.if_else(is_late, pa.scalar(in_turn + 1, pa.int32()), codes)
        return _Targets(codes, in_turn)

    def _partitions_of(self, rows: Rows, key: pa.Array, partition_num: int) -> pa.Array:
        """The partition of each key. Equal keys are hashed once."""
        coded = key.dictionary_encode()
        try:
            found = [self._partition_of(each, partition_num) for each in coded.dictionary.to_pylist()]
        except ValueError as error:
            rows.refuse_where(pc.is_valid(key), f"key: {error}")
            raise
        return pa.array(found, pa.int32()).take(coded.indices)


class _Targets(NamedTuple):
    """Where rows go.

    Attributes:
        codes: of each row: a partition; ``in_turn`` for any; one more for a row that is deferred.
    """

    codes: pa.Array
    in_turn: int


def _check_plain(rows: Rows, layout: TopicLayout) -> None:
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
        why = f"partition={{}}: the topic has {layout.partition_num} partitions"
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
    """The fields of a header that came as JSON, or as a map."""
    if header is None:
        return {}
    if not isinstance(header, str):
        return dict(header)
    try:
        fields = msgspec.json.decode(header)
    except msgspec.MsgspecError as error:
        raise ValueError(f"headers={header[:60]!r}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"headers={header[:60]!r}: must be a JSON object")
    return fields
