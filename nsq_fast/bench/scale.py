"""Many processes on many nsqds: what each further process brings, and what ends that.

All processes of a point run at the same time, each on a topic of its own, over all nsqds. A process counts its
messages from the end of its warm-up; the rate of a point is all of them over the time from the first such moment to
the last end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from typing import Any

import msgspec

from .clients import Client
from .results import BUSY, About, Settings, quantile
from .runner import Progress, Turns
from .servers import Server, Source

KNEE = 0.9
"""The knee is the smallest number of processes that reaches this share of the best rate."""

TOGETHER = 0.7
"""Below this share of the time in which all processes are at work, their rate is said to be understated."""

BOTH_CONCURRENCY = 100


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What so many processes did together.

    Attributes:
        cpu_seconds: of all clients; server_cpu_seconds: of all servers, None where they are not ours to see.
        together: the share of the time in which all of them were at work.
        p99_us: the largest of the processes; None where no latency is measured.
    """

    processes: int
    messages: int
    seconds: float
    cpu_seconds: float
    server_cpu_seconds: float | None = None
    p99_us: float | None = None
    together: float = 1.0

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / self.seconds

    @property
    def cpu_us(self) -> float:
        """CPU of the clients, microseconds a message."""
        return self.cpu_seconds / self.messages * 1e6

    @property
    def server_cpu_us(self) -> float | None:
        """CPU of the servers, microseconds a message."""
        return None if self.server_cpu_seconds is None else self.server_cpu_seconds / self.messages * 1e6


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """The points of one kind of work, by the number of processes."""

    kind: str
    nsqds: int
    connections: int
    size: int
    server: str
    points: list[Point]


class ScaleRun(msgspec.Struct, frozen=True, kw_only=True):
    """The curves of a run, and what it was made on."""

    about: About
    curves: list[Curve]


def settings_of(kind: str, connections: int, size: int, duration: float) -> Settings:
    """The scenario that each process runs: ``consume``, ``publish`` (one at a time), or ``both`` (there and back)."""
    common: dict[str, Any] = {"connections": connections, "size": size, "duration": duration, "rounds": 1}
    if kind == "both":
        return Settings(kind="roundtrip", concurrency=BOTH_CONCURRENCY, unbuffered=True, **common)
    return Settings(kind=kind, mode="single" if kind == "publish" else "", **common)


def measure(
    kind: str, settings: Settings, processes: Sequence[int], nsqds: int, client: Client, source: Source, say: Progress
) -> Curve:
    """Measure one kind of work with each number of processes. Raises ClientFailed, ConfigError.

    Args:
        settings: its connections are those of a process to each nsqd.
    """
    with ExitStack() as stack:
        server = _united([stack.enter_context(source(settings)) for _ in range(nsqds)])
        say(f"{kind}: how many messages keep one process busy")
        count = Turns(settings, server).calibrate(client)
        points = []
        for many in processes:
            say(f"{kind}: {many} process{'' if many == 1 else 'es'}")
            points.append(_point(settings, many, count, client, server))
    return Curve(
        kind=kind,
        nsqds=nsqds,
        connections=len(server.nsqds),
        size=settings.size,
        server=server.name,
        points=points,
    )


def _united(servers: Sequence[Server]) -> Server:
    """Servers as one, which has all their addresses and processes."""
    return dataclasses.replace(
        servers[0],
        nsqds=tuple(chain.from_iterable(each.nsqds for each in servers)),
        http=tuple(chain.from_iterable(each.http for each in servers)),
        pids=tuple(chain.from_iterable(each.pids for each in servers)),
    )


def _point(settings: Settings, processes: int, count: int, client: Client, server: Server) -> Point:
    turns = [Turns(settings, _beginning_at(server, number), f"p{number}") for number in range(processes)]
    with ExitStack() as stack:
        runs = [stack.enter_context(each.prepared(client, count)) for each in turns]
        with ThreadPoolExecutor(processes) as pool:
            futures = [pool.submit(run) for run in runs]
            rounds = [future.result() for future in futures]
    latencies = [value for each in rounds if (value := quantile(99)(each, 0)) is not None]
    messages = sum(each.messages for each in rounds)
    busy = [each.server_cpu_seconds / each.seconds for each in rounds if each.server_cpu_seconds is not None]
    seconds = max(each.ended for each in turns) - min(each.began for each in turns)
    return Point(
        processes=processes,
        messages=messages,
        seconds=seconds,
        cpu_seconds=sum(each.cpu_seconds for each in rounds),
        server_cpu_seconds=sum(busy) / len(busy) * seconds if busy else None,
        p99_us=max(latencies) if latencies else None,
        together=max(0.0, min(each.ended for each in turns) - max(each.began for each in turns)) / seconds,
    )


