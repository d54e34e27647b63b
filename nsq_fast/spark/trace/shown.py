"""What a report shows, whoever has computed it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

MOST_GROUPS = 200
MOST_CHANNELS = 12  # that get charts
MOST_POINTS = 120  # on the axis of time
MOST_EXAMPLES = 20
MOST_SOURCES = 30
SHARES = (1, 5, 10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 90, 92.5, 95, 97, 98, 99, 99.5, 99.7, 99.9, 99.97, 100)
FAULTS = ("lost", "duplicates", "violations")
SERIES = (0.5, 0.95, 0.99, 1.0)


class TraceGroup(msgspec.Struct, frozen=True):
    """A channel in a partition of a topic: counts and durations (nanoseconds) by name, as in table ``windows``."""

    topic: str
    partition: int | None
    channel: str
    counts: dict[str, int]
    durations: dict[str, int | None]


class Channel(msgspec.Struct, frozen=True):
    """What is drawn of a channel of a topic.

    Attributes:
        curves: by kind of duration, a percentile in nanoseconds for each of `SHARES`.
        times: begin of a bucket of time, and the percentiles `SERIES` of the latency of what was published in it.
    """

    topic: str
    channel: str
    messages: int
    curves: dict[str, list[int]]
    times: list[tuple[int, list[int] | None]]


class Source(msgspec.Struct, frozen=True):
    """A file of lines, and a line of it that holds no record."""

    name: str
    lines: int
    problems: int
    example: str | None


class Figures(msgspec.Struct, frozen=True):
    """All that a report shows.

    Attributes:
        lines, problems, records, publishes: over all sources.
        unconsumed: publishes to topics of which no delivery was recorded.
        unpublished: messages that were delivered, with no record of their producer.
        totals: over all groups; ``groups`` are those with faults first, no more than `MOST_GROUPS`.
        examples: by kind of fault, the first few.
    """

    lines: int
    problems: int
    records: int
    publishes: int
    begin_ns: int
    end_ns: int
    window_ns: int
    grace_ns: int
    judged_by: str
    unconsumed: dict[str, int]
    unpublished: int
    late: int
    totals: dict[str, int]
    group_count: int
    groups: list[TraceGroup]
    channels: list[Channel]
    slowest: list[dict[str, Any]]
    examples: dict[str, list[dict[str, Any]]]
    skews: list[dict[str, Any]]
    sources: list[Source]

    @property
    def lanes(self) -> list[TraceGroup]:
        """The former name of ``groups``, for one version."""
        warnings.warn("Figures.lanes is now Figures.groups", DeprecationWarning, stacklevel=2)
        return self.groups


def in_order(groups: Iterable[TraceGroup]) -> list[TraceGroup]:
    """Groups as a report lists them."""
    return sorted(
        groups, key=lambda group: (group.topic, group.channel, -1 if group.partition is None else group.partition)
    )


def bucket_of(first_ns: int, last_ns: int, window_ns: int) -> int:
    """So many windows that the axis has no more points than it can show."""
    windows = (last_ns - first_ns) // window_ns + 1
    return window_ns * -(-windows // MOST_POINTS)


def with_gaps(rows: Sequence[tuple[int, list[int]]], bucket_ns: int) -> list[tuple[int, list[int] | None]]:
    """A series with a None where nothing was published: a gap in the line."""
    series: list[tuple[int, list[int] | None]] = []
    for begin, values in rows:
        if series and begin - series[-1][0] > bucket_ns:
            series.append((series[-1][0] + bucket_ns, None))
        series.append((begin, values))
    return series
