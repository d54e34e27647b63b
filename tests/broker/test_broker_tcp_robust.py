"""Clients that misbehave, and silent ones."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from gevent import Timeout, socket
from gevent.event import Event
from support.http import ask
from support.waiting import WAIT, until
from support.wire import WireClient

from nsq_fast.broker.net import Faults, Listener, bind

SEED = 20240607
WORDS = [
    b"IDENTIFY\n", b"\0\0\0\2{}", b"SUB t c\n", b"RDY 5\n", b"FIN ", b"0123456789abcdef", b"\n", b"REQ ", b" 0\n",
    b"TOUCH ", b"CLS\n", b"NOP\n", b"PUB t\n", b"\0\0\0\1x", b"MPUB t\n", b"\0\0\0\x0a\0\0\0\2\0\0\0\1a\0\0\0\1b",
    b"DPUB t 0\n", b"AUTH\n", b"\xff\xff\xff\xff", b"\r\n", b" ", b"\0", b"PUB t#ephemeral\n",
]  # fmt: skip


def talk(address: Any, data: bytes) -> None:
    """Send, half-close, and read what comes until the server closes."""
    with contextlib.closing(socket.create_connection(address, timeout=5)) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"  V2" + data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass


def test_garbage_ends_in_an_error_or_an_end(embedded: Any) -> None:
    server = embedded()
    rng = random.Random(SEED)
    for _ in range(150):
        talk(server.tcp_address, b"".join(rng.choices(WORDS, k=rng.randrange(1, 12))))
        talk(server.tcp_address, rng.randbytes(rng.randrange(1, 200)))
    WireClient(server.tcp_address).publish("still", b"there")


def test_connection_that_ends_at_any_place(embedded: Any) -> None:
    server = embedded()
    script = b"IDENTIFY\n\0\0\0\2{}SUB t c\nRDY 5\nPUB t\n\0\0\0\4bodyMPUB t\n\0\0\0\x0d\0\0\0\1\0\0\0\5abcdeCLS\n"
    for end in range(len(script)):
        talk(server.tcp_address, script[:end])
    until(lambda: not server.nsqd.clients)
    assert server.nsqd.topics["t"].channels["c"].clients == {}


@pytest.mark.parametrize("magic", [b"", b" ", b"  V", b"GET / HTTP/1.1\r\n\r\n"])
def test_other_protocols(address: Any, magic: bytes) -> None:
    with contextlib.closing(socket.create_connection(address, timeout=5)) as sock:
        sock.sendall(magic)
        with contextlib.suppress(OSError):  # the server may have reset the connection by now
            sock.shutdown(socket.SHUT_WR)
        reply = b""
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(1000):
                reply += data
        assert reply in (b"", struct.pack(">ii", 18, 1) + b"E_BAD_PROTOCOL")


def test_client_that_never_reads_is_dropped_and_its_messages_come_back(start_nsqd: Any) -> None:
    server = start_nsqd()
    deaf = WireClient(server.tcp_address, heartbeat_interval=1000, msg_timeout=1000)
    deaf.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.subscribe("t", "c", rdy=100)
    publisher = WireClient(server.tcp_address)
    for _ in range(40):
        publisher.publish("t", b"x" * 1_000_000)
    for _ in range(30):
        with contextlib.suppress(ConnectionError):
            deaf.send(b"NOP\n")
        publisher.send(b"NOP\n")
        with Timeout(0.1, False):
            publisher.frame()

    def clients() -> int:
        return len(
            ask(server.http_address, "GET", "/stats?format=json&topic=t").json["topics"][0]["channels"][0]["clients"]
        )

    until(lambda: clients() == 0)
    hungry = WireClient(server.tcp_address)
    hungry.subscribe("t", "c", rdy=10)
    bodies = [len(hungry.message().body) for _ in range(40)]
    assert bodies == [1_000_000] * 40


def test_client_that_publishes_and_never_reads_is_not_listened_to_for_ever(embedded: Any) -> None:
    server = embedded()
    sock = socket.create_connection(server.tcp_address, timeout=1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.sendall(b"  V2")

    def flood() -> None:
        for _ in range(3000):
            sock.sendall(b"PUB t\n\0\0\0\1x" * 1000)

    with pytest.raises(TimeoutError):
        flood()
    WireClient(server.tcp_address).publish("t", b"others go on")


class Served:
    """A server that reads once from each connection: ``reads`` has what came, in the order of its coming."""

    def __init__(self) -> None:
        self.begun = 0
        self.reads: list[bytes] = []
        self.may_end = Event()
        self.faults = Faults()
        self.listener = Listener("test", bind("127.0.0.1:0"), self._handle, self.faults)
        self.listener.start()

    def _handle(self, sock: Any, _address: Any) -> None:
        self.begun += 1
        self.reads.append(sock.recv(100))
        self.may_end.wait()

    def connect(self, count: int) -> list[Any]:
        """Connections that it has accepted."""
        opened = [socket.create_connection(self.listener.address, timeout=WAIT) for _ in range(count)]
        until(lambda: self.faults.accepted == count)
        return opened


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served()
    yield server
    server.may_end.set()
    server.listener.stop()


def test_a_connection_is_served_from_its_first_bytes_on(served: Served) -> None:
    silent, speaking, closing = served.connect(3)
    assert served.begun == 0
    speaking.sendall(b"hello")
    until(lambda: served.reads == [b"hello"])
    closing.close()
    until(lambda: served.reads == [b"hello", b""])
    assert served.begun == 2
    silent.close()
    speaking.close()
