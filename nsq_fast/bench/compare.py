"""What changed between two runs, and whether the change is larger than their spread.

A change counts when the ranges of the rounds do not overlap and the medians differ by more than a threshold. Runs of
different machines, or of one machine at different hours, compare only relative to a client that was in both: then each
round's median is divided by that client's in its own run, and the spread is that of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from .figures import METRICS, Figure, figure, value_of
from .results import ClientResult, Run, Scenario

THRESHOLD = 0.05
METRICS_COMPARED = ("rate", "cpu", "p99", "peak")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One figure in both runs. ``verdict`` is ``better``, ``worse`` or ``same``."""

    scenario: str
    client: str
    metric: str
    before: Figure
    after: Figure
    verdict: str

    @property
    def ratio(self) -> float:
        return self.after.over(self.before)


def compare(
    before: Run,
    after: Run,
    *,
    clients: Sequence[str] = (),
    relative_to: str = "",
    threshold: float = THRESHOLD,
) -> Iterator[Change]:
    """Every figure that both runs have; of all clients when none are named."""
    for old in before.scenarios:
        new = after.scenario(old.name)
        if new is None:
            continue
        for result in old.clients:
            found = new.client(result.client)
            if found is None or not result.rounds or (clients and result.client not in clients):
                continue
            yield from _changes(old, new, result, found, relative_to, threshold)
    yield from _core_changes(before, after, threshold)


def differences(before: Run, after: Run) -> Iterator[str]:
    """What else than the clients differs between the runs, and so may be the cause of a change; in sentences."""
    first, second = before.about, after.about
    for what, old, new in (
        ("machine", f"{first.cpu}, {first.cores} cores", f"{second.cpu}, {second.cores} cores"),
        ("Python", first.python, second.python),
    ):
        if old != new:
            yield f"another {what}: {old} before, {new} after"
    servers: dict[tuple[str, str], list[str]] = {}
    for scenario in before.scenarios:
        later = after.scenario(scenario.name)
        if later is None:
            continue
        if later.settings != scenario.settings:
            yield f"{scenario.name} was run with other settings"
        if later.server != scenario.server:
            servers.setdefault((scenario.server, later.server), []).append(scenario.name)
    for (old, new), names in servers.items():
        yield f"another server: {old} before, {new} after, in {', '.join(names)}"


def _changes(
    old: Scenario, new: Scenario, first: ClientResult, second: ClientResult, relative_to: str, threshold: float
) -> Iterator[Change]:
    for metric in METRICS_COMPARED:
        before, after = _figure_in(old, first, metric, relative_to), _figure_in(new, second, metric, relative_to)
        if before and after:
            verdict = verdict_on(before, after, METRICS[metric].more_is_better, threshold)
            yield Change(
                scenario=old.name, client=first.client, metric=metric, before=before, after=after, verdict=verdict
            )


def _figure_in(scenario: Scenario, result: ClientResult, metric: str, relative_to: str) -> Figure | None:
    value = value_of(result, metric, scenario.settings.size)
    if value is None or not relative_to or metric == "peak":  # memory does not depend on how fast a machine is
        return value
    base = scenario.client(relative_to)
    unit = value_of(base, metric, scenario.settings.size) if base else None
    if unit is None or not unit.low:
        return None
    return Figure(value.median / unit.median, value.low / unit.high, value.high / unit.low)


def _core_changes(before: Run, after: Run, threshold: float) -> Iterator[Change]:
    later = {(each.group, each.name): each for each in after.core}
    for old in before.core:
        new = later.get((old.group, old.name))
        if new is not None:
            first, second = figure(old.ns_per_message), figure(new.ns_per_message)
            verdict = verdict_on(first, second, False, threshold)
            yield Change(
                scenario=f"core: {old.group}",
                client=old.name,
                metric="ns/message",
                before=first,
                after=second,
                verdict=verdict,
            )


def verdict_on(before: Figure, after: Figure, more_is_better: bool, threshold: float = THRESHOLD) -> str:
    """``same`` unless the ranges are apart and the medians differ by more than the threshold."""
    overlap = before.low <= after.high and after.low <= before.high
    if overlap or abs(after.median - before.median) <= threshold * before.median:
        return "same"
    return "better" if (after.median > before.median) == more_is_better else "worse"