def _beginning_at(server: Server, number: int) -> Server:
    """The same, with another address as its first: a producer takes that one."""
    first = number % len(server.nsqds)
    return dataclasses.replace(server, nsqds=server.nsqds[first:] + server.nsqds[:first])


def knee_of(curve: Curve) -> Point:
    """The point from which on further processes bring little."""
    best = max(point.rate for point in curve.points)
    return next(point for point in curve.points if point.rate >= KNEE * best)


def limit_of(curve: Curve) -> float | None:
    """Messages a second that the nsqds could give with a core each, by what a message costs them at the knee."""
    cost = knee_of(curve).server_cpu_us
    return curve.nsqds * 1e6 / cost if cost else None


def explained(curve: Curve, cores: int) -> Iterator[str]:
    """What the curve says, in sentences."""
    knee, last = knee_of(curve), curve.points[-1]
    handle = "1 process handles" if knee.processes == 1 else f"{knee.processes} processes handle"
    more = "and no more were measured" if last is knee else f"and up to {last.processes}, more bring less than a tenth"
    yield f"{handle} {knee.rate:,.0f} messages/s, {more}."
    yield _reason(knee, cores)
    for point in curve.points:
        if point.together < TOGETHER:
            yield (
                f"The {point.processes} processes were all at work for {point.together:.0%} of the time only, so that"
                " their rate is understated: give a longer --duration, or a machine that does nothing else."
            )
    limit, cost = limit_of(curve), knee.server_cpu_us
    if limit and cost:
        cores_of = "a core of the nsqd" if curve.nsqds == 1 else f"a core of each of the {curve.nsqds} nsqds"
        yield (
            f"nsqd spends {cost:.2f} µs of CPU on a message, so that {cores_of} gives {limit:,.0f} messages/s; "
            "with several topics at once an nsqd uses more than one core, where there are more."
        )


def _reason(point: Point, cores: int) -> str:
    clients = point.cpu_seconds / point.seconds
    if point.server_cpu_seconds is None:
        return f"There the clients use {clients:.1f} of {cores} cores; what the servers use cannot be seen from here."
    servers = point.server_cpu_seconds / point.seconds
    used = f"There the clients use {clients:.1f} cores, and the servers {servers:.1f}, of {cores}"
    if clients + servers >= BUSY * cores:
        return f"{used}: the machine is the limit."
    if clients >= BUSY * point.processes:
        return f"{used}: each process has a core of its own to the full, so that more processes need more cores."
    return f"{used}: they wait for each other, or for a machine that does something else, too."


HEADER = ["processes", "messages/s", "client CPU, µs", "server CPU, µs", "p99, µs"]
_TITLES = {"consume": "Consume", "publish": "Publish one at a time", "both": "Publish and consume"}


def title_of(curve: Curve) -> str:
    """What was measured, in words."""
    nsqds = "1 nsqd" if curve.nsqds == 1 else f"{curve.nsqds} nsqds"
    each = "1 connection" if curve.connections == 1 else f"{curve.connections} connections"
    return f"{_TITLES[curve.kind]}: {nsqds}, {each} a process, {curve.size:,} bytes"


def rows(curve: Curve) -> Iterator[list[str]]:
    """A row for each number of processes; CPU is of one message."""
    for point in curve.points:
        mark = " (knee)" if point is knee_of(curve) else ""
        yield [
            f"{point.processes}{mark}",
            f"{point.rate:,.0f}",
            f"{point.cpu_us:.3f}",
            _or_dash(point.server_cpu_us, 3),
            _or_dash(point.p99_us, 0),
        ]


def _or_dash(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
