"""The scenarios of a whole comparison, what `nsq-fast bench suite` runs; and the goals, each a bound on one figure, or
on a ratio of figures of the same run.

Some ratios are taken in turns: what a client does with a message over what its floor, or another client, does in the
same round. A machine that is slow, or busy with something else, is so for both, and each round gives one ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from .clients import CORE_FLOOR, KEYED, OURS, SPARK, SPARK_FLOOR
from .results import (
    INSTRUCTIONS,
    METRICS,
    ClientResult,
    Figure,
    Run,
    Scenario,
    Settings,
    figure,
    limit_of,
    shown,
    value_of,
)

_OURS = ("nsq_fast", "nsq_fast as gnsq", "go-nsq")
_FACES = (*_OURS, "nsq_fast aio", "nsq_fast threads")
_FLOOR = (OURS, CORE_FLOOR)
_BESIDE_FLOOR = (*_OURS, CORE_FLOOR)
_PUBLISH: dict[str, Any] = {"kind": "publish"}
_CONSUME: dict[str, Any] = {"kind": "consume"}
CONNECTIONS = (1, 10, 100)
IN_FLIGHT = (10, 100, 1000, 10_000)
_SPARK = (
    ("stream", "Spark: micro-batches of 250,000 rows, with a journal", 2_000_000),
    ("read", "Spark: a table of 1,000,000 rows, with a journal", 1_000_000),
    ("cold", "Spark: the first table of a session, 400,000 rows", 400_000),
    ("write", "Spark: a write of 2,000,000 rows", 2_000_000),
)


class Plan(msgspec.Struct, frozen=True):
    """A scenario of the suite: its name, what it measures, with which clients (all when empty).

    Plans that follow each other and have the same ``group`` are compared with each other, so they run in turns.
    """

    name: str
    title: str
    settings: Settings
    clients: tuple[str, ...] = ()
    is_short: bool = False
    is_embedded: bool = False
    group: str = ""

    def over_tls(self) -> Plan:
        return msgspec.structs.replace(self, settings=msgspec.structs.replace(self.settings, tls=True))


def plans(duration: float, rounds: int) -> list[Plan]:
    """The suite, each client busy for ``duration`` seconds a round."""

    def plan(
        name: str, title: str, clients: tuple[str, ...] = (), short: bool = False, group: str = "", **settings: Any
    ) -> Plan:
        made = Settings(**{"duration": duration, "rounds": rounds, **settings})
        return Plan(name, title, made, clients, short, made.needs_cluster, group)

    def growing(group: str, amount: int, title: str, **settings: Any) -> Plan:
        return plan(f"{group}-{amount}", title, _FLOOR, group=group, **_CONSUME, **settings)

    rate: dict[str, Any] = {"rate": 10_000.0, "duration": max(1.0, duration)}
    return [
        plan("consume", "Consume, 200 bytes", short=True, **_CONSUME),
        plan("consume-1k", "Consume, 1 KiB", _OURS, size=1024, **_CONSUME),
        plan("consume-16k", "Consume, 16 KiB", _OURS, size=16384, **_CONSUME),
        plan("consume-snappy", "Consume, snappy", _BESIDE_FLOOR, compression="snappy", **_CONSUME),
        plan("consume-deflate", "Consume, deflate", _BESIDE_FLOOR, compression="deflate", **_CONSUME),
        plan("consume-tls", "Consume, TLS", _BESIDE_FLOOR, tls=True, **_CONSUME),
        plan(
            "sleep", "Handlers that sleep 5 ms, 100 at once", _FACES, handler_sleep=0.005, concurrency=100, **_CONSUME
        ),
        plan("publish-single", "Publish one at a time", short=True, mode="single", **_PUBLISH),
        plan("publish-concurrent", "Publish, 100 callers", short=True, mode="concurrent", concurrency=100, **_PUBLISH),
        plan("publish-16", "Publish, 16 callers", (*_FACES, "gnsq"), mode="concurrent", concurrency=16, **_PUBLISH),
        plan("publish-rate", "Publish at 10,000/s", ("nsq_fast", "nsq_fast aio"), mode="single", **_PUBLISH, **rate),
        plan("publish-batch", "MPUB x 200", short=True, mode="batch", **_PUBLISH),
        plan("latency", "Publish to handler, 10,000/s", short=True, kind="roundtrip", unbuffered=True, **rate),
        plan("latency-buffered", "The same, nsqd's output buffer on", _OURS, kind="roundtrip", **rate),
        plan(
            "latency-half",
            "Publish to handler, half of the peak rate",
            (OURS, "go-nsq"),
            kind="roundtrip",
            unbuffered=True,
            rate_share=0.5,
            duration=max(1.0, duration),
        ),
        plan("start", "Import, and the first message by lookup", _FLOOR, short=True, kind="start"),
        plan("idle", "100 idle connections", _FACES, kind="idle", connections=100, settle=2.0),
        *(
            growing("connections", many, _connections(many), connections=many, max_in_flight=10_000)
            for many in CONNECTIONS
        ),
        *(growing("in-flight", many, f"{many:,} in flight", max_in_flight=many) for many in IN_FLIGHT),
        plan("ordered", "Ordered, 4 partitions (embedded cluster)", (OURS,), kind="ordered", partitions=4),
        plan("ordered-1", "Ordered, one partition (embedded cluster)", (OURS, "floor: ordered"), kind="ordered"),
        plan(
            "publish-key",
            "Publish with a key, 100 callers, 4 partitions (embedded cluster)",
            (OURS, KEYED),
            mode="concurrent",
            concurrency=100,
            partitions=4,
            **_PUBLISH,
        ),
        *(
            plan(f"spark-{mode}", title, (SPARK, SPARK_FLOOR), kind="spark", mode=mode, count=count)
            for mode, title, count in _SPARK
        ),
    ]


def _connections(many: int) -> str:
    return "1 connection" if many == 1 else f"{many:,} connections"


def in_turns(todo: Iterable[Plan]) -> Iterator[list[Plan]]:
    """Those that take turns, together; each other one alone."""
    for _, together in groupby(todo, key=lambda plan: plan.group or plan.name):
        yield list(together)


def titles() -> dict[str, str]:
    """The title of each scenario by its name."""
    return {plan.name: plan.title for plan in plans(1.0, 1)}


SETTLED = 0.10
"""The spread of a ratio with which it counts as known."""

_CONFIDENCE = 0.90
_SPARK_SHARE = 0.6


class Side(msgspec.Struct, frozen=True):
    """One figure of a run, or of a round: of a client in a scenario."""

    scenario: str
    client: str
    metric: str


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A bound on the figures of ``top``, multiplied; over those of ``bottom``, where there are any.

    Attributes:
        bound: it is at least this where ``is_least``, else at most.
        of: what ``bottom`` is, in words; of a figure alone its unit.
        in_turns: the ratio is that of rounds that took turns, and further rounds are taken until it is known.
        or_what_the_server_gives: a rate that few servers give: a run in which the server used a core or more cannot
            show it.
    """

    what: str
    bound: float
    is_least: bool
    top: tuple[Side, ...]
    bottom: tuple[Side, ...] = ()
    of: str = ""
    in_turns: bool = False
    or_what_the_server_gives: bool = False

    @property
    def sides(self) -> tuple[Side, ...]:
        return self.top + self.bottom

    @property
    def target(self) -> str:
        unit = f"x {self.of}" if self.bottom else self.of
        rest = ", or what the server gives" if self.or_what_the_server_gives else ""
        bound = f"{self.bound:,g}" if self.bound < 1e6 else f"{self.bound:,.0f}"
        return f"{'at least' if self.is_least else 'at most'} {bound}{unit}{rest}"

    def is_met_by(self, value: float) -> bool:
        """Whether a figure or a ratio is as the goal has it."""
        return value >= self.bound if self.is_least else value <= self.bound

    def in_rounds(self, scenarios: Sequence[Scenario]) -> list[float]:
        """The ratio of each round; none where a client was not measured."""
        top, bottom = ([_values(scenarios, side) for side in sides] for sides in (self.top, self.bottom))
        rounds = range(min(map(len, top + bottom)))
        pairs = [[math.prod(each[number] for each in values) for values in (top, bottom)] for number in rounds]
        return [above / below for above, below in pairs if below]

    def counted(self, scenarios: Sequence[Scenario], what: str) -> float | None:
        """The ratio of what a message costs in this count; None where a client was not counted, or it is no cost."""
        if any(side.metric != "cpu" for side in self.sides):
            return None
        found = [result_of(scenarios, side) for side in self.sides]
        counts = [result.counted.get(what, 0.0) if result else 0.0 for result, _ in found]
        return math.prod(counts[: len(self.top)]) / math.prod(counts[len(self.top) :]) if all(counts) else None

    def actual(self, run: Run) -> tuple[float, str] | None:
        """What a run says of it, and how to show that; None where it was not measured."""
        if self.in_turns:
            return self._settled(run)
        figures = [value_in(run, side) for side in self.sides]
        if any(value is None or (self.bottom and not value.median) for value in figures):
            return None
        ours, *others = (value for value in figures if value is not None)
        if not others:
            return self._alone(run, ours)
        (theirs,) = others
        is_close = ours.low <= self.bound * theirs.high and self.bound * theirs.low <= ours.high
        return ours.over(theirs), _ratio(ours.over(theirs)) + (" (within the spread of the target)" if is_close else "")

    def _settled(self, run: Run) -> tuple[float, str] | None:
        ratios = self.in_rounds(run.scenarios)
        if not ratios:
            return None
        found = middle(ratios)
        text = _ratio(found.median)
        if found.spread > SETTLED:
            text += f" ({_ratio(found.low)[:-1]} to {_ratio(found.high)[:-1]}: not settled by {len(ratios)} rounds)"
        by_count = self.counted(run.scenarios, INSTRUCTIONS)
        return found.median, text if by_count is None else f"{text}; by instructions {_ratio(by_count)}"

    def _alone(self, run: Run, ours: Figure) -> tuple[float, str]:
        (side,) = self.top
        text = f"{shown(ours, side.metric)}{self.of}"
        if self.or_what_the_server_gives and ours.median < self.bound:
            result, _ = result_of(run.scenarios, side)
            limit = limit_of(result, run.about.cores) if result else ""
            if limit in ("server", "machine"):
                return self.bound, f"{text}, limited by the {limit}"
        return ours.median, text


def _ratio(value: float) -> str:
    return f"{value:.2f}x" if value >= 0.1 else f"{value:.3f}x"


def result_of(scenarios: Iterable[Scenario], side: Side) -> tuple[ClientResult | None, int]:
    """What the client of a side did, None where it was not measured; and the size of its messages."""
    for scenario in scenarios:
        if scenario.name == side.scenario:
            return scenario.client(side.client), scenario.settings.size
    return None, 0


def _values(scenarios: Iterable[Scenario], side: Side) -> list[float]:
    result, size = result_of(scenarios, side)
    found = [METRICS[side.metric].read(each, size) for each in result.rounds] if result else []
    return [value for value in found if value is not None] if None not in found else []


def value_in(run: Run, side: Side) -> Figure | None:
    """The figure of a side over its rounds."""
    result, size = result_of(run.scenarios, side)
    return value_of(result, side.metric, size) if result else None


def figure_in(run: Run, scenario: str, client: str, metric: str) -> float | None:
    """The median of a metric of a client in a scenario."""
    value = value_in(run, Side(scenario, client, metric))
    return value.median if value else None


def middle(values: Sequence[float]) -> Figure:
    """The median, and where the true one lies with 90 % confidence, by the order of the values alone.

    Of fewer than five values it is their whole range. Unlike the range, it becomes narrower the more there are.
    Raises ValueError where there are no values.
    """
    ordered, left_out = sorted(values), 0
    while 2 * _at_most(left_out, len(ordered)) <= 1 - _CONFIDENCE:
        left_out += 1
    cut = max(0, left_out - 1)
    inner = figure(ordered[cut : len(ordered) - cut])
    return Figure(statistics.median(ordered), inner.low, inner.high)


