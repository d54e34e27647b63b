"""`nsq-fast bench`: compare clients on one server in one run, and show it. The harness itself is `nsq_fast.bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from nsq_fast.bench import core, instructions, results, syscalls, tables
from nsq_fast.bench.clients import Client, available, chosen, names, needed_by
from nsq_fast.bench.counting import Counter
from nsq_fast.bench.goals import judge
from nsq_fast.bench.machine import about
from nsq_fast.bench.results import Run, Scenario
from nsq_fast.bench.runner import Task, run_scenarios
from nsq_fast.bench.servers import Source, embedded, from_folder, given_lookupds, given_nsqds
from nsq_fast.bench.settings import COMPRESSIONS, MODES, Settings
from nsq_fast.bench.suite import Plan, in_turns, plans
from nsq_fast.names import Address
from nsq_fast.runtime import Endpoint

from . import console, options
from .bench_scale import scale_command
from .bench_show import compare_command, report_command
from .security import Security, security_options

_FILE = click.Path(dir_okay=False, path_type=Path)
_INTEGERS = {
    "size": (200, "Bytes in a message."),
    "count": (0, "Messages a round; 0: as many as a client handles in --duration."),
    "rounds": (3, "How many rounds."),
    "max_in_flight": (2500, "Messages a consumer holds."),
    "connections": (1, "Connections of a consumer, to several loopback addresses of the nsqd."),
    "partitions": (4, "Partitions of the topic."),
    "concurrency": (1, "Callers of a publish, handlers of a consumer, messages on their way in a roundtrip."),
    "batch": (200, "Messages in an MPUB."),
}
_DURATIONS = {
    "duration": (2.0, "How long a client works in a round."),
    "handler_sleep": (0.0, "How long each handler sleeps."),
    "linger": (0.001, "What the client with linger waits for more to publish."),
    "settle": (0.5, "Time before an open loop, or before an idle client is measured."),
}
_TAKEN = {
    "consume": (
        "size", "count", "duration", "rounds", "max_in_flight", "connections", "concurrency", "handler_sleep", "settle"
    ),
    "publish": ("size", "count", "duration", "rounds", "concurrency", "batch", "linger"),
    "roundtrip": ("size", "count", "duration", "rounds", "max_in_flight", "concurrency"),
    "ordered": ("size", "count", "duration", "rounds", "max_in_flight", "partitions"),
    "idle": ("duration", "rounds", "max_in_flight", "connections", "settle"),
}  # fmt: skip
_ABOUT = {
    "consume": "Consume a backlog, one FIN a message; with --rate, what is published meanwhile.",
    "publish": "Publish one at a time, from many callers, or in batches.",
    "roundtrip": "Publish and consume in one process: latency from publish to handler.",
    "ordered": "Consume a topic with partitions in order; on the embedded cluster, or with --lookupd.",
    "idle": "Hold connections on which nothing happens: CPU and memory.",
}


@click.group("bench", short_help="Compare clients on one server; reports.")
def command() -> None:
    """Measure clients and servers of NSQ: each client in a process of its own, in turns, several rounds.

    Only ratios within one run mean anything: machines differ, and are noisy.

    With --tls, servers that the command starts get a certificate of their own; for given ones there are the --tls
    options and --auth-secret-file of the other commands, with which the clients of nsq_fast are measured.
    """


def _where(function: Callable[..., None]) -> Callable[..., None]:
    """The options that say against what, with which clients, and where the result goes."""
    decorators = (
        click.option("--embedded", is_flag=True, help="Against the embedded broker (the default)."),
        options.nsqd_tcp_option(),
        options.lookupd_http_option(),
        security_options(),
        click.option("--servers", type=options.FOLDER, metavar="DIR", help="Start the nsqd binary of this folder."),
        click.option(
            "--client",
            "wanted",
            multiple=True,
            type=click.Choice(names()),
            metavar="NAME",
            help=f"A client (repeatable): {', '.join(names())}. Default: all.",
        ),
        click.option("--peer-python", metavar="PATH", help="An interpreter with gnsq, pynsq, ansq or asyncnsq."),
        click.option("--syscalls", "wants_syscalls", is_flag=True, help="Count system calls too, with perf or strace."),
        click.option(
            "--instructions",
            "wants_instructions",
            is_flag=True,
            help="Count instructions of clients that goals compare too, with valgrind; this takes minutes.",
        ),
        click.option("--json", "target", type=_FILE, metavar="FILE", help="Write the run to this file."),
    )
    for decorate in reversed(decorators):
        function = decorate(function)
    return function


def _settings_options(kind: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for name in reversed(_TAKEN[kind]):
            flag = f"--{name.replace('_', '-')}"
            if name in _INTEGERS:
                default, text = _INTEGERS[name]
                kind_of: Any = click.IntRange(0 if name == "count" else 1)
                function = click.option(flag, type=kind_of, default=default, show_default=True, help=text)(function)
            else:
                seconds, text = _DURATIONS[name]
                function = click.option(
                    flag, type=options.duration, metavar="DURATION", default=seconds, show_default=True, help=text
                )(function)
        return _special_options(kind, function)

    return decorate


def _special_options(kind: str, function: Callable[..., None]) -> Callable[..., None]:
    if kind == "publish":
        mode = click.option("--mode", type=click.Choice(MODES), default="single", show_default=True, help="How.")
        function = mode(function)
    if kind in ("consume", "publish", "roundtrip"):
        function = click.option(
            "--rate", type=click.FloatRange(0), default=0.0, help="Open loop: messages/s, whatever becomes of them."
        )(function)
        function = click.option(
            "--compression", type=click.Choice(COMPRESSIONS[1:]), default=None, help="Compressed connections."
        )(function)
    if kind in ("consume", "roundtrip"):
        function = click.option(
            "--unbuffered/--buffered",
            default=kind == "roundtrip",
            show_default=True,
            help="Whether nsqd sends each message at once, or gathers them in its output buffer.",
        )(function)
    return function


_WANTS = ("wants_syscalls", "wants_instructions")


def _measuring(kind: str) -> click.Command:
    def callback(**arguments: Any) -> None:
        where = {name: arguments.pop(name) for name in ("embedded", "nsqds", "lookupds", "servers", "security")}
        others = {name: arguments.pop(name) for name in ("wanted", "peer_python", *_WANTS, "target")}
        given = {name: value for name, value in arguments.items() if value is not None}
        if given.get("mode") == "concurrent" and given["concurrency"] == 1:
            given["concurrency"] = 100
        place = _place(**where)
        if kind == "ordered" and place.is_tls and not place.is_given:
            raise click.UsageError("--tls: the embedded cluster has none; name another with --lookupd")
        plan = Plan(kind, kind, msgspec.convert({"kind": kind, "tls": place.is_tls, **given}, Settings))
        _run([plan], place, **others)

    callback.__doc__ = _ABOUT[kind]
    return click.command(kind, short_help=_ABOUT[kind])(_where(_settings_options(kind)(callback)))


class _Place(NamedTuple):
    """Where a run takes place.

    Attributes:
        is_given: whether the servers run already.
        is_tls: whether clients connect over TLS.
        asks_options: whether clients need options for TLS or AUTH that only ours take.
    """

    source: Source
    is_given: bool
    is_tls: bool
    asks_options: bool


def _place(
    embedded: bool, nsqds: Sequence[Address], lookupds: Sequence[Endpoint], servers: Path | None, security: Security
) -> _Place:
    if sum(map(bool, (embedded, nsqds, lookupds, servers))) > 1:
        raise click.UsageError("give one of --embedded, --nsqd, --lookupd and --servers")
    is_secured = security != Security()
    if nsqds or lookupds:
        options.require_running(nsqds, lookupds)
        of_client = security.of_client if is_secured else {}
        named = [str(lookupd) for lookupd in lookupds]
        source = given_lookupds(named, of_client) if lookupds else given_nsqds(nsqds, of_client)
        return _Place(source, True, security.is_tls, is_secured)
    if security.tls_options or security.auth_secret:
        raise click.UsageError(
            "--tls-ca, --tls-cert, --tls-key, --tls-server-name and --auth-secret-file are for servers that run "
            "already, named with --nsqd or --lookupd; those that bench starts have TLS with --tls, and no AUTH"
        )
    return _Place(from_folder(servers) if servers else _embedded(), False, security.is_tls, False)


def _embedded() -> Source:
    return embedded


def _clients(wanted: Sequence[str], peer_python: str | None, place: _Place) -> list[Client]:
    """The clients of a run; those that are left out are said."""
    clients = chosen(available(peer_python), wanted)
    for name in sorted({*wanted} - {client.name for client in clients}):
        click.echo(f"left out: {name} needs {needed_by(name)}", err=True)
    left_out = [client.name for client in clients if place.asks_options and not client.takes_options]
    if left_out:
        text = f"{', '.join(left_out)}: bench cannot give them TLS and AUTH options"
        if len(left_out) == len(clients):
            raise click.UsageError(text)
        click.echo(f"left out: {text}", err=True)
    return [client for client in clients if client.name not in left_out]


def _run(
    todo: Sequence[Plan],
    place: _Place,
    wanted: Sequence[str],
    peer_python: str | None,
    wants_syscalls: bool,
    wants_instructions: bool,
    target: Path | None,
    patience: float = 0.0,
) -> Run:
    clients = _clients(wanted, peer_python, place)
    counters = [
        *(_counted_by(syscalls.counter(), syscalls.NEEDED) if wants_syscalls else ()),
        *(_counted_by(instructions.counter(), instructions.NEEDED) if wants_instructions else ()),
    ]
    run = Run(about=about(_versions(clients)))
    for together in in_turns(todo):
        tasks = [
            Task(
                plan.name, plan.settings, chosen(clients, plan.clients), embedded if plan.is_embedded else place.source
            )
            for plan in together
        ]
        for plan, scenario in zip(together, run_scenarios(tasks, console.progress, counters, patience), strict=True):
            run.scenarios.append(scenario)
            _show(scenario, plan.title, run.about.cores)
        if target:
            console.write_file(target, results.as_json(run))
    return run


def _counted_by(counter: Counter | None, needed: str) -> list[Counter]:
    """What counts; none, and why is said, where nothing here can."""
    if counter is None:
        click.echo(f"not counted: {needed}", err=True)
        return []
    return [counter]


def _versions(clients: Sequence[Client]) -> dict[str, str]:
    return {client.name: client.version for client in clients if client.version and not client.variant}


def _show(scenario: Scenario, title: str, cores: int) -> None:
    rounds = console.counted(scenario.settings.rounds, "round")
    _print_table(f"{title}: {scenario.server}, {rounds}", tables.header(scenario), tables.rows(scenario, cores))
    for result in scenario.clients:
        if result.failure:
            click.echo(f"{result.client} failed: {result.failure}", err=True)


def _print_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    output = console.output()
    output.print(console.grid(head, list(rows), output.width, title=title))


@click.command("codec", short_help="Time the compiled core.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="How many rounds.")
@click.option("--json", "target", type=_FILE, metavar="FILE", help="Write the run to this file.")
def _codec(rounds: int, target: Path | None) -> None:
    """Time the compiled core: decode, columns, commands, MPUB, answers; nanoseconds a message."""
    run = Run(about=about({}), core=core.measure(rounds))
    _show_core(run)
    if target:
        console.write_file(target, results.as_json(run))


def _show_core(run: Run) -> None:
    _print_table("The compiled core", tables.CORE_HEADER, tables.core_rows(run))


@click.command("suite", short_help="Run the whole comparison.")
@_where
@click.option("--duration", type=options.duration, default=1.5, show_default=True, help="Of a client's round.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="How many rounds.")
@click.option(
    "--patience",
    type=options.duration,
    default=60.0,
    show_default=True,
    help="Time for more rounds of a scenario, while a ratio of the goals is not settled.",
)
@click.option("--short", is_flag=True, help="Only the scenarios that tell most.")
@click.option("--only", multiple=True, metavar="NAME", help="Only this scenario (repeatable).")
def _suite(
    embedded: bool,
    nsqds: Sequence[Address],
    lookupds: Sequence[Endpoint],
    servers: Path | None,
    duration: float,
    rounds: int,
    short: bool,
    only: Sequence[str],
    security: Security,
    target: Path | None,
    **others: Any,
) -> None:
    """Run all scenarios, and hold the result against the goals of the project."""
    todo = [plan for plan in plans(duration, rounds) if (plan.name in only if only else plan.is_short or not short)]
    if not todo:
        raise click.UsageError(f"--only: there are {', '.join(plan.name for plan in plans(1, 1))}")
    place = _place(embedded, nsqds, lookupds, servers, security)
    run = _run(_as_the_servers(todo, place), place, target=target, **others)
    if not short:
        run.core = core.measure(rounds)
        _show_core(run)
    measured = [each for each in judge(run) if each.verdict != "not measured"]
    rows = [[each.what, each.target, each.actual, each.verdict] for each in measured]
    _print_table("Goals", ["what", "target", "actual", "verdict"], rows)
    if target:
        console.write_file(target, results.as_json(run))


def _as_the_servers(todo: Sequence[Plan], place: _Place) -> list[Plan]:
    """The plans over TLS where that is asked for; for given servers without it, the plans that need none."""
    if place.is_tls:
        kept = _kept(todo, [plan for plan in todo if place.is_given and plan.settings.needs_own_servers], _OWN_SERVERS)
        return [plan if plan.is_embedded or plan.settings.needs_own_servers else plan.over_tls() for plan in kept]
    if not place.is_given:
        return list(todo)
    kept = _kept(todo, [plan for plan in todo if plan.settings.tls], "needs --tls, and servers that have it")
    return _kept(kept, [plan for plan in kept if plan.settings.needs_own_servers], _OWN_SERVERS)


_OWN_SERVERS = "needs servers of its own: --embedded or --servers"


def _kept(todo: Sequence[Plan], unfit: Sequence[Plan], reason: str) -> list[Plan]:
    """The plans without those that are unfit, which is said."""
    names = ", ".join(plan.name for plan in unfit)
    if unfit and len(unfit) == len(todo):
        raise click.UsageError(f"{names}: {reason}")
    if unfit:
        click.echo(f"left out: {names}: {reason}", err=True)
    return [plan for plan in todo if plan not in unfit]


for _kind in _TAKEN:
    command.add_command(_measuring(_kind))
for _other in (_codec, _suite, scale_command, compare_command, report_command):
    command.add_command(_other)
