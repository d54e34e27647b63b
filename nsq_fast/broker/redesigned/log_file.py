"""The file of one replica's log: what survives the process.

A head, and behind it the records, one after the other::

    8 bytes "nsqlog1\\n" | uint64 magic code | uint64 number of the first record | its offset | uint32 crc  the head
    uint32 crc | uint32 size | int64 timestamp | uint16 flags | 16 bytes id | ext field, if any | body  a record

``size`` counts what is behind it. As both sums say what is damaged, a file is read up to the first byte that is not as
it was written; from there on it is kept under another name, and the log goes on with what is whole. One with another
magic code is of a topic that was deleted: it is removed (youzan/nsq: nsqd/nsqd.go, CheckMagicCode).
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from nsq_fast.broker.diskqueue.files import replace_file
from nsq_fast.broker.diskqueue.open_files import OPEN_FILES
from nsq_fast.broker.diskqueue.segment import BAD_SUFFIX, write_behind
from nsq_fast.log_events import BROKER_DATA_DAMAGED, BROKER_FILE_IGNORED

from .log import NO_EXT, Loaded, Record

logger = logging.getLogger("nsq_fast.broker.redesigned.log_file")

_HEAD = struct.Struct(">8sQQQI")
_RECORD = struct.Struct(">IIqH16s")
_EXT_HEAD = struct.Struct(">BH")
_MAGIC = b"nsqlog1\n"
_CRC_SIZE = 4
_SIZE_END = 8
_HAS_EXT = 1


class LogFile:
    """One file. It comes into being with the first record; it is opened when it is written to.

    Args:
        magic_code: that of the topic.

    Attributes:
        unsynced: records written since the last ``sync``.

    Every method that writes raises OSError with nothing changed.
    """

    def __init__(self, path: Path, magic_code: int = 0) -> None:
        self.unsynced = 0
        self._path = path
        self._magic_code = magic_code
        self._fd: int | None = None
        self._is_closed = False
        self._first = 0
        self._offset = 0
        self._size = 0

    # --- writing -----------------------------------------------------------------------------------------------------

    def append(self, records: Sequence[Record]) -> None:
        """Write records behind the others; they survive the process when this returns, however it ends."""
        if not self._size:
            self.rewrite(records[0].sequence, records[0].offset, ())
        data = b"".join(_encode(record) for record in records)
        write_behind(self._open(), self._size, data)
        self._size += len(data)
        self.unsynced += len(records)

    def sync(self) -> None:
        """Bring what was written to the disk itself. Blocks."""
        if self._size:
            os.fsync(self._open())
        self.unsynced = 0

    def truncate(self, record: Record) -> None:
        """Drop a record and all behind it."""
        if self._size:
            # What stands before it are as many bytes as its offset says, and a sum for each record.
            before = record.offset - self._offset + (record.sequence - self._first) * _CRC_SIZE
            os.ftruncate(self._open(), _HEAD.size + before)
            self._size = _HEAD.size + before

    def rewrite(self, first: int, offset: int, records: Sequence[Record]) -> None:
        """Have these records and no others."""
        self._check_open()
        data = b"".join(_encode(record) for record in records)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, _head(self._magic_code, first, offset) + data, sync=False)
        self._let_go()
        self._first, self._offset, self._size = first, offset, _HEAD.size + len(data)

    def close(self) -> None:
        """Close the file; nothing is written to it any more."""
        self._is_closed = True
        self._let_go()

    def remove(self) -> None:
        """Remove the file, if there is one."""
        self.close()
        self._path.unlink(missing_ok=True)

    def _open(self) -> int:
        if self._fd is None:
            self._check_open()
            self._fd = os.open(self._path, os.O_RDWR)
            OPEN_FILES.add(self, self._let_go)
        return self._fd

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(self._path))

    def _let_go(self) -> None:
        """Close the file until it is written to again."""
        OPEN_FILES.discard(self)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    # --- reading -----------------------------------------------------------------------------------------------------

    def load(self) -> Loaded:
        """What the file holds, as far as it is whole; nothing where there is none. Raises OSError."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return Loaded(0, 0, [])
        head = _parse_head(data)
        if head is not None and head[0] != self._magic_code:
            logger.warning("%s is of a topic that was deleted: it is removed", self._path, extra=BROKER_FILE_IGNORED)
            self._path.unlink()
            return Loaded(0, 0, [])
        loaded = Loaded(0, 0, []) if head is None else Loaded(*head[1:], [])
        end = 0 if head is None else _parse_records(data, loaded)
        if end < len(data):
            self._set_aside(data, end, len(loaded.records))
        if head is None:
            self._path.unlink()
        else:
            self._first, self._offset, self._size = loaded.first, loaded.offset, end
        return loaded

    def _set_aside(self, data: bytes, end: int, count: int) -> None:
        aside = self._path.with_name(self._path.name + BAD_SUFFIX)
        aside.write_bytes(data)
        if end:
            os.truncate(self._path, end)
        logger.error(
            "%s is damaged at byte %d of %d: its first %d records are whole, what is behind them is lost here;"
            " the file is kept as %s",
            self._path,
            end,
            len(data),
            count,
            aside,
            extra=BROKER_DATA_DAMAGED,
        )


def _head(magic_code: int, first: int, offset: int) -> bytes:
    packed = _HEAD.pack(_MAGIC, magic_code, first, offset, 0)[:-_CRC_SIZE]
    return packed + zlib.crc32(packed).to_bytes(_CRC_SIZE, "big")


def _parse_head(data: bytes) -> tuple[int, int, int] | None:
    """The magic code, the number of the first record and its offset; None if the head is damaged."""
    if len(data) < _HEAD.size:
        return None
    _, *head, _ = _HEAD.unpack_from(data)
    code, first, offset = head
    return (code, first, offset) if data[: _HEAD.size] == _head(code, first, offset) else None


def _encode(record: Record) -> bytes:
    tail = (record.ext if record.has_ext else b"") + record.body
    size = _RECORD.size - _SIZE_END + len(tail)
    packed = _RECORD.pack(0, size, record.timestamp, _HAS_EXT * record.has_ext, record.id)[_CRC_SIZE:] + tail
    return zlib.crc32(packed).to_bytes(_CRC_SIZE, "big") + packed


def _parse_records(data: bytes, loaded: Loaded) -> int:
    """Add the whole records to ``loaded``; where they end."""
    at, sequence, offset = _HEAD.size, loaded.first, loaded.offset
    while at + _RECORD.size <= len(data):
        crc, size, timestamp, flags, id = _RECORD.unpack_from(data, at)
        end = at + _SIZE_END + size
        if size < _RECORD.size - _SIZE_END or end > len(data) or zlib.crc32(data[at + _CRC_SIZE : end]) != crc:
            break
        tail = data[at + _RECORD.size : end]
        ext, body = _split(tail) if flags & _HAS_EXT else (NO_EXT, tail)
        stored = end - at - _CRC_SIZE
        loaded.records.append(Record(sequence, id, timestamp, offset, stored, ext, body))
        at, sequence, offset = end, sequence + 1, offset + stored
    return at


def _split(tail: bytes) -> tuple[bytes, bytes]:
    """The ext field, and the body behind it."""
    if tail[:1] == NO_EXT:
        return NO_EXT, tail[1:]
    end = _EXT_HEAD.size + _EXT_HEAD.unpack_from(tail)[1]
    return tail[:end], tail[end:]
