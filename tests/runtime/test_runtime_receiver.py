"""Reading a socket: when who waits for bytes wakes up."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator

import gevent
import pytest
from gevent import socket
from support.waiting import WAIT, until

from nsq_fast.config import ConnectionConfig
from nsq_fast.names import Address
from nsq_fast.runtime.loop_turns import loop_turns
from nsq_fast.runtime.net.transport import Transport


class Pair:
    """A transport, and a plain socket at its other end."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = Address(*server.getsockname())
            self.transport = Transport.connect(address, ConnectionConfig())
            self.peer, _ = server.accept()
        self.peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        """Send, and give the reader the turns of the loop that it needs to notice."""
        self.peer.sendall(data)
        for _ in range(5):
            loop_turns().wait()

    def close(self) -> None:
        self.transport.close()
        self.peer.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_who_waits_for_many_bytes_is_woken_once(pair: Pair) -> None:
    pair.transport.wake_at(3000)
    reader = gevent.spawn(pair.transport.recv)
    for _ in range(2):
        pair.send(b"x" * 1000)
        assert not reader.ready()
    pair.send(b"x" * 1000)
    assert reader.get(timeout=WAIT) == b"x" * 3000


def test_what_is_there_can_be_had_before_the_rest_comes(pair: Pair) -> None:
    pair.transport.wake_at(3000)
    reader = gevent.spawn(pair.transport.recv)
    pair.send(b"few")
    assert not reader.ready()
    pair.transport.wake_at(1)
    assert reader.get(timeout=WAIT) == b"few"
    reader = gevent.spawn(pair.transport.recv)
    until(lambda: pair.transport.receiver is not None)
    pair.send(b"x")
    assert reader.get(timeout=WAIT) == b"x"


def test_the_end_of_the_stream_wakes_who_waits_for_more(pair: Pair) -> None:
    pair.transport.wake_at(3000)
    reader = gevent.spawn(pair.transport.recv)
    pair.send(b"last")
    pair.peer.close()
    assert reader.get(timeout=WAIT) == b"last"
    assert pair.transport.recv() == b""


def test_a_reset_is_the_error_that_a_socket_raises(pair: Pair) -> None:
    pair.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets then
    pair.peer.close()
    with pytest.raises(ConnectionResetError) as caught:
        pair.transport.recv()
    assert caught.value.errno == errno.ECONNRESET
    assert caught.value.strerror == os.strerror(errno.ECONNRESET)


def test_what_the_system_does_not_take_is_given_back(pair: Pair) -> None:
    data = bytes(64 * 1024)
    while (unsent := pair.transport.send_now(data)) is None:
        pass
    assert 0 < len(unsent) <= len(data)
    # Nothing of it can be sent now, which is no error.
    unsent = pair.transport.send_now(b"more")
    assert unsent is not None
    assert bytes(unsent) == b"more"


def test_a_closed_transport_neither_reads_nor_sends(pair: Pair) -> None:
    pair.transport.close()
    loop_turns().wait()  # the socket is closed by the hub
    with pytest.raises(OSError, match="Bad file descriptor"):
        pair.transport.recv()
    with pytest.raises(OSError, match="Bad file descriptor"):
        pair.transport.send_now(b"x")
