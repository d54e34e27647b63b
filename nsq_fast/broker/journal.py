"""The journal of a topic, and of a replica: batches of records in files, each with a CRC; and small files beside them.

A file is a head, and batches, one behind the other::

    8 bytes "nsqlog2\\n" | uint64 code | uint64 number of the first record | uint64 its offset | uint32 crc     head
    uint32 crc | uint32 size | uint32 index | uint32 count | int64 due ns | count * uint32 sizes | records   a batch

``size`` counts what is behind ``due``, and ``index`` the records from the first of the file to that of the batch: so
the number of a record is known without those before it. What was published together is a batch, because a CRC for each
message cost a sixth of an MPUB; a message that is deferred is one of its own.

``append`` is one pwrite(2), so what it has written survives the end of the process however it ends. It survives a
power loss once it is synced. A batch that is not as it was written ends what can be read of its file: that is cut off
there, and the rest is kept as ``*.bad``. Files of version 0.2 are written anew when they are found.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import logging
import operator
import os
import resource
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from gevent import sleep

from nsq_fast._lazy import get_logger
from nsq_fast.broker.message import BODY_AT, FRAME_TYPE, ID_SIZE, Message
from nsq_fast.log_events import (
    BROKER_DATA_DAMAGED,
    BROKER_FILE_IGNORED,
    BROKER_WRITE_FAILED,
    BROKER_WRITE_RECOVERED,
)

logger: logging.Logger = get_logger("nsq_fast.broker.journal")

BAD_SUFFIX = ".bad"
"""Added to the name of what is kept of a damaged file, as the original does (nsqio/go-diskqueue: handleReadError)."""

T = TypeVar("T")

# --- files -----------------------------------------------------------------------------------------------------------

_PATIENCE = 2.0
_PAUSE = 0.05
_NO_MOMENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class OpenFiles(threading.local):
    """The files that a thread has open: half of what the process may have; then the one opened first is closed."""

    def __init__(self) -> None:
        self.most: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._close: dict[object, Callable[[], None]] = {}

    def add(self, owner: object, close: Callable[[], None]) -> None:
        """A file is open; ``close`` closes it and calls ``discard``, and its owner opens it when it is used again."""
        self._close[owner] = close
        while len(self._close) > self.most:
            next(iter(self._close.values()))()

    def discard(self, owner: object) -> None:
        self._close.pop(owner, None)


OPEN_FILES = OpenFiles()


def read_patiently(path: object, read: Callable[[], T]) -> T:
    """What ``read`` gives, tried again for two seconds while it raises OSError. Lets other greenlets run.

    A process that is short of descriptors, or a disk that fails for a moment, says nothing about what is in a file:
    taken for damage, it cost messages that were confirmed.
    """
    give_up_at = time.monotonic() + _PATIENCE
    while True:
        try:
            return read()
        except OSError as error:
            if isinstance(error, _NO_MOMENT):
                raise
            if time.monotonic() >= give_up_at:
                text = f"{error.strerror}: {path} cannot be read, and is left as it is"
                raise OSError(error.errno, text) from error
        sleep(_PAUSE)


def replace_file(path: Path, data: bytes | bytearray, *, sync: bool) -> None:
    """Write a file so that it is the old one or the new one, whatever happens. After an OSError it is the old one.

    Its folder comes into being with it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # On a disk that is nearly full a write takes a part of the data, and only the next one fails.
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        if sync:
            os.fsync(fd)
    except OSError:
        temporary.unlink(missing_ok=True)  # the part of it takes room that others need
        raise
    finally:
        os.close(fd)
    temporary.replace(path)


def read_file(path: Path, decode: Callable[[bytes], T], loss: str) -> T | None:
    """What a small file says; None where there is none. One that is damaged is kept under another name.

    Args:
        decode: raises ValueError for damage; ``loss``: what that means, for the log.

    Raises OSError when the disk does not give it.
    """
    try:
        return decode(read_patiently(path, path.read_bytes))
    except FileNotFoundError:
        return None
    except ValueError as error:
        aside = path.with_name(path.name + BAD_SUFFIX)
        try:
            path.replace(aside)
            kept = f"the file is kept as {aside}"
        except OSError as failure:
            kept = f"the file could not be renamed: {failure}"
        logger.error("%s cannot be read: %s; %s; %s", path, error, loss, kept, extra=BROKER_DATA_DAMAGED)
        return None


