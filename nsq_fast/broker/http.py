"""A tiny HTTP router on gevent.pywsgi: what the HTTP faces of nsqd and nsqlookupd have in common."""

from __future__ import annotations

import html
import logging
import posixpath
import re
from collections.abc import Callable, Iterable
from http import HTTPStatus
from io import BytesIO
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote

import msgspec
from gevent import GreenletExit
from gevent.pywsgi import WSGIHandler, WSGIServer
from gevent.ssl import SSLContext

from nsq_fast.broker.message import Exiting, NotFound
from nsq_fast.broker.net import Faults, Listener
from nsq_fast.errors import HttpError
from nsq_fast.log_events import BROKER_INTERNAL_ERROR
from nsq_fast.names import is_valid_name

logger = logging.getLogger("nsq_fast.broker.http")


# A handler takes a ``Request`` and returns text, bytes, None (an empty reply), or anything else, which goes out as
# JSON; it refuses by raising ``request.refuse(status, text)``. How a result or a refusal looks on the wire is the
# router's *style*: ``style_v1`` is what servers since 1.0 always do, ``style_negotiated`` what redesigned servers do
# on their older routes, decided by the request's Accept header.


ACCEPT_V1 = "application/vnd.nsq; version=1.0"
_NSQ_TYPE = ("X-Nsq-Content-Type", "nsq; version=1.0")
_JSON_TYPE = ("Content-Type", "application/json; charset=utf-8")
_TEXT_TYPE = ("Content-Type", "text/plain; charset=utf-8")
_HEADER = re.compile(rb"([A-Za-z0-9-]+):[ \t]*([!-~](?:[ -~]*[!-~])?)[ \t]*\r\n\Z")
_MOST_HEADERS = 100
_LONGEST_HEADER = 65536
_BAD_QUERY = re.compile(r"%(?![0-9a-fA-F]{2})|;")

Headers = list[tuple[str, str]]


class Reply(NamedTuple):
    status: int
    headers: Headers
    body: bytes


Handler = Callable[["Request"], Any]
Style = Callable[["Request", int, Any], Reply]


class Request:
    """One HTTP request. ``argument`` is the rest of the path for routes that end in ``/*``."""

    def __init__(self, environ: dict[str, Any]) -> None:
        self._environ = environ
        self._arguments: dict[str, str] | None = None
        self.method: str = environ["REQUEST_METHOD"]
        self.path: str = environ["PATH_INFO"]
        self.argument = ""

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

    @property
    def remote_address(self) -> str:
        return f"{self._environ['REMOTE_ADDR']}:{self._environ['REMOTE_PORT']}"

    @property
    def query(self) -> str:
        text: str = self._environ.get("QUERY_STRING", "")
        return text

    def header(self, name: str) -> str:
        value: str = self._environ.get("HTTP_" + name.upper().replace("-", "_"), "")
        return value

    def headers_with_prefix(self, prefix: str) -> dict[str, str]:
        """The request headers whose names begin so; the rest of each name, in lower case, and the value."""
        start = "HTTP_" + prefix.upper().replace("-", "_")
        return {
            name[len(start) :].lower().replace("_", "-"): value
            for name, value in self._environ.items()
            if name.startswith(start)
        }

    def body(self, limit: int, refusal: str) -> bytes:
        """Read the body; refuse with 413 and the text ``refusal`` beyond ``limit`` bytes, before reading them all."""
        self.check_length(limit, refusal)
        try:
            data: bytes = self._environ["wsgi.input"].read(limit + 1)
        except OSError as error:
            raise self.refuse(500, "INTERNAL_ERROR") from error
        if len(data) > limit:
            raise self.refuse(413, refusal)
        return data

    def check_length(self, limit: int, refusal: str) -> None:
        """Refuse a body that says it is longer than ``limit`` bytes, with 413 and the text ``refusal``."""
        if int(self._environ.get("CONTENT_LENGTH") or 0) > limit:
            raise self.refuse(413, refusal)

    def refuse(self, status: int, text: str) -> HttpError:
        return HttpError(self.path, status, text)

    @property
    def waits_to_send_its_body(self) -> bool:
        """Whether the client waits for ``100 Continue`` before it sends its body, and has not got it."""
        stream = self._environ["wsgi.input"]
        return self.header("Expect").lower() == "100-continue" and stream.position == 0


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


