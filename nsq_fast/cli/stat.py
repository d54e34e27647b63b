"""Statistics of topics and channels, added up over several nsqds: what `stat` shows and what `demo` checks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, NamedTuple

import click
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from nsq_fast.client.admin import placed
from nsq_fast.errors import NsqError, printable
from nsq_fast.exporter import Nsqds, read_stats
from nsq_fast.names import Address
from nsq_fast.protocol.topology import Topology

from . import console, options
from .options import argument, flag, option, say
from .servers import NSQD_HTTP, Servers, named_servers, stop_signals


class ChannelStats(NamedTuple):
    """One channel, or with ``channel`` empty one topic, over all nsqds. Counts of messages since nsqd started.

    ``ready`` is the sum of the RDYs of its clients.
    """

    topic: str
    channel: str
    depth: int = 0
    backend_depth: int = 0
    in_flight: int = 0
    deferred: int = 0
    requeued: int = 0
    timed_out: int = 0
    messages: int = 0
    clients: int = 0
    ready: int = 0
    paused: bool = False

    @property
    def memory_depth(self) -> int:
        """Messages that wait in memory."""
        return self.depth - self.backend_depth

    @property
    def unanswered(self) -> int:
        """Messages that wait, are in flight, or are deferred."""
        return self.depth + self.in_flight + self.deferred

    @property
    def handled(self) -> int:
        """What rises with each FIN, and stays as it is while there is none, whatever is published or requeued."""
        return self.messages - self.unanswered

    def plus(self, other: ChannelStats) -> ChannelStats:
        """The sum of the same channel on two nsqds."""
        counts = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        return self._replace(paused=self.paused or other.paused, **counts)


_COUNTS = [name for name in ChannelStats._fields if name not in {"topic", "channel", "paused"}]


def add_up(replies: Iterable[Mapping[str, Any]]) -> list[ChannelStats]:
    """Rows of nsqds' ``/stats`` replies: each topic, followed by its channels, in the order of their names."""
    added: dict[tuple[str, str], ChannelStats] = {}
    for row in (row for reply in replies for row in read_stats(reply)):
        key = row.topic, row.channel
        figures = {name: value for name, value in row.figures.items() if name in ChannelStats._fields}
        stats = ChannelStats(*key, **figures)
        added[key] = added[key].plus(stats) if key in added else stats
    return [added[key] for key in sorted(added)]


