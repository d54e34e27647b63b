"""Times in buckets: a bounded number of counts, whatever is observed and however often."""

from __future__ import annotations

from bisect import bisect_left

from nsq_fast._record import Record

BOUNDS: tuple[float, ...] = tuple(2.0**exponent for exponent in range(-16, 12))
"""Upper bounds of the buckets in seconds: powers of two from 15 microseconds to 34 minutes. One more has no bound."""


class HistogramStats(Record, frozen=True):
    """A snapshot of a histogram.

    Attributes:
        counts: of each bucket; its upper bound, which is part of it, is in ``bounds``. The last one has none.
        sum: of all that was observed, in seconds.
        bounds: see ``BOUNDS``.
    """

    counts: tuple[int, ...]
    sum: float
    bounds: tuple[float, ...] = BOUNDS

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)

    def __add__(self, other: HistogramStats) -> HistogramStats:
        """Both together, of two processes say. Raises ValueError where their buckets differ."""
        if self.bounds != other.bounds:
            raise ValueError("histograms with different bounds cannot be added")
        counts = tuple(mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True))
        return HistogramStats(counts, self.sum + other.sum, self.bounds)

    def quantile(self, share: float) -> float | None:
        """The bound below which ``share`` (0 to 1) of the values lie; infinity above the last; None without values.

        Raises ValueError for a share that is not between 0 and 1.
        """
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share={share!r}: must be between 0 and 1")
        below, wanted = 0, share * self.count
        for count, bound in zip(self.counts, (*self.bounds, float("inf")), strict=True):
            below += count
            if below and below >= wanted:
                return bound
        return None


class Histogram:
    """Counts of seconds, by ``BOUNDS``. One thread observes; any thread may ask."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count a value; one below 0 is 0, as where two clocks differ."""
        seconds = max(seconds, 0.0)
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def stats(self) -> HistogramStats:
        """What was counted so far."""
        return HistogramStats(tuple(self._counts), self._sum)
