"""A connection against a scripted server: commands, gathered writes, replies, the end."""

from __future__ import annotations

import socket as plain_socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest
from gevent.event import Event
from support.blocking import Connection
from support.peers import Peer, PeerServer, RecordingOwner, frame
from support.peers import message as message_frame
from support.waiting import WAIT, holds

from nsq_fast import _codec
from nsq_fast._codec import Message
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    BadTopic,
    ConnectionClosed,
    ConnectionLost,
    HeartbeatMissed,
    Invalid,
    LocalProtocolError,
    RemoteProtocolError,
    SubFailed,
)
from nsq_fast.names import Address

Open = Callable[..., Connection]


@pytest.fixture
def owner() -> RecordingOwner:
    return RecordingOwner()


@pytest.fixture
def open_to(owner: RecordingOwner) -> Iterator[Open]:
    """``open_to(script, **options)``: a connection to a server that runs the script."""
    servers: list[PeerServer] = []
    connections: list[Connection] = []

    def make(script: Callable[[Peer], Any], **options: Any) -> Connection:
        servers.append(PeerServer(script))
        conn = Connection(servers[-1].address, ConnectionConfig(**options), options_owner)
        connections.append(conn)
        conn.connect()
        conn.server = servers[-1]  # type: ignore[attr-defined]
        return conn

    options_owner = owner
    yield make
    for conn in connections:
        conn.close(ConnectionClosed("the test is over"))
    for server in servers:
        server.stop()


def subscribe(conn: Connection) -> None:
    conn.subscribe("t", "c")


def test_connect_negotiates_and_says_who_we_are(open_to: Open) -> None:
    said: dict[str, Any] = {}

    def script(peer: Peer) -> None:
        said.update(peer.handshake(max_rdy_count=100))
        peer.read_all()

    conn = open_to(script, topology_zone="z")
    assert conn.is_open
    assert conn.info.max_rdy_count == 100
    assert conn.local_address is not None
    assert conn.local_address.host == "127.0.0.1"
    assert said["topology_zone"] == "z"
    assert said["hostname"]
    with pytest.raises(LocalProtocolError):
        conn.connect()


def test_messages_come_as_a_list_and_are_answered(open_to: Open, owner: RecordingOwner) -> None:
    got: list[bytes] = []

    def script(peer: Peer) -> None:
        peer.accept_sub()
        got.append(peer.read_line())
        peer.messages(1, 2, 3)
        got.extend(peer.read_line() for _ in range(3))
        got.append(peer.read_all())

    conn = open_to(script)
    subscribe(conn)
    conn.set_rdy(3)
    owner.wait(lambda: len(owner.messages) == 3)
    first, second, third = owner.messages
    assert owner.batches == [3]
    assert conn.in_flight == 3
    assert first.received_at == conn.last_message_at > 0
    first.touch()
    second.requeue(500)
    third.finish()
    assert conn.in_flight == 1
    conn.close()
    conn.server.wait()  # type: ignore[attr-defined]
    assert got == [b"RDY 3", b"TOUCH %016x" % 1, b"REQ %016x 500" % 2, b"FIN %016x" % 3, b""]


def test_what_is_written_in_one_turn_leaves_in_one_piece(open_to: Open, owner: RecordingOwner) -> None:
    reads: list[bytes] = []

    def script(peer: Peer) -> None:
        peer.accept_sub()
        assert peer.read_line() == b"RDY 100"
        peer.messages(*range(100))
        while data := peer.recv():
            reads.append(data)

    conn = open_to(script)
    subscribe(conn)
    conn.set_rdy(100)
    owner.wait(lambda: len(owner.messages) == 100)
    for message in owner.messages:
        message.finish()
    conn.set_rdy(7)
    assert conn.in_flight == 0
    conn.close()
    conn.server.wait()  # type: ignore[attr-defined]
    assert reads == [b"RDY 7\n" + b"".join(b"FIN %016x\n" % number for number in range(100))]


def test_messages_whose_handlers_returned_are_finished_in_one_buffer(open_to: Open, owner: RecordingOwner) -> None:
    left: list[bytes] = []

    def script(peer: Peer) -> None:
        peer.accept_sub()
        peer.messages(1, 2)
        left.append(peer.read_all())

    conn = open_to(script)
    subscribe(conn)
    owner.wait(lambda: len(owner.messages) == 2)
    conn.finished.extend(owner.messages)
    conn.flush()
    conn.close()
    conn.server.wait()  # type: ignore[attr-defined]
    assert left == [b"FIN %016x\nFIN %016x\n" % (1, 2)]


