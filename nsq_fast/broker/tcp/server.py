"""nsqd's TCP server: accepts connections that begin with the magic of V2 (nsqio/nsq: nsqd/tcp.go, Handle)."""

from __future__ import annotations

import itertools
from typing import Any

from gevent import socket
from gevent.ssl import SSLContext

from nsq_fast.broker.net.faults import Faults
from nsq_fast.broker.nsqd.host import Host

from .dialect import ORIGINAL, Dialect
from .frames import ERROR, frame
from .upgrade import server_context

MAGIC_V2 = b"  V2"
BAD_PROTOCOL = frame(ERROR, b"E_BAD_PROTOCOL")


class NsqdTcp:
    """Serves the clients of an nsqd.

    Attributes:
        dialect: how it speaks with them.
        context: TLS, None where there is no certificate.
    """

    def __init__(
        self, nsqd: Host, faults: Faults, context: SSLContext | None = None, dialect: Dialect = ORIGINAL
    ) -> None:
        self.nsqd = nsqd
        self.faults = faults
        self.dialect = dialect
        self.context = context or server_context(nsqd.options)
        self._ids = itertools.count(1)

    def handle(self, sock: Any, address: Any) -> None:
        """Serve one connection until it ends; the caller closes the socket."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        magic = _read_magic(sock)  # before there is anything else: a connection may stay silent
        stream = self.faults.guard(sock)
        if magic != MAGIC_V2:
            if len(magic) == len(MAGIC_V2):
                stream.sendall(BAD_PROTOCOL)
            return
        connection = self.dialect.connection(self, next(self._ids), stream, address)
        self.nsqd.clients.add(connection)
        try:
            connection.serve()
        finally:
            self.nsqd.clients.discard(connection)

    def close(self) -> None:
        """Drop every connection."""
        for connection in list(self.nsqd.clients):
            connection.close()

    def reset(self) -> None:
        """See to it that every connection that is closed from now on is reset: how clients see a SIGKILL."""
        for connection in list(self.nsqd.clients):
            connection.reset_on_close()
        # What closes them politely must not find them.
        self.nsqd.clients.clear()


def _read_magic(sock: Any) -> bytes:
    magic = b""
    while len(magic) < len(MAGIC_V2):
        data = sock.recv(len(MAGIC_V2) - len(magic))
        if not data:
            break
        magic += data
    return magic
