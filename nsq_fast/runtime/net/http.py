"""HTTP requests to nsqd and nsqlookupd on gevent sockets, safe against servers that misbehave.

The parser is geventhttpclient's, see ``http_response``, and imported for the first
client that is made: with all that it imports it takes longer than the rest of the
runtime. The sockets are handled here, because a
peer that is broken or hostile must cost neither the process nor other
requests anything: one limit of time for all of a request from the name
look-up to the last byte, limits on the size of headers and body, a turn for
other greenlets after each read (a peer that sends faster than we read would
otherwise keep the hub from ever seeing the timeout), and a socket that is
closed whatever happens. Redirects are not followed: NSQ servers send none.
"""

from __future__ import annotations

import select
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit
from weakref import WeakSet

import msgspec
from gevent import Timeout, get_hub, sleep
from gevent.hub import Hub
from gevent.socket import IPPROTO_TCP, TCP_NODELAY, create_connection
from gevent.socket import socket as Socket

from nsq_fast._version import __version__
from nsq_fast.errors import ConfigError, HttpError, RemoteProtocolError
from nsq_fast.names import Address, check_resolvable, parse_address
from nsq_fast.protocol.topology import error_text
from nsq_fast.runtime.fork import drop_socket, end_copy, tell_forks

from .tls import client_context, server_hostname, wrap_socket

if TYPE_CHECKING:
    from .http_response import Response

DEFAULT_TIMEOUT = 10.0
MAX_REPLY_SIZE = 64 * 1024 * 1024
_READ_SIZE = 16 * 1024  # the parser calls back for each chunk of a reply: larger reads would hold up the hub
_MAX_IDLE = 8


class Endpoint(msgspec.Struct, frozen=True):
    """Where an HTTP server is."""

    scheme: str
    address: Address

    def __str__(self) -> str:
        return f"{self.scheme}://{self.address}"


