"""HTTP/1.1 of the embedded servers: requests read strictly from a socket, a router, and how NSQ's servers answer."""

from __future__ import annotations

import functools
import html
import logging
import posixpath
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote

import msgspec
from gevent.ssl import SSLContext

from nsq_fast._lazy import get_logger
from nsq_fast.broker.go import parse_integer
from nsq_fast.broker.message import ClusterError, Exiting, NotFound
from nsq_fast.broker.net import Faults, FaultySocket, Listener, linger, shown_peer
from nsq_fast.errors import HttpError, ServerError
from nsq_fast.log_events import BROKER_INTERNAL_ERROR
from nsq_fast.names import is_valid_name

logger: logging.Logger = get_logger("nsq_fast.broker.http")


# A handler takes a ``Request`` and returns text, bytes, None (an empty reply), or anything else, which goes out as
# JSON; it refuses by raising ``request.refuse(status, text)``, or an error of the server's state. How a result or a
# refusal looks on the wire is the route's *style*: ``style_v1`` is what servers since 1.0 always do,
# ``style_negotiated`` what redesigned servers do on their older routes, decided by the request's Accept header.


ACCEPT_V1 = "application/vnd.nsq; version=1.0"
_NSQ_TYPE = ("X-Nsq-Content-Type", "nsq; version=1.0")
_JSON_TYPE = ("Content-Type", "application/json; charset=utf-8")
_TEXT_TYPE = ("Content-Type", "text/plain; charset=utf-8")
_BAD_ESCAPE = re.compile(r"%(?![0-9a-fA-F]{2})")
_BAD_QUERY = re.compile(rf"{_BAD_ESCAPE.pattern}|;")

Headers = list[tuple[str, str]]


class Reply(NamedTuple):
    status: int
    headers: Headers
    body: bytes


# --- requests --------------------------------------------------------------------------------------------------------
# Two readers of one request must not find different ends of it, or what one of them takes for a body is a request for
# the other. So whatever HTTP leaves open is refused: lines that end otherwise than by CRLF or are continued, lengths
# that are no plain number or are given twice, a length along with chunks (RFC 9112, 11.2).


_READ_SIZE = 128 * 1024
_MAX_HEAD = 64 * 1024
_MAX_UNREAD = 256 * 1024
"""So much of a body that nobody wanted is read, to keep its connection (Go: net/http, maxPostHandlerReadBytes)."""
_REQUEST_LINE = re.compile(rb"([!#-'*+.^-z|~0-9A-Z-]+) (?:http://[^/ ]+)?([/*][^\x00- \x7f]*) HTTP/1\.([01])\r\n")
_HEADERS = re.compile(rb"(?:[!#-'*+.^-z|~0-9A-Z-]+:[^\x00-\x08\x0a-\x1f\x7f]*\r\n)*\r\n")
_THAT_MATTER = re.compile(
    rb"^(content-length|transfer-encoding|connection|expect|host):[ \t]*(.*?)[ \t]*\r$", re.IGNORECASE | re.MULTILINE
)
_SIZE_OF_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n")


class Malformed(Exception):
    """What came is no request of HTTP/1.1; nothing behind it can be understood."""

    def __init__(self, status: int = 400) -> None:
        super().__init__(status)
        self.status = status


