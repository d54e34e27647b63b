"""A byte stream to one nsqd: TCP or a Unix socket, and the layers that the handshake puts on it.

Layers only transform bytes, see ``layers``. The socket below is never anything but a plain non-blocking socket. So
a send can be tried at any time, whatever the layers are, and bytes that were read too early are simply fed to the next
layer.

While the conversation begins, one sequence reads and writes here, and waits for both by ``recv`` and ``send_all``.
Then ``deliver_to`` has the loop call whoever reads from then on.
"""

from __future__ import annotations

import errno
import socket
from _socket import AI_NUMERICHOST, SHUT_WR, SO_ERROR, SOCK_STREAM, SOL_SOCKET, gaierror, getaddrinfo
from collections.abc import Callable, Sequence
from contextlib import suppress
from os import strerror
from socket import AF_UNIX, IPPROTO_TCP, TCP_NODELAY
from socket import close as close_descriptor  # unlike os.close this one is never patched
from time import monotonic
from typing import TYPE_CHECKING, Any

from nsq_fast._client import READ_SIZE, TransportPath
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import ConfigError, ConnectFailed
from nsq_fast.names import Address, check_resolvable

if TYPE_CHECKING:
    from .layers import Layer, TlsLayer
    from .loop import Loop, Waiter, Watch


TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
TCP_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
USER_TIMEOUT_LATER = 1.0
MOST_MILLISECONDS = 2**31 - 1

UNHEARD_AFTER = 2
"""So many times on end: after some 0.6 s on a local network. Once may be a packet that got lost alone."""


