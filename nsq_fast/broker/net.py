"""Listening sockets, the ports that servers hold, the switches that make them misbehave, and a faulty link."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import stat
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gevent import Greenlet, Timeout, get_hub, joinall, sleep, socket, spawn
from gevent.event import Event
from gevent.hub import Waiter
from gevent.pool import Pool
from gevent.server import StreamServer
from gevent.ssl import SSLContext

from nsq_fast._lazy import get_logger
from nsq_fast.broker.options import check_count, check_seconds, check_switch, is_path, listen_host
from nsq_fast.config import refuse_unknown
from nsq_fast.errors import ConfigError
from nsq_fast.log_events import BROKER_CLIENT_DISCONNECTED
from nsq_fast.names import DEFAULT_NSQD_TCP_PORT, Address, parse_address

logger: logging.Logger = get_logger("nsq_fast.broker.net")


_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Faults:
    """The switches of one face of a server, which make it misbehave. They may be turned at any time::

        broker.nsqd.faults.tcp.drop_replies = True       # mute: no reply, no message, no heartbeat leaves
        broker.lookupd.faults.http.lie = b"<html>"       # every HTTP reply has this body
        broker.nsqd.faults.tcp.clear()

    They act on whole writes of a server, above its socket (and above TLS), so a frame is cut by ``close_after`` only.

    Attributes:
        refuse_connections: connections are accepted and reset at once.
        drop_replies: what the server writes is thrown away; over HTTP the request is never answered.
        delay_replies: seconds that each write waits.
        close_after: a connection is reset once so many bytes were written to it.
        lie: bytes written in place of what the server meant to write; over HTTP the body of every reply.
        lie_status: the status of an HTTP reply that lies.
        hold_messages: an nsqd delivers nothing, on no channel; replies and heartbeats leave.
        refuse_publishes: an nsqd refuses what is published over TCP, as where its disk is full.
        fail_fin: an nsqd refuses every FIN; the message stays in flight until it times out.
        accepted: connections accepted so far, the refused ones included. Not a switch.
    """

    refuse_connections: bool = False
    drop_replies: bool = False
    delay_replies: float = 0.0
    close_after: int | None = None
    lie: bytes | None = None
    lie_status: int = 200
    hold_messages: bool = False
    refuse_publishes: bool = False
    fail_fin: bool = False

    SWITCHES = frozenset(__annotations__)  # all of these
    _OWN = frozenset({"accepted", "active", "_cleared"})

    def __init__(self) -> None:
        self.accepted: int = 0
        self.active: bool = False
        self._cleared = Event()

    def __setattr__(self, name: str, value: Any) -> None:
        """Turn a switch. Raises ConfigError for one that does not exist, and for a value that does not fit."""
        if name not in self._OWN:
            refuse_unknown({name: value}, self.SWITCHES)
            self._check(name, value)
        super().__setattr__(name, value)
        if name in self.SWITCHES:
            # A writer looks at this one attribute only, so a server without faults pays nothing for them.
            self.active = any(getattr(self, switch) != getattr(Faults, switch) for switch in self.SWITCHES)
            if not self.drop_replies:
                self._cleared.set()
                self._cleared = Event()

    def set(self, **switches: Any) -> None:
        """Turn several switches at once, as one by one; none where it raises ConfigError."""
        refuse_unknown(switches, self.SWITCHES)
        for name, value in switches.items():
            self._check(name, value)
        for name, value in switches.items():
            setattr(self, name, value)

    def _check(self, name: str, value: object) -> None:
        if name == "delay_replies":
            check_seconds(name, value)
        elif name == "lie_status" or (name == "close_after" and value is not None):
            check_count(name, value)
        elif name == "lie":
            if not (value is None or isinstance(value, bytes)):
                raise ConfigError(f"{name}={value!r}: must be bytes, or None")
        elif name != "close_after":
            check_switch(name, value)

    def clear(self) -> None:
        self.set(**{switch: getattr(Faults, switch) for switch in self.SWITCHES})

    def refuses(self, sock: Any) -> bool:
        """Count a new connection; reset it and return True if it is to be refused."""
        self.accepted += 1
        if self.refuse_connections:
            reset(sock)
        return self.refuse_connections

    def guard(self, sock: Any, *, lies: bool = True) -> FaultySocket:
        """The connection as a socket whose writes follow the switches. After an upgrade to TLS, guard the TLS socket.

        ``lies=False`` leaves ``lie`` to a caller that knows how to put it: an HTTP server.
        """
        return FaultySocket(sock, self, lies)

    def wait_until_heard(self) -> None:
        """Block while ``drop_replies`` is on."""
        while self.drop_replies:
            self._cleared.wait()

    def on_release(self, callback: Callable[[], object]) -> None:
        """Call back once, when a switch is turned and ``hold_messages`` may be off."""
        self._cleared.rawlink(lambda _: callback())


class _Reader:
    """Waits for bytes that ``take`` leaves. gevent calls ``throw`` of what the callback of a watcher is bound to."""

    def __init__(self, stream: FaultySocket, size: int, take: Callable[[bytes], bytes | None]) -> None:
        self._stream = stream
        self._size = size
        self._take = take
        self.waiter: Any = Waiter()
        self.throw: Any = self.waiter.throw

    def on_readable(self) -> None:
        try:
            data = self._stream.recv_some(self._size)
            left = self._take(data) if data else data
        except Exception as error:
            self.throw(error)
            return
        if left is not None:
            self.waiter.switch(left)


class FaultySocket:
    """A connected socket whose writes follow a ``Faults``; everything else is the socket's own."""

    __slots__ = ("_faults", "_lies", "_read", "_reader", "_unread", "_write", "_written", "sock")

    def __init__(self, sock: Any, faults: Faults, lies: bool) -> None:
        self.sock: Any = sock
        self._faults = faults
        self._lies = lies
        self._written = 0
        self._unread = b""
        is_plain = type(sock) is socket.socket  # inside TLS there may be more to read than the socket shows
        self._read: Any = sock._sock.recv if is_plain else None
        self._write: Any = sock._sock.send if is_plain else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def put_back(self, data: bytes) -> None:
        """Have the next ``recv`` return what was read already."""
        self._unread = data

    def recv(self, size: int) -> bytes:
        data, self._unread = self._unread, b""
        return data or self.sock.recv(size)

    def recv_untaken(self, size: int, take: Callable[[bytes], bytes | None]) -> bytes:
        """The next bytes that ``take`` leaves; not inside TLS.

        ``take`` gets what comes, and returns what is not for it, None if all was. It runs in the hub and must not
        block: to switch to a greenlet and back costs more than all else that there is to do for a small command. What
        it raises is raised here.
        """
        event = self.sock._read_event
        if event is None:
            raise OSError(errno.EBADF, "the connection was closed")
        self._reader = _Reader(self, size, take)
        event.start(self._reader.on_readable)
        try:
            data: bytes = self._reader.waiter.get()
            return data
        finally:
            event.stop()

    def interrupt(self, error: Exception) -> None:
        """Raise an error in ``recv_untaken``, which waits."""
        get_hub().loop.run_callback(self._reader.throw, error)

    def recv_some(self, size: int) -> bytes | None:
        """What can be read at once; None if there is nothing. Not inside TLS."""
        try:
            data: bytes = self._read(size)
        except BlockingIOError:
            return None
        return data

    def send_some(self, data: bytes) -> int:
        """Write what can be written at once; how much that was. Faults are not applied, and it is not inside TLS."""
        try:
            sent: int = self._write(data)
        except BlockingIOError:
            return 0
        self._written += sent
        return sent

    def sendall(self, data: Any, timeout: float | None = None) -> None:
        """Write all of ``data``, or what the faults make of it; raises OSError when they close the connection.

        ``timeout``: seconds that it may take, else TimeoutError; None: any time.
        """
        if self._faults.active:
            data = self._distort(data)
        sent = 0 if self._write is None else self.send_some(data)  # nearly always all, at half of what sendall costs
        if sent < len(data):
            self._written += len(data) - sent
            with Timeout(timeout, TimeoutError("timed out")):
                self.sock.sendall(memoryview(data)[sent:])

    def _distort(self, data: Any) -> Any:
        faults = self._faults
        if faults.delay_replies:
            sleep(faults.delay_replies)
        if faults.drop_replies:
            return b""
        if self._lies and faults.lie is not None:
            data = faults.lie
        if faults.close_after is not None and self._written + len(data) >= faults.close_after:
            self.sock.sendall(memoryview(data)[: max(0, faults.close_after - self._written)])
            reset(self.sock)
            raise ConnectionResetError(errno.ECONNRESET, "reset by the switch close_after")
        return data


