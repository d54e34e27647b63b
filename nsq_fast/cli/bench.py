"""`nsq-fast bench`: compare clients on one server in one run, and show it. The harness itself is `nsq_fast.bench`."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from nsq_fast.bench import report, results, runner
from nsq_fast.bench.clients import OURS, Client, available, chosen, names, needed_by
from nsq_fast.bench.servers import Source, from_folder, given_lookupds, given_nsqds
from nsq_fast.bench.servers import embedded as embedded_source
from nsq_fast.bench.suite import Judged, Plan, in_turns, judge, plans
from nsq_fast.errors import ConfigError, NsqError, counted

from . import console, options
from .options import argument, flag, number, option, say, several, write_file
from .servers import NSQD_TCP, Servers, named_servers

_TYPES = {
    "duration": options.some_time,
    "rate": options.rate,
    "mode": click.Choice(results.MODES),
    "compression": click.Choice(results.COMPRESSIONS[1:]),
}
"""Of options of a scenario whose range here is not that of all scenarios."""

_DEFAULTS = {"partitions": 4, "mode": "single", "compression": None}
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


_subcommand = partial(options.command, group=command)


def _setting(kind: str, name: str) -> Any:
    declared = results.Settings.OPTIONS[name]
    if declared.kind is bool:
        return options.of_config(declared, "--unbuffered/--buffered", default=kind == "roundtrip", show_default=True)
    of_all = options.duration if declared.unit else click.IntRange(int(declared.minimum or 0))
    default = _DEFAULTS.get(name, declared.default)
    return options.of_config(declared, type=_TYPES.get(name, of_all), default=default)


_FOLDER: Any = option("--servers", type=options.FOLDER, metavar="DIR", help="Folder with the nsqd binary to start.")
_TARGET: Any = options.output_file("--json", help="Write the run to this file.")
_OWN_SERVERS = "needs servers of its own: --embedded or --servers"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Against what something is measured, with which clients, and where the result goes."""

    embedded: bool
    servers: Servers
    folder: Path | None
    wanted: Sequence[str]
    peer_python: str | None
    wants_instructions: bool
    target: Path | None

    def __post_init__(self) -> None:
        servers = self.servers
        if sum(map(bool, (self.embedded, servers.nsqds, servers.lookupds, self.folder))) > 1:
            raise click.UsageError("give one of --embedded, --nsqd, --lookupd and --servers")
        if servers.are_named:
            servers.found()
        elif servers.tls_options or servers.auth_secret:
            raise click.UsageError(
                "--tls-ca, --tls-cert, --tls-key, --tls-server-name and --auth-secret-file are for servers that run "
                "already, named with --nsqd or --lookupd; those that bench starts have TLS with --tls, and no AUTH"
            )

    @property
    def source(self) -> Source:
        if not self.servers.are_named:
            return from_folder(self.folder) if self.folder else embedded_source
        secured = self.servers.secured if self.asks_options else {}
        lookupds = list(map(str, self.servers.lookupds))
        return given_lookupds(lookupds, secured) if lookupds else given_nsqds(self.servers.nsqds, secured)

    @property
    def asks_options(self) -> bool:
        """Whether clients need options for TLS or AUTH that only ours take."""
        return self.servers.are_named and bool(self.servers.is_tls or self.servers.auth_secret)

    def clients(self) -> list[Client]:
        """The clients of a run; those that are left out are said."""
        clients = chosen(available(self.peer_python), self.wanted)
        for name in sorted({*self.wanted} - {client.name for client in clients}):
            say(f"left out: {name} needs {needed_by(name)}")
        left_out = [client.name for client in clients if self.asks_options and not client.takes_options]
        if left_out:
            text = f"{', '.join(left_out)}: bench cannot give them TLS and AUTH options"
            if len(left_out) == len(clients):
                raise click.UsageError(text)
            say(f"left out: {text}")
        return [client for client in clients if client.name not in left_out]

    def as_the_servers(self, todo: Sequence[Plan]) -> list[Plan]:
        """The plans over TLS where that is asked for; for given servers without it, the plans that need none."""
        is_given, is_tls = self.servers.are_named, self.servers.is_tls
        kept = list(todo)
        if is_given and not is_tls:
            kept = _kept(kept, lambda plan: not plan.settings.tls, "needs --tls, and servers that have it")
        if is_given:
            kept = _kept(kept, lambda plan: not plan.settings.needs_own_servers, _OWN_SERVERS)
        if is_tls:
            kept = [each if each.is_embedded or each.settings.needs_own_servers else each.over_tls() for each in kept]
        return kept

    def run(self, todo: Sequence[Plan], patience: float = 0.0) -> results.Run:
        clients = self.clients()
        counts = self.wants_instructions and bool(shutil.which("valgrind"))
        if self.wants_instructions and not counts:
            say("not counted: instructions are counted by valgrind, which is not installed")
        versions = {client.name: client.version for client in clients if client.version and not client.variant}
        run = results.Run(about=results.about(versions))
        for together in in_turns(todo):
            tasks = [
                runner.Task(
                    plan.name,
                    plan.settings,
                    chosen(clients, plan.clients),
                    embedded_source if plan.is_embedded else self.source,
                )
                for plan in together
            ]
            try:
                scenarios = runner.run_scenarios(tasks, say, counts, patience)
            except NsqError as error:  # of a server; what the others cost is worth knowing
                if isinstance(error, ConfigError) or len(together) == len(todo):
                    raise
                say(f"not measured: {_names(together)}: {error}")
                continue
            for plan, scenario in zip(together, scenarios, strict=True):
                run.scenarios.append(scenario)
                _show(scenario, plan.title, run.about.cores)
            if self.target:
                write_file(self.target, results.as_json(run))
        return run


