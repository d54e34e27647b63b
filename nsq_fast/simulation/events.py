"""Virtual time: what is due next happens next, and takes no time itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any


class Simulation:
    """A heap of what will happen.

    Args:
        seed: of all chance in the run: with the same one, the same happens.

    Attributes:
        now: seconds since the begin.
        random: the only source of chance.
        steps: things that have happened.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.steps = 0
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay: float, action: Callable[..., object], *arguments: Any) -> None:
        """Have ``action(*arguments)`` happen in ``delay`` seconds; what is due together happens in order of calls."""
        self._count += 1
        heappush(self._due, (self.now + delay, self._count, action, arguments))

    def run(self, until: float = inf) -> None:
        """Let everything happen that is due by then."""
        while self._due and self._due[0][0] <= until:
            self.now, _, action, arguments = heappop(self._due)
            self.steps += 1
            action(*arguments)
        if until < inf:
            self.now = until


class Curve:
    """What happened in each interval of virtual time.

    Args:
        interval: seconds.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._counts: dict[int, float] = {}

    def add(self, now: float, amount: float = 1.0) -> None:
        """Count something."""
        slot = int(now / self.interval)
        self._counts[slot] = self._counts.get(slot, 0.0) + amount

    def points(self, until: float) -> list[tuple[float, float]]:
        """(begin of the interval, rate a second) of all intervals, empty ones too."""
        slots = range(int(until / self.interval))
        return [(slot * self.interval, self._counts.get(slot, 0.0) / self.interval) for slot in slots]

    def totals(self, until: float) -> list[tuple[float, float]]:
        """(end of the interval, all that happened by then)."""
        result, total = [], 0.0
        for slot in range(int(until / self.interval)):
            total += self._counts.get(slot, 0.0)
            result.append(((slot + 1) * self.interval, total))
        return result

    @property
    def peak(self) -> float:
        """The highest rate a second."""
        return max(self._counts.values(), default=0.0) / self.interval

    @property
    def end(self) -> float:
        """The end of the last interval in which something happened."""
        return (max(self._counts, default=-1) + 1) * self.interval

    @property
    def total(self) -> float:
        """All that was counted."""
        return sum(self._counts.values())


def share(values: list[float], part: float) -> float:
    """The value below which ``part`` (0 to 1) of them are; 0.0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