def write_json(path: Path, value: object, *, sync: bool) -> None:
    """Write a line of JSON, and its CRC in a line: a number that has changed would make messages count as done."""
    content = msgspec.json.encode(value)
    replace_file(path, b"%b\n%08x\n" % (content, zlib.crc32(content)), sync=sync)


def read_json(path: Path, kind: type[T], loss: str) -> T | None:
    """What such a file says; see ``read_file``."""

    def decode(data: bytes) -> T:
        content, _, rest = data.partition(b"\n")
        if rest != b"%08x\n" % zlib.crc32(content):
            raise ValueError("its checksum is wrong")
        return msgspec.json.decode(content, type=kind)

    return read_file(path, decode, loss)


class Trouble:
    """Writing something that fails, and is tried again: that is logged once, and so is that it succeeds again.

    Args:
        failed: what is logged with the error; ``recovered``: what is logged later.
    """

    def __init__(self, logger: logging.Logger, failed: str, recovered: str) -> None:
        self._is_on = False
        self._logger = logger
        self._failed, self._recovered = failed, recovered

    def failed(self, error: OSError) -> None:
        if not self._is_on:
            self._logger.error(self._failed, error, extra=BROKER_WRITE_FAILED)
        self._is_on = True

    def succeeded(self) -> None:
        if self._is_on:
            self._logger.warning("%s", self._recovered, extra=BROKER_WRITE_RECOVERED)
        self._is_on = False

    @contextlib.contextmanager
    def said(self) -> Iterator[None]:
        """An OSError within is logged, and goes no further."""
        try:
            yield
        except OSError as error:
            self.failed(error)
        else:
            self.succeeded()


def for_each(items: Iterable[T], write: Callable[[T], None]) -> None:
    """Write something for each item; raises the OSError of one that failed when all have had their turn."""
    failures: list[OSError] = []
    for item in items:
        try:
            write(item)
        except OSError as error:  # noqa: PERF203
            failures.append(error)
    if failures:
        raise failures[0]


# --- batches ---------------------------------------------------------------------------------------------------------

_MAGIC = b"nsqlog2\n"
_HEAD = struct.Struct(">8sQQQI")
_BATCH = struct.Struct(">IIIIq")
_REST = struct.Struct(">IIIq")
_ONE = struct.Struct(">IIIqI")
_CRC_SIZE = 4
_MOST_RECORDS = 500
_READ_SIZE = 256 * 1024
_ID_OF = operator.itemgetter(slice(BODY_AT - ID_SIZE, BODY_AT))


class Head(NamedTuple):
    """What a file begins with: its code, the number of its first record, and the offset of that in its log."""

    code: int
    first: int
    offset: int

    def encode(self) -> bytes:
        packed = _HEAD.pack(_MAGIC, *self, 0)[:-_CRC_SIZE]
        return packed + zlib.crc32(packed).to_bytes(_CRC_SIZE, "big")

    @classmethod
    def decode(cls, data: bytes, magic: bytes = _MAGIC) -> Head | None:
        """The head of a file; None if it is damaged, or of another kind."""
        if len(data) < _HEAD.size:
            return None
        found, code, first, offset, crc = _HEAD.unpack_from(data)
        is_whole = found == magic and crc == zlib.crc32(data[: _HEAD.size - _CRC_SIZE])
        return cls(code, first, offset) if is_whole else None


class Batch(NamedTuple):
    """A batch that is whole: where it ends in its file, the index of its first record, and how many it has."""

    end: int
    begin: int
    length: int
    due: int
    data: bytes
    sizes_at: int

    def records(self, start: int, stop: int) -> Sequence[bytes]:
        records_at = self.sizes_at + 4 * self.length
        return _layout(self.data[self.sizes_at : records_at]).unpack_from(self.data, records_at)[start:stop]


