"""What must hold of the Python parts for any bytes, under atheris: ``python fuzz/targets.py TARGET [options]``.

Targets: ``session`` (both dialects), ``lookup`` (replies of nsqlookupd), ``http`` (the HTTP client), ``snappy`` (its
framing format). An exception that is none of those promised ends the process, and leaves the input in a file.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["nsq_fast"]):
    from nsq_fast._codec import Message, encode_frame
    from nsq_fast.client.http import Endpoint, HttpClient
    from nsq_fast.client.layers import PIECE_SIZE, SnappyLayer
    from nsq_fast.errors import HttpError, RemoteProtocolError
    from nsq_fast.names import Address
    from nsq_fast.protocol import CommandFailed, ConnectionConfig, Disconnected, MessageSkipped, Ready, Session
    from nsq_fast.protocol.session import Event
    from nsq_fast.protocol.topology import error_text, parse_listlookup, parse_lookup, parse_nodes

# Bits of the first byte of a session's input.
REDESIGNED, EXT, SKIP_HANDSHAKE, PUBLISH, IN_PIECES = 1, 2, 4, 8, 16
HANDSHAKE = "IDENTIFY", "AUTH"
VERSIONS = b"1.3.0", b"0.3.7-HA.1.13.0"


def session(data: bytes) -> None:
    """A server says anything: events, or one RemoteProtocolError, and at the end every command is accounted for."""
    if len(data) < 2:
        return  # nothing at all is the end of the stream
    choices, data = data[0], data[1:]
    Embedder(choices).run(data)


class Embedder:
    """A program around a session: does what docs/embedding.md says, and checks what it promises."""

    def __init__(self, choices: int) -> None:
        self.choices = choices
        self.session = Session(ConnectionConfig(max_frame_size=1024, extend_support=bool(choices & EXT)))
        self.unanswered = 0
        self.session.connect()

    def run(self, data: bytes) -> None:
        """Feed the input after a good handshake, or in its place, whole or in pieces; then end the stream."""
        failure = None
        step = len(data) // 3 + 1 if self.choices & IN_PIECES else len(data)
        try:
            if self.choices & SKIP_HANDSHAKE:
                version = VERSIONS[self.choices & REDESIGNED]
                self.take(self.session.receive(encode_frame(0, b'{"version":"%b"}' % version), 1.0))
            for at in range(0, len(data), step):
                self.take(self.session.receive(data[at : at + step], 1.0))
        except RemoteProtocolError as error:
            failure = error
        if failure is not None or self.session.failure is not None:
            with suppress(RemoteProtocolError):
                self.session.receive(b"x", 1.0)
                raise AssertionError("a broken session goes on")
        (end,) = self.session.receive(b"")
        assert isinstance(end, Disconnected)
        assert sum(command not in HANDSHAKE for command, token in end.pending) == self.unanswered
        assert self.session.receive(b"") == []
        assert self.session.in_flight >= 0

    def take(self, events: list[Any]) -> None:
        """Answer events as an embedder does."""
        repr(events)
        for event in events:
            if isinstance(event, Message):
                self.session.fin(event)
                continue
            assert isinstance(event, Event)
            if isinstance(event, Ready):
                if self.session.is_ready:  # a fatal error may be among the events behind it
                    self.start()
            elif isinstance(event, MessageSkipped):
                self.session.req(event.message, 0)
            elif isinstance(event, CommandFailed) or hasattr(event, "token"):
                self.unanswered -= event.command not in HANDSHAKE

    def start(self) -> None:
        """Give commands, whose replies the input may hold."""
        partition = 0 if self.session.dialect.has_partitions else None
        self.session.sub("t", "c", partition=partition, ordered=partition is not None)
        self.session.set_rdy(10)
        self.unanswered += 1
        if self.choices & PUBLISH:
            self.session.pub("t", b"body", partition=partition)
            self.unanswered += 1


def lookup(data: bytes) -> None:
    """A reply of nsqlookupd is an answer or a RemoteProtocolError."""
    for parse in (parse_lookup, parse_nodes, parse_listlookup):
        with suppress(RemoteProtocolError):
            parse(data)
    error_text(data)


class FakeTransport:
    """A connection from which ``data`` comes, in two pieces."""

    def __init__(self, data: bytes) -> None:
        self._pieces = [data[: len(data) // 2], data[len(data) // 2 :], b""]

    async def send_all(self, data: bytes, deadline: float) -> None:
        """Take a request."""

    async def recv(self, deadline: float) -> bytes:
        """The next piece."""
        return self._pieces.pop(0) if self._pieces else b""

    def unwatch(self) -> None:
        """It may be closed by any thread."""

    def close(self) -> None:
        """End it."""


class FakeClient(HttpClient):
    """A client whose server says ``data``."""

    data = b""

    def _take_idle(self, loop: Any) -> None:
        return None

    async def _connect(self, loop: Any, deadline: float) -> Any:
        return FakeTransport(self.data)


client = FakeClient(Endpoint("http", Address("127.0.0.1", 1)), max_reply_size=4096)


def http(data: bytes) -> None:
    """A reply to a request is a Reply or an HttpError."""
    client.data = data
    with suppress(HttpError):
        reply = client.request("GET", "/stats")
        assert len(reply.body) <= 4096
    client._idle.clear()


def snappy(data: bytes) -> None:
    """A stream decodes to the same bytes however it is cut, and then is broken, or waits for more, in either way."""
    if len(data) < 2:
        return
    cuts, data = sorted(cut % (len(data) - 1) for cut in data[:2]), data[2:]
    assert decoded([data]) == decoded([data[: cuts[0]], data[cuts[0] : cuts[1]], data[cuts[1] :]])


def decoded(pieces: list[bytes]) -> tuple[bytes, bool]:
    """What a stream in pieces holds, and whether it is broken behind that."""
    layer, found = SnappyLayer(), b""
    for piece in pieces:
        layer.feed(piece)
        try:
            while read := layer.read():
                assert len(read) <= PIECE_SIZE
                found += read
        except RemoteProtocolError:
            return found, True
        assert not layer.holds_more()
    return found, False


if __name__ == "__main__":
    target = {"session": session, "lookup": lookup, "http": http, "snappy": snappy}[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
