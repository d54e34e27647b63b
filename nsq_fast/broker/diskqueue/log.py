"""The append-only log of a topic on disk: segments of records, each with a number.

A record is a message frame as it goes out, or one with the time it becomes
ready before it (deferred)::

    int32 size | int32 2 | timestamp ... body                       plain
    int32 size | int32 3 | int64 due ns | a plain record            deferred

``append`` is one pwrite(2), so what it has written survives the end of the
process however it ends. It survives a power loss once ``sync`` has returned.
A segment is named after its first record and is removed as a whole. The
folder comes into being with the first record.
"""

from __future__ import annotations

import bisect
import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nsq_fast.broker.message import BODY_AT, Message

_HEAD = struct.Struct(">ii")
_DUE = struct.Struct(">iiq")
_PLAIN = 2
_DEFERRED = 3
_READ_SIZE = 256 * 1024
_LARGEST = 2**31 - 1
_SUFFIX = ".log"


class Position(NamedTuple):
    """Where a record begins: its number, and its offset in the segment that holds it."""

    sequence: int
    offset: int


class _Segment:
    """One file of the log; without a path a file that has no name and goes with the process."""

    __slots__ = ("fd", "first", "path", "size")

    def __init__(self, path: Path | None, first: int, size: int = 0) -> None:
        self.path = path
        self.first = first
        self.size = size
        self.fd = _nameless_file() if path is None else os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self.fd, min(size, self.size - offset), offset)

    def write(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self.fd, data[written:] if written else data, self.size + written)
        except OSError:
            os.ftruncate(self.fd, self.size)
            raise
        self.size += len(data)

    def remove(self) -> None:
        os.close(self.fd)
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _nameless_file() -> int:
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


def deferred_record(frame: bytes, due: float) -> bytes:
    """The record of a message that becomes ready at ``due``, in seconds since the epoch."""
    return _DUE.pack(12 + len(frame), _DEFERRED, int(due * 1e9)) + frame


class SegmentLog:
    """The log of one topic.

    Args:
        folder: where its segments are; None: in files without a name, which nobody finds again.
        segment_size: bytes after which a new segment begins.

    Attributes:
        end: the position of the next record.
        unsynced: records written since the last ``sync``.
        last_id: the id of the last message that was there when the log was opened; empty if there was none.
        held_at: readers may not pass this position; None: they may read to the end.
    """

    def __init__(self, folder: Path | None, segment_size: int) -> None:
        self.folder = folder
        self.end = Position(0, 0)
        self.unsynced = 0
        self.last_id = b""
        self.held_at: Position | None = None
        self._segment_size = segment_size
        self._segments: list[_Segment] = []
        if folder is not None and folder.is_dir():
            self._open(folder)

    @property
    def readable_end(self) -> int:
        """The number of the first record that readers may not see."""
        return self.end.sequence if self.held_at is None else self.held_at.sequence

    @property
    def first(self) -> int:
        """The number of the first record that is still there, or would be."""
        return self._segments[0].first if self._segments else self.end.sequence

    def append(self, records: Sequence[bytes]) -> Position:
        """Write records with one write; the position of the first. Raises OSError with nothing of them kept."""
        segment = self._segments[-1] if self._segments else None
        if segment is None or segment.size >= self._segment_size:
            segment = self._roll()
        start = Position(self.end.sequence, segment.size)
        segment.write(b"".join(records))
        self.end = Position(start.sequence + len(records), segment.size)
        self.unsynced += len(records)
        return start

    def read(self, position: Position, count: int) -> tuple[list[Message], Position]:
        """Up to ``count`` messages from ``position`` on, in as few as come with one read; and where to go on.

        None at all only when ``position`` is at the readable end.
        """
        count = min(count, self.readable_end - position.sequence)
        if count <= 0:
            return [], position
        segment, offset = self._locate(position)
        data = segment.read(offset, _READ_SIZE)
        size = 4 + _HEAD.unpack_from(data)[0]
        if size > len(data):
            data = segment.read(offset, size)
        messages, used = _parse(data, position.sequence, count)
        return messages, Position(position.sequence + len(messages), offset + used)

    def seek(self, sequence: int) -> Position:
        """The position of a record by its number, the nearest one that is still there."""
        if sequence >= self.end.sequence:
            return self.end
        position = Position(max(sequence, self.first), 0)
        segment, _ = self._locate(position)
        at = Position(segment.first, 0)
        while at.sequence < position.sequence:
            _, at = self.read(at, position.sequence - at.sequence)
        return at

    def remove_before(self, sequence: int) -> None:
        """Remove the segments that hold only records before ``sequence``."""
        while self._segments and self._end_of(0) <= sequence and (len(self._segments) > 1 or self._is_used_up()):
            self._segments.pop(0).remove()
            if not self._segments:
                self.end = Position(self.end.sequence, 0)

    def sync(self) -> None:
        """Bring what was written to the disk itself. Blocks."""
        self.unsynced = 0
        if self._segments:
            os.fsync(self._segments[-1].fd)

    def take_unsynced(self) -> int | None:
        """A descriptor for another thread to sync and close, of the segment that is written to; None: nothing to do."""
        if not self.unsynced or not self._segments:
            return None
        self.unsynced = 0
        return os.dup(self._segments[-1].fd)

    def close(self) -> None:
        """Close the files."""
        for segment in self._segments:
            os.close(segment.fd)
        self._segments.clear()

    def delete(self) -> None:
        """Close and remove everything."""
        self.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def start_at(self, sequence: int) -> None:
        """Number the next record ``sequence``, in a log without records."""
        if not self._segments:
            self.end = Position(max(sequence, self.end.sequence), 0)

    def _open(self, folder: Path) -> None:
        for path in sorted(folder.glob(f"*{_SUFFIX}")):
            self._segments.append(_Segment(path, int(path.stem), path.stat().st_size))
        if self._segments:
            last = self._segments[-1]
            count, self.last_id = _recover(last)
            self.end = Position(last.first + count, last.size)

    def _roll(self) -> _Segment:
        first, path = self.end.sequence, None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{first:020d}{_SUFFIX}"
            if self._segments:
                os.fsync(self._segments[-1].fd)
        segment = _Segment(path, first)
        self._segments.append(segment)
        return segment

    def _locate(self, position: Position) -> tuple[_Segment, int]:
        index = bisect.bisect_right(self._segments, position.sequence, key=lambda segment: segment.first) - 1
        segment = self._segments[index]
        # A position at the end of one segment is the beginning of the next.
        return segment, 0 if segment.first == position.sequence else position.offset

    def _end_of(self, index: int) -> int:
        return self._segments[index + 1].first if index + 1 < len(self._segments) else self.end.sequence

    def _is_used_up(self) -> bool:
        # The segment that is written to goes only when it has grown to some size: a file a message costs more.
        return self._segments[-1].size >= min(self._segment_size, _READ_SIZE)