@dataclasses.dataclass(frozen=True)
class ServerFaults:
    tcp: Faults = dataclasses.field(default_factory=Faults)
    http: Faults = dataclasses.field(default_factory=Faults)

    def clear(self) -> None:
        self.tcp.clear()
        self.http.clear()


def reset_on_close(sock: Any) -> None:
    """Let the peer see a reset, not an end of stream, when the connection is closed."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)


def reset(sock: Any) -> None:
    reset_on_close(sock)
    with suppress(OSError):
        # A close of the object would wait for the files made of it.
        os.close(sock.detach())


LINGER = 0.25


def linger(stream: Any) -> None:
    """Let the peer read what was sent last: with input unread, closing would be a reset, and could cost it that."""
    with suppress(OSError):
        stream.shutdown(socket.SHUT_WR)
        stream.settimeout(LINGER)
        give_up_at = time.monotonic() + LINGER
        while stream.recv(_DRAIN_SIZE) and time.monotonic() < give_up_at:
            pass


def read_exactly(sock: Any, size: int) -> bytes:
    """So many bytes; raises OSError when the peer ends the connection before."""
    data = b""
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise ConnectionResetError("the peer has closed the connection")
        data += chunk
    return data


_DRAIN_SIZE = 128 * 1024
_GARBAGE = b"\xff" * 64


class FaultyLink:
    """A TCP proxy between a client and a server that behave, whose faults are switched while it runs.

    Args:
        target: the server behind it.
        listen: where clients connect; port 0 is a free port.

    Attributes:
        address: where clients connect.
        delay: seconds that each chunk waits, in both directions. Raises ConfigError for what is no time.
        chunk: most bytes passed on at once; 0 passes them as they come. Raises ConfigError for what is no number.
        connections: how many connections were accepted so far.
    """

    __slots__ = (
        *("address", "chunk", "connections", "delay", "target"),
        *("_flowing", "_garbled", "_pairs", "_refusing", "_server", "_spoilt"),
    )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("delay", "chunk"):
            (check_seconds if name == "delay" else check_count)(name, value)
        super().__setattr__(name, value)

    def __init__(self, target: Address | str, listen: Address | tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.target: Address = parse_address(target, DEFAULT_NSQD_TCP_PORT)
        self.delay: float = 0.0
        self.chunk = 0
        self.connections: int = 0
        self._refusing = False
        self._flowing = Event()
        self._flowing.set()
        self._pairs: set[tuple[Any, Any]] = set()
        self._garbled: set[tuple[Any, Any]] = set()
        self._spoilt: set[tuple[Any, Any]] = set()
        self._server = StreamServer(listen, self._serve)
        self._server.start()
        self.address: Address = Address(*self._server.address)

    def stall(self) -> None:
        self._flowing.clear()

    def flow(self) -> None:
        """End ``stall`` and ``refuse``."""
        self._refusing = False
        self._flowing.set()

    def refuse(self) -> None:
        self._refusing = True

    def cut(self) -> None:
        for pair in list(self._pairs):
            self._close(pair)

    def garble(self) -> None:
        """Put bytes that are no protocol in the place of what the server sends next on each open connection.

        Until then the client is heard, or a producer that has a reply to wait for would get no garbage. Then nothing
        passes any more, so that no real bytes are misread as something else.
        """
        self._garbled.update(self._pairs)

    def close(self) -> None:
        self._server.stop()
        self.cut()

    def _serve(self, client: Any, _peer: object) -> None:
        self.connections += 1
        if self._refusing:
            client.close()
            return
        server = self._connect(client)
        if server is None:
            return
        pair = (client, server)
        self._pairs.add(pair)
        joinall([spawn(self._pump, client, server, pair), spawn(self._pump, server, client, pair)])

    def _connect(self, client: Any) -> Any:
        try:
            server = socket.create_connection(self.target)
            for sock in (client, server):  # or the system adds up to 40 ms, which no delay was asked for
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            client.close()
            return None
        return server

    def _pump(self, source: Any, sink: Any, pair: tuple[Any, Any]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if pair in self._spoilt:
                    continue
                if pair in self._garbled and source is pair[1]:
                    self._spoilt.add(pair)
                    sink.sendall(_GARBAGE)
                else:
                    self._pass_on(data, sink)
        self._close(pair)

    def _pass_on(self, data: bytes, sink: Any) -> None:
        size = self.chunk or len(data)
        for start in range(0, len(data), size):
            self._flowing.wait()
            if self.delay or self.chunk:
                sleep(self.delay)
            sink.sendall(data[start : start + size])

    def _close(self, pair: tuple[Any, Any]) -> None:
        self._pairs.discard(pair)
        self._garbled.discard(pair)
        self._spoilt.discard(pair)
        for sock in pair:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


# --- ports that servers of the broker listen on, and those that they will listen on again ----------------------------
# A port that nobody is bound to belongs to whoever asks next, and every outgoing connection of the machine asks for
# one. So the ports of a server that has stopped stay bound, without listening: connections are refused, as they are
# where no server runs, and the system gives the port to nobody.


_CAN_SHARE = sys.platform == "linux"
"""Whether another process can bind a port that is held here, and listen there."""


def bind(address: str | tuple[str, int]) -> Any:
    """A socket on ``host:port`` (IPv6 hosts in brackets; port 0: a free one), or on a path; it does not listen yet.

    Raises OSError, with the address, when it is in use.
    """
    host, port = split_listen_address(address) if isinstance(address, str) else address
    if host.startswith("/"):
        return _bind_path(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    with closed_on_error(sock, address):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    return sock


def _bind_path(path: str) -> Any:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with closed_on_error(sock, path):
        if _is_left(path):
            os.unlink(path)
        sock.bind(path)
    return sock


def _is_left(path: str) -> bool:
    """Whether it is the socket of a server that was killed: nobody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(path) == errno.ECONNREFUSED and stat.S_ISSOCK(os.stat(path).st_mode)


