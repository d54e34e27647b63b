"""`nsq-fast demo`: run the main job, show how it goes, say what came of it.

Without servers of your own it runs on an embedded broker in a process of its own, and then, with an ordered topic, on
an embedded redesigned cluster. A redesigned cluster of your own gets the ordered part only, because nothing else of the
job works there. The jobs themselves are in ``jobs``. At the end Spark, where it runs, reports on the trace records.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import click
from gevent.event import Event
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nsq_fast.broker import BrokerProcess
from nsq_fast.client.admin import LookupdHTTPClient, NsqdHTTPClient
from nsq_fast.client.http import Endpoint
from nsq_fast.errors import NsqError
from nsq_fast.names import Address
from nsq_fast.printable import counted

from . import console, options
from .jobs import (
    BODY_SIZE,
    MAX_TRIES,
    JobOptions,
    Ledger,
    MainJob,
    OrderedJob,
    OrderedOptions,
    Place,
    Results,
    Tell,
    embedded_cluster,
    existing_cluster,
)
from .options import INTERRUPTED, UNSECURED, Security, security_options, stop_signals
from .servers import Lookup
from .stat import add_up
from .trace_report import why_not

_LINE_EVERY = 1.0
_SPARK_TIMEOUT = 300.0
_REPORT_ARGUMENTS = ("--window", "200ms", "--grace", "0", "--json", "--memory", "512m", "--master", "local[2]")
_NOTES = {
    "published": "answered OK",
    "publish_failed": "not answered OK",
    "delivered": "calls of handlers",
    "finished": "FIN",
    "failed": "handlers that raised",
    "requeued": "REQ, the failed ones included",
    "touched": "TOUCH, then FIN",
    "answered_later": "FIN from another greenlet",
    "given_up": f"failed {MAX_TRIES} times",
    "lost": "published, never finished nor given up",
    "duplicated": "finished more than once",
    "order_violations": "messages of a key after later ones",
    "leader_moves": "partitions that got another leader in the middle",
    "traces_published": "trace records of publishes",
    "traces_joined": "of these, found again in those of the consumer",
    "left_on_server": "waiting, in flight or deferred at the end",
    "discovery_seconds": "start to the first message of every topic",
    "messages_per_second": "of the main job the first 95 %: the rest is late on purpose",
    "latency_p50_ms": "publish to handler, first delivery",
    "latency_p99_ms": "",
}


_TRACE_NOTES = {
    "records": "of publishes and consumptions, joined by Spark",
    "finished": "messages with a FIN",
    "lost": "published, never finished",
    "duplicates": "finished more than once",
    "violations": "finished out of order",
    "redelivered": "delivered again",
}


@click.command("demo", short_help="Run the main job, end to end.")
@options.lookupd_http_option
@options.nsqd_tcp_option
@security_options
@options.number("--messages", default=200_000, help="How many messages.")
@options.number("--topics", default=4, most=64, help="Over how many topics.")
@click.option(
    "--ordered-messages",
    type=click.IntRange(0),
    help="How many messages in the ordered topic; 0: none.  [default: a tenth of --messages]",
)
@click.option(
    "--trace-html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the report on the traces goes.  [default: a new folder for temporary files]",
)
@click.option("--traces/--no-traces", default=True, help="Report on the traces of the ordered topic, where Spark runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one line of JSON.")
def command(
    lookupds: Sequence[Endpoint],
    nsqds: Sequence[Address],
    messages: int,
    topics: int,
    ordered_messages: int | None,
    trace_html: Path | None,
    traces: bool,
    as_json: bool,
    security: Security,
) -> None:
    """Publish to several topics and consume them, with handlers that succeed, fail, requeue, touch and answer later.

    On an embedded broker, or on the servers of --lookupd or --nsqd, in topics of its own; with --nsqd alone these stay
    there. Then publish to an ordered, traced topic of an embedded redesigned cluster while a leader moves; where Spark
    is installed, it reports on the traces.

    When --lookupd names a redesigned cluster, only the ordered part runs, in a topic that is created for it and deleted
    afterwards; no leader is moved. The exit code is 1 when a message was lost or came out of order.
    """
    if nsqds or lookupds:
        options.find_servers(nsqds, lookupds)
    lookup = Lookup(lookupds, security) if lookupds else None
    is_cluster = lookup is not None and lookup.is_redesigned
    common: dict[str, Any] = {"security": security.of_client}
    if ordered_messages is None:
        ordered_messages = messages if is_cluster else -(-messages // 10)
    parts = []
    with stop_signals() as stop:
        if not is_cluster:
            job_options = JobOptions(messages=messages, topics=topics, **common)
            parts.append(_run_main_job(job_options, _servers(nsqds, lookupds, security), stop, as_json))
        if ordered_messages and not stop.is_set() and (is_cluster or not (nsqds or lookupds)):
            place = existing_cluster(lookup) if lookup else embedded_cluster()
            with tempfile.TemporaryDirectory(prefix="nsq-fast-demo-") as folder:
                log = Path(folder, "trace.log") if traces else None
                ordered_options = OrderedOptions((), "", ordered_messages, trace_file=log, **common)
                parts.append(_run_ordered_job(ordered_options, place, stop, as_json))
                if log and not stop.is_set():
                    parts.append(_report_on_traces(log, trace_html, as_json))
    if as_json:
        click.echo(json.dumps({key: value for part in parts for key, value in part.results.items()}))
    raise SystemExit(next((part.code for part in parts if part.code), 0))


class _Part(NamedTuple):
    results: Results
    code: int


def _run_main_job(job_options: JobOptions, place: AbstractContextManager[_Servers], stop: Event, quiet: bool) -> _Part:
    with place as servers:
        job = MainJob(dataclasses.replace(job_options, nsqds=servers.nsqds, lookupds=servers.lookupds))
        with _progress(job_options.messages, quiet) as progress:
            results = job.run(stop, progress)
        left = None if stop.is_set() else servers.left(job.topics)
        servers.delete(job.topics)
    results |= {"left_on_server": left, "server": servers.name}
    what = f"{counted(job_options.topics, 'topic')}, {servers.name}"
    return _part(results, job, what, quiet, is_good=not left)


def _run_ordered_job(
    ordered_options: OrderedOptions, place: AbstractContextManager[Place], stop: Event, quiet: bool
) -> _Part:
    with place as (name, lookupds, topic, move):
        job = OrderedJob(dataclasses.replace(ordered_options, lookupds=lookupds, topic=topic), move)
        with _progress(job.ledger.size, quiet) as progress:
            results = job.run(stop, progress)
    results["server"] = name
    is_good = not results["order_violations"]
    is_good &= results["traces_joined"] == results["traces_published"] == results["published"]
    what = f"{job.options.keys} keys, an ordered topic, {name}"
    part = _part(results, job, what, quiet, is_good)
    return part._replace(results={"ordered": results})


def _part(results: Results, job: MainJob | OrderedJob, what: str, quiet: bool, is_good: bool) -> _Part:
    """Show what came of a job, and judge it."""
    if not quiet:
        messages = counted(job.ledger.size, "message")
        _print_rows(f"{messages} of {BODY_SIZE} bytes, {what}", results, _NOTES)
    if results["ended"] == "interrupted":
        return _Part(results, INTERRUPTED)
    is_good &= results["ended"] == "done" and not (results["lost"] or results["publish_failed"])
    return _Part(results, int(not is_good))


def _report_on_traces(log: Path, page: Path | None, quiet: bool) -> _Part:
    """What Spark makes of the trace records; one line where it cannot run, which is no failure."""
    try:
        found, page = report_on(log, page)
    except NoReport as reason:
        click.echo(f"no trace report: {reason}", err=quiet)
        return _Part({}, 0)
    again = sum(found[name] for name in ("redelivered_req", "redelivered_timeout", "redelivered_unknown"))
    results = {**{name: found[name] for name in _TRACE_NOTES if name in found}, "redelivered": again}
    if not quiet:
        _print_rows("the traces of the ordered topic", results, _TRACE_NOTES)
        console.output().print(f"report: {page}")
    return _Part({"traces": {**results, "report": str(page)}}, 0)


@dataclasses.dataclass(frozen=True)
class _Servers:
    """Where the job runs: the addresses that clients get, and for the accounts afterwards the HTTP addresses known."""

    name: str
    nsqds: tuple[str, ...] = ()
    lookupds: tuple[str, ...] = ()
    nsqds_http: tuple[str, ...] = ()
    security: Security = UNSECURED

    def left(self, topics: Sequence[str]) -> int | None:
        """What the nsqds still hold of these topics; None where they cannot be asked."""
        if not self.nsqds_http:
            return None
        clients = [NsqdHTTPClient.from_url(nsqd, **self.security.of_http) for nsqd in self.nsqds_http]
        return sum(
            row.unanswered for row in add_up(client.stats(topic=topic) for client in clients for topic in topics)
        )

    def delete(self, topics: Sequence[str]) -> None:
        """Delete the topics, on nsqds before lookupds; not every server has every topic."""
        http = self.security.of_http
        clients: list[NsqdHTTPClient | LookupdHTTPClient] = [
            *(NsqdHTTPClient.from_url(nsqd, **http) for nsqd in self.nsqds_http),
            *(LookupdHTTPClient.from_url(lookupd, **http) for lookupd in self.lookupds),
        ]
        for client in clients:
            for topic in topics:
                with suppress(NsqError):
                    client.delete_topic(topic)


@contextmanager
def _servers(nsqds: Sequence[Address], lookupds: Sequence[Endpoint], security: Security) -> Iterator[_Servers]:
    if lookupds:
        seeds = tuple(str(lookupd) for lookupd in lookupds)
        http = tuple(options.nsqds_of(seeds, security))
        yield _Servers(f"nsqlookupd {', '.join(seeds)}", lookupds=seeds, nsqds_http=http, security=security)
    elif nsqds:
        addresses = tuple(str(nsqd) for nsqd in nsqds)
        yield _Servers(f"nsqd {', '.join(addresses)}", nsqds=addresses)
    else:
        with BrokerProcess() as broker:
            seed = f"http://{broker.lookupd.http}"
            http = tuple(str(nsqd.http) for nsqd in broker.nsqds)
            yield _Servers("embedded nsqd and nsqlookupd", lookupds=(seed,), nsqds_http=http)


@contextmanager
def _progress(messages: int, quiet: bool) -> Iterator[Tell]:
    """Show how far a job is: two bars on a terminal, a line a second elsewhere, nothing when quiet."""
    terminal = Console(stderr=True)
    if quiet:
        yield lambda ledger: None
    elif terminal.is_terminal:
        rate = TextColumn("{task.fields[rate]:>9,.0f}/s")
        columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), rate, TimeElapsedColumn())
        with Progress(*columns, console=terminal) as bars:
            published = bars.add_task("published", total=messages, rate=0.0)
            settled = bars.add_task("answered", total=messages, rate=0.0)
            started = perf_counter()

            def move(ledger: Ledger) -> None:
                seconds = perf_counter() - started
                for task, count in ((published, ledger.published), (settled, ledger.settled)):
                    bars.update(task, completed=count, rate=count / seconds)

            yield move
    else:
        due = perf_counter() + _LINE_EVERY

        def say(ledger: Ledger) -> None:
            nonlocal due
            if perf_counter() >= due:
                due = perf_counter() + _LINE_EVERY
                console.progress(f"published {ledger.published:,}  answered {ledger.settled:,}  of {messages:,}")

        yield say


def _print_rows(title: str, results: Results, notes: dict[str, str]) -> None:
    rows = [(name.replace("_", " "), _cell(results[name]), note) for name, note in notes.items() if name in results]
    output = console.output()
    output.print(console.notes(title, rows))
    if "ended" in results:
        output.print(f"{results['ended']} in {results['seconds']:.2f} s")


def _cell(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


# The report on the traces


class NoReport(Exception):
    """There is no report, for the reason that is its text."""


def report_on(log: Path, page: Path | None) -> tuple[dict[str, Any], Path]:
    """Write the report on a trace log to ``page``, by default into a new folder; its figures and the page.

    Spark runs in a process of its own, after the cluster has ended: its calls would block the hub of gevent. Raises
    NoReport.
    """
    if reason := why_not():
        raise NoReport(reason)
    console.progress("the traces of the ordered topic: Spark reports on them, which takes a minute")
    folder = None if page else Path(tempfile.mkdtemp(prefix="nsq-fast-traces-"))
    page = page or Path(str(folder), "traces.html")
    try:
        return _figures(log, page), page
    except NoReport:
        if folder:
            shutil.rmtree(folder)
        raise


def _figures(log: Path, page: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "nsq_fast", "trace-report", str(log), "--html", str(page), *_REPORT_ARGUMENTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SPARK_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise NoReport(f"Spark took longer than {_SPARK_TIMEOUT:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"Spark ended with {done.returncode}"]
        raise NoReport(lines[-1].removeprefix("Error: "))
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures
