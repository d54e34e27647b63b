"""`nsq-fast pub`: publish the lines of files or of standard input."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any

import click
from gevent import get_hub, wait
from gevent.event import Event
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from nsq_fast.config import ProducerConfig
from nsq_fast.errors import BodyInvalid, NsqError, counted
from nsq_fast.producer import Producer

from . import options
from .options import argument, flag, number, option, say, several, warnings_shown
from .servers import INTERRUPTED, NSQD_TCP, Servers, named_servers, stop_signals


def split(chunks: Iterable[bytes], delimiter: bytes, limit: int) -> Iterator[list[bytes]]:
    """The messages of a stream: those that each chunk completes, and at last what is left. Empty ones are left out.

    Args:
        delimiter: one byte or more.
        limit: longest message, in bytes; more without a delimiter raises BodyInvalid.
    """
    rest = b""
    for chunk in chunks:
        *messages, rest = (rest + chunk).split(delimiter)
        if len(rest) > limit + len(delimiter):
            raise BodyInvalid(f"more than {limit} bytes without the delimiter {delimiter!r}")
        yield [message for message in messages if message]
    if rest:
        yield [rest]


_READ_SIZE = 64 * 1024
_ESCAPES = {"\\n": b"\n", "\\r\\n": b"\r\n", "\\t": b"\t", "\\0": b"\0"}


@options.command("pub", "Publish lines of files or of standard input.")
def command(
    topic: str = argument(type=options.topic),
    files: Sequence[str] = argument(type=click.Path(exists=True, dir_okay=False, allow_dash=True), nargs=-1),
    servers: Servers = named_servers(NSQD_TCP),
    delimiter: str = option(
        "-d", "--delimiter", default="\\n", help="What ends a message; \\n, \\t, \\0 are understood."
    ),
    null: bool = flag("-0", "--null", help="Messages end with a NUL byte, as `find -print0` writes them."),
    rate: float = option(type=options.rate, default=0.0, help="Messages per second at most; 0: no limit."),
    batch: int = number(default=200, most=100_000, help="Messages per MPUB at most."),
    defer: float | None = option(type=options.duration, help="Deliver them so much later; not redesigned."),
    key: str | None = option(help="Messages with the same key go to the same partition, in order."),
    partition: int | None = number(least=0, help="The partition that all go to."),
    to_all: bool = flag(help="Publish every message to every nsqd given, as to_nsq does."),
    producer_opt: Sequence[tuple[str, str]] = several(
        type=options.option_of_client, help="Any option of Producer, as name=value (repeatable)."
    ),
    quiet: bool = flag("-q", "--quiet", help="Say nothing when all went well."),
) -> None:
    """Publish each line of FILES to TOPIC; of standard input without FILES, or for a file named "-".

    Empty lines are left out: NSQ carries no empty messages. A line that ends with the input instead of a delimiter
    counts.
    """
    if key is not None and partition is not None:
        raise click.UsageError("give --key or --partition, not both")
    if to_all and not servers.nsqds:
        raise click.UsageError("--to-all needs --nsqd")
    end = b"\0" if null else _ESCAPES.get(delimiter, delimiter.encode())
    if not end:
        raise click.UsageError("--delimiter must not be empty")
    config = ProducerConfig.of({name: value for name, value in producer_opt if name in ProducerConfig.names()})
    servers = servers.found(quiet)
    each = [servers._replace(nsqds=[nsqd]) for nsqd in servers.nsqds] if to_all else [servers]
    producers = [Producer(**{**some.of_client, **dict(producer_opt)}) for some in each]
    for producer in producers:
        producer.start()
    with warnings_shown(quiet), stop_signals() as stop, _progress(files, quiet) as progress:
        send = _sender(topic, defer, key=key, partition=partition)
        job = _Job(send, producers, end, config.max_msg_size, 1 if rate else batch, rate, stop, progress)
        try:
            for name in files or ["-"]:
                job.publish_file(name)
        except (NsqError, OSError) as error:
            raise click.ClickException(f"after {counted(job.published, 'message')}: {error}") from error
        finally:
            for producer in producers:
                producer.close()
    if not quiet:
        say(f"published {counted(job.published, 'message')} to {topic}")
    if stop.is_set():
        raise SystemExit(INTERRUPTED)


Send = Callable[[Producer, Sequence[bytes]], object]
"""Publishes some messages, and returns when a server has them."""


def _sender(topic: str, defer: float | None, **where: Any) -> Send:
    if defer is None:
        return lambda producer, bodies: producer.multipublish(topic, bodies, **where)
    milliseconds = round(defer * 1000)

    def send(producer: Producer, bodies: Sequence[bytes]) -> None:
        # There is no MPUB of deferred messages.
        results = [producer.publish(topic, body, milliseconds, raise_error=False, **where) for body in bodies]
        for result in results:
            result.get()

    return send


@dataclasses.dataclass
class _Job:
    """Reading, splitting and publishing, until the input ends or ``stop`` is set."""

    send: Send
    producers: Sequence[Producer]
    delimiter: bytes
    limit: int
    batch: int
    rate: float
    stop: Event
    progress: Progress
    published: int = 0
    started: float = dataclasses.field(default_factory=perf_counter)

    def publish_file(self, name: str) -> None:
        for messages in split(self._chunks(name), self.delimiter, self.limit):
            self._publish(messages)

    def _chunks(self, name: str) -> Iterator[bytes]:
        """Read in a thread, so that a quiet standard input does not keep heartbeats and signals waiting."""
        task = self.progress.add_task(name, total=None if name == "-" else os.path.getsize(name))
        descriptor = sys.stdin.fileno() if name == "-" else os.open(name, os.O_RDONLY)
        pool = get_hub().threadpool
        try:
            while not self.stop.is_set():
                reading = pool.spawn(os.read, descriptor, _READ_SIZE)
                wait([reading, self.stop], count=1)
                if not reading.ready() or not (chunk := reading.get()):
                    return
                yield chunk
                self.progress.update(task, advance=len(chunk))
        finally:
            if name != "-":
                os.close(descriptor)

    def _publish(self, messages: Sequence[bytes]) -> None:
        for start in range(0, len(messages), self.batch):
            if self.stop.is_set():
                return
            batch = messages[start : start + self.batch]
            for producer in self.producers:
                self.send(producer, batch)
            self.published += len(batch)
            if self.rate:
                self.stop.wait(max(0.0, self.started + self.published / self.rate - perf_counter()))


def _progress(files: Sequence[str], quiet: bool) -> Progress:
    """A progress bar, where there is a terminal to show it and a size to show."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=quiet or not files or not console.is_terminal)