def _parse(data: bytes, sequence: int, count: int) -> tuple[list[Message], int]:
    """The whole records at the beginning of ``data``, at most ``count``, and the bytes they take."""
    messages: list[Message] = []
    at, end = 0, len(data)
    while at + _HEAD.size <= end and count > 0:
        size, kind = _HEAD.unpack_from(data, at)
        if at + 4 + size > end:
            break
        due, start = 0.0, at
        at += 4 + size
        if kind == _DEFERRED:
            due = _DUE.unpack_from(data, start)[2] / 1e9
            start += _DUE.size
        frame = data[start:at]
        messages.append(Message(frame[BODY_AT - 16 : BODY_AT], frame, sequence, due))
        sequence += 1
        count -= 1
    return messages, at


def _recover(segment: _Segment) -> tuple[int, bytes]:
    """Count the records of a segment, and cut off what is not a whole record at its end. Also the last one's id."""
    count = offset = 0
    last_id = b""
    while offset < segment.size:
        data = segment.read(offset, _READ_SIZE)
        records, used, last = _skip(data)
        if not records:
            data = segment.read(offset, _first_size(data))
            records, used, last = _skip(data)
        if not records:
            os.ftruncate(segment.fd, offset)
            segment.size = offset
            break
        last_id = _parse(data[last:used], 0, 1)[0][0].id
        count += records
        offset += used
    return count, last_id


def _first_size(data: bytes) -> int:
    return min(4 + _HEAD.unpack_from(data)[0], _LARGEST) if len(data) >= _HEAD.size else 0


def _skip(data: bytes) -> tuple[int, int, int]:
    """The number of whole records ``data`` begins with, where they end, and where the last one begins."""
    count = at = last = 0
    while at + _HEAD.size <= len(data):
        size, kind = _HEAD.unpack_from(data, at)
        if kind not in (_PLAIN, _DEFERRED) or size < BODY_AT - 4 or at + 4 + size > len(data):
            break
        last = at
        at += 4 + size
        count += 1
    return count, at, last
