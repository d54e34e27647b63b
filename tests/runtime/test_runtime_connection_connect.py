"""Connecting: every stage of the handshake, and what can go wrong in each."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest
from gevent import socket
from gevent.event import Event
from support.blocking import Connection
from support.peers import Peer, PeerServer, RecordingOwner
from support.waiting import WAIT, promptly

from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    AuthFailed,
    AuthFirst,
    ConnectFailed,
    ConnectionClosed,
    ConnectionLost,
    IdentifyFailed,
    RemoteProtocolError,
)
from nsq_fast.names import Address

Connect = Callable[..., Connection]


@pytest.fixture
def connect_to() -> Iterator[Connect]:
    """``connect_to(script, **options)``: connect to a server that runs the script."""
    servers: list[PeerServer] = []
    connections: list[Connection] = []

    def make(script: Callable[[Peer], Any], host: str = "127.0.0.1", **options: Any) -> Connection:
        servers.append(PeerServer(script, host))
        connections.append(Connection(servers[-1].address, ConnectionConfig(**options), RecordingOwner()))
        connections[-1].connect()
        return connections[-1]

    yield make
    for conn in connections:
        conn.close(ConnectionLost("the test is over"))
    for server in servers:
        server.stop()


def cause(connect: Callable[[], Any]) -> BaseException | None:
    with pytest.raises(ConnectFailed) as caught:
        connect()
    return caught.value.__cause__


def at_once(peer: Peer) -> None:
    pass


def after_the_magic(peer: Peer) -> None:
    peer.read(4)


def inside_the_reply(peer: Peer) -> None:
    peer.read_identify()
    peer.send(b"\0\0\1\x34\0\0\0\0{")


def before_the_upgrade(peer: Peer) -> None:
    peer.handshake(deflate=True)


def before_the_reply_to_auth(peer: Peer) -> None:
    peer.handshake(auth_required=True)
    peer.read_line()


STAGES = [at_once, after_the_magic, inside_the_reply, before_the_upgrade, before_the_reply_to_auth]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
@pytest.mark.parametrize("ending", ["end", "reset"])
def test_connection_that_ends_during_the_handshake(connect_to: Connect, stage: Any, ending: str) -> None:
    def script(peer: Peer) -> None:
        stage(peer)
        if ending == "reset":
            peer.reset()

    found = cause(lambda: connect_to(script, deflate=stage is before_the_upgrade, auth_secret="x"))
    assert isinstance(found, OSError)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_server_that_falls_silent_during_the_handshake(connect_to: Connect, stage: Any) -> None:
    def script(peer: Peer) -> None:
        stage(peer)
        peer.read_all()

    with promptly(), pytest.raises(ConnectFailed, match=r"not connected within 0\.1 s"):
        connect_to(script, deflate=stage is before_the_upgrade, auth_secret="x", connect_timeout=0.1)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        struct.pack(">II", 0xFFFFFFFF, 0),
        struct.pack(">II", 1 << 20, 0),
        struct.pack(">II", 12, 0) + b"not json",
        struct.pack(">II", 27, 0) + b'{"max_rdy_count":"2500"}',
        struct.pack(">II", 6, 7) + b"OK",
        struct.pack(">II", 30, 2) + bytes(26),
    ],
)
def test_what_is_no_nsqd_is_refused(connect_to: Connect, reply: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.read_identify()
        peer.send(reply)
        peer.read_all()

    assert isinstance(cause(lambda: connect_to(script, connect_timeout=1)), RemoteProtocolError)


def test_refused_identify(connect_to: Connect) -> None:
    def script(peer: Peer) -> None:
        peer.read_identify()
        peer.frame(1, b"E_IDENTIFY_FAILED IDENTIFY failed")

    assert isinstance(cause(lambda: connect_to(script)), IdentifyFailed)


def test_auth(connect_to: Connect) -> None:
    secrets: list[bytes] = []

    def script(peer: Peer) -> None:
        peer.handshake(auth_required=True)
        assert peer.read_line() == b"AUTH"
        secrets.append(peer.read_body())
        peer.frame(0, b'{"identity":"me","identity_url":"","permission_count":1}')
        peer.read_all()

    conn = connect_to(script, auth_secret="geheim")
    assert secrets == [b"geheim"]
    assert conn.auth is not None
    assert conn.auth.identity == "me"
    assert conn.auth_data is not None
    assert conn.auth_data.startswith(b'{"identity"')


def test_auth_refused(connect_to: Connect) -> None:
    def script(peer: Peer) -> None:
        peer.handshake(auth_required=True)
        peer.read_line()
        peer.frame(1, b"E_AUTH_FAILED AUTH failed")

    assert isinstance(cause(lambda: connect_to(script, auth_secret="wrong")), AuthFailed)


def test_auth_demanded_without_a_secret(connect_to: Connect) -> None:
    def script(peer: Peer) -> None:
        peer.handshake(auth_required=True)
        peer.read_all()

    assert isinstance(cause(lambda: connect_to(script)), AuthFirst)


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        conn = Connection(Address(*taken.getsockname()), ConnectionConfig(), RecordingOwner())
        with pytest.raises(ConnectFailed, match="refused"):
            conn.connect()
    assert not conn.is_open
    conn.close()


def test_host_that_does_not_exist() -> None:
    conn = Connection(Address("no-such-host.invalid", 4150), ConnectionConfig(), RecordingOwner())
    with pytest.raises(ConnectFailed, match="no-such-host"):
        conn.connect()


def answer(peer: Peer) -> None:
    peer.handshake()
    peer.read_all()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 on this machine")
def test_ipv6(connect_to: Connect) -> None:
    try:
        conn = connect_to(answer, host="::1")
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    assert conn.local_address is not None
    assert conn.local_address.host == "::1"


def test_every_address_of_a_host_is_tried(connect_to: Connect) -> None:
    server = PeerServer(answer)  # on IPv4 only, while localhost may have an IPv6 address first
    conn = Connection(Address("localhost", server.address.port), ConnectionConfig(), RecordingOwner())
    conn.connect()
    conn.close()
    server.stop()


def test_local_address(connect_to: Connect) -> None:
    conn = connect_to(answer, local_address="127.0.0.2")
    assert conn.local_address is not None
    assert conn.local_address.host == "127.0.0.2"


def test_close_ends_an_attempt_to_connect() -> None:
    arrived = Event()

    def script(peer: Peer) -> None:
        peer.read_identify()
        arrived.set()
        peer.read_all()

    server = PeerServer(script)
    conn = Connection(server.address, ConnectionConfig(), RecordingOwner())
    attempt = gevent.spawn(cause, conn.connect)
    arrived.wait()
    conn.close()
    assert isinstance(attempt.get(timeout=WAIT), ConnectionClosed)
    server.stop()


def test_killed_connect_closes_its_socket() -> None:
    ended = Event()
    arrived = Event()

    def script(peer: Peer) -> None:
        peer.read_identify()
        arrived.set()
        peer.read_all()
        ended.set()

    server = PeerServer(script)
    attempt = gevent.spawn(Connection(server.address, ConnectionConfig(), RecordingOwner()).connect)
    arrived.wait()
    attempt.kill()
    assert ended.wait(WAIT)
    server.stop()
