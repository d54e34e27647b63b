"""A worker that reads its connection by itself, in the reader's place: whatever its handler does, somebody reads."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from select import select
from typing import Any

import gevent
import pytest
from gevent import getcurrent
from gevent.event import Event
from gevent.socket import wait_read
from support.partitions import PartitionNsqd, answers, push_record
from support.waiting import WAIT, until

from nsq_fast import Consumer
from nsq_fast.config import ConnectionConfig
from nsq_fast.names import Address
from nsq_fast.runtime.loop_turns import loop_turns
from nsq_fast.runtime.net import busy_poll
from nsq_fast.runtime.net.busy_poll import BusyPoll
from nsq_fast.runtime.net.spin_reader import HITS, ReplyReader, SpinReader
from nsq_fast.runtime.net.transport import Transport

CONSUME = {"topic": "t", "channel": "c"}

COUNT = 10_000
HEARTBEAT = struct.pack(">II", 15, 0) + b"_heartbeat_"

Consume = Callable[..., Consumer]


NSQD = PartitionNsqd


@pytest.fixture(params=[True, False], ids=["ordered", "plain"])
def consume_both(request: pytest.FixtureRequest, nsqd: PartitionNsqd, consume: Consume) -> Consume:
    """Consume in order, and without."""
    return partial(consume, ordered=request.param, max_in_flight=5, requeue_delay=0)


def sequence_of(message: Any) -> int:
    return int(message.internal_id & ((1 << 50) - 1))


# A worker that reads


def test_a_message_needs_no_switch_to_its_handler(nsqd: PartitionNsqd, consume_both: Consume) -> None:
    consumer = consume_both(lambda consumer, message: handled_in.append(getcurrent()))
    handled_in: list[Any] = []
    heard_in = []
    consumer.on_response.connect(lambda sender, response: heard_in.append(getcurrent()), weak=False)
    connection = nsqd.subscriber(None)
    push_record(connection, 1)
    connection.wait_for(lambda: answers(connection, b"FIN") == [1])
    connection.send(HEARTBEAT)
    connection.wait_for(lambda: b"NOP" in connection.words())
    assert heard_in == handled_in


@pytest.mark.parametrize("is_endless", [False, True])
def test_heartbeats_are_answered_while_a_handler_waits(
    nsqd: PartitionNsqd, consume_both: Consume, is_endless: bool
) -> None:
    release = Event()
    consume_both(lambda consumer, message: release.wait())
    connection = nsqd.subscriber(None)
    push_record(connection, 1)
    for count in range(1, 4):
        connection.send(HEARTBEAT)
        connection.wait_for(lambda count=count: connection.words().count(b"NOP") == count)
    assert not answers(connection, b"FIN")
    if not is_endless:
        release.set()
        connection.wait_for(lambda: answers(connection, b"FIN") == [1])
        push_record(connection, 2)
        connection.wait_for(lambda: answers(connection, b"FIN") == [1, 2])


def test_what_arrives_while_a_handler_waits_is_handled_after_it(nsqd: PartitionNsqd, consume_both: Consume) -> None:
    release, seen = Event(), []

    def handle(consumer: Any, message: Any) -> None:
        seen.append(sequence_of(message))
        release.wait()

    consume_both(handle)
    connection = nsqd.subscriber(None)
    push_record(connection, 1)
    until(lambda: seen == [1])
    push_record(connection, 2)
    connection.send(HEARTBEAT)
    connection.wait_for(lambda: b"NOP" in connection.words())
    assert seen == [1]
    release.set()
    connection.wait_for(lambda: answers(connection, b"FIN") == [1, 2])


@pytest.mark.parametrize("error", [ValueError("no"), gevent.Timeout(1), gevent.GreenletExit()])
def test_a_handler_that_fails_leaves_the_worker_reading(
    nsqd: PartitionNsqd, consume_both: Consume, error: BaseException
) -> None:
    def handle(consumer: Any, message: Any) -> None:
        if sequence_of(message) == 1:
            raise error

    consume_both(handle, max_backoff_duration=0)
    connection = nsqd.subscriber(None)
    push_record(connection, 1)
    connection.wait_for(lambda: answers(connection, b"REQ") == [1])
    push_record(connection, 2)
    connection.wait_for(lambda: answers(connection, b"FIN") == [2])


def test_a_timeout_of_the_handler_ends_nothing_but_the_handler(nsqd: PartitionNsqd, consume_both: Consume) -> None:
    def handle(consumer: Any, message: Any) -> None:
        if sequence_of(message) == 1:
            with gevent.Timeout(0.01):
                Event().wait()

    consume_both(handle, max_backoff_duration=0)
    connection = nsqd.subscriber(None)
    push_record(connection, 1)
    connection.wait_for(lambda: answers(connection, b"REQ") == [1])
    push_record(connection, 2)
    connection.wait_for(lambda: answers(connection, b"FIN") == [2])


def test_closing_lets_the_handler_finish(nsqd: PartitionNsqd, consume_both: Consume) -> None:
    release, running = Event(), Event()

    def handle(consumer: Any, message: Any) -> None:
        running.set()
        release.wait()

    consumer = consume_both(handle)
    connection = nsqd.subscriber(None)
    push_record(connection, 1)
    assert running.wait(WAIT)
    closer = gevent.spawn(consumer.close)
    connection.wait_for(lambda: b"CLS" in connection.words())
    assert not answers(connection, b"FIN")
    release.set()
    closer.join(WAIT)
    assert closer.successful()
    assert answers(connection, b"FIN") == [1]


def test_closing_while_the_worker_waits_for_bytes(nsqd: PartitionNsqd, consume_both: Consume) -> None:
    consumer = consume_both(lambda consumer, message: None)
    push_record(nsqd.subscriber(None), 1)
    nsqd.subscriber(None).wait_for(lambda: answers(nsqd.subscriber(None), b"FIN") == [1])
    workers = [worker.greenlet for pool in consumer.workload.pools for worker in pool.workers]
    with gevent.Timeout(WAIT):
        consumer.close()
    until(lambda: all(worker.dead for worker in workers))


def test_closing_from_the_handler(nsqd: PartitionNsqd, consume_both: Consume) -> None:
    consumer = consume_both(lambda consumer, message: consumer.close())
    push_record(nsqd.subscriber(None), 1)
    assert consumer.join(WAIT)


def test_a_pause_takes_effect_while_the_worker_reads(nsqd: PartitionNsqd, consume_both: Consume) -> None:
    consumer = consume_both(lambda consumer, message: None)
    connection = nsqd.subscriber(None)
    ready = connection.rdy
    consumer.pause()
    connection.wait_rdy(0)
    push_record(connection, 1)  # it was on its way
    connection.wait_for(lambda: answers(connection, b"FIN") == [1])
    consumer.resume()
    connection.wait_rdy(ready)


def test_a_lost_connection_is_followed_by_another(nsqd: PartitionNsqd, consume_both: Consume) -> None:
    consume_both(lambda consumer, message: None)
    for sequence in (1, 2, 3):
        connection = nsqd.subscriber(None)
        push_record(connection, sequence)
        connection.wait_for(lambda connection=connection, s=sequence: answers(connection, b"FIN") == [s])
        connection.close()
        until(lambda: not nsqd.live(None))


def test_a_connection_lost_while_the_handler_waits(nsqd: PartitionNsqd, consume_both: Consume) -> None:
    release = Event()
    consumer = consume_both(lambda consumer, message: release.wait())
    connection = nsqd.subscriber(None)
    push_record(connection, 1)
    until(lambda: consumer.stats().in_flight == 1)
    connection.close()
    until(lambda: not nsqd.live(None))
    release.set()
    connection = nsqd.subscriber(None)
    push_record(connection, 2)
    connection.wait_for(lambda: answers(connection, b"FIN") == [2])
    assert consumer.stats().totals.answers_lost == 1


def test_an_error_that_the_worker_reads_ends_the_connection(nsqd: PartitionNsqd, consume_both: Consume) -> None:
    errors = []
    consumer = consume_both(lambda consumer, message: None)
    consumer.on_error.connect(lambda sender, error: errors.append(str(error)), weak=False)
    connection = nsqd.subscriber(None)
    connection.send(b"garbage, not frames")
    connection.wait_for(lambda: not connection.is_open)
    assert "frame size" in errors[0]
    push_record(nsqd.subscriber(None), 1)


# One read in the place of another


@pytest.fixture
def ends() -> Iterator[tuple[Transport, socket.socket]]:
    listener = socket.create_server(("127.0.0.1", 0))
    transport = Transport.connect(Address(*listener.getsockname()), ConnectionConfig())
    peer, _ = listener.accept()
    yield transport, peer
    transport.close()
    peer.close()
    listener.close()


@pytest.fixture
def reader(ends: tuple[Transport, socket.socket]) -> Iterator[gevent.Greenlet]:
    """Gives what ``recv`` returns, or raises."""

    def read() -> bytes | Exception:
        try:
            return ends[0].recv()
        except Exception as error:
            return error

    greenlet = gevent.spawn(read)
    gevent.sleep(0)
    yield greenlet
    greenlet.kill()


Ends = tuple[Transport, socket.socket]


def test_bytes_go_to_who_reads_instead(ends: Ends, reader: gevent.Greenlet) -> None:
    transport, peer = ends
    other = gevent.spawn(transport.recv_for_reader)
    gevent.sleep(0)
    peer.sendall(b"first")
    assert other.get(timeout=WAIT) == b"first"
    assert not reader.ready()
    peer.sendall(b"second")
    assert reader.get(timeout=WAIT) == b"second"


def test_an_interrupted_one_gets_nothing(ends: Ends, reader: gevent.Greenlet) -> None:
    transport, peer = ends
    transport.interrupt()  # nobody to interrupt: nothing happens
    other = gevent.spawn(transport.recv_for_reader)
    gevent.sleep(0)
    transport.interrupt()
    assert other.get(timeout=WAIT) is None
    peer.sendall(b"bytes")
    assert reader.get(timeout=WAIT) == b"bytes"


def test_one_that_is_woken_by_something_else_gets_nothing(ends: Ends, reader: gevent.Greenlet) -> None:
    transport, peer = ends
    for _ in range(2):  # the second one waits before it tries to read
        other = gevent.spawn(transport.recv_for_reader)
        gevent.sleep(0)
        gevent.get_hub().loop.run_callback(other.switch)
        assert other.get(timeout=WAIT) is None
        other = gevent.spawn(transport.recv_for_reader)
        gevent.sleep(0)
        peer.sendall(b"bytes")
        assert other.get(timeout=WAIT) == b"bytes"
    assert not reader.ready()


def test_a_killed_one_leaves_the_reader_reading(ends: Ends, reader: gevent.Greenlet) -> None:
    transport, peer = ends
    other = gevent.spawn(transport.recv_for_reader)
    gevent.sleep(0)
    other.kill()
    peer.sendall(b"bytes")
    assert reader.get(timeout=WAIT) == b"bytes"


def test_an_error_is_for_the_reader(ends: Ends, reader: gevent.Greenlet) -> None:
    transport, _ = ends
    other = gevent.spawn(transport.recv_for_reader)
    gevent.sleep(0)
    transport.cancel_recv(RuntimeError("enough"))
    assert isinstance(reader.get(timeout=WAIT), RuntimeError)
    assert other.get(timeout=WAIT) is None
    assert transport.receiver is None


def test_closing_ends_both(ends: Ends, reader: gevent.Greenlet) -> None:
    transport, _ = ends
    other = gevent.spawn(transport.recv_for_reader)
    gevent.sleep(0)
    transport.close()
    assert isinstance(reader.get(timeout=WAIT), OSError)
    assert other.get(timeout=WAIT) is None


def test_bytes_that_nobody_reads_keep_nobody_busy(ends: Ends) -> None:
    transport, peer = ends
    peer.sendall(b"first")
    assert transport.recv() == b"first"
    peer.sendall(b"second")
    turns = loop_turns()
    began = turns.iteration
    gevent.sleep(0.05)  # sleep: turns of the loop in that time are counted
    assert turns.iteration - began < 10
    assert not transport._is_watching
    assert transport.recv() == b"second"


def test_only_one_reads_instead(ends: Ends, reader: gevent.Greenlet) -> None:
    transport, peer = ends
    other = gevent.spawn(transport.recv_for_reader)
    gevent.sleep(0)
    assert transport.recv_for_reader() is None
    peer.sendall(b"bytes")
    assert other.get(timeout=WAIT) == b"bytes"


# Trying at once


class Answers:
    """A ``recv_soon`` to which something comes in time each ``every``-th time; 0: never."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.calls = 0

    def __call__(self, fd: int, size: int, microseconds: int) -> bytes | None:
        self.calls += 1
        return b"answer" if self.every and self.calls % self.every == 0 else None


