"""Fleets in virtual time: the client itself, and no model of it, among simulated servers, for docs/scale.md.

    python bench/fleet.py [QUESTION...] [--scale 0.1] [--seed 1] [--charts DIR]

The loop, the network and the servers are those of ``tests/sim``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from sim.clock import SimLoop, simulate
from sim.lookupd import ModelLookupd
from sim.network import Network, Socket
from sim.nsqd import Books, ModelNsqd, move_leader

from nsq_fast.aio import Consumer, Producer
from nsq_fast.bench.report import Line, over_seconds

LOOKUPDS = 3
CHANNEL = "ch"
Scenario = Callable[..., Coroutine[Any, Any, Any]]


class FleetNetwork(Network):
    """Counts connects, by the second and the address. A descriptor is not looked for among ten thousand."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__(loop)
        self.connects: dict[str, Curve] = {}
        self._descriptors = itertools.count(1_000_000)

    def new_descriptor(self, sock: Socket) -> int:
        number = next(self._descriptors)
        self.loop.sockets[number] = sock
        return number

    def knock(self, sock: Socket, address: tuple[str, int]) -> None:
        self.connects.setdefault(address[0], Curve(self.loop)).add()
        super().knock(sock, address)


class FleetLookupd(ModelLookupd):
    """Counts the questions."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.questions = Curve(self.books.loop)

    def answer(self, path: str, query: dict[str, str]) -> tuple[int, dict[str, Any]]:
        self.questions.add()
        return super().answer(path, query)


class Curve:
    """How often something happened in each second."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop, self._began = loop, loop.time()
        self._counts: Counter[int] = Counter()

    def add(self) -> None:
        self._counts[int(self._loop.time() - self._began)] += 1

    def between(self, begin: int, end: int) -> list[int]:
        return [self._counts[second] for second in range(begin, end)]

    def points(self, end: int, factor: float = 1.0) -> list[tuple[float, float]]:
        return [(second, factor * self._counts[second]) for second in range(end)]


class Fleet:
    """The servers of one run."""

    def __init__(self, loop: SimLoop, nsqds: int, lookupds: int = 0, dialect: str = "original") -> None:
        self.loop, cluster = loop, []  # type: ignore[var-annotated]
        self.network: FleetNetwork = loop.network
        addresses = (f"10.1.{number // 250}.{number % 250 + 1}" for number in range(nsqds))
        self.nsqds = [ModelNsqd(loop.network, loop.books, address, dialect, cluster) for address in addresses]
        self.lookupds = [
            FleetLookupd(loop.network, loop.books, f"10.2.0.{number + 1}", self.nsqds) for number in range(lookupds)
        ]

    def notice(self) -> None:
        """Lookup sees what is so now."""
        for lookupd in self.lookupds:
            lookupd.notice()

    @property
    def addresses(self) -> dict[str, list[str]]:
        if self.lookupds:
            return {"lookupd_http_addresses": [":".join(map(str, each.address)) for each in self.lookupds]}
        return {"nsqd_tcp_addresses": [":".join(map(str, each.address)) for each in self.nsqds]}

    def consumer(self, topic: str, handler: Callable[..., Any], **options: Any) -> Consumer:
        given: dict[str, Any] = {**self.addresses, "message_handler": handler, "hostname": "h", "max_tries": 0}
        return Consumer(topic, CHANNEL, **given, **options)

    def at(self, seconds: float, action: Callable[..., object], *arguments: Any) -> None:
        self.loop.call_later(seconds, action, *arguments)


def run(seed: str, scenario: Scenario, *case: Any) -> Any:
    """Run one fleet to its end in virtual time; the same seed gives the same run. ``case`` is told to the scenario."""

    def new_socket(loop: SimLoop) -> Callable[..., Any]:
        loop.network, loop.books = FleetNetwork(loop), Books(loop)
        loop.most_turns = sys.maxsize  # a fleet turns more often than what is stuck
        return loop.network.new_socket  # type: ignore[no-any-return]

    return simulate(seed, lambda loop: scenario(loop, *case), new_socket)


async def ignore(consumer: Consumer, message: Any) -> None:
    """A handler."""


async def close(consumers: Sequence[Consumer]) -> None:
    await asyncio.gather(*(consumer.close(drain=False, timeout=1.0) for consumer in consumers))


# The questions


