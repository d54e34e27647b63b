"""Where a journal lies, what it needs of the storage there, and the one of file systems."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from nsq_fast._lazy import get_logger
from nsq_fast.errors import ConfigError, JournalClosed, JournalStorageFailed, JournalTaken
from nsq_fast.log_events import SPARK_JOURNAL_CLEAN_FAILED, SPARK_JOURNAL_CLEANED
from nsq_fast.spark.options import ObjectStore

logger: logging.Logger = get_logger(__name__)


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
        """Make the place, for its owner only; without effect when it is there. Raises JournalStorageFailed.

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
        """The bytes of an entry. They stay readable when it is deleted.

        Raises FileNotFoundError, JournalStorageFailed.
        """

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


# Whether ``link`` is what a journal in a file system needs. It is tried in the folder itself.


NEEDED = (
    "a journal needs a local or network file system with hard links (ext4, XFS, NFS...), mounted at the same path on"
    " the driver and all executors: two attempts of a task must not be able to write the same file"
)


def check_links(folder: str) -> None:
    """Prove in an existing folder that ``link`` makes a second name, and refuses one that there is.

    Raises ConfigError where it does not.
    """
    first, second = (os.path.join(folder, f"t-{uuid.uuid4().hex}") for _ in range(2))
    try:
        for path in (first, second):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        if not _refuses(first, second):
            raise ConfigError(f"journal={folder!r}: link() replaces a file that there is; {NEEDED}")
        os.unlink(second)
        os.link(first, second)
        if not os.path.samefile(first, second):
            raise ConfigError(f"journal={folder!r}: link() makes a copy; {NEEDED}")
    except OSError as error:
        raise ConfigError(f"journal={folder!r}: {error.strerror or error}; {NEEDED}") from error
    finally:
        for path in (first, second):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _refuses(existing: str, taken: str) -> bool:
    try:
        os.link(existing, taken)
    except FileExistsError:
        return True
    return False


# A journal in a file system: places are folders, entries are files.
#
# A file is written under a temporary name and then linked to its own. ``link``
# fails where the name exists, so one writer alone succeeds. A folder that is
# retired is first moved away, so that it is gone at once for every task, and
# deleted then.


_TEMPORARY = "t-"
_RETIRED = ".gone-"


class FileStorage:
    """A folder, which is at ``path`` or will be."""

    def __init__(self, path: str) -> None:
        self.path = path

    def below(self, name: str) -> FileStorage:
        return FileStorage(self._file(name))

    def make(self, *, parents: bool = False) -> None:
        try:
            if parents:
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
            try:
                os.mkdir(self.path, 0o700)
            except FileExistsError:
                if not os.path.isdir(self.path):
                    raise
            _sync_folder(os.path.dirname(self.path))
        except OSError as error:
            raise _failed(self.path, error, "made") from error

    def check(self) -> None:
        check_links(self.path)

    def claim(self, name: str, buffers: Sequence[Any]) -> None:
        """Write a file that must not be there; it and its name are on disk when this returns.

        Raises JournalStorageFailed, too.
        """
        try:
            with _written(self.path, buffers) as (descriptor, temporary):
                _link(descriptor, temporary, self._file(name))
            _sync_folder(self.path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise _failed(self._file(name), error) from error
            raise JournalClosed(
                f"{self.path} is not there: the batch has been committed by another attempt, or the journal is not on a"
                " file system that the driver and all executors share"
            ) from None

    def replace(self, name: str, data: bytes) -> None:
        try:
            with _written(self.path, [data]) as (_, temporary):
                os.replace(temporary, self._file(name))
        except OSError as error:
            raise _failed(self._file(name), error) from error

    def view(self, name: str) -> memoryview:
        with _readable(self._file(name)), open(self._file(name), "rb") as file:
            if not (size := os.fstat(file.fileno()).st_size):
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._file(name))

    def names(self) -> list[str]:
        """Of files and folders, without those of files that are being written."""
        with contextlib.suppress(FileNotFoundError), _readable(self.path):
            return sorted(name for name in os.listdir(self.path) if not name.startswith(_TEMPORARY))
        return []

    def tree(self, prefix: str) -> list[Entry]:
        return [entry for entry in self._tree(prefix.partition("/")[0]) if entry.name.startswith(prefix)]

    def _tree(self, folder: str) -> Iterator[Entry]:
        with contextlib.suppress(OSError, JournalStorageFailed):  # a commit takes folders away meanwhile
            for name in self.names():
                if name.startswith(folder) and os.path.isdir(self._file(name)):
                    for file in os.scandir(self._file(name)):
                        found = file.stat()
                        yield Entry(f"{name}/{file.name}", found.st_size, found.st_mtime)

    def retire(self, name: str) -> None:
        try:
            os.rename(self._file(name), self._file(f"{name}{_RETIRED}{uuid.uuid4().hex}"))
        except FileNotFoundError:
            logger.info("%s was moved away before", self._file(name), extra=SPARK_JOURNAL_CLEANED)

    def sweep(self) -> None:
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
def _written(folder: str, buffers: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """A new file with these bytes under a temporary name, which is removed at the end."""
    temporary = os.path.join(folder, _TEMPORARY + uuid.uuid4().hex)
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        _write(descriptor, buffers)
        os.fsync(descriptor)
        yield descriptor, temporary
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(temporary)


_AT_ONCE = 256 * 1024
"""Bytes of one write. Linux takes pages that hold all of it, and larger ones are rarely at hand: they made the write of
a segment of 2.4 MB up to seven times as dear (nsq-fast bench: spark-read)."""


def _write(descriptor: int, buffers: Sequence[Any]) -> None:
    group: list[memoryview] = []
    room = _AT_ONCE
    for buffer in buffers:
        rest = memoryview(buffer)
        while rest:
            group.append(rest[:room])
            rest = rest[room:]
            room -= len(group[-1])
            if not room:
                _write_group(descriptor, group)
                group, room = [], _AT_ONCE
    _write_group(descriptor, group)


def _write_group(descriptor: int, buffers: list[memoryview]) -> None:
    total = sum(map(len, buffers))
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


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Errors of the disk say what it is that cannot be read; what is not there is up to the caller."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise JournalStorageFailed(
            f"journal: {path} cannot be read: {error.strerror or error}. Its rows are nowhere else: mend the disk, or"
            " its mount, and start the query again"
        ) from error


