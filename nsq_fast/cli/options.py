"""What several commands have in common: addresses, durations, `name=value` pairs and the checks on them, where servers
are looked for, TLS and AUTH, Ctrl-C.

Options keep the names of NSQ's own tools, with a shorter second name.
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
from gevent import signal_handler, socket
from gevent.event import Event

from nsq_fast.client.admin import LookupPoller
from nsq_fast.client.http import Endpoint, parse_endpoint
from nsq_fast.client.layers import client_context
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

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_GROUP = (
    ("--tls", {"is_flag": True, "help": "Use TLS to nsqd; each other --tls option implies it."}),
    ("--tls-ca", {"type": _FILE, "metavar": "FILE", "help": "CA certificates to trust.  [default: the system's]"}),
    ("--tls-cert", {"type": _FILE, "metavar": "FILE", "help": "The certificate of this client."}),
    ("--tls-key", {"type": _FILE, "metavar": "FILE", "help": "Its key, if it is not in the same file."}),
    ("--tls-server-name", {"metavar": "NAME", "help": "Host name in the servers' certificates.  [default: the host]"}),
    ("--auth-secret-file", {"type": _FILE, "metavar": "FILE", "help": "The secret for nsqds that ask for AUTH."}),
)  # fmt: skip


class Security(NamedTuple):
    """What the options of a command say.

    Attributes:
        is_tls: whether connections to nsqd are upgraded to TLS; addresses with ``https://`` say so themselves.
        tls_options: as ``tls_options`` of a Consumer; for HTTP as well.
        auth_secret: for AUTH, which HTTP does not have.
    """

    is_tls: bool = False
    tls_options: dict[str, Any] | None = None
    auth_secret: str | None = None

    @property
    def of_client(self) -> dict[str, Any]:
        """Options of a Consumer or Producer."""
        options: dict[str, Any] = {"lookupd_tls_options": self.tls_options}
        if self.is_tls:
            options |= {"tls_v1": True, "tls_options": self.tls_options}
        return options if self.auth_secret is None else {**options, "auth_secret": self.auth_secret}

    @property
    def of_http(self) -> dict[str, Any]:
        """Options of an HTTP client of nsqd or nsqlookupd."""
        return {"tls_options": self.tls_options}

    def of_lookup(self, timeout: float) -> LookupConfig:
        """The options of a LookupPoller that waits ``timeout`` seconds for an answer."""
        return LookupConfig(lookupd_timeout=timeout, lookupd_tls_options=self.tls_options)


UNSECURED = Security()


def security_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--tls``, ``--tls-ca`` and so on, as one parameter, ``security``."""

    @wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        taken = {flag: options.pop(flag.strip("-").replace("-", "_")) for flag, _ in _GROUP}
        return function(*arguments, security=_security(taken), **options)

    for flag, settings in reversed(_GROUP):
        wrapped = click.option(flag, **settings)(wrapped)
    return wrapped


def _security(taken: dict[str, Any]) -> Security:
    """Raises UsageError for a key without a certificate, ConfigError for files that cannot be used."""
    if taken["--tls-key"] and not taken["--tls-cert"]:
        raise click.UsageError("--tls-key needs --tls-cert")
    named = {
        "cafile": taken["--tls-ca"],
        "certfile": taken["--tls-cert"],
        "keyfile": taken["--tls-key"],
        "server_hostname": taken["--tls-server-name"],
    }
    options = {name: str(value) for name, value in named.items() if value}
    if options:
        client_context(options)
    return Security(taken["--tls"] or bool(options), options or None, _secret(taken["--auth-secret-file"]))


def _secret(path: Path | None) -> str | None:
    """The content of the file without the line end that editors put there."""
    if path is None:
        return None
    try:
        secret = path.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--auth-secret-file {path}: {error}") from error
    if not secret:
        raise click.UsageError(f"--auth-secret-file {path}: it is empty")
    return secret


T = TypeVar("T")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

CONNECT_TIMEOUT = 5.0
LOCAL_TIMEOUT = 1.0
LOOKUP_TIMEOUT = 2.0
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_DURATION = re.compile(r"([0-9]*\.?[0-9]+)(us|ms|s|m|h|)\Z")
_PAIR = re.compile(r"([^=,]+)[=,](.*)\Z", re.DOTALL)
_SET_BY_COMMANDS = {"self", "topic", "channel", "message_handler", "nsqd_tcp_addresses", "lookupd_http_addresses"}
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


def some_time(text: str | float) -> float:
    """As ``duration``, which is not 0."""
    if not (found := duration(text)):
        raise click.BadParameter(f"{text!r}: must be more than 0")
    return found