class Stalls:
    """Since when nothing of what waits in a channel is finished, over tables that were read one after the other."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], tuple[ChannelStats, float]] = {}

    def look(self, row: ChannelStats, now: float) -> str:
        """Why nothing is done of what waits, as far as nsqds know it, and for how long; empty while something is.

        One table shows what keeps everything from being done; whether anything is done takes two.
        """
        if not row.channel or not (row.depth or row.in_flight):
            self._before.pop(row[:2], None)
            return ""
        before, since = self._before.get(row[:2], (None, now))
        if before is None or before.handled != row.handled:
            self._before[row[:2]] = row, now
        if row.depth and not row.in_flight and (row.paused or not row.ready):
            return "paused" if row.paused else "RDY 0" if row.clients else "no client"
        if before is None or before.handled != row.handled:
            return ""
        fails = row.requeued > before.requeued or row.timed_out > before.timed_out
        why = "requeued" if fails else "unanswered" if row.in_flight else "not pushed"
        return f"{why}, {now - since:.0f} s"


_COLUMNS = ("total", "mem", "disk", "inflt", "def", "req", "t-o", "msgs", "msgs/s", "clients", "stalled")


@options.command("stat", "Show depth, in flight, requeues, clients; refreshed.")
def command(
    servers: Servers = named_servers(NSQD_HTTP),
    topic: str | None = option(type=options.topic, help="Show this topic only."),
    channel: str | None = option(type=options.channel, help="Show this channel only; needs --topic."),
    interval: float = option("-i", "--interval", type=options.some_time, default=2.0, help="Time between refreshes."),
    count: int = option(
        "-c", "--count", type=click.IntRange(min=0), default=0, help="End after this many tables; 0: never."
    ),
    once: bool = flag(help="The same as --count 1."),
    as_json: bool = flag("--json", help="Print each table as one line of JSON."),
) -> None:
    """Show the topics and channels of the nsqds, added up over all of them, until Ctrl-C.

    Total depth is mem + disk, without the messages in flight (inflt) and the deferred ones (def). Requeued (req), timed
    out (t-o) and msgs are counted since nsqd started; msgs/s since the table before.

    Stalled says why waiting messages are not handled: the channel is paused, it has no client, or all clients are at
    RDY 0 (in backoff, or paused). From the second table on it also says for how long no message was finished: messages
    that were delivered are unanswered, or are requeued again and again, or nsqd has not pushed what clients asked for.
    Why clients do so, only they can say: consumer.progress(), /readyz of a worker, nsq_fast_consumer_stalled.

    The exit code is 1 when no nsqd had the TOPIC, or the CHANNEL, in the last of the tables that --count asks for.
    """
    if channel and not topic:
        raise click.UsageError("--channel needs --topic")
    servers = servers.found(quiet=as_json)
    named = topic and (f"channel {channel} of {topic}" if channel else topic)
    screen, nsqds = _Screen(as_json, f"no nsqd has {named}" if named else ""), Nsqds(**servers.of_http)
    left = 1 if once else count or -1
    with stop_signals() as stop, screen.live:
        while not stop.is_set():
            rows = _read(nsqds, servers, topic, channel)
            screen.show(rows)
            left -= 1
            if left == 0:
                if named and not rows:
                    raise SystemExit(1)
                return
            stop.wait(interval)


def _read(nsqds: Nsqds, servers: Servers, topic: str | None, channel: str | None) -> list[ChannelStats]:
    """Raises ClickException when no server answers."""
    answers = nsqds.ask(list(map(str, servers.nsqds)) or servers.all_http(), topic=topic, channel=channel).values()
    replies = [each for each in answers if not isinstance(each, NsqError)]
    for error in (each for each in answers if isinstance(each, NsqError)):
        if not replies:
            raise click.ClickException(str(error))
        say(f"left out: {error}")
    return [row for row in add_up(replies) if channel in (None, row.channel)]


class _Screen:
    """Shows tables: in place on a terminal, one after the other elsewhere, or as JSON.

    Args:
        none: what stands in place of a table without rows; empty: its head.
    """

    def __init__(self, as_json: bool, none: str) -> None:
        self._as_json = as_json
        self._none = none
        self._console = console.output()
        self._before: dict[tuple[str, str], int] = {}
        self._seconds, self._shown_at = 0.0, monotonic()
        self._stalls = Stalls()
        self.live = Live(console=self._console, auto_refresh=False)

    def show(self, rows: Sequence[ChannelStats]) -> None:
        now = monotonic()  # a server that answers late makes it longer than the interval
        self._seconds, self._shown_at = now - self._shown_at, now
        stalled = [self._stalls.look(row, now) for row in rows]
        if self._as_json:
            shown = zip(rows, stalled, strict=True)
            click.echo(json.dumps([{**row._asdict(), "stalled": reason} for row, reason in shown]))
        elif self._console.is_terminal:
            self.live.update(self._table(rows, stalled), refresh=True)
        else:
            self._console.print(self._table(rows, stalled))
        self._before = {(row.topic, row.channel): row.messages for row in rows}

    def _table(self, rows: Sequence[ChannelStats], stalled: Sequence[str]) -> RenderableType:
        if self._none and not rows:
            return Text(self._none)
        cells = [
            [row.topic, row.channel + (" (paused)" if row.paused else ""), *self._cells(row), reason]
            for row, reason in zip(rows, stalled, strict=True)
        ]
        return console.grid(("topic", "channel", *_COLUMNS), cells, self._console.width, names=2, box=SIMPLE_HEAD)

    def _cells(self, row: ChannelStats) -> list[str]:
        before = self._before.get((row.topic, row.channel))
        rate = "" if before is None else f"{max(0, row.messages - before) / self._seconds:,.0f}"
        counts = (row.depth, row.memory_depth, row.backend_depth, row.in_flight, row.deferred, row.requeued)
        return [*(f"{n:,}" for n in (*counts, row.timed_out, row.messages)), rate, f"{row.clients:,}"]


@options.command("lookup", "Show where a topic lives.")
def lookup_command(
    topic: str = argument(type=options.topic),
    servers: Servers = named_servers(None),
    timeout: float = option(type=options.some_time, default=5.0, help="Limit for an answer."),
    as_json: bool = flag("--json", help="Print one line of JSON."),
) -> None:
    """Show the nsqds that have TOPIC, its partitions where it has any, and its channels.

    The exit code is 1 when no nsqd has it.
    """
    with servers.found(quiet=as_json).poller(timeout) as poller:
        topology = poller.wait_topology(topic, timeout)
    if as_json:
        click.echo(json.dumps(_as_json(topic, topology)))
    elif topology.is_empty:
        say(f"no nsqd has {topic}")
    else:
        _show(topic, topology)
    if topology.is_empty:
        raise SystemExit(1)


def _show(topic: str, topology: Topology) -> None:
    rows = [
        ["" if partition is None else str(partition), str(nsqd.tcp), str(nsqd.http or ""), nsqd.version]
        for partition, nsqd in placed(topology)
    ]
    console.show(("partition", "nsqd", "http", "version"), rows, title=topic, names=2, numbers=False)
    click.echo(f"channels: {', '.join(map(printable, topology.channels)) or 'none'}")
    if not topology.is_complete:
        click.echo("some partitions have no leader now")


def _as_json(topic: str, topology: Topology) -> dict[str, Any]:
    def text(address: Address | None) -> str | None:
        return str(address) if address else None

    nsqds = [
        {"partition": partition, "tcp": text(nsqd.tcp), "http": text(nsqd.http), "version": nsqd.version}
        for partition, nsqd in placed(topology)
    ]
    meta = msgspec.structs.asdict(topology.meta) if topology.meta else None
    return {"topic": topic, "nsqds": nsqds, "channels": list(topology.channels), "meta": meta}
