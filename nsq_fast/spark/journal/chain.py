"""The files of one slot of one batch: segments 0, 1, 2... and then the seal. Every attempt claims the same names.

A file is written under a temporary name and then linked to the next number.
``link`` fails where the name exists, so of several attempts that run at the
same time (a retry, a speculative copy, one that was taken for dead) only one
claims each number, and none claims one after the seal. An attempt that loses
learns it before it has sent a FIN.

The driver makes the folder before the tasks begin, and moves it away when the
batch is committed. A task that wakes up after that cannot claim anything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

from nsq_fast.errors import JournalClosed, JournalTaken

from .segment import Head, Stored, encode, read, write

TEMPORARY = "t-"


def claim_file(folder: str, name: str, buffers: list[Any], *, durable: bool = True) -> None:
    """Write a file into ``folder`` as ``name``, complete and synced to disk, unless that name exists.

    Raises JournalTaken when it exists, JournalClosed when the folder is gone.
    """
    temporary = os.path.join(folder, TEMPORARY + uuid.uuid4().hex)
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            write(descriptor, buffers)
            if durable:
                os.fsync(descriptor)
            _link(descriptor, temporary, os.path.join(folder, name))
        finally:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if durable:
            sync_folder(folder)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        raise JournalClosed(
            f"{folder} is not there: the batch has been committed by another attempt, or the journal is not on a file"
            " system that the driver and all executors share"
        ) from None


def _link(descriptor: int, temporary: str, final: str) -> None:
    try:
        os.link(temporary, final)
    except FileExistsError:
        # A network file system may repeat a request whose answer was lost, and then find its own work.
        if os.fstat(descriptor).st_nlink < 2:
            raise JournalTaken(f"{final} has been written by another attempt") from None


def sync_folder(folder: str) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Chain:
    """One slot of one batch.

    Args:
        folder: of the batch.
        slot: its number.
        durable: whether files are on disk before they count. Only measurements do without.
    """

    def __init__(self, folder: str, slot: int, *, durable: bool = True) -> None:
        self.folder = folder
        self.slot = slot
        self._durable = durable

    def path(self, index: int) -> str:
        """The file with this number."""
        return os.path.join(self.folder, self._name(index))

    def _name(self, index: int) -> str:
        return f"s{self.slot}-{index}"

    def claim(self, index: int, head: Head, columns: Any = None) -> Stored:
        """Write a file under this number. Raises JournalTaken or JournalClosed; then nothing was written."""
        claim_file(self.folder, self._name(index), encode(head, columns), durable=self._durable)
        return Stored(self.path(index), head)

    def read(self) -> list[Stored]:
        """The files that there are, in order; the last one may be the seal."""
        found: list[Stored] = []
        with contextlib.suppress(FileNotFoundError):
            while not (found and found[-1].head.is_seal):
                found.append(read(self.path(len(found))))
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


def seals(folder: str) -> dict[int, Head]:
    """The seals in the folder of a batch, by slot."""
    return {slot: last.head for slot, last in _last_files(folder).items() if last.head.is_seal}


def uncertain_elsewhere(folder: str, slot: int) -> list[Stored]:
    """Segments of other slots of a batch whose messages may be delivered again and are no suspects yet."""
    found = []
    for other, last in _last_files(folder).items():
        if other != slot and not last.head.is_seal:
            chain = Chain(folder, other)
            found += [last, *(read(chain.path(index)) for index in last.head.open)]
    return found


def _last_files(folder: str) -> dict[int, Stored]:
    last: dict[int, int] = {}
    for name in os.listdir(folder):
        if name.startswith("s"):
            slot, index = map(int, name[1:].split("-"))
            last[slot] = max(index, last.get(slot, 0))
    return {slot: read(os.path.join(folder, f"s{slot}-{index}")) for slot, index in last.items()}


def replace_file(path: str, data: bytes) -> None:
    """Write a file completely, or leave the one that was there."""
    temporary = f"{os.path.dirname(path)}/{TEMPORARY}{uuid.uuid4().hex}"
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        write(descriptor, [data] if data else [])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)


def encode_json(value: Any) -> bytes:
    """As small files of the journal are written."""
    return msgspec.json.encode(value)
