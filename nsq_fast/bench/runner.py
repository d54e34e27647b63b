"""Run clients in turns on one server, each in a process of its own, or many processes of one side by side, and collect
their results.

What one message costs in instructions is counted by valgrind. It counts a whole run, start and end included. So the
client runs twice, with few messages and with many, and the difference is what the messages cost.

Instructions are those of the program, without the system's. Other programs on the machine do not change them, so two
clients can be told apart where CPU time varies by more than they differ. The program takes some thirty times as long,
so a server is always ahead of a consumer, which finds as much as it can read.
"""

from __future__ import annotations

import dataclasses
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from nsq_fast.errors import NsqError, counted

from .clients import PROGRAMS, Client
from .results import (
    INSTRUCTIONS,
    PEAK_CONCURRENCY,
    SMALLEST_COUNT,
    ClientResult,
    Round,
    Scenario,
    Settings,
    limit_of,
    loop_ms,
    value_of,
)
from .servers import CHANNEL, Server, Source, create_channel, fill_partitions, fill_topic, wait_until_listed
from .suite import clients_compared, unsettled

PROBE_COUNT = 2000
PROBE_SHARE = 0.15
SHORTEST_PROBE = 0.1
"""Of the duration: what takes less says how busy the machine is, rather than how fast the client."""

LARGEST_BACKLOG = 1 << 30
MOST_ROUNDS = 15
ENDS_WITHIN = 5.0
"""Seconds that a client may take to end after it has reported."""
COUNTED_SLOWER = 15
"""So many times as long as otherwise may a client take while its instructions are counted."""
COUNTED_SHARE = 0.1
"""Of the messages of a round so many are counted, since the client is slower then."""

Progress = Callable[[str], None]


class ClientFailed(NsqError):
    """A client's program gave no result; the message has the end of its stderr."""


class Task(msgspec.Struct, frozen=True):
    """A scenario to be measured: which clients, and where."""

    name: str
    settings: Settings
    clients: Sequence[Client]
    source: Source


def run_scenarios(
    tasks: Sequence[Task],
    progress: Progress = lambda line: None,
    counts_instructions: bool = False,
    patience: float = 0.0,
) -> list[Scenario]:
    """Measure scenarios that are compared with each other: in turns, round by round, each on a server of its own.

    Args:
        counts_instructions: of the clients that goals compare, after the rounds; others would take minutes more.
        patience: seconds for rounds beyond those of the settings, while a ratio that a goal is about is not settled.
    """
    speed = loop_ms()
    with ExitStack() as stack:
        running = [_Running(task, stack.enter_context(task.source(task.settings)), progress) for task in tasks]
        rounds = max(task.settings.rounds for task in tasks)
        for number in range(rounds):
            for each in running:
                each.take_round(number)
        _settle(running, time.monotonic() + patience)
        if counts_instructions:
            for each in running:
                each.count()
        return [each.scenario(speed) for each in running]


def _settle(running: Sequence[_Running], until: float) -> None:
    """More rounds of the clients that goals compare, as long as a ratio is not settled, and may become so."""
    clients = clients_compared(each.name for each in running)
    for number in range(max(each.rounds for each in running), MOST_ROUNDS):
        if time.monotonic() >= until or not unsettled([each.scenario() for each in running]):
            return
        for each in running:
            each.take_more(number, clients)


class _Running:
    """A scenario while it is measured, with the clients that can take part. One that fails is left out of later
    rounds, and its failure kept."""

    def __init__(self, task: Task, server: Server, progress: Progress) -> None:
        self.name = task.name
        self._server, self._progress = server, progress
        self._clients = [client for client in task.clients if client.takes_part(task.settings)]
        self._settings = self._at_share(task.settings) if task.settings.rate_share else task.settings
        self._results = {client.name: ClientResult(client=client.name) for client in self._clients}
        self._counts = {client.name: task.settings.count for client in self._clients}
        self._turns = Turns(self._settings, server)

    def _at_share(self, settings: Settings) -> Settings:
        """The settings with a rate: a share of what the slowest of the clients manages at its best."""
        closed = msgspec.structs.replace(settings, rate_share=0.0, concurrency=PEAK_CONCURRENCY)
        turns, rates = Turns(closed, self._server), []
        for client in self._clients:
            self._progress(f"{self.name}: its peak rate, {client.name}")
            with suppress(ClientFailed):  # it fails in its rounds, too, and says why
                peak = turns.take(client, turns.calibrate(client))
                rates.append(peak.messages / peak.seconds)
        rate = settings.rate_share * min(rates, default=SMALLEST_COUNT)
        return msgspec.structs.replace(settings, rate=float(round(rate, -2) or SMALLEST_COUNT))

    @property
    def rounds(self) -> int:
        return max((len(result.rounds) for result in self._results.values()), default=0)

    def take_round(self, number: int) -> None:
        """The round of this number of each client, where the settings ask for as many."""
        if number < self._settings.rounds:
            for client in self._clients:
                self._take(number, f"of {self._settings.rounds}", client)

    def take_more(self, number: int, names: set[str]) -> None:
        """A round more of the clients of these names."""
        for client in self._clients:
            if client.name in names:
                self._take(number, "until the ratio is settled", client)

    def _take(self, number: int, bound: str, client: Client) -> None:
        result = self._results[client.name]
        if result.failure:
            return
        self._progress(f"{self.name}: round {number + 1} {bound}, {client.name}")
        try:
            count = self._counts[client.name] = self._counts[client.name] or self._turns.calibrate(client)
            result.rounds.append(self._turns.take(client, count))
        except ClientFailed as error:
            result.failure = str(error)

    def count(self) -> None:
        """The instructions that a message costs each client that goals compare, where they can be counted."""
        if self._settings.kind == "spark":
            return  # most of it is done in processes that the client starts
        compared = clients_compared([self.name])
        for client in self._clients:
            if client.name in compared:
                self._progress(f"{self.name}: {INSTRUCTIONS}, {client.name}")
                found = self._turns.count(client, self._counts[client.name])
                if found is not None:
                    self._results[client.name].counted[INSTRUCTIONS] = found

    def scenario(self, speed: float = 0.0) -> Scenario:
        return Scenario(
            name=self.name,
            settings=self._settings,
            server=self._server.name,
            clients=list(self._results.values()),
            loop_ms=speed,
        )


