"""Tables of a run as rows of text: the same for the terminal, the HTML report and the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsq_fast.printable import printable

from .figures import METRICS, figure, limit_of, shown, value_of
from .instructions import INSTRUCTIONS
from .results import ClientResult, Run, Scenario
from .shares import floor_of
from .syscalls import SYSCALLS

_CLOSED = (
    "rate", "rate/floor", "spread", "megabytes", "cpu", "cpu/floor", INSTRUCTIONS, f"{INSTRUCTIONS}/floor",
    "server_cpu", SYSCALLS, "p50", "p99", "peak", "limit",
)  # fmt: skip
_LATENCY = ("rate", "cpu", "server_cpu", "p50", "p95", "p99", "p999", "max", "peak", "limit")
_START = ("package", "import", "import/floor", "first", "first/floor", "peak")
_IDLE = ("busy", "peak")
_LONGEST_REASON = 100
_OF_FLOOR = "/floor"
_COUNTED = (INSTRUCTIONS, SYSCALLS)
_HEADS = {"spread": "spread", "limit": "limit", **{name: f"{name}/message" for name in _COUNTED}}


def header(scenario: Scenario) -> list[str]:
    """The heads of the columns."""
    return ["client", *(_head(column) for column in _columns(scenario))]


def rows(scenario: Scenario, cores: int) -> Iterator[list[str]]:
    """A row for each client; one that failed says why."""
    columns = _columns(scenario)
    for result in scenario.clients:
        if result.rounds:
            yield [result.client, *(_cell(scenario, result, column, cores) for column in columns)]
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
    wanted = {"idle": _IDLE, "start": _START}.get(settings.kind, _LATENCY if settings.rate else _CLOSED)
    return [column for column in wanted if _is_measured(scenario, column)]


def _is_measured(scenario: Scenario, column: str) -> bool:
    if (name := column.removesuffix(_OF_FLOOR)) in _COUNTED:
        return any(name in result.counted for result in scenario.clients)
    if column in _HEADS:
        return True
    if column.endswith(_OF_FLOOR):
        return _floor_in(scenario) is not None and len(scenario.clients) > 1
    return any(value_of(result, column, 1) is not None for result in scenario.clients)


def _head(column: str) -> str:
    if column in _HEADS:
        return _HEADS[column]
    if (name := column.removesuffix(_OF_FLOOR)) in _COUNTED:
        return f"{name}, of the floor"
    metric = METRICS[name]
    if column.endswith(_OF_FLOOR):
        return f"{metric.title}, of the floor"
    return metric.title if metric.title == metric.unit else f"{metric.title}, {metric.unit}"


def _cell(scenario: Scenario, result: ClientResult, column: str, cores: int) -> str:
    if column == "spread":
        rate = value_of(result, "rate")
        return f"{rate.spread:.0%}" if rate and len(result.rounds) > 1 else "-"
    if column == "limit":
        return limit_of(result, cores)
    if column in _COUNTED:
        value = result.counted.get(column)
        return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    if column.endswith(_OF_FLOOR):
        return _of_floor(scenario, result, column.removesuffix(_OF_FLOOR))
    return shown(value_of(result, column, scenario.settings.size), column)


def _floor_in(scenario: Scenario) -> ClientResult | None:
    return scenario.client(floor_of(scenario.name))


def _of_floor(scenario: Scenario, result: ClientResult, metric: str) -> str:
    floor = _floor_in(scenario)
    if metric in _COUNTED:
        ours, of = result.counted.get(metric), floor.counted.get(metric) if floor else None
        return f"{ours / of:.2f}x" if ours and of else "-"
    unit = value_of(floor, metric, scenario.settings.size) if floor else None
    value = value_of(result, metric, scenario.settings.size)
    return f"{value.over(unit):.2f}x" if value and unit and unit.median else "-"
