"""A byte stream to one nsqd: TCP, and the layers the handshake puts on it.

Layers (TLS, snappy, deflate) only transform bytes, see ``layers``; the socket
below is never anything but a plain non-blocking TCP socket. So a send can be
tried without blocking from the hub, whatever the layers are, and bytes that
were read too early are simply fed to the next layer.
"""

from __future__ import annotations

import errno
from _socket import socket as CSocket  # which monkey.patch_all leaves as it is
from typing import Any

from gevent import Timeout, get_hub, getcurrent
from gevent import socket as gsocket
from greenlet import greenlet

from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import ConnectFailed
from nsq_fast.names import Address, check_resolvable
from nsq_fast.runtime.fork import drop_socket, tell_forks
from nsq_fast.runtime.loop_turns import loop_turns

from .busy_poll import BusyPoll
from .layers import Layer, TlsLayer, make_layer
from .spin_reader import SpinReader

# 64 KiB decodes fastest: smaller reads cost syscalls, larger ones fall out of the cache.
READ_SIZE = 64 * 1024
# So few bytes are taken for all there was: to try at once for more costs a syscall and an exception, 1.3 us, which a
# publisher pays for each reply, and a consumer of few messages at a time for each batch. A larger read, of more than
# nsqd's output buffer holds, is followed by a try.
SHORT_READ = 20_000
REPLY_SIZE = 2048
# Who reads lets others run after so many bytes: two full reads keep the batches large and the hub alive. A short read
# needs no such limit: the hub runs before the next one.
YIELD_BYTES = 128 * 1024
READ, WRITE = 1, 2


class _Interrupted(Exception):
    """Ends a ``recv_for_reader``."""


