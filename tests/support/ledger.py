"""What clients did with messages: as rows in a file that outlives them, and what the rows mean.

Every message says its key and its number among those of the key. A number that has not been begun before and is
smaller than one that has is out of order; one that has is a duplicate.
"""

from __future__ import annotations

import heapq
import os
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from nsq_fast import Message

PROBE_KEY = 0xFFFFFFFF
"""The key of messages that are consumed like others, and not judged."""

HEAD = struct.Struct(">IQ")
"""How a message begins: its key, and its number among those of the key."""

NO_NODE = 255
AGAIN = "the same stored message again: its FIN was not in time, or not on all replicas"
STORED_TWICE = "stored twice: a publish that was tried again"
_ROW = struct.Struct("<BIqBhqqQq")


def body(key: int, number: int, size: int = 100) -> bytes:
    """A message of ``size`` bytes."""
    return HEAD.pack(key, number).ljust(size, b".")


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
    """

    kind: int
    key: int
    number: int
    node: int = NO_NODE
    partition: int = -1
    at: int = 0
    since: int = 0
    internal_id: int = 0
    offset: int = -1


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
    return map(Row._make, _ROW.iter_unpack(data[: len(data) - len(data) % ROW_SIZE]))


def merged(logs: Iterable[Iterable[Row]]) -> Iterator[Row]:
    """The rows of several logs in the order of their times."""
    return heapq.merge(*logs, key=attrgetter("at"))


class Pair(NamedTuple):
    """Two messages of a key in the wrong order: ``number`` came although ``before`` had begun."""

    key: int
    number: int
    before: int


@dataclass
class _Key:
    """What is known of the messages of one key; ``begun``: number -> internal id of its first delivery."""

    stored: set[int] = field(default_factory=set)
    begun: dict[int, int] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    partitions: set[int] = field(default_factory=set)
    last: int = -1


class Ledger:
    """Takes rows in the order of their times, or takes notes while clients are at work.

    Attributes:
        totals: how many rows there were of each kind.
        failed: publishes that ended with an error; such a message may come or not.
        duplicates: by their causes.
        disordered: messages that were first begun after a later one of their key.
        too_early: messages that were first begun before the one begun before them was finished.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.totals: Counter[int] = Counter()
        self.failed: list[Row] = []
        self.duplicates: Counter[str] = Counter()
        self.disordered: list[Pair] = []
        self.too_early: list[Pair] = []
        self._keys: defaultdict[int, _Key] = defaultdict(_Key)
        for row in rows:
            self.take(row)

    def take(self, row: Row) -> None:
        """Take a row; that of a probe is passed over."""
        if row.key == PROBE_KEY:
            return
        self.totals[row.kind] += 1
        key = self._keys[row.key]
        if row.kind == Kind.STORED:
            key.stored.add(row.number)
        elif row.kind == Kind.FAILED:
            self.failed.append(row)
        elif row.kind == Kind.BEGUN:
            self._begun(key, row)
        elif row.kind == Kind.FINISHED:
            key.finished.add(row.number)

    def stored(self, key: int, number: int) -> None:
        """A publish was answered OK."""
        self.take(Row(Kind.STORED, key, number))

    def handle(self, _consumer: Any, message: Message) -> None:
        """A message handler: notes the message, which is finished when this returns."""
        key, number = HEAD.unpack_from(message.body)
        partition = -1 if message.partition is None else message.partition
        self.take(Row(Kind.BEGUN, key, number, partition=partition, internal_id=message.internal_id))
        self.take(Row(Kind.FINISHED, key, number))

    @property
    def distinct(self) -> int:
        """How many messages were begun."""
        return sum(len(key.begun) for key in self._keys.values())

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Messages answered OK that no handler finished: (key, number)."""
        return [(name, each) for name, key in sorted(self._keys.items()) for each in sorted(key.stored - key.finished)]

    @property
    def split_keys(self) -> int:
        """Keys with messages in several partitions."""
        return sum(len(key.partitions) > 1 for key in self._keys.values())

    def _begun(self, key: _Key, row: Row) -> None:
        key.partitions.add(row.partition)
        first = key.begun.get(row.number)
        if first is not None:
            self.duplicates[AGAIN if first == row.internal_id else STORED_TWICE] += 1
            return
        key.begun[row.number] = row.internal_id
        pair = Pair(row.key, row.number, key.last)
        if row.number < key.last:
            self.disordered.append(pair)
        elif key.last >= 0 and key.last not in key.finished:
            self.too_early.append(pair)
        key.last = max(key.last, row.number)


def is_refused_by_cluster(failed: Row, accepted: Iterable[int], slack: float) -> bool:
    """Whether no plain connection could publish to a partition while a publish to it failed.

    Args:
        accepted: times at which a plain connection could publish there.
        slack: s after the call and before the end in which one may have succeeded.
    """
    begin, end = failed.since + int(slack * 1e9), failed.at - int(slack * 1e9)
    return end > begin and not any(begin < each < end for each in accepted)
