"""`nsq-fast pub`: publish the lines of files or of standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import click
from gevent import get_hub, wait
from gevent.event import Event
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from nsq_fast.client.http import Endpoint
from nsq_fast.config import ProducerConfig
from nsq_fast.errors import BodyInvalid, NsqError
from nsq_fast.names import Address
from nsq_fast.printable import counted
from nsq_fast.producer import Producer

from . import options
from .console import warnings_shown
from .options import INTERRUPTED, Security, security_options, stop_signals


class Splitter:
    """Cuts a stream at a delimiter, whatever chunks it comes in: feed chunks, take messages. Empty ones are left out.

    Args:
        delimiter: one byte or more.
        limit: longest message, in bytes; more without a delimiter raises BodyInvalid.
    """

    def __init__(self, delimiter: bytes, limit: int) -> None:
        self._delimiter = delimiter
        self._limit = limit
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The messages that this chunk completes."""
        *messages, self._rest = (self._rest + chunk).split(self._delimiter)
        if len(self._rest) > self._limit + len(self._delimiter):
            raise BodyInvalid(f"more than {self._limit} bytes without the delimiter {self._delimiter!r}")
        return [message for message in messages if message]

    def end(self) -> list[bytes]:
        """What is left when the stream ends; the splitter can be used again."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


_READ_SIZE = 64 * 1024
_ESCAPES = {"\\n": b"\n", "\\r\\n": b"\r\n", "\\t": b"\t", "\\0": b"\0"}


@click.command("pub", short_help="Publish lines of files or of standard input.")
@click.argument("topic", type=options.topic, metavar="TOPIC")
@click.argument("files", type=click.Path(exists=True, dir_okay=False, allow_dash=True), nargs=-1)
@options.nsqd_tcp_option
@options.lookupd_http_option
@security_options
@click.option(
    "-d", "--delimiter", default="\\n", show_default=True, help="What ends a message; \\n, \\t, \\0 are understood."
)
@click.option("-0", "--null", is_flag=True, help="Messages end with a NUL byte, as `find -print0` writes them.")
@click.option("--rate", type=options.rate, default=0.0, help="Messages per second at most; 0: no limit.")
@options.number("--batch", default=200, most=100_000, help="Messages per MPUB at most.")
@options.seconds("--defer", may_be_zero=True, help="Deliver them so much later; not redesigned.")
@click.option("--key", help="Messages with the same key go to the same partition, in order.")
@click.option("--partition", type=click.IntRange(min=0), help="The partition that all go to.")
@click.option("--to-all", is_flag=True, help="Publish every message to every nsqd given, as to_nsq does.")
@click.option(
    "--producer-opt",
    type=options.option_of_client,
    metavar="NAME=VALUE",
    multiple=True,
    help="Any option of Producer, as name=value (repeatable).",
)
@click.option("-q", "--quiet", is_flag=True, help="Say nothing when all went well.")
def command(
    topic: str,
    files: Sequence[str],
    nsqds: Sequence[Address],
    lookupds: Sequence[Endpoint],
    delimiter: str,
    null: bool,
    rate: float,
    batch: int,
    defer: float | None,
    key: str | None,
    partition: int | None,
    to_all: bool,
    producer_opt: Sequence[tuple[str, str]],
    quiet: bool,
    security: Security,
) -> None:
    """Publish each line of FILES to TOPIC; of standard input without FILES, or for a file named "-".

    Empty lines are left out: NSQ carries no empty messages. A line that ends with the input instead of a delimiter
    counts.
    """
    if key is not None and partition is not None:
        raise click.UsageError("give --key or --partition, not both")
    if to_all and not nsqds:
        raise click.UsageError("--to-all needs --nsqd")
    end = b"\0" if null else _ESCAPES.get(delimiter, delimiter.encode())
    if not end:
        raise click.UsageError("--delimiter must not be empty")
    config = ProducerConfig.of({name: value for name, value in producer_opt if name in ProducerConfig.names()})
    nsqds, lookupds = options.find_servers(nsqds, lookupds, quiet=quiet)
    groups: list[Sequence[Address]] = [[address] for address in nsqds] if to_all else [nsqds]
    settings: dict[str, Any] = {**security.of_client, **dict(producer_opt)}
    producers = [_producer(group, lookupds, settings) for group in groups]
    splitter = Splitter(end, config.max_msg_size)
    with warnings_shown(quiet), stop_signals() as stop, _progress(files, quiet) as progress:
        job = _Job(_sender(topic, defer, key, partition), producers, batch, rate, stop, progress)
        try:
            job.run(files or ["-"], splitter)
        except (NsqError, OSError) as error:
            raise click.ClickException(f"after {counted(job.published, 'message')}: {error}") from error
        finally:
            for producer in producers:
                producer.close()
    if not quiet:
        click.echo(f"published {counted(job.published, 'message')} to {topic}", err=True)
    if stop.is_set():
        raise SystemExit(INTERRUPTED)


Send = Callable[[Producer, Sequence[bytes]], object]
"""Publishes some messages, and returns when a server has them."""


def _sender(topic: str, defer: float | None, key: str | None, partition: int | None) -> Send:
    if defer is None:
        return lambda producer, bodies: producer.multipublish(topic, bodies, key=key, partition=partition)
    milliseconds = round(defer * 1000)

    def send(producer: Producer, bodies: Sequence[bytes]) -> None:
        # There is no MPUB of deferred messages.
        results = [
            producer.publish(topic, body, milliseconds, raise_error=False, key=key, partition=partition)
            for body in bodies
        ]
        for result in results:
            result.get()

    return send


def _producer(nsqds: Sequence[Address], lookupds: Sequence[Endpoint], settings: dict[str, Any]) -> Producer:
    producer = Producer(list(nsqds), [str(lookupd) for lookupd in lookupds], **settings)
    producer.start()
    return producer


class _Job:
    """Reading, splitting and publishing, until the input ends or ``stop`` is set."""

    def __init__(
        self,
        send: Send,
        producers: Sequence[Producer],
        batch: int,
        rate: float,
        stop: Event,
        progress: Progress | None,
    ) -> None:
        self.published = 0
        self._send = send
        self._producers = producers
        self._batch = 1 if rate else batch
        self._rate = rate
        self._stop = stop
        self._progress = progress
        self._started = perf_counter()

    def run(self, files: Sequence[str], splitter: Splitter) -> None:
        for name in files:
            advance = self._meter(name)
            for chunk in self._chunks(name):
                self._publish(splitter.feed(chunk))
                advance(len(chunk))
            self._publish(splitter.end())

    def _meter(self, name: str) -> Callable[[int], object]:
        """What to tell how many bytes of a file were read."""
        progress = self._progress
        if progress is None or name == "-":
            return lambda _: None
        task = progress.add_task(name, total=os.path.getsize(name))
        return lambda count: progress.update(task, advance=count)

    def _chunks(self, name: str) -> Iterator[bytes]:
        """Read in a thread, so that a quiet standard input does not keep heartbeats and signals waiting."""
        descriptor = sys.stdin.fileno() if name == "-" else os.open(name, os.O_RDONLY)
        pool = get_hub().threadpool
        try:
            while not self._stop.is_set():
                reading = pool.spawn(os.read, descriptor, _READ_SIZE)
                wait([reading, self._stop], count=1)
                if not reading.ready() or not (chunk := reading.get()):
                    return
                yield chunk
        finally:
            if name != "-":
                os.close(descriptor)

    def _publish(self, messages: Sequence[bytes]) -> None:
        for start in range(0, len(messages), self._batch):
            if self._stop.is_set():
                return
            batch = messages[start : start + self._batch]
            for producer in self._producers:
                self._send(producer, batch)
            self.published += len(batch)
            if self._rate:
                self._stop.wait(max(0.0, self._started + self.published / self._rate - perf_counter()))


def _progress(files: Sequence[str], quiet: bool) -> AbstractContextManager[Progress | None]:
    """A progress bar, where there is a terminal to show it and a size to show."""
    console = Console(stderr=True)
    if quiet or not files or not console.is_terminal:
        return nullcontext()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
