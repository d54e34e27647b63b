"""How many bytes a second a query reads, for the metrics of its progress. Nothing here reads a clock."""

from __future__ import annotations

from collections import deque

WINDOW = 60.0
"""Seconds that a rate is over, at least; more where a batch took longer, or nothing came."""


class Throughput:
    """Bytes of the batches that are done. All times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._done: deque[tuple[float, int]] = deque()

    def begin(self, now: float) -> None:
        """The query begins, or goes on; without effect when it has."""
        if self._began_at is None:
            self._began_at = now

    def add(self, size: int, now: float) -> None:
        """A batch of so many bytes is done."""
        self.begin(now)
        self._done.append((now, size))
        while now - self._done[0][0] >= WINDOW:
            self._began_at, _ = self._done.popleft()

    def rate(self, now: float) -> float:
        """Bytes a second."""
        if self._began_at is None or now <= self._began_at:
            return 0.0
        return sum(size for _, size in self._done) / (now - self._began_at)
