"""One file of the journal: rows as columns, or the seal that ends a slot. Written once, never changed.

A JSON head describes the buffers of ``Columns`` that follow as they are, each
at a multiple of 64 bytes. Writing copies nothing and reading maps the file, so
a replay is cheap. Numbers are in the byte order that the head names.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from nsq_fast._codec import MESSAGE_ID_SIZE
from nsq_fast.errors import JournalError

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
    """``Columns`` in a mapped file: the same names and layouts. None where the rows have no such column."""

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

    path: str
    head: Head

    def columns(self) -> StoredColumns:
        """Its rows, mapped. Raises JournalError when it is damaged."""
        return _map(self.path)

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


def write(descriptor: int, buffers: Sequence[Any]) -> None:
    """Write all of them."""
    total = sum(len(buffer) for buffer in buffers)
    written = os.writev(descriptor, buffers)
    if written < total:  # a full disk raises; a network file system may take less than all
        rest = memoryview(b"".join(buffers))[written:]
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def read(path: str) -> Stored:
    """See what a file is. Raises FileNotFoundError, or JournalError for one that is damaged."""
    with open(path, "rb") as file:
        magic, length = _prefix(path, file.read(_PREFIX.size))
        return Stored(path, _head(path, magic, length, file.read(length)))


def _prefix(path: str, data: bytes) -> tuple[bytes, int]:
    if len(data) < _PREFIX.size:
        raise JournalError(f"{path}: damaged: it has {len(data)} bytes only")
    magic, length = _PREFIX.unpack(data)
    return magic, length


def _head(path: str, magic: bytes, length: int, text: bytes) -> Head:
    if magic != MAGIC:
        raise JournalError(f"{path}: not a file of a journal")
    if len(text) < length:
        raise JournalError(f"{path}: damaged: it ends in its head")
    try:
        head = msgspec.json.decode(text, type=Head)
    except msgspec.MsgspecError as error:
        raise JournalError(f"{path}: damaged: {error}") from error
    if head.order != sys.byteorder:
        raise JournalError(f"{path}: written on a machine of another byte order")
    return head


def _map(path: str) -> StoredColumns:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        view = memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))
    magic, length = _prefix(path, bytes(view[: _PREFIX.size]))
    at = _PREFIX.size + length
    head = _head(path, magic, length, bytes(view[_PREFIX.size : at]))
    found: dict[str, Any] = {}
    for name, length in head.sizes.items():
        at += -at % ALIGNMENT
        found[name] = view[at : at + length]
        at += length
    if at > size:
        raise JournalError(f"{path}: damaged: it has {size} bytes of {at}")
    if "ext_versions" in found:
        found["ext_versions"] = bytes(found["ext_versions"])
    return StoredColumns(**found, count=head.rows)
