"""The journal of one query as its driver keeps it, and what other queries have left in theirs."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from nsq_fast._lazy import get_logger
from nsq_fast.errors import ConfigError, JournalError, JournalMissing, JournalStorageFailed, JournalTaken, counted
from nsq_fast.log_events import SPARK_ORPHANS
from nsq_fast.spark.options import ADOPT, REFUSE, SourceOptions

from .files import Storage
from .plan import Offset, source_of, topic_of
from .slot import READ, Head, SegmentLog, Suspects, seals, slots

logger: logging.Logger = get_logger(__name__)


# The journal of one query, as the driver keeps it.
#
#     <journal>/<id>/about.json     of which topic and channel
#                    committed      the last batch that was committed
#                    b<batch>/      one for each batch that is not, made before its tasks begin
#                    suspects/
#                    position.json  with PySpark before 4.2: the last offset that was planned
#                    plan.json      of a batch read: its plan
#                    adopt.json     the folders that it was told to adopt when it starts again
#                    adopted.json   the folders that it has adopted: by which batch, and up to which of theirs
#
# Only the driver makes and retires places.


_ABOUT = "about.json"
_COMMITTED = "committed"
_POSITION = "position.json"
_PLAN = "plan.json"
_ADOPT = "adopt.json"
_ADOPTED = "adopted.json"
_SLOTS = "plan.json"


class About(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a journal is of.

    Attributes:
        topic: names with commas between them, or a pattern.
        unnamed: the topic of slots that name none; "" where there are none of these.
    """

    topic: str
    channel: str
    layout: int = 1
    is_pattern: bool = False
    unnamed: str = ""

    @classmethod
    def of(cls, options: SourceOptions) -> About:
        is_pattern = options.topic_pattern is not None
        unnamed = "" if options.reads_several else options.topic
        return cls(options.topic, options.channel, is_pattern=is_pattern, unnamed=unnamed)

    def may_have(self, options: SourceOptions) -> bool:
        """Whether there may be rows of these topics."""
        return self.is_pattern or any(map(options.names_topic, [self.topic, *self.topic.split(",")]))

    def reads(self, topic: str) -> bool:
        return re.fullmatch(self.topic, topic) is not None if self.is_pattern else topic in self.topic.split(",")

    def check(self, kept: About, path: str) -> None:
        """Raise JournalError where a query of these topics cannot go on with a journal that is ``kept`` of others.

        As with Kafka's subscribe topics may come, in any order or by a pattern. What is left is that of a name that
        this query does not read.
        """
        named = [] if kept.is_pattern or kept.topic == self.topic else kept.topic.split(",")
        left = [topic for topic in named if not self.reads(topic)]
        if left or kept.channel != self.channel:
            raise JournalError(
                f"the journal {path} is of topic {kept.topic}, channel {kept.channel}: a checkpoint cannot be used for"
                f" {self.topic}, {self.channel}"
                + (f", which does not read {', '.join(left)}; name it, or take a new checkpoint" if left else "")
            )

    def following(self, kept: About) -> About:
        """What is kept from now on. Slots that were planned for one topic alone do not name it."""
        unnamed = self.unnamed or kept.unnamed or ("" if kept.is_pattern or "," in kept.topic else kept.topic)
        return msgspec.structs.replace(self, unnamed=unnamed)


Adoptions = dict[str, tuple[int, int]]
"""Folder -> the batch that has adopted it, and the last batch of the folder itself."""


class Usage(NamedTuple):
    """What the batches of a journal take.

    Attributes:
        size: in bytes, of all files.
        oldest: when the oldest of them was written, in seconds since the epoch; None when there is none.
    """

    size: int
    oldest: float | None

    @property
    def age(self) -> float | None:
        """Of the oldest, in seconds."""
        return None if self.oldest is None else max(time.time() - self.oldest, 0.0)  # two machines' clocks may differ


