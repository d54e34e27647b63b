"""The lower half of NsqdTCPClient: its stream, and the frames that come over it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import total_ordering
from typing import Any

from gevent.socket import gethostname

from nsq_fast.errors import NSQException, NSQFrameError, ServerError
from nsq_fast.printable import printable
from nsq_fast.runtime import LazySignal

from . import protocol
from .errors import make_error
from .message import Message, Unconnected
from .options import USERAGENT
from .states import CONNECTED, DISCONNECTED, INIT
from .stream import Stream

HOSTNAME = gethostname()
SHORTNAME = HOSTNAME.partition(".")[0]

STARVED_RATIO = 0.85


@total_ordering
class FrameClient:
    """A connection that reads frames and sends bytes. See NsqdTCPClient, which has its arguments and attributes."""

    on_message = LazySignal("on_message(message): a message was received")
    on_response = LazySignal("on_response(response): a response was received, as bytes; heartbeats too")
    on_error = LazySignal("on_error(error): an error was received")
    on_finish = LazySignal("on_finish(message_id): a message was finished")
    on_requeue = LazySignal("on_requeue(message_id, timeout, backoff): a message was requeued")
    on_auth = LazySignal("on_auth(response): the server accepted the secret; its reply as a dict")
    on_close = LazySignal("on_close(): the connection is closed")

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
        self.client_id = client_id or SHORTNAME
        self.hostname = hostname or HOSTNAME
        self.heartbeat_interval = int(1000 * heartbeat_interval)
        self.output_buffer_size = output_buffer_size
        self.output_buffer_timeout = output_buffer_timeout
        self.tls_v1 = tls_v1
        self.tls_options = tls_options
        self.snappy = snappy
        self.deflate = deflate
        self.deflate_level = deflate_level
        self.sample_rate = sample_rate
        self.auth_secret = auth_secret
        self.user_agent = user_agent
        self.state = INIT
        self.last_response = self.last_message = time.time()
        self.ready_count = 0
        self.in_flight = 0
        self.max_ready_count = 2500
        self._responder = self._make_responder()
        self._handlers: dict[int, Callable[[bytes], Any]] = {
            protocol.FRAME_TYPE_RESPONSE: self.handle_response,
            protocol.FRAME_TYPE_ERROR: self.handle_error,
            protocol.FRAME_TYPE_MESSAGE: self.handle_message,
        }

    @property
    def is_connected(self) -> bool:
        """Whether it is connected now."""
        return self.state == CONNECTED

    @property
    def is_starved(self) -> bool:
        """Whether (almost) as many messages are held as the server may send."""
        return self.in_flight >= max(self.ready_count * STARVED_RATIO, 1)

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
        """Close the connection."""
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
        """Deal with a response."""
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
        """Deal with a message."""
        self.last_message = time.time()
        self.in_flight += 1
        message = Message(*protocol.unpack_message(data))
        message.responder = self._responder
        self.on_message.send(self, message=message)
        return message

    def nop(self) -> None:
        """NOP."""
        self.send(protocol.nop())

    def _make_responder(self) -> Unconnected:
        """What the messages of this connection call."""
        return Unconnected()

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"

    def __hash__(self) -> int:
        return hash(str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and str(self) == str(other)

    def __lt__(self, other: FrameClient) -> bool:
        return hash(self) < hash(other)
