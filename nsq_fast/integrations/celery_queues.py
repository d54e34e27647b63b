"""What NSQ has for a queue of kombu: names, bodies, the servers of a broker URL, and the consumers of one queue."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from hashlib import blake2b
from re import Pattern
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from kombu.utils.json import dumps, loads

from nsq_fast import LookupdHTTPClient, Message
from nsq_fast._lazy import get_logger, get_original
from nsq_fast.config import ConnectionConfig, ConsumerConfig, LookupConfig, ProducerConfig, refuse_unknown
from nsq_fast.errors import ConfigError, ConnectFailed, HttpError, NsqError
from nsq_fast.log_events import RESPONSE_FAILED, SUBSCRIPTION_FAILED
from nsq_fast.names import Address, parse_address
from nsq_fast.threads import Consumer, Producer

from . import respond

EPHEMERAL = "#ephemeral"
"""Ends the name of a topic or channel that nsqd keeps in memory only, and deletes when nobody uses it any more."""

MAX_LENGTH = 64
"""Of a topic's or a channel's name, the suffix included (nsqio/nsq: internal/protocol/names.go)."""

_ALLOWED = re.compile(r"[.a-zA-Z0-9_-]+")
_DIGEST_BYTES = 6


def nsq_name(name: str, is_ephemeral: bool = False) -> str:
    """A legal name of a topic or channel: ``name`` itself if that is one.

    Else other characters become ``_``, what is too long is cut off, and a digest of the whole name follows, so that
    no two names are mapped to one.
    """
    suffix = EPHEMERAL if is_ephemeral else ""
    if _ALLOWED.fullmatch(name) and len(name) + len(suffix) <= MAX_LENGTH:
        return name + suffix
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()
    beginning = re.sub(r"[^.a-zA-Z0-9_-]", "_", name)[: MAX_LENGTH - len(suffix) - len(digest) - 1]
    return f"{beginning}-{digest}{suffix}"


def queue_topic(queue: str) -> str:
    """The topic of a queue. That of a queue for replies to remote control ends with its consumer."""
    return nsq_name(queue, is_ephemeral=is_reply_queue(queue))


def exchange_topic(exchange: str, is_ephemeral: bool) -> str:
    """The topic of an exchange whose messages go to each queue that is bound to it."""
    return nsq_name(f"exchange.{exchange}", is_ephemeral)


def reply_queue(exchange: str, routing_key: str) -> str | None:
    """The queue that kombu binds to an exchange for replies; None if this is none (kombu: pidbox.py, Mailbox)."""
    is_for_replies = exchange.startswith("reply.") and exchange.endswith(".pidbox")
    return f"{routing_key}.{exchange}" if is_for_replies else None


def is_reply_queue(queue: str) -> bool:
    """Whether a queue is one that ``reply_queue`` gives."""
    return ".reply." in queue and queue.endswith(".pidbox")


Payload = dict[str, Any]
"""A message of kombu: ``body``, ``content-type``, ``content-encoding``, ``headers`` and ``properties``."""


def encode(payload: Payload) -> bytes:
    """The body that stands for a message."""
    body: bytes = dumps(payload).encode()
    return body


def decode(body: bytes) -> Payload:
    """The message that ``encode`` was given.

    A body that it has not made becomes a message without headers, of a content type that no worker accepts: Celery
    logs it and drops it, as it does with whatever is no task.
    """
    try:
        payload = loads(body.decode())
    except ValueError:
        payload = None
    if _is_payload(payload):
        found: Payload = payload
        return found
    return {
        "body": body,
        "content-type": "application/octet-stream",
        "content-encoding": "binary",
        "headers": {},
        "properties": {"delivery_info": {}},
    }


def _is_payload(payload: Any) -> bool:
    return (
        isinstance(payload, dict)
        and "body" in payload
        and isinstance(payload.get("headers"), dict)
        and isinstance(payload.get("properties"), dict)
        and isinstance(payload["properties"].get("delivery_info"), dict)
    )


def seconds_to_eta(payload: Payload, now: datetime) -> float:
    """How long it is from ``now``, which has a time zone, until a task may run; 0 if it may."""
    eta: Any = (payload.get("headers") or {}).get("eta")
    try:
        due = datetime.fromisoformat(eta)
    except (TypeError, ValueError):
        return 0.0
    if due.tzinfo is None:  # only the worker knows which zone is meant, and waits itself
        return 0.0
    return max(0.0, (due - now).total_seconds())


NSQD_PORT = 4150
LOOKUPD_PORT = 4161
LOOKUP = "lookup"

KOMBU_OPTIONS = frozenset(
    (
        "body_encoding", "callback", "connect_retries_timeout", "deadletter_queue", "errback", "interval_max",
        "interval_start", "interval_step", "max_retries", "polling_interval", "visibility_timeout",
    )
)  # fmt: skip
"""Transport options that kombu and Celery read themselves, for every transport."""

_BOTH = ConnectionConfig.names() | LookupConfig.names()
_OF_PRODUCERS = _BOTH | ProducerConfig.names()
_DECIDED = {"max_tries": 0, "handler_threads": 1, "auto_touch": True}
"""Options of consumers that are not the user's: Celery decides what becomes of a task, and when it is tried again."""
_OF_CONSUMERS = (_BOTH | ConsumerConfig.names()) - {*_DECIDED, "max_in_flight", "concurrency", "batch_size"}