class Transport:
    """One connected socket with its layers. One greenlet reads; one at a time writes.

    The watcher that wakes the reader is left running between reads: to start and stop it, and what ``hub.wait`` makes
    for each wait, takes longer than to read a message.

    Attributes:
        address: the peer, as it was asked for.
        local_address: our end.
        layers: what bytes go through on their way, the one below first; empty for plain TCP.
        receiver: the greenlet that waits for bytes; None while none does.
    """

    def __init__(self, sock: Any, address: Address, config: ConnectionConfig) -> None:
        self.address = address
        self.local_address = Address(*sock.getsockname()[:2])
        self._config = config
        self.layers: list[Layer] = []
        self._hub = get_hub()
        self._turns = loop_turns()
        # Without gevent's wrapper: nothing here ever waits in a call of the socket's.
        self._socket = CSocket(fileno=sock.detach())
        self._socket.settimeout(0.0)
        self._is_drained = False
        self._budget = YIELD_BYTES
        self._spin_reader = SpinReader(self._socket.recv)
        self._busy_poll: BusyPoll | None = None
        self.receiver: greenlet | None = None
        self._relieved: greenlet | None = None  # who waited for them until another began to read in its place
        self._is_watching = False
        self._readable = self._hub.loop.io(self._socket.fileno(), READ)
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

    # Reading

    def recv(self) -> bytes:
        """Read and decode; blocks. ``b""`` at the end of the stream. Raises OSError, RemoteProtocolError."""
        return self._recv_decoded() if self.layers else self._recv_raw()

    def _recv_decoded(self) -> bytes:
        while True:
            data = self._read_layer(len(self.layers) - 1)
            if data or self.layers[0].is_ended:
                if self._is_due(len(data)):
                    self._turns.give_way()
                return data
            raw = self._recv_raw()
            if not raw:
                return b""
            self.layers[0].feed(raw)

    def _read_layer(self, level: int) -> bytes:
        layer = self.layers[level]
        while True:
            data = layer.read()
            if data or level == 0:
                return data
            below = self._read_layer(level - 1)
            if not below:
                return b""
            layer.feed(below)

    def _recv_raw(self) -> bytes:
        has_waited = self._is_drained
        if has_waited:
            self._wait_readable()
        while True:
            try:
                data = self._socket.recv(READ_SIZE)
            except BlockingIOError:
                if has_waited and self._relieved is not None:
                    raise _Interrupted from None  # it was not for bytes that this greenlet was woken
                self._wait_readable()
                has_waited = True
                continue
            self._is_drained = len(data) < SHORT_READ or self._is_due(len(data))
            return data

    def _is_due(self, size: int) -> bool:
        """Note that so many bytes were read; whether it is time to let others run."""
        self._budget -= size
        if self._budget > 0:
            return False
        self._budget = YIELD_BYTES
        return True

    def _wait_readable(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            self._readable.start(self._on_readable)
        self.receiver = getcurrent()
        try:
            self._hub.switch()
        finally:
            self.receiver = None

    def _on_readable(self) -> None:
        receiver = self.receiver
        if receiver is not None:
            receiver.switch()
            return
        self._is_watching = False  # nobody wants what there is; the next wait watches again
        self._readable.stop()

    def recv_soon(self) -> bytes | None:
        """What arrives in a moment, received without a turn of the hub; None if it is the hub that has to wait."""
        if self._busy_poll is None:
            self._busy_poll = BusyPoll(self._hub.loop)
        if self.layers or not self._busy_poll.wait():
            return None
        try:
            data = self._socket.recv(READ_SIZE)
        except BlockingIOError:
            self._busy_poll.rest()
            return None
        self._is_drained = len(data) < SHORT_READ or self._is_due(len(data))
        return data

    def recv_at_once(self) -> bytes | None:
        """What a few tries to read bring, without a turn of the hub; None if it is the hub that has to wait."""
        if self.layers:
            return None
        data = self._spin_reader.recv(REPLY_SIZE)
        if data is not None:
            self._is_drained = len(data) < REPLY_SIZE or self._is_due(len(data))
        return data

    def recv_for_reader(self) -> bytes | None:
        """``recv``, in place of another greenlet that waits in it, and waits on. None when it was woken by something
        else than bytes, as ``interrupt`` does, and at once when a third one is reading so.

        Whenever the caller does anything but wait here, the other one is there to receive.
        """
        if self._relieved is not None:
            return None
        self._relieved, self.receiver = self.receiver, None
        try:
            return self._recv_decoded() if self.layers else self._recv_raw()
        except _Interrupted:
            return None
        finally:
            self.receiver, self._relieved = self._relieved, None

    def interrupt(self) -> None:
        """Make a ``recv_for_reader`` that is waiting in another greenlet return None."""
        if self._relieved is not None:
            self._hub.loop.run_callback(self._interrupt)

    def _interrupt(self) -> None:
        if self._relieved is not None and self.receiver is not None:
            self.receiver.throw(_Interrupted)

    def cancel_recv(self, error: BaseException) -> None:
        """Make a waiting ``recv`` raise ``error``, and a waiting ``recv_for_reader`` return None."""
        if self.receiver is not None:
            self._hub.loop.run_callback(self._cancel_recv, error)

    def _cancel_recv(self, error: BaseException) -> None:
        reader, self._relieved = self._relieved, None
        if reader is None:
            reader = self.receiver
        elif self.receiver is not None:
            self.receiver.throw(_Interrupted)
        if reader is not None:
            reader.throw(error)

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

    def send_now(self, data: bytes) -> memoryview | None:
        """Encode and send without blocking; returns the encoded bytes that did not go. Raises OSError."""
        if self.layers:
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
        layer = make_layer(kind, self._config, self.address.host)
        if leftover:
            layer.feed(leftover)
        if isinstance(layer, TlsLayer):
            self._tls_handshake(layer)
        self.layers.append(layer)

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
        self.cancel_recv(closed)
        self._readable.close()
        self._hub.cancel_waits_close_and_then((self._writable,), closed, self._socket.close)

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
