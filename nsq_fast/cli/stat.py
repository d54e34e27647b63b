"""`nsq-fast stat`: a table of topics and channels over all nsqds, refreshed until Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click
from gevent import iwait, spawn
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.live import Live

from nsq_fast.errors import NsqError
from nsq_fast.runtime import Endpoint, NsqdHTTPClient

from . import console, options
from .channel_stats import ChannelStats, add_up
from .interrupt import stop_signals
from .security import Security, security_options

_COLUMNS = ("total", "mem", "disk", "inflt", "def", "req", "t-o", "msgs", "msgs/s", "clients")


@click.command("stat", short_help="Show depth, in flight, requeues, clients; refreshed.")
@options.nsqd_http_option()
@options.lookupd_http_option()
@security_options()
@click.option("--topic", type=options.topic, metavar="TOPIC", help="This topic only.")
@click.option("--channel", type=options.channel, metavar="CHANNEL", help="This channel only; needs --topic.")
@click.option(
    "-i",
    "--interval",
    type=options.duration,
    metavar="DURATION",
    default=2.0,
    show_default=True,
    help="Time between refreshes.",
)
@click.option("-c", "--count", type=click.IntRange(min=0), default=0, help="End after so many tables; 0: never.")
@click.option("--once", is_flag=True, help="The same as --count 1.")
@click.option("--json", "as_json", is_flag=True, help="Print each table as one line of JSON.")
def command(
    nsqds: Sequence[Endpoint],
    lookupds: Sequence[Endpoint],
    topic: str | None,
    channel: str | None,
    interval: float,
    count: int,
    once: bool,
    as_json: bool,
    security: Security,
) -> None:
    """Show what nsqds say of their topics and channels, added up. Ctrl-C ends it.

    Total depth is mem + disk; in flight (inflt) and deferred (def) come on top. Requeued (req), timed out (t-o) and
    msgs count from nsqd's start; msgs/s since the table before.
    """
    if channel and not topic:
        raise click.UsageError("--channel needs --topic")
    if interval <= 0:
        raise click.UsageError("--interval must be more than 0")
    nsqds, lookupds = options.find_servers(nsqds, lookupds, options.NSQD_HTTP, quiet=as_json)
    reader = _Reader(nsqds, lookupds, topic, channel, security)
    screen = _Screen(as_json, interval)
    left = 1 if once else count or -1
    with stop_signals() as stop, screen.live:
        while not stop.is_set():
            screen.show(reader.read())
            left -= 1
            if left == 0:
                return
            stop.wait(interval)


class _Reader:
    """Asks all nsqds at once."""

    def __init__(
        self,
        nsqds: Sequence[Endpoint],
        lookupds: Sequence[Endpoint],
        topic: str | None,
        channel: str | None,
        security: Security,
    ) -> None:
        self._nsqds = [str(nsqd) for nsqd in nsqds]
        self._lookupds = [str(lookupd) for lookupd in lookupds]
        self._topic = topic
        self._channel = channel
        self._security = security

    def read(self) -> list[ChannelStats]:
        """Raises ClickException when no server answers."""
        asked = [spawn(self._ask, nsqd) for nsqd in self._nsqds or options.nsqds_of(self._lookupds, self._security)]
        replies: list[Mapping[str, Any]] = []
        errors: list[NsqError] = []
        for greenlet in iwait(asked):
            outcome = greenlet.get()
            if isinstance(outcome, NsqError):
                errors.append(outcome)
            else:
                replies.append(outcome)
        if errors and not replies:
            raise click.ClickException(str(errors[0]))
        for error in errors:
            click.echo(f"left out: {error}", err=True)
        return [row for row in add_up(replies) if self._channel in (None, row.channel)]

    def _ask(self, nsqd: str) -> Any:
        try:
            return NsqdHTTPClient.from_url(nsqd, **self._security.of_http).stats(
                topic=self._topic, channel=self._channel
            )
        except NsqError as error:
            return error


class _Screen:
    """Shows tables: in place on a terminal, one after the other elsewhere, or as JSON."""

    def __init__(self, as_json: bool, interval: float) -> None:
        self._as_json = as_json
        self._interval = interval
        self._console = console.output()
        self._before: dict[tuple[str, str], int] = {}
        self.live = Live(console=self._console, auto_refresh=False)

    def show(self, rows: Sequence[ChannelStats]) -> None:
        if self._as_json:
            click.echo(json.dumps([row._asdict() for row in rows]))
        elif self._console.is_terminal:
            self.live.update(self._table(rows), refresh=True)
        else:
            self._console.print(self._table(rows))
        self._before = {(row.topic, row.channel): row.messages for row in rows}

    def _table(self, rows: Sequence[ChannelStats]) -> RenderableType:
        cells = [[row.topic, row.channel + (" (paused)" if row.paused else ""), *self._cells(row)] for row in rows]
        return console.grid(("topic", "channel", *_COLUMNS), cells, self._console.width, names=2, box=SIMPLE_HEAD)

    def _cells(self, row: ChannelStats) -> list[str]:
        before = self._before.get((row.topic, row.channel))
        rate = "" if before is None else f"{max(0, row.messages - before) / self._interval:,.0f}"
        counts = (row.depth, row.memory_depth, row.backend_depth, row.in_flight, row.deferred, row.requeued)
        return [*(f"{n:,}" for n in (*counts, row.timed_out, row.messages)), rate, f"{row.clients:,}"]
