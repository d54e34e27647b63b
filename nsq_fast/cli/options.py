"""Arguments that several commands take: addresses, durations, `name=value` pairs, and the checks on them.

Options keep the names of NSQ's own tools, with a shorter second name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
from gevent import socket

from nsq_fast.config import LookupConfig
from nsq_fast.errors import ConfigError, NameInvalid
from nsq_fast.names import (
    DEFAULT_LOOKUPD_HTTP_PORT,
    DEFAULT_NSQD_HTTP_PORT,
    DEFAULT_NSQD_TCP_PORT,
    Address,
    check_channel,
    check_topic,
    parse_address,
)
from nsq_fast.runtime import Endpoint, LookupPoller, parse_endpoint

T = TypeVar("T")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

CONNECT_TIMEOUT = 5.0
_DURATION = re.compile(r"([0-9]*\.?[0-9]+)(us|ms|s|m|h|)\Z")
_PAIR = re.compile(r"([^=,]+)[=,](.*)\Z", re.DOTALL)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


def address(default_port: int) -> Callable[[str], Address]:
    """A parser of ``host``, ``host:port`` or ``[v6]:port``."""
    return _or_bad_parameter(lambda text: parse_address(text, default_port))


def endpoint(default_port: int) -> Callable[[str], Endpoint]:
    """A parser of the address of an HTTP server, with or without ``http://`` or ``https://``."""
    return _or_bad_parameter(lambda text: parse_endpoint(text, default_port))


def duration(text: str | float) -> float:
    """Parse seconds, or a number with a unit: ``200ms``, ``2s``, ``1.5m``, ``1h``."""
    if isinstance(text, (int, float)):
        return float(text)
    match = _DURATION.match(text)
    if not match:
        raise click.BadParameter(f"{text!r} is not a duration: seconds, or a number with ms, s, m or h")
    return float(match[1]) * _UNITS[match[2]]


def pair(text: str) -> tuple[str, str]:
    """Parse ``name=value``, or ``name,value`` as NSQ's own tools write it; dashes in the name count as underscores."""
    match = _PAIR.match(text)
    if not match:
        raise click.BadParameter(f"{text!r} is not name=value")
    return match[1].replace("-", "_"), match[2]


def _or_bad_parameter(parse: Callable[[str], T]) -> Callable[[str], T]:
    def convert(text: str) -> T:
        try:
            return parse(text)
        except (ConfigError, NameInvalid) as error:
            raise click.BadParameter(str(error)) from error

    return convert


topic = _or_bad_parameter(check_topic)
channel = _or_bad_parameter(check_channel)


def _servers_option(flag: str, short: str, name: str, kind: Callable[[str], object], help: str) -> Decorator:
    return click.option(flag, short, name, type=kind, multiple=True, metavar="HOST:PORT", help=help)


def nsqd_tcp_option() -> Decorator:
    """``--nsqd-tcp-address``, repeatable; parameter ``nsqds``, of Address."""
    kind = address(DEFAULT_NSQD_TCP_PORT)
    return _servers_option("--nsqd-tcp-address", "--nsqd", "nsqds", kind, "An nsqd (repeatable; port 4150).")


def nsqd_http_option() -> Decorator:
    """``--nsqd-http-address``, repeatable; parameter ``nsqds``, of Endpoint."""
    kind = endpoint(DEFAULT_NSQD_HTTP_PORT)
    return _servers_option("--nsqd-http-address", "--nsqd", "nsqds", kind, "HTTP of an nsqd (repeatable; port 4151).")


def nsqd_http_beside_option() -> Decorator:
    """``--nsqd-http-address`` beside TCP addresses, repeatable; parameter ``nsqds_http``, of Endpoint."""
    kind = endpoint(DEFAULT_NSQD_HTTP_PORT)
    help = "HTTP of the nsqds (repeatable); default: one port above TCP."
    return _servers_option("--nsqd-http-address", "--nsqd-http", "nsqds_http", kind, help)


def lookupd_http_option() -> Decorator:
    """``--lookupd-http-address``, repeatable; parameter ``lookupds``, of Endpoint."""
    help = "An nsqlookupd that knows the nsqds (repeatable; port 4161)."
    kind = endpoint(DEFAULT_LOOKUPD_HTTP_PORT)
    return _servers_option("--lookupd-http-address", "--lookupd", "lookupds", kind, help)


def require_servers(
    nsqds: Sequence[Address | Endpoint], lookupds: Sequence[Endpoint], nsqd_option: str = "--nsqd"
) -> None:
    """Raise UsageError unless servers are given one way: nsqds, or lookupds that know them."""
    if not nsqds and not lookupds:
        raise click.UsageError(f"say where the servers are: {nsqd_option} HOST:PORT or --lookupd HOST:PORT")
    if nsqds and lookupds:
        raise click.UsageError(f"give {nsqd_option} or --lookupd, not both")


def require_reachable(what: str, servers: Iterable[Address | Endpoint]) -> None:
    """Raise ClickException when none of the servers takes a TCP connection: a wrong address is not a slow server."""
    refused = []
    for server in servers:
        target = server.address if isinstance(server, Endpoint) else server
        try:
            socket.create_connection(target, CONNECT_TIMEOUT).close()
        except OSError as error:
            refused.append(f"{what} at {target}: {error.strerror or error}")
        else:
            return
    if refused:
        raise click.ClickException(f"cannot connect to {'; '.join(refused)}")


def require_running(nsqds: Sequence[Address | Endpoint], lookupds: Sequence[Endpoint]) -> None:
    """The two checks for a command that takes nsqds over TCP, or lookupds."""
    require_servers(nsqds, lookupds)
    require_reachable("nsqd", nsqds)
    require_reachable("nsqlookupd", lookupds)


def nsqds_of(lookupds: Sequence[str]) -> list[str]:
    """The HTTP addresses of every nsqd that the lookupds know. Raises LookupFailed when none answers."""
    poller = LookupPoller(lookupds, LookupConfig())
    try:
        return [str(nsqd.http) for nsqd in poller.nodes() if nsqd.http]
    finally:
        poller.stop()
