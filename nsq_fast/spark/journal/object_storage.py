"""A journal in an object store: places are prefixes, entries are objects.

An entry is claimed by a conditional put (``If-None-Match: *``), which the store
refuses when there is an object of that key. A place is there as long as its
marker, an empty object, is. The driver retires a place by deleting the marker,
and deletes what is in it then. So whoever has claimed an entry looks for the
marker afterwards: if it is there, the place had not been retired when the
entry was claimed. If it is not, the entry does not count.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import IO, Any

from nsq_fast.errors import ConfigError, JournalClosed, JournalStorageFailed, JournalTaken

from .s3 import Bucket
from .storage import Entry

_MARKER = ".open"


class ObjectStorage:
    """The objects below a prefix.

    Args:
        prefix: without a slash at its end.
    """

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix + "/" if prefix else ""
        self._copies = _Copies()

    @property
    def path(self) -> str:
        """As a URL."""
        return f"s3://{self._bucket.name}/{self._prefix}".rstrip("/")

    def below(self, name: str) -> ObjectStorage:
        """What lies below a longer prefix."""
        return ObjectStorage(self._bucket, self._prefix + name)

    def make(self, *, parents: bool = False) -> None:
        """Write the marker. A prefix needs no parents."""
        self._bucket.put_new(self._key(_MARKER), b"")

    def check(self) -> None:
        """Raise ConfigError for a store that lets a second writer replace what the first has written."""
        key = self._key(f"t-{uuid.uuid4().hex}")
        try:
            if self._bucket.put_new(key, b"") and self._bucket.put_new(key, b""):
                raise ConfigError(
                    f"journal={self.path!r}: this object store replaces an object although it is asked not to"
                    " (If-None-Match): two attempts of a task could write the same file"
                )
        finally:
            with contextlib.suppress(JournalStorageFailed):
                self._bucket.delete([key])

    def claim(self, name: str, buffers: Sequence[Any]) -> None:
        """Write an object that must not be there. Raises JournalStorageFailed, too."""
        data = b"".join(buffers)
        key = self._key(name)
        if not self._bucket.put_new(key, data):
            raise JournalTaken(f"{self.path}/{name} has been written by another attempt")
        if not self._bucket.exists(self._key(_MARKER)):
            with contextlib.suppress(JournalStorageFailed):  # the driver's next sweep finds it
                self._bucket.delete([key])
            raise JournalClosed(
                f"{self.path} is not there: the batch has been committed by another attempt, or the journal was deleted"
            )
        self._copies.keep(name, data)

    def replace(self, name: str, data: bytes) -> None:
        """Write an object. Raises JournalStorageFailed."""
        self._bucket.put(self._key(name), data)

    def view(self, name: str) -> memoryview:
        """The bytes of an object; what was claimed here is not fetched. Raises JournalStorageFailed, too."""
        copy = self._copies.get(name)
        return memoryview(self._bucket.get(self._key(name)) if copy is None else copy)

    def remove(self, name: str) -> None:
        """Delete an object, if there is one."""
        self._bucket.delete([self._key(name)])

    def names(self) -> list[str]:
        """Of objects, and of longer prefixes."""
        return [name for name in self._bucket.names(self._prefix) if name != _MARKER]

    def tree(self, prefix: str) -> list[Entry]:
        """The objects below longer prefixes."""
        found = []
        for each in self._bucket.objects(self._key(prefix)):
            name = each.key[len(self._prefix) :]
            place, _, rest = name.partition("/")
            if place and rest not in ("", _MARKER):
                found.append(Entry(name, each.size, each.written_at))
        return found

    def retire(self, name: str) -> None:
        """Delete the marker."""
        self._bucket.delete([self._key(f"{name}/{_MARKER}")])

    def sweep(self) -> None:
        """Delete what lies below prefixes without a marker. Raises JournalStorageFailed."""
        keys: defaultdict[str, list[str]] = defaultdict(list)
        for each in self._bucket.objects(self._prefix):
            place, slash, _ = each.key[len(self._prefix) :].partition("/")
            if slash:
                keys[place].append(each.key)
        retired = [found for place, found in keys.items() if self._key(f"{place}/{_MARKER}") not in found]
        self._bucket.delete(key for found in retired for key in found)

    def _key(self, name: str) -> str:
        return self._prefix + name


class _Copies:
    """What was written from here, in a temporary file without a name: a task hands on rows that it has just stored."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._places: dict[str, tuple[int, int]] = {}
        self._end = 0

    def keep(self, name: str, data: bytes) -> None:
        """Keep a copy, unless the disk is full: then it is fetched."""
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="nsq-journal-", buffering=0)  # noqa: SIM115  # closed with us
            if os.pwrite(self._file.fileno(), data, self._end) == len(data):
                self._places[name] = self._end, len(data)
                self._end += len(data)

    def get(self, name: str) -> bytes | None:
        """The copy."""
        if self._file is None or name not in self._places:
            return None
        start, size = self._places[name]
        return os.pread(self._file.fileno(), size, start)
