"""Stream: blocking reads of an exact size, whole writes, and upgrades to TLS and compression; for code that reads and
writes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ECONNRESET, ENOTCONN
from typing import Any

from gevent import socket as gsocket
from gevent.lock import Semaphore
from gevent.ssl import SSLSocket

from nsq_fast.client.layers import DeflateLayer, Layer, SnappyLayer, client_context, server_hostname
from nsq_fast.errors import NSQSocketError

from .util import tls_options

READ_SIZE = 64 * 1024


class CompressionSocket:
    """Wraps a socket with a compression layer of nsq_fast. Every other attribute is the socket's."""

    def __init__(self, socket: Any, layer: Layer) -> None:
        self._socket = socket
        self._layer = layer
        self._ready = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def bootstrap(self, data: bytes) -> None:
        """Take compressed bytes that were received before."""
        if data:
            self._layer.feed(data)

    def recv(self, size: int) -> bytes:
        """Read at most ``size`` bytes; blocks until there are some, ``b""`` at the end of the stream."""
        while not self._ready:
            self._ready = self._layer.read()
            if self._ready:
                break
            received = self._socket.recv(READ_SIZE)
            if not received:
                return b""
            self._layer.feed(received)
        data, self._ready = self._ready[:size], self._ready[size:]
        return data

    def sendall(self, data: bytes) -> None:
        self._socket.sendall(self.compress(data))

    def compress(self, data: bytes) -> bytes:
        return self._layer.encode(data)

    def decompress(self, data: bytes) -> bytes:
        """As much of the data as these compressed bytes complete."""
        self._layer.feed(data)
        return b"".join(iter(self._layer.read, b""))


class DefalteSocket(CompressionSocket):
    """A socket with raw deflate of the given level. The name is gnsq's."""

    def __init__(self, socket: Any, level: int) -> None:
        super().__init__(socket, DeflateLayer(level))


class SnappySocket(CompressionSocket):
    """A socket with snappy in its framing format."""

    def __init__(self, socket: Any) -> None:
        super().__init__(socket, SnappyLayer())


class Stream:
    """A connection. Every method raises NSQSocketError when there is none, or when it breaks.

    Args:
        timeout: seconds for connecting, and for each read and write.
        buffer_size: most bytes of one read of the socket.
        lock_class: makes the lock that keeps two writers apart.
    """

    def __init__(
        self,
        address: str,
        port: int,
        timeout: float | None,
        buffer_size: int = READ_SIZE,
        lock_class: Callable[[], Any] = Semaphore,
    ) -> None:
        self.address = address
        self.port = port
        self.timeout = timeout
        self.buffer_size = buffer_size
        self.socket: Any = None
        self.lock: Any = lock_class()
        self._received = bytearray()

    @property
    def is_connected(self) -> bool:
        return self.socket is not None

    def ensure_connection(self) -> None:
        """Raise NSQSocketError unless there is a connection."""
        if not self.is_connected:
            raise NSQSocketError(ENOTCONN, "Socket is not connected")

    def connect(self) -> None:
        if self.is_connected:
            return
        with _socket_errors():
            self.socket = gsocket.create_connection((self.address, self.port), self.timeout)
            self.socket.setsockopt(gsocket.IPPROTO_TCP, gsocket.TCP_NODELAY, 1)

    def read(self, size: int) -> bytes:
        """Exactly so many bytes."""
        received = self._received
        while len(received) < size:
            self.ensure_connection()
            with _socket_errors():
                data = self.socket.recv(self.buffer_size)
            if not data:
                self.close()
                raise NSQSocketError(ECONNRESET, "the server closed the connection")
            received += data
        data = bytes(received[:size])
        del received[:size]
        return data

    def send(self, data: bytes) -> None:
        with self.lock:
            self.ensure_connection()
            with _socket_errors():
                self.socket.sendall(data)

    def consume_buffer(self) -> bytes:
        """Take what was received and not read."""
        data = bytes(self._received)
        self._received.clear()
        return data

    def close(self) -> None:
        """Close. Idempotent."""
        sock, self.socket = self.socket, None
        self._received.clear()
        if sock is not None:
            sock.close()

    def upgrade_to_tls(self, **options: Any) -> None:
        """Handshake. Options: ``keyfile``, ``certfile``, ``ca_certs``, ``cert_reqs``; see ``layers.client_context``."""
        self.ensure_connection()
        chosen = tls_options(options) if options else None
        with _socket_errors():
            hostname = server_hostname(chosen, self.address)
            # gevent's class whatever that of the context is, so that a handshake never blocks the process
            self.socket = SSLSocket(sock=self.socket, server_hostname=hostname, _context=client_context(chosen))

    def upgrade_to_snappy(self) -> None:
        self._compress(SnappySocket(self.socket))

    def upgrade_to_defalte(self, level: int) -> None:
        self._compress(DefalteSocket(self.socket, level))

    def _compress(self, compressed: Any) -> None:
        self.ensure_connection()
        self.socket = compressed
        self.socket.bootstrap(self.consume_buffer())


@contextmanager
def _socket_errors() -> Iterator[None]:
    try:
        yield
    except NSQSocketError:
        raise
    except OSError as error:
        raise NSQSocketError(*error.args) from error
