"""Ranges of numbers: those of a log that one of its readers leaves out. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from nsq_fast.broker.diskqueue.segments import Position
from nsq_fast.broker.message import Message


class Gap(NamedTuple):
    """Records that are left out: the number of the first, and the position behind the last."""

    first: int
    end: Position

    @property
    def records(self) -> int:
        """How many numbers it has."""
        return self.end.sequence - self.first


class Gaps:
    """The gaps of one reader, in order. They do not overlap.

    Attributes:
        records: how many numbers all of them have.
    """

    __slots__ = ("_gaps", "records")

    def __init__(self) -> None:
        self._gaps: deque[Gap] = deque()
        self.records = 0

    def __len__(self) -> int:
        return len(self._gaps)

    def __iter__(self) -> Iterator[Gap]:
        return iter(self._gaps)

    def add(self, gap: Gap) -> None:
        """Add a gap that begins behind all others, or where the last one ends."""
        self.records += gap.records
        if self._gaps and self._gaps[-1].end.sequence == gap.first:
            gap = Gap(self._gaps.pop().first, gap.end)
        self._gaps.append(gap)

    def pass_at(self, position: Position) -> Position:
        """Forget the gaps that begin before a position, or there; the position, or the end of the gap it lies in."""
        while self._gaps and self._gaps[0].first <= position.sequence:
            gap = self._gaps.popleft()
            self.records -= gap.records
            position = max(position, gap.end)
        return position

    def outside(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Those of some messages, in the order of the log, that lie in no gap."""
        return list(self._outside(messages)) if self._gaps else messages

    def _outside(self, messages: Sequence[Message]) -> Iterator[Message]:
        gaps = iter(self._gaps)
        gap = next(gaps, None)
        for message in messages:
            while gap is not None and gap.end.sequence <= message.sequence:
                gap = next(gaps, None)
            if gap is None or message.sequence < gap.first:
                yield message

    def between(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """What of the numbers from ``first`` to before ``end`` lies in no gap: ranges of (first, one past the last)."""
        for gap in self._gaps:
            if first < gap.first:
                yield first, gap.first
            first = max(first, gap.end.sequence)
        if first < end:
            yield first, end

    def forget(self, numbers: Sequence[int]) -> None:
        """Forget each gap that has one of these numbers, which are in order."""

        def has_one(gap: Gap) -> bool:
            index = bisect_left(numbers, gap.first)
            return index < len(numbers) and numbers[index] < gap.end.sequence

        self._gaps = deque(gap for gap in self._gaps if not has_one(gap))
        self.records = sum(gap.records for gap in self._gaps)

    def clear(self) -> None:
        """Forget all of them."""
        self._gaps.clear()
        self.records = 0


def ranges_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as ranges of (first, one after the last)."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return ranges
