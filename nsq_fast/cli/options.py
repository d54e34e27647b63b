"""How commands are declared, and what several of them have in common: kinds of values, where servers are looked for
and how they are spoken to, Ctrl-C.

A command is a function whose parameters say by their defaults how they are read, each in one place::

    @options.command("pub", "Publish lines of files or of standard input.")
    def command(topic: str = argument(type=options.topic), servers: Servers = options.servers(NSQD_TCP)) -> None:

Options keep the names of NSQ's own tools, with a shorter second name.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from gevent import signal_handler, socket
from gevent.event import Event

from nsq_fast.client.admin import LookupPoller
from nsq_fast.client.http import Endpoint, parse_endpoint
from nsq_fast.client.layers import client_context
from nsq_fast.config import LookupConfig, Option
from nsq_fast.names import (
    DEFAULT_LOOKUPD_HTTP_PORT,
    DEFAULT_NSQD_HTTP_PORT,
    DEFAULT_NSQD_TCP_PORT,
    check_channel,
    check_topic,
    parse_address,
)
from nsq_fast.worker.health import ECHO

# Declaring


class Parameter(NamedTuple):
    """How a command gets a parameter: what click reads for its name, and its value among all that click has read."""

    read: Callable[[str], list[click.Parameter]]
    value: Callable[[str, Mapping[str, Any]], Any] = lambda name, given: given[name]


def flag_of(name: str) -> str:
    """How an option of this name is given: ``max_in_flight`` as ``--max-in-flight``."""
    return f"--{name.replace('_', '-')}"


def option(*flags: str, cls: type[click.Option] = click.Option, **settings: Any) -> Any:
    """A parameter that is an option of click; its flag is its name where none is given."""
    default = settings.get("default")
    settings = {"show_default": bool(default) and default is not True, **settings}
    return Parameter(lambda name: [cls([name, *(flags or (flag_of(name),))], **settings)])


def argument(**settings: Any) -> Any:
    return Parameter(lambda name: [click.Argument([name], **settings)])


def together(make: Callable[..., Any], **parts: Any) -> Any:
    """A parameter that ``make`` makes of others."""
    return Parameter(
        lambda _: [each for name, part in parts.items() for each in part.read(name)],
        lambda _, given: make(**{name: part.value(name, given) for name, part in parts.items()}),
    )


def flag(*flags: str, help: str) -> Any:
    return option(*flags, is_flag=True, default=False, help=help)


def number(*flags: str, default: int | None = None, least: int = 1, most: int | None = None, help: str) -> Any:
    """A whole number within bounds."""
    return option(*flags, type=click.IntRange(least, most), default=default, help=help)


def several(*flags: str, help: str, **settings: Any) -> Any:
    """An option that may be given any number of times."""
    return option(*flags, multiple=True, help=help, **settings)


def of_config(declared: Option, flag: str = "", help: str = "", **settings: Any) -> Any:
    """An option of a command that is declared as one of a config, and has its name; ``help`` is said besides."""
    flag = flag or flag_of(declared.name)
    said = f"{declared.doc[0].upper()}{declared.doc[1:]}.{help}"
    if declared.kind is bool and "/" not in flag:
        flag = f"{flag}/--no-{flag[2:]}"
    return option(flag, help=said, **settings)


def command(
    name: str, short_help: str = "", group: click.Group | None = None, more: Mapping[str, Any] = {}, **settings: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """A decorator that makes a command of a function, and adds it to ``group``; ``more`` is what it takes besides."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        declared = {key: each.default for key, each in inspect.signature(function).parameters.items()}
        parts = {key: each for key, each in {**declared, **more}.items() if isinstance(each, Parameter)}
        whole = together(function, **parts)
        settings.setdefault("help", function.__doc__)
        made = click.Command(
            name, callback=lambda **given: whole.value("", given), params=whole.read(""), short_help=short_help or None,
            **settings,
        )  # fmt: skip
        if group is not None:
            group.add_command(made)
        return made

    return decorate


# Kinds of values

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # before click 8.4 it takes no type


class Kind(_ParamType):
    """What a text stands for: ``parse`` raises ValueError where it is none of that kind."""

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


