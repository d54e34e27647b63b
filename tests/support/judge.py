"""A judge of publishing and consuming: what was lost, what came twice and why, what came out of order.

Every message says its key and its number among those of the key. The judge is
told of every publish that was answered OK and of every message that a handler
got, and needs nothing else: a number not seen before that is smaller than one
seen before is a violation of the order; a number seen before is a duplicate.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nsq_fast import Message

_HEAD = struct.Struct(">IQ")

REDELIVERED = "the same stored message again, over a new connection: its FIN was not in time"
REQUEUED = "the same stored message again, by the server, over the same connection"
STORED_TWICE = "stored twice: a publish that was tried again"


def body(key: int, number: int, size: int = 100) -> bytes:
    """A message of ``size`` bytes."""
    return _HEAD.pack(key, number).ljust(size, b".")


def parse(message: Message) -> tuple[int, int]:
    """The key of a message, and its number among those of the key."""
    key, number = _HEAD.unpack_from(message.body)
    return key, number


@dataclass
class _Key:
    """What is known of the messages of one key."""

    stored: set[int] = field(default_factory=set)
    seen: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    partitions: set[Any] = field(default_factory=set)
    last: int = -1


@dataclass(frozen=True)
class Verdict:
    """The outcome. ``violations`` holds (key, number, largest number before it)."""

    stored: int
    failed: int
    handled: int
    distinct: int
    lost: int
    unexpected: int
    duplicates: dict[str, int]
    violations: list[tuple[int, int, int]]
    split_keys: int

    def __str__(self) -> str:
        causes = "; ".join(f"{count} {cause}" for cause, count in sorted(self.duplicates.items())) or "none"
        return (
            f"{self.stored} stored, {self.failed} failed, {self.handled} handled, {self.lost} lost,"
            f" {len(self.violations)} out of order, duplicates: {causes}"
        )


class Judge:
    """Takes notes of what happens; ``verdict`` says what it means.

    Attributes:
        stored: publishes answered OK.
        failed: publishes that ended with an error; such a message may come or not.
        distinct: messages that came at least once.
    """

    def __init__(self) -> None:
        self.stored = 0
        self.failed = 0
        self.handled = 0
        self.distinct = 0
        self.errors: Counter[str] = Counter()
        self._keys: dict[int, _Key] = {}
        self._duplicates: Counter[str] = Counter()
        self._violations: list[tuple[int, int, int]] = []

    def was_stored(self, key: int, number: int) -> None:
        """A publish was answered OK."""
        self.stored += 1
        self._of(key).stored.add(number)

    def has_failed(self, error: BaseException) -> None:
        """A publish ended with an error."""
        self.failed += 1
        self.errors[f"{type(error).__name__}: {error}"] += 1

    def handle(self, _consumer: Any, message: Message) -> None:
        """A message handler: notes the message, which is finished when this returns."""
        key, number = parse(message)
        self.handled += 1
        notes = self._of(key)
        notes.partitions.add(message.partition)
        identity = (message.id, message.responder)
        first = notes.seen.get(number)
        if first is not None:
            self._duplicates[_cause(first, identity)] += 1
            return
        notes.seen[number] = identity
        self.distinct += 1
        if number < notes.last:
            self._violations.append((key, number, notes.last))
        else:
            notes.last = number

    @property
    def missing(self) -> int:
        """Messages that were stored and have not come."""
        return sum(len(notes.stored - notes.seen.keys()) for notes in self._keys.values())

    def missing_examples(self, count: int = 5) -> list[tuple[int, int]]:
        """Some of them: (key, number)."""
        return [
            (key, number) for key, notes in self._keys.items() for number in sorted(notes.stored - notes.seen.keys())
        ][:count]

    def verdict(self) -> Verdict:
        """What it all means, as of now."""
        return Verdict(
            stored=self.stored,
            failed=self.failed,
            handled=self.handled,
            distinct=self.distinct,
            lost=self.missing,
            unexpected=sum(len(notes.seen.keys() - notes.stored) for notes in self._keys.values()),
            duplicates=dict(self._duplicates),
            violations=list(self._violations),
            split_keys=sum(len(notes.partitions) > 1 for notes in self._keys.values()),
        )

    def _of(self, key: int) -> _Key:
        notes = self._keys.get(key)
        if notes is None:
            notes = self._keys[key] = _Key()
        return notes


def _cause(first: tuple[bytes, Any], again: tuple[bytes, Any]) -> str:
    if first[0][:8] != again[0][:8]:
        return STORED_TWICE
    return REQUEUED if first[1] is again[1] else REDELIVERED