class Stream:
    """What a client sends on one connection, of which ``data`` has come."""

    def __init__(self, sock: Any, data: bytes = b"") -> None:
        self._sock = sock
        self._data = data

    def more(self) -> bool:
        """Read what there is; False at the end."""
        data = self._sock.recv(_READ_SIZE)
        self._data = self._data + data if self._data else data
        return bool(data)

    def head(self) -> bytes:
        """The next request without its body; nothing at the end. Raises Malformed."""
        while (end := self._data.find(b"\r\n\r\n")) < 0:
            line_end = self._data.find(b"\n")
            if line_end >= 0 and self._data[line_end - 1 : line_end] != b"\r":
                raise Malformed
            if len(self._data) > _MAX_HEAD:
                raise Malformed(431)
            if not self.more():
                return b""
        return self.take(end + 4)

    def line(self) -> bytes:
        while (end := self._data.find(b"\n")) < 0:
            if len(self._data) > _MAX_HEAD or not self.more():
                raise Malformed
        return self.take(end + 1)

    def take(self, size: int) -> bytes:
        data, self._data = self._data[:size], self._data[size:]
        return data

    def read(self, size: int) -> bytes:
        """So many bytes; raises ConnectionError when there are no more of them."""
        if len(self._data) < size:
            chunks, have = [self._data], len(self._data)
            while have < size:
                chunks.append(self._sock.recv(_READ_SIZE))
                if not chunks[-1]:
                    raise ConnectionAbortedError("the client has sent half of a request")
                have += len(chunks[-1])
            self._data = b"".join(chunks)
        return self.take(size)

    def allow_body(self) -> None:
        self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