def _at_most(few: int, tosses: int) -> float:
    """How probable it is that a coin shows heads ``few`` times or fewer."""
    return sum(math.comb(tosses, number) for number in range(few + 1)) / (1 << tosses)


def is_settled(ratios: Sequence[float]) -> bool:
    """Whether a ratio is known well enough, or cannot be: one that nobody measured is not waited for."""
    return not ratios or (len(ratios) > 1 and middle(ratios).spread <= SETTLED)


def turns_among(scenarios: Iterable[str]) -> list[Goal]:
    """The goals taken in turns that need no other scenarios than these."""
    names = set(scenarios)
    return [goal for goal in GOALS if goal.in_turns and names.issuperset(side.scenario for side in goal.sides)]


def unsettled(scenarios: Sequence[Scenario]) -> set[str]:
    """The names of those of which a goal compares figures that are not known well enough."""
    goals = turns_among(scenario.name for scenario in scenarios)
    return {side.scenario for goal in goals if not is_settled(goal.in_rounds(scenarios)) for side in goal.sides}


def clients_compared(scenarios: Iterable[str]) -> set[str]:
    """The clients that take turns for goals among these scenarios."""
    return {side.client for goal in turns_among(scenarios) for side in goal.sides}


def floor_of(scenario: str) -> str:
    """The client that is the floor of a scenario; the compiled core where no goal names another."""
    named = (side.client for goal in GOALS if goal.in_turns for side in goal.bottom if side.scenario == scenario)
    return next((client for client in named if client.startswith("floor: ")), CORE_FLOOR)