def test_last_finish_is_not_lost_when_unread_messages_are_waiting(open_to: Open, owner: RecordingOwner) -> None:
    left: list[bytes] = []
    go = Event()

    def script(peer: Peer) -> None:
        peer.accept_sub()
        peer.messages(1)
        go.wait()
        peer.messages(*range(2, 3000))  # nobody reads these before the end
        left.append(peer.read_all())

    conn = open_to(script)
    subscribe(conn)
    owner.wait(lambda: owner.messages)
    owner.messages[0].finish()
    go.set()
    conn.close()
    conn.server.wait()  # type: ignore[attr-defined]
    assert left == [b"FIN %016x\n" % 1]
    assert len(owner.messages) == 1


def test_owner_hooks_are_told_of_answers(open_to: Open, owner: RecordingOwner) -> None:
    told: list[Any] = []
    owner.on_finish = lambda conn, message: told.append(("fin", message.id))  # type: ignore[attr-defined]
    owner.on_requeue = lambda conn, message, delay, backoff: told.append(("req", delay, backoff))  # type: ignore[attr-defined]
    owner.on_touch = lambda conn, message: told.append(("touch", message.id))  # type: ignore[attr-defined]
    owner.requeue_delay_ms = lambda conn, message: 1234  # type: ignore[attr-defined]

    def script(peer: Peer) -> None:
        peer.accept_sub()
        peer.messages(1, 2, 3)
        peer.read_all()

    subscribe(open_to(script))
    owner.wait(lambda: len(owner.messages) == 3)
    owner.messages[0].touch()
    owner.messages[0].finish()
    owner.messages[1].requeue()
    owner.messages[2].requeue(5, backoff=False)
    assert told == [("touch", b"%016x" % 1), ("fin", b"%016x" % 1), ("req", 1234, True), ("req", 5, False)]