def shown_peer(address: Any) -> str:
    """Where a client is, as Go shows it; at the other end of a Unix socket it has no name."""
    return str(Address(*address[:2])) if address else "@"


def address_of(sock: Any) -> Address:
    name = sock.getsockname()
    return Address(name, 0) if sock.family == socket.AF_UNIX else Address(*name[:2])


@contextmanager
def closed_on_error(sock: Any, address: object) -> Iterator[None]:
    """An OSError within closes the socket, and is raised with the address."""
    try:
        yield
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{error.strerror}: {address}") from error


def split_listen_address(text: str) -> tuple[str, int]:
    """Split ``host:port``. Unlike an address to connect to, the port may be 0 and the host empty (all of them).

    A Unix socket, ``unix:path`` or ``/path``, is a path without a port.
    """
    if is_path(text):
        return os.path.abspath(text.removeprefix("unix:")), 0
    return listen_host(text), int(text.rpartition(":")[2])


class HeldPorts:
    """Ports that were given up for a while. They are let go when nothing refers to this object, too."""

    def __init__(self) -> None:
        # Descriptors, not sockets: one of gevent belongs to a hub, and the end of this object may come in any thread.
        self._held: dict[Address, int] = {}
        weakref.finalize(self, _let_go, self._held).atexit = False

    def hold(self, address: Address) -> None:
        """Bind a port that was given up just now. Without effect when somebody else has it already, and for a path."""
        if not address.port:
            with suppress(OSError):
                os.unlink(address.host)
        elif address not in self._held:
            with suppress(OSError):
                self._held[address] = bind(address).detach()

    def take(self, address: str | Address) -> Any:
        """As ``bind``; a port that is held is handed over as it is, and nobody comes between."""
        fd = self._held.pop(address, None) if isinstance(address, Address) else None
        return bind(address) if fd is None else socket.socket(fileno=fd)

    def offer(self) -> None:
        """Before another process is to listen on them: let go of them where it could not bind them otherwise."""
        if not _CAN_SHARE:
            self.let_go()

    def let_go(self) -> None:
        _let_go(self._held)