@functools.lru_cache(maxsize=32)
def _layout(sizes: bytes) -> struct.Struct:
    """What takes records apart that have these sizes: it takes a tenth of the time that slices take."""
    return struct.Struct("".join(f"{size}s" for size in struct.unpack(f">{len(sizes) // 4}I", sizes)))


def encode(index: int, records: Sequence[bytes], due: int = 0) -> bytes:
    """The batches of some records; ``index`` is that of the first."""
    count = len(records)
    if count == 1:
        size = len(records[0])
        body = _ONE.pack(4 + size, index, 1, due, size) + records[0]
    elif count <= _MOST_RECORDS:
        if not count:
            return b""
        sizes = list(map(len, records))
        head = _REST.pack(4 * count + sum(sizes), index, count, due)
        body = b"".join((head, struct.pack(f">{count}I", *sizes), *records))
    else:  # a reader that takes a few at a time reads a batch again each time
        starts = range(0, count, _MOST_RECORDS)
        return b"".join(encode(index + start, records[start : start + _MOST_RECORDS], due) for start in starts)
    return zlib.crc32(body).to_bytes(_CRC_SIZE, "big") + body


class JournalFile:
    """One file of batches; without a path a file that has no name and goes with the process.

    Attributes:
        head: what it begins with, once there is anything in it.
        size: its bytes.
    """

    __slots__ = ("_fd", "_memory", "head", "path", "size")

    _IN_MEMORY = 16 * 1024  # a file without a name, which takes a descriptor, comes into being when there is more

    def __init__(self, path: Path | None, head: Head, size: int = 0) -> None:
        self.path: Path | None = path
        self.head: Head = head
        self.size: int = size
        self._fd = -1
        self._memory = bytearray()

    def __str__(self) -> str:
        return "a file of the journal in memory" if self.path is None else str(self.path)

    def append(self, index: int, records: Sequence[bytes], due: int = 0) -> None:
        """Write records behind the others: all, or none when it raises OSError."""
        data = encode(index, records, due)
        if not self.size:
            data = self.head.encode() + data
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path is None and self._fd < 0:
            if self.size + len(data) <= self._IN_MEMORY:
                self._memory += data
                self.size += len(data)
                return
            with tempfile.TemporaryFile(buffering=0) as file:
                fd = os.dup(file.fileno())
            try:
                _write_behind(fd, 0, self._memory)
            except OSError:
                os.close(fd)
                raise
            self._fd, self._memory = fd, bytearray()
        _write_behind(self._open(os.O_CREAT), self.size, data)
        self.size += len(data)

    def read(self, offset: int, size: int) -> bytes:
        size = max(0, min(size, self.size - offset))
        if self.path is None and self._fd < 0:
            return bytes(self._memory[offset : offset + size])
        return os.pread(self._open(), size, offset)

    def batches(self, offset: int, number: int) -> Iterator[list[Batch]]:
        """The batches from ``offset`` on, or all; those of one read at a time. ``number``: of the first record there.

        A batch that is not as it was written ends the file: it is cut off there. Raises OSError, which says nothing
        about batches.
        """
        offset = max(offset, _HEAD.size)
        while offset < self.size:
            data, at, found = self.read(offset, _READ_SIZE), 0, []
            if len(data) >= _BATCH.size:
                size = _BATCH.size + int.from_bytes(data[_CRC_SIZE : 2 * _CRC_SIZE], "big")
                if len(data) < size <= self.size - offset:
                    data = self.read(offset, size)  # one that is larger than a read
            view, is_damaged = memoryview(data), False
            while at + _BATCH.size <= len(data):
                crc, size, begin, length, due = _BATCH.unpack_from(data, at)
                end = at + _BATCH.size + size
                if end > len(data):
                    break
                is_damaged = not length or 4 * length > size or zlib.crc32(view[at + _CRC_SIZE : end]) != crc
                if is_damaged:
                    break
                found.append(Batch(offset + end, begin, length, due, data, at + _BATCH.size))
                at = end
            if found:
                yield found
                number = self.head.first + found[-1].begin + found[-1].length
            if is_damaged or not found:
                self._cut_off(offset + at, number)
            offset += at

    def _cut_off(self, offset: int, number: int) -> None:
        """Keep what is behind ``offset``, the records from that number on, in another file; and have it no more."""
        size, self.size = self.size, offset
        kept = "it had no name"
        if self.path is not None:
            aside = self.path.with_name(self.path.name + BAD_SUFFIX)
            try:
                replace_file(aside, os.pread(self._open(), size - offset, offset), sync=False)
                os.ftruncate(self._open(), offset)
                kept = f"it is kept as {aside}"
            except OSError as error:
                kept = f"it could not be kept in another file: {error}"
        logger.error(
            "%s is damaged at byte %d of %d: what is behind it, from record number %d on, is lost here; %s",
            self, offset, size, number, kept, extra=BROKER_DATA_DAMAGED,
        )  # fmt: skip

    def truncate(self, size: int) -> None:
        os.ftruncate(self._open(), size)
        self.size = size

    def duplicate(self) -> int | None:
        """Another descriptor of the file, for the caller to sync and close; None where what there is is in memory."""
        return None if self.path is None and self._fd < 0 else os.dup(self._open())

    def sync(self) -> None:
        """Bring what was written to the disk itself. Blocks."""
        if self.size:
            os.fsync(self._open())

    def _open(self, flags: int = 0) -> int:
        if self._fd < 0:
            assert self.path is not None
            self._fd = os.open(self.path, os.O_RDWR | flags, 0o600)
            OPEN_FILES.add(self, self.close)
        return self._fd

    def close(self) -> None:
        """Close the file. One with a path is opened again when it is used again."""
        OPEN_FILES.discard(self)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def remove(self) -> None:
        self.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _write_behind(fd: int, size: int, data: bytes | bytearray) -> None:
    written = 0
    try:
        while written < len(data):
            written += os.pwrite(fd, data[written:] if written else data, size + written)
    except OSError:
        # Should this fail as well, the next write covers what was written of this one.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        raise