@dataclasses.dataclass(frozen=True)
class Servers:
    """Servers, and how they are used.

    Attributes:
        addresses: of nsqds or of nsqlookupds.
        is_lookup: whether they are nsqlookupds.
        channel: of the workers, on the topic of each queue.
        max_delay: seconds that nsqd lets a message wait at most (its ``-max-req-timeout``).
        options: of the clients.
    """

    addresses: tuple[Address, ...]
    is_lookup: bool
    channel: str
    max_delay: float
    options: Mapping[str, Any] = dataclasses.field(repr=False)  # which has secrets

    def new_producer(self) -> Producer:
        options = {name: value for name, value in self.options.items() if name in _OF_PRODUCERS}
        return Producer(*self._given_addresses(), **options)

    def new_consumer(self, topic: str, channel: str, *, everywhere: bool, **arguments: Any) -> Consumer:
        """A consumer of these servers; ``everywhere``: of every nsqd, also of those that do not have the topic yet."""
        options = {name: value for name, value in self.options.items() if name in _OF_CONSUMERS}
        nsqds, lookupds = self._given_addresses()
        if everywhere and self.is_lookup:
            nsqds = self._nodes()
        return Consumer(topic, channel, nsqds, lookupds, **{**options, **_DECIDED, **arguments})

    def check(self, timeout: float) -> None:
        """Raise ConnectFailed unless one of the servers takes a connection within ``timeout`` seconds."""
        errors = [self._error_of(address, timeout) for address in self.addresses]
        if all(errors):
            kind = "nsqlookupd" if self.is_lookup else "nsqd"
            raise ConnectFailed(f"no {kind} takes a connection: {'; '.join(map(str, errors))}")

    def _error_of(self, address: Address, timeout: float) -> str | None:
        """What keeps one from connecting to a server; None: nothing."""
        try:
            with socket.create_connection(address, timeout) as connection:
                if not self.is_lookup:
                    connection.sendall(b"  V2")  # else nsqd's log has an error
        except OSError as error:
            return f"{address}: {error}"
        return None

    def _given_addresses(self) -> tuple[list[str], list[str]]:
        """Arguments for a Producer or Consumer: nsqds, nsqlookupds."""
        if not self.is_lookup:
            return [str(address) for address in self.addresses], []
        scheme = "https://" if self.options.get("lookupd_tls_options") else ""
        return [], [f"{scheme}{address}" for address in self.addresses]

    def _nodes(self) -> list[str]:
        """Every nsqd that an nsqlookupd knows now. Raises HttpError when none of them answers."""
        answers = [self._nodes_of(url) for url in self._given_addresses()[1]]
        found = {node for answer in answers if not isinstance(answer, HttpError) for node in answer}
        failed = [answer for answer in answers if isinstance(answer, HttpError)]
        if len(failed) == len(answers):
            raise failed[0]
        return sorted(found)

    def _nodes_of(self, url: str) -> list[str] | HttpError:
        config = LookupConfig(**{name: self.options[name] for name in LookupConfig.names() & self.options.keys()})
        options = {"timeout": config.lookupd_timeout, "authorization": config.lookupd_authorization}
        try:
            with LookupdHTTPClient.from_url(url, tls_options=config.lookupd_tls_options, **options) as client:
                producers = client.nodes()["producers"]
        except HttpError as error:
            return error
        return [str(Address(each["broadcast_address"], each["tcp_port"])) for each in producers]