class Request:
    """One HTTP request.

    Attributes:
        argument: the rest of the path for routes that end in ``/*``.
        is_last: whether no other request follows on its connection.
        is_awaited: whether the client waits for leave to send its body.
    """

    def __init__(self, head: bytes, stream: Stream, address: Any) -> None:
        """Raises Malformed."""
        line = _REQUEST_LINE.match(head)
        if line is None or _HEADERS.fullmatch(head, line.end()) is None:
            raise Malformed
        method, target, minor = line.groups()
        self.method: str | Any = method.decode()
        self.query: str
        path, _, self.query = target.decode("latin-1").partition("?")
        if _BAD_ESCAPE.search(path):
            raise Malformed
        self.path: str | Any = unquote(path, "latin-1") if "%" in path else path
        self.argument = ""
        self.is_last = minor == b"0"
        self.is_awaited: bool = False
        self._head = head
        self._stream = stream
        self._address = address
        self._arguments: dict[str, str] | None = None
        self._length: int | None = 0  # of the body that was not read yet; None: it comes in chunks
        self._read_headers(_THAT_MATTER.findall(head, line.end()), is_old=self.is_last)

    def _read_headers(self, found: list[tuple[bytes, bytes]], *, is_old: bool) -> None:
        lengths, encodings, hosts = [], [], 0
        for name, value in found:
            match name.lower():
                case b"content-length":
                    lengths.append(value)
                case b"transfer-encoding":
                    encodings.append(value.lower())
                case b"connection":
                    options = {each.strip() for each in value.lower().split(b",")}
                    self.is_last = b"close" in options or (self.is_last and b"keep-alive" not in options)
                case b"expect":
                    if value.lower() != b"100-continue":
                        raise Malformed(417)
                    self.is_awaited = not is_old
                case _:
                    hosts += 1
        if encodings:
            if encodings != [b"chunked"]:
                raise Malformed(501)
            if lengths or is_old:
                raise Malformed
            self._length = None
        elif lengths:
            if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 18:
                raise Malformed
            self._length = int(lengths[0])
        if hosts > 1 or not (hosts or is_old):
            raise Malformed

    def get(self, name: str) -> str | None:
        """The first value of a query argument, or None; refuses the request when its query is malformed."""
        if self._arguments is None:
            query = self.query
            if _BAD_QUERY.search(query):
                raise self.refuse(400, "INVALID_REQUEST")
            is_plain = "%" not in query and "+" not in query
            plain = (pair.partition("=")[::2] for pair in query.split("&") if pair)
            self._arguments = {}
            for key, value in plain if is_plain else parse_qsl(query, keep_blank_values=True):
                self._arguments.setdefault(key, value)
        return self._arguments.get(name)

    # Arguments by their kinds; each refuses the request where it does not fit. Redesigned servers take an empty one for
    # one that is missing (nsqio/nsq and youzan/nsq: internal/http_api/topic_channel_args.go).

    def required(self, name: str, *, is_filled: bool = False) -> str:
        value = self.get(name)
        if value is None or (is_filled and not value):
            raise self.refuse(400, f"MISSING_ARG_{name.upper()}")
        return value

    def valid(self, kind: str, refusal: str = "", *, is_filled: bool = False) -> str:
        """The name of the ``topic``, or of the ``channel``, that it is about."""
        name = self.required(kind, is_filled=is_filled)
        if not is_valid_name(name):
            raise self.refuse(400, refusal or f"INVALID_ARG_{kind.upper()}")
        return name

    def integer(self, name: str, refusal: str = "", default: int | None = None, function: str = "Atoi") -> int:
        """A whole number; ``default``, if there is one, where it is empty. No ``refusal``: it says what is wrong."""
        value = self.get(name) or ""
        if default is not None and not value:
            return default
        try:
            return parse_integer(value.encode(), function)
        except ValueError as error:
            raise self.refuse(400, refusal or str(error)) from error

    @property
    def remote_address(self) -> str:
        return shown_peer(self._address)

    def header(self, name: str) -> str:
        """The values of a header, with commas between them; nothing if it was not sent."""
        return self._headers().get(name.lower(), "")

    def headers_with_prefix(self, prefix: str) -> dict[str, str]:
        """The request headers whose names begin so; the rest of each name, in lower case, and the value."""
        start = prefix.lower()
        return {name[len(start) :]: value for name, value in self._headers().items() if name.startswith(start)}

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        for line in self._head.decode("latin-1").split("\r\n")[1:-2]:
            name, _, value = line.partition(":")
            name, value = name.lower(), value.strip()
            headers[name] = f"{headers[name]},{value}" if name in headers else value
        return headers

    def body(self, limit: int, refusal: str) -> bytes:
        """Read the body; refuse with 413 and the text ``refusal`` beyond ``limit`` bytes, before reading them all."""
        self.check_length(limit, refusal)
        if self.is_awaited:
            self.is_awaited = False
            self._stream.allow_body()
        try:
            data = self._read_chunks(limit, refusal) if self._length is None else self._stream.read(self._length)
        except (Malformed, OSError) as error:
            self.is_last = True
            raise self.refuse(500, "INTERNAL_ERROR") from error
        self._length = 0
        return data

    def _read_chunks(self, limit: int, refusal: str) -> bytes:
        chunks, left = [], limit
        while size := self._next_chunk():
            left -= size
            if left < 0:
                raise self.refuse(413, refusal)
            chunks.append(self._stream.read(size + 2))
            if not chunks[-1].endswith(b"\r\n"):
                raise Malformed
        while self._stream.line() != b"\r\n":
            pass  # trailers, which nobody asks for
        return b"".join(chunk[:-2] for chunk in chunks)

    def _next_chunk(self) -> int:
        found = _SIZE_OF_CHUNK.fullmatch(self._stream.line())
        if found is None:
            raise Malformed
        return int(found[1], 16)

    def check_length(self, limit: int, refusal: str) -> None:
        """Refuse a body that says it is longer than ``limit`` bytes, with 413 and the text ``refusal``."""
        if self._length is not None and self._length > limit:
            raise self.refuse(413, refusal)

    def must_be_last(self) -> bool:
        """Whether its connection has to end: also when the body will not come now, or is too much to read."""
        return self.is_last or self.is_awaited or self._length is None or self._length > _MAX_UNREAD

    def has_body_of(self, size: int) -> bool:
        return self._length == size

    def skip_body(self) -> None:
        if self._length:
            self._stream.read(self._length)

    def refuse(self, status: int, text: str) -> HttpError:
        return HttpError(self.path, status, text)


# --- replies ---------------------------------------------------------------------------------------------------------


Handler = Callable[[Request], Any]
Style = Callable[[Request, int, Any], Reply]


def style_v1(request: Request, status: int, data: Any) -> Reply:
    """Bare text or JSON, real status codes, errors as ``{"message": ...}``."""
    if status != 200:
        return Reply(status, [_JSON_TYPE, _NSQ_TYPE], msgspec.json.encode({"message": str(data)}))
    if data is None:
        return Reply(200, [_NSQ_TYPE], b"")
    if isinstance(data, (str, bytes)):
        return Reply(200, [_TEXT_TYPE, _NSQ_TYPE], data.encode() if isinstance(data, str) else data)
    return Reply(200, [_JSON_TYPE, _NSQ_TYPE], msgspec.json.encode(data))