def test_what_comes_at_once_needs_no_hub_but_the_hub_has_its_turn(ends: Any) -> None:
    reader = ReplyReader(ends[1], Answers(1))
    for _ in range(3):
        assert [reader.recv(100) for _ in range(HITS + 2)] == [b"answer"] * HITS + [None] * 2
        assert reader.is_turn_due
        reader.is_turn_due = False


@pytest.mark.parametrize("every", [0, 2, 3])
def test_tries_in_vain_become_rare(ends: Any, every: int) -> None:
    answers = Answers(every)
    reader = SpinReader(ends[1], answers)
    for _ in range(5000):
        reader.recv(100)
    assert answers.calls < 100


def test_a_miss_now_and_then_is_no_reason_to_rest(ends: Any) -> None:
    calls = 0

    def answer(fd: int, size: int, microseconds: int) -> bytes | None:
        nonlocal calls
        calls += 1
        return b"answer" if calls % 4 else None

    reader = SpinReader(ends[1], answer)
    for _ in range(5000):
        reader.recv(100)
    assert calls == 5000


def test_who_is_ready_to_run_comes_first(ends: Ends) -> None:
    transport, peer = ends
    peer.sendall(b"reply")
    wait_read(transport._socket.fileno(), timeout=WAIT)
    ready = gevent.spawn(lambda: True)
    assert transport.recv_at_once() is None
    gevent.sleep(0)
    assert ready.value is True
    loop_turns().at_end(lambda: None)  # nobody waits for what is done at the end
    assert transport.recv_at_once() == b"reply"


