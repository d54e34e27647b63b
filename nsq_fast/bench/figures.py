"""Figures of rounds: medians with their spread, ratios, and what limited a client."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from .results import ClientResult, Round

BUSY = 0.9
ONE_THREAD = 1.0


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
    """The figure of a metric over a client's rounds; None where it has none. ``size`` is that of a message."""
    read = read_of(metric)
    values = [value for each in result.rounds if (value := read(each, size)) is not None]
    return figure(values) if values else None


def shown(value: Figure | float | None, metric: str) -> str:
    """A figure's median as text, in the metric's digits; a dash for none."""
    if value is None:
        return "-"
    number = value.median if isinstance(value, Figure) else value
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
