"""Writing under pressure: a peer that takes nothing, one that takes it late, greenlets that write at once."""

from __future__ import annotations

import socket as plain_socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest
from gevent.event import Event
from support.blocking import Connection
from support.peers import Peer, PeerServer, RecordingOwner, message
from support.waiting import WAIT, until

from nsq_fast import _codec
from nsq_fast._codec import Message
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import ConnectionLost
from nsq_fast.names import Address

MIB = 1 << 20
Open = Callable[..., tuple[Connection, RecordingOwner]]


@pytest.fixture
def open_to() -> Iterator[Open]:
    servers: list[PeerServer] = []
    connections: list[Connection] = []

    def make(
        script: Callable[[Peer], Any], owner: RecordingOwner | None = None, **options: Any
    ) -> tuple[Connection, RecordingOwner]:
        owner = owner or RecordingOwner()
        servers.append(PeerServer(script))
        connections.append(Connection(servers[-1].address, ConnectionConfig(**options), owner))
        connections[-1].connect()
        return connections[-1], owner

    yield make
    for conn in connections:
        conn.close(ConnectionLost("the test is over"))
    for server in servers:
        server.stop()


def test_greenlets_that_write_at_once_never_mix(open_to: Open) -> None:
    go = Event()
    bodies: list[bytes] = []

    def script(peer: Peer) -> None:
        peer.handshake()
        go.wait()
        for _ in range(60):
            assert peer.read_line() == b"PUB t"
            bodies.append(peer.read_body())
            peer.ok()

    conn, owner = open_to(script)

    def publish(letter: int) -> None:
        for number in range(20):
            conn.request(_codec.pub("t", bytes([letter]) * (100_000 + number)), "PUB", (letter, number))
            gevent.sleep(0)

    gevent.joinall([gevent.spawn(publish, letter) for letter in b"abc"], raise_error=True)
    assert conn.is_blocked  # 6 MB, and nobody reads
    go.set()
    owner.wait(lambda: len(owner.replies) == 60)
    assert not conn.is_blocked
    for letter in b"abc":
        mine = [body for body in bodies if body[0] == letter]
        assert mine == [bytes([letter]) * (100_000 + number) for number in range(20)]
    assert [token for token, _ in owner.replies] == [(body[0], len(body) - 100_000) for body in bodies]


def test_peer_that_takes_nothing_is_given_up(open_to: Open) -> None:
    def script(peer: Peer) -> None:
        peer.handshake()
        Event().wait(WAIT)

    conn, owner = open_to(script, write_timeout=0.1)
    conn.request(_codec.pub("t", bytes(16 * MIB)), "PUB", "big")
    end = owner.wait_end()
    assert isinstance(end, ConnectionLost)
    assert "took no byte" in str(end)
    assert [token for token, _ in owner.failed] == ["big"]
    with pytest.raises(ConnectionLost):
        conn.write(b"NOP\n")