def _finite(text: str | float, what: str) -> float:
    """Click's own range lets nan pass."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise click.BadParameter(f"{text!r} is not a {what}: a number, 0 or more")
    return value


def rate(text: str | float) -> float:
    """Parse how many there are in a second."""
    return _finite(text, "rate")


def share(text: str | float) -> float:
    """Parse a share of something: 0.05 for a twentieth of it."""
    return _finite(text, "share")


def seconds(*names: str, default: float | None = None, may_be_zero: bool = False, help: str) -> Decorator:
    """An option that is a duration, and more than 0 unless ``may_be_zero``."""
    kind = duration if may_be_zero else some_time
    shows_default = default is not None
    return click.option(*names, type=kind, metavar="DURATION", default=default, show_default=shows_default, help=help)


def number(*names: str, default: int, least: int = 1, most: int | None = None, help: str) -> Decorator:
    """An option that is a whole number within bounds."""
    return click.option(*names, type=click.IntRange(least, most), default=default, show_default=True, help=help)


def output_file(*names: str, help: str) -> Decorator:
    """An option that names a file to be written; one that cannot be is refused before any work is done."""
    kind = click.Path(dir_okay=False, writable=True, path_type=Path)
    return click.option(*names, type=kind, metavar="FILE", help=help, callback=_in_a_folder)


def _in_a_folder(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """The folder of a file is made when it is written, where it may be."""
    there = next((folder for folder in path.parents if folder.exists()), None) if path else None
    if there is not None and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise click.BadParameter(f"{path} cannot be written: {there} is no folder in which files can be made")
    return path


def pair(text: str) -> tuple[str, str]:
    """Parse ``name=value``, or ``name,value`` as NSQ's own tools write it; dashes in the name count as underscores."""
    match = _PAIR.match(text)
    if not match:
        raise click.BadParameter(f"{text!r} is not name=value")
    return match[1].replace("-", "_"), match[2]


def option_of_client(text: str) -> tuple[str, str]:
    """A pair that names an option of a Consumer or Producer which its command does not set itself."""
    name, value = pair(text)
    if name in _SET_BY_COMMANDS:
        raise click.BadParameter(f"{name!r} is set by the command; its --help names the option or argument for it")
    return name, value


def _or_bad_parameter(parse: Callable[[str], T]) -> Callable[[str], T]:
    def convert(text: str) -> T:
        try:
            return parse(text)
        except (ConfigError, NameInvalid) as error:
            raise click.BadParameter(str(error)) from error

    return convert


topic: Callable[[str], str] = _or_bad_parameter(check_topic)
channel: Callable[[str], str] = _or_bad_parameter(check_channel)


def _servers_option(flag: str, short: str, name: str, kind: Callable[[str], object], help: str) -> Decorator:
    return click.option(flag, short, name, type=kind, multiple=True, metavar="HOST:PORT", help=help)


_NSQD_TCP, _NSQD_HTTP = address(DEFAULT_NSQD_TCP_PORT), endpoint(DEFAULT_NSQD_HTTP_PORT)
_LOOKUPD_HTTP = endpoint(DEFAULT_LOOKUPD_HTTP_PORT)

# Parameter ``nsqds``, of Address; of Endpoint; ``nsqds_http`` beside TCP addresses; ``lookupds``, of Endpoint.
nsqd_tcp_option: Decorator = _servers_option(
    "--nsqd-tcp-address", "--nsqd", "nsqds", _NSQD_TCP, "An nsqd (repeatable; port 4150)."
)
nsqd_http_option: Decorator = _servers_option(
    "--nsqd-http-address", "--nsqd", "nsqds", _NSQD_HTTP, "HTTP of an nsqd (repeatable; port 4151)."
)
nsqd_http_beside_option: Decorator = _servers_option(
    "--nsqd-http-address", "--nsqd-http", "nsqds_http", _NSQD_HTTP,
    "HTTP of the nsqds (repeatable); default: one port above TCP.",
)  # fmt: skip
lookupd_http_option: Decorator = _servers_option(
    "--lookupd-http-address", "--lookupd", "lookupds", _LOOKUPD_HTTP,
    "An nsqlookupd that knows the nsqds (repeatable; port 4161).",
)  # fmt: skip


class Servers(NamedTuple):
    """Whom a command talks to: nsqds (Address of TCP, or Endpoint of HTTP), or lookupds that know them."""

    nsqds: Sequence[Any]
    lookupds: Sequence[Endpoint]


class _Default(NamedTuple):
    """Where a kind of server is looked for when none is named."""

    what: str
    option: str
    variable: str
    parse: Callable[[str], Any]
    port: int


