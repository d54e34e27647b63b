"""What a journal needs of the storage that it lies in; see ``file_storage`` for the one of file systems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Entry(NamedTuple):
    """An entry as a listing shows it.

    Attributes:
        name: as seen from the place that was listed: ``b7/s0-1``.
        size: in bytes.
        written_at: seconds since the epoch, by the clock of the storage.
    """

    name: str
    size: int
    written_at: float


class Storage(Protocol):
    """One place in the storage. The driver and all tasks see the same entries there.

    An entry is written as a whole, and is stored for good when the call returns.
    Only the driver makes and retires places.
    """

    @property
    def path(self) -> str:
        """How errors and tasks name it."""

    def below(self, name: str) -> Storage:
        """The place of this name in it. Nothing is made."""

    def make(self, *, parents: bool = False) -> None:
        """Make the place, for its owner only; without effect when it is there. Raises OSError, JournalUnreachable.

        Those that it is in are made with ``parents`` only.
        """

    def check(self) -> None:
        """Prove in the place that of two writers of one name the second is refused. Raises ConfigError."""

    def claim(self, name: str, buffers: Sequence[Any]) -> None:
        """Write an entry unless there is one of this name; of several writers at a time, one succeeds.

        Raises JournalTaken when there is one, JournalClosed when the place was not made or is retired. Nothing counts
        as written then. After another error it is unknown whether the entry was written.
        """

    def replace(self, name: str, data: bytes) -> None:
        """Write an entry in place of the one that there may be."""

    def view(self, name: str) -> memoryview:
        """The bytes of an entry. They stay readable when it is deleted. Raises FileNotFoundError."""

    def remove(self, name: str) -> None:
        """Delete an entry, if there is one."""

    def names(self) -> list[str]:
        """Of entries and of places in this one, sorted; none when this one is not there."""

    def tree(self, prefix: str) -> list[Entry]:
        """The entries in the places of this one whose names begin with ``prefix``."""

    def retire(self, name: str) -> None:
        """End the place of this name, if there is one: from now on nothing can be claimed there."""

    def sweep(self) -> None:
        """Delete what is left of retired places. What cannot be deleted now is, by a later call."""