def _failed(path: str, error: OSError, done: str = "written") -> JournalStorageFailed:
    return JournalStorageFailed(
        f"journal: {path} cannot be {done}: {error.strerror or error}. Nothing was acknowledged for it: make room on"
        " the disk, or mend it, and start the query again"
    )


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Where a journal lies: what the option ``journal`` says, and the storage that it means.


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_S3 = re.compile(r"s3[an]?://")
_OBJECTS = "s3://"


def check_path(journal: str) -> str:
    """The folder as an absolute path, or the place in an object store as ``s3://bucket/prefix``.

    Raises ConfigError for what is neither.
    """
    if found := _S3.match(journal):
        return _OBJECTS + _check_objects(journal[found.end() :])
    path = journal[len("file:") :] if journal.startswith("file:/") else journal
    if path.startswith("//"):
        path = "/" + path.lstrip("/")
    if _URL.match(path):
        raise ConfigError(f"journal={journal!r}: neither a path nor s3://bucket/prefix; {NEEDED}")
    if not os.path.isabs(path):
        raise ConfigError(f"journal={journal!r}: must be an absolute path: executors have other working directories")
    return os.path.normpath(path)


def _check_objects(place: str) -> str:
    bucket, *parts = place.split("/")
    if "@" in bucket:  # not shown: there may be a secret in it
        raise ConfigError("journal: must hold no credentials; boto3 finds them in its environment")
    if not bucket:
        raise ConfigError(f"journal='s3://{place}': names no bucket: s3://bucket/prefix")
    return "/".join([bucket, *filter(None, parts)])


def is_object_store(path: str) -> bool:
    """Whether a path that ``check_path`` has let pass is in an object store."""
    return path.startswith(_OBJECTS)


def check_library(path: str) -> None:
    """Raise ConfigError when what the storage at ``path`` needs is not installed."""
    if is_object_store(path):
        try:
            import boto3  # noqa: F401
            import obstore  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigError(f"journal={path!r}: needs {error.name}: pip install 'nsq-fast[spark-s3]'") from error


def open_storage(path: str, store: ObjectStore) -> Storage:
    """The storage at a path that ``check_path`` has let pass, or of a place below it.

    Raises ConfigError when a library is missing.
    """
    if not is_object_store(path):
        return FileStorage(path)
    check_library(path)
    from .objects import ObjectStorage  # here, as it imports what only an extra brings

    bucket, _, prefix = path[len(_OBJECTS) :].partition("/")
    return ObjectStorage(bucket, prefix, store)