# --- the journal of a topic ------------------------------------------------------------------------------------------

SUFFIX = ".log"
_NANOSECONDS = 1e9


class Position(NamedTuple):
    """Where a record is: its number, and where in its file a batch begins that it is in, or that is before it."""

    sequence: int
    offset: int


class Journal:
    """The journal of one topic: files, each named after its first record, and removed as a whole.

    The folder comes into being with the first record.

    Args:
        folder: where its files are; None: in files without a name, which end with the process.
        file_size: bytes after which a new file begins.

    Attributes:
        end: the number of the next record.
        unsynced: records written since the last sync.
        last_id: the id of the last message that was there when it was opened; empty if there was none.
        held_at: readers may not pass this position; None: they may read to the end.
        kept: frames of records by their numbers that are needed although their files may be removed.
    """

    def __init__(self, folder: Path | None, file_size: int) -> None:
        self.folder = folder
        self.end: int = 0
        self.unsynced: int = 0
        self.last_id: Any = b""
        self.held_at: Position | None = None
        self.kept: dict[int, bytes] = {}
        self._file_size = file_size
        self._files: list[JournalFile] = []
        self._lost: dict[int, int] = {}  # ranges of numbers without records: one after the last, and the first
        if folder is not None and folder.is_dir():
            read_patiently(folder, lambda: self._load(folder))

    @property
    def readable_end(self) -> int:
        """The number of the first record that readers may not see."""
        return self.end if self.held_at is None else self.held_at.sequence

    @property
    def first(self) -> int:
        """The number of the first record that is still there, or would be."""
        return self._files[0].head.first if self._files else self.end

    def count(self, first: int, end: int) -> int:
        """How many records there are from number ``first`` to before ``end``, as far as damage is known."""
        lost = sum(max(0, min(end, stop) - max(first, start)) for stop, start in self._lost.items())
        return max(0, end - first - lost)

    @property
    def has_losses(self) -> bool:
        """Whether there are numbers without records."""
        return bool(self._lost)

    # --- writing -----------------------------------------------------------------------------------------------------

    def append(self, frames: Sequence[bytes], due: float = 0.0) -> Position:
        """Write the frames of messages, deferred until ``due``, with one write; the position of the first.

        Raises OSError with nothing of them kept.
        """
        file = self._files[-1] if self._files else None
        if file is None or file.size >= self._file_size:
            file = self._roll(file)
        start = Position(self.end, file.size)
        file.append(self.end - file.head.first, frames, round(due * _NANOSECONDS))
        self.end += len(frames)
        self.unsynced += len(frames)
        return start

    def _roll(self, last: JournalFile | None) -> JournalFile:
        first, path = self.end, None
        if self.folder is not None:
            path = self.folder / f"{first:020d}{SUFFIX}"
            if last is not None:
                last.sync()
        self._files.append(JournalFile(path, Head(0, first, 0)))
        return self._files[-1]

    def take_unsynced(self) -> int | None:
        """A descriptor for another thread to sync and close, of the file that is written to; None: nothing to do."""
        if not self.unsynced or not self._files:
            return None
        self.unsynced = 0
        return self._files[-1].duplicate()

    # --- reading -----------------------------------------------------------------------------------------------------

    def at(self, number: int) -> Position:
        """Where a record is, the first that is still there, or the next one. Without a look for it: ``read`` does."""
        if number >= self.end:
            return Position(self.end, self._files[-1].size if self._files else 0)
        return Position(max(number, self.first), 0)

    def read(self, position: Position, end: int | None = None) -> tuple[list[Message], Position]:
        """The messages from ``position`` on that come with one read, and where to go on.

        None at all only when there are none before number ``end``, by default the readable one. Raises OSError when
        they cannot be read now.
        """
        end = self.readable_end if end is None else end
        number, offset = position
        while number < end and self._files:
            index = self._index_of(number)
            file, stop = self._files[index], self._end_of(index)
            if number <= file.head.first:
                number, offset = file.head.first, 0  # also at the end of the file before
            for batches in file.batches(offset, number):
                messages: list[Message] = []
                for batch in batches:
                    first = file.head.first + batch.begin
                    start, until = max(0, number - first), min(batch.length, end - first)
                    if start < until:
                        messages += _messages(batch, first, start, until)
                        number = first + until
                    if until == batch.length:
                        offset = batch.end
                if messages:
                    return messages, Position(number, offset)
            if number < min(stop, end):
                self._lose(file, number, stop)
            number, offset = max(number, stop), 0
        return [], Position(max(number, end), 0)

    def start_at(self, number: int) -> None:
        """Give the next record at least this number: so many there have been."""
        if number > self.end:
            lost, self.end = self.end, number
            if self._files:
                self._lose(self._files[-1], lost, number)

    # --- what is lost ------------------------------------------------------------------------------------------------

    def _lose(self, file: JournalFile, first: int, end: int) -> None:
        logger.error(
            "%s: the messages of the numbers %d to %d, which should be behind it, are missing",
            file, first, end - 1, extra=BROKER_DATA_DAMAGED,
        )  # fmt: skip
        for known in [stop for stop in self._lost if first <= stop <= end]:
            first = min(first, self._lost.pop(known))
        self._lost[end] = first

    # --- files -------------------------------------------------------------------------------------------------------

    def _index_of(self, sequence: int) -> int:
        """The index of the file that a number belongs to; 0 for a number before the first one."""
        return max(0, bisect.bisect_right(self._files, sequence, key=lambda file: file.head.first) - 1)

    def _end_of(self, index: int) -> int:
        """The number after that of the last record that a file should have."""
        return self._files[index + 1].head.first if index + 1 < len(self._files) else self.end

    def bytes_before(self, sequence: int) -> int:
        """The bytes of the files that ``remove_before`` would remove."""
        return sum(file.size for index, file in enumerate(self._files) if self._is_done(index, sequence))

    def remove_before(self, sequence: int) -> None:
        """Remove the files that hold only records before ``sequence``."""
        while self._files and self._is_done(0, sequence):
            self._files.pop(0).remove()

    def _is_done(self, index: int, sequence: int) -> bool:
        # The file that is written to stays until it has some size: another one costs more.
        is_last = index + 1 == len(self._files)
        return self._end_of(index) <= sequence and (
            not is_last or self._files[index].size >= min(self._file_size, _READ_SIZE)
        )

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()

    def _load(self, folder: Path) -> None:
        self.close()
        # A glob takes ten times as long, for each of many topics.
        for path in (folder / name for name in os.listdir(folder) if name.endswith(SUFFIX)):
            if path.stem.isdecimal():
                self._files.append(open_file(path, Head(0, int(path.stem), 0)))
            else:
                logger.warning(
                    "%s is no part of the log: its name is no number; it is left alone", path, extra=BROKER_FILE_IGNORED
                )
        self._files.sort(key=lambda file: file.head.first)
        for file in self._files[-1:]:
            self.end = file.head.first
            for *_, batch in file.batches(0, self.end):
                self.end = file.head.first + batch.begin + batch.length
                self.last_id = _ID_OF(batch.records(batch.length - 1, batch.length)[0])


def _messages(batch: Batch, first: int, start: int, stop: int) -> Iterator[Message]:
    frames = batch.records(start, stop)
    columns = map(_ID_OF, frames), frames, range(first + start, first + stop)
    return map(Message, *columns, itertools.repeat(batch.due / _NANOSECONDS)) if batch.due else map(Message, *columns)


def read_all(journal: Journal, first: int, end: int) -> Iterator[Message]:
    """The messages from one number to before another, held back or not. Raises OSError."""
    position = journal.at(first)
    while position.sequence < end:
        messages, position = journal.read(position, end)
        yield from messages


# --- files of version 0.2 --------------------------------------------------------------------------------------------


def open_file(path: Path, head: Head) -> JournalFile:
    """A file, which may not be there yet; one of version 0.2 is written anew. Raises OSError.

    Args:
        head: what it begins with if it is empty, or its head is damaged: then all of it is.
    """
    if not path.exists():
        return JournalFile(path, head)
    with path.open("rb") as stored:
        found = Head.decode(stored.read(_HEAD.size))
    file = JournalFile(path, head, path.stat().st_size)
    if file.size and found is None:
        data = path.read_bytes()
        found, records = _of_0_2(data, head)
        content, end = bytearray(found.encode()), 0
        for index, (record, due, end) in enumerate(records):  # noqa: B007
            content += encode(index, [record], due)
        content += data[end:]  # nothing, or what is damaged: whoever reads comes to it
        replace_file(path, content, sync=True)
        file.size = len(content)
    file.head = found or head
    return file


