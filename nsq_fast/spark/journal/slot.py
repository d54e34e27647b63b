"""What is stored of a slot, the work of one task: segments, then a seal; and what the driver tells the task."""

from __future__ import annotations

import contextlib
import struct
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from nsq_fast._codec import MESSAGE_ID_SIZE
from nsq_fast._frame import Columns, join_columns
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import JournalError, JournalTaken
from nsq_fast.names import Address
from nsq_fast.spark.arrow_rows import to_batch
from nsq_fast.spark.options import ObjectStore, SourceOptions
from nsq_fast.spark.versions import InputPartition

from .files import Storage

# One file of the journal: rows as columns, or the seal that ends a slot. Written once, never changed.
#
# A JSON head describes the buffers of ``Columns`` that follow as they are, each
# at a multiple of 64 bytes. They are read where they lie, so a replay is cheap.
# Numbers are in the byte order that the head names.


MAGIC = b"NSQJ0001"
ALIGNMENT = 64
KEY_SIZE = MESSAGE_ID_SIZE + 8
"""A message is known again by its id, and its time of publishing in 8 bytes behind it."""

Buffer = bytes | memoryview

_PREFIX = struct.Struct("<8sI")
_COLUMNS = ("timestamps", "attempts", "ids", "offsets", "sizes", "ext_versions", "ext_offsets", "ext", "body_offsets")
_BODY = "body"
_REDESIGNED_COLUMNS = ("internal_ids", "trace_ids")


