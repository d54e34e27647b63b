"""`nsq-fast demo`: run the main job, show how it goes, say what came of it.

Without servers of your own it runs on an embedded broker in a process of its
own. The job itself is in ``mainjob``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from time import perf_counter
from types import TracebackType
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nsq_fast.broker import BrokerProcess
from nsq_fast.errors import NsqError
from nsq_fast.names import Address
from nsq_fast.runtime.admin import LookupdHTTPClient, NsqdHTTPClient
from nsq_fast.runtime.http import Endpoint

from . import console, options
from .channel_stats import add_up
from .interrupt import INTERRUPTED, stop_signals
from .ledger import Ledger
from .mainjob import JobOptions, MainJob, Summary

_LINE_EVERY = 1.0
_NOTES = {
    "published": "answered OK",
    "publish_failed": "not answered OK",
    "delivered": "calls of handlers",
    "finished": "FIN",
    "failed": "handlers that raised",
    "requeued": "REQ, the failed ones included",
    "touched": "TOUCH, then FIN",
    "answered_later": "FIN from another greenlet",
    "given_up": "failed {max_tries} times",
    "lost": "published, never finished nor given up",
    "duplicated": "finished more than once",
    "left_on_server": "waiting, in flight or deferred at the end",
    "discovery_seconds": "start to the first message of every topic",
    "messages_per_second": "published, handled and answered",
    "latency_p50_ms": "publish to handler, first delivery",
    "latency_p99_ms": "",
}


@click.command("demo", short_help="Run the main job, end to end.")
@options.lookupd_http_option()
@options.nsqd_tcp_option()
@click.option("--messages", type=click.IntRange(1), default=200_000, show_default=True, help="How many messages.")
@click.option("--topics", type=click.IntRange(1, 64), default=4, show_default=True, help="Over how many topics.")
@click.option("--size", type=click.IntRange(16, 1 << 20), default=200, show_default=True, help="Bytes in a message.")
@click.option(
    "--max-in-flight", type=click.IntRange(1), default=2000, show_default=True, help="Messages held, a topic."
)
@click.option(
    "--stall-timeout",
    type=options.duration,
    metavar="DURATION",
    default=30.0,
    show_default=True,
    help="End when nothing moves.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one line of JSON.")
def command(
    lookupds: Sequence[Endpoint],
    nsqds: Sequence[Address],
    messages: int,
    topics: int,
    size: int,
    max_in_flight: int,
    stall_timeout: float,
    as_json: bool,
) -> None:
    """Publish to several topics and consume them, with handlers that succeed, fail, requeue, touch and answer later.

    On an embedded broker, or on the servers of --lookupd or --nsqd, in topics of its own; with --nsqd alone these stay
    there. The exit code is 1 when a message was lost.
    """
    if nsqds or lookupds:
        options.require_running(nsqds, lookupds)
    with stop_signals() as stop, _servers(nsqds, lookupds) as servers:
        job = MainJob(
            JobOptions(
                nsqds=servers.nsqds,
                lookupds=servers.lookupds,
                messages=messages,
                topics=topics,
                body_size=size,
                max_in_flight=max_in_flight,
                stall_timeout=stall_timeout,
            )
        )
        with _progress(messages, quiet=as_json) as progress:
            summary = job.run(stop, progress.update)
        left = None if stop.is_set() else servers.left(job.topics)
        servers.delete(job.topics)
    results = {**dataclasses.asdict(summary), "left_on_server": left, "server": servers.name}
    if as_json:
        click.echo(json.dumps(results))
    else:
        _show(results, job.options)
    raise SystemExit(_exit_code(summary, left))


def _exit_code(summary: Summary, left: int | None) -> int:
    if summary.ended == "interrupted":
        return INTERRUPTED
    return 1 if summary.lost or summary.publish_failed or left or summary.ended != "done" else 0


@dataclasses.dataclass(frozen=True)
class _Servers:
    """Where the job runs: the addresses that clients get, and for the accounts afterwards the HTTP addresses known."""

    name: str
    nsqds: tuple[str, ...] = ()
    lookupds: tuple[str, ...] = ()
    nsqds_http: tuple[str, ...] = ()

    def left(self, topics: Sequence[str]) -> int | None:
        """What the nsqds still hold of these topics; None where they cannot be asked."""
        if not self.nsqds_http:
            return None
        clients = [NsqdHTTPClient.from_url(nsqd) for nsqd in self.nsqds_http]
        return sum(
            row.unanswered for row in add_up(client.stats(topic=topic) for client in clients for topic in topics)
        )

    def delete(self, topics: Sequence[str]) -> None:
        """Delete the topics, on nsqds before lookupds; not every server has every topic."""
        clients: list[NsqdHTTPClient | LookupdHTTPClient] = [NsqdHTTPClient.from_url(nsqd) for nsqd in self.nsqds_http]
        clients += [LookupdHTTPClient.from_url(lookupd) for lookupd in self.lookupds]
        for client in clients:
            for topic in topics:
                with suppress(NsqError):
                    client.delete_topic(topic)


@contextmanager
def _servers(nsqds: Sequence[Address], lookupds: Sequence[Endpoint]) -> Iterator[_Servers]:
    if lookupds:
        seeds = tuple(str(lookupd) for lookupd in lookupds)
        yield _Servers(f"nsqlookupd {', '.join(seeds)}", lookupds=seeds, nsqds_http=tuple(options.nsqds_of(seeds)))
    elif nsqds:
        addresses = tuple(str(nsqd) for nsqd in nsqds)
        yield _Servers(f"nsqd {', '.join(addresses)}", nsqds=addresses)
    else:
        with BrokerProcess() as broker:
            seed = f"http://{broker.lookupd.http}"
            http = tuple(str(nsqd.http) for nsqd in broker.nsqds)
            yield _Servers("embedded nsqd and nsqlookupd", lookupds=(seed,), nsqds_http=http)


def _progress(messages: int, quiet: bool) -> _Bars | _Lines:
    terminal = Console(stderr=True)
    return _Bars(messages, terminal) if terminal.is_terminal and not quiet else _Lines(messages, quiet)


class _Bars(AbstractContextManager["_Bars"]):
    """Two bars on a terminal: published and settled."""

    def __init__(self, messages: int, console: Console) -> None:
        rate = TextColumn("{task.fields[rate]:>9,.0f}/s")
        columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), rate, TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._published = self._progress.add_task("published", total=messages, rate=0.0)
        self._settled = self._progress.add_task("answered", total=messages, rate=0.0)
        self._started = perf_counter()

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *failure: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._progress.stop()

    def update(self, ledger: Ledger) -> None:
        seconds = perf_counter() - self._started
        for task, count in ((self._published, ledger.published), (self._settled, ledger.settled)):
            self._progress.update(task, completed=count, rate=count / seconds)


class _Lines(AbstractContextManager["_Lines"]):
    """A line a second where there is no terminal; none when quiet."""

    def __init__(self, messages: int, quiet: bool) -> None:
        self._messages = messages
        self._quiet = quiet
        self._next = perf_counter() + _LINE_EVERY

    def __exit__(self, *failure: type[BaseException] | BaseException | TracebackType | None) -> None:
        return None

    def update(self, ledger: Ledger) -> None:
        if self._quiet or perf_counter() < self._next:
            return
        self._next = perf_counter() + _LINE_EVERY
        click.echo(f"published {ledger.published:,}  answered {ledger.settled:,}  of {self._messages:,}", err=True)


def _show(results: dict[str, Any], job: JobOptions) -> None:
    title = f"{job.messages:,} messages of {job.body_size} bytes, {job.topics} topics, {results['server']}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, note in _NOTES.items():
        table.add_row(name.replace("_", " "), _cell(results[name]), note.format(max_tries=job.max_tries))
    output = console.output()
    output.print(table)
    output.print(f"{results['ended']} in {results['seconds']:.2f} s")


def _cell(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
