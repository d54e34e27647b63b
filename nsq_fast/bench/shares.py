"""Shares: what a client does with a message, over what its floor, or another client, does in the same round.

A machine that is slow, or busy with something else, is so for both: they take turns, and each round gives one ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from .clients import (
    BATCH_FLOOR,
    BATCHES,
    COLUMNS,
    CORE_FLOOR,
    KEYED,
    ORDERED_FLOOR,
    OURS,
    READY_FLOOR,
    SEPARATE,
    SPARK,
    SPARK_FLOOR,
)
from .figures import Figure, figure, read_of
from .results import ClientResult, Scenario
from .suite import CONNECTIONS, IN_FLIGHT

SETTLED = 0.10
"""The spread of a ratio with which it counts as known."""

_CONFIDENCE = 0.90
_SPARK_SHARE = 0.6


class Side(msgspec.Struct, frozen=True):
    """One figure of a round: of a client in a scenario."""

    scenario: str
    client: str
    metric: str


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A goal that is a ratio: the figures of ``top``, multiplied, over those of ``bottom``.

    Attributes:
        bound: the ratio is at least this where ``is_least``, else at most.
        of: what ``bottom`` is, in words.
    """

    what: str
    of: str
    bound: float
    is_least: bool
    top: tuple[Side, ...]
    bottom: tuple[Side, ...]

    @property
    def sides(self) -> tuple[Side, ...]:
        """All figures that it takes."""
        return self.top + self.bottom

    def is_met_by(self, ratio: float) -> bool:
        """Whether a ratio is as the goal has it."""
        return ratio >= self.bound if self.is_least else ratio <= self.bound

    def in_rounds(self, scenarios: Iterable[Scenario]) -> list[float]:
        """The ratio of each round; none where a client was not measured."""
        named = {scenario.name: scenario for scenario in scenarios}
        top = [_values(named, side) for side in self.top]
        bottom = [_values(named, side) for side in self.bottom]
        rounds = min(map(len, top + bottom))
        pairs = [
            (math.prod(each[number] for each in top), math.prod(each[number] for each in bottom))
            for number in range(rounds)
        ]
        return [above / below for above, below in pairs if below]

    def counted(self, scenarios: Iterable[Scenario], what: str) -> float | None:
        """The ratio of what a message costs in this count; None where a client was not counted, or it is no cost."""
        named = {scenario.name: scenario for scenario in scenarios}
        if any(side.metric != "cpu" for side in self.sides):
            return None
        top, bottom = ([_counted(named, side, what) for side in sides] for sides in (self.top, self.bottom))
        return math.prod(top) / math.prod(bottom) if all(top + bottom) else None


def _of_side(named: dict[str, Scenario], side: Side) -> tuple[Scenario, ClientResult] | None:
    """Where the figure of a side is; None where that was not measured."""
    scenario = named.get(side.scenario)
    result = scenario.client(side.client) if scenario else None
    return None if scenario is None or result is None else (scenario, result)


def _counted(named: dict[str, Scenario], side: Side, what: str) -> float:
    measured = _of_side(named, side)
    return measured[1].counted.get(what, 0.0) if measured else 0.0


def _values(named: dict[str, Scenario], side: Side) -> list[float]:
    measured = _of_side(named, side)
    if measured is None:
        return []
    scenario, result = measured
    read = read_of(side.metric)
    found = [read(each, scenario.settings.size) for each in result.rounds]
    return [value for value in found if value is not None] if None not in found else []


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


def shares_among(scenarios: Iterable[str]) -> list[Share]:
    """Those that need no other scenarios than these."""
    names = set(scenarios)
    return [share for share in SHARES if names.issuperset(side.scenario for side in share.sides)]


def clients_compared(scenarios: Iterable[str]) -> set[str]:
    """The clients that goals among these scenarios compare."""
    return {side.client for share in shares_among(scenarios) for side in share.sides}


def floor_of(scenario: str) -> str:
    """The client that is the floor of a scenario; the compiled core where no goal names another."""
    named = (side.client for share in SHARES for side in share.bottom if side.scenario == scenario)
    return next((client for client in named if client.startswith("floor: ")), CORE_FLOOR)


