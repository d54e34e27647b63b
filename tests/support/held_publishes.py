"""An nsqd that does with each publish what a test says, or keeps it, in threads of its own."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from .http_server import ThreadedServer
from .wire import OK, error_frame, split


class PublishNsqd(ThreadedServer):
    """It keeps what is published to it.

    Attributes:
        commands: the socket and the bodies of each PUB and MPUB, in order.
        react: called with each of them as it comes, once it is set.
        over: how many connections have ended.
    """

    def __init__(self, react: Callable[[socket.socket, list[bytes]], object] | None = None) -> None:
        self.commands: list[tuple[socket.socket, list[bytes]]] = []
        self.react = react
        self.over = 0
        self._ended: set[socket.socket] = set()
        super().__init__()

    @property
    def bodies(self) -> list[list[bytes]]:
        """Those of each command, sorted."""
        return [sorted(bodies) for _, bodies in list(self.commands)]

    def reply(self, number: int, data: bytes = OK) -> None:
        """To that command."""
        self.commands[number][0].sendall(data)

    def refuse(self, sock: socket.socket, error: bytes) -> None:
        """Send an error and nothing more, as after a fatal one. What comes is read: a reset would outrun the error."""
        self._ended.add(sock)
        sock.sendall(error_frame(error))
        with suppress(OSError):  # the client has closed at once, and then so has the thread that serves it
            sock.shutdown(socket.SHUT_WR)

    def serve(self, sock: socket.socket) -> None:
        with suppress(struct.error), sock.makefile("rb") as stream:
            try:
                stream.read(4)
                while line := stream.readline():
                    self._command(sock, line.split()[0], stream)
            finally:
                self.over += 1

    def _command(self, sock: socket.socket, name: bytes, stream: BinaryIO) -> None:
        if name == b"IDENTIFY":
            _sized(stream)
            sock.sendall(OK)
        elif name in (b"PUB", b"MPUB"):
            data = _sized(stream)
            if sock in self._ended:
                return
            bodies = [data] if name == b"PUB" else split(data)
            self.commands.append((sock, bodies))
            if self.react is not None:
                self.react(sock, bodies)


def _sized(stream: BinaryIO) -> bytes:
    return stream.read(struct.unpack(">i", stream.read(4))[0])
