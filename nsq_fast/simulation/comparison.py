"""Small fleets that can be run both ways, in virtual time and on real nsqds, and how far apart the curves are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nsq_fast.protocol.backoff import Backoff

from .delivery import Consumer, Message, Nsqd
from .events import Curve, Simulation

DELAY = 0.0005
"""Seconds that a command takes to an nsqd of the same machine, about, where nothing else runs."""


class Case(NamedTuple):
    """One small fleet: a backlog on each of its nsqds, consumers that work it off.

    Attributes:
        messages: on each nsqd, before the consumers start.
        handler: seconds that a handler takes.
        max_in_flight: of each consumer; None: one for each connection.
        idle_timeout: ``low_ready_idle_timeout``, seconds.
        fails_until: handlers fail for so many seconds after the first message.
        max_backoff: ``max_backoff_duration``, seconds.
        uneven: the first nsqd has so many times the messages of the others.
    """

    name: str
    messages: int
    handler: float
    max_in_flight: int | None = None
    idle_timeout: float = 1.0
    fails_until: float = 0.0
    max_backoff: float = 2.0
    uneven: int = 1
    nsqds: int = 5
    consumers: int = 10

    def backlog(self, nsqd: int) -> int:
        """Messages on an nsqd, numbered from 0."""
        return self.messages * (self.uneven if nsqd == 0 else 1)

    @property
    def total(self) -> int:
        """Messages on all."""
        return sum(map(self.backlog, range(self.nsqds)))


CASES = (
    Case("max_in_flight as many as connections", messages=600, handler=0.1),
    Case("max_in_flight below that", messages=300, handler=0.1, max_in_flight=2, idle_timeout=0.5),
    Case("the same with one hot nsqd", messages=150, handler=0.1, max_in_flight=2, idle_timeout=0.5, uneven=12),
    Case("handlers fail for 2 s: backoff", messages=600, handler=0.1, fails_until=2.0),
)


def simulated(
    case: Case, seed: int = 1, interval: float = 0.1, delay: float = DELAY, starts: Sequence[float] = ()
) -> list[Curve]:
    """When the messages of each nsqd are handled, from the first one's arrival on, in virtual time.

    ``starts``: when each consumer is connected, in seconds; all at once if it is empty.
    """
    simulation = Simulation(seed)
    nsqds = [Nsqd(simulation, delay) for _ in range(case.nsqds)]
    curves = [Curve(interval) for _ in nsqds]
    for number, nsqd in enumerate(nsqds):
        for _ in range(case.backlog(number)):
            nsqd.publish()

    def handler(message: Message) -> tuple[float, bool]:
        is_success = simulation.now >= 2 * delay + case.fails_until
        if not is_success:
            return 0.0, False
        curves[nsqds.index(message.nsqd)].add(simulation.now + case.handler)
        return case.handler, True

    for start in starts or [0.0] * case.consumers:
        consumer = Consumer(
            simulation,
            nsqds,
            max_in_flight=case.max_in_flight,
            handler=handler,
            idle_timeout=case.idle_timeout,
            backoff=Backoff(case.max_backoff, random=simulation.random.random),
        )
        simulation.after(start, consumer.start)
    while sum(curve.total for curve in curves) < case.total:
        simulation.run(simulation.now + 1.0)
    return curves


PROBE = Case("one connection each", messages=250, handler=0.1, nsqds=1)
"""How long commands and messages take on their way is no policy's doing: it is measured with this case."""


def delay_of(seconds: float) -> float:
    """Seconds that a message takes one way, by those that PROBE took."""
    return max(DELAY, (seconds * PROBE.consumers / PROBE.total - PROBE.handler) / 2)


def united(curves: Sequence[Curve], until: float) -> list[tuple[float, float]]:
    """(time, messages handled by then), of all curves together."""
    totals = [curve.totals(until) for curve in curves]
    return [(points[0][0], sum(count for _, count in points)) for points in zip(*totals, strict=True)]


def mean(runs: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The curve between those of several runs."""
    return [(points[0][0], sum(count for _, count in points) / len(points)) for points in zip(*runs, strict=True)]


def deviation(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """The largest distance of two cumulative curves with the same times, as a share of all that happened."""
    total = max(one[-1][1], other[-1][1])
    return max(abs(a - b) for (_, a), (_, b) in zip(one, other, strict=True)) / total


def length(curves: Sequence[Curve]) -> float:
    """The time by which all has happened."""
    return max(curve.end for curve in curves)