def test_replies_come_in_order_and_a_failed_one_fails_alone(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.handshake(version="0.3.7-HA.1")
        for _ in range(3):
            peer.read_line()
            peer.read_body()
        peer.ok()
        peer.frame(1, b"E_PUB_FAILED slow disk")
        peer.ok()
        peer.read_all()

    conn = open_to(script)
    for token in "abc":
        conn.request(_codec.pub("t", b"x"), "PUB", token)
    owner.wait(lambda: len(owner.replies) == 2)
    assert owner.replies == [("a", b"OK"), ("c", b"OK")]
    assert [token for token, _ in owner.failed] == ["b"]
    assert conn.is_open


def test_fatal_error_ends_the_connection_and_spares_the_rest_the_doubt(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.handshake()
        peer.read_line()
        peer.frame(1, b"E_BAD_TOPIC PUB topic")
        peer.read_all()

    conn = open_to(script)
    conn.request(_codec.pub("t", b"x"), "PUB", 1)
    conn.request(_codec.pub("t", b"x"), "PUB", 2)
    assert isinstance(owner.wait_end(), BadTopic)
    (first, refused), (second, lost) = owner.failed
    assert (first, second) == (1, 2)
    assert isinstance(refused, BadTopic)
    assert isinstance(lost, ConnectionLost)
    assert lost.outcome_unknown is False


@pytest.mark.parametrize("ending", [Peer.reset, lambda peer: None], ids=["reset", "end"])
def test_pending_publishes_have_an_unknown_outcome(
    open_to: Open, owner: RecordingOwner, ending: Callable[[Peer], None]
) -> None:
    def script(peer: Peer) -> None:
        peer.handshake()
        peer.read_line()
        ending(peer)

    conn = open_to(script)
    conn.request(_codec.pub("t", b"x"), "PUB", "token")
    assert isinstance(owner.wait_end(), ConnectionLost)
    ((token, error),) = owner.failed
    assert token == "token"
    assert isinstance(error, ConnectionLost)
    assert error.outcome_unknown


def test_heartbeats_are_answered(open_to: Open, owner: RecordingOwner) -> None:
    answers: list[bytes] = []

    def script(peer: Peer) -> None:
        peer.accept_sub()
        peer.frame(0, b"_heartbeat_")
        answers.append(peer.read_line())

    subscribe(open_to(script))
    owner.wait_end()
    assert answers == [b"NOP"]
    assert owner.heartbeats == 1


@pytest.mark.slow
def test_two_silent_intervals_are_the_end(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.handshake()
        peer.read_all()

    conn = open_to(script, heartbeat_interval=1.0)
    assert isinstance(owner.wait_end(), HeartbeatMissed)
    assert not conn.is_open


def test_failed_answers_do_not_end_the_connection(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.accept_sub()
        peer.messages(1)
        peer.read_line()
        peer.frame(1, b"E_FIN_FAILED FIN 0000000000000001 failed ID not in flight")
        peer.read_all()

    conn = open_to(script)
    subscribe(conn)
    owner.wait(lambda: owner.messages)
    owner.messages[0].finish()
    owner.wait(lambda: owner.answer_failed)
    assert owner.answer_failed[0][1] == b"%016x" % 1
    assert conn.is_open


def test_error_that_answers_no_command(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.accept_sub()
        peer.frame(1, b"E_INVALID cannot FIN in current state")

    subscribe(open_to(script))
    assert isinstance(owner.wait_end(), Invalid)
    assert [type(error) for error in owner.errors] == [Invalid]


def test_refused_subscription_is_raised(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.handshake()
        peer.read_line()
        peer.frame(1, b"E_SUB_FAILED too many consumers")

    conn = open_to(script)
    with pytest.raises(SubFailed):
        subscribe(conn)
    assert isinstance(owner.wait_end(), SubFailed)
    assert owner.failed == []


def test_subscription_without_reply_is_given_up(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.handshake()
        peer.read_all()

    conn = open_to(script, connect_timeout=0.1)
    with pytest.raises(ConnectionLost, match="no reply to SUB"):
        subscribe(conn)
    owner.wait_end()


def test_rdy_is_sent_when_it_changes_and_never_above_the_limit(open_to: Open) -> None:
    left: list[bytes] = []

    def script(peer: Peer) -> None:
        peer.accept_sub(max_rdy_count=10)
        left.append(peer.read_all())

    conn = open_to(script)
    subscribe(conn)
    for count in (5, 5, 0):
        conn.set_rdy(count)
    with pytest.raises(LocalProtocolError):
        conn.set_rdy(11)
    conn.close()
    conn.server.wait()  # type: ignore[attr-defined]
    assert left == [b"RDY 5\nRDY 0\n"]


def test_cls_then_close_wait(open_to: Open, owner: RecordingOwner) -> None:
    left: list[bytes] = []

    def script(peer: Peer) -> None:
        peer.accept_sub()
        assert peer.read_line() == b"CLS"
        peer.messages(9)
        peer.frame(0, b"CLOSE_WAIT")
        left.append(peer.read_all())

    conn = open_to(script)
    subscribe(conn)
    conn.start_close()
    conn.start_close()
    conn.set_rdy(5)
    owner.wait(lambda: owner.close_waits)
    owner.messages[0].finish()
    conn.close()
    conn.server.wait()  # type: ignore[attr-defined]
    assert left == [b"FIN %016x\n" % 9]


def test_close_takes_the_replies_that_are_on_their_way(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.handshake()
        peer.read_all()
        peer.ok()

    conn = open_to(script)
    conn.request(_codec.pub("t", b"x"), "PUB", "late")
    conn.close()
    assert owner.replies == [("late", b"OK")]
    assert isinstance(owner.wait_end(), ConnectionClosed)


def test_close_does_not_wait_for_ever(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.handshake()
        Event().wait(WAIT)

    conn = open_to(script)
    with gevent.Timeout(WAIT):
        conn.close(timeout=0.05)
    owner.wait_end()


def test_close_from_a_callback_and_again(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.accept_sub()
        peer.frame(0, b"_heartbeat_")
        peer.read_all()

    owner.on_heartbeat = lambda conn: conn.close()  # type: ignore[method-assign]
    conn = open_to(script)
    subscribe(conn)
    owner.wait_end()
    conn.close()
    conn.close(ConnectionLost("again"))
    assert len(owner.ends) == 1


def test_after_the_end_commands_raise_and_messages_stay_unanswered(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.accept_sub()
        peer.messages(1)

    conn = open_to(script)
    subscribe(conn)
    owner.wait_end()
    message = owner.messages[0]
    commands: list[Callable[[], Any]] = [
        message.finish, message.requeue, message.touch, conn.start_close, lambda: conn.set_rdy(1),
        lambda: conn.write(b"NOP\n"), lambda: conn.request(b"", "PUB", 1),
    ]  # fmt: skip
    for command in commands:
        with pytest.raises(ConnectionLost) as caught:
            command()
        assert caught.value.outcome_unknown is False
    assert not message.has_responded()
    assert owner.failed == []


def test_garbage_ends_the_connection_after_what_came_before_it(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.accept_sub()
        peer.send(b"".join([b"\0\0\0\x1e\0\0\0\2", bytes(10), b"0123456789abcdef", b"\xff\xff\xff\xff HTTP/1.1"]))
        Event().wait(WAIT)

    subscribe(open_to(script))
    assert isinstance(owner.wait_end(), RemoteProtocolError)
    assert [message.body for message in owner.messages] == [b""]


def test_half_a_frame_and_the_end(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.accept_sub()
        peer.send(b"\0\0\0\x20\0\0")

    subscribe(open_to(script))
    assert isinstance(owner.wait_end(), ConnectionLost)


def test_owner_that_fails_ends_its_connection_loudly(
    open_to: Open, owner: RecordingOwner, no_unseen_errors: list[Any]
) -> None:
    def script(peer: Peer) -> None:
        peer.accept_sub()
        peer.messages(1)
        peer.read_all()

    def fail(conn: Connection, messages: list[Message]) -> None:
        raise ZeroDivisionError

    owner.on_messages = fail  # type: ignore[method-assign]
    subscribe(open_to(script))
    assert isinstance(owner.wait_end(), ConnectionLost)
    gevent.sleep(0)
    assert [kind for _, kind, _ in no_unseen_errors] == [ZeroDivisionError]
    no_unseen_errors.clear()


def test_nothing_is_handed_over_after_a_callback_has_closed(open_to: Open, owner: RecordingOwner) -> None:
    def script(peer: Peer) -> None:
        peer.accept_sub()
        peer.send(message_frame(1) + frame(0, b"_heartbeat_") + message_frame(2))
        peer.read_all()

    owner.on_heartbeat = lambda conn: conn.close()  # type: ignore[method-assign]
    subscribe(open_to(script))
    owner.wait_end()
    assert [got.id for got in owner.messages] == [b"%016x" % 1]


def test_every_pending_command_is_reported_whatever_the_owner_does(open_to: Open, owner: RecordingOwner) -> None:
    told: list[Any] = []

    def fail(conn: Connection, token: Any, error: Exception) -> None:
        told.append(token)
        raise ZeroDivisionError

    def script(peer: Peer) -> None:
        peer.handshake()
        peer.read_line()

    owner.on_failed = fail  # type: ignore[method-assign]
    conn = open_to(script)
    for token in range(1, 4):
        conn.request(_codec.pub("t", b"x"), "PUB", token)
    owner.wait_end()
    assert told == [1, 2, 3]


def beat(listener: plain_socket.socket, over: threading.Event) -> None:
    """A server in a thread of its own: OK to IDENTIFY, then heartbeats, whatever this thread's hub is doing."""
    sock, _ = listener.accept()
    with sock:
        sock.sendall(frame(0, b"OK"))
        while not over.wait(0.1):
            sock.sendall(frame(0, b"_heartbeat_"))


@pytest.mark.slow
def test_process_that_was_busy_does_not_take_its_server_for_dead(owner: RecordingOwner) -> None:
    over = threading.Event()
    with plain_socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=beat, args=(listener, over), daemon=True)
        server.start()
        conn = Connection(Address(*listener.getsockname()), ConnectionConfig(heartbeat_interval=1.0), owner)
        conn.connect()
        time.sleep(2.1)  # sleep: the whole process, hub and reader included, hears nothing for more than two intervals
        owner.wait(lambda: owner.heartbeats > 15)
        holds(lambda: conn.is_open, 0.15)
        conn.close(ConnectionLost("done"))
        over.set()
        server.join(WAIT)