_DURATION = re.compile(r"([0-9]*\.?[0-9]+)(us|ms|s|m|h|)\Z")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_PAIR = re.compile(r"([^=,]+)[=,](.*)\Z", re.DOTALL)
_SET_BY_COMMANDS = {"self", "topic", "channel", "message_handler", "nsqd_tcp_addresses", "lookupd_http_addresses"}


def _duration(text: str | float) -> float:
    match = _DURATION.match(str(text))
    if not match:
        raise ValueError(f"{text!r} is not a duration: seconds, or a number with ms, s, m or h")
    return float(match[1]) * _UNITS[match[2]]


def _some_time(text: str | float) -> float:
    if not (found := _duration(text)):
        raise ValueError(f"{text!r}: must be more than 0")
    return found


def _amount(what: str) -> Kind:
    """Click's own range lets nan pass."""

    def parse(text: str | float) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < math.inf:
            raise ValueError(f"{text!r} is not a {what}: a number, 0 or more")
        return value

    return Kind(what, parse)


def _pair(text: str) -> tuple[str, str]:
    match = _PAIR.match(text)
    if not match:
        raise ValueError(f"{text!r} is not name=value")
    return match[1].replace("-", "_"), match[2]


def _option_of_client(text: str) -> tuple[str, str]:
    name, value = _pair(text)
    if name in _SET_BY_COMMANDS:
        raise ValueError(f"{name!r} is set by the command; its --help names the option or argument for it")
    return name, value


def address(default_port: int) -> Kind:
    """``host``, ``host:port`` or ``[v6]:port``."""
    return Kind("host:port", lambda text: parse_address(text, default_port))


def endpoint(default_port: int) -> Kind:
    """The address of an HTTP server, with or without ``http://`` or ``https://``."""
    return Kind("host:port", lambda text: parse_endpoint(text, default_port))


duration: Kind = Kind("duration", _duration)
"""Seconds, or a number with a unit: ``200ms``, ``2s``, ``1.5m``, ``1h``."""
some_time: Kind = Kind("duration", _some_time)
"""The same, and more than 0."""
rate: Kind = _amount("rate")
share: Kind = _amount("share")
pair: Kind = Kind("name=value", _pair)
"""``name=value``, or ``name,value`` as NSQ's own tools write it; dashes in the name count as underscores."""
option_of_client: Kind = Kind("name=value", _option_of_client)
"""A pair that names an option of a Consumer or Producer which its command does not set itself."""
topic: Kind = Kind("topic", check_topic)
channel: Kind = Kind("channel", check_channel)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


def output_file(*flags: str, help: str) -> Any:
    """An option that names a file to be written; one that cannot be is refused before any work is done."""
    kind = click.Path(dir_okay=False, writable=True, path_type=Path)
    return option(*flags, type=kind, metavar="FILE", help=help, callback=_in_a_folder)


