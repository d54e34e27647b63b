"""Many processes on many nsqds: what each further process brings, and what ends that.

It makes a scenario whose clients are so many processes each, with one round: what all of them did together. They run
at the same time, each on a topic of its own, over all nsqds. A process counts its messages from the end of its warm-up;
the rate is all of them over the time from the first such moment to the last end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from typing import Any

from nsq_fast.errors import counted

from .clients import Client
from .results import ClientResult, Round, Scenario, Settings, limit_of, value_of
from .runner import Progress, Turns
from .servers import Server, Source

KNEE = 0.9
"""The knee is the smallest number of processes that reaches this share of the best rate."""

TOGETHER = 0.7
"""Below this share of the time in which all processes are at work, their rate is said to be understated."""

BOTH_CONCURRENCY = 100
_TITLES = {"consume": "Consume", "publish": "Publish one at a time", "both": "Publish and consume"}


def settings_of(kind: str, connections: int, size: int, duration: float) -> Settings:
    """The scenario that each process runs: ``consume``, ``publish`` (one at a time), or ``both`` (there and back)."""
    common: dict[str, Any] = {"connections": connections, "size": size, "duration": duration, "rounds": 1}
    if kind == "both":
        return Settings(kind="roundtrip", concurrency=BOTH_CONCURRENCY, unbuffered=True, **common)
    return Settings(kind=kind, mode="single" if kind == "publish" else "", **common)


def measure(
    kind: str, settings: Settings, processes: Sequence[int], nsqds: int, client: Client, source: Source, say: Progress
) -> Scenario:
    """Measure one kind of work with each number of processes. Raises ClientFailed, ConfigError.

    Args:
        settings: its connections are those of a process to each nsqd.
    """
    results = []
    with ExitStack() as stack:
        server = _united([stack.enter_context(source(settings)) for _ in range(nsqds)])
        say(f"{kind}: how many messages keep one process busy")
        count = Turns(settings, server).calibrate(client)
        for many in processes:
            name = counted(many, "process", "processes")
            say(f"{kind}: {name}")
            together = _round(settings, many, count, client, server)
            results.append(ClientResult(client=name, rounds=[Round(**together, nsqds=nsqds)]))
    connections = counted(len(server.nsqds), "connection")
    title = f"{_TITLES[kind]}: {counted(nsqds, 'nsqd')}, {connections} a process, {settings.size:,} bytes"
    return Scenario(name=title, settings=settings, server=server.name, clients=results)


def _united(servers: Sequence[Server]) -> Server:
    """Servers as one, which has all their addresses and processes."""
    return dataclasses.replace(
        servers[0],
        nsqds=tuple(chain.from_iterable(each.nsqds for each in servers)),
        http=tuple(chain.from_iterable(each.http for each in servers)),
        pids=tuple(chain.from_iterable(each.pids for each in servers)),
    )


def _round(settings: Settings, processes: int, count: int, client: Client, server: Server) -> dict[str, Any]:
    """What so many processes did: CPU is that of all, memory and latency those of the worst."""
    turns = [Turns(settings, _beginning_at(server, number), f"p{number}") for number in range(processes)]
    with ExitStack() as stack:
        runs = [stack.enter_context(each.prepared(client, count)) for each in turns]
        with ThreadPoolExecutor(processes) as pool:
            futures = [pool.submit(run) for run in runs]
            rounds = [future.result() for future in futures]
    busy = [each.server_cpu_seconds / each.seconds for each in rounds if each.server_cpu_seconds is not None]
    seconds = max(each.ended for each in turns) - min(each.began for each in turns)
    return {
        "messages": sum(each.messages for each in rounds),
        "seconds": seconds,
        "cpu_seconds": sum(each.cpu_seconds for each in rounds),
        "server_cpu_seconds": sum(busy) / len(busy) * seconds if busy else None,
        "peak_kib": max(each.peak_kib for each in rounds),
        "latency_us": [max(quantiles) for quantiles in zip(*(each.latency_us for each in rounds), strict=True)],
        "processes": processes,
        "together": max(0.0, min(each.ended for each in turns) - max(each.began for each in turns)) / seconds,
    }


def _beginning_at(server: Server, number: int) -> Server:
    """The same, with another address as its first: a producer takes that one."""
    first = number % len(server.nsqds)
    return dataclasses.replace(server, nsqds=server.nsqds[first:] + server.nsqds[:first])


def knee_of(scenario: Scenario) -> ClientResult:
    """So many processes that further ones bring little."""
    rates = [figure.median if (figure := value_of(each, "rate")) else 0.0 for each in scenario.clients]
    return next(each for each, rate in zip(scenario.clients, rates, strict=True) if rate >= KNEE * max(rates))


def explained(scenario: Scenario, cores: int) -> Iterator[str]:
    """What the scenario says, in sentences."""
    knee = knee_of(scenario)
    (work,), (last,) = knee.rounds, scenario.clients[-1].rounds
    is_last = knee is scenario.clients[-1]
    more = "and no more were measured" if is_last else f"and up to {last.processes}, more bring less than a tenth"
    handle = "handles" if work.processes == 1 else "handle"
    yield f"{knee.client} {handle} {work.messages / work.seconds:,.0f} messages/s, {more}."
    yield _reason(work, limit_of(knee, cores), cores)
    for each in (each for result in scenario.clients for each in result.rounds):
        if each.together < TOGETHER:
            yield (
                f"The {each.processes} processes were all at work for {each.together:.0%} of the time only, so that"
                " their rate is understated: give a longer --duration, or a machine that does nothing else."
            )
    cost = value_of(knee, "server_cpu")
    if cost and cost.median:
        cores_of = "a core of the nsqd" if work.nsqds == 1 else f"a core of each of the {work.nsqds} nsqds"
        yield (
            f"nsqd spends {cost.median:.2f} µs of CPU on a message, so that {cores_of} gives"
            f" {work.nsqds * 1e6 / cost.median:,.0f} messages/s; "
            "with several topics at once an nsqd uses more than one core, where there are more."
        )


_REASONS = {
    "machine": "the machine is the limit",
    "client": "each process has a core of its own to the full, so that more processes need more cores",
    "server": "each nsqd has a core to the full",
    "waiting": "they wait for each other, or for a machine that does something else, too",
}


def _reason(work: Round, limit: str, cores: int) -> str:
    clients = work.cpu_seconds / work.seconds
    if work.server_cpu_seconds is None:
        return f"There the clients use {clients:.1f} of {cores} cores; what the servers use cannot be seen from here."
    servers = work.server_cpu_seconds / work.seconds
    return f"There the clients use {clients:.1f} cores, and the servers {servers:.1f}, of {cores}: {_REASONS[limit]}."
