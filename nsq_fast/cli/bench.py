"""`nsq-fast bench`: compare clients on one server in one run, and show it. The harness itself is `nsq_fast.bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from nsq_fast.bench.clients import OURS, Client, available, chosen, names, needed_by
from nsq_fast.bench.counting import INSTRUCTIONS_NEED, SYSCALLS_NEED, Counter, instruction_counter, syscall_counter
from nsq_fast.bench.figures import METRICS, THRESHOLD, Change, Figure, compare, differences, shown
from nsq_fast.bench.report import docs, fill, header, html, pictures, readme_block, tuning_block
from nsq_fast.bench.report import rows as rows_of
from nsq_fast.bench.results import COMPRESSIONS, MODES, Run, Scenario, Settings, about, as_json, load
from nsq_fast.bench.runner import Task, run_scenarios
from nsq_fast.bench.scale import HEADER, ScaleRun, explained, measure, rows, settings_of, title_of
from nsq_fast.bench.servers import Source, from_folder, given_lookupds, given_nsqds
from nsq_fast.bench.servers import embedded as embedded_source
from nsq_fast.bench.suite import Plan, in_turns, judge, plans
from nsq_fast.client.http import Endpoint
from nsq_fast.errors import ConfigError, NsqError
from nsq_fast.names import Address
from nsq_fast.printable import counted

from . import console, options
from .options import Security, security_options

_ONE = click.IntRange(1)
_BUFFERING = "Whether nsqd sends each message at once, or gathers them in its output buffer."
_SETTINGS: dict[str, tuple[Any, Any, str]] = {
    "size": (_ONE, 200, "Bytes in a message."),
    "count": (click.IntRange(0), 0, "Messages a round; 0: as many as a client handles in --duration."),
    "duration": (options.some_time, 2.0, "How long a client works in a round."),
    "rounds": (_ONE, 3, "How many rounds."),
    "max_in_flight": (_ONE, 2500, "Messages a consumer holds."),
    "connections": (_ONE, 1, "Connections of a consumer, to several loopback addresses of the nsqd."),
    "partitions": (_ONE, 4, "Partitions of the topic."),
    "concurrency": (
        _ONE,
        1,
        "Callers that publish at once, handlers of a consumer, or messages on their way in a roundtrip.",
    ),
    "batch": (_ONE, 200, "Messages in an MPUB."),
    "handler_sleep": (options.duration, 0.0, "How long each handler sleeps."),
    "linger": (options.duration, 0.001, "How long the client with linger waits for more publishes."),
    "settle": (
        options.duration,
        0.5,
        "Time to settle before an open loop begins, or before an idle client is measured.",
    ),
    "mode": (click.Choice(MODES), "single", "One publish at a time, many callers at once, or batches."),
    "rate": (options.rate, 0.0, "Open loop: publish so many messages/s, however fast they are handled."),
    "compression": (click.Choice(COMPRESSIONS[1:]), None, "Compress the connections."),
}
"""Option of a scenario -> its type, its default, its help."""

_SOME = ("size", "count", "duration", "rounds", "concurrency", "rate", "compression")
_TAKEN = {
    "consume": (*_SOME, "unbuffered", "max_in_flight", "connections", "handler_sleep", "settle"),
    "publish": (*_SOME, "mode", "batch", "linger"),
    "roundtrip": (*_SOME, "unbuffered", "max_in_flight"),
    "ordered": ("size", "count", "duration", "rounds", "max_in_flight", "partitions"),
    "idle": ("duration", "rounds", "max_in_flight", "connections", "settle"),
}
_ABOUT = {
    "consume": "Consume a backlog, with one FIN for each message; with --rate, messages that are published meanwhile.",
    "publish": "Publish one at a time, from many callers, or in batches.",
    "roundtrip": "Publish and consume in one process: latency from publish to handler.",
    "ordered": "Consume a topic with partitions in order, on the embedded cluster or on the one of --lookupd.",
    "idle": "Hold connections on which nothing happens: CPU and memory.",
}


@click.group("bench", short_help="Compare clients on one server; reports.")
def command() -> None:
    """Measure clients and servers of NSQ. Each client has its own process; they take turns, in several rounds.

    Only ratios within one run mean anything: machines differ, and other programs disturb them.

    With --tls, servers that the command starts get their own certificate. For servers of yours, give the --tls options
    and --auth-secret-file as for the other commands; only clients of nsq_fast are measured with these.
    """


def _where(function: Callable[..., None]) -> Callable[..., None]:
    """The options that say against what, with which clients, and where the result goes."""
    decorators = (
        click.option("--embedded", is_flag=True, help="Measure on the embedded broker (the default)."),
        options.nsqd_tcp_option,
        options.lookupd_http_option,
        security_options,
        click.option("--servers", type=options.FOLDER, metavar="DIR", help="Folder with the nsqd binary to start."),
        click.option(
            "--client",
            "wanted",
            multiple=True,
            type=click.Choice(names()),
            metavar="NAME",
            help=f"A client to measure (repeatable): {', '.join(names())}. Default: all.",
        ),
        click.option("--peer-python", metavar="PATH", help="An interpreter with gnsq, pynsq, ansq or asyncnsq."),
        click.option(
            "--syscalls", "wants_syscalls", is_flag=True, help="Also count system calls, with perf or strace."
        ),
        click.option(
            "--instructions",
            "wants_instructions",
            is_flag=True,
            help="Also count the instructions of clients that goals compare, with valgrind; this takes minutes.",
        ),
        options.output_file("--json", "target", help="Write the run to this file."),
    )
    for decorate in reversed(decorators):
        function = decorate(function)
    return function


def _settings_options(kind: str, function: Callable[..., None]) -> Callable[..., None]:
    for name in reversed(_TAKEN[kind]):
        flag = f"--{name.replace('_', '-')}"
        if name == "unbuffered":
            flag, default = "--unbuffered/--buffered", kind == "roundtrip"
            given: dict[str, Any] = {"default": default, "show_default": True, "help": _BUFFERING}
        else:
            kind_of, default, text = _SETTINGS[name]
            metavar = {"metavar": "DURATION"} if kind_of in (options.duration, options.some_time) else {}
            given = {"type": kind_of, "default": default, "show_default": bool(default), "help": text, **metavar}
        function = click.option(flag, **given)(function)
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
    return click.command(kind, short_help=_ABOUT[kind])(_where(_settings_options(kind, callback)))


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
        options.find_servers(nsqds, lookupds)
        of_client = security.of_client if is_secured else {}
        named = [str(lookupd) for lookupd in lookupds]
        source = given_lookupds(named, of_client) if lookupds else given_nsqds(nsqds, of_client)
        return _Place(source, True, security.is_tls, is_secured)
    if security.tls_options or security.auth_secret:
        raise click.UsageError(
            "--tls-ca, --tls-cert, --tls-key, --tls-server-name and --auth-secret-file are for servers that run "
            "already, named with --nsqd or --lookupd; those that bench starts have TLS with --tls, and no AUTH"
        )
    return _Place(from_folder(servers) if servers else embedded_source, False, security.is_tls, False)


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
        *(_counted_by(syscall_counter(), SYSCALLS_NEED) if wants_syscalls else ()),
        *(_counted_by(instruction_counter(), INSTRUCTIONS_NEED) if wants_instructions else ()),
    ]
    run = Run(about=about(_versions(clients)))
    for together in in_turns(todo):
        tasks = [_task(plan, clients, place) for plan in together]
        try:
            scenarios = run_scenarios(tasks, console.progress, counters, patience)
        except NsqError as error:  # of a server; what the others cost is worth knowing
            if isinstance(error, ConfigError) or len(together) == len(todo):
                raise
            click.echo(f"not measured: {_names(together)}: {error}", err=True)
            continue
        for plan, scenario in zip(together, scenarios, strict=True):
            run.scenarios.append(scenario)
            _show(scenario, plan.title, run.about.cores)
        if target:
            console.write_file(target, as_json(run))
    return run


def _task(plan: Plan, clients: Sequence[Client], place: _Place) -> Task:
    source = embedded_source if plan.is_embedded else place.source
    return Task(plan.name, plan.settings, chosen(clients, plan.clients), source)


def _names(some: Iterable[Plan]) -> str:
    return ", ".join(plan.name for plan in some)


def _counted_by(counter: Counter | None, needed: str) -> list[Counter]:
    """What counts; none, and why is said, where nothing here can."""
    if counter is None:
        click.echo(f"not counted: {needed}", err=True)
        return []
    return [counter]


def _versions(clients: Sequence[Client]) -> dict[str, str]:
    return {client.name: client.version for client in clients if client.version and not client.variant}


def _show(scenario: Scenario, title: str, cores: int) -> None:
    rounds = counted(scenario.settings.rounds, "round")
    _print_table(f"{title}: {scenario.server}, {rounds}", header(scenario), rows_of(scenario, cores))
    for result in scenario.clients:
        if result.failure:
            click.echo(f"{result.client} failed: {result.failure}", err=True)


def _print_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    output = console.output()
    output.print(console.grid(head, list(rows), output.width, title=title))


@click.command("suite", short_help="Run the whole comparison.")
@_where
@options.seconds("--duration", default=1.5, help="How long a client works in a round.")
@options.number("--rounds", default=3, help="How many rounds.")
@options.seconds(
    "--patience",
    default=60.0,
    may_be_zero=True,
    help="Time for more rounds of a scenario, while a ratio of the goals is uncertain.",
)
@click.option("--short", is_flag=True, help="Run only the most important scenarios.")
@click.option("--only", multiple=True, metavar="NAME", help="Run only this scenario (repeatable).")
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
    """Run all scenarios, and compare the result with the goals of the project."""
    todo = [plan for plan in plans(duration, rounds) if (plan.name in only if only else plan.is_short or not short)]
    if not todo:
        raise click.UsageError(f"--only: there are {_names(plans(1, 1))}")
    place = _place(embedded, nsqds, lookupds, servers, security)
    todo = _as_the_servers(todo, place)
    run = _run(todo, place, target=target, **others)
    measured = [each for each in judge(run) if each.verdict != "not measured"]
    rows = [[each.what, each.target, each.actual, each.verdict] for each in measured]
    _print_table("Goals", ["what", "target", "actual", "verdict"], rows)
    if failed := [plan for plan in todo if run.scenario(plan.name) is None]:
        raise NsqError(f"not measured, for the reasons given above: {_names(failed)}")


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
    names = _names(unfit)
    if unfit and len(unfit) == len(todo):
        raise click.UsageError(f"{names}: {reason}")
    if unfit:
        click.echo(f"left out: {names}: {reason}", err=True)
    return [plan for plan in todo if plan not in unfit]


_KINDS = ("consume", "publish", "both")


@click.command("scale", short_help="Measure many processes on many nsqds.")
@click.option("--servers", type=options.FOLDER, metavar="DIR", help="Folder with the nsqd binary to start.")
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    multiple=True,
    default=(1, 2, 4),
    show_default=True,
    help="How many processes at once (repeatable).",
)
@options.number("--nsqds", default=1, most=64, help="How many nsqds to start.")
@options.number("--connections", default=1, most=1000, help="Connections of a process to each nsqd.")
@click.option(
    "--kind", "kinds", type=click.Choice(_KINDS), multiple=True, help="What to measure (repeatable). Default: all."
)
@options.number("--size", default=200, help="Bytes in a message.")
@options.seconds("--duration", default=2.0, help="How long one process alone works.")
@options.output_file("--json", "target", help="Write the run to this file.")
def scale_command(
    servers: Path | None,
    processes: tuple[int, ...],
    nsqds: int,
    connections: int,
    kinds: tuple[str, ...],
    size: int,
    duration: float,
    target: Path | None,
) -> None:
    """Measure nsq_fast in several processes at once, each on a topic of its own, over all nsqds.

    Against nsqds of --servers, or of the embedded broker. The last column is the largest p99 of the processes: of one
    publish, or from publish to handler.
    """
    source = from_folder(servers) if servers else embedded_source
    (client,) = chosen(available(), [OURS])
    curves = []
    for kind in kinds or _KINDS:
        settings = settings_of(kind, connections, size, duration)
        curve = measure(kind, settings, sorted(set(processes)), nsqds, client, source, console.progress)
        curves.append(curve)
    run = ScaleRun(about=about({}), curves=curves)
    output = console.output()
    for curve in run.curves:
        output.print(console.grid(HEADER, list(rows(curve)), output.width, title=f"{title_of(curve)}: {curve.server}"))
        for line in explained(curve, run.about.cores):
            output.print(line)
    if target:
        console.write_file(target, as_json(run))


_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("compare", short_help="Show what changed between two runs.")
@click.argument("before", type=_EXISTING)
@click.argument("after", type=_EXISTING)
@click.option("--client", "clients", multiple=True, help="A client to compare (repeatable); default: all.")
@click.option("--figure", "figures", multiple=True, help="A figure to compare, as it is shown (repeatable).")
@click.option(
    "--relative-to", default="", metavar="CLIENT", help="Divide by this client's figures, each in its own run."
)
@click.option(
    "--threshold",
    type=options.share,
    metavar="SHARE",
    default=THRESHOLD,
    show_default=True,
    help="Smallest change to show.",
)
@click.option("--all", "everything", is_flag=True, help="Also show what did not change.")
@click.option("--json", "as_json", is_flag=True, help="Print the changes as JSON.")
def compare_command(
    before: Path,
    after: Path,
    clients: Sequence[str],
    figures: Sequence[str],
    relative_to: str,
    threshold: float,
    everything: bool,
    as_json: bool,
) -> None:
    """Show what changed from run BEFORE to run AFTER by more than the spread of the rounds.

    The exit code is 1 when something became worse. Between machines, or days, use --relative-to.
    """
    old, new = load(before), load(after)
    for difference in differences(old, new):
        click.echo(f"warning: {difference}", err=True)
    changes = list(compare(old, new, clients=clients, figures=figures, relative_to=relative_to, threshold=threshold))
    if not changes:
        raise click.UsageError("the two runs have no figure in common")
    if as_json:
        click.echo(msgspec.json.encode(changes).decode())
    else:
        _show_changes(
            changes if everything else [each for each in changes if each.verdict != "same"], relative_to, len(changes)
        )
    raise SystemExit(any(each.verdict == "worse" for each in changes))


def _show_changes(changes: Sequence[Change], relative_to: str, compared: int) -> None:
    title = f"{counted(compared, 'figure')} compared" + (f", relative to {relative_to}" if relative_to else "")
    if not changes:
        click.echo(f"{title}: nothing changed by more than the spread of the rounds")
        return
    rows = []
    for each in changes:
        cells = [_cell(value, "" if relative_to else each.metric) for value in (each.before, each.after)]
        rows.append([each.scenario, each.client, each.metric, *cells, f"{each.ratio - 1:+.0%}", each.verdict])
    output = console.output()
    head = ("scenario", "client", "figure", "before", "after", "change", "verdict")
    output.print(console.grid(head, rows, output.width, title=title, names=3, numbers=False))


def _cell(value: Figure, metric: str) -> str:
    median = shown(value, metric) if metric in METRICS else f"{value.median:,.3g}"
    return median if value.low == value.high else f"{median} ({value.spread:.0%})"


@click.command("report", short_help="Show a run: HTML, charts, documentation.")
@click.argument("run_file", metavar="RUN", type=_EXISTING)
@options.output_file("--html", "html_file", help="Write the report as one HTML file.")
@click.option("--svg", "svg_folder", type=click.Path(file_okay=False, path_type=Path), help="Write charts to a folder.")
@options.output_file("--docs", "docs_file", help="Write the page of the documentation.")
@click.option("--readme", type=_EXISTING, metavar="FILE", help="Put the figures between the marks of this file.")
@click.option("--tuning", type=_EXISTING, metavar="FILE", help="The same in the page about tuning.")
def report_command(
    run_file: Path,
    html_file: Path | None,
    svg_folder: Path | None,
    docs_file: Path | None,
    readme: Path | None,
    tuning: Path | None,
) -> None:
    """Show the run that the file RUN has, in the forms that the options ask for."""
    if not (html_file or svg_folder or docs_file or readme or tuning):
        raise click.UsageError("say what to write: --html, --svg, --docs, --readme or --tuning")
    run = load(run_file)
    if html_file:
        console.write_file(html_file, html(run))
    if docs_file:
        console.write_file(docs_file, docs(run))
    for page, block in ((readme, readme_block), (tuning, tuning_block)):
        if page:
            console.write_file(page, fill(page.read_text(encoding="utf-8"), block(run)))
    if svg_folder:
        for name, chart in pictures(run):
            console.write_file(svg_folder / name, chart)


for _kind in _TAKEN:
    command.add_command(_measuring(_kind))
for _other in (_suite, scale_command, compare_command, report_command):
    command.add_command(_other)
