"""The goals: each a bound on one figure, or on a ratio of two figures of the same run; and whether a run meets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from .clients import ASYNCIO, THREADS
from .figures import Figure, shown, value_of
from .results import Run
from .suite import CONNECTIONS, IN_FLIGHT

OURS = "nsq_fast"
CORE_FLOOR = "floor: core"


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """One goal. ``actual`` reads its value from a run, and how to show it; None where it was not measured."""

    what: str
    target: str
    is_met: Callable[[float], bool]
    actual: Callable[[Run], tuple[float, str] | None]


class Judged(msgspec.Struct, frozen=True):
    """A goal and whether a run meets it: ``verdict`` is ``met``, ``missed`` or ``not measured``."""

    what: str
    target: str
    actual: str
    verdict: str


def judge(run: Run) -> Iterator[Judged]:
    """Compare a run with every goal."""
    for goal in goals():
        found = goal.actual(run)
        if found is None:
            yield Judged(goal.what, goal.target, "-", "not measured")
        else:
            yield Judged(goal.what, goal.target, found[1], "met" if goal.is_met(found[0]) else "missed")


def figure_in(run: Run, scenario: str, client: str, metric: str) -> float | None:
    """The median of a metric of a client in a scenario."""
    value = _value_in(run, scenario, client, metric)
    return value.median if value else None


def _value_in(run: Run, scenario: str, client: str, metric: str) -> Figure | None:
    found = run.scenario(scenario)
    result = found.client(client) if found else None
    return value_of(result, metric, found.settings.size) if found and result else None


def _at_most(what: str, scenario: str, metric: str, bound: float, unit: str, client: str = OURS) -> Goal:
    return _bound(what, scenario, metric, bound, unit, False, client)


def _bound(what: str, scenario: str, metric: str, bound: float, unit: str, is_least: bool, client: str = OURS) -> Goal:
    def actual(run: Run) -> tuple[float, str] | None:
        value = figure_in(run, scenario, client, metric)
        return None if value is None else (value, f"{shown(value, metric)}{unit}")

    sign = "at least" if is_least else "at most"
    is_met: Callable[[float], bool] = (lambda v: v >= bound) if is_least else (lambda v: v <= bound)
    return Goal(what=what, target=f"{sign} {bound:,g}{unit}", is_met=is_met, actual=actual)


def _times(what: str, scenario: str, metric: str, bound: float, other: str, client: str = OURS) -> Goal:
    """Ours is at least ``bound`` times the other's (of a rate), or at most (of what costs)."""
    is_rate = metric == "rate"

    def actual(run: Run) -> tuple[float, str] | None:
        ours, theirs = _value_in(run, scenario, client, metric), _value_in(run, scenario, other, metric)
        if ours is None or theirs is None or not ours.median or not theirs.median:
            return None
        ratio = ours.over(theirs)
        text = f"{ratio:.2f}x" if is_rate or ratio > 0.95 else f"1/{1 / ratio:.1f}"
        is_close = ours.low <= bound * theirs.high and bound * theirs.low <= ours.high
        return ratio, f"{text} (within the spread of the target)" if is_close else text

    fraction = f"{bound:g}x" if is_rate or bound >= 1 else f"1/{1 / bound:g}"
    target = f"{'at least' if is_rate else 'at most'} {fraction} {other}"
    is_met: Callable[[float], bool] = (lambda v: v >= bound) if is_rate else (lambda v: v <= bound)
    return Goal(what=what, target=target, is_met=is_met, actual=actual)


def _growth(what: str, scenarios: Sequence[str]) -> Goal:
    """Over these scenarios CPU per message grows by less than a factor; the growth of the floor is shown beside it."""

    def values(run: Run, client: str) -> list[float] | None:
        found = [figure_in(run, name, client, "cpu") for name in scenarios]
        known = [value for value in found if value]
        return known if len(known) == len(scenarios) else None

    def actual(run: Run) -> tuple[float, str] | None:
        ours, floor = values(run, OURS), values(run, CORE_FLOOR)
        if ours is None:
            return None
        grown = max(ours) / min(ours)
        text = f"{grown:.2f}x ({', '.join(f'{value:.3f}' for value in ours)} µs)"
        return grown, text if floor is None else f"{text}; {CORE_FLOOR} {max(floor) / min(floor):.2f}x"

    return Goal(what=what, target="less than 1.3x", is_met=lambda v: v < 1.3, actual=actual)


