"""An nsqd that does what a test tells it to: records every command, sends what the test asks for.

It pushes nothing by itself: ``connection.push(...)`` sends messages whatever
RDY says, so that a test decides what is in flight.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gevent import socket

from nsq_fast.protocol.dialect import PUBLISHES
from support.peers import Peer, PeerServer
from support.waiting import WAIT, until
from support.wire import OK, frame, message_frame

ID_LENGTH = 16
EVERY = 0.001
"""Seconds between two looks at what has come."""
PUBLISHED = {name.encode() for name in PUBLISHES}
WITH_BODY = {b"IDENTIFY", b"AUTH", *PUBLISHED}


class EndOfPeer(Exception):
    """Raised by what answers: close the connection now."""


def heard(client: Any, signal: str = "on_error", value: str = "error") -> list[Any]:
    """What a signal of a client tells from now on, as a list that grows: one of the values that come with it."""
    found: list[Any] = []
    getattr(client, signal).connect(lambda _, **values: found.append(values[value]), weak=False)
    return found


def ignore(consumer: Any, message: Any) -> None:
    """A handler of messages that mean nothing."""


def noting(bodies: list[bytes]) -> Callable[[Any, Any], None]:
    """A handler that notes the bodies of its messages."""
    return lambda consumer, message: bodies.append(message.body)


class ScriptedConnection(Peer):
    """One accepted connection.

    Attributes:
        commands: what came after the magic, as (word, arguments...) of bytes, IDENTIFY included.
        identify: the decoded IDENTIFY body.
        secret: what AUTH brought.
    """

    def __init__(self, server: ScriptedNsqd, sock: socket.socket) -> None:
        super().__init__(sock)
        self.server = server
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.commands: list[tuple[bytes, ...]] = []
        self.identify: dict[str, Any] = {}
        self.is_open = True

    def push(self, *ids: int | bytes, body: bytes = b"body", attempts: int = 1, timestamp: int = 1) -> None:
        self.send(b"".join(message_frame(each, body, attempts, timestamp) for each in ids))

    def close(self) -> None:
        with suppress(OSError):  # what the client has reset cannot be shut down
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def wait_for(self, condition: Callable[[], Any], timeout: float = WAIT) -> Any:
        """Wait until ``condition()`` is true."""
        return until(condition, timeout, EVERY, lambda: self.commands)

    def wait_rdy(self, count: int) -> None:
        """Wait until the RDY in force is ``count``."""
        self.wait_for(lambda: self.rdy == count)

    @property
    def rdy(self) -> int | None:
        counts = [command[1] for command in self.commands if command[0] == b"RDY"]
        return int(counts[-1]) if counts else None

    def answered(self, word: bytes) -> list[int]:
        """Ids (as the numbers they were pushed with) of the FINs, REQs or TOUCHs that came."""
        return [int(command[1], 16) for command in self.commands if command[0] == word]

    def words(self) -> list[bytes]:
        return [command[0] for command in self.commands]

    def serve(self) -> None:
        try:
            assert self.read(4) == b"  V2"
            while True:
                try:
                    command = self._read_command()
                    body = self.read_body() if command[0] in WITH_BODY else b""
                except ValueError:
                    return
                if command[0] in PUBLISHED:
                    self.server.published(self, command, body)
                    continue
                if command[0] == b"IDENTIFY":
                    self.identify = json.loads(body)
                elif command[0] == b"AUTH":
                    self.secret = body
                self.commands.append(command)
                self.server.reply(self, command)
        except EndOfPeer:
            pass
        finally:
            self.is_open = False

    def _read_command(self) -> tuple[bytes, ...]:
        """The words of the next command. A binary id may hold what ends a word or a line elsewhere."""
        line = self.read_line()
        word, _, rest = line.partition(b" ")
        if not self.server.has_binary_ids or word not in (b"FIN", b"REQ", b"TOUCH"):
            return tuple(line.split(b" "))
        while len(rest) < ID_LENGTH:
            rest += b"\n" + self.read_line()
        return (word, rest[:ID_LENGTH], *rest[ID_LENGTH:].split())


class ScriptedNsqd(PeerServer):
    """Accepts connections and answers IDENTIFY, SUB and CLS; ``replies`` overrides what a command gets.

    Args:
        info: fields of the IDENTIFY reply.
        replies: word -> bytes to send (b"" for silence), or a callable (connection, command) that does it.
    """

    has_binary_ids = False

    def __init__(self, info: dict[str, Any] | None = None, replies: dict[bytes, Any] | None = None) -> None:
        self.info = {"max_rdy_count": 2500, "version": "1.3.0", "msg_timeout": 60000, "max_msg_timeout": 900000} | (
            info or {}
        )
        self.replies = replies or {}
        self.connections: list[ScriptedConnection] = []
        self.is_refusing = False
        super().__init__(self._accept)

    def make_peer(self, sock: socket.socket) -> ScriptedConnection:
        self.connections.append(ScriptedConnection(self, sock))
        return self.connections[-1]

    def _accept(self, connection: ScriptedConnection) -> None:
        if self.is_refusing:
            connection.is_open = False
        else:
            connection.serve()

    def reply(self, connection: ScriptedConnection, command: tuple[bytes, ...]) -> None:
        word = command[0]
        if word in self.replies:
            reply = self.replies[word]
            if callable(reply):
                reply(connection, command)
            elif reply:
                connection.send(reply)
        elif word == b"IDENTIFY":
            connection.send(frame(0, json.dumps(self.info).encode()))
        elif word == b"SUB":
            connection.send(OK)
        elif word == b"CLS":
            connection.send(frame(0, b"CLOSE_WAIT"))

    def published(self, connection: ScriptedConnection, command: tuple[bytes, ...], body: bytes) -> None:
        """A publish came, to which ``replies`` has the answer."""
        assert command[0] in self.replies, f"no publishes are expected here: {command}"
        self.reply(connection, command)

    def wait_for(self, condition: Callable[[], Any], timeout: float = WAIT) -> Any:
        """Wait until ``condition()`` is true."""
        return until(condition, timeout, EVERY, lambda: [each.commands for each in self.connections])

    def connection(self, number: int = 0) -> ScriptedConnection:
        """The ``number``-th accepted connection, once it has subscribed and sent its first RDY."""
        self.wait_for(lambda: len(self.connections) > number and self.connections[number].rdy is not None)
        return self.connections[number]

    def stop(self) -> None:
        self._server.stop(timeout=0)
        for connection in self.connections:
            if connection.is_open:
                connection.close()
        self._check()