LOOKUPD = _Default("nsqlookupd", "--lookupd", "NSQ_LOOKUPD_HTTP_ADDRESSES", _LOOKUPD_HTTP, DEFAULT_LOOKUPD_HTTP_PORT)
NSQD_TCP = _Default("nsqd", "--nsqd", "NSQD_TCP_ADDRESSES", _NSQD_TCP, DEFAULT_NSQD_TCP_PORT)
NSQD_HTTP = _Default("HTTP of nsqd", "--nsqd", "NSQD_HTTP_ADDRESSES", _NSQD_HTTP, DEFAULT_NSQD_HTTP_PORT)
LOCAL = "127.0.0.1"


def find_servers(
    nsqds: Sequence[Any], lookupds: Sequence[Endpoint], nsqd: _Default | None = NSQD_TCP, quiet: bool = False
) -> Servers:
    """The servers that are named; else those of the environment; else what answers on this machine.

    What was not named is said, in one line on stderr, unless ``quiet``. Raises UsageError where servers are given two
    ways, or none is found; ClickException where none takes a connection, since a wrong address is not a slow server.

    Args:
        nsqd: what the nsqds of the command are: NSQD_TCP; None for one that asks lookupds only; or NSQD_HTTP for one
            that shows which servers are away, and takes whichever are named.
    """
    found = _named_or_found(nsqds, lookupds, nsqd, quiet)
    if nsqd is not NSQD_HTTP:
        _require_reachable("nsqd", found.nsqds)
        _require_reachable("nsqlookupd", found.lookupds)
    return found


def _named_or_found(nsqds: Sequence[Any], lookupds: Sequence[Endpoint], nsqd: _Default | None, quiet: bool) -> Servers:
    if nsqds and lookupds:
        raise click.UsageError("give --nsqd or --lookupd, not both")
    if nsqds or lookupds:
        return Servers(nsqds, lookupds)
    kinds = [kind for kind in (nsqd, LOOKUPD) if kind is not None]
    for look in (_from_environment, _answering_here):
        for kind in reversed(kinds):
            if found := look(kind):
                if not quiet:
                    where = ", ".join(map(str, found.values))
                    click.echo(f"{kind.what} {where} ({found.origin}); {kind.option} names another", err=True)
                return Servers([], found.values) if kind is LOOKUPD else Servers(found.values, [])
    raise click.UsageError(
        f"say where the servers are: {' or '.join(f'{kind.option} HOST:PORT' for kind in kinds)}. "
        f"{' and '.join(kind.variable for kind in kinds)} {'is' if len(kinds) == 1 else 'are'} not set, "
        f"and nothing answers on {LOCAL} at port {' or '.join(str(kind.port) for kind in kinds)}"
    )


class _Found(NamedTuple):
    values: list[Any]
    origin: str


def _from_environment(kind: _Default) -> _Found | None:
    texts = os.environ.get(kind.variable, "").replace(",", " ").split()
    try:
        return _Found([kind.parse(text) for text in texts], f"from {kind.variable}") if texts else None
    except click.BadParameter as error:
        raise click.UsageError(f"{kind.variable}: {error.message}") from error


def _answering_here(kind: _Default) -> _Found | None:
    try:
        socket.create_connection((LOCAL, kind.port), LOCAL_TIMEOUT).close()
    except OSError:
        return None
    return _Found([kind.parse(f"{LOCAL}:{kind.port}")], "it answers here")


def _require_reachable(what: str, servers: Iterable[Address | Endpoint]) -> None:
    """Raise ClickException when none of the servers takes a TCP connection."""
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


def nsqds_of(lookupds: Sequence[str], security: Security) -> list[str]:
    """The HTTP addresses of every nsqd that the lookupds know. Raises LookupFailed when none answers."""
    poller = LookupPoller(lookupds, security.of_lookup(LOOKUP_TIMEOUT))
    try:
        return [str(nsqd.http) for nsqd in poller.nodes() if nsqd.http]
    finally:
        poller.stop()


INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended before its work was done."""


@contextmanager
def stop_signals() -> Iterator[Event]:
    """Give an event that the first SIGINT or SIGTERM sets; the second ends the process at once."""
    stop = Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    with on_signals(on_signal):
        yield stop


@contextmanager
def on_signals(handle: Callable[[int], object]) -> Iterator[None]:
    """Call ``handle`` for each SIGINT and SIGTERM, instead of what was to happen."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    watchers = [signal_handler(number, handle, number) for number in numbers]
    try:
        yield
    finally:
        for number, watcher, handler in zip(numbers, watchers, before, strict=True):
            watcher.cancel()
            signal.signal(number, handler)
