"""The requests of S3 that a journal is made of. Errors say what failed, where, and what to do.

A request that fails is repeated as boto3 is set to do it (AWS_RETRY_MODE,
AWS_MAX_ATTEMPTS); its credentials come from where boto3 looks for them.
"""

from __future__ import annotations

import errno
import time
import uuid
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from nsq_fast.errors import ConfigError, JournalStorageFailed
from nsq_fast.spark.options import ObjectStore

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