class Judged(NamedTuple):
    """A goal and whether a run meets it: ``verdict`` is ``met``, ``missed`` or ``not measured``; ``actual`` says what
    the run lacks then."""

    what: str
    target: str
    actual: str
    verdict: str


def judge(run: Run) -> Iterator[Judged]:
    for goal in GOALS:
        if found := goal.actual(run):
            verdict = "met" if goal.is_met_by(found[0]) else "missed"
            yield Judged(goal.what, goal.target, found[1], verdict)
        else:
            lacking = [side for side in goal.sides if value_in(run, side) is None]
            text = f"the run has no {lacking[0].client} in {lacking[0].scenario}" if lacking else "the figure is 0"
            yield Judged(goal.what, goal.target, text, "not measured")


# The goals


def _times(
    what: str, scenario: str, metric: str, bound: float, other: str, client: str = OURS, in_turns: bool = False
) -> Goal:
    """Ours over another one's, in one scenario: at least ``bound`` of a rate, at most of what costs."""
    top, bottom = (Side(scenario, client, metric),), (Side(scenario, other, metric),)
    is_least = metric == "rate"
    return Goal(what=what, of=other, bound=bound, is_least=is_least, top=top, bottom=bottom, in_turns=in_turns)


_turns = partial(_times, in_turns=True)


def _bound(what: str, scenario: str, metric: str, bound: float, unit: str, client: str = OURS) -> Goal:
    return Goal(what=what, of=unit, bound=bound, is_least=metric == "rate", top=(Side(scenario, client, metric),))


def _cross(what: str, of: str, bound: float, top: Sequence[tuple[str, str]], bottom: Sequence[tuple[str, str]]) -> Goal:
    """CPU a message of clients in scenarios, over that of others."""
    above, below = (tuple(Side(*each, "cpu") for each in sides) for sides in (top, bottom))
    return Goal(what=what, of=of, bound=bound, is_least=False, top=above, bottom=below, in_turns=True)


_FEW, _MANY = (f"in-flight-{count}" for count in (min(IN_FLIGHT), max(IN_FLIGHT)))
_ONE, _HUNDRED = (f"connections-{count}" for count in (min(CONNECTIONS), max(CONNECTIONS)))
_CONCURRENT = "publish-concurrent"
_AT_RATE, _AT_HALF = "publish to handler at 10,000/s", "publish to handler at half of the peak rate"

