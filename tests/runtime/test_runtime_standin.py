"""A caller that waits for the only reply that is due takes it from the socket itself: and whatever else may come."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import gevent
import pytest
from gevent import Timeout
from gevent.event import Event
from support.peers import Peer, frame
from support.publishing import Command, Nsqds, Producers, refuse, stay_mute
from support.waiting import WAIT, until

from nsq_fast import Producer, errors
from nsq_fast._client import SpinReader, recv_soon
from nsq_fast.broker import BrokerProcess

CROWDED, CROWDED_RESTS, CALM = 0.0005, (240, 3840), 500  # see nsq_fast/_client.pyx, SpinReader
HEARTBEAT = frame(0, b"_heartbeat_")
OK = frame(0, b"OK")
Answer = Callable[[Peer, Command], None]
Ends: TypeAlias = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Two ends of one connection: ours does not block."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def ready_for(publish_nsqd: Nsqds, new_producer: Producers) -> Callable[..., Producer]:
    """A producer that has published once, so that the topic is known and the connection open."""

    def make(answer: Answer, **options: object) -> Producer:
        def answer_second(peer: Peer, command: Command) -> None:
            peer.ok() if command.body == b"first" else answer(peer, command)

        producer = new_producer(publish_nsqd(answer_second), **options)
        assert producer.publish("t", b"first") == b"OK"
        return producer

    return make


@pytest.mark.parametrize(
    "pieces", [[OK], [OK[:3], OK[3:]], [HEARTBEAT, OK], [HEARTBEAT + OK], [HEARTBEAT + OK[:9], OK[9:]]]
)
def test_a_reply_is_understood_however_it_comes(ready_for: Callable[..., Producer], pieces: list[bytes]) -> None:
    def answer(peer: Peer, command: Command) -> None:
        for piece in pieces:
            peer.sock.sendall(piece)
            gevent.sleep(0.005)  # sleep: so that pieces are read one by one

    producer = ready_for(answer)
    assert [producer.publish("t", b"x") for _ in range(3)] == [b"OK"] * 3
    assert producer.stats()["held"] == 0


def test_a_refusal_is_the_callers(ready_for: Callable[..., Producer]) -> None:
    producer = ready_for(lambda peer, command: refuse(peer, b"E_BAD_TOPIC no"), max_publish_attempts=1)
    with pytest.raises(errors.PublishFailed) as caught:
        producer.publish("t", b"x")
    assert isinstance(caught.value.__cause__, errors.BadTopic)


@pytest.mark.parametrize("end", [lambda peer: peer.sock.close(), Peer.reset])
def test_a_connection_that_breaks_leaves_the_outcome_open(
    ready_for: Callable[..., Producer], end: Callable[[Peer], None]
) -> None:
    producer = ready_for(lambda peer, command: end(peer), max_publish_attempts=1)
    with pytest.raises(errors.PublishFailed) as caught:
        producer.publish("t", b"x")
    assert caught.value.possibly_stored
    assert isinstance(caught.value.__cause__, errors.ConnectionLost)


def test_the_deadline_ends_it_and_the_late_reply_is_taken(ready_for: Callable[..., Producer]) -> None:
    late = Event()

    def answer(peer: Peer, command: Command) -> None:
        if command.body == b"slow":
            late.wait()
        peer.ok()

    producer = ready_for(answer)
    with pytest.raises(errors.PublishTimeout):
        producer.publish("t", b"slow", timeout=0.02)
    late.set()
    assert producer.publish("t", b"x") == b"OK"
    until(lambda: producer.stats()["held"] == 0)


def test_an_interrupted_caller_leaves_the_rest_to_the_reader(ready_for: Callable[..., Producer]) -> None:
    late = Event()

    def answer(peer: Peer, command: Command) -> None:
        if command.body == b"slow":
            late.wait()
        peer.ok()

    producer = ready_for(answer)
    with pytest.raises(Timeout), Timeout(0.02):
        producer.publish("t", b"slow")
    late.set()
    assert [producer.publish("t", b"x") for _ in range(3)] == [b"OK"] * 3
    until(lambda: producer.stats()["held"] == 0)


def test_others_may_publish_while_one_waits(ready_for: Callable[..., Producer]) -> None:
    go = Event()

    def answer(peer: Peer, command: Command) -> None:
        go.wait()
        peer.ok()

    producer = ready_for(answer)
    callers = [gevent.spawn(producer.publish, "t", b"%d" % number) for number in range(5)]
    until(lambda: producer.stats()["held"] == 5)
    go.set()
    gevent.joinall(callers, timeout=WAIT)
    assert [caller.value for caller in callers] == [b"OK"] * 5


def test_closing_ends_the_wait(ready_for: Callable[..., Producer]) -> None:
    producer = ready_for(stay_mute)
    gevent.spawn_later(0.01, producer.close, timeout=0.02)
    with Timeout(WAIT), pytest.raises(errors.PublishFailed, match="closed"):
        producer.publish("t", b"x")


def test_a_silent_server_ends_the_wait(ready_for: Callable[..., Producer]) -> None:
    producer = ready_for(stay_mute, heartbeat_interval=1.0, max_publish_attempts=1)
    with Timeout(WAIT), pytest.raises(errors.PublishFailed) as caught:
        producer.publish("t", b"x")
    assert isinstance(caught.value.__cause__, errors.ConnectionLost)


@pytest.fixture
def quick_nsqd() -> Iterator[str]:
    """A server that may answer before the caller falls asleep."""
    with BrokerProcess() as broker:
        yield str(broker.nsqd.tcp)


def test_who_publishes_in_a_loop_lets_others_run(quick_nsqd: str) -> None:
    turns = 0

    def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            gevent.sleep(0)

    with Producer([quick_nsqd]) as producer:
        producer.publish("t", b"first")
        other = gevent.spawn(take_turns)
        for _ in range(640):
            producer.publish("t", b"x")
        other.kill()
    assert turns >= 9


def test_a_server_far_away_is_hardly_tried_and_one_that_comes_near_is_found(ends: Ends) -> None:
    calls = 0

    def recv(fd: int, size: int, microseconds: int) -> bytes | None:
        nonlocal calls
        calls += 1
        return b"OK" if is_near else None

    is_near = False
    reader = SpinReader(ends[0], recv, in_a_row=0)
    assert [reader.recv(10) for _ in range(1000)] == [None] * 1000
    assert calls < 15
    is_near = True
    found = [reader.recv(10) for _ in range(2000)]
    assert found.count(b"OK") > 1500


def test_who_loses_the_core_while_it_tries_rests_for_longer_and_longer(ends: Ends) -> None:
    """Until nobody has wanted the core for a while."""
    took, calls = 2 * CROWDED, 0

    def recv(fd: int, size: int, microseconds: int) -> bytes | None:
        nonlocal calls
        time.sleep(took)  # sleep: others have the core, for so long or longer
        calls += 1
        return None if took else b"OK"

    reader = SpinReader(ends[0], recv, in_a_row=0)
    first, longest = CROWDED_RESTS
    for rest in (first, 4 * first, longest, longest):
        calls = 0
        assert [reader.recv(10) for _ in range(rest + 1)] == [None] * (rest + 1)
        assert calls == 1
    took = 0.0
    assert [reader.recv(10) for _ in range(CALM)] == [b"OK"] * CALM
    took, calls = 2 * CROWDED, 0
    assert [reader.recv(10) for _ in range(first + 1)] == [None] * (first + 1)
    assert calls == 1


def test_what_there_is_is_read_at_once(ends: Ends) -> None:
    ours, theirs = ends
    assert recv_soon(ours.fileno(), 100, 0) is None
    assert recv_soon(ours.fileno(), 100, 30) is None
    theirs.sendall(b"reply")
    assert recv_soon(ours.fileno(), 3, 0) == b"rep"
    assert SpinReader(ours).recv(100) == b"ly"
    theirs.close()
    assert recv_soon(ours.fileno(), 100, 0) == b""


def test_what_another_process_sends_meanwhile_is_read(ends: Ends) -> None:
    ours, theirs = ends
    code = "import os, sys; os.write(1, os.read(int(sys.argv[1]), 9))"
    number = str(theirs.fileno())
    process = subprocess.Popen([sys.executable, "-c", code, number], pass_fds=[theirs.fileno()], stdout=theirs.fileno())
    ours.sendall(b"sent back")
    try:
        assert recv_soon(ours.fileno(), 100, int(WAIT * 1e6)) == b"sent back"
    finally:
        process.wait(WAIT)


def test_a_socket_that_is_closed_or_broken_is_an_error(ends: Ends) -> None:
    ours, theirs = ends
    reader = SpinReader(ours)
    ours.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.recv(100)
    with pytest.raises(ValueError, match="size=5000"):
        recv_soon(theirs.fileno(), 5000, 1)