def servers_of(client: Any) -> Servers:
    """What a ``kombu.Connection`` means. Raises ConfigError for a URL or an option that is wrong."""
    if client.alt:
        raise ConfigError("several broker URLs are given: name all servers in one, nsq://first:4150,second:4150")
    url = client.hostname if "://" in (client.hostname or "") else _url_of(client)
    parts = urlsplit(url)
    if parts.scheme not in ("nsq", LOOKUP):
        raise ConfigError(f"broker URL with {parts.scheme}://: must be nsq:// or nsq+lookup://")
    if parts.path.strip("/") or parts.fragment:
        raise ConfigError(f"broker URL with the path {parts.path!r}: NSQ has no virtual hosts; leave it out")
    is_lookup = parts.scheme == LOOKUP
    login, _, hosts = parts.netloc.rpartition("@")
    options = {**_without_kombus(client.transport_options or {}), **dict(parse_qsl(parts.query))}
    secret = unquote(login.partition(":")[2])
    if secret:
        options["auth_secret"] = secret
    channel, max_delay = options.pop("channel", "celery"), options.pop("max_delay", 3600.0)
    refuse_unknown(options, _OF_PRODUCERS | _OF_CONSUMERS)
    port = LOOKUPD_PORT if is_lookup else NSQD_PORT
    addresses = tuple(parse_address(host, port) for host in (hosts or "localhost").split(","))
    return Servers(addresses, is_lookup, str(channel), _seconds(max_delay), options)


def shown(url: str, mask: str) -> str:
    """A broker URL without its secrets: neither the password nor the values of options."""
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    user, colon, _ = login.partition(":")
    scheme = f"nsq+{LOOKUP}" if parts.scheme == LOOKUP else parts.scheme
    query = "&".join(f"{name}={mask}" for name, _ in parse_qsl(parts.query))
    return f"{scheme}://{user}{colon}{mask if colon else ''}{at}{hosts}{'?' if query else ''}{query}"


def _url_of(client: Any) -> str:
    secret = f":{client.password}@" if client.password else ""
    port = f":{client.port}" if client.port else ""
    return f"nsq://{secret}{client.hostname or 'localhost'}{port}"


def _without_kombus(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in KOMBU_OPTIONS}


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds <= 1e7:
        raise ConfigError(f"max_delay={value!r}: must be a number of seconds, 0 or more")
    return seconds


_CLOSED = -1


