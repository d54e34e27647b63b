"""Low level client of one nsqd, and the deprecated one that is a client of HTTP, too."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from functools import total_ordering
from typing import Any

from gevent.socket import gethostname

from nsq_fast._codec import Message as CoreMessage
from nsq_fast.client.signals import LazySignal
from nsq_fast.errors import NSQException, NSQFrameError, ServerError, printable
from nsq_fast.protocol.rdy import is_starved

from . import protocol
from .basics import CONNECTED, DISCONNECTED, INIT, deprecated
from .errors import make_error
from .httpclient import USERAGENT
from .httpclient import NsqdHTTPClient as NsqdHTTPClient
from .message import Message, Unconnected
from .stream import Stream

HOSTNAME = gethostname()
SHORTNAME = HOSTNAME.partition(".")[0]

_OF_IDENTIFY = (
    "client_id", "hostname", "heartbeat_interval", "output_buffer_size", "output_buffer_timeout", "tls_v1", "snappy",
    "deflate", "deflate_level", "sample_rate", "user_agent",
)  # fmt: skip


class _Responder(Unconnected):
    """Sends the responses to a client's messages."""

    def __init__(self, client: NsqdTCPClient) -> None:
        super().__init__()
        self._client = client

    def finish(self, message: CoreMessage) -> None:
        self._client.handle_finish(message)
        super().finish(message)

    def requeue(self, message: CoreMessage, time_ms: int | None = None, backoff: bool = True) -> None:
        self._client.handle_requeue(message, time_ms or 0, backoff)
        super().requeue(message, time_ms, backoff)

    def touch(self, message: CoreMessage) -> None:
        self._client.handle_touch(message)
        super().touch(message)