_REPLICA_0_2 = b"nsqlog1\n"
_MARKER_0_2 = b"\xfa\xce\x0f\xf5"
_DEFERRED_0_2 = struct.Struct(">iiq")


def _of_0_2(data: bytes, head: Head) -> tuple[Head, Iterator[tuple[bytes, int, int]]]:
    """The head of a file, and its whole records: each with when it is due, and where it ends.

    A file of a replica has a head as today, and ``uint32 crc | uint32 size | record``. That of a topic has none, and
    frames with a marker behind each, those that are deferred with ``int32 size | int32 3 | int64 due ns`` before it.
    """
    if not data.startswith(_REPLICA_0_2):
        return head, _frames_of_0_2(data)
    found = Head.decode(data, _REPLICA_0_2)
    return (head, iter(())) if found is None else (found, _replica_of_0_2(data))


def _replica_of_0_2(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    at = _HEAD.size
    while at + 8 <= len(data):
        crc, size = struct.unpack_from(">II", data, at)
        end = at + 8 + size
        if end > len(data) or zlib.crc32(data[at + 4 : end]) != crc:
            return
        yield data[at + 8 : end], 0, end
        at = end


def _frames_of_0_2(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    at = 0
    while at + BODY_AT <= len(data):
        size, kind = struct.unpack_from(">ii", data, at)
        start, due, stop = at, 0, at + 4 + size
        if kind == FRAME_TYPE + 1:
            start, due = at + _DEFERRED_0_2.size, _DEFERRED_0_2.unpack_from(data, at)[2]
            kind = int.from_bytes(data[start + 4 : start + 8], "big")
        if kind != FRAME_TYPE or stop - start < BODY_AT or not data.startswith(_MARKER_0_2, stop):
            return
        at = stop + len(_MARKER_0_2)
        yield data[start:stop], due, at
