"""What a connection to a server of the broker has before anything came from it: no greenlet, no handler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from gevent import socket
from gevent.event import Event
from support.waiting import WAIT, until

from nsq_fast.broker.net import Faults, Listener, bind


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


def test_stopping_closes_the_silent_connections_too(served: Served) -> None:
    silent, speaking = served.connect(2)
    speaking.sendall(b"hello")
    until(lambda: served.reads == [b"hello"])
    served.listener.stop()
    for connection in (silent, speaking):
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        connection.close()
    assert served.begun == 1


def test_a_connection_that_is_refused_is_reset_at_once(served: Served) -> None:
    served.faults.refuse_connections = True
    [refused] = served.connect(1)
    with pytest.raises(ConnectionResetError):
        refused.recv(1)
    refused.close()
    assert served.begun == 0
