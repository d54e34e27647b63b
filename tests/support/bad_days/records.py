"""Rows of what a client did, in a file that has them all even when the client is killed in the next moment."""

from __future__ import annotations

import heapq
import os
import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

_ROW = struct.Struct("<BBhIqqqQq")

PROBE_KEY = 0xFFFFFFFF
"""The key of messages that ``watch`` publishes: they are consumed like others, and not judged."""

HEAD = struct.Struct(">IQ")
"""How a message begins: its key, and its number among those of the key."""


def key_name(key: int) -> str:
    """The key with which messages are published."""
    return f"key{key}"


class Kind(IntEnum):
    """What happened to a message."""

    STORED = 1
    """Its publish was answered OK."""

    FAILED = 2
    """Its publish ended with an error."""

    BEGUN = 3
    """A handler has it."""

    FINISHED = 4
    """The handler is done: its FIN has not been sent before."""

    ROLLBACK = 5
    """It lay before one that was delivered earlier: ``on_order_violation``."""


class Row(NamedTuple):
    """One event; times are those of ``time.monotonic_ns``, which all processes of a machine share.

    Attributes:
        node: place of the nsqd among those of the cluster; NO_NODE where none is known.
        since: when the publish was called; 0 for others.
        number: of the message among those of its key.
        offset: of its record in the partition; -1 where it is not known.
    """

    kind: int
    node: int
    partition: int
    key: int
    number: int
    at: int
    since: int
    internal_id: int
    offset: int


NO_NODE = 255
ROW_SIZE = _ROW.size


class Log:
    """A file of rows. Each is written to the system at once, so that SIGKILL takes none."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, row: Row) -> None:
        os.write(self._file, _ROW.pack(*row))


def read(path: Path) -> Iterator[Row]:
    """The rows of a file, in their order; a row that was cut off by the end of a process does not count."""
    data = path.read_bytes()
    return map(Row._make, _ROW.iter_unpack(data[: len(data) - len(data) % _ROW.size]))


def merged(logs: Iterable[Iterable[Row]]) -> Iterator[Row]:
    """The rows of several logs in the order of their times."""
    return heapq.merge(*logs, key=attrgetter("at"))
