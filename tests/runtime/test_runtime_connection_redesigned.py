"""A connection to a redesigned server, played by a script: partitions, receipts, errors that break the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import pack
from typing import Any

import pytest
from gevent import Timeout
from gevent.event import AsyncResult
from support.blocking import Connection
from support.peers import Peer, PeerServer, RecordingOwner
from support.waiting import WAIT

from nsq_fast import _codec
from nsq_fast._codec import encode_frame, encode_message
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    ConnectionClosed,
    ConnectionLost,
    ExtNotSupported,
    LocalProtocolError,
    NotLeader,
    NotWritable,
    OrderedSubRequired,
)
from nsq_fast.protocol.dialect import receipt_in

REDESIGNED = "0.3.7-HA.1.13.0"
ID = pack(">QQ", (2 << 50) + 0x0A20, 0x0A0A0A0A0A0A0A0A)
OK = encode_frame(0, b"OK")

Open = Callable[..., Connection]


@pytest.fixture
def owner() -> RecordingOwner:
    return RecordingOwner()


@pytest.fixture
def open_to(owner: RecordingOwner) -> Iterator[Open]:
    """``open_to(script, **options)``: a connection to a server that runs the script after its handshake."""
    servers: list[PeerServer] = []
    connections: list[Connection] = []

    def make(script: Callable[[Peer], Any], version: str = REDESIGNED, **options: Any) -> Connection:
        def play(peer: Peer) -> None:
            peer.handshake(version=version)
            script(peer)

        servers.append(PeerServer(play))
        connections.append(Connection(servers[-1].address, ConnectionConfig(**options), owner))
        connections[-1].connect()
        return connections[-1]

    yield make
    for conn in connections:
        conn.close(ConnectionClosed("the test is over"))
    for server in servers:
        server.stop()


def test_messages_know_their_partition_and_place(open_to: Open, owner: RecordingOwner) -> None:
    got: list[bytes] = []

    def script(peer: Peer) -> None:
        got.append(peer.read_line())
        peer.send(OK + encode_message(5, 1, ID, b"body", offset=640, raw_size=34))
        got.append(peer.read(21))
        peer.read_all()

    conn = open_to(script)
    conn.subscribe("t", "c", partition=2, ordered=True)
    owner.wait(lambda: owner.messages)
    (message,) = owner.messages
    assert (conn.partition, message.partition, message.offset, message.raw_size) == (2, 2, 640, 34)
    message.finish()
    conn.close()
    assert got == [b"SUB_ORDERED t c 2", b"FIN " + ID + b"\n"]


def test_a_wrong_form_of_subscription_is_raised_and_says_what_to_set(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.read_line()
        peer.frame(1, b"E_SUB_ORDER_IS_MUST this topic is configured only allow ordered sub")

    conn = open_to(script)
    with pytest.raises(OrderedSubRequired, match="set ordered=True"):
        conn.subscribe("t", "c", partition=2)
    assert isinstance(owner.wait_end(), OrderedSubRequired)


def test_an_original_server_is_not_asked_for_partitions(open_to: Open, owner: RecordingOwner) -> None:
    lines: list[bytes] = []

    def script(peer: Peer) -> None:
        lines.append(peer.read_line())
        peer.ok()
        peer.read_all()

    conn = open_to(script, version="1.3.0")
    with pytest.raises(LocalProtocolError):
        conn.subscribe("t", "c", partition=0)
    with pytest.raises(LocalProtocolError):
        conn.subscribe("t", "c", ordered=True)
    with pytest.raises(LocalProtocolError):
        conn.request(_codec.pub_trace("t", 1, b"x"), "PUB_TRACE", "token")
    assert conn.partition is None
    conn.subscribe("t", "c")
    conn.close()
    assert lines == [b"SUB t c"]
    assert not owner.failed


def test_receipts_come_as_the_data_of_the_reply(open_to: Open, owner: RecordingOwner) -> None:
    data = b"OK" + pack(">QQQI", 12, 77, 342, 36)

    def script(peer: Peer) -> None:
        assert peer.read_line() == b"PUB_TRACE t 1"
        peer.read_body()
        peer.frame(0, data)
        peer.read_all()

    conn = open_to(script)
    conn.request(_codec.pub_trace("t", 77, b"traced", 1), "PUB_TRACE", "token")
    owner.wait(lambda: owner.replies)
    assert owner.replies == [("token", data)]
    assert receipt_in(owner.replies[0][1]) == (12, 77, 342, 36)
    assert receipt_in(b"OK") is None


def test_an_error_to_mpub_ext_closes_the_connection(open_to: Open, owner: RecordingOwner) -> None:
    ended: AsyncResult[bytes] = AsyncResult()

    def script(peer: Peer) -> None:
        assert peer.read_line() == b"MPUB_EXT t 0"
        peer.read_body()
        assert peer.read_line() == b"PUB t 0"
        peer.read_body()
        refusal = encode_frame(1, b"E_EXT_NOT_SUPPORT ext content not supported in topic t")
        peer.send(refusal + encode_frame(1, b"E_INVALID invalid command [[0 0 0 5]]"))
        ended.set(peer.read_all())

    conn = open_to(script)
    conn.request(_codec.mpub_ext("t", [(b"{}", b"x")], 0), "MPUB_EXT", "ext")
    conn.request(_codec.pub("t", b"x", 0), "PUB", "behind")
    assert isinstance(owner.wait_end(), ExtNotSupported)
    assert not conn.is_open
    (_, refused), (_, lost) = owner.failed
    assert [token for token, _ in owner.failed] == ["ext", "behind"]
    assert isinstance(refused, ExtNotSupported)
    assert isinstance(lost, ConnectionLost)
    assert lost.outcome_unknown
    with Timeout(WAIT):
        assert ended.get() == b""


def test_publishes_go_on_after_a_leader_has_moved(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        for reply in (
            OK,
            encode_frame(1, b"E_FAILED_ON_NOT_WRITABLE "),
            encode_frame(1, b"E_FAILED_ON_NOT_LEADER "),
            OK,
        ):
            peer.read_line()
            peer.read_body()
            peer.send(reply)
        peer.read_all()

    conn = open_to(script)
    for number in range(4):
        conn.request(_codec.pub("t", b"x", 0), "PUB", number)
    owner.wait(lambda: len(owner.replies) == 2)
    assert [token for token, _ in owner.replies] == [0, 3]
    assert [(token, type(error)) for token, error in owner.failed] == [(1, NotWritable), (2, NotLeader)]
    assert conn.is_open


def test_a_leader_that_is_gone_ends_the_subscription(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.read_line()
        peer.send(OK + encode_message(5, 1, ID, b"body"))
        peer.read(21)
        peer.frame(1, b"E_FAILED_ON_NOT_LEADER ")
        peer.read_all()

    conn = open_to(script)
    conn.subscribe("t", "c", partition=0)
    owner.wait(lambda: owner.messages)
    owner.messages[0].finish()
    assert isinstance(owner.wait_end(), NotLeader)
    assert [type(error) for error in owner.errors] == [NotLeader]
