"""`nsq-fast tail`: print messages of topics as they come."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any

import click
from gevent.event import Event

from nsq_fast._codec import Message
from nsq_fast.errors import RequeueMessage
from nsq_fast.names import Address
from nsq_fast.runtime import Consumer, Endpoint

from . import options
from .console import warnings_shown
from .first_channel import refuse_first_channel
from .interrupt import stop_signals
from .security import Security, security_options

_CLOSE_TIMEOUT = 5.0


@click.command("tail", short_help="Print messages of topics as they come.")
@click.argument("topics", type=options.topic, metavar="TOPIC...", nargs=-1)
@click.option(
    "--topic",
    "more_topics",
    type=options.topic,
    metavar="TOPIC",
    multiple=True,
    help="The same as an argument (repeatable).",
)
@options.nsqd_tcp_option()
@options.nsqd_http_beside_option()
@options.lookupd_http_option()
@security_options()
@click.option(
    "-c", "--channel", type=options.channel, metavar="CHANNEL", help="Default: an ephemeral one with a random name."
)
@click.option("--take-backlog", is_flag=True, help="Print also topics that have no channel yet.")
@click.option("-n", "total", type=click.IntRange(min=0), default=0, help="End after so many messages; 0: never.")
@click.option("--print-topic", is_flag=True, help="Put the name of the topic before each message.")
@click.option(
    "--max-in-flight", type=click.IntRange(min=1), default=200, show_default=True, help="Messages held at once."
)
@click.option(
    "--consumer-opt",
    type=options.pair,
    metavar="NAME=VALUE",
    multiple=True,
    help="Any option of Consumer, as name=value (repeatable).",
)
def command(
    topics: Sequence[str],
    more_topics: Sequence[str],
    nsqds: Sequence[Address],
    nsqds_http: Sequence[Endpoint],
    lookupds: Sequence[Endpoint],
    channel: str | None,
    take_backlog: bool,
    total: int,
    print_topic: bool,
    max_in_flight: int,
    consumer_opt: Sequence[tuple[str, str]],
    security: Security,
) -> None:
    """Print the messages of TOPICS, each followed by a newline, and finish them.

    With the default channel no other consumer misses a message. It must not be the first channel of a topic, because
    the first gets what the topic gathered, and later ones do not: a topic without channels is refused, unless you say
    --take-backlog or name a --channel. Ctrl-C ends it.
    """
    names = list(dict.fromkeys([*topics, *more_topics]))
    if not names:
        raise click.UsageError("say which TOPIC to print")
    nsqds, lookupds = options.find_servers(nsqds, lookupds)
    options.require_running(nsqds, lookupds)
    if not (channel or take_backlog):
        refuse_first_channel(names, nsqds, nsqds_http, lookupds, security)
    channel = channel or f"tail{secrets.randbelow(10**6):06d}#ephemeral"
    settings: dict[str, Any] = {
        "nsqd_tcp_addresses": list(nsqds),
        "lookupd_http_addresses": [str(lookupd) for lookupd in lookupds],
        "max_in_flight": max(min(total, max_in_flight) or max_in_flight, len(names)),
        "max_tries": 0,
        **security.of_client,
        **dict(consumer_opt),
    }
    with warnings_shown(), stop_signals() as stop:
        printer = _Printer(total, print_topic, stop)
        consumer = Consumer(names, channel, message_handler=printer.handle, **settings)
        consumer.start(block=False)
        stop.wait()
        consumer.close(drain=True, timeout=_CLOSE_TIMEOUT)
    printer.check()


class _Printer:
    """Writes messages to standard output until there were ``total``, or nobody reads any more."""

    def __init__(self, total: int, print_topic: bool, stop: Event) -> None:
        self._left = total or -1
        self._print_topic = print_topic
        self._stop = stop
        self._error: OSError | None = None

    def handle(self, _consumer: Consumer, message: Message) -> None:
        """The handler."""
        if self._stop.is_set():
            raise RequeueMessage(0, backoff=False)
        prefix = f"{message.topic} | ".encode() if self._print_topic else b""
        self._write(prefix + message.body + b"\n")

    def _write(self, line: bytes) -> None:
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except OSError as error:
            self._error = error
            self._stop.set()
            raise RequeueMessage(0, backoff=False) from error
        self._left -= 1
        if self._left == 0:
            self._stop.set()

    def check(self) -> None:
        """Raise what writing raised; a reader that went away is no error."""
        if isinstance(self._error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        elif self._error is not None:
            raise click.ClickException(f"cannot write: {self._error}")
