"""The folder of one query's journal, as the driver keeps it.

    <journal>/<id>/about.json     of which topic and channel
                   committed      the last batch that was committed
                   b<batch>/      one for each batch that is not, made before its tasks begin
                   suspects/
                   position.json  with PySpark before 4.2: the last offset that was planned

Only the driver makes and removes folders. One of a batch is first moved away,
so that it is gone at once for every task, and deleted then.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from nsq_fast.errors import ConfigError, JournalError, JournalMissing
from nsq_fast.log_events import SPARK_JOURNAL_CLEAN_FAILED, SPARK_JOURNAL_CLEANED

from .chain import Chain, claim_file, encode_json, replace_file, seals, sync_folder
from .location import check_links
from .segment import Head
from .suspects import Suspects

logger = logging.getLogger(__name__)

_ABOUT = "about.json"
_COMMITTED = "committed"
_GONE = "gone-"
_POSITION = "position.json"


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


class JournalFolder:
    """The journal of one query.

    Args:
        parent: the option ``journal``.
        id: the name of this one in it.
    """

    def __init__(self, parent: str, id: str) -> None:
        self.path = os.path.join(parent, id)
        self._parent = parent
        self.suspects = Suspects(os.path.join(self.path, "suspects"))

    def create(self, about: About) -> None:
        """Make it, readable by its owner only; without effect when it is there. Raises ConfigError, JournalError."""
        try:
            os.makedirs(self._parent, mode=0o700, exist_ok=True)
            check_links(self._parent)
            for folder in (self.path, self.suspects.folder):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700)
        except OSError as error:
            raise ConfigError(f"journal={self._parent!r}: cannot be made or written: {error}") from error
        if not os.path.exists(self._file(_ABOUT)):
            with contextlib.suppress(FileExistsError):
                replace_file(self._file(_ABOUT), encode_json(about))
        sync_folder(self.path)
        sync_folder(self._parent)
        self.check(about)

    def check(self, about: About) -> None:
        """Raise JournalMissing when it is not there, JournalError when it is of something else."""
        try:
            with open(self._file(_ABOUT), "rb") as file:
                found = msgspec.json.decode(file.read(), type=About)
        except FileNotFoundError:
            raise JournalMissing(
                f"the journal {self.path} is not there, but the query's checkpoint was made with it: what was"
                " acknowledged and not committed would be lost. Bring it back, mount it, or correct the option journal"
            ) from None
        if found != about:
            raise JournalError(
                f"the journal {self.path} is of topic {found.topic}, channel {found.channel}: a checkpoint cannot be"
                f" used for {about.topic}, {about.channel}"
            )

    # Batches

    def batch_path(self, batch: int) -> str:
        """The folder of a batch."""
        return os.path.join(self.path, f"b{batch}")

    def open_batch(self, batch: int) -> None:
        """Make its folder. Raises JournalMissing when it was committed before: its rows are gone."""
        with contextlib.suppress(FileExistsError):
            if batch <= self.committed():
                raise JournalMissing(
                    f"batch {batch} of the journal {self.path} has been committed and deleted: an older checkpoint was"
                    " put in place, or another query goes on with the same one"
                )
            os.mkdir(self.batch_path(batch), 0o700)
            sync_folder(self.path)

    def chain(self, batch: int, slot: int) -> Chain:
        """One slot of a batch."""
        return Chain(self.batch_path(batch), slot)

    def seals(self, batch: int) -> dict[int, Head]:
        """The seals of a batch, by slot; none when it is gone."""
        try:
            return seals(self.batch_path(batch))
        except FileNotFoundError:
            return {}

    def committed(self) -> int:
        """The last batch that was committed; 0 when there is none."""
        try:
            with open(self._file(_COMMITTED), "rb") as file:
                return int(file.read())
        except FileNotFoundError:
            return 0

    def usage(self) -> Usage:
        """What is on disk of batches, those included that are being deleted."""
        found: list[os.stat_result] = []
        with contextlib.suppress(OSError):  # a commit takes folders away meanwhile
            for name in os.listdir(self.path):
                if name.startswith(("b", _GONE)):
                    found += self._files(name)
        return Usage(sum(each.st_size for each in found), min((each.st_mtime for each in found), default=None))

    def size(self, batch: int) -> int:
        """The bytes on disk of a batch; none when it is gone."""
        with contextlib.suppress(OSError):
            return sum(each.st_size for each in self._files(f"b{batch}"))
        return 0

    def _files(self, folder: str) -> list[os.stat_result]:
        return [entry.stat() for entry in os.scandir(self._file(folder))]

    def commit(self, batch: int) -> None:
        """Spark will not ask again for this batch or one before it: delete them, and forget the suspects they met."""
        done = [each for each in self._batches() if each <= batch]
        self.suspects.forget(key for each in done for head in self.seals(each).values() for key in head.seen)
        if batch > self.committed():
            replace_file(self._file(_COMMITTED), str(batch).encode())
        for each in done:
            self._move_away(each)
        self._delete()

    def _move_away(self, batch: int) -> None:
        try:
            os.rename(self.batch_path(batch), self._file(f"{_GONE}{batch}-{uuid.uuid4().hex}"))
        except FileNotFoundError:
            logger.info("batch %s of %s was moved away before", batch, self.path, extra=SPARK_JOURNAL_CLEANED)

    def _delete(self) -> None:
        """Also what an earlier driver left behind."""
        for name in os.listdir(self.path):
            if name.startswith(_GONE):
                try:
                    shutil.rmtree(self._file(name))
                except OSError as error:  # a network file system keeps names of files that are mapped
                    level = logging.INFO if error.errno in (errno.ENOTEMPTY, errno.EBUSY) else logging.WARNING
                    logger.log(
                        level,
                        "%s: %s: tried again at the next commit",
                        self._file(name),
                        error,
                        extra=SPARK_JOURNAL_CLEAN_FAILED,
                    )

    def _batches(self) -> Iterator[int]:
        for name in os.listdir(self.path):
            if name.startswith("b") and name[1:].isdigit():
                yield int(name[1:])

    def _file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def keep_position(self, offset: bytes) -> None:
        """Keep where the query is, for versions of PySpark that do not say so."""
        replace_file(self._file(_POSITION), offset)

    # The plan of a batch read

    def claim_plan(self, plan: bytes) -> None:
        """Keep a plan. Raises JournalTaken when there is one."""
        claim_file(self.path, "plan.json", [plan])

    def plan(self) -> bytes | None:
        """The plan that was kept."""
        try:
            with open(self._file("plan.json"), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None


def positions(parent: str, about: About) -> list[bytes]:
    """The positions that queries of this topic and channel have kept in the journals below ``parent``."""
    found: list[bytes] = []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(parent)):
            with contextlib.suppress(OSError, JournalError):
                JournalFolder(parent, name).check(about)
                with open(os.path.join(parent, name, _POSITION), "rb") as file:
                    found.append(file.read())
    return found
