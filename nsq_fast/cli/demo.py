"""`nsq-fast demo`: run the main job, show how it goes, say what came of it.

Without servers of your own it runs on an embedded broker in a process of its own, and then, with an ordered topic, on
an embedded redesigned cluster. A redesigned cluster of your own gets the ordered part only, because nothing else of the
job works there. The jobs themselves are in ``jobs``. At the end Spark, where it runs, reports on the trace records.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from gevent.event import Event
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nsq_fast.errors import counted

from . import console, options
from .admin import Lookup
from .jobs import (
    BODY_SIZE,
    MAX_TRIES,
    Job,
    Ledger,
    MainJob,
    OrderedJob,
    Results,
    Tell,
    embedded_cluster,
    existing_cluster,
    original_servers,
)
from .options import flag, number, option, say
from .servers import INTERRUPTED, NSQD_TCP, Servers, named_servers, stop_signals
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
    "messages_per_second": "finished, from the start until all was done",
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


@options.command("demo", "Run the main job, end to end.")
def command(
    servers: Servers = named_servers(NSQD_TCP),
    messages: int = number(default=200_000, help="How many messages."),
    topics: int = number(default=4, most=64, help="Over how many topics."),
    ordered_messages: int | None = number(
        least=0, help="How many messages in the ordered topic; 0: none.  [default: a tenth of --messages]"
    ),
    trace_html: Path | None = options.output_file(
        "--trace-html", help="Where the report on the traces goes.  [default: a new folder for temporary files]"
    ),
    traces: bool = option(
        "--traces/--no-traces", default=True, help="Report on the traces of the ordered topic, where Spark runs."
    ),
    as_json: bool = flag("--json", help="Print the summary as one line of JSON."),
) -> None:
    """Publish to several topics and consume them, with handlers that succeed, fail, requeue, touch and answer later.

    On an embedded broker, or on the servers of --lookupd or --nsqd, in topics of its own; with --nsqd alone these stay
    there. Then publish to an ordered, traced topic of an embedded redesigned cluster while a leader moves; where Spark
    is installed, it reports on the traces.

    When --lookupd names a redesigned cluster, only the ordered part runs, in a topic that is created for it and deleted
    afterwards; no leader is moved. The exit code is 1 when a message was lost or came out of order.
    """
    if servers.are_named:
        servers = servers.found()
    lookup = Lookup(servers) if servers.lookupds else None
    is_cluster = lookup is not None and lookup.is_redesigned
    if ordered_messages is None:
        ordered_messages = messages if is_cluster else -(-messages // 10)
    results: Results = {}
    codes = []
    with stop_signals() as stop, tempfile.TemporaryDirectory(prefix="nsq-fast-demo-") as folder:
        if not is_cluster:
            with original_servers(servers) as place:
                found, code = _run(MainJob(place, messages, topics), stop, as_json)
            results |= found
            codes.append(code)
        if ordered_messages and not stop.is_set() and (is_cluster or not servers.are_named):
            log = Path(folder, "trace.log")
            with existing_cluster(lookup, servers) if lookup else embedded_cluster(servers) as place:
                results["ordered"], code = _run(OrderedJob(place, ordered_messages, log), stop, as_json)
            codes.append(code)
            if traces and not stop.is_set():
                results |= _report_on_traces(log, trace_html, as_json)
    if as_json:
        click.echo(json.dumps(results))
    raise SystemExit(next(filter(None, codes), 0))


def _run(job: Job, stop: Event, quiet: bool) -> tuple[Results, int]:
    """Run a job, show what came of it, and judge it."""
    with _progress(job.ledger.size, quiet) as progress:
        results = job.run(stop, progress)
    if not quiet:
        title = f"{counted(job.ledger.size, 'message')} of {BODY_SIZE} bytes, {job.title}"
        _print_rows(title, results, _NOTES)
    return results, INTERRUPTED if results["ended"] == "interrupted" else int(not job.is_good(results))


def _report_on_traces(log: Path, page: Path | None, quiet: bool) -> Results:
    """What Spark makes of the trace records; one line where it cannot run, which is no failure."""
    try:
        found, page = report_on(log, page)
    except NoReport as reason:
        click.echo(f"no trace report: {reason}", err=quiet)
        return {}
    again = sum(found[name] for name in ("redelivered_req", "redelivered_timeout", "redelivered_unknown"))
    results = {**{name: found[name] for name in _TRACE_NOTES if name in found}, "redelivered": again}
    if not quiet:
        _print_rows("the traces of the ordered topic", results, _TRACE_NOTES)
        click.echo(f"report: {page}")
    return {"traces": {**results, "report": str(page)}}


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

        def tell(ledger: Ledger) -> None:
            nonlocal due
            if perf_counter() >= due:
                due = perf_counter() + _LINE_EVERY
                say(f"published {ledger.published:,}  answered {ledger.settled:,}  of {messages:,}")

        yield tell


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
    say("the traces of the ordered topic: Spark reports on them, which takes a minute")
    with ExitStack() as undo:
        if page is None:
            folder = tempfile.mkdtemp(prefix="nsq-fast-traces-")
            undo.callback(shutil.rmtree, folder)
            page = Path(folder, "traces.html")
        command = [sys.executable, "-m", "nsq_fast", "trace-report", str(log), "--html", str(page), *_REPORT_ARGUMENTS]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SPARK_TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            raise NoReport(f"Spark took longer than {_SPARK_TIMEOUT:.0f} s") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"Spark ended with {done.returncode}"]
            raise NoReport(lines[-1].removeprefix("Error: "))
        undo.pop_all()
    return json.loads(done.stdout.splitlines()[-1]), page
