"""What the rows of publishers and consumers mean: what was lost, doubled, out of order, begun too early. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from support.judge import STORED_TWICE

from .records import PROBE_KEY, Kind, Row

AGAIN = "the same stored message again: its FIN was not in time, or not on all replicas"
EXAMPLES = 10


@dataclass
class _Key:
    """What is known of the messages of one key.

    Attributes:
        begun: number -> internal id of its first delivery.
        last: the largest number begun.
    """

    stored: set[int] = field(default_factory=set)
    begun: dict[int, int] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    partitions: set[int] = field(default_factory=set)
    last: int = -1


class Pair(NamedTuple):
    """Two messages of a key in the wrong order: ``number`` came although ``before`` had begun."""

    key: int
    number: int
    before: int


@dataclass(frozen=True)
class Counts:
    """What was counted.

    Attributes:
        stored: publishes answered OK.
        failed: those that ended with an error.
        handled: how often a handler got a message; ``distinct``: how many messages.
        duplicates: by their causes.
        missing: messages answered OK that no handler finished: (key, number).
        disordered: messages that were first begun after a later one of their key.
        too_early: messages that were first begun before the one begun before them was finished.
        split_keys: keys with messages in several partitions.
        rollbacks: how often a consumer said that a partition went back.
    """

    stored: int
    failed: list[Row]
    handled: int
    distinct: int
    duplicates: dict[str, int]
    missing: list[tuple[int, int]]
    disordered: list[Pair]
    too_early: list[Pair]
    split_keys: int
    rollbacks: int


class Check:
    """Takes rows in the order of their times, and gives ``counts``."""

    def __init__(self) -> None:
        self._keys: dict[int, _Key] = {}
        self._failed: list[Row] = []
        self._duplicates: Counter[str] = Counter()
        self._disordered: list[Pair] = []
        self._too_early: list[Pair] = []
        self._totals: Counter[int] = Counter()
        self._takes: dict[int, Callable[[_Key, Row], None]] = {
            Kind.STORED: self._stored,
            Kind.FAILED: lambda _, row: self._failed.append(row),
            Kind.BEGUN: self._begun,
            Kind.FINISHED: lambda key, row: key.finished.add(row.number),
            Kind.ROLLBACK: lambda _key, _row: None,
        }

    def take_all(self, rows: Iterable[Row]) -> None:
        """Take rows; those of probes are passed over."""
        for row in rows:
            if row.key != PROBE_KEY:
                self._totals[row.kind] += 1
                self._takes[row.kind](self._of(row.key), row)

    def counts(self) -> Counts:
        """What it means so far."""
        keys = sorted(self._keys.items())
        return Counts(
            stored=self._totals[Kind.STORED],
            failed=list(self._failed),
            handled=self._totals[Kind.BEGUN],
            distinct=sum(len(key.begun) for _, key in keys),
            duplicates=dict(self._duplicates),
            missing=[(name, number) for name, key in keys for number in sorted(key.stored - key.finished)],
            disordered=list(self._disordered),
            too_early=list(self._too_early),
            split_keys=sum(len(key.partitions) > 1 for _, key in keys),
            rollbacks=self._totals[Kind.ROLLBACK],
        )

    def _of(self, name: int) -> _Key:
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = _Key()
        return key

    @staticmethod
    def _stored(key: _Key, row: Row) -> None:
        key.stored.add(row.number)

    def _begun(self, key: _Key, row: Row) -> None:
        key.partitions.add(row.partition)
        first = key.begun.get(row.number)
        if first is not None:
            self._duplicates[AGAIN if first == row.internal_id else STORED_TWICE] += 1
            return
        key.begun[row.number] = row.internal_id
        pair = Pair(row.key, row.number, key.last)
        if row.number < key.last:
            self._disordered.append(pair)
        elif key.last >= 0 and key.last not in key.finished:
            self._too_early.append(pair)
        key.last = max(key.last, row.number)


def is_refused_by_cluster(failed: Row, accepted: Iterable[int], slack: float) -> bool:
    """Whether no plain connection could publish to a partition while a publish to it failed.

    Args:
        failed: the publish.
        accepted: times at which a plain connection could publish there.
        slack: s after the call and before the end in which one may have succeeded.
    """
    begin, end = failed.since + int(slack * 1e9), failed.at - int(slack * 1e9)
    return end > begin and not any(begin < each < end for each in accepted)