class Transport(TransportPath):
    """One socket with its layers, from ``connect`` to ``close``.

    Attributes:
        address: the peer, as it was asked for.
        local_address: our end; None before ``connect``.
        is_closed: whether ``close`` was called.
    """

    def __init__(self, loop: Loop, address: Address, config: ConnectionConfig) -> None:
        self.loop = loop
        self.address = address
        self.local_address: Address | None = None
        self.is_closed: bool = False
        self._config = config
        self._reader: Watch | None = None
        self._writer: Watch | None = None
        self._waiter: Waiter | None = None
        self._aborted: BaseException | None = None
        loop.tell_forks(self)

    # Connecting

    async def connect(self, deadline: float) -> None:
        """Resolve and connect, trying every address of the host, until ``deadline``.

        Raises ConnectFailed naming every attempt or saying what is wrong with the host, the resolver's OSError, or
        TimeoutError.
        """
        if self.address.is_unix:
            await self._connect_to_path(self.address.host)
            return
        found = await self._resolve(deadline)
        failures: list[str] = []
        for index, (family, _, _, _, target) in enumerate(found):
            # One address that swallows packets must not use up the time of the others.
            now = monotonic()
            limit = now + max(0.0, deadline - now) / (len(found) - index)
            try:
                await self._connect_to(family, target, limit)
            except OSError as error:  # TimeoutError is one
                self._drop_socket()
                if len(found) == 1 and isinstance(error, TimeoutError) and error.errno is None:
                    raise
                failures.append(str(error) if target[0] == self.address.host else f"{target[0]}: {error}")
            else:
                self.local_address = Address(*self.sock.getsockname()[:2])
                return
        raise ConnectFailed("; ".join(failures))

    async def _connect_to_path(self, path: str) -> None:
        sock = self.loop.new_socket(AF_UNIX)
        self.use(sock)
        # It is connected or refused at once: while the server's backlog is full, with EAGAIN.
        if number := sock.connect_ex(path):
            raise ConnectFailed(strerror(number))
        self.local_address = self.address  # our end has no name

    async def _resolve(self, deadline: float) -> Sequence[tuple[Any, ...]]:
        """A host that is an IP address needs no resolver, which may start threads and take as long as to connect."""
        host, port = self.address.host, self.address.port
        check_resolvable(host)
        found: Sequence[tuple[Any, ...]]
        try:
            found = getaddrinfo(host, port, 0, SOCK_STREAM, 0, AI_NUMERICHOST)
        except gaierror:
            try:
                found = await self.loop.resolve(host, port, max(0.0, deadline - monotonic()))
            except TimeoutError as error:
                raise ConnectFailed(str(error)) from error
            self._check_aborted()
        if not found:
            raise ConnectFailed("the host has no address")
        return found

    async def _connect_to(self, family: int, target: Any, deadline: float) -> None:
        sock = self.loop.new_socket(family)
        self.use(sock)
        if self._config.local_address is not None:
            sock.bind((self._config.local_address, 0))
        number = sock.connect_ex(target)
        if number in (errno.EINPROGRESS, errno.EWOULDBLOCK):
            await self._wait_for("write", deadline)
            number = sock.getsockopt(SOL_SOCKET, SO_ERROR)
        if number:
            raise OSError(number, strerror(number))
        sock.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        if TCP_USER_TIMEOUT is not None:  # else Linux goes on for a quarter of an hour where nobody acknowledges
            # Where both are due, the connection's own timer comes first: its error says more.
            patience = min(int((self._config.write_timeout + USER_TIMEOUT_LATER) * 1000), MOST_MILLISECONDS)
            with suppress(OSError):  # systems that stand for Linux may not have it
                sock.setsockopt(IPPROTO_TCP, TCP_USER_TIMEOUT, patience)

    def is_unheard(self) -> bool:
        """Whether the system sends the same again and again, because the peer's does not say that it has it.

        So the network is at fault, and not a server that is slow. False where that is not known.
        """
        if TCP_INFO is None or self.is_closed:
            return False
        try:
            # Linux, struct tcp_info: state, ca_state, retransmits: since the last acknowledgement.
            retransmits: int = self.sock.getsockopt(IPPROTO_TCP, TCP_INFO, 3)[2]
        except OSError:
            return False
        return retransmits >= UNHEARD_AFTER

    # The sequence that begins the conversation

    async def recv(self, deadline: float, size: int = READ_SIZE) -> bytes:
        """Wait for bytes, decoded; ``b""`` at the end of the stream. Raises OSError, NsqError, TimeoutError."""
        while (data := self.recv_now(size)) is None:
            await self._wait_for("read", deadline)
        return data

    async def send_all(self, data: bytes, deadline: float) -> None:
        """Encode and send all of it. Raises OSError, TimeoutError."""
        await self._send_encoded(self.encode(data), deadline)

    async def _send_encoded(self, data: bytes, deadline: float) -> None:
        unsent = self.send_encoded(memoryview(data))
        while unsent is not None:
            await self._wait_for("write", deadline)
            unsent = self.send_encoded(unsent)

    async def wait_writable(self, deadline: float) -> None:
        """Wait until the socket takes bytes. Raises TimeoutError."""
        await self._wait_for("write", deadline)

    async def wait_readable(self, deadline: float) -> None:
        """Wait until the socket has something to read, or has ended. Raises TimeoutError."""
        await self._wait_for("read", deadline)

    async def _wait_for(self, event: str, deadline: float) -> None:
        self._check_aborted()
        if self.is_closed:
            raise OSError(errno.EBADF, "the connection was closed")
        waiter = self._waiter = self.loop.waiter()
        watch = self._watch(event)
        watch.resume()
        try:
            await self.loop.wait(waiter, max(0.0, deadline - monotonic()))
        finally:
            self._waiter = None
            watch.pause()

    def _watch(self, event: str) -> Watch:
        if event == "read":
            if self._reader is None:
                self._reader = self.loop.add_reader(self.sock, self._is_ready)
            return self._reader
        if self._writer is None:
            self._writer = self.loop.add_writer(self.sock, self._is_ready)
        return self._writer

    def _is_ready(self) -> None:
        if self._waiter is not None and not self._waiter.ready():
            self._waiter.set(None)

    def abort(self, error: BaseException) -> None:
        """Have the sequence that waits here, or will, end with ``error``."""
        self._aborted = error
        if self._waiter is not None and not self._waiter.ready():
            self._waiter.set_exception(error)

    def _check_aborted(self) -> None:
        if self._aborted is not None:
            raise self._aborted

    # Whoever reads and writes then

    def deliver_to(self, readable: Callable[[], object], writable: Callable[[], object]) -> tuple[Watch, Watch]:
        """Have the loop call ``readable`` whenever there is something to read; and the watch for ``writable``, paused.

        Layers may hold bytes already, of which the loop knows nothing: ``readable`` is called soon in any case.
        """
        for watch in (self._reader, self._writer):
            if watch is not None:
                watch.close()
        self._reader = self.loop.add_reader(self.sock, readable)
        self._writer = self.loop.add_writer(self.sock, writable)
        return self._reader, self._writer

    # Layers

    def encode(self, data: bytes) -> bytes:
        """The bytes that carry ``data`` through all layers."""
        for layer in reversed(self.layers):
            data = layer.encode(data)
        return data

    def _recv_decoded(self) -> bytes | None:
        layers = self.layers
        while True:
            data = self._read_layer(len(layers) - 1)
            if data or layers[0].is_ended:
                return data
            raw = self.recv_raw()
            if not raw:
                return raw
            layers[0].feed(raw)

    def _read_layer(self, level: int) -> bytes:
        layer: Layer = self.layers[level]
        while True:
            data = layer.read()
            if data or level == 0:
                return data
            below = self._read_layer(level - 1)
            if not below:
                return b""
            layer.feed(below)

    async def upgrade(self, kind: str, leftover: bytes, deadline: float) -> None:
        """Put a layer on top: tls, snappy or deflate. ``leftover`` was received for it already."""
        from .layers import DeflateLayer, SnappyLayer, TlsLayer, renewed_context, server_hostname  # few have any

        if kind == "tls":
            options = self._config.tls_options
            layer = TlsLayer(renewed_context(options), server_hostname(options, self.address.host))
            await self.secure(layer, leftover, deadline)
            return
        compressed = SnappyLayer() if kind == "snappy" else DeflateLayer(self._config.deflate_level)
        if leftover:
            compressed.feed(leftover)
        self.layers.append(compressed)

    async def secure(self, layer: TlsLayer, leftover: bytes, deadline: float) -> None:
        """Shake hands for TLS, and put it on top. ``leftover`` was received for it already."""
        if leftover:
            layer.feed(leftover)
        while not layer.try_handshake():
            await self._send_encoded(layer.take_outgoing(), deadline)
            while (raw := self.recv_raw()) is None:
                await self._wait_for("read", deadline)
            if not raw:
                raise ConnectionResetError("the server closed the connection during the TLS handshake")
            layer.feed(raw)
        await self._send_encoded(layer.take_outgoing(), deadline)
        self.layers.append(layer)

    # Ending

    def end_writing(self) -> None:
        """Tell the peer that nothing follows, with the end of the TCP stream.

        TLS's own notice is not sent: OpenSSL would refuse to read the replies that are still on their way.
        """
        self.sock.shutdown(SHUT_WR)

    def close(self) -> None:
        """Close the socket. A sequence that waits here gets OSError. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            if self._waiter is not None and not self._waiter.ready():
                self._waiter.set_exception(OSError(errno.EBADF, "the connection was closed meanwhile"))
            self._drop_socket()

    def _drop_socket(self) -> None:
        self.unwatch()
        if self.sock is not None:
            self.sock.close()

    def unwatch(self) -> None:
        """Give back what the loop watches the socket with, until it is waited for again."""
        for watch in (self._reader, self._writer):
            if watch is not None:
                watch.close()
        self._reader = self._writer = None

    def forked(self) -> None:
        """In the child of a fork: let go of the socket, without a word to the peer. Who waits here is not woken."""
        self.is_closed = True
        self.unwatch()
        if self.sock is not None:
            descriptor = self.sock.detach()
            if descriptor >= 0:
                close_descriptor(descriptor)


def with_secret(config: ConnectionConfig) -> ConnectionConfig:
    """The config of one connection: its ``auth_secret`` as ``auth_secret_file`` has it now. Raises OSError."""
    path = config.auth_secret_file
    if path is None:
        return config
    try:
        with open(path, "rb") as file:
            secret = file.read().rstrip(b"\r\n")
    except OSError as error:
        raise OSError(f"auth_secret_file {path}: {error.strerror}") from error
    if not secret:
        raise OSError(f"auth_secret_file {path}: it is empty")
    return config.replace(auth_secret=secret, auth_secret_file=None)


def check_files(config: ConnectionConfig) -> None:
    """Raise ConfigError for ``tls_options``, or an ``auth_secret_file``, that no connection could use."""
    try:
        with_secret(config)
    except OSError as error:
        raise ConfigError(str(error)) from error
    if config.tls_v1:
        from .layers import client_context  # which needs ssl

        try:
            client_context(config.tls_options)
        except ConfigError as error:
            raise ConfigError(f"tls_options: {error}") from error