def test_peer_that_takes_a_little_now_and_then_is_not_given_up(open_to: Open) -> None:
    def script(peer: Peer) -> None:
        peer.handshake()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            peer.read(3 * MIB // 2)  # that much the system has room for again, so that it takes bytes
            gevent.sleep(0.05)  # sleep: a peer that takes a little now and then
        while peer.recv():
            pass

    conn, owner = open_to(script, write_timeout=1.0)  # less than it takes in all, and much more than between two
    conn.write(bytes(64 * MIB))
    until(lambda: not conn.is_blocked)
    assert conn.is_open
    assert owner.ends == []


def test_reset_while_bytes_wait_is_reported_once_and_raises_nowhere(open_to: Open) -> None:
    def script(peer: Peer) -> None:
        peer.handshake()
        peer.read(100)
        peer.reset()

    conn, owner = open_to(script)
    conn.request(_codec.pub("t", bytes(16 * MIB)), "PUB", 1)
    assert isinstance(owner.wait_end(), ConnectionLost)
    assert not conn.is_blocked
    assert len(owner.failed) == 1


def test_error_frame_before_a_reset_is_still_read(open_to: Open) -> None:
    def script(peer: Peer) -> None:
        peer.handshake()
        peer.read_line()
        peer.frame(1, b"E_BAD_TOPIC no")
        peer.sock.shutdown(plain_socket.SHUT_RD)

    conn, owner = open_to(script)
    conn.request(_codec.pub("t", bytes(100)), "PUB", 1)
    owner.wait_end()
    assert [error.__class__.__name__ for _, error in owner.failed] == ["BadTopic"]


def test_close_flushes_what_a_slow_peer_has_not_taken_yet(open_to: Open) -> None:
    taken: list[int] = []

    def script(peer: Peer) -> None:
        peer.handshake()
        gevent.sleep(0.05)  # sleep: a peer that begins late
        taken.append(len(peer.read_all()))

    conn, _ = open_to(script)
    conn.write(bytes(16 * MIB))
    conn.close(timeout=10)
    assert taken == [16 * MIB]


class FloodingNsqd(threading.Thread):
    """Sends messages from a thread of its own, as fast as they are taken, so that the reader never has to wait."""

    def __init__(self, count: int) -> None:
        super().__init__(daemon=True)
        self._listener = plain_socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._flood = b"".join(message(number, b"x" * 600) for number in range(1000)) * (count // 1000)

    def run(self) -> None:
        sock, _ = self._listener.accept()
        with sock, self._listener, sock.makefile("rb") as lines:
            lines.read(4)
            lines.readline()
            lines.read(struct.unpack(">I", lines.read(4))[0])
            sock.sendall(struct.pack(">II", 6, 0) + b"OK")
            lines.readline()
            sock.sendall(struct.pack(">II", 6, 0) + b"OK")
            lines.readline()
            sock.sendall(self._flood)
            lines.readline()


def test_flood_does_not_keep_others_from_running() -> None:
    server = FloodingNsqd(20_000)
    server.start()
    owner = RecordingOwner()
    conn = Connection(Address(*server.address), ConnectionConfig(), owner)
    conn.connect()
    ticks = 0
    stop = Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            gevent.sleep(0)

    ticker = gevent.spawn(tick)
    conn.subscribe("t", "c")
    conn.set_rdy(2500)
    owner.wait(lambda: len(owner.messages) == 20_000)
    stop.set()
    ticker.join()
    assert ticks > 50  # 13 MB at 128 KiB between yields
    conn.close(ConnectionLost("done"))
    server.join(WAIT)


def test_answers_are_told_of_when_they_are_sent_and_when_they_are_lost(open_to: Open) -> None:
    told: list[tuple[list[int], int, bool]] = []

    class Owner(RecordingOwner):
        def on_answers(self, conn: Connection, finished: list[Message], requeued: int, is_sent: bool) -> None:
            told.append(([int(message.id, 16) for message in finished], requeued, is_sent))

    def script(peer: Peer) -> None:
        peer.accept_sub()
        peer.messages(1, 2, 3, 4)
        peer.read_all()

    owner = Owner()
    conn, _ = open_to(script, owner=owner)
    conn.subscribe("t", "c")
    owner.wait(lambda: len(owner.messages) == 4)
    conn.finished.append(owner.messages[0])
    conn.flush()
    assert told == [([1], 0, True)]
    owner.messages[1].finish()
    owner.messages[2].requeue(0)
    assert len(told) == 1  # they wait for the end of the turn
    conn.close(ConnectionLost("for the test"))
    assert told[1:] == [([2], 1, False)]
    conn.finished.append(owner.messages[3])
    conn.flush()
    assert told[2:] == [([4], 0, False)]


def test_a_fault_in_building_what_is_sent_ends_the_connection_loudly(
    open_to: Open, no_unseen_errors: list[Any]
) -> None:
    def script(peer: Peer) -> None:
        peer.accept_sub()
        peer.messages(1)
        peer.read_all()

    conn, owner = open_to(script)
    conn.subscribe("t", "c")
    owner.wait(lambda: owner.messages)

    def fail(messages: list[Any]) -> bytes:
        raise ZeroDivisionError

    conn.session.fin_many = fail  # type: ignore[method-assign]
    owner.messages[0].finish()
    assert isinstance(owner.wait_end(), ConnectionLost)
    assert [kind for _, kind, _ in no_unseen_errors] == [ZeroDivisionError]
    no_unseen_errors.clear()


def test_a_fault_in_counting_answers_does_not_end_the_connection(open_to: Open, no_unseen_errors: list[Any]) -> None:
    def script(peer: Peer) -> None:
        peer.accept_sub()
        peer.messages(1)
        assert peer.read_line() == b"FIN %016x" % 1
        peer.messages(2)
        peer.read_all()

    conn, owner = open_to(script)
    conn.subscribe("t", "c")
    owner.wait(lambda: owner.messages)

    def fail(*_: object) -> None:
        conn._on_answers = None
        raise ZeroDivisionError

    conn._on_answers = fail
    owner.messages[0].finish()
    owner.wait(lambda: len(owner.messages) == 2)
    assert [kind for _, kind, _ in no_unseen_errors] == [ZeroDivisionError]
    no_unseen_errors.clear()