@total_ordering
class _Ordered:
    """Equal by address and type, and in some order, as gnsq's clients are."""

    def __hash__(self) -> int:
        return hash(str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and str(self) == str(other)

    def __lt__(self, other: object) -> bool:
        return hash(self) < hash(other)


class NsqdTCPClient(_Ordered):
    """A connection to nsqd that is driven by its user, one frame at a time, for programs that speak the protocol by
    themselves. Consumer and Producer do not use it: their connections read and write in batches.

    Args:
        address, port: the nsqd.
        timeout: seconds for connecting, and for each read and write.
        client_id, hostname: of this client, in nsqd's stats.
        heartbeat_interval: seconds. (The attribute is in milliseconds.)
        output_buffer_size, output_buffer_timeout: of nsqd, in bytes and milliseconds.
        tls_v1, tls_options: TLS; a dict with ``keyfile``, ``certfile``, ``ca_certs``, ``cert_reqs``.
        snappy, deflate, deflate_level: compression.
        sample_rate: percentage of messages to receive; 0: all.
        auth_secret: secret for AUTH.

    Attributes, besides these:
        state: of ``states``: INIT, CONNECTED, DISCONNECTED.
        last_response, last_message: ``time.time()`` of the last frame and the last message.
        ready_count, in_flight: the RDY last sent; messages received and not responded to.
        max_ready_count: the highest RDY that the server takes.

    Every method may raise NSQSocketError.
    """

    last_message: float
    last_response: float

    on_message: LazySignal = LazySignal("on_message(message): a message was received")
    on_response: LazySignal = LazySignal("on_response(response): a response was received, as bytes; heartbeats too")
    on_error: LazySignal = LazySignal("on_error(error): an error was received")
    on_finish: LazySignal = LazySignal("on_finish(message_id): a message was finished")
    on_requeue: LazySignal = LazySignal("on_requeue(message_id, timeout, backoff): a message was requeued")
    on_auth: LazySignal = LazySignal("on_auth(response): the server accepted the secret; its reply as a dict")
    on_close: LazySignal = LazySignal("on_close(): the connection is closed")

    stream: Stream

    def __init__(
        self,
        address: str = "127.0.0.1",
        port: int = 4150,
        timeout: float | None = 60.0,
        client_id: str | None = None,
        hostname: str | None = None,
        heartbeat_interval: float = 30,
        output_buffer_size: int = 16 * 1024,
        output_buffer_timeout: int = 250,
        tls_v1: bool = False,
        tls_options: dict[str, Any] | None = None,
        snappy: bool = False,
        deflate: bool = False,
        deflate_level: int = 6,
        sample_rate: int = 0,
        auth_secret: str | bytes | None = None,
        user_agent: str = USERAGENT,
    ) -> None:
        self.address = address
        self.port = port
        self.timeout = timeout
        self.client_id: str = client_id or SHORTNAME
        self.hostname: str = hostname or HOSTNAME
        self.heartbeat_interval: int = int(1000 * heartbeat_interval)
        self.output_buffer_size = output_buffer_size
        self.output_buffer_timeout = output_buffer_timeout
        self.tls_v1 = tls_v1
        self.tls_options = tls_options
        self.snappy = snappy
        self.deflate = deflate
        self.deflate_level: Any = deflate_level
        self.sample_rate = sample_rate
        self.auth_secret = auth_secret
        self.user_agent = user_agent
        self.state: int = INIT
        self.last_response = self.last_message = time.time()
        self.ready_count: int = 0
        self.in_flight: int = 0
        self.max_ready_count: Any = 2500
        self._responder = _Responder(self)
        self._handlers: dict[int, Callable[[bytes], Any]] = {
            protocol.FRAME_TYPE_RESPONSE: self.handle_response,
            protocol.FRAME_TYPE_ERROR: self.handle_error,
            protocol.FRAME_TYPE_MESSAGE: self.handle_message,
        }

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def is_connected(self) -> bool:
        return self.state == CONNECTED

    @property
    def is_starved(self) -> bool:
        """Whether (almost) as many messages are held as the server may send."""
        return is_starved(self.in_flight, self.ready_count)

    # The stream

    def connect(self) -> None:
        """Connect, unless it is. Raises NSQException when it was closed before."""
        if self.state == DISCONNECTED:
            raise NSQException("connection already closed")
        if self.is_connected:
            return
        stream = Stream(self.address, self.port, self._read_timeout())
        stream.connect()
        self.stream = stream
        self.state = CONNECTED
        self.send(protocol.MAGIC_V2)

    def _read_timeout(self) -> float | None:
        """Seconds for a read: no less than two heartbeat intervals, which may pass without a byte."""
        return None if self.timeout is None else max(self.timeout, 2 * self.heartbeat_interval / 1000)

    def close_stream(self) -> None:
        if not self.is_connected:
            return
        self.state = DISCONNECTED
        self.stream.close()
        self.on_close.send(self)

    def send(self, data: bytes) -> None:
        """Send bytes; when that fails the connection is closed."""
        try:
            self.stream.send(data)
        except Exception:
            self.close_stream()
            raise

    def _read_response(self) -> bytes:
        try:
            return self.stream.read(protocol.unpack_size(self.stream.read(4)))
        except Exception:
            self.close_stream()
            raise

    # Frames

    def listen(self) -> None:
        while self.is_connected:
            self.read_response()

    def read_response(self) -> tuple[int, Any]:
        """Wait for a frame; return its type, and a message, an exception or the bytes of a response."""
        kind, data = protocol.unpack_response(self._read_response())
        self.last_response = time.time()
        handler = self._handlers.get(kind)
        if handler is None:
            raise NSQFrameError(f"unknown frame {kind}")
        return kind, handler(data)

    def check_ok(self, expected: bytes = protocol.OK) -> None:
        """Wait for a response; raise the error, or NSQException, when it is another than ``expected``."""
        data = self._reply()
        if data != expected:
            raise NSQException(f"unexpected response {printable(data)}")

    def _reply(self) -> bytes:
        kind, data = self.read_response()
        if kind == protocol.FRAME_TYPE_ERROR:
            raise data
        if kind != protocol.FRAME_TYPE_RESPONSE:
            raise NSQException("expected response frame")
        return bytes(data)

    def handle_response(self, data: bytes) -> bytes:
        if data == protocol.HEARTBEAT:
            self.nop()
        self.on_response.send(self, response=data)
        return data

    def handle_error(self, data: bytes) -> ServerError:
        """Deal with an error; a fatal one closes the connection, as the server does."""
        error = make_error(data)
        self.on_error.send(self, error=error)
        if error.fatal:
            self.close_stream()
        return error

    def handle_message(self, data: bytes) -> Message:
        self.last_message = time.time()
        self.in_flight += 1
        message = Message(*protocol.unpack_message(data))
        message.responder = self._responder
        self.on_message.send(self, message=message)
        return message

    def handle_finish(self, message: CoreMessage) -> None:
        self.finish(message.id)

    def handle_requeue(self, message: CoreMessage, timeout: int, backoff: bool) -> None:
        self.requeue(message.id, timeout, backoff)

    def handle_touch(self, message: CoreMessage) -> None:
        self.touch(message.id)

    def finish_inflight(self) -> None:
        self.in_flight -= 1

    # IDENTIFY, the upgrades of the stream, and AUTH

    def identify(self) -> dict[str, Any] | None:
        """IDENTIFY, with the upgrades and the AUTH that follow from it; the reply, None when it is a bare OK."""
        self.send(
            protocol.identify({"feature_negotiation": True, **{name: getattr(self, name) for name in _OF_IDENTIFY}})
        )
        reply = self._reply()
        if reply == protocol.OK:
            return None
        data = self._parsed(reply, "IDENTIFY")
        self.max_ready_count = data.get("max_rdy_count", self.max_ready_count)
        if self.tls_v1 and data.get("tls_v1"):
            self.upgrade_to_tls()
        if self.snappy and data.get("snappy"):
            self.upgrade_to_snappy()
        elif self.deflate and data.get("deflate"):
            self.deflate_level = data.get("deflate_level", self.deflate_level)
            self.upgrade_to_defalte()
        if self.auth_secret and data.get("auth_required"):
            self.auth()
        return data

    def _parsed(self, data: bytes, command: str) -> dict[str, Any]:
        try:
            reply = json.loads(data)
        except ValueError as error:
            self.close_stream()
            raise NSQException(f"failed to parse {command} response JSON from nsqd: {printable(data)}") from error
        return dict(reply)

    def upgrade_to_tls(self) -> None:
        self.stream.upgrade_to_tls(**(self.tls_options or {}))
        self.check_ok()

    def upgrade_to_snappy(self) -> None:
        self.stream.upgrade_to_snappy()
        self.check_ok()

    def upgrade_to_defalte(self) -> None:
        self.stream.upgrade_to_defalte(self.deflate_level)
        self.check_ok()

    def auth(self) -> dict[str, Any]:
        self.send(protocol.auth(self.auth_secret or b""))
        response = self._parsed(self._reply(), "AUTH")
        self.on_auth.send(self, response=response)
        return response

    # Commands; who sends them reads the replies, where there are any

    def subscribe(self, topic: str, channel: str) -> None:
        self.send(protocol.subscribe(topic, channel))

    def publish(self, topic: str, data: bytes, defer: int | None = None) -> None:
        """PUB, or DPUB with ``defer`` milliseconds."""
        command = protocol.publish(topic, data) if defer is None else protocol.deferpublish(topic, data, defer)
        self.send(command)

    def multipublish(self, topic: str, messages: Iterable[bytes]) -> None:
        self.send(protocol.multipublish(topic, messages))

    def ready(self, count: int) -> None:
        self.send(protocol.ready(count))
        self.ready_count = count

    def finish(self, message_id: str | bytes) -> None:
        self.send(protocol.finish(message_id))
        self.finish_inflight()
        self.on_finish.send(self, message_id=message_id)

    def requeue(self, message_id: str | bytes, timeout: int = 0, backoff: bool = True) -> None:
        """REQ; timeout in ms."""
        self.send(protocol.requeue(message_id, timeout))
        self.finish_inflight()
        self.on_requeue.send(self, message_id=message_id, timeout=timeout, backoff=backoff)

    def touch(self, message_id: str | bytes) -> None:
        self.send(protocol.touch(message_id))

    def close(self) -> None:
        """CLS: ask for no more messages."""
        self.send(protocol.close())

    def nop(self) -> None:
        self.send(protocol.nop())


class Nsqd(_Ordered):
    """Use NsqdTCPClient or NsqdHTTPClient instead: this is both."""

    @deprecated
    def __init__(self, address: str = "127.0.0.1", tcp_port: int = 4150, http_port: int = 4151, **options: Any) -> None:
        """Use NsqdTCPClient or NsqdHTTPClient instead."""
        self.address = address
        self.tcp_port = tcp_port
        self.http_port = http_port
        self._tcp = NsqdTCPClient(address, tcp_port, **options)
        self._http = NsqdHTTPClient(address, http_port)

    @property
    def base_url(self) -> str:
        return f"http://{self.address}:{self.http_port}/"

    @deprecated
    def publish_tcp(self, *args: Any, **options: Any) -> None:
        """Use NsqdTCPClient.publish instead."""
        self._tcp.publish(*args, **options)

    @deprecated
    def publish_http(self, *args: Any, **options: Any) -> bytes:
        """Use NsqdHTTPClient.publish instead."""
        return self._http.publish(*args, **options)

    @deprecated
    def multipublish_tcp(self, *args: Any, **options: Any) -> None:
        """Use NsqdTCPClient.multipublish instead."""
        self._tcp.multipublish(*args, **options)

    @deprecated
    def multipublish_http(self, *args: Any, **options: Any) -> bytes:
        """Use NsqdHTTPClient.multipublish instead."""
        return self._http.multipublish(*args, **options)

    # Over TCP when that is connected, over HTTP otherwise

    def publish(self, *args: Any, **options: Any) -> Any:
        return self._publisher.publish(*args, **options)

    def multipublish(self, *args: Any, **options: Any) -> Any:
        return self._publisher.multipublish(*args, **options)

    @property
    def _publisher(self) -> Any:
        return self._tcp if self._tcp.is_connected else self._http

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        client = self._tcp if hasattr(self._tcp, name) else self._http
        return getattr(client, name)

    def __str__(self) -> str:
        return f"{self.address}:{self.tcp_port}"
