"""A journal in a file system: places are folders, entries are files.

A file is written under a temporary name and then linked to its own. ``link``
fails where the name exists, so one writer alone succeeds. A folder that is
retired is first moved away, so that it is gone at once for every task, and
deleted then.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from nsq_fast.errors import JournalClosed, JournalTaken
from nsq_fast.log_events import SPARK_JOURNAL_CLEAN_FAILED, SPARK_JOURNAL_CLEANED

from .links import check_links
from .storage import Entry

logger = logging.getLogger(__name__)

_TEMPORARY = "t-"
_RETIRED = ".gone-"


class FileStorage:
    """A folder.

    Args:
        path: where it is, or will be.
        durable: whether files are on disk before they count. Only measurements do without.
    """

    def __init__(self, path: str, *, durable: bool = True) -> None:
        self.path = path
        self._durable = durable

    def below(self, name: str) -> FileStorage:
        """The folder of this name in it."""
        return FileStorage(self._file(name), durable=self._durable)

    def make(self, *, parents: bool = False) -> None:
        """Make the folder, readable by its owner only. Raises OSError, also where something else has its name."""
        if parents:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
        try:
            os.mkdir(self.path, 0o700)
        except FileExistsError:
            if not os.path.isdir(self.path):
                raise
        _sync_folder(os.path.dirname(self.path))

    def check(self) -> None:
        """Raise ConfigError when two writers could claim the same name."""
        check_links(self.path)

    def claim(self, name: str, buffers: Sequence[Any]) -> None:
        """Write a file that must not be there; it and its name are on disk when this returns. Raises OSError, too."""
        try:
            self._claim(name, buffers)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            raise JournalClosed(
                f"{self.path} is not there: the batch has been committed by another attempt, or the journal is not on a"
                " file system that the driver and all executors share"
            ) from None

    def _claim(self, name: str, buffers: Sequence[Any]) -> None:
        with _written(self.path, buffers, self._durable) as (descriptor, temporary):
            _link(descriptor, temporary, self._file(name))
        if self._durable:
            _sync_folder(self.path)

    def replace(self, name: str, data: bytes) -> None:
        """Write a file completely, or leave the one that was there. Raises OSError."""
        with _written(self.path, [data] if data else [], durable=True) as (_, temporary):
            os.replace(temporary, self._file(name))

    def view(self, name: str) -> memoryview:
        """The file, mapped."""
        with open(self._file(name), "rb") as file:
            if not (size := os.fstat(file.fileno()).st_size):
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))

    def remove(self, name: str) -> None:
        """Delete a file, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._file(name))

    def names(self) -> list[str]:
        """Of files and folders, without those of files that are being written."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(name for name in os.listdir(self.path) if not name.startswith(_TEMPORARY))
        return []

    def tree(self, prefix: str) -> list[Entry]:
        """The files in the folders of this one, those included that are being deleted."""
        return [entry for entry in self._tree(prefix.partition("/")[0]) if entry.name.startswith(prefix)]

    def _tree(self, folder: str) -> Iterator[Entry]:
        with contextlib.suppress(OSError):  # a commit takes folders away meanwhile
            for name in self.names():
                if name.startswith(folder) and os.path.isdir(self._file(name)):
                    for file in os.scandir(self._file(name)):
                        found = file.stat()
                        yield Entry(f"{name}/{file.name}", found.st_size, found.st_mtime)

    def retire(self, name: str) -> None:
        """Move a folder away."""
        try:
            os.rename(self._file(name), self._file(f"{name}{_RETIRED}{uuid.uuid4().hex}"))
        except FileNotFoundError:
            logger.info("%s was moved away before", self._file(name), extra=SPARK_JOURNAL_CLEANED)

    def sweep(self) -> None:
        """Delete the folders that were moved away."""
        for name in self.names():
            if _RETIRED in name:
                self._sweep(self._file(name))

    def _sweep(self, folder: str) -> None:
        try:
            shutil.rmtree(folder)
        except OSError as error:  # a network file system keeps names of files that are mapped
            logger.log(
                logging.INFO if error.errno in (errno.ENOTEMPTY, errno.EBUSY) else logging.WARNING,
                "%s: %s: tried again at the next commit",
                folder,
                error,
                extra=SPARK_JOURNAL_CLEAN_FAILED,
            )

    def _file(self, name: str) -> str:
        return os.path.join(self.path, name)


@contextlib.contextmanager
def _written(folder: str, buffers: Sequence[Any], durable: bool) -> Iterator[tuple[int, str]]:
    """A new file with these bytes under a temporary name, which is removed at the end."""
    temporary = os.path.join(folder, _TEMPORARY + uuid.uuid4().hex)
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        _write(descriptor, buffers)
        if durable:
            os.fsync(descriptor)
        yield descriptor, temporary
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _write(descriptor: int, buffers: Sequence[Any]) -> None:
    total = sum(len(buffer) for buffer in buffers)
    written = os.writev(descriptor, buffers) if total else 0
    if written < total:  # a full disk raises; a network file system may take less than all
        rest = memoryview(b"".join(buffers))[written:]
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def _link(descriptor: int, temporary: str, final: str) -> None:
    try:
        os.link(temporary, final)
    except FileExistsError:
        # A network file system may repeat a request whose answer was lost, and then find its own work.
        if os.fstat(descriptor).st_nlink < 2:
            raise JournalTaken(f"{final} has been written by another attempt") from None


def _sync_folder(folder: str) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