@pytest.fixture
def in_turn(ends: Ends, reader: gevent.Greenlet) -> Ends:
    """After so many answers that the hub is to have its turn."""
    transport, _ = ends
    transport.spin_reader = ReplyReader(transport._socket, lambda fd, size, microseconds: b"answer")
    assert [transport.recv_at_once() for _ in range(HITS + 1)] == [b"answer"] * HITS + [None]
    assert transport.spin_reader.is_turn_due
    return ends


def test_timers_and_sockets_have_their_turn_while_an_answer_is_on_its_way(in_turn: Ends) -> None:
    transport, _ = in_turn
    seen = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x")
        readable = gevent.get_hub().loop.io(ours.fileno(), 1)
        timer = gevent.get_hub().loop.timer(0.0)
        with closing(readable), closing(timer):
            readable.start(lambda: (seen.append("socket"), readable.stop()))
            timer.start(seen.append, "timer")
            assert transport.recv_in_turn() is None
    assert sorted(seen) == ["socket", "timer"]
    assert not transport.spin_reader.is_turn_due
    assert transport.recv_at_once() == b"answer"


def test_what_comes_in_the_turn_is_received_and_the_reader_reads_on(in_turn: Ends, reader: gevent.Greenlet) -> None:
    transport, peer = in_turn
    peer.sendall(b"reply")
    assert select([transport._socket], [], [], WAIT)[0]  # the whole thread waits, or the reader would take it
    assert transport.recv_in_turn() == b"reply"
    assert not transport.spin_reader.is_turn_due
    assert not reader.ready()
    peer.sendall(b"next")
    assert reader.get(timeout=WAIT) == b"next"