def style_negotiated(request: Request, status: int, data: Any) -> Reply:
    """As ``style_v1`` for a client that accepts it; for others text as it is, JSON wrapped, errors as status 500.

    youzan/nsq: internal/http_api/api_response.go, NegotiateVersion, Respond.
    """
    if request.header("Accept") == ACCEPT_V1:
        return style_v1(request, status, data)
    failed = status != 200
    if not failed and isinstance(data, (str, bytes)):
        return Reply(200, [_TEXT_TYPE], data.encode() if isinstance(data, str) else data)
    wrapped = {
        "status_code": 500 if failed else 200,
        "status_txt": str(data) if failed else "OK",
        "data": None if failed else data,
    }
    return Reply(500 if failed else 200, [_JSON_TYPE], msgspec.json.encode(wrapped))


def style_text(request: Request, status: int, data: Any) -> Reply:
    """Plain text, errors too, without NSQ's header: the style of /ping."""
    return Reply(status, [_TEXT_TYPE], str(data).encode())


class _Route(NamedTuple):
    handler: Handler
    style: Style


Table = tuple[Style, Iterable[tuple[str, str, Handler]]]
"""Routes of one style: method, path, handler. A path that ends in ``/*`` takes one more segment, ``argument``."""


class Router:
    """An application of ``HttpFace``: tables of methods and paths with their handlers.

    As the original's router (julienschmidt/httprouter) it answers 404 and 405 in the server's style, lists
    the allowed methods, and redirects where only the case or a slash at the end differs.

    Args:
        is_quick: whether the answer to a request, which has come whole, waits for nothing.
    """

    def __init__(self, *tables: Table, is_quick: Callable[[Request], bool] = lambda request: False) -> None:
        self.is_quick = is_quick
        self._routes: dict[str, dict[str, _Route]] = {}
        for style, rows in tables:
            for method, path, handler in rows:
                self._routes.setdefault(path, {})[method] = _Route(handler, style)

    def __call__(self, request: Request) -> Reply:
        methods = self._find(request)
        if methods is None:
            return self._redirect(request) or style_v1(request, 404, "NOT_FOUND")
        route = methods.get(request.method)
        if route is None:
            return self._answer_wrong_method(request, methods)
        try:
            return route.style(request, 200, route.handler(request))
        except HttpError as error:
            return route.style(request, error.status or 500, error.text)
        except NotFound as error:
            return route.style(request, 404, str(error))
        except Exiting:
            return route.style(request, 503, "EXITING")
        except ServerError as error:
            return route.style(request, 400, error.code)
        except ClusterError as error:
            return route.style(request, 400, str(error))
        except Exception:
            logger.exception("%s %s failed", request.method, request.path, extra=BROKER_INTERNAL_ERROR)
            return route.style(request, 500, "INTERNAL_ERROR")

    def _find(self, request: Request) -> dict[str, _Route] | None:
        methods = self._routes.get(request.path)
        if methods is None:
            parent, _, argument = request.path.rpartition("/")
            methods = self._routes.get(parent + "/*") if argument else None
            request.argument = argument
        return methods

    def _redirect(self, request: Request) -> Reply | None:
        """Where only slashes, dots or the case of the path are wrong: to the right path, with the same query."""
        path = self._fixed_path(request)
        if path is None:
            return None
        query = request.query
        location = quote(path) + (f"?{query}" if query else "")
        if request.method != "GET":
            return Reply(307, [("Location", location)], b"")
        # The body is what Go's http.Redirect writes.
        body = f'<a href="{html.escape(location)}">Moved Permanently</a>.\n\n'
        return Reply(301, [("Content-Type", "text/html; charset=utf-8"), ("Location", location)], body.encode())

    def _fixed_path(self, request: Request) -> str | None:
        """The path of a route for this method that is meant by a request's path."""
        path = posixpath.normpath("/" + request.path.lstrip("/"))
        parent, _, argument = path.rpartition("/")
        for route, found in ((path.lower(), path.lower()), (f"{parent.lower()}/*", f"{parent.lower()}/{argument}")):
            if request.method in self._routes.get(route, ()) and found != request.path:
                return found
        return None

    def _answer_wrong_method(self, request: Request, methods: dict[str, _Route]) -> Reply:
        allow = ("Allow", ", ".join(sorted({*methods, "OPTIONS"})))
        if request.method == "OPTIONS":
            return Reply(200, [allow], b"")
        status, headers, body = style_v1(request, 405, "METHOD_NOT_ALLOWED")
        return Reply(status, [allow, *headers], body)