def _let_go(held: dict[Address, int]) -> None:
    while held:
        os.close(held.popitem()[1])


BACKLOG = 1024
HANDSHAKE_TIMEOUT = 10.0
_READABLE = 1


class Listener:
    """Listen on a bound socket, accept connections and run ``handle(sock, address)`` for each in a greenlet; guarded.

    In all that is spoken here the client speaks first, so the greenlet begins when the peer has sent something or has
    closed: a connection that is only open costs a socket. With TLS it begins at once, as the handshake is timed.
    It applies the switches of ``faults``, but for those that it takes a protocol to apply.
    The socket is closed when ``handle`` returns; an OSError that ends ``handle`` is only logged:
    peers come and go.
    """

    def __init__(
        self,
        name: str,
        sock: Any,
        handle: Callable[[Any, Any], None],
        faults: Faults,
        ssl_context: SSLContext | None = None,
        *,
        lies: bool = True,
    ) -> None:
        self.address: Address = address_of(sock)
        with closed_on_error(sock, self.address):
            if sock.family != socket.AF_UNIX:
                # Connections inherit it. Without it each reply on a kept one waits for the peer's delayed ACK, 40 ms:
                # test_replies_on_a_kept_connection_do_not_wait.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.listen(BACKLOG)
        self._name = name
        self._handle = handle
        self._faults = faults
        self._lies = lies
        self._ssl_context = ssl_context
        self._silent: dict[Any, Any] = {}
        self._connections = Pool(greenlet_class=Greenlet)
        self._server = _Acceptor(sock, self._take)

    def start(self) -> None:
        self._server.start()

    def close(self) -> None:
        self._server.close()

    def stop(self) -> None:
        self.close()
        for sock in list(self._silent):
            self._hear(sock)
            sock.close()
        self._connections.kill()

    def _take(self, sock: Any, address: Any) -> None:
        """Runs in the hub: it must not block."""
        if self._faults.refuses(sock):
            return
        if self._ssl_context is not None:
            self._connections.spawn(self._serve, sock, address)
            return
        guarded = self._faults.guard(sock, lies=self._lies)
        watcher = self._silent[guarded] = get_hub().loop.io(sock.fileno(), _READABLE)
        watcher.start(self._begin, guarded, address)

    def _begin(self, sock: FaultySocket, address: Any) -> None:
        """A connection that has no greenlet can be read."""
        self._hear(sock)
        self._connections.spawn(self._serve, sock, address)

    def _hear(self, sock: Any) -> None:
        watcher = self._silent.pop(sock)
        watcher.stop()
        watcher.close()

    def _serve(self, sock: Any, address: Any, unsent: bytes = b"") -> None:
        try:
            if unsent:
                sock.sendall(unsent)
            if self._ssl_context is not None:
                with Timeout(HANDSHAKE_TIMEOUT, TimeoutError("TLS handshake timed out")):
                    wrapped = self._ssl_context.wrap_socket(sock, server_side=True)
                sock = self._faults.guard(wrapped, lies=self._lies)
            self._handle(sock, address)
        except OSError as error:
            logger.debug(
                "%s: connection from %s ended: %s", self._name, address, error, extra=BROKER_CLIENT_DISCONNECTED
            )
        finally:
            sock.close()


class _Acceptor(StreamServer):
    """Hands each connection to ``take``, in the hub, and leaves the socket to it."""

    def __init__(self, sock: Any, take: Callable[[Any, Any], None]) -> None:
        super().__init__(sock, take)
        self._take = take

    def do_handle(self, sock: Any, address: Any) -> None:
        self._take(sock, address)