class Wakeup:
    """A pipe that can be read from when there is something new to look at."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._is_woken = False
        self._lock = get_original("_thread", "allocate_lock")()  # native threads write, whatever a program patched

    def fileno(self) -> int:
        """What a loop watches."""
        return self._reader

    def wake(self) -> None:
        """There is something new. In any thread."""
        with self._lock:
            if not self._is_woken and self._writer != _CLOSED:
                self._is_woken = True
                os.write(self._writer, b"\0")

    def clear(self) -> None:
        """Whoever calls this looks at everything afterwards."""
        with self._lock, suppress(BlockingIOError):
            self._is_woken = False
            os.read(self._reader, 1)

    def wait(self, timeout: float | None) -> None:
        """Wait until there is something new, for ``timeout`` seconds at most."""
        waiting = select.poll()  # of gevent, if the program has patched it
        waiting.register(self._reader, select.POLLIN)
        waiting.poll(None if timeout is None else max(1, round(1000 * timeout)))

    def close(self) -> None:
        """Wake nobody any more."""
        with self._lock:
            reader, self._reader = self._reader, _CLOSED
            writer, self._writer = self._writer, _CLOSED
        for descriptor in (reader, writer):
            if descriptor != _CLOSED:
                os.close(descriptor)


MOST_IN_FLIGHT = 2500
"""Messages that are held where kombu knows no bound. An nsqd allows as many, unless it is told otherwise."""

CLOSE_TIMEOUT = 5.0
"""Seconds for the last responses of a subscription to leave."""

LOOK_PAUSE = 0.002
"""Seconds between two looks at whether a consumer is subscribed."""

logger: logging.Logger = get_logger(__name__)


class Source(NamedTuple):
    """Where messages of a queue come from.

    Attributes:
        topic, channel: of NSQ.
        routing_key: what the routing keys of messages have to match; None: all match.
        since: messages that nsqd got before are not for this queue; nanoseconds since 1970.
        is_broadcast: whether each queue gets every message, from every nsqd there is.
    """

    topic: str
    channel: str
    routing_key: Pattern[str] | None = None
    since: int = 0
    is_broadcast: bool = False


class Arrival(NamedTuple):
    """A message that waits to be taken by kombu."""

    subscription: Subscription
    message: Message
    payload: Payload


class Subscription:
    """The consumers of one queue. Messages arrive in a thread of theirs.

    Args:
        arrived: called there with each message.
        no_ack: whether messages are finished when kombu takes them.
        prefetch: messages that may be held; 0: as many as nsqd allows.

    Attributes:
        callback: of kombu, for each message.
        is_cancelled: whether messages that arrive are given back.
    """

    def __init__(
        self,
        servers: Servers,
        sources: Iterable[Source],
        arrived: Callable[[Arrival], object],
        no_ack: bool,
        prefetch: int,
    ) -> None:
        self.callback: Callable[[Any], object] = _ignore
        self.no_ack = no_ack
        self.is_cancelled: bool = False
        self._arrived = arrived
        self._max_delay = servers.max_delay
        self._consumers = [self._consumer(servers, source, prefetch) for source in sources]
        for consumer in self._consumers:
            consumer.start(block=False)

    def wait(self, timeout: float) -> None:
        """Return when each consumer is subscribed to an nsqd at least, or after ``timeout`` seconds, with a warning.

        What is published to an exchange goes to the queues that there are then, and to no later one.
        """
        end = monotonic() + timeout
        while waiting := [each for each in self._consumers if not each.stats().totals.subscriptions]:
            if monotonic() > end:
                logger.warning(
                    "%s: not subscribed within %g s; going on without it",
                    waiting[0].topic,
                    timeout,
                    extra=SUBSCRIPTION_FAILED,
                )
                return
            time.sleep(LOOK_PAUSE)

    def _consumer(self, servers: Servers, source: Source, prefetch: int) -> Consumer:
        def handle(consumer: object, messages: list[Message]) -> None:
            for message in messages:
                message.enable_async()
                self._received(source, message)

        return servers.new_consumer(
            source.topic,
            source.channel,
            everywhere=source.is_broadcast,
            batch_handler=handle,
            max_in_flight=_in_flight(prefetch),
        )

    def _received(self, source: Source, message: Message) -> None:
        payload = decode(message.body)
        if self.is_cancelled:
            give_back(message)
        elif _is_for_another(source, message, payload):
            finish(message)
        elif (delay := min(self._max_delay, seconds_to_eta(payload, datetime.now(timezone.utc)))) > 0:
            give_back(message, delay)
        else:
            self._arrived(Arrival(self, message, payload))

    def allow(self, prefetch: int) -> None:
        """From now on so many messages may be held; 0: as many as nsqd allows."""
        for consumer in self._consumers:
            consumer.max_in_flight = _in_flight(prefetch)

    def cancel(self) -> None:
        """Take no more messages. Those that kombu has taken are still responded to."""
        self.is_cancelled = True
        for consumer in self._consumers:
            consumer.pause()

    def resume(self) -> None:
        """End ``cancel``."""
        self.is_cancelled = False
        for consumer in self._consumers:
            consumer.resume()

    def close(self) -> None:
        """Send the responses that were given, and end the connections."""
        self.is_cancelled = True
        for consumer in self._consumers:
            consumer.close(timeout=CLOSE_TIMEOUT)


def finish(message: Message) -> None:
    """FIN."""
    respond(message.finish)


def give_back(message: Message, delay: float = 0.0) -> None:
    """REQ, with a delay in seconds. A message whose connection is lost comes again by itself."""
    try:
        message.requeue(round(1000 * delay), backoff=False)
    except NsqError as error:
        logger.debug("a message is not requeued: %s", error, extra=RESPONSE_FAILED)


def _is_for_another(source: Source, message: Message, payload: Payload) -> bool:
    if message.timestamp < source.since:
        return True
    routing_key = payload["properties"]["delivery_info"].get("routing_key") or ""
    return source.routing_key is not None and source.routing_key.match(routing_key) is None


def _in_flight(prefetch: int) -> int:
    return prefetch or MOST_IN_FLIGHT


def _ignore(message: object) -> None:
    pass
