"""A byte stream to one nsqd: TCP, and the layers the handshake puts on it.

Layers (TLS, snappy, deflate) only transform bytes, see ``layers``; the socket
below is never anything but a plain non-blocking TCP socket. So a send can be
tried without blocking from the hub, whatever the layers are, and bytes that
were read too early are simply fed to the next layer.
"""

from __future__ import annotations

import errno
from _socket import socket as CSocket  # which monkey.patch_all leaves as it is
from typing import TYPE_CHECKING, Any

from gevent import Timeout
from gevent import socket as gsocket

from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import ConnectFailed
from nsq_fast.names import Address, check_resolvable
from nsq_fast.runtime.fork import drop_socket, known, tell_forks

from .receiver import Receiver

if TYPE_CHECKING:
    from .layers import Layer
    from .tls_layer import TlsLayer

WRITE = 2


class Transport(Receiver):
    """One connected socket with its layers. One greenlet reads; one at a time writes.

    Attributes:
        address: the peer, as it was asked for.
        local_address: our end.
    """

    def __init__(self, sock: Any, address: Address, config: ConnectionConfig) -> None:
        self.address = address
        self.local_address = Address(*sock.getsockname()[:2])
        self._config = config
        # Without gevent's wrapper: nothing here ever waits in a call of the socket's.
        super().__init__(CSocket(fileno=sock.detach()))
        self._writable = self._hub.loop.io(self._socket.fileno(), WRITE)
        tell_forks(self)

    @classmethod
    def connect(cls, address: Address, config: ConnectionConfig) -> Transport:
        """Resolve and connect, trying every address of the host. The caller limits the time.

        Raises ConnectFailed naming every attempt or saying what is wrong with the host, or the resolver's OSError.
        """
        check_resolvable(address.host)
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

    # Writing

    def encode(self, data: bytes) -> bytes:
        """The bytes that carry ``data`` through all layers."""
        for layer in reversed(self.layers):
            data = layer.encode(data)
        return data

    def try_send(self, data: memoryview | bytes) -> int:
        """Send encoded bytes without blocking; how many went, 0 for none. Raises OSError."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

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
        self.layers.append(self._tls_layer(leftover) if kind == "tls" else self._compression_layer(kind, leftover))

    def _compression_layer(self, kind: str, leftover: bytes) -> Layer:
        from .layers import compression_layer  # few connections are compressed

        layer = compression_layer(kind, self._config.deflate_level)
        if leftover:
            layer.feed(leftover)
        return layer

    def _tls_layer(self, leftover: bytes) -> Layer:
        from .tls_layer import TlsLayer

        layer = TlsLayer(self._config, self.address.host)
        if leftover:
            layer.feed(leftover)
        self._tls_handshake(layer)
        return layer

    def _tls_handshake(self, layer: TlsLayer) -> None:
        while not layer.try_handshake():
            self._send_encoded(layer.take_outgoing())
            raw = self.recv_raw()
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
        self.cancel_recv(closed)
        self._readable.close()
        self._hub.cancel_waits_close_and_then((self._writable,), closed, self._socket.close)

    def is_of(self, hub: object) -> bool:
        """Whether it belongs to this hub."""
        return self._hub is hub

    def forked(self) -> None:
        """In the child of a fork: let go of the socket. Who waits in ``recv`` is not woken."""
        self._readable.close()
        self._writable.close()
        drop_socket(self._socket)


def let_go_of_all(hub: object) -> None:
    """A hub runs no more: let go of its sockets, so that servers deliver elsewhere what they have sent."""
    for transport in known(Transport):
        if transport.is_of(hub):
            transport.forked()


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