class QueryJournal:
    """The journal of one query.

    Args:
        parent: what the option ``journal`` names.
        id: the name of this one in it.
    """

    def __init__(self, parent: Storage, id: str) -> None:
        self.parent = parent
        self.id = id
        self._storage = parent.below(id)
        self.path: str = self._storage.path
        self.suspects: Suspects = Suspects(self._storage.below("suspects"))

    def beside(self, id: str) -> QueryJournal:
        return QueryJournal(self.parent, id)

    def create(self, about: About) -> None:
        """Make it, readable by its owner only; without effect when it is there. Raises ConfigError, JournalError."""
        try:
            self.parent.make(parents=True)
            self.parent.check()
            self._storage.make()
            self.suspects.storage.make()
        except (OSError, JournalStorageFailed) as error:
            reason = error.__cause__ if isinstance(error.__cause__, OSError) else error
            raise ConfigError(f"journal={self.parent.path!r}: cannot be made or written: {reason}") from error
        with contextlib.suppress(JournalTaken):
            self._storage.claim(_ABOUT, [msgspec.json.encode(about)])
        self.check(about)

    def check(self, about: About) -> About:
        """What it is of. Raises JournalMissing when it is not there, JournalError when it is of something else."""
        found = self._read(_ABOUT)
        if found is None:
            raise JournalMissing(
                f"the journal {self.path} is not there, but the query's checkpoint was made with it: what was"
                " acknowledged and not committed would be lost. Bring it back, mount it, or correct the option journal"
            )
        kept = msgspec.json.decode(found, type=About)
        about.check(kept, self.path)
        return kept

    def renew(self, about: About) -> About:
        """As ``check``; the journal is of these topics from now on. What is kept then is returned."""
        kept = self.check(about)
        following = about.following(kept)
        if following != kept:
            self._storage.replace(_ABOUT, msgspec.json.encode(following))
        return following

    # Batches

    def batch(self, batch: int) -> Storage:
        return self._storage.below(f"b{batch}")

    def open_batch(self, batch: int) -> Storage:
        """Make its place, unless it is there. Raises JournalMissing when it was committed before: its rows are gone."""
        if batch <= self.committed():
            raise JournalMissing(
                f"batch {batch} of the journal {self.path} has been committed and deleted: an older checkpoint was"
                " put in place, or another query goes on with the same one"
            )
        place = self.batch(batch)
        place.make()
        return place

    def segment_log(self, batch: int, slot: int) -> SegmentLog:
        return SegmentLog(self.batch(batch), slot)

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

    def commit(self, batch: int) -> bool:
        """Spark will not ask again for this batch or one before it: delete them, and forget the suspects they met.

        Returns whether it was not committed yet.
        """
        done = [each for each in self.batches() if each <= batch]
        self.suspects.forget(key for each in done for head in self.seals(each).values() for key in head.seen)
        is_first = batch > self.committed()
        if is_first:
            self._storage.replace(_COMMITTED, str(batch).encode())
        for each in done:
            self._storage.retire(f"b{each}")
        self._storage.sweep()
        return is_first

    def batches(self) -> Iterator[int]:
        for name in self._storage.names():
            if name.startswith("b") and name[1:].isdigit():
                yield int(name[1:])

    def keep_position(self, offset: bytes) -> None:
        """Keep where the query is, for versions of PySpark that do not say so."""
        self._storage.replace(_POSITION, offset)

    def position(self) -> bytes | None:
        return self._read(_POSITION)

    # What a query with another checkpoint may need of it

    def rows(self, batch: int) -> dict[int, int]:
        """How many rows each slot of a batch has; slots without any are left out."""
        place = self.batch(batch)
        found = {slot: sum(each.head.rows for each in SegmentLog(place, slot).read()) for slot in slots(place)}
        return {slot: rows for slot, rows in found.items() if rows}

    def keep_slots(self, batch: int, names: Sequence[str]) -> None:
        """Keep which slots a batch has: where there are several topics, only their names tell them."""
        with contextlib.suppress(JournalTaken):  # by the run before
            self.batch(batch).claim(_SLOTS, [msgspec.json.encode(sorted(names))])

    def kept_slots(self, batch: int) -> list[str] | None:
        with contextlib.suppress(FileNotFoundError):
            return msgspec.json.decode(bytes(self.batch(batch).view(_SLOTS)), type=list[str])
        return None

    def was_read(self, batch: int) -> bool:
        """Whether a task has read of what a batch adopts."""
        with contextlib.suppress(FileNotFoundError):
            return bool(self.batch(batch).view(READ))
        return False

    def ask_to_adopt(self, id: str) -> None:
        """Have the query adopt another folder when it starts again."""
        self._storage.replace(_ADOPT, msgspec.json.encode(sorted({*self.asked_to_adopt(), id})))

    def asked_to_adopt(self) -> list[str]:
        """What it was asked for, done or not."""
        found = self._read(_ADOPT)
        return [] if found is None else msgspec.json.decode(found, type=list[str])

    def adopt(self, by: int, batches: Mapping[str, int]) -> Adoptions:
        """Keep that batch ``by`` adopts these folders, each up to a batch of its own. All adoptions are returned."""
        found = {**self.adopted(), **{id: (by, last) for id, last in batches.items()}}
        self._storage.replace(_ADOPTED, msgspec.json.encode(found))
        for id in batches:  # what their dead tasks may not have finished comes to this query
            self.suspects.add(self.beside(id).suspects.load())
        return found

    def adopted(self) -> Adoptions:
        found = self._read(_ADOPTED)
        return {} if found is None else msgspec.json.decode(found, type=dict[str, tuple[int, int]])

    # The plan of a batch read

    def claim_plan(self, plan: bytes) -> None:
        """Keep a plan. Raises JournalTaken when there is one."""
        self._storage.claim(_PLAN, [plan])

    def plan(self) -> bytes | None:
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


def folders(parent: Storage) -> Iterator[tuple[str, About]]:
    """The journals of streams below ``parent``, and what they are of."""
    for name in parent.names():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
            of = msgspec.json.decode(bytes(parent.below(name).view(_ABOUT)), type=About)
            if QueryJournal(parent, name).plan() is None:  # that of a batch read is read again by its name
                yield name, of


# Batches that no query will commit: those of another folder of the journal, of the same topics and channel.
#
# A new checkpoint gives a query a new folder. What the folder before it holds was
# acknowledged, so no server has it any more, and whoever had it to commit may have
# ended with the old checkpoint. It is read where it lies, as slots of the new
# query's first batch, named ``@<folder>/b<batch>/s<slot>/<topic>``: nothing is
# copied, so a query that dies before its commit leaves all of it to the next.


_MARK = "@"


class Orphan(NamedTuple):
    """What a folder holds that was not committed.

    Attributes:
        id: of the folder.
        about: of which topics and channel it is.
        slots: the rows of each slot, by the name that it has in the batch that adopts it.
        last: the last of its batches.
        age: of the oldest file, in seconds.
    """

    id: str
    about: About
    journal: QueryJournal
    slots: Mapping[str, int]
    last: int
    age: float | None

    @property
    def rows(self) -> int:
        return sum(self.slots.values())

    @property
    def topics(self) -> list[str]:
        return sorted({found.topic for name in self.slots if (found := parse_adopted(name))})

    def __str__(self) -> str:
        age = "" if self.age is None else f", the oldest {self.age:.0f} s old"
        return f"{self.journal.path} ({counted(self.rows, 'row')}{age})"


class Adopted(NamedTuple):
    """Where a slot of a batch that adopts lies."""

    id: str
    batch: int
    slot: int
    topic: str


def parse_adopted(name: str) -> Adopted | None:
    """What the name of a slot says; None for a slot of the query's own."""
    if not name.startswith(_MARK):
        return None
    id, batch, slot, topic = name[len(_MARK) :].split("/")
    return Adopted(id, int(batch[1:]), int(slot[1:]), topic)


class Adoption:
    """What a query reads of other folders in the first batch of a run, and commits with that batch."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._orphans: list[Orphan] = []
        self._begins_at = 0
        self._adopted: Adoptions | None = None

    def find(self, journal: QueryJournal) -> None:
        """Look for folders that hold rows of these topics and this channel: a new query is to adopt them.

        Raises JournalError for a file that is damaged, and when the option ``orphans`` refuses them.
        """
        options = self._options
        found = [
            uncommitted(journal.parent, id, about)
            for id, about in folders(journal.parent)
            if id != journal.id and about.channel == options.channel and about.may_have(options)
        ]
        self._orphans = self._judged([each for each in found if each.slots and self._is_of(each)])

    def begin(self, journal: QueryJournal, batch: int) -> None:
        """The run goes on behind ``batch``. What was found is for a new query alone.

        Any query adopts what it was told to (``nsq-fast journal adopt``), and has not yet.
        """
        self._begins_at = batch
        self._orphans = [] if batch else self._orphans
        if asked := set(journal.asked_to_adopt()):
            done = {id: last for id, (by, last) in journal.adopted().items() if by <= batch}
            self._orphans += [each for each in self._left(journal, asked) if each.last > done.get(each.id, 0)]

    def look_back(self, journal: QueryJournal, batch: int) -> None:
        """A batch is done: what it was to adopt and no task has read is adopted once more.

        A sink leaves a batch out when it knows its number, which may be that of another checkpoint.
        """
        if self._adopted is None:
            self._adopted = journal.adopted()
        due = {id for id, (by, _) in self._adopted.items() if by == batch}
        if due and not journal.was_read(batch):
            if self._begins_at == batch:  # and with it what `begin` has found just now
                due.update(each.id for each in self._orphans)
            self._orphans, self._begins_at = self._left(journal, due), batch

    def is_due(self, batch: int) -> bool:
        """Whether the batch behind this one is to be that of `plan`."""
        return bool(self._orphans) and batch == self._begins_at

    def plan(self, journal: QueryJournal, offset: Offset) -> Offset:
        """The first batch of the run: all that is to be adopted, whatever the limit."""
        found = offset.following({name: rows for each in self._orphans for name, rows in each.slots.items()})
        self._adopted = journal.adopt(found.batch, {each.id: each.last for each in self._orphans})
        return found

    def commit(self, journal: QueryJournal, batch: int) -> None:
        """Commit what was adopted by this batch or one before it, as far as they had got then."""
        if self._adopted is None:
            self._adopted = journal.adopted()
        due = {id: last for id, (by, last) in self._adopted.items() if by <= batch and journal.was_read(by)}
        for id, last in due.items():
            with contextlib.suppress(FileNotFoundError):  # somebody has deleted the folder
                journal.beside(id).commit(last)
            del self._adopted[id]

    def _left(self, journal: QueryJournal, ids: Container[str]) -> list[Orphan]:
        found = [uncommitted(journal.parent, id, about) for id, about in folders(journal.parent) if id in ids]
        return [each for each in found if each.slots]

    def _judged(self, orphans: list[Orphan]) -> list[Orphan]:
        """Those that are to be adopted, as the option ``orphans`` says."""
        if not orphans:
            return []
        options = self._options
        told = (
            f"journal={options.journal!r}: a query with another checkpoint has acknowledged rows of topic"
            f" {options.topic}, channel {options.channel}, and has not committed them: {', '.join(map(str, orphans))}"
        )
        if options.orphans == REFUSE:
            raise JournalError(
                f"{told}. Start that query again from its checkpoint; or let this one read them, with orphans=adopt; or"
                " delete the folders, if nobody needs the rows"
            )
        is_adopted = options.orphans == ADOPT
        then = (
            "They are the first batch of this query; those that its sink has already come twice"
            if is_adopted
            else "Nobody reads them: orphans=adopt does"
        )
        logger.warning("%s. %s", told, then, extra=SPARK_ORPHANS)
        return orphans if is_adopted else []

    def _is_of(self, orphan: Orphan) -> bool:
        """Whether all of its rows are of topics that are read. A folder is adopted as a whole, or not at all."""
        topics = orphan.topics
        others = [topic for topic in topics if not self._options.names_topic(topic)]
        if others and len(others) < len(topics):
            logger.warning(
                "%s: has rows of topic %s, too, which topic %s does not name: nobody reads them; nsq-fast journal adopt"
                " has this query do so",
                orphan,
                ", ".join(others),
                self._options.topic,
                extra=SPARK_ORPHANS,
            )
        return not others


def uncommitted(parent: Storage, id: str, about: About) -> Orphan:
    """What a folder holds of batches that were not committed; it may be nothing."""
    journal = QueryJournal(parent, id)
    slots: dict[str, int] = {}
    done = journal.committed()
    batches = [batch for batch in journal.batches() if batch > done]
    for batch in batches:
        kept = journal.kept_slots(batch)
        for slot, rows in journal.rows(batch).items():
            slots[f"{_MARK}{id}/b{batch}/s{slot}/{_topic(kept, slot, about)}"] = rows
    return Orphan(id, about, journal, slots, max(batches, default=done), journal.usage().age if slots else None)


def _topic(kept: list[str] | None, slot: int, about: About) -> str:
    """That of a slot. ``kept``: the names of the slots of its batch, sorted as they are numbered."""
    if kept is None:
        return about.unnamed or about.topic
    name = kept[slot]
    adopted = parse_adopted(name)
    return adopted.topic if adopted else topic_of(source_of(name)) or about.unnamed
