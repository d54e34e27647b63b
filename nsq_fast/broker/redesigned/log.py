"""The log of one replica of a partition: in memory, and in a file of batches (journal.py) where there is a data path.

Records have an id, an offset and a size as in the redesigned server's disk queue, and are numbered from 0
(``sequence``). Replicas share the records themselves, which do not change. What every channel is done with is dropped
from the front when it is more than a limit.

A file with another code than the topic's is of a topic that was deleted: it is removed (youzan/nsq: nsqd/nsqd.go,
CheckMagicCode). What is behind damage comes from another replica.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from nsq_fast._lazy import get_logger
from nsq_fast.broker.journal import Head, JournalFile, encode, open_file, read_patiently, replace_file
from nsq_fast.log_events import BROKER_FILE_IGNORED

logger: logging.Logger = get_logger("nsq_fast.broker.redesigned.log")

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

_STORED = struct.Struct(">qH16s")
"""A record in a file: timestamp, whether an ext field follows, id; then that field, if any, and the body."""


class Draft(NamedTuple):
    """A message to be published. ``header`` is the JSON of its ext header, or empty."""

    body: bytes
    trace_id: int = 0
    header: bytes = b""


class Record(msgspec.Struct, eq=False, gc=False):
    """One stored message. ``ext`` is its ext field as it stands in frames of an ext topic."""

    sequence: int
    id: bytes
    timestamp: int
    offset: int
    size: int
    ext: bytes
    body: bytes

    @property
    def internal_id(self) -> int:
        return int.from_bytes(self.id[:8], "big")

    @property
    def trace_id(self) -> int:
        return int.from_bytes(self.id[8:], "big")

    @property
    def header(self) -> bytes:
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


class PartitionLog:
    """The records of one partition, on one node.

    Args:
        path: the file that holds them too; the log begins with what it has. None: nothing survives.
        code: tells the topic from another that had its name.

    What changes the log raises OSError when the file cannot be written; then nothing has changed.

    Attributes:
        partition: its number, which stands in the ids.
        is_ext: whether records have an ext field.
        first: sequence of the first record that is still there; ``end``: of the next one.
        end_offset: offset of the next record.
        has_traced: whether a message with a trace id has been stored.
    """

    def __init__(self, partition: int, is_ext: bool, path: Path | None = None, code: int = 0) -> None:
        self.partition = partition
        self.is_ext: bool = is_ext
        self.first: int = 0
        self.end_offset: int = 0
        self._first_id = (partition << PARTITION_SHIFT) + FIRST_ID
        self._records: list[Record] = []
        self._code = code
        self._unsynced = 0
        self._file: JournalFile | None = None
        self._size_before = (0, 0)  # the number of the first record that was written last, and what the file was before
        if path is not None:
            read_patiently(path, lambda: self._load(path))
        self.has_traced: bool = any(record.trace_id for record in self._records)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def end(self) -> int:
        return self.first + len(self._records)

    @property
    def start_offset(self) -> int:
        """Offset of the first record that is still there."""
        return self._records[0].offset if self._records else self.end_offset

    def append(self, drafts: Sequence[Draft]) -> list[Record]:
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
            self._write(self._file, records)
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
            self._write(self._file, missing)
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
            end_offset, (number, size) = self._records[at].offset, self._size_before
            if self._file is None or (number == sequence and size):
                if self._file is not None:
                    self._file.truncate(size)
                del self._records[at:]
            else:
                self._reset(self.first, self.start_offset, self._records[:at])
            self.end_offset = end_offset

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
        sequence = min(sequence, self.end)
        if sequence > self.first:
            self._reset(sequence, self.offset_of(sequence), self._records[sequence - self.first :])

    def rewrite(self) -> None:
        """Write all of its file anew."""
        self._reset(self.first, self.start_offset, self._records)

    # --- the file ----------------------------------------------------------------------------------------------------

    def _reset(self, first: int, offset: int, records: list[Record]) -> None:
        """Have these records and no others; ``offset`` is that of the first, or of the next."""
        file = self._file
        if file is not None:
            assert file.path is not None
            head = Head(self._code, first, offset)
            data = head.encode() + encode(0, list(map(_encode, records)))
            replace_file(file.path, data, sync=False)
            file.close()
            file.head, file.size = head, len(data)
            self._size_before = (0, 0)
        self.first, self._records = first, records
        if not records:
            self.end_offset = offset

    def sync(self, every: int) -> None:
        """Bring what was written to the disk itself, when that are so many records. Blocks."""
        if self._file is not None and self._unsynced >= every:
            self._file.sync()
            self._unsynced = 0

    def close(self) -> None:
        """Write no more to its file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def delete(self) -> None:
        """Remove its file: the replica is not needed any more."""
        file, self._file = self._file, None
        if file is not None:
            file.remove()

    def _write(self, file: JournalFile, records: Sequence[Record]) -> None:
        first, size = records[0], file.size
        if not size:
            file.head = Head(self._code, first.sequence, first.offset)
        file.append(first.sequence - file.head.first, list(map(_encode, records)))
        self._size_before = (first.sequence, size)
        self._unsynced += len(records)

    def _load(self, path: Path) -> None:
        self.close()
        self._file = file = open_file(path, Head(self._code, 0, 0))
        if file.head.code != self._code:
            logger.warning("%s is of a topic that was deleted: it is removed", path, extra=BROKER_FILE_IGNORED)
            file.remove()
            self._file = file = JournalFile(path, Head(self._code, 0, 0))
        _, self.first, self.end_offset = file.head
        self._records = []
        for batch in itertools.chain.from_iterable(file.batches(0, self.first)):
            for stored in batch.records(0, batch.length):
                record = _decode(stored, self.end, self.end_offset)
                self._records.append(record)
                self.end_offset += record.size


def _encode(record: Record) -> bytes:
    has_ext = record.has_ext
    head = _STORED.pack(record.timestamp, has_ext, record.id)
    return head + record.ext + record.body if has_ext else head + record.body


def _decode(stored: bytes, sequence: int, offset: int) -> Record:
    timestamp, has_ext, id = _STORED.unpack_from(stored)
    ext, begin = NO_EXT, _STORED.size
    if has_ext:
        end = begin + 1
        if stored[begin:end] != NO_EXT:
            end = begin + _EXT.size + _EXT.unpack_from(stored, begin)[1]
        ext, begin = stored[begin:end], end
    size = _RECORD_FIXED + len(stored) - _STORED.size
    return Record(sequence, id, timestamp, offset, size, ext, stored[begin:])
