"""The log of one partition: records with an id, an offset and a size, as the redesigned server's disk queue has them.

It is kept in memory, and in a file too where there is one (``log_file``). Each replica has one; they share the records
themselves, which do not change. Records are numbered from 0 (``sequence``); what every channel is done
with is dropped from the front when it is more than a limit.
"""

from __future__ import annotations

import bisect
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

PARTITION_SHIFT = 50
NO_EXT = b"\x00"
FIRST_ID = 2
"""The id of the first record of partition 0, as on the real server."""

_MESSAGE = struct.Struct(">iiqH16s")
_DETAIL = struct.Struct(">QI")
_ID = struct.Struct(">QQ")
_EXT = struct.Struct(">BH")
_JSON_HEADER = 4
_FIXED = 30  # type, timestamp, attempts, id
_RECORD_FIXED = 30  # length, timestamp, attempts, id
_MESSAGE_TYPE = 2
_TRIM = 10_000


class Draft(NamedTuple):
    """A message to be published. ``header`` is the JSON of its ext header, or empty."""

    body: bytes
    trace_id: int = 0
    header: bytes = b""


class Record:
    """One stored message. ``ext`` is its ext field as it stands in frames of an ext topic."""

    __slots__ = ("body", "ext", "id", "offset", "sequence", "size", "timestamp")

    def __init__(self, sequence: int, id: bytes, timestamp: int, offset: int, size: int, ext: bytes, body: bytes):
        self.sequence = sequence
        self.id = id
        self.timestamp = timestamp
        self.offset = offset
        self.size = size
        self.ext = ext
        self.body = body

    @property
    def internal_id(self) -> int:
        """The first half of the id."""
        return int.from_bytes(self.id[:8], "big")

    @property
    def trace_id(self) -> int:
        """The second half of the id."""
        return int.from_bytes(self.id[8:], "big")

    @property
    def header(self) -> bytes:
        """The JSON of the ext header, or empty."""
        return self.ext[_EXT.size :]

    @property
    def has_ext(self) -> bool:
        """Whether it was stored with its ext field: topics may have got ext headers later."""
        return self.size > _RECORD_FIXED + len(self.body)

    def is_same(self, other: Record) -> bool:
        """Whether it is the same message, stored by the same leader."""
        return self is other or (self.timestamp == other.timestamp and self.id == other.id and self.body == other.body)

    def frame(self, attempts: int, ext: bool, detail: bool) -> bytes:
        """The MESSAGE frame, with the ext field and the detail header where the client gets them."""
        tail = self.body
        if detail:
            tail = _DETAIL.pack(self.offset, self.size) + tail
        if ext:
            tail = self.ext + tail
        return _MESSAGE.pack(_FIXED + len(tail), _MESSAGE_TYPE, self.timestamp, attempts, self.id) + tail


class Loaded(NamedTuple):
    """What a file holds: the number of the first record, its offset, and the records."""

    first: int
    offset: int
    records: list[Record]


class File(Protocol):
    """Where records survive the process. What writes raises OSError with nothing changed.

    Attributes:
        unsynced: records written since the last ``sync``.
    """

    unsynced: int

    def load(self) -> Loaded:
        """What it holds, as far as it is whole."""

    def append(self, records: Sequence[Record]) -> None:
        """Write records behind the others."""

    def truncate(self, record: Record) -> None:
        """Drop a record and all behind it."""

    def rewrite(self, first: int, offset: int, records: Sequence[Record]) -> None:
        """Hold these records and no others."""

    def sync(self) -> None:
        """Bring what was written to the disk itself. Blocks."""

    def close(self) -> None:
        """Write no more."""

    def remove(self) -> None:
        """Hold nothing, and write no more."""