class Turns:
    """One client after the other on a server, each with a topic of its own.

    Args:
        name: part of the names of the topics, for turns that go on at the same time.

    Attributes:
        began, ended: when the last client had warmed up, and when it reported, ``time.monotonic``.
    """

    def __init__(self, settings: Settings, server: Server, name: str = "") -> None:
        self._settings = settings
        self._server = server
        self._name = name
        self._number = 0
        self.began: float = 0.0
        self.ended: float = 0.0

    def calibrate(self, client: Client) -> int:
        """How many messages keep a client busy for the duration, found by short rounds."""
        settings = self._settings
        if settings.kind in ("idle", "start"):
            return 1
        if settings.rate:
            warmup = 0 if settings.kind == "publish" else settings.rate
            return settings.rounded(settings.rate * settings.duration + warmup)
        count = settings.rounded(SMALLEST_COUNT if settings.kind == "roundtrip" else PROBE_COUNT)
        is_first = True  # that one may be as long by a pause alone
        while True:
            probe = self.take(client, count)
            enough = settings.count_at(probe.messages / probe.seconds)
            more = self._affordable(PROBE_SHARE * enough)
            if not is_first and (more <= count or probe.seconds >= SHORTEST_PROBE * settings.duration):
                return self._affordable(enough)
            count, is_first = max(count, more), False

    def _affordable(self, count: float) -> int:
        return self._settings.rounded(min(count, LARGEST_BACKLOG // self._settings.size))

    def take(self, client: Client, count: int) -> Round:
        """One round of one client. Raises ClientFailed."""
        with self.prepared(client, count) as run:
            return run()

    @contextmanager
    def prepared(self, client: Client, count: int) -> Iterator[Callable[[], Round]]:
        """A topic with its messages, and what runs the client on it; that may be called in another thread."""
        with self._topic(count) as job:
            yield partial(self._run, list(client.command), {**job, "variant": client.variant})

    def count(self, client: Client, count: int) -> float | None:
        """Instructions of a message, see ``per_message``; of a part of ``count``."""

        def run(many: int, wrap: list[str]) -> None:
            with self._topic(many) as job:
                self._run([*wrap, *client.command], {**job, "variant": client.variant}, COUNTED_SLOWER)

        many = count * COUNTED_SHARE
        with suppress(ClientFailed):
            return per_message(run, self._settings.rounded(many / 2), self._settings.rounded(many))
        return None

    @contextmanager
    def _topic(self, count: int) -> Iterator[dict[str, Any]]:
        self._number += 1
        topic = f"bench_{os.getpid()}{self._name}_{self._number}"
        settings, server = self._settings, self._server
        self._prepare(topic, count)
        job = {
            **msgspec.to_builtins(settings),
            "topic": topic,
            "channel": CHANNEL,
            "count": count,
            "warmup": settings.warmup(count),
            "beyond": settings.beyond(),
            "nsqds": [list(address) for address in server.nsqds],
            "http": [list(address) for address in server.http],
            "lookupds": list(server.lookupds),
            "cafile": server.cafile,
        }
        load = self._start_load(job)
        try:
            yield job
        finally:
            if load is not None:
                load.kill()
                load.wait()
            server.delete(topic)

    def _prepare(self, topic: str, count: int) -> None:
        settings, server, options = self._settings, self._server, self._server.client_options
        count += settings.beyond()
        if server.create_topic is not None:
            server.create_topic(topic)
            if settings.kind != "publish":
                fill_partitions(server.lookupds, topic, settings.partitions, count, settings.size, options)
        elif settings.kind == "start":
            fill_topic(server.nsqds, topic, count, settings.size, options)
            wait_until_listed(server.lookupds[0], topic)
        elif settings.kind == "consume" and not settings.rate:
            distinct = {address.port: address for address in server.nsqds}
            fill_topic(list(distinct.values()), topic, count, settings.size, options)
        elif settings.kind != "publish":
            create_channel(server.nsqds[0], topic, options)

    def _start_load(self, job: dict[str, Any]) -> subprocess.Popen[bytes] | None:
        if job["kind"] != "consume" or not job["rate"]:
            return None
        command = [sys.executable, str(PROGRAMS / "load.py"), msgspec.json.encode(job).decode()]
        return subprocess.Popen(command, env=self._environment)

    @property
    def _environment(self) -> dict[str, str]:
        """A secret is there and not in the job: everybody on a machine can read the arguments of its processes.

        Compiled modules are kept: whoever imports a client a second time does not compile it again.
        """
        options = msgspec.json.encode(self._server.client_options).decode()
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {**kept, "NSQ_FAST_BENCH_CLIENT_OPTIONS": options}

    def _run(self, command: list[str], job: dict[str, Any], slower: int = 1) -> Round:
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [*command, msgspec.json.encode(job).decode()],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self._environment,
            )
            try:
                return self._follow(process, slower)
            except ClientFailed as error:
                process.kill()
                process.wait()
                errors.seek(0)
                raise ClientFailed(f"{error}: {errors.read()[-1500:].decode(errors='replace').strip()}") from None
            finally:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()

    def _follow(self, process: subprocess.Popen[bytes], slower: int) -> Round:
        before: float | None = None
        for line in _lines(process, slower * self._settings.patience):
            if not line.startswith(b"{"):
                continue
            event = msgspec.json.decode(line)
            if event.pop("event") == "started":
                self.began, before = time.monotonic(), self._server.cpu_seconds()
                continue
            self.ended = time.monotonic()
            after = self._server.cpu_seconds()
            used = after - before if after is not None and before is not None else None
            with suppress(subprocess.TimeoutExpired):  # by itself, so that what counts can write its report
                process.wait(slower * ENDS_WITHIN)
            return msgspec.convert({**event, "server_cpu_seconds": used}, Round)
        raise ClientFailed(f"it ended with status {process.wait()} and no result")


def _lines(process: subprocess.Popen[bytes], patience: float) -> Iterator[bytes]:
    """Lines as they come, until the client ends or the time is up."""
    assert process.stdout is not None
    descriptor, rest, deadline = process.stdout.fileno(), b"", time.monotonic() + patience
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise ClientFailed(f"it was not done after {patience:.0f} s")
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


# Many processes on many nsqds: what each further process brings, and what ends that
#
# It makes a scenario whose clients are so many processes each, with one round: what all of them did together. They run
# at the same time, each on a topic of its own, over all nsqds. A process counts its messages from the end of its
# warm-up; the rate is all of them over the time from the first such moment to the last end.

KNEE = 0.9
"""The knee is the smallest number of processes that reaches this share of the best rate."""

TOGETHER = 0.7
"""Below this share of the time in which all processes are at work, their rate is said to be understated."""

BOTH_CONCURRENCY = 100
_TITLES = {"consume": "Consume", "publish": "Publish one at a time", "both": "Publish and consume"}


def scale_settings(kind: str, connections: int, size: int, duration: float) -> Settings:
    """The scenario that each process runs: ``consume``, ``publish`` (one at a time), or ``both`` (there and back)."""
    common: dict[str, Any] = {"connections": connections, "size": size, "duration": duration, "rounds": 1}
    if kind == "both":
        return Settings(kind="roundtrip", concurrency=BOTH_CONCURRENCY, unbuffered=True, **common)
    return Settings(kind=kind, mode="single" if kind == "publish" else "", **common)


def measure_scale(
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
            together = _side_by_side(settings, many, count, client, server)
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


def _side_by_side(settings: Settings, processes: int, count: int, client: Client, server: Server) -> dict[str, Any]:
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


# What a message costs


def per_message(run: Callable[[int, list[str]], object], few: int, many: int) -> float | None:
    """Instructions of a message: ``run(count, words)`` runs a program, and these words of a command before its own.

    None where nothing was counted, or too few to tell.
    """
    counts = []
    for count in (few, many):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report"
            # What it finds of the caches is not wanted, and takes as long again.
            run(count, ["valgrind", "-q", "--tool=cachegrind", "--cache-sim=no", f"--cachegrind-out-file={report}"])
            found = report.exists() and re.search(r"^summary:\s+(\d+)", report.read_text(), re.MULTILINE)
        if not found:
            return None
        counts.append(int(found[1]))
    return (counts[1] - counts[0]) / (many - few) if many > few and counts[1] > counts[0] else None