_MEASUREMENT: Any = options.together(
    Measurement,
    embedded=flag(help="Measure on the embedded broker (the default)."),
    servers=named_servers(NSQD_TCP),
    folder=_FOLDER,
    wanted=several(
        "--client", type=click.Choice(names()), metavar="NAME",
        help=f"A client to measure (repeatable): {', '.join(names())}. Default: all.",
    ),
    peer_python=option(metavar="PATH", help="An interpreter with gnsq, pynsq, ansq or asyncnsq."),
    wants_instructions=flag(
        "--instructions",
        help="Also count the instructions of clients that goals compare, with valgrind; this takes minutes.",
    ),
    target=_TARGET,
)  # fmt: skip


def _measuring(kind: str) -> None:
    more = {name: _setting(kind, name) for name in _TAKEN[kind]}

    @_subcommand(kind, _ABOUT[kind], help=_ABOUT[kind], more=more)
    def run(measurement: Measurement = _MEASUREMENT, **arguments: Any) -> None:
        given = {name: value for name, value in arguments.items() if value is not None}
        if given.get("mode") == "concurrent" and given["concurrency"] == 1:
            given["concurrency"] = 100
        servers = measurement.servers
        if kind == "ordered" and servers.is_tls and not servers.are_named:
            raise click.UsageError("--tls: the embedded cluster has none; name another with --lookupd")
        settings = results.Settings(kind=kind, tls=servers.is_tls, **given)
        measurement.run([Plan(kind, kind, settings)])


def _names(some: Iterable[Plan]) -> str:
    return ", ".join(plan.name for plan in some)


def _kept(todo: Sequence[Plan], is_fit: Callable[[Plan], bool], reason: str) -> list[Plan]:
    """The plans without those that are unfit, which is said."""
    unfit = [plan for plan in todo if not is_fit(plan)]
    if unfit and len(unfit) == len(todo):
        raise click.UsageError(f"{_names(unfit)}: {reason}")
    if unfit:
        say(f"left out: {_names(unfit)}: {reason}")
    return [plan for plan in todo if plan not in unfit]


