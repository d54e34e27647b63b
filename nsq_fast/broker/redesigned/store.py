"""What of a cluster survives its process: its topics, who leads them, the logs, and where the channels are.

In the data path::

    nsqd<n>/cluster.json                  topics, and the last decision about each partition: the same on every node
    nsqd<n>/t.<topic>/<number>.log        what that node has of the partition (log_file.py)
    nsqd<n>/t.<topic>/<number>.channels   where its channels are, as that node was last told
    *.bad                                 a file that was damaged, as it was found

Nodes are named by their numbers here, as their ids hold ports, which may be others next time. A JSON file is one line,
and its CRC-32 in a line of its own; it is replaced as a whole.
"""

from __future__ import annotations

import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from nsq_fast.broker.diskqueue.files import replace_file, set_aside
from nsq_fast.broker.nsqd.store import Store as DataPath
from nsq_fast.log_events import BROKER_METADATA_INVALID

from .log_file import LogFile

logger = logging.getLogger("nsq_fast.broker.redesigned.store")

_STATE = "cluster.json"
_PREFIX = "t."
"""Keeps a topic called ".." where it belongs."""


class StoredChannel(msgspec.Struct):
    """Where a channel is: everything before ``position`` is done, and so are the ranges ``ahead`` of it."""

    position: int
    ahead: list[tuple[int, int]] = []
    ordered: bool = False
    paused: bool = False
    skipped: bool = False


class StoredPartition(msgspec.Struct):
    """The last decision about a partition, nodes by their numbers; and the names of its channels."""

    replicas: list[int]
    epoch: int
    leader: int | None
    isr: list[int]
    channels: list[str] = []


class StoredTopic(msgspec.Struct):
    """A topic: its meta data by name, and its partitions in the order of their numbers."""

    meta: dict[str, int | bool | list[str]]
    partitions: list[StoredPartition]


class StoredCluster(msgspec.Struct):
    """The content of cluster.json; the copy with the greatest ``version`` is the one that counts."""

    version: int = 0
    topics: dict[str, StoredTopic] = {}


FileT = TypeVar("FileT")
ItemT = TypeVar("ItemT")


class ClusterStore:
    """The data path of a cluster, locked against others. Raises OSError, DataPathError, when it cannot be used."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._path.mkdir(parents=True, exist_ok=True)
        self._lock = DataPath(os.fspath(path))

    def close(self) -> None:
        """Give the folder up."""
        self._lock.close()

    # --- logs --------------------------------------------------------------------------------------------------------

    def log_file(self, node: int, topic: str, number: int, magic_code: int) -> LogFile:
        """The file of a replica."""
        return LogFile(self._folder(node, topic) / f"{number}.log", magic_code)

    def delete_topic(self, topic: str, nodes: Iterable[int]) -> None:
        """Remove what there is of a topic; its logs are closed."""
        for node in nodes:
            shutil.rmtree(self._folder(node, topic), ignore_errors=True)

    def _folder(self, node: int, topic: str) -> Path:
        return self._node_folder(node) / f"{_PREFIX}{topic}"

    def _node_folder(self, node: int) -> Path:
        return self._path / f"nsqd{node}"

    # --- decisions ---------------------------------------------------------------------------------------------------

    def save(self, cluster: StoredCluster, nodes: Iterable[int]) -> None:
        """Write down all topics and decisions on every node that can; raises the OSError of one that cannot."""
        content = _encode(cluster)

        def write(node: int) -> None:
            folder = self._node_folder(node)
            folder.mkdir(exist_ok=True)
            replace_file(folder / _STATE, content, sync=True)

        for_each(nodes, write)

    def load(self, nodes: Iterable[int]) -> StoredCluster:
        """The topics and decisions; none where every copy is missing or damaged."""
        copies = [_read(self._node_folder(node) / _STATE, StoredCluster) for node in nodes]
        return max((copy for copy in copies if copy), key=lambda copy: copy.version, default=StoredCluster())

    # --- channels ----------------------------------------------------------------------------------------------------

    def save_channels(self, node: int, topic: str, number: int, channels: dict[str, StoredChannel]) -> None:
        """Write down where the channels of a partition are. Raises OSError."""
        folder = self._folder(node, topic)
        folder.mkdir(parents=True, exist_ok=True)
        # Not synced: one that a power loss breaks only makes messages come again.
        replace_file(folder / f"{number}.channels", _encode(channels), sync=False)

    def load_channels(self, node: int, topic: str, number: int) -> dict[str, StoredChannel]:
        """Where the channels are; none where the file is missing or damaged."""
        return _read(self._folder(node, topic) / f"{number}.channels", dict[str, StoredChannel]) or {}


def for_each(items: Iterable[ItemT], write: Callable[[ItemT], None]) -> None:
    """Write something for each item; raises the OSError of one that failed when all have had their turn."""
    failures = [failure for item in items if (failure := _failure_of(write, item)) is not None]
    if failures:
        raise failures[0]


def _failure_of(write: Callable[[ItemT], None], item: ItemT) -> OSError | None:
    try:
        write(item)
    except OSError as error:
        return error
    return None


def _encode(content: object) -> bytes:
    text = msgspec.json.encode(content)
    return b"%b\n%08x\n" % (text, zlib.crc32(text))


def _read(path: Path, kind: type[FileT]) -> FileT | None:
    """The content of a file; None where there is none. One that is damaged is kept under another name."""
    try:
        text, _, rest = path.read_bytes().partition(b"\n")
        if rest != b"%08x\n" % zlib.crc32(text):
            raise ValueError("its checksum is wrong")
        return msgspec.json.decode(text, type=kind)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        logger.error("%s cannot be read: %s; %s", path, error, set_aside(path), extra=BROKER_METADATA_INVALID)
        return None
