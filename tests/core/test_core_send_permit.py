"""A permit to use a socket of another thread: for one command at a time, and for nothing once it is revoked."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from nsq_fast._codec import encode_frame
from nsq_fast._send_permit import SendPermit

OK = encode_frame(0, b"OK")

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The socket that is permitted, and its peer."""
    ours, peer = socket.socketpair()
    with ours, peer:
        ours.setblocking(False)
        peer.setblocking(False)
        yield ours, peer


def granted(ours: socket.socket) -> SendPermit:
    permit = SendPermit()
    permit.grant(ours.fileno())
    return permit


def has_received(peer: socket.socket) -> bytes:
    try:
        return peer.recv(100)
    except BlockingIOError:
        return b""


def test_a_command_and_its_ok_leave_nothing_to_do(pair: Pair) -> None:
    ours, peer = pair
    permit = granted(ours)
    for number in range(3):
        assert permit.send(permit.number, number, b"PUB") == 3
        assert permit.is_used
        assert has_received(peer) == b"PUB"
        peer.send(OK)
        assert permit.receive() == number
        assert not permit.is_used
    assert permit.revoke() is None


def test_what_has_no_reply_is_left_to_the_owner(pair: Pair) -> None:
    permit = granted(pair[0])
    permit.send(permit.number, "token", b"PUB")
    assert permit.receive() is None
    assert permit.revoke() == ("token", None, None)
    assert permit.revoke() is None


def test_only_one_command_is_sent_at_a_time(pair: Pair) -> None:
    ours, peer = pair
    permit = granted(ours)
    number = permit.number
    assert permit.send(number, "first", b"1") == 1
    assert (permit.number, permit.send(number, "second", b"2"), permit.send(0, "third", b"3")) == (0, 0, 0)
    assert has_received(peer) == b"1"


def test_with_a_permit_of_before_nothing_is_sent(pair: Pair) -> None:
    ours, peer = pair
    permit = granted(ours)
    old = permit.number
    permit.revoke()
    assert permit.send(old, "token", b"x") == 0
    permit.grant(ours.fileno())
    assert permit.send(old, "token", b"x") == 0
    assert permit.revoke() is None
    assert has_received(peer) == b""


def test_nothing_is_read_without_a_permit(pair: Pair) -> None:
    ours, peer = pair
    permit = granted(ours)
    permit.revoke()
    peer.send(OK)
    assert permit.receive() is None
    assert ours.recv(100) == OK


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize(
    "data", [OK[:4], OK + OK, encode_frame(0, b"_heartbeat_"), encode_frame(1, b"E_INVALID x"), b""], ids=repr
)
def test_what_is_no_ok_is_for_the_owner(pair: Pair, data: bytes, is_used: bool) -> None:
    ours, peer = pair
    permit = granted(ours)
    if is_used:
        permit.send(permit.number, "token", b"PUB")
    peer.send(data)
    if not data:
        peer.shutdown(socket.SHUT_WR)
    assert permit.receive() is None
    assert permit.has_news
    assert (permit.number, permit.receive()) == (0, None)
    assert permit.revoke() == ("token" if is_used else None, None, data)
    assert not permit.has_news


def test_an_ok_that_nobody_waits_for_is_for_the_owner(pair: Pair) -> None:
    ours, peer = pair
    permit = granted(ours)
    peer.send(OK)
    assert permit.receive() is None
    assert permit.revoke() == (None, None, OK)


def test_what_the_system_does_not_take_is_left_to_the_owner(pair: Pair) -> None:
    permit = granted(pair[0])
    data = bytes(range(256)) * 40_000
    sent = permit.send(permit.number, "token", data)
    assert 0 < sent < len(data)
    assert permit.revoke() == ("token", data[sent:], None)


def test_what_cannot_be_sent_at_all_was_not(pair: Pair) -> None:
    ours, peer = pair
    permit = granted(ours)
    peer.close()
    assert permit.send(permit.number, "token", b"PUB") == 0
    assert (permit.number, permit.is_used, permit.revoke()) == (0, False, None)