class Answer(NamedTuple):
    """What came of one question: curves over seconds, and figures to be read beside them."""

    title: str
    size: str
    unit: str
    lines: list[Line]
    figures: list[tuple[str, str]]


def lookup_load(scale: float, seed: str) -> Answer:
    """Questions at each lookupd: in peace, with and without jitter, and after all lookupds restarted together."""
    count = max(10, int(10_000 * scale))
    topics = max(1, count // 10)

    async def polling(loop: SimLoop, jitter: float, restart: bool) -> Curve:
        fleet = Fleet(loop, 10, LOOKUPDS)
        for number in range(topics):
            fleet.nsqds[number % 10].log(f"t{number}")
        fleet.notice()
        consumers = [
            fleet.consumer(f"t{number % topics}", ignore, lookupd_poll_jitter=jitter, heartbeat_interval=60.0)
            for number in range(count)
        ]
        for consumer in consumers:
            fleet.at(5.0 * loop.chance.random(), lambda each=consumer: loop.create_task(each.start()))
        if restart:
            for lookupd in fleet.lookupds:
                fleet.at(120.0, lookupd.kill)
                fleet.at(130.0, lookupd.come_back)
        await asyncio.sleep(300.0)
        await close(consumers)
        return fleet.lookupds[0].questions

    lines, figures = [], []
    for label, jitter, restart in (
        ("lookupd_poll_jitter 0", 0.0, False),
        ("lookupd_poll_jitter 0.3", 0.3, False),
        ("all lookupds down from 120 to 130 s", 0.3, True),
    ):
        questions = run(f"lookup {seed}", polling, jitter, restart)
        lines.append(Line(label, questions.points(300)))
        begin = 120 if restart else 30
        figures.append((f"{label}: peak a second", f"{max(questions.between(begin, 300)):,}"))
        figures.append((f"{label}: in the last minute, mean", f"{sum(questions.between(240, 300)) / 60:,.0f}"))
    size = f"{count:,} consumers of {topics:,} topics, {LOOKUPDS} nsqlookupds, started within 5 s"
    return Answer("Questions at one nsqlookupd", size, "questions a second", lines, figures)


def turns(scale: float, seed: str) -> Answer:
    """One hot nsqd among idle ones, with max_in_flight below, at and above the number of connections."""
    count = max(20, int(1000 * scale))

    async def hot(loop: SimLoop, limit: int) -> tuple[Curve, list[float]]:
        fleet = Fleet(loop, count)
        handled, waits = Curve(loop), []

        async def handle(consumer: Consumer, message: Any) -> None:
            handled.add()
            waits.append(loop.time() - float(message.body))

        consumer = fleet.consumer("t", handle, max_in_flight=limit)
        await consumer.start()
        while not all(nsqd.conns for nsqd in fleet.nsqds):
            await asyncio.sleep(0.1)
        log, end = fleet.nsqds[0].log("t"), loop.time() + 300.0
        while loop.time() < end:
            log.store(b"%f" % loop.time())
            await asyncio.sleep(0.05)
        await close([consumer])
        return handled, sorted(waits)

    lines, figures = [], []
    shares = {"a tenth of the connections": count // 10, "as many as connections": count}
    for label, limit in {**shares, "2.5 times as many": count * 5 // 2}.items():
        handled, waits = run(f"turns {seed}", hot, limit)
        totals = itertools.accumulate(handled.between(0, 300))
        lines.append(Line(label, list(enumerate(totals))))
        middle, most = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
        figures.append((f"{label}: wait of a message, p50 and p99", f"{middle:.2f} s, {most:.2f} s"))
    size = f"one consumer of {count:,} nsqds; 20 messages a second on one of them, none on the others"
    return Answer("max_in_flight: messages of the hot nsqd", size, "messages handled", lines, figures)


def dead_nsqds(scale: float, seed: str) -> Answer:
    """Connects, and questions at lookup, when an nsqd with thousands of connections dies, comes back, or flaps."""
    count = max(20, int(10_000 * scale))

    async def dying(loop: SimLoop, downs: Sequence[tuple[float, float]]) -> tuple[Curve, Curve, float]:
        fleet = Fleet(loop, 1, LOOKUPDS)
        nsqd = fleet.nsqds[0]
        nsqd.log("t").channel(CHANNEL)
        fleet.notice()
        consumers = [fleet.consumer("t", ignore) for _ in range(count)]
        for consumer in consumers:  # those of one program are not started at the same moment as those of another
            fleet.at(60.0 * loop.chance.random(), lambda each=consumer: loop.create_task(each.start()))
        await asyncio.sleep(90.0)
        connects, questions = Curve(loop), Curve(loop)
        fleet.network.connects[nsqd.address[0]], fleet.lookupds[0].questions = connects, questions
        for begin, end in downs:
            fleet.at(begin, nsqd.kill)
            fleet.at(end, lambda: (nsqd.come_back(), nsqd.log("t").channel(CHANNEL)))
        began = loop.time()
        await asyncio.sleep(downs[-1][1] + 0.1)
        while sum(conn.channel is not None for conn in nsqd.conns) < count:
            await asyncio.sleep(0.1)
        whole = loop.time() - began - downs[-1][1]
        await asyncio.sleep(max(0.0, began + 60.0 - loop.time()))
        await close(consumers)
        return connects, questions, whole

    lines, figures = [], []
    for label, downs in (
        ("down for 10 s", [(10.0, 20.0)]),
        ("flaps, 4 s down, 4 s up", [(10.0 + 8 * n, 14.0 + 8 * n) for n in range(4)]),
    ):
        connects, questions, whole = run(f"dead {seed}", dying, downs)
        back = math.ceil(downs[-1][1])
        lines.append(Line(f"{label}: connects", connects.points(60)))
        lines.append(Line(f"{label}: questions at one nsqlookupd", questions.points(60)))
        figures.append((f"{label}: most connects a second", f"{max(connects.between(0, 60)):,}"))
        figures.append((f"{label}: after it was back", f"{max(connects.between(back, 60)):,}"))
        figures.append((f"{label}: all connected again after it was back", f"{whole:.1f} s"))
        figures.append((f"{label}: most questions a second at one nsqlookupd", f"{max(questions.between(0, 60)):,}"))
    size = f"{count:,} consumers of one nsqd, found by {LOOKUPDS} nsqlookupds"
    return Answer("An nsqd that dies", size, "a second", lines, figures)


def moving_leaders(scale: float, seed: str) -> Answer:
    """Publishes while the leaders of all partitions move at once."""
    count = max(4, int(300 * scale))

    async def moving(loop: SimLoop, election: float) -> tuple[Curve, int, list[float], bool]:
        fleet = Fleet(loop, 6, LOOKUPDS, "redesigned")
        logs = [fleet.nsqds[number % 3].log("t", number) for number in range(count)]
        for log in logs:
            log.channel(CHANNEL)
        fleet.notice()
        producer = Producer(**fleet.addresses, hostname="h", publish_timeout=60.0)  # type: ignore[arg-type]
        await producer.start()
        stored, waits, began = Curve(loop), [], loop.time()
        waiting = most = 0

        async def publish(partition: int, number: int) -> None:
            nonlocal waiting, most
            waiting, at = waiting + 1, loop.time()
            most = max(most, waiting)
            await producer.publish("t", b"%d %d" % (partition, number), partition=partition)
            waiting -= 1
            waits.append(loop.time() - at)
            stored.add()

        def lead(shift: int | None) -> None:
            for number, log in enumerate(logs):
                move_leader(log, None if shift is None else fleet.nsqds[number % 3 + shift])
            fleet.notice()

        fleet.at(5.0, lead, None)
        fleet.at(5.0 + election, lead, 3)
        tasks = []
        for number in range(125):
            tasks += [loop.create_task(publish(partition, number)) for partition in range(count)]
            await asyncio.sleep(max(0.0, began + 0.2 * (number + 1) - loop.time()))
        await asyncio.gather(*tasks)
        await producer.close()
        order = [[int(message.body.split()[1]) for message in log.messages] for log in logs]
        return stored, most, waits, all(numbers == sorted(set(numbers)) for numbers in order)

    lines, figures = [], []
    for election in (1.0, 3.0, 8.0):
        stored, most, waits, kept = run(f"lead {seed}", moving, election)
        label = f"a new leader after {election:g} s"
        lines.append(Line(label, stored.points(30)))
        figures.append((f"{label}: most publishes waiting", f"{most:,}"))
        figures.append((f"{label}: longest wait of a publish", f"{max(waits):.2f} s"))
        figures.append((f"{label}: order kept, none lost", "yes" if kept and len(waits) == 125 * count else "no"))
    size = f"one producer, {count:,} partitions that move at 5 s, {count * 5:,} publishes a second"
    return Answer("Publishes stored while leaders move", size, "publishes a second", lines, figures)


def bad_downstream(scale: float, seed: str) -> Answer:
    """What a downstream that fails for 30 s costs, by the longest pause of backoff."""
    count = max(1, int(30 * scale))
    usual = count * 10 / 0.1

    async def failing(loop: SimLoop, longest: float) -> tuple[Curve, int]:
        fleet = Fleet(loop, 10)
        began, handled, failed = loop.time(), Curve(loop), 0

        async def handle(consumer: Consumer, message: Any) -> None:
            nonlocal failed
            await asyncio.sleep(0.1)
            if 10.0 <= loop.time() - began < 40.0:
                failed += 1
                raise ValueError("the downstream is bad")
            handled.add()

        consumers = [
            fleet.consumer("t", handle, max_in_flight=10, concurrency=10, max_backoff_duration=longest, requeue_delay=0)
            for _ in range(count)
        ]
        logs = [nsqd.log("t") for nsqd in fleet.nsqds]
        for log in logs:
            log.channel(CHANNEL)
        for consumer in consumers:
            await consumer.start()
        while loop.time() < began + 150.0:  # there is always more to do
            for log in logs:
                for _ in range(count * 10 - len(log.channels[CHANNEL].queue)):
                    log.store(b"x")
            await asyncio.sleep(0.1)
        await close(consumers)
        return handled, failed

    lines, figures = [], []
    for label, longest in (
        ("max_backoff_duration 128, the default", 128.0),
        ("max_backoff_duration 8", 8.0),
        ("no backoff", 0.0),
    ):
        handled, failed = run(f"backoff {seed}", failing, longest)
        lines.append(Line(label, handled.points(150, 100 / usual)))
        after = handled.between(40, 150)
        whole = next((second for second, rate in enumerate(after) if rate >= 0.9 * usual), len(after))
        lost = sum(usual - rate for rate in after[:whole]) / usual
        figures.append((f"{label}: 90 % of the capacity is back after", f"{whole} s"))
        figures.append((f"{label}: seconds of capacity lost after the downstream was well", f"{lost:.0f}"))
        figures.append((f"{label}: calls that the bad downstream got a second", f"{failed / 30:,.1f}"))
    size = f"{count} with 10 handlers each, consuming from 10 nsqds; all fail from 10 to 40 s"
    return Answer("Capacity while a downstream fails", size, "% of the capacity", lines, figures)


QUESTIONS = {
    "lookup": lookup_load,
    "turns": turns,
    "reconnects": dead_nsqds,
    "leaders": moving_leaders,
    "backoff": bad_downstream,
}


# What is shown


def report(name: str, answer: Answer, seconds: float) -> Iterator[str]:
    yield f"{name}: {answer.title} ({seconds:.0f} s of CPU)"
    yield f"  {answer.size}"
    for what, value in answer.figures:
        yield f"  {what}: {value}"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", help=f"of {', '.join(QUESTIONS)}; all")
    parser.add_argument("--scale", type=float, default=1.0, help="of the fleet: 0.1 is a tenth of its size")
    parser.add_argument("--seed", default="1", help="of all chance in a run")
    parser.add_argument("--charts", type=Path, metavar="DIR", help="write fleet-QUESTION.svg there; needs matplotlib")
    given = parser.parse_args()
    if unknown := set(given.questions) - set(QUESTIONS):
        parser.error(f"there is no {', '.join(unknown)}")
    if not 0 < given.scale < math.inf:
        parser.error(f"--scale {given.scale}: must be more than 0")
    if given.charts is not None:
        given.charts.mkdir(parents=True, exist_ok=True)
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings have another order else
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    logging.disable(logging.CRITICAL)
    for name in given.questions or QUESTIONS:
        began = time.process_time()
        answer = QUESTIONS[name](given.scale, given.seed)
        sys.stdout.write("\n".join(report(name, answer, time.process_time() - began)) + "\n")
        sys.stdout.flush()
        if given.charts is not None:
            picture = over_seconds(answer.title, answer.unit, answer.lines, alone=True)
            (given.charts / f"fleet-{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