# --- the server ------------------------------------------------------------------------------------------------------


class HttpFace(Listener):
    """An application, a router as a rule, on a bound socket, over HTTP, or over HTTPS when there is an SSL context.

    There is no access log. Faults act on its connections and on its replies.
    """

    def __init__(
        self,
        name: str,
        sock: Any,
        application: Callable[[Request], Reply],
        faults: Faults,
        ssl_context: SSLContext | None = None,
    ) -> None:
        super().__init__(name, sock, self._serve_http, faults, ssl_context, lies=False)
        self._application = application
        self._is_quick = application.is_quick if isinstance(application, Router) else None

    def _begin(self, sock: FaultySocket, address: Any) -> None:
        """Answer what is quick in the hub: a greenlet costs as much as the rest. It is for what is left."""
        if self._is_quick is None or self._faults.active:
            super()._begin(sock, address)
            return
        unsent = b""
        with suppress(OSError):  # the greenlet meets the end of the connection
            data = sock.recv_some(_READ_SIZE)
            if data is None:
                return
            reply = self._quick_reply(data, address)
            if reply is None:
                sock.put_back(data)
            elif not (unsent := reply[sock.send_some(reply) :]):
                return
            if not data:
                self._hear(sock)
                sock.close()
                return
        self._hear(sock)
        self._connections.spawn(self._serve, sock, address, unsent)

    def _quick_reply(self, data: bytes, address: Any) -> bytes | None:
        """The reply to one whole request; None where that is not quick, or no request."""
        end = data.find(b"\r\n\r\n") + 4
        try:
            request = Request(data[:end], Stream(None, data[end:]), address)
            is_whole = request.has_body_of(len(data) - end) and not request.must_be_last()
            if self._is_quick is None or not is_whole or not self._is_quick(request):
                return None
        except (Malformed, HttpError):
            return None
        return _encode(self._application(request), is_last=False)

    def _serve_http(self, sock: FaultySocket, address: Any) -> None:
        stream = Stream(sock)
        try:
            while head := stream.head():
                request = Request(head, stream, address)
                reply = self._answer(request)
                is_last = request.must_be_last()
                sock.sendall(_encode(reply, is_last=is_last, has_body=request.method != "HEAD"))
                if is_last:
                    break
                request.skip_body()
            else:
                return  # the client has ended it
        except Malformed as error:
            status = HTTPStatus(error.status)
            body = f"{error.status} {status.phrase}".encode()
            sock.sendall(_encode(Reply(error.status, [_TEXT_TYPE], body), is_last=True))
        linger(sock)

    def _answer(self, request: Request) -> Reply:
        faults = self._faults
        if faults.active:
            if faults.drop_replies:
                faults.wait_until_heard()
            if faults.lie is not None:
                return Reply(faults.lie_status, [_JSON_TYPE, _NSQ_TYPE], faults.lie)
        return self._application(request)


def _encode(reply: Reply, *, is_last: bool, has_body: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {_STATUS[reply.status]}", *map(": ".join, reply.headers)]
    lines.append(f"Content-Length: {len(reply.body)}\r\nDate: {_date(int(time.time()))}")
    lines.append("Connection: close\r\n\r\n" if is_last else "\r\n")
    return "\r\n".join(lines).encode("latin-1") + (reply.body if has_body else b"")


_STATUS = {status.value: f"{status.value} {status.phrase}" for status in HTTPStatus}


@functools.lru_cache(maxsize=1)
def _date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)