GOALS: tuple[Goal, ...] = (
    _turns("consume: client CPU per message", "consume", "cpu", 1.25, CORE_FLOOR),
    _turns("consume, batch_handler: client CPU per message", "consume", "cpu", 1.1, "floor: batches",
           "nsq_fast batches"),
    _turns("consume, columns: client CPU per message", "consume", "cpu", 0.5, CORE_FLOOR, "nsq_fast columns"),
    *(
        _turns(f"consume, {name}: client CPU per message", f"consume-{name.lower()}", "cpu", 1.3, CORE_FLOOR)
        for name in ("TLS", "snappy", "deflate")
    ),
    _cross(
        "CPU per message with 10 in flight, over that with 10,000",
        "the same of floor: core",
        1.2,
        [(_FEW, OURS), (_MANY, CORE_FLOOR)],
        [(_MANY, OURS), (_FEW, CORE_FLOOR)],
    ),
    _turns("10 in flight: messages/s", _FEW, "rate", 0.8, CORE_FLOOR),
    _cross("CPU per message on 100 connections", "that on one", 1.3, [(_HUNDRED, OURS)], [(_ONE, OURS)]),
    _turns("MPUB x 200: client CPU per message", "publish-batch", "cpu", 1.5, "floor: ready bytes"),
    _turns("publish one at a time: messages/s", "publish-single", "rate", 0.9, CORE_FLOOR),
    _turns("publish one at a time: messages/s", "publish-single", "rate", 2, "go-nsq"),
    *(
        _turns("publish, 100 callers, no coalescing: messages/s", _CONCURRENT, "rate", bound, other,
               "nsq_fast separate")
        for bound, other in ((4, "gnsq"), (0.9, "floor: pipelined"))
    ),
    _turns("publish with a key: client CPU per message", "publish-key", "cpu", 1.08, OURS, KEYED),
    _turns("ordered, one partition: messages/s", "ordered-1", "rate", 0.95, "floor: ordered"),
    *(
        _turns(f"{what}: {name}", scenario, metric, 0.7, "go-nsq")
        for what, scenario in ((_AT_RATE, "latency"), (_AT_HALF, "latency-half"))
        for metric, name in (("p99", "p99"), ("p999", "p99.9"))
    ),
    # The rate; and, as nsqd has the same cores, what Spark with its workers needs of them.
    *(
        _turns(f"Spark, {name}: {title}", f"spark-{mode}", metric, bound, SPARK_FLOOR, SPARK)
        for mode, name in (
            ("stream", "stream with a journal"), ("read", "table with a journal"), ("cold", "first table")
        )
        for metric, title, bound in (
            ("rate", "rows/s", _SPARK_SHARE),
            ("cpu", "CPU per row", round(1 / _SPARK_SHARE, 2)),
        )
    ),
    _turns("Spark, write: rows/s", "spark-write", "rate", _SPARK_SHARE, SPARK_FLOOR, SPARK),
    Goal(
        what="consume, columns: messages/s",
        of="/s",
        bound=1_500_000.0,
        is_least=True,
        top=(Side("consume", "nsq_fast columns", "rate"),),
        or_what_the_server_gives=True,
    ),
    _times("consume: client CPU per message", "consume", "cpu", 1 / 8, "go-nsq"),
    _times("consume: client CPU per message", "consume", "cpu", 1 / 40, "gnsq"),
    *(
        _times("consume: messages/s", "consume", "rate", bound, other)
        for bound, other in ((0.85, CORE_FLOOR), (3, "go-nsq"), (14, "gnsq"), (7, "asyncnsq"))
    ),
    *(
        _times(f"consume, {title}: {what}", f"consume-{name}", metric, 1, "go-nsq")
        for name, title in (
            ("1k", "1 KiB"), ("16k", "16 KiB"), ("snappy", "snappy"), ("deflate", "deflate"), ("tls", "TLS")
        )
        for metric, what in (("rate", "messages/s"), ("cpu", "client CPU"))
    ),
    _bound("handlers that sleep 5 ms, 100 at once", "sleep", "rate", 18_000, "/s"),
    _times("publish one at a time", "publish-single", "rate", 2, "gnsq"),
    _times("publish, 100 callers", _CONCURRENT, "rate", 1, "go-nsq async"),
    _times("publish, 100 callers", _CONCURRENT, "rate", 3.5, "gnsq"),
    _times("publish, 100 callers, linger", _CONCURRENT, "rate", 6, "gnsq", "nsq_fast linger"),
    _times("the same, nsqd's output buffer on: p99", "latency-buffered", "p99", 1, "go-nsq"),
    _bound("idle on 100 connections: share of a core", "idle", "busy", 1, " %"),
    _bound("idle on 100 connections: memory", "idle", "peak", 60, " MiB"),
    _bound("import of nsq_fast: CPU", "start", "package", 60, " ms"),
    _bound("import of its consumer and producer too: CPU", "start", "import", 60, " ms"),
    _bound("first message after start, by lookup", "start", "first", 100, " ms"),
    _times("asyncio, consume: messages/s", "consume", "rate", 3, "asyncnsq", "nsq_fast aio"),
    _times("asyncio, consume: messages/s", "consume", "rate", 4, "ansq", "nsq_fast aio"),
    _times("asyncio, consume: client CPU per message", "consume", "cpu", 1 / 5, "ansq", "nsq_fast aio"),
    _times("asyncio, handlers that sleep 5 ms, 100 at once", "sleep", "rate", 0.9, OURS, "nsq_fast aio"),
    _times("asyncio, publish one at a time", "publish-single", "rate", 1, "ansq", "nsq_fast aio"),
    _times("asyncio, publish, 100 callers", _CONCURRENT, "rate", 2, "ansq", "nsq_fast aio"),
    _times("asyncio, publish at 10,000/s: p99", "publish-rate", "p99", 2, OURS, "nsq_fast aio"),
    _bound("asyncio, idle on 100 connections: share of a core", "idle", "busy", 0.5, " %", "nsq_fast aio"),
    _bound("threads, consume, 4 handler threads", "consume", "rate", 100_000, "/s", "nsq_fast threads"),
    _times("threads, publish from 16", "publish-16", "rate", 1, "gnsq", "nsq_fast threads"),
    _bound("threads, idle on 100 connections: share of a core", "idle", "busy", 0.5, " %", "nsq_fast threads"),
)  # fmt: skip
"""In the order they are shown."""
