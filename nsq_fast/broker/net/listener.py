"""Listening sockets of the broker's servers: bind, accept, hand each connection to its own greenlet.

In all that is spoken here the client speaks first, so a connection has a greenlet from its first bytes on: one that
is only open costs a socket. One ``Listener`` serves one address. It knows nothing of what is spoken there:
nsqd's TCP protocol, nsqlookupd's, HTTP and HTTPS all sit above it. Stopping it closes
the listening socket at once, and the connections that are still open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from gevent import Greenlet, Timeout, get_hub, socket
from gevent.pool import Pool
from gevent.server import StreamServer
from gevent.ssl import SSLContext

from nsq_fast.log_events import BROKER_CLIENT_DISCONNECTED
from nsq_fast.names import Address

from .faults import Faults

logger = logging.getLogger("nsq_fast.broker.net.listener")

BACKLOG = 1024
HANDSHAKE_TIMEOUT = 10.0
_READABLE = 1


def bind(address: str | tuple[str, int]) -> Any:
    """A listening socket on ``host:port`` (IPv6 hosts in brackets; port 0 takes any free one)."""
    host, port = split_listen_address(address) if isinstance(address, str) else address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{error.strerror}: {address}") from error
    return sock


def split_listen_address(text: str) -> tuple[str, int]:
    """Split ``host:port``. Unlike an address to connect to, the port may be 0 and the host empty (all of them)."""
    host, _, port = text.rpartition(":")
    return host.strip("[]") or "0.0.0.0", int(port)


class Listener:
    """Accept connections on a bound socket and run ``handle(sock, address)`` for each in a greenlet.

    The greenlet begins when the peer has sent something or has closed; with TLS at once, as the handshake is timed.
    It applies the switch ``refuse_connections`` of ``faults``; ``handle`` applies the others.
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
    ) -> None:
        self.address = Address(*sock.getsockname()[:2])
        self._name = name
        self._handle = handle
        self._faults = faults
        self._ssl_context = ssl_context
        self._silent: dict[Any, Any] = {}
        self._connections = Pool(greenlet_class=Greenlet)
        self._server = _Acceptor(sock, self._take)

    def start(self) -> None:
        """Begin to accept."""
        self._server.start()

    def stop(self) -> None:
        """Stop accepting, and end every connection that is still open."""
        self._server.close()
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
        watcher = self._silent[sock] = get_hub().loop.io(sock.fileno(), _READABLE)
        watcher.start(self._begin, sock, address)

    def _begin(self, sock: Any, address: Any) -> None:
        self._hear(sock)
        self._connections.spawn(self._serve, sock, address)

    def _hear(self, sock: Any) -> None:
        watcher = self._silent.pop(sock)
        watcher.stop()
        watcher.close()

    def _serve(self, sock: Any, address: Any) -> None:
        try:
            # Without it each reply on a kept connection waits for the peer's delayed ACK, 40 ms:
            # test_replies_on_a_kept_connection_do_not_wait.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._ssl_context is not None:
                with Timeout(HANDSHAKE_TIMEOUT, TimeoutError("TLS handshake timed out")):
                    sock = self._ssl_context.wrap_socket(sock, server_side=True)
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