def test_who_is_woken_in_the_turn_is_told_so(in_turn: Ends) -> None:
    transport, _ = in_turn
    waiting = gevent.spawn(transport.recv_in_turn)
    gevent.get_hub().loop.run_callback(lambda: gevent.get_hub().loop.run_callback(waiting.switch))
    assert waiting.get(timeout=WAIT) is None
    assert transport.spin_reader.is_turn_due


def test_the_end_is_no_miss(ends: Any) -> None:
    assert SpinReader(ends[1], lambda fd, size, microseconds: b"").recv(100) == b""


# Waiting for a moment


@pytest.fixture
def watched(ends: Ends) -> Ends:
    """So that the hub's loop watches the socket."""
    transport, peer = ends
    waiting = gevent.spawn(transport.recv)
    gevent.sleep(0)
    peer.sendall(b"first")
    assert waiting.get(timeout=WAIT) == b"first"
    loop_turns().wait()
    return ends


def test_only_what_comes_quickly_is_waited_for(watched: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_poll, "QUICK", 10.0)
    monkeypatch.setattr(busy_poll, "TURN", 10.0)
    waited = BusyPoll(gevent.get_hub().loop)
    assert not waited.may_begin(), "the first comes after nothing"
    watched[1].sendall(b"second")
    assert waited.may_begin()
    assert waited.wait()
    monkeypatch.setattr(busy_poll, "QUICK", 0.0)
    assert not waited.may_begin(), "too long since the last"


