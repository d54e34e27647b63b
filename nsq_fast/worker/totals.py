"""The metrics of the processes of a worker, added up."""

from __future__ import annotations

from collections.abc import Iterable

from .reports import Family

KEPT = ("counter", "histogram", "summary")
"""Kinds of metrics that count: what a process has counted is counted when it has ended."""

HIGHEST = (
    "nsq_fast_consumer_backoff_level", "nsq_fast_consumer_backoff_seconds", "nsq_fast_consumer_paused",
    "nsq_fast_consumer_running", "nsq_fast_consumer_starved", "process_start_time_seconds",
    "process_max_fds", "python_info",
)  # fmt: skip
"""Gauges of which the highest is shown. The others are added up."""

_CREATED = "_created"

Labels = tuple[tuple[str, str], ...]
Sums = dict[str, tuple[Family, dict[tuple[str, Labels], float]]]


class Totals:
    """What processes that have ended had counted. It never changes: threads may read it.

    There are as many series as one process has.
    """

    def __init__(self, past: Sums | None = None) -> None:
        self._past: Sums = past or {}

    def with_ended(self, metrics: Iterable[Family]) -> Totals:
        """These, and what another process had counted when it reported last."""
        sums = self._copy()
        _add(sums, (each for each in metrics if each.kind in KEPT))
        return Totals(sums)

    def _copy(self) -> Sums:
        return {name: (family, dict(values)) for name, (family, values) in self._past.items()}

    def now(self, processes: Iterable[Iterable[Family]]) -> list[Family]:
        """The sums of those that run, and of what those that have ended had counted."""
        sums = self._copy()
        for metrics in processes:
            _add(sums, metrics)
        return [
            Family(family.name, family.help, family.kind, [(name, dict(labels), value) for (name, labels), value in
                                                           values.items()])
            for family, values in sums.values()
        ]  # fmt: skip


def _add(sums: Sums, metrics: Iterable[Family]) -> None:
    for family in metrics:
        _, values = sums.setdefault(family.name, (family, {}))
        for name, labels, value in family.samples:
            if name.endswith(_CREATED):
                continue
            key = name, tuple(sorted(labels.items()))
            if family.name in HIGHEST:
                values[key] = max(value, values.get(key, value))
            else:
                values[key] = value + values.get(key, 0.0)
