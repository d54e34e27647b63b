"""The session in other hands: a blocking socket, asyncio, in processes that cannot import gevent.

Each program holds a whole conversation with a tiny server: handshake, publish,
subscribe, receive, finish, close.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.waiting import WAIT

NO_GEVENT = """
import sys

class NoGevent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("gevent", "greenlet", "nsq_fast.runtime"):
            raise ImportError(name + " is not here")

sys.meta_path.insert(0, NoGevent())

from nsq_fast._codec import Message
from nsq_fast.config import ConnectionConfig
from nsq_fast.protocol.events import Disconnected, Ready, Reply
from nsq_fast.protocol.session import Session

PORT = int(sys.argv[1])
session = Session(ConnectionConfig(hostname="embedder", user_agent="test"))
seen = []

def step(event):
    '''What to write after an event: the program of both embedders.'''
    if isinstance(event, Message):
        seen.append(event.body.decode())
        answer = session.fin(event)
        return answer + session.cls() if len(seen) == 3 else answer
    if isinstance(event, Ready):
        return session.mpub("t", [b"one", b"two", b"three"], token="published")
    if isinstance(event, Reply) and event.token == "published":
        return session.sub("t", "c", token="subscribed")
    if isinstance(event, Reply) and event.token == "subscribed":
        return session.set_rdy(2)
    if isinstance(event, Reply) and event.command == "CLS":
        return None
    return event.send
"""

BLOCKING = """
import socket
sock = socket.create_connection(("127.0.0.1", PORT))
sock.sendall(session.connect())
done = False
while not done:
    for event in session.receive(sock.recv(65536)):
        data = step(event)
        if data is None or isinstance(event, Disconnected):
            done = True
        elif data:
            sock.sendall(data)
print(",".join(seen), session.in_flight, "gevent" in sys.modules)
"""

ASYNCIO = """
import asyncio

class Client(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        self.over = asyncio.get_running_loop().create_future()
        transport.write(session.connect())

    def data_received(self, data):
        for event in session.receive(data):
            answer = step(event)
            if answer is None:
                self.transport.close()
            elif answer:
                self.transport.write(answer)

    def connection_lost(self, error):
        (end,) = session.receive(b"")
        self.over.set_result(end)

async def main():
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", PORT)
    end = await client.over
    assert not end.pending, end

asyncio.run(main())
print(",".join(seen), session.in_flight, "gevent" in sys.modules)
"""


class TinyNsqd(threading.Thread):
    """One connection, one topic, and every frame in two pieces."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.finished: list[bytes] = []
        self.identify: dict[str, Any] = {}

    def run(self) -> None:
        sock, _ = self._listener.accept()
        with sock, sock.makefile("rb") as lines:
            assert lines.read(4) == b"  V2"
            self._bodies: list[bytes] = []
            for line in lines:
                self._execute(line.split(), lines, sock)

    def close(self) -> None:
        self._listener.close()
        self.join(WAIT)

    def _execute(self, words: list[bytes], lines: Any, sock: socket.socket) -> None:
        if words[0] == b"IDENTIFY":
            self.identify = json.loads(self._body(lines))
            self._send(sock, 0, b'{"version":"1.3.0","max_rdy_count":2500,"auth_required":false}')
            self._send(sock, 0, b"_heartbeat_")
        elif words[0] == b"MPUB":
            data = self._body(lines)
            at = 4
            while at < len(data):
                (size,) = struct.unpack_from(">I", data, at)
                self._bodies.append(data[at + 4 : at + 4 + size])
                at += 4 + size
            self._send(sock, 0, b"OK")
        elif words[0] == b"SUB":
            self._send(sock, 0, b"OK")
        elif words[0] == b"RDY":
            for number, body in enumerate(self._bodies):
                self._send(sock, 2, struct.pack(">qH", 1, 1) + b"%016x" % number + body)
        elif words[0] == b"FIN":
            self.finished.append(words[1])
        elif words[0] == b"CLS":
            self._send(sock, 0, b"CLOSE_WAIT")

    def _body(self, lines: Any) -> bytes:
        (size,) = struct.unpack(">I", lines.read(4))
        data: bytes = lines.read(size)
        return data

    def _send(self, sock: socket.socket, kind: int, data: bytes) -> None:
        frame = struct.pack(">II", len(data) + 4, kind) + data
        sock.sendall(frame[:7])
        sock.sendall(frame[7:])


@pytest.fixture
def server() -> Iterator[TinyNsqd]:
    nsqd = TinyNsqd()
    nsqd.start()
    yield nsqd
    nsqd.close()


@pytest.mark.parametrize("program", [pytest.param(BLOCKING, id="blocking"), pytest.param(ASYNCIO, id="asyncio")])
def test_session_without_gevent(server: TinyNsqd, program: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", NO_GEVENT + program, str(server.port)], capture_output=True, text=True, timeout=30
    )
    assert run.stderr == ""
    assert run.stdout.split() == ["one,two,three", "0", "False"]
    server.join(WAIT)
    assert server.finished == [b"%016x" % number for number in range(3)]
    assert server.identify["hostname"] == "embedder"
