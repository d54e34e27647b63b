"""Puts a range of a partition's log together from the records that arrive.

A record carries its offset and its size, and the next record begins where it
ends. So it is known for certain whether the range is complete, whatever arrived
twice, too early, or not at all. What is handed on is in order and without a gap
from the start of the range to its end. A record belongs to the range in which
it begins.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from nsq_fast._frame import Columns


class Run(NamedTuple):
    """Rows ``first`` up to ``stop`` of some columns: contiguous, in order."""

    columns: Columns
    first: int
    stop: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.first

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows of the columns."""
        return self.first == 0 and self.stop == self.columns.count


class _Held(NamedTuple):
    """A run that waits. ``offsets`` and ``ends`` are those of all rows of its columns."""

    offset: int
    tie: int
    run: Run
    offsets: Any
    ends: Any


class Assembly:
    """The range from ``start`` up to ``end``.

    Attributes:
        expected: the offset at which the next record has to begin.
        end: the first offset that no longer belongs to the range.
    """

    def __init__(self, start: int, end: int) -> None:
        self.expected = start
        self.end = end
        self._held: list[_Held] = []
        self._ties = 0

    @property
    def is_complete(self) -> bool:
        """Whether every record of the range has been handed on."""
        return self.expected >= self.end

    @property
    def held_rows(self) -> int:
        """How many records wait for those before them."""
        return sum(held.run.rows for held in self._held)

    def forget_held(self) -> None:
        """Drop the records that wait; they have to be delivered again."""
        self._held.clear()

    def add(self, columns: Columns) -> list[Run]:
        """Take what arrived; what is ready now, in order. Columns must have offsets and sizes."""
        if columns.count:
            self._split(columns)
        return self._ready()

    def skip_to(self, offset: int) -> list[Run]:
        """Continue at ``offset``: there is nothing before it. Returns what is ready now."""
        self.expected = max(self.expected, offset)
        return self._ready()

    def _split(self, columns: Columns) -> None:
        offsets = np.frombuffer(columns.offsets, np.uint64)
        ends = offsets + np.frombuffer(columns.sizes, np.uint32)
        breaks: Any = np.flatnonzero(offsets[1:] != ends[:-1]) + 1
        for first, stop in pairwise([0, *breaks.tolist(), columns.count]):
            offset = int(offsets[first])
            if offset < self.end and int(ends[stop - 1]) > self.expected:
                self._ties += 1
                heapq.heappush(self._held, _Held(offset, self._ties, Run(columns, first, stop), offsets, ends))

    def _ready(self) -> list[Run]:
        ready: list[Run] = []
        while self._held and not self.is_complete and self._held[0].offset <= self.expected:
            held = heapq.heappop(self._held)
            columns, first, stop = held.run
            first += int(np.searchsorted(held.offsets[first:stop], self.expected))
            if first == stop:
                continue  # nothing new
            offset = int(held.offsets[first])
            if offset != self.expected:  # the one that is wanted is not among them
                heapq.heappush(self._held, held._replace(offset=offset, run=Run(columns, first, stop)))
                continue
            stop = first + int(np.searchsorted(held.offsets[first:stop], self.end))
            self.expected = int(held.ends[stop - 1])
            ready.append(Run(columns, first, stop))
        if self.is_complete:
            self._held.clear()
        return ready
