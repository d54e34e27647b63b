"""The journal of one query, as the driver keeps it.

    <journal>/<id>/about.json     of which topic and channel
                   committed      the last batch that was committed
                   b<batch>/      one for each batch that is not, made before its tasks begin
                   suspects/
                   position.json  with PySpark before 4.2: the last offset that was planned
                   plan.json      of a batch read: its plan

Only the driver makes and retires places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from nsq_fast.errors import ConfigError, JournalError, JournalMissing, JournalStorageFailed, JournalTaken

from .chain import Chain, encode_json, seals
from .segment import Head
from .storage import Storage
from .suspects import Suspects

_ABOUT = "about.json"
_COMMITTED = "committed"
_POSITION = "position.json"
_PLAN = "plan.json"


class About(msgspec.Struct, frozen=True):
    """What a journal is of."""

    topic: str
    channel: str
    layout: int = 1


class Usage(NamedTuple):
    """What the batches of a journal take.

    Attributes:
        size: in bytes, of all files.
        oldest: when the oldest of them was written, in seconds since the epoch; None when there is none.
    """

    size: int
    oldest: float | None


class QueryJournal:
    """The journal of one query.

    Args:
        parent: what the option ``journal`` names.
        id: the name of this one in it.
    """

    def __init__(self, parent: Storage, id: str) -> None:
        self._parent = parent
        self._storage = parent.below(id)
        self.path = self._storage.path
        self.suspects = Suspects(self._storage.below("suspects"))

    def create(self, about: About) -> None:
        """Make it, readable by its owner only; without effect when it is there. Raises ConfigError, JournalError."""
        try:
            self._parent.make(parents=True)
            self._parent.check()
            self._storage.make()
            self.suspects.storage.make()
        except (OSError, JournalStorageFailed) as error:
            raise ConfigError(f"journal={self._parent.path!r}: cannot be made or written: {error}") from error
        with contextlib.suppress(JournalTaken):
            self._storage.claim(_ABOUT, [encode_json(about)])
        self.check(about)

    def check(self, about: About) -> None:
        """Raise JournalMissing when it is not there, JournalError when it is of something else."""
        found = self._read(_ABOUT)
        if found is None:
            raise JournalMissing(
                f"the journal {self.path} is not there, but the query's checkpoint was made with it: what was"
                " acknowledged and not committed would be lost. Bring it back, mount it, or correct the option journal"
            )
        of = msgspec.json.decode(found, type=About)
        if of != about:
            raise JournalError(
                f"the journal {self.path} is of topic {of.topic}, channel {of.channel}: a checkpoint cannot be"
                f" used for {about.topic}, {about.channel}"
            )

    # Batches

    def batch(self, batch: int) -> Storage:
        """The place of a batch."""
        return self._storage.below(f"b{batch}")

    def open_batch(self, batch: int) -> None:
        """Make its place. Raises JournalMissing when it was committed before: its rows are gone."""
        if batch <= self.committed():
            raise JournalMissing(
                f"batch {batch} of the journal {self.path} has been committed and deleted: an older checkpoint was"
                " put in place, or another query goes on with the same one"
            )
        self.batch(batch).make()

    def chain(self, batch: int, slot: int) -> Chain:
        """One slot of a batch."""
        return Chain(self.batch(batch), slot)

    def seals(self, batch: int) -> dict[int, Head]:
        """The seals of a batch, by slot; none when it is gone."""
        with contextlib.suppress(FileNotFoundError):
            return seals(self.batch(batch))
        return {}

    def committed(self) -> int:
        """The last batch that was committed; 0 when there is none."""
        return int(self._read(_COMMITTED) or 0)

    def usage(self) -> Usage:
        """What is stored of batches, those included that are being deleted."""
        found = self._storage.tree("b")
        return Usage(sum(each.size for each in found), min((each.written_at for each in found), default=None))

    def size(self, batch: int) -> int:
        """The bytes stored of a batch; none when it is gone."""
        return sum(each.size for each in self._storage.tree(f"b{batch}/"))

    def commit(self, batch: int) -> None:
        """Spark will not ask again for this batch or one before it: delete them, and forget the suspects they met."""
        done = [each for each in self._batches() if each <= batch]
        self.suspects.forget(key for each in done for head in self.seals(each).values() for key in head.seen)
        if batch > self.committed():
            self._storage.replace(_COMMITTED, str(batch).encode())
        for each in done:
            self._storage.retire(f"b{each}")
        self._storage.sweep()

    def _batches(self) -> Iterator[int]:
        for name in self._storage.names():
            if name.startswith("b") and name[1:].isdigit():
                yield int(name[1:])

    def keep_position(self, offset: bytes) -> None:
        """Keep where the query is, for versions of PySpark that do not say so."""
        self._storage.replace(_POSITION, offset)

    def position(self) -> bytes | None:
        """The offset that was kept."""
        return self._read(_POSITION)

    # The plan of a batch read

    def claim_plan(self, plan: bytes) -> None:
        """Keep a plan. Raises JournalTaken when there is one."""
        self._storage.claim(_PLAN, [plan])

    def plan(self) -> bytes | None:
        """The plan that was kept."""
        return self._read(_PLAN)

    def _read(self, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return bytes(self._storage.view(name))
        return None


def positions(parent: Storage, about: About) -> list[bytes]:
    """The positions that queries of this topic and channel have kept in the journals below ``parent``."""
    found: list[bytes] = []
    for name in parent.names():
        with contextlib.suppress(OSError, JournalError):
            journal = QueryJournal(parent, name)
            journal.check(about)
            if (position := journal.position()) is not None:
                found.append(position)
    return found
