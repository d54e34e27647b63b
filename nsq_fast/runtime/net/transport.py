"""A byte stream to one nsqd: TCP, and the layers the handshake puts on it.

Layers (TLS, snappy, deflate) only transform bytes, see ``layers``; the socket
below is never anything but a plain non-blocking TCP socket. So a send can be
tried without blocking from the hub, whatever the layers are, and bytes that
were read too early are simply fed to the next layer.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from gevent import Timeout, get_hub
from gevent import socket as gsocket

from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import ConnectFailed
from nsq_fast.names import Address
from nsq_fast.runtime.fork import drop_socket, tell_forks

from .layers import Layer, TlsLayer, make_layer
from .standin import StandIn

# 64 KiB decodes fastest: smaller reads cost syscalls, larger ones fall out of the cache.
READ_SIZE = 64 * 1024
# So few bytes are taken for all there was: to try at once for more costs a syscall and an exception, 1.3 us, which
# a publisher that waits for each reply pays for each. A larger read is followed by a try.
SHORT_READ = 2048
READ, WRITE = 1, 2


class Transport:
    """One connected socket with its layers. One greenlet reads; one at a time writes.

    Attributes:
        address: the peer, as it was asked for.
        local_address: our end.
        stand_in: reads in place of the greenlet that waits in ``recv``; not allowed where there are layers.
    """

    def __init__(self, sock: Any, address: Address, config: ConnectionConfig) -> None:
        self.address = address
        self.local_address = Address(*sock.getsockname()[:2])
        self._config = config
        self._layers: list[Layer] = []
        self._hub = get_hub()
        self._socket = sock
        self._is_drained = False
        sock.settimeout(0.0)
        self._readable = self._hub.loop.io(sock.fileno(), READ)
        self._writable = self._hub.loop.io(sock.fileno(), WRITE)
        # gevent's own methods are written in Python, and wait; these are the system's.
        self._recv: Callable[[int], bytes] = sock._sock.recv
        self._send: Callable[[memoryview | bytes], int] = sock._sock.send
        self.stand_in = StandIn(self._recv, self._readable)
        tell_forks(self)

    @classmethod
    def connect(cls, address: Address, config: ConnectionConfig) -> Transport:
        """Resolve and connect, trying every address of the host. The caller limits the time.

        Raises ConnectFailed naming every attempt, or the resolver's OSError.
        """
        found = gsocket.getaddrinfo(address.host, address.port, 0, gsocket.SOCK_STREAM)
        failures: list[str] = []
        for index, (family, _, _, _, target) in enumerate(found):
            # One address that swallows packets must not use up the time of the others.
            share = config.connect_timeout / (len(found) - index) if len(found) > 1 else None
            try:
                return cls(_connect_one(family, target, config.local_address, share), address, config)
            except OSError as error:
                failures.append(f"{target[0]}: {error}")
        raise ConnectFailed("; ".join(failures) or "the host has no address")

    # Reading

    def recv(self) -> bytes:
        """Read and decode; blocks. ``b""`` at the end of the stream. Raises OSError, RemoteProtocolError."""
        if not self._layers:
            return self._recv_raw()
        while True:
            data = self._read_layer(len(self._layers) - 1)
            if data or self._layers[0].is_ended:
                return data
            raw = self._recv_raw()
            if not raw:
                return b""
            self._layers[0].feed(raw)

    def _read_layer(self, level: int) -> bytes:
        layer = self._layers[level]
        while True:
            data = layer.read()
            if data or level == 0:
                return data
            below = self._read_layer(level - 1)
            if not below:
                return b""
            layer.feed(below)

    def _recv_raw(self) -> bytes:
        if self._is_drained:
            self._hub.wait(self._readable)
        while (data := self._try_recv()) is None:
            self._hub.wait(self._readable)
        self._is_drained = len(data) < SHORT_READ
        return data

    def _try_recv(self) -> bytes | None:
        try:
            return self.stand_in.take() or self._recv(READ_SIZE)
        except BlockingIOError:
            return None

    def cancel_recv(self, error: BaseException) -> None:
        """Make a ``recv`` that is waiting in another greenlet raise ``error``."""
        self.stand_in.give_back()
        self._hub.cancel_wait(self._readable, error)

    # Writing

    def encode(self, data: bytes) -> bytes:
        """The bytes that carry ``data`` through all layers."""
        for layer in reversed(self._layers):
            data = layer.encode(data)
        return data

    def try_send(self, data: memoryview | bytes) -> int:
        """Send encoded bytes without blocking; how many went, 0 for none. Raises OSError."""
        try:
            return self._send(data)
        except BlockingIOError:
            return 0

    def send_now(self, data: bytes) -> memoryview | None:
        """Encode and send without blocking; returns the encoded bytes that did not go. Raises OSError."""
        if self._layers:
            data = self.encode(data)
        sent = self.try_send(data)
        return None if sent == len(data) else memoryview(data)[sent:]

    def wait_writable(self, timeout: float) -> None:
        """Wait until the socket takes bytes. Raises TimeoutError."""
        with Timeout(timeout, TimeoutError(f"the peer took no byte for {timeout} s")):
            self._hub.wait(self._writable)

    def send_all(self, data: bytes) -> None:
        """Encode and send, blocking. For the handshake, when nothing else writes."""
        self._send_encoded(self.encode(data))

    def _send_encoded(self, data: bytes) -> None:
        unsent = memoryview(data)
        while unsent:
            sent = self.try_send(unsent)
            unsent = unsent[sent:]
            if unsent and not sent:
                self._hub.wait(self._writable)

    # Layers

    def upgrade(self, kind: str, leftover: bytes) -> None:
        """Put a layer on top. ``leftover`` was received for it already. Blocks for a TLS handshake."""
        self.stand_in.is_barred = True
        layer = make_layer(kind, self._config, self.address.host)
        if leftover:
            layer.feed(leftover)
        if isinstance(layer, TlsLayer):
            self._tls_handshake(layer)
        self._layers.append(layer)

    def _tls_handshake(self, layer: TlsLayer) -> None:
        while not layer.try_handshake():
            self._send_encoded(layer.take_outgoing())
            raw = self._recv_raw()
            if not raw:
                raise ConnectionResetError("the server closed the connection during the TLS handshake")
            layer.feed(raw)
        self._send_encoded(layer.take_outgoing())

    # Ending

    def end_writing(self) -> None:
        """Tell the peer that nothing follows, with the end of the TCP stream.

        TLS's own notice is not sent: OpenSSL would refuse to read the replies that are still on their way.
        """
        self._socket.shutdown(gsocket.SHUT_WR)

    def close(self) -> None:
        """Close the socket. A ``recv`` still waiting raises OSError. Idempotent."""
        closed = OSError(errno.EBADF, "closed in another greenlet")
        self.stand_in.give_back()
        self._hub.cancel_waits_close_and_then((self._readable, self._writable), closed, self._socket.close)

    def forked(self) -> None:
        """In the child of a fork: let go of the socket. Who waits in ``recv`` is not woken."""
        self._readable.close()
        self._writable.close()
        drop_socket(self._socket)


def _connect_one(family: int, target: Any, local_address: str | None, timeout: float | None) -> Any:
    sock = gsocket.socket(family, gsocket.SOCK_STREAM)
    try:
        if local_address is not None:
            sock.bind((local_address, 0))
        sock.settimeout(timeout)
        sock.connect(target)
        sock.setsockopt(gsocket.IPPROTO_TCP, gsocket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock
