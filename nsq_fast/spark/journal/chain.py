"""The files of one slot of one batch: segments 0, 1, 2... and behind the last one the seal. All claim the same names.

A file is written under a name of its own and then linked to the next number,
which only one can do: ``link`` refuses a name that there is. So whatever
attempts run at the same time (a retry, a speculative copy, one that was thought
dead), each number is taken once, and after the seal nothing more: who comes too
late finds out before it has acknowledged anything.

The folder is the driver's: it is made before the tasks begin, and moved away
when the batch is committed, so that whoever wakes up after that claims nothing.
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
    """Put a file into ``folder`` under ``name``, whole and on disk, unless there is one.

    Raises JournalTaken when there is one, JournalClosed when the folder is gone.
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
    """Have the names in it on disk."""
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
        """The segments of a slot that an attempt has worked on before, sealed now if it was not; None for a new one.

        ``suspect`` is called with all segments before these are sealed, whenever the seal was missing.
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
    """Those of an unfinished slot whose messages the server may deliver again."""
    last = segments[-1].head
    return [*(segments[index] for index in last.open), segments[-1]]


def seals(folder: str) -> dict[int, Head]:
    """The seals in the folder of a batch, by slot."""
    return {slot: last.head for slot, last in _last_files(folder).items() if last.head.is_seal}


def uncertain_elsewhere(folder: str, slot: int) -> list[Stored]:
    """The segments of the other slots of a batch whose messages may be delivered again, and are no suspects yet."""
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
    """Write a file anew, whole or not at all."""
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