class Head(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a file is.

    Attributes:
        rows: how many there are in it.
        is_seal: whether it ends the slot; it has no rows then.
        run: which run of the query collected the rows.
        open: the segments before it of which it is not certain that the server has taken every FIN.
        nsqd, partition, is_redesigned: where the rows come from.
        fresh: of a seal: how many messages each run has taken from the server for this slot.
        seen: of a seal: the keys of those that came again and were left out.
        order: the byte order of the numbers.
        sizes: the length of each buffer.
    """

    rows: int = 0
    is_seal: bool = False
    run: str = ""
    open: tuple[int, ...] = ()
    nsqd: str = ""
    partition: int | None = None
    is_redesigned: bool = False
    fresh: dict[str, int] = {}
    seen: tuple[bytes, ...] = ()
    order: str = sys.byteorder
    sizes: dict[str, int] = {}

    def of(self, rows: int, unsure: tuple[int, ...]) -> Head:
        """The head of a segment with so many rows, behind segments of which FINs may be missing."""
        return msgspec.structs.replace(self, rows=rows, open=unsure)


@dataclass(frozen=True)
class StoredColumns:
    """``Columns`` in the bytes of a file: the same names and layouts. None where the rows have no such column.

    What is to be written may have its ``body`` in pieces.
    """

    timestamps: Buffer
    attempts: Buffer
    ids: Buffer
    body_offsets: Buffer
    body: Buffer
    internal_ids: Buffer | None = None
    trace_ids: Buffer | None = None
    offsets: Buffer | None = None
    sizes: Buffer | None = None
    ext_versions: bytes | None = None
    ext_offsets: Buffer | None = None
    ext: Buffer | None = None
    count: int = 0


class Stored(NamedTuple):
    storage: Storage
    name: str
    head: Head

    @property
    def path(self) -> str:
        return _path(self.storage, self.name)

    def columns(self) -> StoredColumns:
        """Its rows, in the bytes of the file as it lies. Raises JournalError when it is damaged."""
        return _columns(self.path, self.storage.view(self.name))

    def message_keys(self) -> list[bytes]:
        return keys_of(self.columns())


def unjoined(parts: list[Columns]) -> StoredColumns:
    """Columns that came one after another, as they are to be written: the bodies, most of it, are not copied."""
    joined = join_columns(parts, bodies=False)
    found = {name: getattr(joined, name) for name in (*_COLUMNS, *_REDESIGNED_COLUMNS)}
    bodies: Any = [part.body for part in parts]
    return StoredColumns(**found, body=bodies, count=joined.count)


def keys_of(columns: Any) -> list[bytes]:
    """What the messages of ``Columns`` are known by."""
    ids, times = bytes(columns.ids), bytes(columns.timestamps)
    size = MESSAGE_ID_SIZE
    return [ids[size * row : size * row + size] + times[8 * row : 8 * row + 8] for row in range(columns.count)]


def encode(head: Head, columns: Any = None) -> list[Any]:
    """The buffers of a file, to be written one after another."""
    parts = _parts(head, columns)
    sizes = {name: sum(map(len, pieces)) for name, pieces in parts}
    text = msgspec.json.encode(msgspec.structs.replace(head, sizes=sizes))
    start = _PREFIX.pack(MAGIC, len(text)) + text
    buffers: list[Any] = [start, _padding(len(start))]
    for name, pieces in parts:
        buffers += [*pieces, _padding(sizes[name])]
    return [buffer for buffer in buffers if len(buffer)]


def _parts(head: Head, columns: Any) -> list[tuple[str, list[Any]]]:
    if columns is None:
        return []
    names = (*_COLUMNS, *(_REDESIGNED_COLUMNS if head.is_redesigned else ()), _BODY)
    found = [(name, getattr(columns, name)) for name in names]
    return [(name, part if isinstance(part, list) else [part]) for name, part in found if part is not None]


def _padding(size: int) -> bytes:
    return bytes(-size % ALIGNMENT)


def read(storage: Storage, name: str) -> Stored:
    """See what a file is. Raises FileNotFoundError, or JournalError for one that is damaged."""
    return Stored(storage, name, _parse(_path(storage, name), storage.view(name))[0])


def _parse(path: str, view: memoryview) -> tuple[Head, int]:
    if len(view) < _PREFIX.size:
        raise JournalError(f"{path}: damaged: it has {len(view)} bytes only")
    magic, length = _PREFIX.unpack(view[: _PREFIX.size])
    if magic != MAGIC:
        raise JournalError(f"{path}: not a file of a journal")
    end = _PREFIX.size + length
    if len(view) < end:
        raise JournalError(f"{path}: damaged: it ends in its head")
    try:
        head = msgspec.json.decode(view[_PREFIX.size : end], type=Head)
    except msgspec.MsgspecError as error:
        raise JournalError(f"{path}: damaged: {error}") from error
    if head.order != sys.byteorder:
        raise JournalError(f"{path}: written on a machine of another byte order")
    return head, end


def _columns(path: str, view: memoryview) -> StoredColumns:
    head, at = _parse(path, view)
    found: dict[str, Any] = {}
    for name, length in head.sizes.items():
        at += -at % ALIGNMENT
        found[name] = view[at : at + length]
        at += length
    if at > len(view):
        raise JournalError(f"{path}: damaged: it has {len(view)} bytes of {at}")
    if "ext_versions" in found:
        found["ext_versions"] = bytes(found["ext_versions"])
    return StoredColumns(**found, count=head.rows)


def _path(storage: Storage, name: str) -> str:
    return f"{storage.path}/{name}"


# The files of one slot of one batch: segments 0, 1, 2... and then the seal. Every attempt claims the same names.
#
# Of several attempts that run at the same time (a retry, a speculative copy, one
# that was taken for dead) only one claims each number, and none claims one after
# the seal. An attempt that loses learns it before it has sent a FIN.
#
# The driver makes the place of a batch before its tasks begin, and retires it
# when the batch is committed. A task that wakes up after that cannot claim
# anything.


class SegmentLog:
    """One slot of one batch.

    Args:
        storage: the place of the batch.
        slot: its number.
    """

    def __init__(self, storage: Storage, slot: int) -> None:
        self.storage = storage
        self.slot = slot

    def name(self, index: int) -> str:
        return f"s{self.slot}-{index}"

    def claim(self, index: int, head: Head, columns: Any = None) -> Stored:
        """Write a file under this number. Raises JournalTaken or JournalClosed; then nothing was written."""
        self.storage.claim(self.name(index), encode(head, columns))
        return Stored(self.storage, self.name(index), head)

    def read(self) -> list[Stored]:
        """The files that there are, in order; the last one may be the seal."""
        found: list[Stored] = []
        with contextlib.suppress(FileNotFoundError):
            while not (found and found[-1].head.is_seal):
                found.append(read(self.storage, self.name(len(found))))
        return found

    def settle(self, suspect: Callable[[list[Stored]], object]) -> list[Stored] | None:
        """The segments of a slot that an earlier attempt worked on, sealed now if they were not; None for a new slot.

        Where the seal was missing, ``suspect`` is called with all segments before they are sealed.
        """
        while True:
            found = self.read()
            if not found:
                return None
            if found[-1].head.is_seal:
                return found[:-1]
            suspect(found)
            with contextlib.suppress(JournalTaken):  # by the attempt that was thought dead, or by another like us
                self.claim(len(found), seal(found))


def seal(segments: Iterable[Stored], run: str = "", seen: Collection[bytes] = ()) -> Head:
    """The seal of these segments; ``seen`` are the keys that ``run`` left out besides."""
    fresh: dict[str, int] = {run: len(seen)} if seen else {}
    for segment in segments:
        fresh[segment.head.run] = fresh.get(segment.head.run, 0) + segment.head.rows
    return Head(is_seal=True, fresh=fresh, seen=tuple(sorted(seen)))


def uncertain(segments: list[Stored]) -> list[Stored]:
    """The segments of an unfinished slot whose messages the server may deliver again."""
    last = segments[-1].head
    return [*(segments[index] for index in last.open), segments[-1]]


def slots(storage: Storage) -> list[int]:
    return sorted(_last_indices(storage))


def seals(storage: Storage) -> dict[int, Head]:
    """The seals in the place of a batch, by slot."""
    return {slot: last.head for slot, last in _last_files(storage).items() if last.head.is_seal}


def uncertain_elsewhere(storage: Storage, slot: int) -> list[Stored]:
    """Segments of other slots of a batch whose messages may be delivered again and are no suspects yet."""
    found = []
    for other, last in _last_files(storage).items():
        if other != slot and not last.head.is_seal:
            segment_log = SegmentLog(storage, other)
            found += [last, *(read(storage, segment_log.name(index)) for index in last.head.open)]
    return found


def _last_files(storage: Storage) -> dict[int, Stored]:
    last = _last_indices(storage)
    return {slot: read(storage, SegmentLog(storage, slot).name(index)) for slot, index in last.items()}


def _last_indices(storage: Storage) -> dict[int, int]:
    last: dict[int, int] = {}
    for name in storage.names():
        if name.startswith("s"):
            slot, index = map(int, name[1:].split("-"))
            last[slot] = max(index, last.get(slot, 0))
    return last


# Messages that are in the journal and may be delivered once more; kept until they are, or for a day.
#
# They are the messages of segments whose FINs a dead attempt may not have sent,
# and those whose FIN came too late. A message is recognised by its id and its
# timestamp, which the server keeps when it delivers the message again, and over
# a restart.
#
# Tasks add files; the driver alone changes and removes them.


RETENTION = 24 * 3600.0
"""How long a message is waited for: it may lie behind a long queue, or in an nsqd that is down."""

_SUFFIX = ".keys"


class Suspects:
    """The suspects of one journal, in a place of their own."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def add(self, keys: Iterable[bytes]) -> None:
        """Keep these, stored for good when it returns."""
        data = b"".join(keys)
        if data:
            self.storage.claim(f"{int(time.time())}-{uuid.uuid4().hex}{_SUFFIX}", [data])

    def load(self) -> set[bytes]:
        return {key for name in self._names() for key in self._read(name)}

    def forget(self, seen: Iterable[bytes]) -> None:
        """Drop those that have come, and those that are too old. For the driver."""
        gone = set(seen)
        for name in self._names():
            if time.time() - int(name.partition("-")[0]) > RETENTION:
                self.storage.remove(name)
                continue
            keys = self._read(name)
            left = [key for key in keys if key not in gone]
            if not left:
                self.storage.remove(name)
            elif len(left) < len(keys):
                self.storage.replace(name, b"".join(left))

    def _names(self) -> list[str]:
        return [name for name in self.storage.names() if name.endswith(_SUFFIX)]

    def _read(self, name: str) -> list[bytes]:
        data = b""
        with contextlib.suppress(FileNotFoundError):  # the driver may just have dropped it
            data = bytes(self.storage.view(name))
        return [data[at : at + KEY_SIZE] for at in range(0, len(data), KEY_SIZE)]


READ = "read"
"""The file that says so of a batch that adopts."""


@dataclass
class Slot(InputPartition):
    """What a task is to do. Pickled.

    Attributes:
        path: where the files of the batch lie.
        number: of the slot.
        rows: how many messages at most.
        object_store: where ``path`` and ``suspects`` are, when they are not files.
        suspects: where the suspects lie; None to let them pass.
        max_delay: seconds that it waits for a window of messages to be full.
        run: which run of the query this is.
        address: of the nsqd; None when nobody leads the partition now.
        heir: of a slot that is adopted: the place of the batch that does, where a file says that it was read.
    """

    path: str
    number: int
    name: str
    rows: int
    topic: str
    channel: str
    connection: ConnectionConfig
    object_store: ObjectStore
    suspects: str | None
    max_delay: float
    run: str
    address: Address | None
    partition: int | None = None
    is_redesigned: bool = False
    heir: str | None = None

    def head(self) -> Head:
        """What the heads of its segments have in common."""
        return Head(run=self.run, nsqd=str(self.address), partition=self.partition, is_redesigned=self.is_redesigned)


ROWS = 4_000
"""Rows from which a batch is handed on: a segment of the usual size without a copy. Spark takes 5,000 at a time as fast
as 10,000, and a tenth faster than 2,500."""
BYTES = 8 * 1024 * 1024
"""Bytes of rows from which it is, too: a column of Arrow takes 2 GiB, and what is joined needs as much memory again."""


def batches(segments: Iterable[Stored], options: SourceOptions, topic: str) -> Iterator[pa.RecordBatch]:
    """The rows of these segments, in order, with the columns that the options say."""
    gathered: list[pa.RecordBatch] = []
    rows = size = 0
    for segment in segments:
        batch = rows_of(segment.columns(), segment.head, options, topic)
        gathered.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= ROWS or size >= BYTES:
            yield _join(gathered)
            gathered, rows, size = [], 0, 0
    if gathered:
        yield _join(gathered)


def rows_of(columns: Any, head: Head, options: SourceOptions, topic: str) -> pa.RecordBatch:
    """The rows of ``Columns`` or what is stored of them; ``head`` says where they come from."""
    return to_batch(
        columns,
        options.columns,
        options.headers_as,
        topic=topic,
        partition=head.partition,
        nsqd=head.nsqd,
        is_redesigned=head.is_redesigned,
    )


def _join(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(parts) == 1:
        return parts[0]
    return pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
