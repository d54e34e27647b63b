"""Switches that make a server of the broker misbehave, for tests of clients.

Every face of a server (TCP, HTTP) has one ``Faults``. All switches are off to
begin with, may be turned at any time, and act on open connections too::

    broker.nsqd.faults.tcp.drop_replies = True       # mute: no reply, no message, no heartbeat leaves
    broker.lookupd.faults.http.lie = b"<html>"       # every HTTP reply has this body
    broker.nsqd.faults.tcp.clear()

They act on whole writes of a server, above its socket (and above TLS), so a
frame is cut by ``close_after`` only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import struct
from typing import Any

from gevent import sleep
from gevent import socket as gsocket
from gevent.event import Event

from nsq_fast.config import refuse_unknown

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Faults:
    """The switches of one face of a server.

    Attributes:
        refuse_connections: connections are accepted and reset at once.
        drop_replies: what the server writes is thrown away; over HTTP the request is never answered.
        delay_replies: seconds that each write waits.
        close_after: a connection is reset once so many bytes were written to it.
        lie: bytes written in place of what the server meant to write; over HTTP the body of every reply.
        lie_status: the status of an HTTP reply that lies.
        accepted: connections accepted so far, the refused ones included. Not a switch.
    """

    refuse_connections: bool = False
    drop_replies: bool = False
    delay_replies: float = 0.0
    close_after: int | None = None
    lie: bytes | None = None
    lie_status: int = 200

    SWITCHES = frozenset({"refuse_connections", "drop_replies", "delay_replies", "close_after", "lie", "lie_status"})

    def __init__(self) -> None:
        self.accepted = 0
        self.active = False
        self._cleared = Event()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.SWITCHES:
            # A writer looks at this one attribute only, so a server without faults pays nothing for them.
            self.active = any(getattr(self, switch) != getattr(Faults, switch) for switch in self.SWITCHES)
            if not self.drop_replies:
                self._cleared.set()
                self._cleared = Event()

    def set(self, **switches: Any) -> None:
        """Turn several switches at once; raises ConfigError for one that does not exist."""
        refuse_unknown(switches, self.SWITCHES)
        for name, value in switches.items():
            setattr(self, name, value)

    def clear(self) -> None:
        """Turn all switches off."""
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


class FaultySocket:
    """A connected socket whose writes follow a ``Faults``; everything else is the socket's own."""

    __slots__ = ("_faults", "_lies", "_written", "recv", "recv_into", "sock")

    def __init__(self, sock: Any, faults: Faults, lies: bool) -> None:
        self.sock = sock
        self._faults = faults
        self._lies = lies
        self._written = 0
        # Reading is not touched by faults: bound here, it costs what it costs on the socket itself.
        self.recv = sock.recv
        self.recv_into = sock.recv_into

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def sendall(self, data: Any) -> None:
        """Write all of ``data``, or what the faults make of it; raises OSError when they close the connection."""
        if self._faults.active:
            data = self._distort(data)
        self._written += len(data)
        self.sock.sendall(data)

    def send(self, data: Any) -> int:
        """As ``sendall``; the number of bytes that were taken."""
        self.sendall(data)
        return len(data)

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
    """The faults of a server with a TCP and an HTTP face."""

    tcp: Faults = dataclasses.field(default_factory=Faults)
    http: Faults = dataclasses.field(default_factory=Faults)

    def clear(self) -> None:
        """Turn all switches of both faces off."""
        self.tcp.clear()
        self.http.clear()


def reset_on_close(sock: Any) -> None:
    """Let the peer see a reset, not an end of stream, when the connection is closed."""
    with contextlib.suppress(OSError):
        sock.setsockopt(gsocket.SOL_SOCKET, gsocket.SO_LINGER, _RESET_ON_CLOSE)


def reset(sock: Any) -> None:
    """Close a connection so that the peer sees a reset, not an end of stream."""
    reset_on_close(sock)
    with contextlib.suppress(OSError):
        # A close of the object would wait for the files made of it.
        os.close(sock.detach())