def test_waiting_in_vain_is_not_repeated_soon(watched: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_poll, "QUICK", 10.0)
    monkeypatch.setattr(busy_poll, "TURN", 10.0)
    waited = BusyPoll(gevent.get_hub().loop)
    waited.may_begin()
    assert waited.may_begin()
    assert not waited.wait(), "nothing came"
    watched[1].sendall(b"second")
    assert not waited.may_begin(), "it rests"
    monkeypatch.setattr(busy_poll, "REST", 0.0)
    waited.rest()
    assert waited.may_begin()
    assert waited.wait()


def test_a_loop_without_a_descriptor_waits_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loop:
        fileno = staticmethod(lambda: None)

    monkeypatch.setattr(busy_poll, "QUICK", 10.0)
    waited = BusyPoll(Loop())
    assert [waited.may_begin() for _ in range(5)] == [False] * 5


def test_the_hub_has_its_turn(watched: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_poll, "QUICK", 10.0)
    monkeypatch.setattr(busy_poll, "TURN", -1.0)
    watched[1].sendall(b"second")
    waited = BusyPoll(gevent.get_hub().loop)
    assert [waited.may_begin() for _ in range(5)] == [False] * 5


def test_what_is_there_is_read_without_falling_asleep(watched: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_poll, "QUICK", 10.0)
    monkeypatch.setattr(busy_poll, "TURN", 10.0)
    monkeypatch.setattr(BusyPoll, "wait", lambda self: pytest.fail("it fell asleep"))
    transport, peer = watched
    peer.sendall(b"second")
    assert transport.recv_soon() is None, "the first comes after nothing"
    assert transport.recv_soon() == b"second"


@pytest.fixture
def prompt_nsqd() -> Iterator[Address]:
    """A server in a process of its own that sends COUNT ordered messages, each as soon as it may."""
    program = Path(__file__).parent.parent / "support" / "prompt_nsqd.py"
    with subprocess.Popen([sys.executable, str(program), str(COUNT)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        yield Address("127.0.0.1", int(server.stdout.readline()))
        server.kill()


def test_a_quick_partition_does_not_keep_others_from_running(prompt_nsqd: Address) -> None:
    done, seen, turns = Event(), [], []

    def tick() -> None:
        while not done.wait(0.001):
            turns.append(len(seen))

    def handle(consumer: Any, message: Any) -> None:
        seen.append(message.internal_id)
        if len(seen) == COUNT:
            done.set()

    consumer = Consumer("t", "c", str(prompt_nsqd), message_handler=handle, ordered=True)
    consumer.start(block=False)
    gevent.spawn(tick).join(50)
    consumer.close(drain=False)
    assert seen == list(range(1, COUNT + 1))
    assert len(set(turns)) >= 5