class Reply(msgspec.Struct, frozen=True):
    """An HTTP reply with status 200 to 299; the names of its headers are in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str]


def parse_endpoint(text: str | tuple[str, int] | Endpoint, default_port: int) -> Endpoint:
    """Read ``host``, ``host:port``, ``http://host:port``, ``https://host:port`` or a (host, port) pair.

    Raises ConfigError for anything else, a path or a user name included.
    """
    if isinstance(text, Endpoint):
        return text
    if not isinstance(text, str) or "://" not in text:
        return Endpoint("http", parse_address(text, default_port))
    if "@" in text:
        raise ConfigError("an address must hold no user name or password; use the Authorization option")
    try:
        parts = urlsplit(text.strip())
    except ValueError as error:
        raise ConfigError(f"invalid address {text!r}: {error}") from None
    if parts.scheme not in ("http", "https") or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigError(f"invalid address {text!r}: must be host:port, http://host:port or https://host:port")
    return Endpoint(parts.scheme, parse_address(parts.netloc, default_port))


class HttpClient:
    """Requests to one server, from any number of greenlets and threads.

    Connections are kept alive and used again, each in the thread that made it.

    Args:
        endpoint: the server.
        timeout: limit in seconds for a request as a whole.
        headers: sent with every request.
        tls_options: for https: an ssl.SSLContext or a mapping, see `tls.client_context`.
        max_reply_size: largest body accepted, in bytes.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        headers: Mapping[str, str] | None = None,
        tls_options: Any = None,
        max_reply_size: int = MAX_REPLY_SIZE,
    ) -> None:
        from .http_response import Response

        self.endpoint = endpoint
        self.timeout = timeout
        self.max_reply_size = max_reply_size
        fixed = {"Host": str(endpoint.address), "User-Agent": f"nsq_fast/{__version__}", **(headers or {})}
        self._headers = _header_lines(fixed)
        self._context = client_context(tls_options) if endpoint.scheme == "https" else None
        self._server_hostname = server_hostname(tls_options, endpoint.address.host)
        self._new_response = Response
        self._idle: list[tuple[Hub, Socket]] = []
        self._sockets: WeakSet[Socket] = WeakSet()
        tell_forks(self)

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: bytes = b"",
        *,
        timeout: float | None = None,
        max_reply_size: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send one request and return the reply.

        Query values of None are left out; ``headers`` are sent with this request only; ``timeout`` and
        ``max_reply_size`` are those of the client by default.

        Raises HttpError for a status that is not 200 to 299, and with ``status`` None when there is no proper reply:
        refused, timed out, broken, too large.
        """
        target = _target(path, query)
        limit = self.timeout if timeout is None else timeout
        expired = Timeout(limit)
        try:
            with expired:
                head = f"{method} {target} HTTP/1.1\r\n{self._headers}{_header_lines(headers or {})}"
                response = self._exchange(head, body, max_reply_size or self.max_reply_size)
        except Timeout as error:
            if error is not expired:
                raise
            raise self._no_reply(target, f"no reply within {limit:g} s") from None
        except RemoteProtocolError as error:
            raise self._no_reply(target, str(error)) from error
        except (OSError, UnicodeError) as error:
            end_copy()
            raise self._no_reply(target, f"{type(error).__name__}: {error}") from error
        status = response.get_code()
        content = bytes(response.body)
        if not 200 <= status < 300:
            raise HttpError(f"{self.endpoint}{target}", status, error_text(content))
        return Reply(status, content, {name.lower(): value for name, value in response.items()})

    def close(self) -> None:
        """Close the idle connections; the client can be used again."""
        idle, self._idle = self._idle, []
        for hub, sock in idle:
            if hub is get_hub():
                sock.close()
            elif hub.loop is not None:  # else its thread has ended
                hub.loop.run_callback_threadsafe(sock.close)

    def forked(self) -> None:
        """In the child of a fork: let go of every connection, also of those that wait for a reply."""
        self._idle.clear()
        for sock in list(self._sockets):
            drop_socket(sock)
        self._sockets.clear()

    def _no_reply(self, target: str, reason: str) -> HttpError:
        return HttpError(f"{self.endpoint}{target}", None, reason)

    def _exchange(self, head: str, body: bytes, max_reply_size: int) -> Response:
        head = f"{head}Content-Length: {len(body)}\r\n\r\n"
        sock = self._idle_socket() or self._connect()
        keep = False
        try:
            sock.sendall(head.encode("latin-1") + body)
            response = self._receive(sock, max_reply_size)
            keep = not response.should_close() and len(self._idle) < _MAX_IDLE
            return response
        finally:
            if keep:
                self._idle.append((get_hub(), sock))
            else:
                sock.close()

    def _idle_socket(self) -> Socket | None:
        """A connection kept in this thread that the server has not closed: an idle one has nothing to read."""
        hub = get_hub()
        for kept in [each for each in self._idle if each[0] is hub]:
            self._idle.remove(kept)
            sock = kept[1]
            poller = select.poll()
            poller.register(sock.fileno(), select.POLLIN | select.POLLHUP)
            if not poller.poll(0):
                return sock
            sock.close()
        return None

    def _connect(self) -> Socket:
        check_resolvable(self.endpoint.address.host)
        sock = create_connection((self.endpoint.address.host, self.endpoint.address.port))
        try:
            sock.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            if self._context is not None:
                sock = wrap_socket(sock, self._context, self._server_hostname)
            self._sockets.add(sock)
            return sock
        except BaseException:
            sock.close()
            raise

    def _receive(self, sock: Socket, max_reply_size: int) -> Response:
        response = self._new_response(max_reply_size)
        while not response.is_done:
            data = sock.recv(_READ_SIZE)
            response.feed(data)
            if not data and not response.is_done:
                raise RemoteProtocolError("the connection closed within the reply")
            sleep(0)
        return response


def _target(path: str, query: Mapping[str, Any] | None) -> str:
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def _header_lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {_header_value(name, value)}\r\n" for name, value in headers.items())


def _header_value(name: str, value: str) -> str:
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"the {name} header must be printable ASCII text on one line")
    return value
