"""`nsq-fast tail`: print what is published to topics, on a channel that takes nothing from anybody else."""

from __future__ import annotations

import base64
import json
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

import click
from gevent.event import Event

from nsq_fast._codec import Message
from nsq_fast.client.admin import NsqdHTTPClient, placed
from nsq_fast.consumer import Consumer
from nsq_fast.errors import NsqError, RemoteProtocolError, RequeueMessage, counted
from nsq_fast.names import Address

from . import drop_output, options
from .options import argument, flag, number, option, say, several, text_or_base64, warnings_shown
from .servers import NSQD_TCP, Servers, named_servers, stop_signals

_TIMEOUT = 5.0
_ANYWAY = "name a --channel, or say --take-backlog to print all the same"


def refuse_first_channel(topics: Sequence[str], servers: Servers) -> None:
    """Raise ClickException where a topic exists and has no channel, or where that cannot be seen.

    An original nsqd gives the first channel of a topic the whole backlog that the topic gathered while it had none
    (nsqio/nsq: nsqd/topic.go, messagePump), and a redesigned cluster takes publishes as soon as there is a channel.
    What an ephemeral channel gets, no consumer that subscribes later gets. A topic that does not exist has no backlog,
    and passes.
    """
    for topic, http, partition in _places(topics, servers):
        if (missed := _missed(topic, http, partition, servers)) is not None:
            raise click.ClickException(
                f"topic {topic} on nsqd {http} has no channel. The channel made here would be its first, "
                f"and no consumer that subscribes later would get {missed}: {_ANYWAY}"
            )


def _places(topics: Sequence[str], servers: Servers) -> Iterator[tuple[str, Any, int | None]]:
    """Each topic with the HTTP of each nsqd that has it, and the partition that this one leads."""
    if not servers.lookupds:
        faces: Sequence[Any] = servers.nsqds_http or [_http_beside(each, servers) for each in servers.nsqds]
        yield from ((topic, http, None) for http in faces for topic in topics)
        return
    with servers.poller(_TIMEOUT) as poller:
        for topic in topics:
            for partition, nsqd in placed(poller.wait_topology(topic, _TIMEOUT)):
                if nsqd.http is None:
                    raise _unseen(topic, f"nsqlookupd gives no HTTP address of nsqd {nsqd.tcp}")
                yield topic, nsqd.http, partition


def _http_beside(nsqd: Address, servers: Servers) -> Address:
    """The HTTP address of an nsqd of which the TCP address is known: the port above, where the same nsqd answers."""
    http = Address(nsqd.host, nsqd.port + 1)
    if _tcp_port(http, servers) == nsqd.port:
        return http
    if (port := _tcp_port(nsqd, servers)) is not None:
        raise click.ClickException(f"{nsqd} is the HTTP of an nsqd: --nsqd names its TCP, {Address(nsqd.host, port)}")
    raise _unseen("the topic", f"nsqd {nsqd} has no HTTP at port {http.port}: name it with --nsqd-http")


def _tcp_port(http: Address, servers: Servers) -> int | None:
    """What the nsqd says of itself whose HTTP is there; None where there is none."""
    try:
        with NsqdHTTPClient(*http, timeout=_TIMEOUT, **servers.of_http) as client:
            return client.info().get("tcp_port")
    except NsqError:
        return None


def _missed(topic: str, http: Any, partition: int | None, servers: Servers) -> str | None:
    """What later consumers would miss at an nsqd that has the topic and no channel; None when all is well."""
    try:
        with NsqdHTTPClient.from_url(str(http), timeout=_TIMEOUT, **servers.of_http) as client:
            rows: list[dict[str, Any]] = client.stats(topic=topic).get("topics") or []
    except NsqError as error:
        raise _unseen(topic, str(error)) from error
    for row in rows:
        is_redesigned = "topic_partition" in row
        if row.get("channels") or (partition is not None and row.get("topic_partition") != str(partition)):
            continue
        # A new channel of a redesigned topic begins at the end (youzan/nsq: nsqd/diskqueue_reader.go).
        waiting = 0 if is_redesigned else row["depth"]
        return f"its {counted(waiting, 'waiting message')}" if waiting else "what is published meanwhile"
    return None


def _unseen(topic: str, reason: str) -> click.ClickException:
    return click.ClickException(f"cannot see whether {topic} has a channel: {reason}; else {_ANYWAY}")


_CLOSE_TIMEOUT = 5.0
BACKLOG_CHANNEL = "tail"
"""The channel that takes what a topic has gathered: with an ephemeral one, what was not printed would be lost."""