class PartitionLog:
    """The records of one partition.

    Args:
        file: holds them too; the log begins with what it has. None: nothing survives.

    What changes the log raises OSError when the file cannot be written; then nothing has changed.

    Attributes:
        partition: its number, which stands in the ids.
        is_ext: whether records have an ext field.
        first: sequence of the first record that is still there; ``end``: of the next one.
        end_offset: offset of the next record.
        has_traced: whether a message with a trace id has been stored.
    """

    def __init__(self, partition: int, is_ext: bool, file: File | None = None) -> None:
        self.partition = partition
        self.is_ext = is_ext
        self._first_id = (partition << PARTITION_SHIFT) + FIRST_ID
        self._file = file
        loaded = Loaded(0, 0, []) if file is None else file.load()
        self.first = loaded.first
        self._records = loaded.records
        last = self._records[-1] if self._records else None
        self.end_offset = loaded.offset if last is None else last.offset + last.size
        self.has_traced = any(record.trace_id for record in self._records)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def end(self) -> int:
        """Sequence of the next record."""
        return self.first + len(self._records)

    @property
    def start_offset(self) -> int:
        """Offset of the first record that is still there."""
        return self._records[0].offset if self._records else self.end_offset

    def append(self, drafts: Sequence[Draft]) -> list[Record]:
        """Store messages; the records they have become."""
        timestamp = time.time_ns()
        sequence, offset = self.first + len(self._records), self.end_offset
        high, pack, is_ext = self._first_id, _ID.pack, self.is_ext
        records: list[Record] = []
        for body, trace_id, header in drafts:
            ext = _EXT.pack(_JSON_HEADER, len(header)) + header if header else NO_EXT
            size = _RECORD_FIXED + len(body)
            if is_ext:
                size += len(ext)
            if trace_id:
                self.has_traced = True
            records.append(Record(sequence, pack(high + sequence, trace_id), timestamp, offset, size, ext, body))
            sequence += 1
            offset += size
        if self._file is not None:
            self._file.append(records)
        self._records += records
        self.end_offset = offset
        return records

    def copy(self, other: PartitionLog) -> None:
        """Have the records that another log has, and no others."""
        mine, theirs = self._records, other._records
        begin = self.first + len(mine) - other.first
        if mine and 0 < begin <= len(theirs) and mine[-1] is theirs[begin - 1]:
            missing = theirs[begin:]  # as nearly always
        else:
            missing = self._join(other)
        if self._file is not None and missing:
            self._file.append(missing)
        self._records += missing
        self.end_offset = other.end_offset
        self.is_ext = other.is_ext
        if other.has_traced:
            self.has_traced = True

    def _join(self, other: PartitionLog) -> list[Record]:
        """Drop what another log does not have; what it has behind that."""
        begin, common = max(self.first, other.first), min(self.end, other.end)
        while common > begin and not self._records[common - 1 - self.first].is_same(
            other._records[common - 1 - other.first]
        ):
            common -= 1
        self.truncate(common)
        if common < other.first:
            self._reset(other.first, other.start_offset, [])
            common = other.first
        return other.read(common, other.end - common)

    def truncate(self, sequence: int) -> None:
        """Drop the records from ``sequence`` on."""
        if sequence < self.end:
            at = max(0, sequence - self.first)
            if self._file is not None:
                self._file.truncate(self._records[at])
            self.end_offset = self._records[at].offset
            del self._records[at:]

    def read(self, sequence: int, count: int) -> list[Record]:
        """Up to ``count`` records from ``sequence`` on, or from the first that is still there."""
        at = max(0, sequence - self.first)
        return self._records[at : at + count]

    def offset_of(self, sequence: int) -> int:
        """The offset of a record, or of the one that comes next."""
        records = self.read(sequence, 1)
        return records[0].offset if records else self.end_offset

    def at_offset(self, offset: int) -> int:
        """The sequence of the record at or after an offset."""
        return self.first + bisect.bisect_left(self._records, offset, key=lambda record: record.offset)

    def at_time(self, timestamp: int) -> int:
        """The sequence of the first record published at or after a time, in nanoseconds."""
        return self.first + bisect.bisect_left(self._records, timestamp, key=lambda record: record.timestamp)

    def at_id(self, internal_id: int) -> int:
        """The sequence of the record of an id, or of the one nearest to it."""
        sequence = internal_id - self._first_id
        return max(self.first, min(sequence, self.end - 1))

    def trim(self, sequence: int, keep: int) -> None:
        """Drop records before ``sequence``, but for the last ``keep`` of them."""
        surplus = sequence - keep - self.first
        # In large steps: each moves all that stays.
        if surplus >= max(_TRIM, len(self._records) // 2):
            self.drop_before(self.first + surplus)

    def drop_before(self, sequence: int) -> None:
        """Drop the records before ``sequence``."""
        sequence = min(sequence, self.end)
        if sequence > self.first:
            self._reset(sequence, self.offset_of(sequence), self._records[sequence - self.first :])

    def rewrite(self) -> None:
        """Write all that there is to its file anew."""
        if self._file is not None:
            self._file.rewrite(self.first, self.start_offset, self._records)

    def _reset(self, first: int, offset: int, records: list[Record]) -> None:
        if self._file is not None:
            self._file.rewrite(first, offset, records)
        self.first, self._records = first, records
        if not records:
            self.end_offset = offset

    def sync(self, every: int) -> None:
        """Bring what was written to the disk itself, when that are so many records."""
        if self._file is not None and self._file.unsynced >= every:
            self._file.sync()

    def close(self) -> None:
        """Write no more to its file."""
        if self._file is not None:
            self._file.close()

    def delete(self) -> None:
        """Remove its file: the replica is not needed any more."""
        if self._file is not None:
            self._file.remove()
