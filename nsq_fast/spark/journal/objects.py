"""A journal in an object store: places are prefixes, entries are objects. Imported where one is named: needs obstore.

An entry is claimed by a conditional put (``If-None-Match: *``), which the store
refuses when there is an object of that key. A place is there as long as its
marker, an empty object, is. The driver retires a place by deleting the marker,
and deletes what is in it then. So whoever has claimed an entry looks for the
marker afterwards: if it is there, the place had not been retired when the
entry was claimed. If it is not, the entry does not count.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import IO, Any
from urllib.parse import urlsplit

import boto3
import obstore
from botocore.exceptions import BotoCoreError
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError
from obstore.store import S3Store

from nsq_fast.errors import ConfigError, JournalClosed, JournalStorageFailed, JournalTaken
from nsq_fast.spark.options import ObjectStore

from .files import Entry

_MARKER = ".open"
_TOKEN = "nsq-fast-writer"  # in the metadata of an object
_CONFLICT_PAUSE = 0.1
_CONFLICT_TRIES = 20
_TIMEOUTS = {"connect_timeout": "10s", "timeout": "60s", "allow_http": True}
_RETRIES = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
}

_NO_BUCKET = "create the bucket, or correct the option journal"
_DENIED = "s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket must be allowed"
_NO_CREDENTIALS = "no credentials; give them to driver and executors as to any program that uses boto3"
_AGAIN = "nothing was acknowledged that is not stored; run the task or the query again when the object store answers"


@lru_cache(maxsize=8)
def _connect(bucket: str, store: ObjectStore) -> Any:
    """One for each process; threads share it. Raises ConfigError for settings that cannot be."""
    try:
        session = boto3.session.Session(region_name=store.region)
        endpoint = store.endpoint or session.client("s3").meta.endpoint_url
        if not urlsplit(endpoint).hostname:
            raise ValueError(f"Invalid endpoint: {endpoint}")
        if session.get_credentials() is None:
            raise JournalStorageFailed(f"s3://{bucket}: {_NO_CREDENTIALS}")
        return S3Store(
            bucket,
            endpoint=endpoint,
            region=session.region_name,
            credential_provider=Boto3CredentialProvider(session),
            conditional_put="etag",
            client_options=_TIMEOUTS,
            retry_config=_RETRIES,
        )
    except (BotoCoreError, ValueError, BaseError) as error:
        raise ConfigError(f"journal=s3://{bucket}: {_line(error)}; see journalEndpoint and boto3's settings") from error


def _line(error: BaseException) -> str:
    """What an error says, without its source."""
    return " ".join(str(error).partition("\n\nDebug source")[0].split())


class ObjectStorage:
    """The objects below a prefix, which has no slash at its end.

    Requests raise JournalStorageFailed when they fail; it is unknown then whether they were carried out.
    """

    def __init__(self, bucket: str, prefix: str, store: ObjectStore) -> None:
        self._bucket = bucket
        self._prefix = prefix + "/" if prefix else ""
        self._store = store
        self._objects = _connect(bucket, store)
        self._copies = _Copies()

    @property
    def path(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def below(self, name: str) -> ObjectStorage:
        return ObjectStorage(self._bucket, self._prefix + name, self._store)

    def make(self, *, parents: bool = False) -> None:
        """Write the marker. A prefix needs no parents."""
        self._put_new(_MARKER, b"")

    def check(self) -> None:
        name = f"t-{uuid.uuid4().hex}"
        try:
            if self._put_new(name, b"") and self._put_new(name, b""):
                raise ConfigError(
                    f"journal={self.path!r}: this object store replaces an object although it is asked not to"
                    " (If-None-Match): two attempts of a task could write the same file"
                )
        finally:
            with contextlib.suppress(JournalStorageFailed):
                self.remove(name)

    def claim(self, name: str, buffers: Sequence[Any]) -> None:
        data = b"".join(buffers)
        if not self._put_new(name, data):
            raise JournalTaken(f"{self.path}/{name} has been written by another attempt")
        if not self._exists(_MARKER):
            with contextlib.suppress(JournalStorageFailed):  # the driver's next sweep finds it
                self.remove(name)
            raise JournalClosed(
                f"{self.path} is not there: the batch has been committed by another attempt, or the journal was deleted"
            )
        self._copies.keep(name, data)

    def replace(self, name: str, data: bytes) -> None:
        with self._told(name):
            obstore.put(self._objects, self._key(name), data, use_multipart=False)

    def view(self, name: str) -> memoryview:
        """The bytes of an object; what was claimed here is not fetched."""
        copy = self._copies.get(name)
        if copy is None:
            with self._told(name):
                copy = bytes(obstore.get(self._objects, self._key(name)).bytes())
        return memoryview(copy)

    def remove(self, name: str) -> None:
        self._delete([self._key(name)])

    def names(self) -> list[str]:
        with self._told(""):
            found = obstore.list_with_delimiter(self._objects, self._prefix.rstrip("/"))
        keys = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted(name for key in keys if (name := key[len(self._prefix) :].rstrip("/")) != _MARKER)

    def tree(self, prefix: str) -> list[Entry]:
        whole, slash, _ = prefix.rpartition("/")  # a store lists what lies below whole names
        found = []
        for key, size, written_at in self._list(self._key(whole) if slash else self._prefix.rstrip("/")):
            name = key[len(self._prefix) :]
            place, _, rest = name.partition("/")
            if name.startswith(prefix) and place and rest not in ("", _MARKER):
                found.append(Entry(name, size, written_at))
        return found

    def retire(self, name: str) -> None:
        """Delete the marker."""
        self.remove(f"{name}/{_MARKER}")

    def sweep(self) -> None:
        """Delete what lies below prefixes without a marker."""
        keys: defaultdict[str, list[str]] = defaultdict(list)
        for key, _, _ in self._list(self._prefix.rstrip("/")):
            place, slash, _ = key[len(self._prefix) :].partition("/")
            if slash:
                keys[place].append(key)
        retired = [found for place, found in keys.items() if self._key(f"{place}/{_MARKER}") not in found]
        self._delete([key for found in retired for key in found])

    # Requests

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _put_new(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; False when another writer's is there."""
        token = uuid.uuid4().hex
        for _ in range(_CONFLICT_TRIES):
            try:
                with self._told(name):
                    obstore.put(self._objects, self._key(name), data, mode="create", attributes={_TOKEN: token})
                return True
            except AlreadyExistsError:
                # A request whose answer was lost is repeated, and then finds its own work.
                with contextlib.suppress(FileNotFoundError), self._told(name):
                    found = obstore.get(self._objects, self._key(name))
                    return bool(found.attributes.get(_TOKEN) == token)
            time.sleep(_CONFLICT_PAUSE)  # another request for this key is being carried out
        raise JournalStorageFailed(f"{self.path}/{name}: other requests for it do not end; {_AGAIN}")

    def _exists(self, name: str) -> bool:
        with contextlib.suppress(FileNotFoundError), self._told(name):
            obstore.head(self._objects, self._key(name))
            return True
        return False

    def _list(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        """Key, size and time of the objects below a prefix."""
        with self._told(""):
            for some in obstore.list(self._objects, prefix or None):
                for each in some:
                    yield each["path"], each["size"], each["last_modified"].timestamp()

    def _delete(self, keys: list[str]) -> None:
        if keys:
            with self._told(""):
                obstore.delete(self._objects, keys)

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Errors of a request say what failed, where, and what to do."""
        path = f"{self.path}/{name}".rstrip("/")
        try:
            yield
        except AlreadyExistsError:
            raise
        except (BaseError, BotoCoreError, FileNotFoundError) as error:
            is_bucket = "NoSuchBucket" in str(error)
            if isinstance(error, FileNotFoundError) and not is_bucket:
                raise FileNotFoundError(errno.ENOENT, "no such object", path) from None
            hint = _NO_BUCKET if is_bucket else _DENIED if isinstance(error, PermissionDeniedError) else _AGAIN
            raise JournalStorageFailed(f"{path}: {_line(error)}; {hint}") from error


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
        if self._file is None or name not in self._places:
            return None
        start, size = self._places[name]
        return os.pread(self._file.fileno(), size, start)
