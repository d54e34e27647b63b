"""A journal in an object store; imported where one is named, as it needs boto3."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import IO, Any, NamedTuple

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from nsq_fast.errors import ConfigError, JournalClosed, JournalStorageFailed, JournalTaken
from nsq_fast.spark.options import ObjectStore

from .files import Entry

# The requests of S3 that a journal is made of. Errors say what failed, where, and what to do.
#
# A request that fails is repeated as boto3 is set to do it (AWS_RETRY_MODE,
# AWS_MAX_ATTEMPTS); its credentials come from where boto3 looks for them.


_TOKEN = "nsq-fast-writer"  # in the metadata of an object
_TAKEN = 412
_CONFLICT = 409
_MISSING = {"NoSuchKey", "404"}
_CONFLICT_PAUSE = 0.1
_CONFLICT_TRIES = 20
_DELETED_AT_ONCE = 1000
_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 30}

_HINTS = {
    "NoSuchBucket": "create the bucket, or correct the option journal",
    "AccessDenied": "s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket must be allowed",
}
_NO_CREDENTIALS = "give them to driver and executors as to any program that uses boto3"
_AGAIN = "nothing was acknowledged that is not stored; run the task or the query again when the object store answers"


class Object(NamedTuple):
    """An object as a listing shows it; ``written_at`` in seconds since the epoch."""

    key: str
    size: int
    written_at: float


class Bucket:
    """A bucket. Raises ConfigError for settings of boto3 that cannot be.

    Its requests raise JournalStorageFailed when they fail; it is unknown then whether they were carried out.
    """

    def __init__(self, name: str, store: ObjectStore) -> None:
        self.name = name
        try:
            self._client = _client(store)
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(f"journal=s3://{name}: {error}; see journalEndpoint and boto3's settings") from error

    def put(self, key: str, data: bytes) -> None:
        """Write an object, in place of the one that there may be."""
        self._call("put_object", key, Key=key, Body=data)

    def put_new(self, key: str, data: bytes) -> bool:
        """Write an object unless there is one; False when another writer's is there."""
        token = uuid.uuid4().hex
        for tries_left in reversed(range(_CONFLICT_TRIES)):
            try:
                self._call("put_object", key, Key=key, Body=data, IfNoneMatch="*", Metadata={_TOKEN: token})
                return True
            except JournalStorageFailed as error:
                status = _status(error.__cause__)
                if status == _TAKEN:
                    # A request whose answer was lost is repeated, and then finds its own work.
                    return self._writer(key) == token
                if status != _CONFLICT or not tries_left:
                    raise
            time.sleep(_CONFLICT_PAUSE)  # another request for this key is being carried out
        raise AssertionError("the last try returns or raises")

    def _writer(self, key: str) -> str | None:
        try:
            found: dict[str, str] = self._call("head_object", key, Key=key)["Metadata"]
        except FileNotFoundError:
            return None
        return found.get(_TOKEN)

    def exists(self, key: str) -> bool:
        """Whether there is this object."""
        try:
            self._call("head_object", key, Key=key)
        except FileNotFoundError:
            return False
        return True

    def get(self, key: str) -> bytes:
        """The bytes of an object. Raises FileNotFoundError."""
        try:
            data: bytes = self._call("get_object", key, Key=key)["Body"].read()
        except BotoCoreError as error:  # the connection was lost within the body
            raise self._failed("get_object", key, error) from error
        return data

    def objects(self, prefix: str) -> Iterator[Object]:
        """The objects whose keys begin with ``prefix``."""
        for page in self._pages(prefix):
            for each in page.get("Contents", ()):
                yield Object(each["Key"], each["Size"], each["LastModified"].timestamp())

    def names(self, prefix: str) -> list[str]:
        """What stands between ``prefix`` and the next slash, or the end, in the keys that begin with it; sorted."""
        found: set[str] = set()
        for page in self._pages(prefix, Delimiter="/"):
            found.update(each["Key"] for each in page.get("Contents", ()))
            found.update(each["Prefix"] for each in page.get("CommonPrefixes", ()))
        return sorted(key[len(prefix) :].rstrip("/") for key in found)

    def _pages(self, prefix: str, **given: str) -> Iterator[dict[str, Any]]:
        more: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", prefix, Prefix=prefix, **given, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, if they are there."""
        left = iter(keys)
        while some := [{"Key": key} for key in islice(left, _DELETED_AT_ONCE)]:
            done = self._call("delete_objects", some[0]["Key"], Delete={"Objects": some, "Quiet": True})
            for error in done.get("Errors", ()):
                raise JournalStorageFailed(f"s3://{self.name}/{error['Key']}: not deleted: {error.get('Message')}")

    def _call(self, operation: str, key: str, **given: Any) -> dict[str, Any]:
        try:
            found: dict[str, Any] = getattr(self._client, operation)(Bucket=self.name, **given)
        except ClientError as error:
            if _code(error) in _MISSING:
                raise FileNotFoundError(errno.ENOENT, "no such object", f"s3://{self.name}/{key}") from None
            raise self._failed(operation, key, error) from error
        except BotoCoreError as error:
            raise self._failed(operation, key, error) from error
        return found

    def _failed(self, operation: str, key: str, error: Exception) -> JournalStorageFailed:
        hint = _NO_CREDENTIALS if isinstance(error, NoCredentialsError) else _HINTS.get(_code(error), _AGAIN)
        where = self._client.meta.endpoint_url
        return JournalStorageFailed(f"s3://{self.name}/{key}: {operation} at {where} failed: {error}; {hint}")


@lru_cache(maxsize=8)
def _client(store: ObjectStore) -> Any:
    """One for each process, as it takes long to make; threads share it."""
    config = Config(**_TIMEOUTS, user_agent_extra="nsq_fast")
    return boto3.session.Session().client("s3", endpoint_url=store.endpoint, region_name=store.region, config=config)


def _status(error: BaseException | None) -> int | None:
    if isinstance(error, ClientError):
        status: int | None = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status
    return None


def _code(error: BaseException) -> str:
    return str(error.response.get("Error", {}).get("Code")) if isinstance(error, ClientError) else ""


# A journal in an object store: places are prefixes, entries are objects.
#
# An entry is claimed by a conditional put (``If-None-Match: *``), which the store
# refuses when there is an object of that key. A place is there as long as its
# marker, an empty object, is. The driver retires a place by deleting the marker,
# and deletes what is in it then. So whoever has claimed an entry looks for the
# marker afterwards: if it is there, the place had not been retired when the
# entry was claimed. If it is not, the entry does not count.


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