def _over(what: str, scenario: str, metric: str, bound: float, other: str, client: str = OURS) -> Share:
    """Ours over another one's, in one scenario: at least ``bound`` of a rate, at most of what costs."""
    return Share(
        what=what,
        of=other,
        bound=bound,
        is_least=metric == "rate",
        top=(Side(scenario, client, metric),),
        bottom=(Side(scenario, other, metric),),
    )


def _latencies(what: str, scenario: str) -> Iterator[Share]:
    for metric, name in (("p99", "p99"), ("p999", "p99.9")):
        yield _over(f"{what}: {name}", scenario, metric, 0.7, "go-nsq")


def _few_in_flight() -> Share:
    few, many = (f"in-flight-{count}" for count in (min(IN_FLIGHT), max(IN_FLIGHT)))
    return Share(
        what="CPU per message with 10 in flight, over that with 10,000",
        of="the same of floor: core",
        bound=1.2,
        is_least=False,
        top=(Side(few, OURS, "cpu"), Side(many, CORE_FLOOR, "cpu")),
        bottom=(Side(many, OURS, "cpu"), Side(few, CORE_FLOOR, "cpu")),
    )


def _many_connections() -> Share:
    many, one = (f"connections-{count}" for count in (max(CONNECTIONS), min(CONNECTIONS)))
    return Share(
        what="CPU per message on 100 connections",
        of="that on one",
        bound=1.3,
        is_least=False,
        top=(Side(many, OURS, "cpu"),),
        bottom=(Side(one, OURS, "cpu"),),
    )


def _spark_rows() -> Iterator[Share]:
    """The rate; and, as nsqd has the same cores, what Spark with its workers needs of them."""
    for mode, name in (("stream", "stream with a journal"), ("read", "table with a journal"), ("cold", "first table")):
        yield _over(f"Spark, {name}: rows/s", f"spark-{mode}", "rate", _SPARK_SHARE, SPARK_FLOOR, SPARK)
        yield _over(
            f"Spark, {name}: CPU per row", f"spark-{mode}", "cpu", round(1 / _SPARK_SHARE, 2), SPARK_FLOOR, SPARK
        )
    yield _over("Spark, write: rows/s", "spark-write", "rate", _SPARK_SHARE, SPARK_FLOOR, SPARK)


SHARES: tuple[Share, ...] = (
    _over("consume: client CPU per message", "consume", "cpu", 1.25, CORE_FLOOR),
    _over("consume, batch_handler: client CPU per message", "consume", "cpu", 1.1, BATCH_FLOOR, BATCHES),
    _over("consume, columns: client CPU per message", "consume", "cpu", 0.5, CORE_FLOOR, COLUMNS),
    *(
        _over(f"consume, {name}: client CPU per message", f"consume-{name.lower()}", "cpu", 1.3, CORE_FLOOR)
        for name in ("TLS", "snappy", "deflate")
    ),
    _few_in_flight(),
    _over("10 in flight: messages/s", f"in-flight-{min(IN_FLIGHT)}", "rate", 0.8, CORE_FLOOR),
    _many_connections(),
    _over("MPUB x 200: client CPU per message", "publish-batch", "cpu", 1.5, READY_FLOOR),
    _over("publish one at a time: messages/s", "publish-single", "rate", 0.9, CORE_FLOOR),
    _over("publish one at a time: messages/s", "publish-single", "rate", 2, "go-nsq"),
    _over("publish, 100 callers, no coalescing: messages/s", "publish-concurrent", "rate", 4, "gnsq", SEPARATE),
    _over("publish with a key: client CPU per message", "publish-key", "cpu", 1.08, OURS, KEYED),
    _over("ordered, one partition: messages/s", "ordered-1", "rate", 0.95, ORDERED_FLOOR),
    *_latencies("publish to handler at 10,000/s", "latency"),
    *_latencies("publish to handler at half of the peak rate", "latency-half"),
    *_spark_rows(),
)
"""The goals that are ratios, in the order they are shown."""
