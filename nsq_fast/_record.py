"""Values with named fields that programs see: options, and snapshots of what a client has done; times in buckets.

They are structs of msgspec, which makes a class in a fiftieth of the time that ``dataclasses`` takes to write and
compile its methods, and whose fields are read as fast. ``tests/test_layering.py`` keeps ``dataclasses`` out of what a
client imports at its start.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from dataclasses import Field


class _FieldsWhenAsked:
    """What ``dataclasses`` looks for in a class, made when it does."""

    def __get__(self, record: object, owner: type[msgspec.Struct]) -> dict[str, Field[Any]]:
        return _dataclass_fields(owner)


class Record(msgspec.Struct, frozen=True):
    """Base of values that do not change; ``dataclasses.fields``, ``replace`` and ``asdict`` take them, too."""

    if not TYPE_CHECKING:
        __dataclass_fields__ = _FieldsWhenAsked()


class MutableRecord(msgspec.Struct):
    """The same for values that change."""

    if not TYPE_CHECKING:
        __dataclass_fields__ = _FieldsWhenAsked()


@functools.cache
def _dataclass_fields(owner: type[msgspec.Struct]) -> dict[str, Field[Any]]:
    import dataclasses
    from inspect import get_annotations

    annotations: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        annotations.update(get_annotations(base))
    names, described = owner.__struct_fields__, getattr(owner, "OPTIONS", {})
    defaults = dict(zip(reversed(names), reversed(owner.__struct_defaults__), strict=False))
    named = []
    for name in names:
        given = _default(defaults[name]) if name in defaults else {}
        metadata = msgspec.structs.asdict(described[name]) if name in described else None
        named.append((name, annotations[name], dataclasses.field(**given, metadata=metadata)))
    made: Any = dataclasses.make_dataclass(owner.__name__, named)
    return made.__dataclass_fields__  # type: ignore[no-any-return]


def _default(value: Any) -> dict[str, Any]:
    factory = getattr(value, "factory", None)
    return {"default": value} if factory is None else {"default_factory": factory}


# Times in buckets: a bounded number of counts, whatever is observed and however often.


SAMPLE_EVERY = 0.01
"""Seconds between two samples: about 10 us for each are a thousandth of the time."""

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
