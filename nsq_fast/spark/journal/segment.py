"""One file of the journal: rows as columns, or the seal that ends a slot. Written once, never changed.

A JSON head describes the buffers of ``Columns`` that follow as they are, each
at a multiple of 64 bytes. They are read where they lie, so a replay is cheap.
Numbers are in the byte order that the head names.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from nsq_fast._codec import MESSAGE_ID_SIZE
from nsq_fast.errors import JournalError

from .storage import Storage

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
    """``Columns`` in the bytes of a file: the same names and layouts. None where the rows have no such column."""

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
    """A file that there is."""

    storage: Storage
    name: str
    head: Head

    @property
    def path(self) -> str:
        """How errors name it."""
        return _path(self.storage, self.name)

    def columns(self) -> StoredColumns:
        """Its rows, in the bytes of the file as it lies. Raises JournalError when it is damaged."""
        return _columns(self.path, self.storage.view(self.name))

    def message_keys(self) -> list[bytes]:
        """What its messages are known by."""
        return keys_of(self.columns())


def keys_of(columns: Any) -> list[bytes]:
    """What the messages of ``Columns`` are known by."""
    ids, times = bytes(columns.ids), bytes(columns.timestamps)
    size = MESSAGE_ID_SIZE
    return [ids[size * row : size * row + size] + times[8 * row : 8 * row + 8] for row in range(columns.count)]


def encode(head: Head, columns: Any = None) -> list[Any]:
    """The buffers of a file, to be written one after another."""
    parts = _parts(head, columns)
    sizes = {name: len(part) for name, part in parts}
    text = msgspec.json.encode(msgspec.structs.replace(head, sizes=sizes))
    start = _PREFIX.pack(MAGIC, len(text)) + text
    buffers: list[Any] = [start, _padding(len(start))]
    for _, part in parts:
        buffers += [part, _padding(len(part))]
    return [buffer for buffer in buffers if len(buffer)]


def _parts(head: Head, columns: Any) -> list[tuple[str, Any]]:
    if columns is None:
        return []
    names = (*_COLUMNS, *(_REDESIGNED_COLUMNS if head.is_redesigned else ()), _BODY)
    return [(name, getattr(columns, name)) for name in names if getattr(columns, name) is not None]


def _padding(size: int) -> bytes:
    return bytes(-size % ALIGNMENT)


def read(storage: Storage, name: str) -> Stored:
    """See what a file is. Raises FileNotFoundError, or JournalError for one that is damaged."""
    return Stored(storage, name, _parse(_path(storage, name), storage.view(name))[0])


def _parse(path: str, view: memoryview) -> tuple[Head, int]:
    """The head, and where it ends."""
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