def _show(scenario: results.Scenario, title: str, cores: int, marks: Mapping[str, str] = {}) -> None:
    """Print the table of a scenario; ``marks``: what stands behind the names of some clients."""
    rounds = counted(scenario.settings.rounds, "round")
    head, *body = ([name + marks.get(name, ""), *cells] for name, *cells in report.table(scenario, cores))
    console.show(head, body, title=f"{title}: {scenario.server}, {rounds}")
    for result in scenario.clients:
        if result.failure:
            say(f"{result.client} failed: {result.failure}")


for _kind in _TAKEN:
    _measuring(_kind)


_SCENARIOS = [plan.name for plan in plans(1, 1)]


@_subcommand("suite", "Run the whole comparison.")
def _suite(
    measurement: Measurement = _MEASUREMENT,
    duration: float = option(type=options.some_time, default=1.5, help="How long a client works in a round."),
    rounds: int = number(default=3, help="How many rounds."),
    patience: float = option(
        type=options.duration,
        default=60.0,
        help="Time for more rounds of a scenario, while a ratio of the goals is uncertain.",
    ),
    short: bool = flag(help="Run only the most important scenarios."),
    only: Sequence[str] = several(
        type=click.Choice(_SCENARIOS), metavar="NAME", help="Run only this scenario (repeatable)."
    ),
) -> None:
    """Run all scenarios, and compare the result with the goals of the project."""
    todo = [plan for plan in plans(duration, rounds) if (plan.name in only if only else plan.is_short or not short)]
    todo = measurement.as_the_servers(todo)
    run = measurement.run(todo, patience)
    console.show(Judged._fields, [row for row in judge(run) if row.verdict != "not measured"], title="Goals")
    if failed := [plan for plan in todo if run.scenario(plan.name) is None]:
        raise NsqError(f"not measured, for the reasons given above: {_names(failed)}")


_KINDS = ("consume", "publish", "both")


@_subcommand("scale", "Measure many processes on many nsqds.")
def scale_command(
    folder: Path | None = _FOLDER,
    processes: tuple[int, ...] = several(
        type=click.IntRange(1, 64), default=(1, 2, 4), help="How many processes at once (repeatable)."
    ),
    nsqds: int = number(default=1, most=64, help="How many nsqds to start."),
    connections: int = number(default=1, most=1000, help="Connections of a process to each nsqd."),
    kinds: tuple[str, ...] = several(
        "--kind", type=click.Choice(_KINDS), help="What to measure (repeatable). Default: all."
    ),
    size: int = number(default=200, help="Bytes in a message."),
    duration: float = option(type=options.some_time, default=2.0, help="How long one process alone works."),
    target: Path | None = _TARGET,
) -> None:
    """Measure nsq_fast in several processes at once, each on a topic of its own, over all nsqds.

    Against nsqds of --servers, or of the embedded broker. CPU is that of all processes for one message; memory and
    latency, of one publish or from publish to handler, are those of the worst process.
    """
    source = from_folder(folder) if folder else embedded_source
    (client,) = chosen(available(), [OURS])
    run = results.Run(about=results.about({}))
    for kind in kinds or _KINDS:
        settings = runner.scale_settings(kind, connections, size, duration)
        scenario = runner.measure_scale(kind, settings, sorted(set(processes)), nsqds, client, source, say)
        run.scenarios.append(scenario)
        _show(scenario, scenario.name, run.about.cores, {runner.knee_of(scenario).client: " (knee)"})
        for line in runner.explained(scenario, run.about.cores):
            click.echo(line)
    if target:
        write_file(target, results.as_json(run))


