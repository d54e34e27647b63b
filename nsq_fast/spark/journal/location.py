"""Where a journal lies: what the option ``journal`` says, and the storage that it means."""

from __future__ import annotations

import os
import re

from nsq_fast.errors import ConfigError
from nsq_fast.spark.options import ObjectStore

from .file_storage import FileStorage
from .links import NEEDED
from .storage import Storage

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
        except ModuleNotFoundError as error:
            raise ConfigError(f"journal={path!r}: needs {error.name}: pip install 'nsq-fast[spark-s3]'") from error


def open_storage(path: str, store: ObjectStore) -> Storage:
    """The storage at a path that ``check_path`` has let pass, or of a place below it.

    Raises ConfigError when a library is missing.
    """
    if not is_object_store(path):
        return FileStorage(path)
    check_library(path)
    from .object_storage import ObjectStorage  # here, as it imports what only an extra brings
    from .s3 import Bucket

    bucket, _, prefix = path[len(_OBJECTS) :].partition("/")
    return ObjectStorage(Bucket(bucket, store), prefix)
