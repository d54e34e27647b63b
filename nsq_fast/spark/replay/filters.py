"""Which part of the logs can hold the rows that a query filters for: Spark hands its filters on, and filters again.

Filters on ``partition``, ``offset`` and ``timestamp`` make the slice smaller;
all others are Spark's alone. A range of times is found in the log by search, as
records are stored about in the order of their times. About, since each leader
has a clock of its own: ``MARGIN`` is left on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

MARGIN = 600 * 10**9
"""Nanoseconds by which the clocks of the nsqds may differ."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)


class Range(NamedTuple):
    """Whole numbers from ``low`` to ``high``, both among them; None: without an end on that side."""

    low: int | None = None
    high: int | None = None

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int)
        return (self.low is None or self.low <= value) and (self.high is None or value <= self.high)

    def within(self, other: Range) -> Range:
        """What lies in both."""
        lows = [low for low in (self.low, other.low) if low is not None]
        highs = [high for high in (self.high, other.high) if high is not None]
        return Range(max(lows, default=None), min(highs, default=None))


class Bounds(NamedTuple):
    """Where all rows lie that pass the filters. ``times`` are in nanoseconds, with the margin."""

    partitions: Range = Range()
    offsets: Range = Range()
    times: Range = Range()


def bounds_of(filters: Iterable[Any]) -> Bounds:
    """The bounds that filters of pyspark set, all of which have to hold. Unknown filters set none."""
    found = dict.fromkeys(_VALUE, Range())
    for each in filters:
        column = each.attribute[0] if len(getattr(each, "attribute", ())) == 1 else None
        if column in found:
            found[column] = found[column].within(_range(each, _VALUE[column]))
    return Bounds(found["partition"], found["offset"], _nanoseconds(found["timestamp"]))


def _range(wanted: Any, value_of: Callable[[Any], int | None]) -> Range:
    kind = type(wanted).__name__
    values = [value_of(value) for value in (wanted.value if kind == "In" else [getattr(wanted, "value", None)])]
    numbers = [value for value in values if value is not None]
    if kind not in _RANGE or len(numbers) < len(values) or not numbers:
        return Range()
    return _RANGE[kind](numbers)


_RANGE: Mapping[str, Callable[[list[int]], Range]] = {
    "EqualTo": lambda values: Range(values[0], values[0]),
    "EqualNullSafe": lambda values: Range(values[0], values[0]),
    "In": lambda values: Range(min(values), max(values)),
    "GreaterThan": lambda values: Range(values[0] + 1, None),
    "GreaterThanOrEqual": lambda values: Range(values[0], None),
    "LessThan": lambda values: Range(None, values[0] - 1),
    "LessThanOrEqual": lambda values: Range(None, values[0]),
}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _microseconds(value: Any) -> int | None:
    """What the column has. A time without a zone would be one of the session's, which is not known here."""
    return (value - _EPOCH) // _MICROSECOND if isinstance(value, datetime) and value.tzinfo is not None else None


_VALUE: Mapping[str, Callable[[Any], int | None]] = {
    "partition": _whole,
    "offset": _whole,
    "timestamp": _microseconds,
}


def _nanoseconds(times: Range) -> Range:
    """Times of records for those of the column, which leaves the nanoseconds out."""
    return Range(
        None if times.low is None else times.low * 1000 - MARGIN,
        None if times.high is None else (times.high + 1) * 1000 + MARGIN,
    )
