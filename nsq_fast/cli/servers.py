"""Where commands look for servers, and how they speak to them; Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import click
from gevent import signal_handler, socket
from gevent.event import Event

from nsq_fast.client.admin import LookupPoller
from nsq_fast.client.http import Endpoint, parse_endpoint
from nsq_fast.client.layers import client_context
from nsq_fast.config import LookupConfig
from nsq_fast.names import DEFAULT_LOOKUPD_HTTP_PORT, DEFAULT_NSQD_HTTP_PORT, DEFAULT_NSQD_TCP_PORT
from nsq_fast.worker.health import ECHO

from .options import FILE, LOOKUPD_FLAGS, NSQD_FLAGS, Kind, address, flag, option, several, together


def endpoint(default_port: int) -> Kind:
    """The address of an HTTP server, with or without ``http://`` or ``https://``."""
    return Kind("host:port", lambda text: parse_endpoint(text, default_port))


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
    "nsqd", NSQD_FLAGS, "NSQD_TCP_ADDRESSES", DEFAULT_NSQD_TCP_PORT,
    address(DEFAULT_NSQD_TCP_PORT), "An nsqd (repeatable; port 4150).",
)  # fmt: skip
NSQD_HTTP = Face(
    "HTTP of nsqd", ("--nsqd-http-address", "--nsqd"), "NSQD_HTTP_ADDRESSES", DEFAULT_NSQD_HTTP_PORT,
    endpoint(DEFAULT_NSQD_HTTP_PORT), "HTTP of an nsqd (repeatable; port 4151).",
)  # fmt: skip
LOOKUPD = Face(
    "nsqlookupd", LOOKUPD_FLAGS, "NSQ_LOOKUPD_HTTP_ADDRESSES", DEFAULT_LOOKUPD_HTTP_PORT,
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


def named_servers(
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
