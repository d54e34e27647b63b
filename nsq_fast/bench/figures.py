"""Figures of rounds: medians with their spread, ratios, what limited a client; and what changed between two runs.

A change counts when the ranges of the rounds do not overlap and the medians differ by more than a threshold. Runs of
different machines, or of one machine at different hours, compare only relative to a client that was in both: then each
round's median is divided by that client's in its own run, and the spread is that of both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from .counting import INSTRUCTIONS, SYSCALLS
from .results import ClientResult, Round, Run, Scenario, other_machine

BUSY = 0.9
ONE_THREAD = 1.0
COUNTED = (INSTRUCTIONS, SYSCALLS)


class Figure(msgspec.Struct, frozen=True):
    """A median and the smallest and largest of the rounds."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """The range as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def over(self, other: Figure) -> float:
        """How many times the other's median this one is; infinite over 0."""
        return self.median / other.median if other.median else float("inf")


def figure(values: Sequence[float]) -> Figure:
    """Raises ValueError where there are no values."""
    if not values:
        raise ValueError("a figure needs at least one value")
    return Figure(statistics.median(values), min(values), max(values))


class Metric(msgspec.Struct, frozen=True):
    """Something each round has a value of: ``read`` gives it, or None."""

    name: str
    title: str
    unit: str
    more_is_better: bool
    read: Callable[[Round, int], float | None]
    digits: int = 0


def _rate(each: Round, _: int) -> float | None:
    return each.messages / each.seconds if each.messages else None


def _megabytes(each: Round, size: int) -> float | None:
    return each.messages * size / each.seconds / 1e6 if each.messages else None


def _cpu(each: Round, _: int) -> float | None:
    return each.cpu_seconds / each.messages * 1e6 if each.messages else None


def _server_cpu(each: Round, _: int) -> float | None:
    if each.server_cpu_seconds is None or not each.messages:
        return None
    return each.server_cpu_seconds / each.messages * 1e6


def quantile(share: float) -> Callable[[Round, int], float | None]:
    """A reader of one quantile of the latency, in microseconds."""
    return lambda each, _: next((value for at, value in each.latency_us if at == share), None)


METRICS = {
    metric.name: metric
    for metric in (
        Metric("rate", "messages/s", "messages/s", True, _rate),
        Metric("megabytes", "MB/s", "MB/s", True, _megabytes, 1),
        Metric("cpu", "client CPU", "µs/message", False, _cpu, 3),
        Metric("server_cpu", "server CPU", "µs/message", False, _server_cpu, 3),
        Metric("p50", "latency p50", "µs", False, quantile(50)),
        Metric("p95", "latency p95", "µs", False, quantile(95)),
        Metric("p99", "latency p99", "µs", False, quantile(99)),
        Metric("p999", "latency p99.9", "µs", False, quantile(99.9)),
        Metric("max", "latency max", "µs", False, quantile(100)),
        Metric("peak", "peak memory", "MiB", False, lambda each, _: each.peak_kib / 1024, 1),
        Metric("package", "import of the package alone, CPU", "ms", False, lambda each, _: each.package_ms, 1),
        Metric("import", "import, CPU", "ms", False, lambda each, _: each.import_ms, 1),
        Metric("first", "start to first message", "ms", False, lambda each, _: each.first_ms, 1),
        Metric(
            "busy", "client's share of a core", "%", False, lambda each, _: each.cpu_seconds / each.seconds * 100, 2
        ),
    )
}


def read_of(metric: str) -> Callable[[Round, int], float | None]:
    """What reads a metric from a round and the size of its messages."""
    return METRICS[metric].read


def value_of(result: ClientResult, metric: str, size: int = 0) -> Figure | None:
    """The figure of a metric over a client's rounds, or of what was counted; None where it has none. ``size`` is that
    of a message."""
    if metric in COUNTED:
        return figure([result.counted[metric]]) if metric in result.counted else None
    read = read_of(metric)
    values = [value for each in result.rounds if (value := read(each, size)) is not None]
    return figure(values) if values else None


def shown(value: Figure | float | None, metric: str) -> str:
    """A figure's median as text, in the metric's digits; a dash for none."""
    if value is None:
        return "-"
    number = value.median if isinstance(value, Figure) else value
    if metric in COUNTED:
        return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    return f"{number:,.{METRICS[metric].digits}f}"


def limit_of(result: ClientResult, cores: int) -> str:
    """What limited a client: ``client``, ``server``, ``machine``, ``waiting``, or ``unknown``.

    ``client``: it used a core or more. ``machine``: client and server together used all cores. ``server``: the server
    used a core or more while the client had time left. ``waiting``: neither, they waited for each other.
    """
    if not result.rounds:
        return "unknown"
    client = statistics.median(each.cpu_seconds / each.seconds for each in result.rounds)
    servers = [each.server_cpu_seconds / each.seconds for each in result.rounds if each.server_cpu_seconds is not None]
    if not servers:
        return "client" if client >= BUSY else "unknown"
    server = statistics.median(servers)
    if client + server >= BUSY * cores:
        return "machine"
    if client >= BUSY * ONE_THREAD:
        return "client"
    return "server" if server >= BUSY * ONE_THREAD else "waiting"


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
    figures: Sequence[str] = (),
    relative_to: str = "",
    threshold: float = THRESHOLD,
) -> Iterator[Change]:
    """Every figure that both runs have; of all clients when none are named, and the same of figures."""
    later = dict(_figures(after, relative_to))
    for (scenario, client, metric), old in _figures(before, relative_to):
        new = later.get((scenario, client, metric))
        is_wanted = not clients or client in clients
        if new is None or not is_wanted or (figures and metric not in figures):
            continue
        verdict = verdict_on(old, new, metric == "rate", threshold)
        yield Change(scenario=scenario, client=client, metric=metric, before=old, after=new, verdict=verdict)


def _figures(run: Run, relative_to: str) -> Iterator[tuple[tuple[str, str, str], Figure]]:
    """All that are compared, each by its scenario, client and name."""
    for scenario in run.scenarios:
        for result in scenario.clients:
            if not result.rounds:
                continue
            for metric in METRICS_COMPARED:
                if value := _figure_in(scenario, result, metric, relative_to):
                    yield (scenario.name, result.client, metric), value
            for what, number in result.counted.items():
                yield (scenario.name, result.client, f"{what}/message"), figure([number])


def differences(before: Run, after: Run) -> Iterator[str]:
    """What else than the clients differs between the runs, and so may be the cause of a change; in sentences."""
    for what, old, new in other_machine(before.about, after.about):
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


def _figure_in(scenario: Scenario, result: ClientResult, metric: str, relative_to: str) -> Figure | None:
    value = value_of(result, metric, scenario.settings.size)
    if value is None or not relative_to or metric == "peak":  # memory does not depend on how fast a machine is
        return value
    base = scenario.client(relative_to)
    unit = value_of(base, metric, scenario.settings.size) if base else None
    if unit is None or not unit.low:
        return None
    return Figure(value.median / unit.median, value.low / unit.high, value.high / unit.low)


def verdict_on(before: Figure, after: Figure, more_is_better: bool, threshold: float = THRESHOLD) -> str:
    """``same`` unless the ranges are apart and the medians differ by more than the threshold."""
    overlap = before.low <= after.high and after.low <= before.high
    if overlap or abs(after.median - before.median) <= threshold * before.median:
        return "same"
    return "better" if (after.median > before.median) == more_is_better else "worse"
