"""What a run of the proof says at its end: as Markdown, at most 80 columns wide, and as JSON. No I/O."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .watch import Change
from .windows import Windows, percentile

WIDTH = 80
SLOWEST = 3


@dataclass(frozen=True)
class Event:
    """One fault. Times are of ``time.monotonic_ns``."""

    name: str
    began: int
    ended: int
    happened: str
    healthy_after: float


@dataclass(frozen=True)
class Findings:
    """What was counted in one run.

    Attributes:
        cluster: what it ran on.
        events: the faults, in their order; ``skipped`` those that could not be had, with the reason.
        lost: messages answered OK that are on the servers, and were not handled: the client's loss.
        lost_by_servers: those answered OK that the servers do not have any more, after a kill.
        lost_unexplained: those that the servers do not have, without a kill that explains it.
        failed: publishes that ended with an error although the cluster took publishes to their partitions.
        refused: those that ended with an error while the cluster took none.
        errors: texts of the errors of publishes, with their numbers.
    """

    cluster: str
    seconds: float
    keys: int
    partitions: int
    events: Sequence[Event]
    skipped: Mapping[str, str]
    stored: int
    handled: int
    distinct: int
    lost: int
    lost_by_servers: int
    lost_unexplained: int
    failed: int
    refused: int
    disordered: int
    too_early: int
    split_keys: int
    rollbacks: int
    duplicates: Mapping[str, int]
    errors: Mapping[str, int]
    leader_changes: int
    windows: Mapping[str, Windows]

    @property
    def is_proved(self) -> bool:
        """Whether what is promised was so."""
        late = sum(len(windows.never) for windows in self.windows.values())
        return not any(
            (self.lost, self.lost_unexplained, self.failed, self.disordered, self.too_early, self.split_keys, late)
        )


def as_json(findings: Findings) -> dict[str, Any]:
    """All of it, with the windows as percentiles."""
    plain = {name: value for name, value in vars(findings).items() if name not in ("events", "windows")}
    plain["is_proved"] = findings.is_proved
    plain["events"] = [
        {
            "fault": event.name,
            "seconds": round((event.ended - event.began) / 1e9, 1),
            "happened": event.happened,
            "healthy_after": round(event.healthy_after, 1),
        }
        for event in findings.events
    ]
    plain["windows"] = {name: _window(windows) for name, windows in findings.windows.items()}
    return plain


def as_markdown(findings: Findings) -> str:
    """All of it, to be read."""
    proved = "What is promised was so." if findings.is_proved else "WHAT IS PROMISED WAS NOT SO."
    head = (
        f"{findings.stored:,} publishes with {findings.keys} keys to {findings.partitions} ordered partitions in"
        f" {findings.seconds:,.0f} s, on {findings.cluster}; {findings.leader_changes} changes of leaders. {proved}"
    )
    parts = ["# Bad days of a redesigned cluster", _wrapped(head), _counts(findings), _windows(findings)]
    parts += [_faults(findings.events), *_details(findings)]
    return "\n\n".join(parts) + "\n"


def _counts(findings: Findings) -> str:
    rows: list[tuple[str, object]] = [
        ("publishes answered OK", findings.stored),
        ("publishes that failed although the cluster took them", findings.failed),
        ("publishes that the cluster refused for all their time", findings.refused),
        ("messages handled", findings.distinct),
        ("lost by the client", findings.lost),
        ("lost by servers: answered OK, gone after a kill", findings.lost_by_servers),
        ("gone from servers without such a reason", findings.lost_unexplained),
        ("out of order by key", findings.disordered),
        ("begun before the one before it was finished", findings.too_early),
        ("keys in more than one partition", findings.split_keys),
        ("on_order_violation: a partition went back", findings.rollbacks),
    ]
    rows += [(f"again: {cause}", count) for cause, count in findings.duplicates.items()]
    return _table(("counted", ""), [(what, f"{count:,}") for what, count in rows])


def _windows(findings: Findings) -> str:
    rows = []
    for name, windows in findings.windows.items():
        for since, values in (("named by lookup", windows.named), ("ready there", windows.ready)):
            figures = [
                f"{value:.2f} s" for value in (percentile(values, 50), percentile(values, 99), max(values, default=0))
            ]
            rows.append((f"to the first {name}, from {since}", str(len(values)), *figures))
        rows.append((f"no {name} at a leader that was there", str(len(windows.never)), "", "", ""))
        rows.append(
            (f"{name}: leaders that were soon gone again, or never ready", str(windows.passed_over), "", "", "")
        )
    return _table(("after a change of leader", "n", "p50", "p99", "most"), rows)


def _faults(events: Iterable[Event]) -> str:
    counts = Counter(event.name for event in events)
    return _table(("fault", "times"), [(name, str(count)) for name, count in counts.items()])


def _details(findings: Findings) -> list[str]:
    parts = []
    if findings.skipped:
        parts.append(_list("Not done", (f"{name}: {reason}" for name, reason in findings.skipped.items())))
    if findings.errors:
        parts.append(_list("Errors of publishes", (f"{count} x {text}" for text, count in findings.errors.items())))
    late = [line for name, windows in findings.windows.items() for line in _late(name, windows, findings.events)]
    if late:
        parts.append(_list("Slowest", late))
    lines = (
        f"{event.name}: {event.happened}; healthy again {event.healthy_after:.0f} s later" for event in findings.events
    )
    return [*parts, _list("What happened", lines)]


def _late(name: str, windows: Windows, events: Sequence[Event]) -> Iterator[str]:
    """The changes after which clients were the slowest, and those after which none came."""
    for window in windows.slowest(SLOWEST):
        where = f"partition {window.change.partition}, {_fault_at(window.change, events)}"
        yield f"{name}: {window.ready:.2f} s after the leader was ready, {window.named:.2f} s after its name: {where}"
    for change in windows.never:
        yield f"{name}: none came to the leader of partition {change.partition}, {_fault_at(change, events)}"


def _fault_at(change: Change, events: Sequence[Event]) -> str:
    """The last fault that had begun when a leader was named."""
    named = min(change.named.values())
    begun = [event for event in events if event.began <= named]
    return f"{begun[-1].name}, {(named - begun[-1].began) / 1e9:.1f} s after it began" if begun else "before any fault"


def _list(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"## {title}", "", *(_wrapped(f"- {line}", "  ") for line in lines)])


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; its first column gives way where it is too wide."""
    others = [max(len(row[place]) for row in (head, *rows)) for place in range(1, len(head))]
    first = min(max(len(row[0]) for row in (head, *rows)), WIDTH - sum(width + 3 for width in others) - 4)
    lines = [
        _line(head, first, others),
        f"|{'-' * (first + 2)}|" + "".join(f"{'-' * (width + 1)}:|" for width in others),
    ]
    return "\n".join([*lines, *(_line(row, first, others) for row in rows)])


def _line(row: Sequence[str], first: int, others: Sequence[int]) -> str:
    name = textwrap.shorten(row[0], first, placeholder="...")
    cells = [f"{name:<{first}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], others, strict=True))]
    return f"| {' | '.join(cells)} |"


def _window(windows: Windows) -> dict[str, Any]:
    found: dict[str, Any] = {"passed_over": windows.passed_over, "never": len(windows.never)}
    for name, values in (("named", windows.named), ("ready", windows.ready)):
        figures = {"n": len(values), "p50": percentile(values, 50), "p99": percentile(values, 99)}
        found[name] = {**figures, "most": max(values, default=0.0)}
    return found