@_subcommand("compare", "Show what changed between two runs.")
def compare_command(
    before: Path = argument(type=options.FILE),
    after: Path = argument(type=options.FILE),
    clients: Sequence[str] = several("--client", help="A client to compare (repeatable); default: all."),
    figures: Sequence[str] = several("--figure", help="A figure to compare, as it is shown (repeatable)."),
    relative_to: str = option(
        default="", metavar="CLIENT", help="Divide by this client's figures, each in its own run."
    ),
    threshold: float = option(type=options.share, default=results.THRESHOLD, help="Smallest change to show."),
    everything: bool = flag("--all", help="Also show what did not change."),
    as_json: bool = flag("--json", help="Print the changes as JSON."),
) -> None:
    """Show what changed from run BEFORE to run AFTER by more than the spread of the rounds.

    The exit code is 1 when something became worse. Between machines, or days, use --relative-to.
    """
    old, new = results.load(before), results.load(after)
    for difference in results.differences(old, new):
        say(f"warning: {difference}")
    changes = list(results.compare(old, new, relative_to, threshold))
    measured = {each.client for each in changes}
    _refuse_unknown("--relative-to", filter(None, [relative_to]), measured)
    _refuse_unknown("--client", clients, measured)
    _refuse_unknown("--figure", figures, {each.metric for each in changes})
    changes = [
        each for each in changes if each.client in (clients or measured) and each.metric in (figures or [each.metric])
    ]
    if not changes:
        raise click.UsageError("the two runs have no figure in common")
    if as_json:
        click.echo(msgspec.json.encode(changes).decode())
    else:
        title = counted(len(changes), "figure") + " compared" + (f", relative to {relative_to}" if relative_to else "")
        _show_changes([each for each in changes if everything or each.verdict != "same"], relative_to, title)
    raise SystemExit(any(each.verdict == "worse" for each in changes))


def _refuse_unknown(option: str, given: Iterable[str], known: Iterable[str]) -> None:
    """What is misspelt must not pass as if it had not become worse."""
    for name in given:
        if name not in known:
            there = ", ".join(sorted(known)) or "none"
            raise click.UsageError(f"{option} {name!r}: what both runs have is {there}")


def _show_changes(changes: Sequence[results.Change], relative_to: str, title: str) -> None:
    if not changes:
        click.echo(f"{title}: nothing changed by more than the spread of the rounds")
        return
    rows = []
    for each in changes:
        cells = [_cell(value, "" if relative_to else each.metric) for value in (each.before, each.after)]
        rows.append([each.scenario, each.client, each.metric, *cells, f"{each.ratio - 1:+.0%}", each.verdict])
    head = ("scenario", "client", "figure", "before", "after", "change", "verdict")
    console.show(head, rows, title=title, names=3, numbers=False)


def _cell(value: results.Figure, metric: str) -> str:
    median = results.shown(value, metric) if metric in results.METRICS else f"{value.median:,.3g}"
    return median if value.low == value.high else f"{median} ({value.spread:.0%})"


@_subcommand("report", "Show a run: HTML, charts, documentation.")
def report_command(
    run_file: Path = argument(metavar="RUN", type=options.FILE),
    html_file: Path | None = options.output_file("--html", help="Write the report as one HTML file."),
    svg_folder: Path | None = option(
        "--svg", type=click.Path(file_okay=False, path_type=Path), help="Write charts to a folder."
    ),
    docs_file: Path | None = options.output_file("--docs", help="Write the page of the documentation."),
    readme: Path | None = option(
        type=options.FILE, metavar="FILE", help="Put the figures between the marks of this file."
    ),
    tuning: Path | None = option(type=options.FILE, metavar="FILE", help="The same in the page about tuning."),
) -> None:
    """Show the run that the file RUN has, in the forms that the options ask for."""
    if not (html_file or svg_folder or docs_file or readme or tuning):
        raise click.UsageError("say what to write: --html, --svg, --docs, --readme or --tuning")
    run = results.load(run_file)
    if html_file:
        write_file(html_file, report.html(run))
    if docs_file:
        write_file(docs_file, report.docs(run))
    for page, block in ((readme, report.readme_block), (tuning, report.tuning_block)):
        if page:
            write_file(page, report.fill(page.read_text(encoding="utf-8"), block(run)))
    if svg_folder:
        for name, chart in report.pictures(run):
            write_file(svg_folder / name, chart)
