"""What docs/scale.md asks of fleets: each question runs some simulations, and gives curves and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from nsq_fast.config import ConsumerConfig, LookupConfig, ProducerConfig
from nsq_fast.page.curves import Line
from nsq_fast.page.lines import lines_over_seconds
from nsq_fast.protocol import rdy
from nsq_fast.protocol.backoff import Backoff, ReconnectDelay
from nsq_fast.protocol.retry import RetryPolicy

from . import delivery, leaders, reconnects
from .events import Curve, Simulation, share
from .lookups import Client, Lookupd

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
    nsqds = [delivery.Nsqd(simulation, 0.0005) for _ in range(count)]
    consumer = delivery.Consumer(simulation, nsqds, max_in_flight=limit, handler=_quick, probes=probes, interval=1.0)

    def publish() -> None:
        nsqds[0].publish()
        simulation.after(0.05, publish)

    publish()
    consumer.start()
    simulation.run(300.0)
    return consumer.handled, consumer.waits, consumer.buffered


def _quick(_message: delivery.Message) -> tuple[float, bool]:
    return 0.002, True


def _first_turns(count: int, limit: int, probes: int) -> str:
    simulation = Simulation(1)
    nsqds = [delivery.Nsqd(simulation, 0.0005) for _ in range(count)]
    consumer = delivery.Consumer(simulation, nsqds, max_in_flight=limit, handler=_quick, probes=probes)
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
) -> tuple[list[reconnects.Nsqd], Lookupd]:
    simulation = Simulation(seed)
    lookupds = [Lookupd(simulation, LOOKUPD_CAPACITY, 0.5) for _ in range(LOOKUPDS)]
    servers = [reconnects.Nsqd(simulation, ACCEPTS, 0.5) for _ in range(nsqds)]
    longest = ConsumerConfig().max_reconnect_delay
    for number in range(count):
        client = Client(simulation, lookupds, LookupConfig(), nsqds=1)
        delay = ReconnectDelay(longest, random=simulation.random.random)
        reconnects.Connection(simulation, servers[number % nsqds], number, delay, client, is_spread).begin()
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


def _moving(count: int, election: float, seed: int) -> leaders.Producer:
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
    producer = leaders.Producer(simulation, policy, client.refresh, 0.5)
    producer.partitions = [leaders.Partition(producer, 0.0005) for _ in range(count)]
    client.start()

    def lead(leader: int) -> None:
        for partition in producer.partitions:
            partition.leader = leader

    def publish(partition: leaders.Partition) -> None:
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
    nsqds = [delivery.Nsqd(simulation, 0.0005) for _ in range(10)]
    handled, failed = Curve(1.0), Curve(1.0)

    def handler(message: delivery.Message) -> tuple[float, bool]:
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
        delivery.Consumer(simulation, nsqds, max_in_flight=None, handler=handler, backoff=backoff).start()
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