def goals() -> list[Goal]:
    """All of them, in the order they are shown."""
    found = [
        _at_most("consume: client CPU per message", "consume", "cpu", 0.5, " µs"),
        _times("consume: client CPU per message", "consume", "cpu", 1 / 8, "go-nsq"),
        _times("consume: client CPU per message", "consume", "cpu", 1 / 40, "gnsq"),
        _times("consume: messages/s", "consume", "rate", 0.85, CORE_FLOOR),
        _times("consume: messages/s", "consume", "rate", 3, "go-nsq"),
        _times("consume: messages/s", "consume", "rate", 14, "gnsq"),
        _times("consume: messages/s", "consume", "rate", 7, "asyncnsq"),
    ]
    for name, title in (
        ("1k", "1 KiB"),
        ("16k", "16 KiB"),
        ("snappy", "snappy"),
        ("deflate", "deflate"),
        ("tls", "TLS"),
    ):
        found.append(_times(f"consume, {title}: messages/s", f"consume-{name}", "rate", 1, "go-nsq"))
        found.append(_times(f"consume, {title}: client CPU", f"consume-{name}", "cpu", 1, "go-nsq"))
    concurrent = "publish-concurrent"
    return [
        *found,
        _bound("handlers that sleep 5 ms, 100 at once", "sleep", "rate", 18_000, "/s", True),
        _times("publish one at a time", "publish-single", "rate", 1.2, "go-nsq"),
        _times("publish one at a time", "publish-single", "rate", 2, "gnsq"),
        _times("publish, 100 callers", concurrent, "rate", 1, "go-nsq async"),
        _times("publish, 100 callers", concurrent, "rate", 3.5, "gnsq"),
        _times("publish, 100 callers, linger", concurrent, "rate", 6, "gnsq", "nsq_fast linger"),
        _at_most("MPUB x 200: client CPU per message", "publish-batch", "cpu", 0.15, " µs"),
        _times("publish to handler at 10,000/s: p99", "latency", "p99", 1, "go-nsq"),
        _times("the same, nsqd's output buffer on: p99", "latency-buffered", "p99", 1, "go-nsq"),
        _at_most("idle on 100 connections: share of a core", "idle", "busy", 1, " %"),
        _at_most("idle on 100 connections: memory", "idle", "peak", 60, " MiB"),
        _growth("CPU per message, 1 to 100 connections", [f"connections-{n}" for n in CONNECTIONS]),
        _growth("CPU per message, 10 to 10,000 in flight", [f"in-flight-{n}" for n in IN_FLIGHT]),
        *_asyncio_goals(),
        *_thread_goals(),
    ]


def _asyncio_goals() -> list[Goal]:
    return [
        _times("asyncio, consume: messages/s", "consume", "rate", 3, "asyncnsq", ASYNCIO),
        _times("asyncio, consume: messages/s", "consume", "rate", 4, "ansq", ASYNCIO),
        _times("asyncio, consume: client CPU per message", "consume", "cpu", 1 / 5, "ansq", ASYNCIO),
        _times("asyncio, handlers that sleep 5 ms, 100 at once", "sleep", "rate", 0.9, OURS, ASYNCIO),
        _times("asyncio, publish one at a time", "publish-single", "rate", 1, "ansq", ASYNCIO),
        _times("asyncio, publish, 100 callers", "publish-concurrent", "rate", 2, "ansq", ASYNCIO),
        _times("asyncio, publish at 10,000/s: p99", "publish-rate", "p99", 2, OURS, ASYNCIO),
        _at_most("asyncio, idle on 100 connections: share of a core", "idle", "busy", 0.5, " %", ASYNCIO),
    ]


def _thread_goals() -> list[Goal]:
    return [
        _bound("threads, consume, 4 handler threads", "consume", "rate", 100_000, "/s", True, THREADS),
        _times("threads, publish from 16", "publish-16", "rate", 1, "gnsq", THREADS),
        _at_most("threads, idle on 100 connections: share of a core", "idle", "busy", 0.5, " %", THREADS),
    ]
