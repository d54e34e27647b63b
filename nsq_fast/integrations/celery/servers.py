"""Which servers a connection of kombu means, and the options of the clients that talk to them."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from nsq_fast import LookupdHTTPClient
from nsq_fast.config import ConnectionConfig, ConsumerConfig, LookupConfig, ProducerConfig, refuse_unknown
from nsq_fast.errors import ConfigError, ConnectFailed, HttpError
from nsq_fast.names import Address, parse_address
from nsq_fast.threads import Consumer, Producer

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
        """A producer for these servers."""
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
