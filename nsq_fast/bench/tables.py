"""Tables of a run as rows of text: the same for the terminal, the HTML report and the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsq_fast.printable import printable

from .figures import METRICS, figure, limit_of, shown, value_of
from .results import ClientResult, Run, Scenario

_CLOSED = ("rate", "spread", "megabytes", "cpu", "server_cpu", "syscalls", "p50", "p99", "peak", "limit")
_LATENCY = ("rate", "cpu", "server_cpu", "p50", "p95", "p99", "max", "peak", "limit")
_IDLE = ("busy", "peak")
_LONGEST_REASON = 100
_HEADS = {"spread": "spread", "syscalls": "syscalls/message", "limit": "limit"}


def header(scenario: Scenario) -> list[str]:
    """The heads of the columns."""
    return ["client", *(_head(column) for column in _columns(scenario))]


def rows(scenario: Scenario, cores: int) -> Iterator[list[str]]:
    """A row for each client; one that failed says why."""
    columns = _columns(scenario)
    for result in scenario.clients:
        if result.rounds:
            yield [result.client, *(_cell(result, column, scenario.settings.size, cores) for column in columns)]
        else:
            yield [result.client, f"failed: {reason_of(result)}", *([""] * (len(columns) - 1))]


def reason_of(result: ClientResult) -> str:
    """Why a client failed, in a line: the last one of what it wrote is that of the exception."""
    lines = result.failure.splitlines() or ["no reason was given"]
    return printable(lines[-1].strip(), _LONGEST_REASON)


def core_rows(run: Run) -> Iterator[list[str]]:
    """Group, workload, nanoseconds a message, spread."""
    for each in run.core:
        value = figure(each.ns_per_message)
        yield [
            each.group,
            each.name,
            f"{value.median:,.1f}",
            f"{value.spread:.0%}" if len(each.ns_per_message) > 1 else "-",
        ]


CORE_HEADER = ["group", "workload", "ns/message", "spread"]


def markdown(head: Sequence[str], body: Iterator[list[str]]) -> str:
    """A table for Markdown; all columns but the first are numbers."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])


def _columns(scenario: Scenario) -> list[str]:
    settings = scenario.settings
    wanted = _IDLE if settings.kind == "idle" else _LATENCY if settings.rate else _CLOSED
    return [column for column in wanted if _is_measured(scenario, column)]


def _is_measured(scenario: Scenario, column: str) -> bool:
    if column == "syscalls":
        return any(result.syscalls_per_message is not None for result in scenario.clients)
    if column in _HEADS:
        return True
    return any(value_of(result, column, 1) is not None for result in scenario.clients)


def _head(column: str) -> str:
    if column in _HEADS:
        return _HEADS[column]
    metric = METRICS[column]
    return metric.title if metric.title == metric.unit else f"{metric.title}, {metric.unit}"


def _cell(result: ClientResult, column: str, size: int, cores: int) -> str:
    if column == "spread":
        rate = value_of(result, "rate")
        return f"{rate.spread:.0%}" if rate and len(result.rounds) > 1 else "-"
    if column == "limit":
        return limit_of(result, cores)
    if column == "syscalls":
        value = result.syscalls_per_message
        return "-" if value is None else f"{value:.3g}"
    return shown(value_of(result, column, size), column)
