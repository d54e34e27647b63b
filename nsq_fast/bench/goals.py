"""The goals: each a bound on one figure, or on a ratio of two figures of the same run; and whether a run meets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from .clients import ASYNCIO, COLUMNS, CORE_FLOOR, OURS, THREADS
from .figures import Figure, limit_of, shown, value_of
from .instructions import INSTRUCTIONS
from .results import Run
from .shares import SETTLED, SHARES, Share, Side, middle

COLUMNS_RATE = 1_500_000.0


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """One goal.

    Attributes:
        sides: the figures that it is about.
        actual: reads its value from a run, and how to show it; None where it was not measured.
    """

    what: str
    target: str
    sides: tuple[Side, ...]
    is_met: Callable[[float], bool]
    actual: Callable[[Run], tuple[float, str] | None]


class Judged(msgspec.Struct, frozen=True):
    """A goal and whether a run meets it: ``verdict`` is ``met``, ``missed`` or ``not measured``; ``actual`` says what
    the run lacks then."""

    what: str
    target: str
    actual: str
    verdict: str


def judge(run: Run) -> Iterator[Judged]:
    """Compare a run with every goal."""
    for goal in goals():
        found = goal.actual(run)
        if found is None:
            yield Judged(goal.what, goal.target, _lack(run, goal.sides), "not measured")
        else:
            yield Judged(goal.what, goal.target, found[1], "met" if goal.is_met(found[0]) else "missed")


def _lack(run: Run, sides: Sequence[Side]) -> str:
    lacking = [side for side in sides if value_in(run, side) is None]
    return f"the run has no {lacking[0].client} in {lacking[0].scenario}" if lacking else "the figure is 0"


def figure_in(run: Run, scenario: str, client: str, metric: str) -> float | None:
    """The median of a metric of a client in a scenario."""
    value = value_in(run, Side(scenario, client, metric))
    return value.median if value else None


def value_in(run: Run, side: Side) -> Figure | None:
    """The figure of a side over its rounds."""
    found = run.scenario(side.scenario)
    result = found.client(side.client) if found else None
    return value_of(result, side.metric, found.settings.size) if found and result else None


def _at_most(what: str, scenario: str, metric: str, bound: float, unit: str, client: str = OURS) -> Goal:
    return _bound(what, scenario, metric, bound, unit, False, client)


def _bound(what: str, scenario: str, metric: str, bound: float, unit: str, is_least: bool, client: str = OURS) -> Goal:
    def actual(run: Run) -> tuple[float, str] | None:
        value = figure_in(run, scenario, client, metric)
        return None if value is None else (value, f"{shown(value, metric)}{unit}")

    sign = "at least" if is_least else "at most"
    is_met: Callable[[float], bool] = (lambda v: v >= bound) if is_least else (lambda v: v <= bound)
    sides = (Side(scenario, client, metric),)
    return Goal(what=what, target=f"{sign} {bound:,g}{unit}", sides=sides, is_met=is_met, actual=actual)


def _times(what: str, scenario: str, metric: str, bound: float, other: str, client: str = OURS) -> Goal:
    """Ours is at least ``bound`` times the other's (of a rate), or at most (of what costs)."""
    is_rate = metric == "rate"
    sides = (Side(scenario, client, metric), Side(scenario, other, metric))

    def actual(run: Run) -> tuple[float, str] | None:
        ours, theirs = (value_in(run, side) for side in sides)
        if ours is None or theirs is None or not ours.median or not theirs.median:
            return None
        ratio = ours.over(theirs)
        text = f"{ratio:.2f}x" if is_rate or ratio > 0.95 else f"1/{1 / ratio:.1f}"
        is_close = ours.low <= bound * theirs.high and bound * theirs.low <= ours.high
        return ratio, f"{text} (within the spread of the target)" if is_close else text

    fraction = f"{bound:g}x" if is_rate or bound >= 1 else f"1/{1 / bound:g}"
    target = f"{'at least' if is_rate else 'at most'} {fraction} {other}"
    is_met: Callable[[float], bool] = (lambda v: v >= bound) if is_rate else (lambda v: v <= bound)
    return Goal(what=what, target=target, sides=sides, is_met=is_met, actual=actual)


def _share(share: Share) -> Goal:
    """The share is as its bound says; one that its rounds did not settle says so."""

    def actual(run: Run) -> tuple[float, str] | None:
        ratios = share.in_rounds(run.scenarios)
        if not ratios:
            return None
        found = middle(ratios)
        text = f"{found.median:.2f}x"
        if found.spread > SETTLED:
            text += f" ({found.low:.2f} to {found.high:.2f}: not settled by {len(ratios)} rounds)"
        by_count = share.counted(run.scenarios, INSTRUCTIONS)
        return found.median, text if by_count is None else f"{text}; by instructions {by_count:.2f}x"

    sign = "at least" if share.is_least else "at most"
    target = f"{sign} {share.bound:g}x {share.of}"
    return Goal(what=share.what, target=target, sides=share.sides, is_met=share.is_met_by, actual=actual)


def _columns_rate() -> Goal:
    """A rate that few servers give: a run in which the server used a core or more cannot show it."""
    side = Side("consume", COLUMNS, "rate")

    def actual(run: Run) -> tuple[float, str] | None:
        rate, found = value_in(run, side), run.scenario(side.scenario)
        result = found.client(COLUMNS) if found else None
        if rate is None or result is None:
            return None
        limit = limit_of(result, run.about.cores)
        is_bounded = rate.median < COLUMNS_RATE and limit in ("server", "machine")
        text = f"{shown(rate, 'rate')}/s" + (f", limited by the {limit}" if is_bounded else "")
        return (COLUMNS_RATE if is_bounded else rate.median), text

    target = f"at least {COLUMNS_RATE:,.0f}/s, or what the server gives"
    return Goal(
        what="consume, columns: messages/s",
        target=target,
        sides=(side,),
        is_met=lambda rate: rate >= COLUMNS_RATE,
        actual=actual,
    )


def goals() -> list[Goal]:
    """All of them, in the order they are shown."""
    found = [
        *map(_share, SHARES),
        _columns_rate(),
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
        _times("publish one at a time", "publish-single", "rate", 2, "gnsq"),
        _times("publish, 100 callers", concurrent, "rate", 1, "go-nsq async"),
        _times("publish, 100 callers", concurrent, "rate", 3.5, "gnsq"),
        _times("publish, 100 callers, linger", concurrent, "rate", 6, "gnsq", "nsq_fast linger"),
        _times("the same, nsqd's output buffer on: p99", "latency-buffered", "p99", 1, "go-nsq"),
        _at_most("idle on 100 connections: share of a core", "idle", "busy", 1, " %"),
        _at_most("idle on 100 connections: memory", "idle", "peak", 60, " MiB"),
        _at_most("import of nsq_fast: CPU", "start", "package", 60, " ms"),
        _at_most("import of its consumer and producer too: CPU", "start", "import", 60, " ms"),
        _at_most("first message after start, by lookup", "start", "first", 100, " ms"),
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