def _in_a_folder(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """The folder of a file is made when it is written, where it may be."""
    there = next((folder for folder in path.parents if folder.exists()), None) if path else None
    if there is not None and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise click.BadParameter(f"{path} cannot be written: {there} is no folder in which files can be made")
    return path


# Servers

CONNECT_TIMEOUT = 5.0
LOCAL_TIMEOUT = 1.0
LOOKUP_TIMEOUT = 2.0
LOCAL = "127.0.0.1"


class Face(NamedTuple):
    """What a command may talk to: how it is named, and where it is looked for when it is not."""

    what: str
    flags: tuple[str, str]
    variable: str
    port: int
    kind: Kind
    help: str


NSQD_TCP = Face(
    "nsqd", ("--nsqd-tcp-address", "--nsqd"), "NSQD_TCP_ADDRESSES", DEFAULT_NSQD_TCP_PORT,
    address(DEFAULT_NSQD_TCP_PORT), "An nsqd (repeatable; port 4150).",
)  # fmt: skip
NSQD_HTTP = Face(
    "HTTP of nsqd", ("--nsqd-http-address", "--nsqd"), "NSQD_HTTP_ADDRESSES", DEFAULT_NSQD_HTTP_PORT,
    endpoint(DEFAULT_NSQD_HTTP_PORT), "HTTP of an nsqd (repeatable; port 4151).",
)  # fmt: skip
LOOKUPD = Face(
    "nsqlookupd", ("--lookupd-http-address", "--lookupd"), "NSQ_LOOKUPD_HTTP_ADDRESSES", DEFAULT_LOOKUPD_HTTP_PORT,
    endpoint(DEFAULT_LOOKUPD_HTTP_PORT), "An nsqlookupd that knows the nsqds (repeatable; port 4161).",
)  # fmt: skip


class Servers(NamedTuple):
    """Whom a command talks to, and how.

    Attributes:
        nsqds: Address of TCP, or Endpoint of HTTP; lookupds know them.
        face: what the nsqds of the command are: NSQD_TCP; None for one that asks lookupds only; or NSQD_HTTP for one
            that shows which servers are away, and takes whichever are named.
        is_tls: whether connections to nsqd are upgraded to TLS; addresses with ``https://`` say so themselves.
        tls_options: as ``tls_options`` of a Consumer; for HTTP as well.
        auth_secret: for AUTH, which HTTP does not have.
    """

    nsqds: Sequence[Any] = ()
    lookupds: Sequence[Endpoint] = ()
    nsqds_http: Sequence[Endpoint] = ()
    face: Face | None = NSQD_TCP
    is_tls: bool = False
    tls_options: dict[str, Any] | None = None
    auth_secret: str | None = None

    @property
    def are_named(self) -> bool:
        return bool(self.nsqds or self.lookupds)

    @property
    def secured(self) -> dict[str, Any]:
        """Options of a Consumer or Producer, without addresses."""
        options: dict[str, Any] = {"lookupd_tls_options": self._of_lookupds}
        if self.is_tls:
            options |= {"tls_v1": True, "tls_options": self.tls_options}
        return options if self.auth_secret is None else {**options, "auth_secret": self.auth_secret}

    @property
    def of_client(self) -> dict[str, Any]:
        """Options of a Consumer or Producer."""
        lookupds = list(map(str, self.lookupds))
        return {"nsqd_tcp_addresses": list(self.nsqds), "lookupd_http_addresses": lookupds, **self.secured}

    @property
    def of_http(self) -> dict[str, Any]:
        """Options of an HTTP client of nsqd or nsqlookupd."""
        return {"tls_options": self.tls_options}

    def of_lookup(self, timeout: float) -> LookupConfig:
        return LookupConfig(lookupd_timeout=timeout, lookupd_tls_options=self._of_lookupds)

    @property
    def _of_lookupds(self) -> dict[str, Any] | None:
        return self.tls_options if any(each.scheme == "https" for each in self.lookupds) else None

    @contextmanager
    def poller(self, timeout: float = LOOKUP_TIMEOUT) -> Iterator[LookupPoller]:
        """Asks the lookups, and waits ``timeout`` seconds for an answer."""
        poller = LookupPoller(list(map(str, self.lookupds)), self.of_lookup(timeout))
        poller.start()
        try:
            yield poller
        finally:
            poller.stop()

    def all_http(self) -> list[str]:
        """The HTTP addresses of every nsqd that the lookups know. Raises LookupFailed when none answers."""
        with self.poller() as poller:
            return [str(nsqd.http) for nsqd in poller.nodes() if nsqd.http]

    def found(self, quiet: bool = False) -> Servers:
        """The servers that are named; else those of the environment; else what answers on this machine.

        What was not named is said, in one line on stderr, unless ``quiet``. Raises UsageError where servers are given
        two ways, or none is found; ClickException where none takes a connection, since a wrong address is not a slow
        server.
        """
        if self.nsqds and self.lookupds:
            raise click.UsageError("give --nsqd or --lookupd, not both")
        found = self if self.are_named else self._looked_for(quiet)
        if self.face is not NSQD_HTTP:
            _require_reachable(found)
        return found

    def _looked_for(self, quiet: bool) -> Servers:
        faces = [face for face in (LOOKUPD, self.face) if face is not None]
        for look in (_from_environment, _answering_here):
            for face in faces:
                servers, origin = look(face)
                if servers and not quiet:
                    where = ", ".join(map(str, servers))
                    click.echo(f"{face.what} {where} ({origin}); {face.flags[1]} names another", err=True)
                if servers:
                    return self._replace(lookupds=servers) if face is LOOKUPD else self._replace(nsqds=servers)
        faces.reverse()
        raise click.UsageError(
            f"say where the servers are: {' or '.join(f'{face.flags[1]} HOST:PORT' for face in faces)}. "
            f"{' and '.join(face.variable for face in faces)} {'is' if len(faces) == 1 else 'are'} not set, "
            f"and nothing answers on {LOCAL} at port {' or '.join(str(face.port) for face in faces)}"
        )


def _from_environment(face: Face) -> tuple[list[Any], str]:
    texts = os.environ.get(face.variable, "").replace(",", " ").split()
    try:
        return [face.kind(text) for text in texts], f"from {face.variable}"
    except click.BadParameter as error:
        raise click.UsageError(f"{face.variable}: {error.message}") from error


def _answering_here(face: Face) -> tuple[list[Any], str]:
    try:
        socket.create_connection((LOCAL, face.port), LOCAL_TIMEOUT).close()
    except OSError:
        return [], ""
    return [face.kind(f"{LOCAL}:{face.port}")], "it answers here"


def _require_reachable(servers: Servers) -> None:
    """Raise ClickException when none of the servers takes a TCP connection."""
    refused = []
    for server in servers.nsqds or servers.lookupds:
        target = server.address if isinstance(server, Endpoint) else server
        try:
            return socket.create_connection(target, CONNECT_TIMEOUT).close()
        except OSError as error:
            what = "nsqd" if servers.nsqds else "nsqlookupd"
            refused.append(f"{what} at {target}: {error.strerror or error}")
    raise click.ClickException(f"cannot connect to {'; '.join(refused)}")


def servers(
    face: Face | None, make: Callable[[Servers], Any] = lambda servers: servers, has_http_beside: bool = False
) -> Any:
    """A parameter that is Servers, or what ``make`` makes of them: the options that name them, ``--tls`` and so on."""
    help = "HTTP of the nsqds (repeatable); default: one port above TCP."
    beside = NSQD_HTTP._replace(flags=("--nsqd-http-address", "--nsqd-http"), help=help)
    faces = {"nsqds": face, "nsqds_http": beside if has_http_beside else None, "lookupds": LOOKUPD}
    return together(
        lambda **given: make(_servers(face=face, **given)),
        **{name: several(*each.flags, type=each.kind, help=each.help) for name, each in faces.items() if each},
        tls=flag(help="Use TLS to nsqd; each other --tls option implies it."),
        tls_ca=option(type=FILE, metavar="FILE", help="CA certificates to trust.  [default: the system's]"),
        tls_cert=option(type=FILE, metavar="FILE", help="The certificate of this client."),
        tls_key=option(type=FILE, metavar="FILE", help="Its key, if it is not in the same file."),
        tls_server_name=option(metavar="NAME", help="Host name in the servers' certificates.  [default: the host]"),
        auth_secret_file=option(type=FILE, metavar="FILE", help="The secret for nsqds that ask for AUTH."),
    )


def _servers(
    *, tls: bool, tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, tls_server_name: str | None,
    auth_secret_file: Path | None, **given: Any,
) -> Servers:  # fmt: skip
    """Raises UsageError for a key without a certificate, ConfigError for files that cannot be used."""
    if tls_key and not tls_cert:
        raise click.UsageError("--tls-key needs --tls-cert")
    named = {"cafile": tls_ca, "certfile": tls_cert, "keyfile": tls_key, "server_hostname": tls_server_name}
    tls_options = {name: str(value) for name, value in named.items() if value} or None
    if tls_options:
        client_context(tls_options)
    return Servers(
        is_tls=tls or bool(tls_options), tls_options=tls_options, auth_secret=_secret(auth_secret_file), **given
    )


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


# Ctrl-C

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended before its work was done."""


@contextmanager
def stop_signals() -> Iterator[Event]:
    """Give an event that the first SIGINT or SIGTERM sets; one that is no echo of it ends the process at once."""
    stop = Event()
    came_at = 0.0

    def on_signal(number: int) -> None:
        nonlocal came_at
        if not stop.is_set():
            came_at = monotonic()
            stop.set()
        elif monotonic() - came_at >= ECHO:
            os._exit(128 + number)

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
