"""The files of one slot of one batch: segments 0, 1, 2... and then the seal. Every attempt claims the same names.

Of several attempts that run at the same time (a retry, a speculative copy, one
that was taken for dead) only one claims each number, and none claims one after
the seal. An attempt that loses learns it before it has sent a FIN.

The driver makes the place of a batch before its tasks begin, and retires it
when the batch is committed. A task that wakes up after that cannot claim
anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

from nsq_fast.errors import JournalTaken

from .segment import Head, Stored, encode, read
from .storage import Storage


class Chain:
    """One slot of one batch.

    Args:
        storage: the place of the batch.
        slot: its number.
    """

    def __init__(self, storage: Storage, slot: int) -> None:
        self.storage = storage
        self.slot = slot

    def name(self, index: int) -> str:
        """Of the file with this number."""
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


def seals(storage: Storage) -> dict[int, Head]:
    """The seals in the place of a batch, by slot."""
    return {slot: last.head for slot, last in _last_files(storage).items() if last.head.is_seal}


def uncertain_elsewhere(storage: Storage, slot: int) -> list[Stored]:
    """Segments of other slots of a batch whose messages may be delivered again and are no suspects yet."""
    found = []
    for other, last in _last_files(storage).items():
        if other != slot and not last.head.is_seal:
            chain = Chain(storage, other)
            found += [last, *(read(storage, chain.name(index)) for index in last.head.open)]
    return found


def _last_files(storage: Storage) -> dict[int, Stored]:
    last: dict[int, int] = {}
    for name in storage.names():
        if name.startswith("s"):
            slot, index = map(int, name[1:].split("-"))
            last[slot] = max(index, last.get(slot, 0))
    return {slot: read(storage, Chain(storage, slot).name(index)) for slot, index in last.items()}


def encode_json(value: Any) -> bytes:
    """As small files of the journal are written."""
    return msgspec.json.encode(value)