class Router:
    """The WSGI application: a table of method and path to handler.

    As the original's router (julienschmidt/httprouter) it answers 404 and 405 in the server's style, lists
    the allowed methods, and redirects where only the case or a slash at the end differs.
    """

    def __init__(self, style: Style = style_v1) -> None:
        self._style = style
        self._routes: dict[str, dict[str, _Route]] = {}

    def add(self, method: str, path: str, handler: Handler, style: Style | None = None) -> None:
        """Add a route. A path that ends in ``/*`` takes one more segment, which becomes ``request.argument``."""
        self._routes.setdefault(path, {})[method] = _Route(handler, style or self._style)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request, as WSGI wants it."""
        request = Request(environ)
        reply = self._answer(request)
        headers = [*reply.headers, ("Content-Length", str(len(reply.body)))]
        if request.waits_to_send_its_body:
            # The body will not come now, or comes as if it were the next request: end the connection.
            headers.append(("Connection", "close"))
            environ["wsgi.input"].content_length = 0
        start_response(f"{reply.status} {HTTPStatus(reply.status).phrase}", headers)
        return [] if request.method == "HEAD" else [reply.body]

    def _answer(self, request: Request) -> Reply:
        methods = self._find(request)
        if methods is None:
            return self._redirect(request) or self._style(request, 404, "NOT_FOUND")
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
        status, headers, body = self._style(request, 405, "METHOD_NOT_ALLOWED")
        return Reply(status, [allow, *headers], body)


class _Headers(dict[str, str]):
    """The headers of a request, as pywsgi asks for them: by their names in lower case."""

    status = ""

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)

    getheader = get

    @property
    def headers(self) -> Iterable[str]:
        return [f"{name}: {value}" for name, value in self.items()]

    @property
    def typeheader(self) -> str | None:
        return super().get("content-type")


class _Handler(WSGIHandler):
    """pywsgi's, without a traceback on stderr for a client that goes away, or makes no sense, in its request."""

    def MessageClass(self, *arguments: Any) -> Any:
        # pywsgi has a parser of mails read the headers, which takes a quarter of the time of a short request. It gets
        # those that are in any way unusual.
        headers = _Headers()
        lines: list[bytes] = []
        while len(lines) <= _MOST_HEADERS:
            line = self.rfile.readline(_LONGEST_HEADER + 1)
            lines.append(line)
            if line == b"\r\n":
                return headers
            found = _HEADER.match(line)
            if found is None or (name := found[1].decode("latin-1").lower()) in headers:
                break
            headers[name] = found[2].decode("latin-1")
        while lines[-1] not in (b"\r\n", b"\n", b"") and len(lines) <= _MOST_HEADERS:
            lines.append(self.rfile.readline(_LONGEST_HEADER + 1))
        return super().MessageClass(BytesIO(b"".join(lines)))

    def read_request(self, raw_requestline: str) -> Any:
        try:
            return super().read_request(raw_requestline)
        except (OSError, IndexError) as error:  # IndexError: pywsgi's own, for a version without a dot
            raise ValueError(str(error)) from error

    def run_application(self) -> None:
        try:
            super().run_application()
        except GreenletExit:
            assert self.wsgi_input is not None
            # The server ends. pywsgi would read the rest of the body first, and the client may never send it.
            self.wsgi_input.chunked_input = False
            self.wsgi_input.content_length = 0
            raise

    _reply: bytearray | None = None

    def process_result(self) -> None:
        # All of a reply in one write: pywsgi has one for the headers.
        self._reply = reply = bytearray()
        try:
            super().process_result()
        finally:
            self._reply = None
        self._sendall(reply)

    def _sendall(self, data: Any) -> None:
        if self._reply is None:
            super()._sendall(data)  # type: ignore[misc]
        else:
            self._reply += data

    def log_request(self) -> None:
        """There is no access log; pywsgi would make the line all the same."""

    def handle_error(self, t: Any, v: Any, tb: Any) -> None:
        if issubclass(t, GreenletExit):
            self.close_connection = True  # else pywsgi waits for the next request, however it is killed
        else:
            super().handle_error(t, v, tb)

    def _connection_upgrade_requested(self) -> bool:
        # Nothing here is ever upgraded, but pywsgi gives a request that asks for it the bare socket as its body:
        # reading it waits for more than the client has said it would send. Go's server reads the body as always.
        return False


class HttpFace(Listener):
    """A WSGI application on a bound socket, over HTTP, or over HTTPS when there is an SSL context.

    There is no access log. Faults act on its connections and on its replies.
    """

    def __init__(
        self,
        name: str,
        sock: Any,
        application: Callable[..., Any],
        faults: Faults,
        ssl_context: SSLContext | None = None,
    ) -> None:
        super().__init__(name, sock, self._serve_http, faults, ssl_context)
        self._application = application
        host, port = self.address
        # Never started: it serves the connections that the listener accepts.
        self._wsgi = WSGIServer(
            (host, port),
            self._answer,
            log=None,
            error_log=None,
            handler_class=_Handler,
            environ={"SERVER_NAME": host, "SERVER_PORT": str(port)},
        )

    def _serve_http(self, sock: Any, address: Any) -> None:
        guarded: Any = self._faults.guard(sock, lies=False)
        self._wsgi.handle(guarded, address)

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        faults = self._faults
        if not faults.active:
            return self._application(environ, start_response)  # type: ignore[no-any-return]
        if faults.drop_replies:
            faults.wait_until_heard()
        if faults.lie is None:
            return self._application(environ, start_response)  # type: ignore[no-any-return]
        start_response(f"{faults.lie_status} {HTTPStatus(faults.lie_status).phrase}", [_JSON_TYPE, _NSQ_TYPE])
        return [faults.lie]


# --- query arguments of requests (nsqio/nsq: internal/http_api/topic_channel_args.go, GetTopicChannelArgs) -----------


def required(request: Request, name: str) -> str:
    value = request.get(name)
    if value is None:
        raise request.refuse(400, f"MISSING_ARG_{name.upper()}")
    return value


def topic_and_channel(request: Request) -> tuple[str, str]:
    topic = required(request, "topic")
    if not is_valid_name(topic):
        raise request.refuse(400, "INVALID_ARG_TOPIC")
    channel = required(request, "channel")
    if not is_valid_name(channel):
        raise request.refuse(400, "INVALID_ARG_CHANNEL")
    return topic, channel