@options.command("tail", "Print messages of topics as they come.")
def command(
    topics: Sequence[str] = argument(type=options.topic, metavar="TOPIC...", nargs=-1),
    more_topics: Sequence[str] = several("--topic", type=options.topic, help="The same as an argument (repeatable)."),
    servers: Servers = named_servers(NSQD_TCP, has_http_beside=True),
    channel: str | None = option(
        "-c", "--channel", type=options.channel, help="Default: an ephemeral one with a random name."
    ),
    take_backlog: bool = flag(
        help=f"Print also topics that have no channel yet, from the channel '{BACKLOG_CHANNEL}', which is made and"
        " stays: what is not printed, and what comes later, waits there."
    ),
    total: int = option("-n", type=click.IntRange(min=0), default=0, help="End after so many messages; 0: never."),
    as_json: bool = flag("--json", help="Print each message as a line of JSON: id, attempts, time, body."),
    print_topic: bool = flag(help="Put the name of the topic before each message."),
    max_in_flight: int = number(default=200, help="Messages held at once."),
    consumer_opt: Sequence[tuple[str, str]] = several(
        type=options.option_of_client, help="Any option of Consumer, as name=value (repeatable)."
    ),
) -> None:
    """Print the messages of TOPICS, each followed by a newline, and finish them.

    With the default channel no other consumer misses a message. It must not be the first channel of a topic, because
    the first gets what the topic gathered, and later ones do not: a topic without channels is refused, unless you say
    --take-backlog or name a --channel. Ctrl-C ends it. What was received and not printed is given back to the channel.

    With --json a body that is no text is given as "body_base64"; "time" and "timestamp" (in nanoseconds) are those of
    the publish.
    """
    names = list(dict.fromkeys([*topics, *more_topics]))
    if not names:
        raise click.UsageError("say which TOPIC to print")
    if sys.stdout is None:
        raise click.UsageError("standard output is closed: there is nowhere to print to")
    servers = servers.found()
    is_of_others = bool(channel or take_backlog)
    if not is_of_others:
        refuse_first_channel(names, servers)
    keeps = take_backlog and not channel
    channel = channel or (BACKLOG_CHANNEL if take_backlog else f"tail{secrets.randbelow(10**6):06d}#ephemeral")
    settings: dict[str, Any] = {
        **servers.of_client,
        "max_in_flight": max((is_of_others and min(total, max_in_flight)) or max_in_flight, len(names)),
        "max_tries": 0,
        **dict(consumer_opt),
    }
    with warnings_shown(), stop_signals() as stop:
        printer = _Printer(total, json_line if as_json else _topic_and_body if print_topic else _body, stop)
        consumer = Consumer(names, channel, message_handler=printer.handle, **settings)
        consumer.start(block=False)
        stop.wait()
        consumer.close(drain=True, timeout=_CLOSE_TIMEOUT)
    if keeps:
        say(
            "what was not printed, and what comes from now on, waits: "
            f"`nsq-fast tail {' '.join(names)} --channel {channel}` prints it,"
            f" `nsq-fast admin delete {names[0]} {channel}` drops it"
        )
    printer.check()


class _Printer:
    """Writes messages to standard output until there were ``total``, or nobody reads any more."""

    def __init__(self, total: int, line: Callable[[Message], bytes], stop: Event) -> None:
        self._left = total or -1
        self._line = line
        self._stop = stop
        self._error: OSError | None = None

    def handle(self, _consumer: Consumer, message: Message) -> None:
        if self._stop.is_set():
            raise RequeueMessage(0, backoff=False)
        self._write(self._line(message) + b"\n")

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
            drop_output()
        elif self._error is not None:
            raise click.ClickException(f"cannot write: {self._error}")


def _body(message: Message) -> bytes:
    return message.body


def _topic_and_body(message: Message) -> bytes:
    return f"{message.topic} | ".encode() + message.body


def json_line(message: Message) -> bytes:
    """All that is known of a message, as JSON without anything that a terminal obeys."""
    seconds, nanoseconds = divmod(message.timestamp, 10**9)
    time = datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    shown: dict[str, Any] = {"topic": message.topic}
    if message.partition is not None:
        # The id of the original is text; this one is two numbers.
        shown |= {"partition": message.partition, "id": message.id.hex(), "trace_id": message.trace_id}
    else:
        shown["id"] = message.id.decode("ascii", "backslashreplace")
    shown |= {"attempts": message.attempts, "timestamp": message.timestamp, "time": f"{time}.{nanoseconds:09d}Z"}
    if message.ext is not None:
        try:
            shown["headers"] = message.headers
        except RemoteProtocolError:
            shown["headers_base64"] = base64.b64encode(message.ext).decode()
    line = json.dumps({**shown, **text_or_base64("body", message.body)}, ensure_ascii=False)
    line = re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", line)  # json escapes those below 32 alone
    return line.encode("utf-8", "backslashreplace")
