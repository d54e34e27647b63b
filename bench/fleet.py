"""Fleets in virtual time, run by the client's own policies: the figures and pictures of docs/scale.md.

python bench/fleet.py [QUESTION...] [--scale 0.1] [--svg DIR] [--check DIR]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from html import escape
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import click
from fleet_models import (
    AcceptingNsqd,
    Client,
    Connection,
    Consumer,
    Curve,
    Lookupd,
    Message,
    Nsqd,
    Partition,
    Producer,
    Simulation,
    share,
)
from gevent import sleep
from gevent.event import Event

from nsq_fast import Consumer as RealConsumer
from nsq_fast import Message as RealMessage
from nsq_fast import Producer as RealProducer
from nsq_fast.bench.servers import run_nsqd
from nsq_fast.cli import options
from nsq_fast.config import ConsumerConfig, LookupConfig, ProducerConfig
from nsq_fast.page import DASHES, WIDTH, Line, text, variables
from nsq_fast.protocol import rdy
from nsq_fast.protocol.backoff import Backoff, ReconnectDelay
from nsq_fast.protocol.publishing import RetryPolicy

_LEFT, _RIGHT, _PLOT = 58, WIDTH - 14, 170
_TICKS = 4
_STEP = 20  # seconds: ticks are whole ones
_ROW = 18


def lines_over_seconds(title: str, unit: str, lines: Sequence[Line]) -> str:
    """An SVG of lines through points of (seconds, amount), both axes from 0; ``unit`` says what is drawn upwards.

    Wide enough for a telephone: its letters are to be read at a width of 400 pixels.
    """
    top = 46 + _ROW * len(lines)
    height = top + _PLOT + 40
    last = math.ceil(max((x for line in lines for x, _ in line.points), default=1.0) / _STEP) * _STEP or _STEP
    most = _round_up(max((y for line in lines for _, y in line.points if y is not None), default=1.0) or 1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (_RIGHT - _LEFT) * x / last, top + _PLOT * (1 - y / most)

    parts = [*_grid(place(0, 0)[1], top, last, most)]
    for number, line in enumerate(lines):
        points = "L".join("{:.1f} {:.1f}".format(*place(x, y)) for x, y in line.points if y is not None)
        look = _look(number)
        y = 42 + _ROW * number
        parts.append(f'<path d="M8 {y}H40" {look}/>{text(46, y + 4, line.label, "start")}')
        parts.append(f'<path d="M{points}" {look}><title>{escape(line.label)}</title></path>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
            ' font-family="sans-serif" font-size="12" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{variables()}text{{fill:var(--ink)}}</style>",
            f'<rect width="{WIDTH}" height="{height}" fill="var(--card)"/>',
            text(8, 18, title, "start", is_bold=True),
            text(WIDTH - 14, top + _PLOT + 34, f"upwards: {unit}; across: seconds", "end"),
            *parts,
            "</svg>",
            "",
        ]
    )


def _look(number: int) -> str:
    return (
        f'fill="none" stroke="var(--colour{number % 4 + 1})" stroke-width="2"'
        f' stroke-dasharray="{DASHES[number % len(DASHES)]}"'
    )


def _grid(bottom: float, top: float, last: float, most: float) -> Iterator[str]:
    for number in range(_TICKS + 1):
        part = number / _TICKS
        y, x = bottom + (top - bottom) * part, _LEFT + (_RIGHT - _LEFT) * part
        yield f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="var(--grid)"/>'
        yield text(_LEFT - 6, y + 4, _short(most * part), "end")
        yield text(x, bottom + 16, f"{last * part:g}", "end" if number == _TICKS else "middle")


def _round_up(value: float) -> float:
    """The next number whose quarters are short: 1, 2, 4, 8 or 10 times a power of ten."""
    size = 10.0 ** math.floor(math.log10(value))
    return next(size * step for step in (1, 2, 4, 8, 10) if value <= size * step * (1 + 1e-9))


def _short(value: float) -> str:
    for size, name in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g} {name}"
    return f"{value:g}"


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


AGREES = 0.10
"""The largest distance of the curves, as a share of all messages, with which the simulation counts as true."""

_BATCH = 500
_TOPIC, _CHANNEL = "fleet", "ch"
_INTERVAL = 0.1
_SEEDS = 9
_NEVER = 65_535
"""Attempts after which a message is given up: none has as many."""


class Check(NamedTuple):
    """One case, both ways.

    Attributes:
        distance: the largest of the cumulative curves, as a share of all messages.
        simulated, measured: seconds until the last message was handled, the first on average.
    """

    case: Case
    distance: float
    simulated: float
    measured: float

    @property
    def agrees(self) -> bool:
        """Whether the curves are close enough."""
        return self.distance <= AGREES


def check(folder: Path, cases: tuple[Case, ...] = CASES) -> Iterator[Check]:
    """Run each case on nsqds of ``folder``, and in virtual time."""
    delay = delay_of(length(measured(PROBE, folder).curves))
    for case in cases:
        real, starts = measured(case, folder)
        models = [simulated(case, seed, _INTERVAL, delay, starts) for seed in range(_SEEDS)]
        until = max(map(length, [real, *models])) + _INTERVAL
        model = mean([united(each, until) for each in models])
        yield Check(case, deviation(model, united(real, until)), sum(map(length, models)) / _SEEDS, length(real))


class Measured(NamedTuple):
    """A run on real nsqds. Times begin with the first message.

    Attributes:
        curves: when the messages of each nsqd were handled.
        starts: when each consumer got its first message. Connecting takes its time, which is no policy's doing.
    """

    curves: list[Curve]
    starts: list[float]


def measured(case: Case, folder: Path) -> Measured:
    """Run consumers of this process on real nsqds."""
    with ExitStack() as stack:
        nsqds = [stack.enter_context(run_nsqd(folder, "127.0.0.1")).tcp for _ in range(case.nsqds)]
        for number, address in enumerate(nsqds):
            with RealProducer(str(address)) as producer:
                for begin in range(0, case.backlog(number), _BATCH):
                    count = min(_BATCH, case.backlog(number) - begin)
                    producer.multipublish(_TOPIC, [b"%d" % number] * count)
        return _consumed(case, [str(address) for address in nsqds])


def _consumed(case: Case, nsqds: list[str]) -> Measured:
    curves = [Curve(_INTERVAL) for _ in nsqds]
    done = Event()
    begins: dict[RealConsumer, float] = {}

    def handler(consumer: RealConsumer, message: RealMessage) -> None:
        begins.setdefault(consumer, monotonic())
        begin = min(begins.values())
        if monotonic() - begin < case.fails_until:
            raise ValueError("the downstream is bad, as the case has it")
        sleep(case.handler)
        curves[int(message.body)].add(monotonic() - begin)
        if sum(curve.total for curve in curves) >= case.total:
            done.set()

    consumers = [
        RealConsumer(
            _TOPIC,
            _CHANNEL,
            nsqds,
            message_handler=handler,
            max_tries=_NEVER,
            max_in_flight=case.max_in_flight,
            requeue_delay=0,
            low_ready_idle_timeout=case.idle_timeout,
            max_backoff_duration=case.max_backoff,
        )
        for _ in range(case.consumers)
    ]
    for consumer in consumers:
        consumer.start(block=False)
    done.wait()
    for consumer in consumers:
        consumer.close()
    begin = min(begins.values())
    end = max(begin + curve.end for curve in curves)
    return Measured(curves, [begins.get(consumer, end) - begin for consumer in consumers])


LOOKUPDS = 3
LOOKUPD_CAPACITY = 10_000.0
"""Questions a second that one nsqlookupd answers."""

ACCEPTS = 5_000.0
"""Connections a second that one nsqd takes in, with IDENTIFY and SUB."""


class Answer(NamedTuple):
    """What came of one question.

    Attributes:
        size: what was simulated, in words.
        unit: of the curves, upwards; across are seconds.
        figures: (what, its value), to be read beside the picture.
    """

    title: str
    size: str
    unit: str
    lines: Sequence[Line]
    figures: Sequence[tuple[str, str]]

    def picture(self) -> str:
        """The curves as an SVG that stands alone."""
        return lines_over_seconds(self.title, self.unit, self.lines)


Question = Callable[[float, int], Answer]


def lookup_load(scale: float, seed: int) -> Answer:
    """Questions at each lookupd: in peace, with and without jitter, and after all lookupds restarted together."""
    count = max(10, int(10_000 * scale))
    lines, figures = [], []
    for jitter in (0.0, 0.3):
        lookupds, _ = _polling(count, jitter, seed, restart=False)
        asked = lookupds[0].requests
        lines.append(Line(f"lookupd_poll_jitter {jitter:g}", asked.points(300.0)))
        later = [rate for at, rate in asked.points(300.0) if at >= 30.0]
        figures.append((f"jitter {jitter:g}: peak a second, after the start", f"{max(later):,.0f}"))
        figures.append((f"jitter {jitter:g}: MB a second at that peak", f"{_bytes(lookupds[0], 30.0) / 1e6:.2f}"))
    lookupds, clients = _polling(count, 0.3, seed, restart=True)
    lines.append(Line("all lookupds down from 120 to 130 s", lookupds[0].requests.points(300.0)))
    back = max((client.recovered_at for client in clients if client.was_missing), default=0.0)
    figures.append(
        ("restart: peak a second", f"{max(r for t, r in lookupds[0].requests.points(300.0) if t > 110):,.0f}")
    )
    figures.append(("restart: last client that was told of no nsqd knows them again", f"{back - 130:.0f} s after it"))
    figures.append(("slowest round of questions", f"{max(each.slowest for each in lookupds) * 1e3:.0f} ms"))
    size = f"{count:,} consumers of 1,000 topics on 10 nsqds each, {LOOKUPDS} nsqlookupds, started within 5 s"
    return Answer("Questions at one nsqlookupd", size, "questions a second", lines, figures)


def _bytes(lookupd: Lookupd, begin: float) -> float:
    return max(rate for at, rate in lookupd.bytes.points(300.0) if at >= begin)


def _polling(count: int, jitter: float, seed: int, restart: bool) -> tuple[list[Lookupd], list[Client]]:
    simulation = Simulation(seed)
    config = LookupConfig(lookupd_poll_jitter=jitter)
    lookupds = [Lookupd(simulation, LOOKUPD_CAPACITY, 1.0) for _ in range(LOOKUPDS)]
    clients = [Client(simulation, lookupds, config, nsqds=10) for _ in range(count)]
    for client in clients:
        simulation.after(5.0 * simulation.random.random(), client.start)
    if restart:
        for lookupd in lookupds:
            simulation.after(120.0, lookupd.stop)
            simulation.after(130.0, lookupd.start)
    simulation.run(300.0)
    return lookupds, clients


def turns(scale: float, seed: int) -> Answer:
    """One hot nsqd among idle ones, with max_in_flight below, at and above the number of connections."""
    count = max(20, int(1000 * scale))
    lines, figures = [], []
    for label, limit, probes in (
        ("a tenth of the connections, as it was", count // 10, 1),
        ("a tenth of the connections", count // 10, rdy.PROBES),
        ("as many as connections", count, rdy.PROBES),
        ("2.5 times as many", count * 5 // 2, rdy.PROBES),
    ):
        handled, waits, buffered = _hot(count, limit, probes, seed)
        lines.append(Line(label, handled.totals(300.0)))
        figures.append((f"{label}: wait of the hot one's messages, p50 and p99", _two(waits)))
        figures.append((f"{label}: most messages in the buffer", f"{buffered}"))
        figures.append(
            (f"{label}: a message on each nsqd: each had its turn after", _first_turns(count, limit, probes))
        )
    size = f"one consumer of {count:,} nsqds; 20 messages a second on one of them, none on the others"
    return Answer("max_in_flight: messages of the hot nsqd", size, "messages handled", lines, figures)


def _two(values: list[float]) -> str:
    return f"{share(values, 0.5):.2f} s, {share(values, 0.99):.2f} s"


def _hot(count: int, limit: int, probes: int, seed: int) -> tuple[Curve, list[float], int]:
    simulation = Simulation(seed)
    nsqds = [Nsqd(simulation, 0.0005) for _ in range(count)]
    consumer = Consumer(simulation, nsqds, max_in_flight=limit, handler=_quick, probes=probes, interval=1.0)

    def publish() -> None:
        nsqds[0].publish()
        simulation.after(0.05, publish)

    publish()
    consumer.start()
    simulation.run(300.0)
    return consumer.handled, consumer.waits, consumer.buffered


def _quick(_message: Message) -> tuple[float, bool]:
    return 0.002, True


def _first_turns(count: int, limit: int, probes: int) -> str:
    simulation = Simulation(1)
    nsqds = [Nsqd(simulation, 0.0005) for _ in range(count)]
    consumer = Consumer(simulation, nsqds, max_in_flight=limit, handler=_quick, probes=probes)
    for nsqd in nsqds:
        nsqd.publish()
    consumer.start()
    while consumer.handled.total < count:
        simulation.run(simulation.now + 1.0)
    return f"{consumer.handled.end:.1f} s"


def dead_nsqds(scale: float, seed: int) -> Answer:
    """Connections a second when an nsqd with thousands of them dies, comes back, or flaps."""
    count = max(20, int(10_000 * scale))
    lines, figures = [], []
    for label, downs, nsqds in _DEATHS:
        servers, _ = _dying(count // nsqds * nsqds, downs, nsqds, seed)
        attempts = servers[0].attempts
        lines.append(Line(label, attempts.points(60.0)))
        back = max(server.whole_at for server in servers) - downs[-1][1]
        later = [rate for at, rate in attempts.points(60.0) if at >= downs[-1][1]]
        figures.append((f"{label}: most connects a second at it", f"{attempts.peak:,.0f}"))
        figures.append((f"{label}: after it was back", f"{max(later):,.0f}"))
        figures.append((f"{label}: all connected again after it was back", f"{back:.1f} s"))
    size = f"{count:,} connections in all, each of a consumer of its own; an nsqd takes {ACCEPTS:,.0f} a second in"
    return Answer("Connects at an nsqd that dies", size, "connects a second", lines, figures)


_DEATHS = (
    ("one nsqd, down for 10 s", ((10.0, 20.0),), 1),
    ("one nsqd that flaps, 4 s down, 4 s up", tuple((10.0 + 8 * n, 14.0 + 8 * n) for n in range(4)), 1),
    ("a rack of 50, down for 10 s: each of them", ((10.0, 20.0),), 50),
)


def lookup_after_death(scale: float, seed: int) -> Answer:
    """Questions at lookup when an nsqd with thousands of connections dies."""
    count = max(20, int(10_000 * scale))
    lines, figures = [], []
    for label, is_spread in (("asked at once, as it was", False), ("asked within 5 s", True)):
        _, lookupd = _dying(count, _DEATHS[0][1], 1, seed, is_spread)
        lines.append(Line(label, lookupd.requests.points(60.0)))
        figures.append((f"{label}: most questions a second", f"{lookupd.requests.peak:,.0f}"))
        figures.append((f"{label}: slowest answer", f"{lookupd.slowest:.2f} s"))
    size = f"{count:,} consumers lose one nsqd for 10 s; a nsqlookupd answers {LOOKUPD_CAPACITY:,.0f} a second"
    return Answer("Questions when an nsqd dies", size, "questions a second", lines, figures)


def _dying(
    count: int, downs: Iterable[tuple[float, float]], nsqds: int, seed: int, is_spread: bool = True
) -> tuple[list[AcceptingNsqd], Lookupd]:
    simulation = Simulation(seed)
    lookupds = [Lookupd(simulation, LOOKUPD_CAPACITY, 0.5) for _ in range(LOOKUPDS)]
    servers = [AcceptingNsqd(simulation, ACCEPTS, 0.5) for _ in range(nsqds)]
    longest = ConsumerConfig().max_reconnect_delay
    for number in range(count):
        client = Client(simulation, lookupds, LookupConfig(), nsqds=1)
        delay = ReconnectDelay(longest, random=simulation.random.random)
        Connection(simulation, servers[number % nsqds], number, delay, client, is_spread).begin()
        client.start_at(78.0 * simulation.random.random())
    for begin, end in downs:
        for server in servers:
            simulation.after(begin, server.stop)
            simulation.after(end, server.start)
    simulation.run(90.0)
    return servers, lookupds[0]


def moving_leaders(scale: float, seed: int) -> Answer:
    """Publishes while the leaders of all partitions move at once."""
    count = max(10, int(3000 * scale))
    lines, figures = [], []
    for election in (1.0, 3.0, 8.0):
        producer = _moving(count, election, seed)
        label = f"a new leader after {election:g} s"
        lines.append(Line(label, producer.stored.points(30.0)))
        waits = [wait for partition in producer.partitions for wait in partition.waits]
        in_order = all(partition.stored == sorted(set(partition.stored)) for partition in producer.partitions)
        figures.append((f"{label}: most publishes waiting", f"{producer.most_pending:,}"))
        figures.append((f"{label}: longest wait of a publish", f"{max(waits):.2f} s"))
        figures.append((f"{label}: order kept, none lost", "yes" if in_order and not producer.pending else "no"))
    size = f"one producer, {count:,} partitions that move at 5 s, {count * 5:,} publishes a second"
    return Answer("Publishes stored while leaders move", size, "publishes a second", lines, figures)


def _moving(count: int, election: float, seed: int) -> Producer:
    simulation = Simulation(seed)
    given = ProducerConfig()
    policy = RetryPolicy(
        given.max_publish_attempts,
        given.retry_unknown_outcome,
        given.retry_base_delay,
        given.retry_max_delay,
        awaits_leader=True,
    )
    lookupds = [Lookupd(simulation, LOOKUPD_CAPACITY, 0.5)]
    client = Client(simulation, lookupds, LookupConfig(), nsqds=1, on_answer=lambda known: producer.learn())
    producer = Producer(simulation, policy, client.refresh, 0.5)
    producer.partitions = [Partition(producer, 0.0005) for _ in range(count)]
    client.start()

    def lead(leader: int) -> None:
        for partition in producer.partitions:
            partition.leader = leader

    def publish(partition: Partition) -> None:
        if simulation.now < 25.0:
            partition.publish()
            simulation.after(0.2, publish, partition)

    for partition in producer.partitions:
        simulation.after(0.2 * simulation.random.random(), publish, partition)
    simulation.after(5.0, lead, 0)
    simulation.after(5.0 + election, lead, 2)
    simulation.run(60.0)
    return producer


def bad_downstream(scale: float, seed: int) -> Answer:
    """What a downstream that fails for 30 s costs, by the longest pause of backoff."""
    count = max(2, int(30 * scale))
    lines, figures = [], []
    for label, kind, longest in (
        ("one level less a success, as it was", _ByOne, 128.0),
        ("max_backoff_duration 128, the default", Backoff, 128.0),
        ("max_backoff_duration 8", Backoff, 8.0),
        ("no backoff", Backoff, 0.0),
    ):
        handled, failed = _failing(count, kind, longest, seed)
        usual = count * 10 / 0.1
        lines.append(Line(label, [(at, 100 * rate / usual) for at, rate in handled.points(150.0)]))
        rates = handled.points(150.0)
        whole = next((at for at, rate in rates if at >= 40.0 and rate >= 0.9 * usual), 150.0)
        lost = sum(usual - rate for at, rate in rates if 40.0 <= at < whole) / usual
        figures.append((f"{label}: 90 % of the capacity is back after", f"{whole - 40:.0f} s"))
        figures.append((f"{label}: seconds of capacity lost after the downstream was well", f"{lost:.0f}"))
        figures.append((f"{label}: calls that the bad downstream got a second", f"{failed.total / 30:,.1f}"))
    size = f"{count} consumers with 10 connections each; all handlers fail from 10 to 40 s"
    return Answer("Capacity while a downstream fails", size, "% of the capacity", lines, figures)


class _ByOne(Backoff):
    """Backoff as it was, and as it is in other clients."""

    @staticmethod
    def level_after_success(level: int) -> int:
        return level - 1


def _failing(count: int, kind: type[Backoff], longest: float, seed: int) -> tuple[Curve, Curve]:
    simulation = Simulation(seed)
    nsqds = [Nsqd(simulation, 0.0005) for _ in range(10)]
    handled, failed = Curve(1.0), Curve(1.0)

    def handler(message: Message) -> tuple[float, bool]:
        is_success = not 10.0 <= simulation.now < 40.0
        (handled if is_success else failed).add(simulation.now)
        nsqd = message.nsqd
        if is_success and nsqd.waiting < 100:
            nsqd.publish()  # there is always more to do
        return 0.1, is_success

    for nsqd in nsqds:
        for _ in range(100 + count):
            nsqd.publish()
    for _ in range(count):
        backoff = kind(longest, random=simulation.random.random)
        Consumer(simulation, nsqds, max_in_flight=None, handler=handler, backoff=backoff).start()
    simulation.run(150.0)
    return handled, failed


QUESTIONS: dict[str, Question] = {
    "lookup": lookup_load,
    "turns": turns,
    "reconnects": dead_nsqds,
    "lost": lookup_after_death,
    "leaders": moving_leaders,
    "backoff": bad_downstream,
}


@click.command()
@click.argument("questions", nargs=-1, type=click.Choice(tuple(QUESTIONS)))
@click.option(
    "--scale",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Of the fleet: 0.1 is a tenth of its size, and of the time that a run takes.",
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Of all chance in a run.")
@click.option(
    "--svg",
    "folder",
    type=options.FOLDER,
    metavar="DIR",
    help="Write the curves of each question to DIR/fleet-QUESTION.svg.",
)
@click.option(
    "--check",
    "servers",
    type=options.FOLDER,
    metavar="DIR",
    help="Run small fleets in virtual time and on the nsqd of this folder, and say how far the curves are apart.",
)
def command(questions: Sequence[str], scale: float, seed: int, folder: Path | None, servers: Path | None) -> None:
    """Answer questions about fleets: how lookup, RDY, reconnecting, retries and backoff do in a large one.

    The policies are the client's own code; the servers are small models of nsqd and nsqlookupd. Each run is seeded:
    the same seed gives the same figures on every machine. Without a question all are asked, which takes minutes.
    """
    if servers is not None:
        _check(servers)
        return
    for name in questions or QUESTIONS:
        answer = QUESTIONS[name](scale, seed)
        _show(name, answer)
        if folder is not None:
            (folder / f"fleet-{name}.svg").write_text(answer.picture(), encoding="utf-8")


def _show(name: str, answer: Answer) -> None:
    click.echo(f"{name}: {answer.title}")
    click.echo(f"  {answer.size}")
    for what, value in answer.figures:
        click.echo(f"  {what}: {value}")
    click.echo()


def _check(servers: Path) -> None:
    far = 0
    for each in check(servers):
        far += not each.agrees
        verdict = "agrees" if each.agrees else "too far"
        click.echo(
            f"{each.case.name}: curves at most {each.distance:.1%} apart ({verdict});"
            f" all handled after {each.simulated:.1f} s simulated, {each.measured:.1f} s measured"
        )
    if far:
        raise click.ClickException(
            f"{far} curves are more than {AGREES:.0%} apart: on a machine that is busy, try again when it is not"
        )


if __name__ == "__main__":
    command()
