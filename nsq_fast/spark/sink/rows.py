"""One Arrow batch as the sink sees it: its columns under our names, and the rows that cannot be published.

Those rows are found before anything of the batch is sent. Checks are made on
whole columns; a Python object is made only of the row that is at fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from nsq_fast._codec import Records, group_rows
from nsq_fast.config import MAX_PARTITION, MAX_TAG_SIZE
from nsq_fast.errors import NameInvalid, RowInvalid
from nsq_fast.names import check_topic, is_valid_name

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
        self.body = columns["body"]
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
        key = self._columns["key"][row].as_py() if "key" in self._columns else None
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
        self._check_ranges()
        self._check_pairs()

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
