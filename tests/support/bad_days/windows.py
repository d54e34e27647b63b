"""How long clients took to follow a leader: from when it could be done to when they did it. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import quantiles
from typing import NamedTuple

from nsq_fast.names import Address

from .records import Kind, Row
from .watch import READ, WRITE, Change

SECOND = 1_000_000_000
STALL = SECOND
"""ns without a publish of plain connections, which try four times a second."""

LEAD = SECOND
"""ns by which a client may hear of a leader before the watch does."""


class Window(NamedTuple):
    """By how many seconds clients were later than they could be, after one change of a leader.

    Attributes:
        named: from when lookup named the leader.
        ready: from when lookup had named it, and a plain connection could do the same there.
    """

    change: Change
    named: float
    ready: float


@dataclass
class Windows:
    """The windows of all changes.

    Attributes:
        passed_over: changes that ended, or whose leader was never ready, before a client could be there.
        never: changes after which no client came, although there was time.
    """

    all: list[Window] = field(default_factory=list)
    passed_over: int = 0
    never: list[Change] = field(default_factory=list)

    @property
    def named(self) -> list[float]:
        return [window.named for window in self.all]

    @property
    def ready(self) -> list[float]:
        return [window.ready for window in self.all]

    def slowest(self, count: int) -> list[Window]:
        """Those that were the longest after the leader was ready."""
        return sorted(self.all, key=lambda window: -window.ready)[:count]


class Firsts:
    """When clients first did something at an nsqd for a partition, after a time."""

    def __init__(self, rows: Iterable[Row], kind: Kind) -> None:
        self._times: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row in rows:
            if row.kind == kind:
                self._times[row.partition, row.node].append(row.at)

    def after(self, partition: int, node: int, since: int) -> int | None:
        """The first time at or after ``since``; None where there is none."""
        times = self._times[partition, node]
        place = bisect_left(times, since)
        return times[place] if place < len(times) else None


def measure(
    changes: Sequence[Change],
    firsts: Firsts,
    nodes: Sequence[Address],
    access: str,
    grace: float,
    accepted: Mapping[int, Sequence[int]],
) -> Windows:
    """The windows of publishers (WRITE) or of consumers (READ).

    Args:
        grace: seconds that a leader has to be there for its change to count where no client came.
        accepted: partition -> when plain connections could publish there: a leader may stop to take publishes
            after its first ones, as while a replica leaves; then it was not ready before it took them again.
    """
    windows = Windows()
    for change in changes:
        ready = change.publishable if access == WRITE else _consumable(change)
        if ready is None or access not in change.named:
            windows.passed_over += 1
            continue
        named = change.named[access]
        ready = max(ready, named)
        first = firsts.after(change.partition, nodes.index(change.leader), named - LEAD)
        if first is not None and (change.ended is None or first < change.ended):
            if access == WRITE:
                ready = _ready_again(ready, first, accepted.get(change.partition, ()))
            late = Window(change, max(0, first - named) / SECOND, max(0, first - ready) / SECOND)
            windows.all.append(late)
        elif change.ended is not None and change.ended - ready < grace * SECOND:
            windows.passed_over += 1
        else:
            windows.never.append(change)
    return windows


def _ready_again(ready: int, first: int, accepted: Sequence[int]) -> int:
    """The end of the last time between the two in which no plain connection could publish for STALL."""
    times = [ready, *(at for at in accepted if ready < at < first)]
    return max((after for before, after in pairwise(times) if after - before > STALL), default=ready)


def _consumable(change: Change) -> int | None:
    """When a consumer could subscribe at a leader, and there was a message there, which the watch had published."""
    if change.subscribable is None or change.publishable is None:
        return None
    return max(change.subscribable, change.publishable)


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which so many percent of the values are; 0 where there are none."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return quantiles(values, n=100, method="inclusive")[percent - 1]


ACCESS = {"publish": WRITE, "consume": READ}
