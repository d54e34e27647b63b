"""HTTP/1.1 to nsqd and nsqlookupd on either loop, safe against servers that misbehave.

h11 reads and writes the bytes, a ``Transport`` carries them, TLS included. A peer that is broken or hostile must cost
neither the process nor other requests anything. So there is one limit of time for all of a request, from the name
look-up to the last byte; there are limits on the size of head, framing and body; others have a turn after each read and
after a number of chunks (a peer that sends faster than we read would otherwise hold up the loop, and its timers); and a
connection that did not end well is closed. Redirects are not followed: NSQ servers send none.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import h11
import msgspec

from nsq_fast import __version__
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import ConfigError, ConnectFailed, HttpError, RemoteProtocolError
from nsq_fast.names import Address, is_unix_address, parse_address
from nsq_fast.protocol.topology import error_text

from .transport import Transport

if TYPE_CHECKING:
    from .loop import Loop

DEFAULT_TIMEOUT = 10.0
MAX_REPLY_SIZE = 64 * 1024 * 1024
_MAX_HEAD_SIZE = 64 * 1024
# Bytes on the wire for one byte of a body at most: a chunk of a single byte has a size and two line ends around it.
_MOST_FRAMING = 8
# What h11 may hold of something that is not complete: more than our limits, which say better what is wrong.
_MOST_HELD = 8 * _MAX_HEAD_SIZE
_MAX_IDLE = 64
# Chunks of a byte each take 10 to 20 us of CPU a chunk: others wait a millisecond at most.
_EVENTS_A_TURN = 64
_PORTS = "an nsqd has HTTP at port 4151 and TCP at 4150, an nsqlookupd at 4161 and 4160"
_PLAIN = ConnectionConfig()


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

    Or a Unix socket, as ``parse_address`` does. Raises ConfigError for anything else, a path or a user name included.
    """
    if isinstance(text, Endpoint):
        return text
    if not isinstance(text, str) or "://" not in text or is_unix_address(text):
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
    """Requests to one server, any number at once, from any loop and thread: ``ask`` in sequences, ``request`` blocks.

    Connections are kept alive and used again, each on the loop that made it.

    Args:
        endpoint: the server.
        timeout: limit in seconds for a request as a whole.
        headers: sent with every request.
        tls_options: for https: an ssl.SSLContext or a mapping, see `layers.client_context`.
        max_reply_size: largest body accepted, in bytes.

    Raises ConfigError.
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
        self.endpoint = endpoint
        self.timeout = timeout
        self.max_reply_size = max_reply_size
        host = "localhost" if endpoint.address.is_unix else str(endpoint.address)
        fixed = {"Host": host, "User-Agent": f"nsq_fast/{__version__}", **(headers or {})}
        self._headers = _checked(fixed)
        self._tls_options = tls_options
        if endpoint.scheme == "https":
            from .layers import client_context  # which needs ssl

            client_context(tls_options)  # to check them
        self._idle: list[Transport] = []

    def request(self, method: str, path: str, *arguments: Any, **options: Any) -> Reply:
        """As ``ask``, on gevent's hub: it blocks the calling greenlet."""
        from .gevent_loop import GeventLoop, run  # whoever blocks is on gevent; sequences may be on another loop

        return run(self.ask(GeventLoop.here(), method, path, *arguments, **options))

    async def ask(
        self,
        loop: Loop,
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
        refused, timed out, broken, too large. ConfigError for a request that HTTP cannot carry.
        """
        target = _target(path, query)
        limit = self.timeout if timeout is None else timeout
        deadline = monotonic() + limit
        lines = [*self._headers, *_checked(headers or {}), ("Content-Length", str(len(body)))]
        try:
            request = h11.Request(method=method, target=target, headers=lines)
        except (h11.LocalProtocolError, UnicodeError) as error:
            raise ConfigError(f"not a request: {method} {target}: {error}") from None
        try:
            head, content = await self._exchange(loop, request, body, max_reply_size or self.max_reply_size, deadline)
        except RemoteProtocolError as error:
            raise self._no_reply(target, str(error)) from error
        except (OSError, UnicodeError) as error:
            # By the clock alone it is not seen: some loops are up to a millisecond early.
            is_late = (isinstance(error, TimeoutError) and error.errno is None) or monotonic() >= deadline
            if is_late and not isinstance(error, ConnectFailed):
                raise self._no_reply(target, f"no reply within {limit:g} s") from None
            raise self._no_reply(target, f"{type(error).__name__}: {error}") from error
        if not 200 <= head.status_code < 300:
            raise HttpError(f"{self.endpoint}{target}", head.status_code, error_text(content))
        fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        return Reply(head.status_code, content, fields)

    def close(self) -> None:
        """Close the idle connections, from any thread; the client can be used again."""
        while self._idle:
            try:
                transport = self._idle.pop()
            except IndexError:  # another thread has taken the last one
                return
            transport.close()

    def _no_reply(self, target: str, reason: str) -> HttpError:
        return HttpError(f"{self.endpoint}{target}", None, reason)

    async def _exchange(
        self, loop: Loop, request: h11.Request, body: bytes, max_size: int, deadline: float
    ) -> tuple[h11.Response, bytes]:
        transport = self._take_idle(loop) or await self._connect(loop, deadline)
        keep = False
        try:
            conversation = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HELD)
            data = conversation.send(request) or b""
            if body:
                data += conversation.send(h11.Data(data=body)) or b""
            conversation.send(h11.EndOfMessage())  # which has no bytes after a Content-Length
            await transport.send_all(data, deadline)
            head, content = await _receive(loop, transport, conversation, max_size, deadline)
            is_done = conversation.our_state is h11.DONE and conversation.their_state is h11.DONE
            keep = is_done and not conversation.trailing_data[0] and len(self._idle) < _MAX_IDLE
            return head, content
        finally:
            if keep:
                transport.unwatch()  # then any thread may close it
                self._idle.append(transport)
            else:
                transport.close()

    def _take_idle(self, loop: Loop) -> Transport | None:
        """A connection kept on this loop that the server has not closed: an idle one has nothing to read."""
        for transport in [each for each in self._idle if each.loop is loop]:
            try:
                self._idle.remove(transport)
            except ValueError:  # another thread has closed it meanwhile
                continue
            if not transport.is_closed:  # by a fork, or the end of its hub
                try:
                    if transport.recv_raw() is None:
                        return transport
                except OSError:
                    pass
                transport.close()
        return None

    async def _connect(self, loop: Loop, deadline: float) -> Transport:
        transport = Transport(loop, self.endpoint.address, _PLAIN)
        try:
            await transport.connect(deadline)
            if self.endpoint.scheme == "https":
                from .layers import TlsLayer, renewed_context, server_hostname

                hostname = server_hostname(self._tls_options, self.endpoint.address.host)
                await transport.secure(TlsLayer(renewed_context(self._tls_options), hostname), b"", deadline)
        except BaseException:
            transport.close()
            raise
        return transport


async def _receive(
    loop: Loop, transport: Transport, conversation: h11.Connection, max_size: int, deadline: float
) -> tuple[h11.Response, bytes]:
    """The reply of one request. Raises RemoteProtocolError when it is no HTTP, or breaks a limit; OSError."""
    head: h11.Response | None = None
    body = bytearray()
    size = head_size = events = 0
    has_ended = False
    while True:
        try:
            event = conversation.next_event()
        except h11.RemoteProtocolError as error:
            if has_ended:
                raise RemoteProtocolError("the connection closed within the reply") from error
            raise RemoteProtocolError(f"the answer is no HTTP ({str(error)[:200]}); {_PORTS}") from error
        events += 1
        if event is h11.NEED_DATA:
            if head is None and head_size > _MAX_HEAD_SIZE:
                raise RemoteProtocolError(f"headers of more than {_MAX_HEAD_SIZE} bytes")
            if size > 2 * _MAX_HEAD_SIZE + _MOST_FRAMING * len(body):
                raise RemoteProtocolError(f"more than {_MAX_HEAD_SIZE} bytes of trailers or of chunk sizes")
            if size:
                await _give_way(loop, deadline)
            data = await transport.recv(deadline)
            size += len(data)
            head_size += 0 if head else len(data)
            has_ended = not data
            conversation.receive_data(data)
        elif isinstance(event, h11.Response):
            if event.http_version not in (b"1.0", b"1.1"):
                raise RemoteProtocolError(f"the answer is no HTTP/1.1 ({event.http_version!r}); {_PORTS}")
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > max_size:
                raise RemoteProtocolError(f"a reply of more than {max_size} bytes")
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            return head, bytes(body)
        if events % _EVENTS_A_TURN == 0:  # an interim reply says nothing, but costs as much
            await _give_way(loop, deadline)


async def _give_way(loop: Loop, deadline: float) -> None:
    await loop.sleep(0)
    if monotonic() >= deadline:
        raise TimeoutError


def check_seconds(name: str, seconds: float) -> float:
    """Return ``seconds``; raise ConfigError unless they are more than none. ``name``: of the argument."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ConfigError(f"{name}={seconds!r}: must be a number of seconds above 0")
    return float(seconds)


def _target(path: str, query: Mapping[str, Any] | None) -> str:
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def _checked(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise ConfigError(f"the {name} header must be printable ASCII text on one line")
    return [(name, value.strip()) for name, value in headers.items()]
