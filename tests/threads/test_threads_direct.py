"""Publishes that another thread sends by itself while the hub thread sleeps: what holds for all holds for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gevent import get_hub, sleep, spawn
from gevent.event import Event
from support.peers import Peer, frame
from support.publishing import Command, EndOfPeer, PublishNsqd, agree, refuse, stay_mute
from support.waiting import PROCESS, WAIT, holds, until

from nsq_fast.errors import PublishFailed, PublishTimeout
from nsq_fast.runtime import CrossingProducer, PublishRequest, extras_of
from nsq_fast.runtime.crossing.hub_thread import hub_thread
from nsq_fast.runtime.publishing.publish import Publish

ROOT = Path(__file__).parent.parent.parent
NO_EXTRAS = extras_of(None, None, None, None, None)


class Result:
    """A promise that is looked at."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None

    def set(self, value: Any) -> None:
        self.value = value

    set_here = set

    def set_exception(self, error: BaseException) -> None:
        self.error = error

    def wait(self) -> Any:
        until(lambda: self.value is not None or self.error is not None, every=0.001)
        return self.value if self.error is None else self.error


Start = Callable[..., CrossingProducer]


@pytest.fixture
def server() -> Iterator[PublishNsqd]:
    server = PublishNsqd()
    yield server
    server.stop()


@pytest.fixture
def start(server: PublishNsqd) -> Iterator[Start]:
    """A factory of producers; this thread reads replies to what it has sent directly, unless it is ``busy``."""
    made: list[tuple[CrossingProducer, Any]] = []

    def make(*, busy: bool = False, **options: Any) -> CrossingProducer:
        producer = new_producer(str(server.address), **options)
        watcher = None
        descriptor = producer.direct.allow()
        if descriptor is not None and not busy:
            watcher = get_hub().loop.io(descriptor, 1)
            watcher.start(producer.direct.readable)
        made.append((producer, watcher))
        return producer

    yield make
    for producer, watcher in made:
        in_thread(producer.close, 0.1)
        if watcher is not None:
            watcher.close()


def new_producer(address: str, **options: Any) -> CrossingProducer:
    thread = hub_thread()
    producer: CrossingProducer = in_thread(lambda: CrossingProducer([address], **options).live_in(thread))
    in_thread(producer.start)
    return producer


def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    return hub_thread().call(function, *arguments)


def hand_over(producer: CrossingProducer, body: bytes) -> Result:
    result = Result()
    producer.hand_over(PublishRequest("t", body, None, None, NO_EXTRAS, result, waits=True))
    return result


def send_directly(producer: CrossingProducer, body: bytes) -> tuple[Publish, Result]:
    """Send it directly, however many have to be handed over before that is possible."""
    result = Result()

    def try_it() -> Publish | None:
        publish = producer.direct.try_send("t", body, result)
        if publish is None:
            hand_over(producer, b"another").wait()
        return publish

    return until(try_it, every=0.0), result


def real_bodies(server: PublishNsqd) -> list[bytes]:
    return [body for body in server.bodies if body != b"another"]


def answer_but(body: bytes, answer: Callable[[Peer, Command], object]) -> Callable[[Peer, Command], object]:
    """``answer`` to the first publish of this body, OK to all else."""
    met: list[bytes] = []

    def decide(peer: Peer, command: Command) -> None:
        if body in command.bodies and not met:
            met.append(body)
            answer(peer, command)
        else:
            agree(peer, command)

    return decide


def cut(peer: Peer, command: Command) -> None:
    raise EndOfPeer


def test_what_comes_one_at_a_time_is_sent_directly(server: PublishNsqd, start: Start) -> None:
    producer = start()
    for number in range(20):
        assert send_directly(producer, b"%d" % number)[1].wait() == b"OK"
    assert real_bodies(server) == [b"%d" % number for number in range(20)]
    stats = in_thread(producer.stats)
    assert (stats["pending"], stats["held"], stats["stored"]) == (0, 0, len(server.bodies))
    assert producer.direct.sent == 20


def test_a_reply_that_the_other_thread_does_not_read_is_read_by_the_hub_thread(
    server: PublishNsqd, start: Start
) -> None:
    producer = start(busy=True)
    for number in range(3):
        assert send_directly(producer, b"%d" % number)[1].wait() == b"OK"
    assert real_bodies(server) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("busy", [False, True], ids=["the other thread reads", "it does not"])
def test_heartbeats_are_answered_all_the_same(server: PublishNsqd, start: Start, busy: bool) -> None:
    answered = Event()

    def answer(peer: Peer, command: Command) -> None:
        peer.frame(0, b"_heartbeat_")
        peer.ok()
        assert peer.read_line() == b"NOP"
        answered.set()

    server.answer = answer_but(b"x", answer)
    producer = start(busy=busy)
    assert send_directly(producer, b"x")[1].wait() == b"OK"
    assert answered.wait(WAIT)


def test_a_heartbeat_between_two_publishes_is_answered(server: PublishNsqd, start: Start) -> None:
    producer = start()
    send_directly(producer, b"x")[1].wait()
    (peer,) = server.peers
    peer.frame(0, b"_heartbeat_")
    peer.frame(0, b"_heartbeat_")
    assert send_directly(producer, b"y")[1].wait() == b"OK"
    until(lambda: server.nops == 2)


def test_the_end_of_an_idle_connection_is_noticed(server: PublishNsqd, start: Start) -> None:
    producer = start(max_backoff_duration=0.1)
    send_directly(producer, b"x")[1].wait()
    server.peers[0].sock.shutdown(2)
    until(lambda: len(server.peers) == 2)
    assert send_directly(producer, b"y")[1].wait() == b"OK"


def test_an_error_is_that_of_the_publish(server: PublishNsqd, start: Start) -> None:
    server.answer = answer_but(b"x", lambda peer, command: refuse(peer, b"E_BAD_MESSAGE no"))
    producer = start(max_backoff_duration=0.1)
    error = send_directly(producer, b"x")[1].wait()
    assert isinstance(error, PublishFailed)
    assert "E_BAD_MESSAGE no" in str(error)
    assert not error.possibly_stored


def test_a_reply_in_pieces_is_one(server: PublishNsqd, start: Start) -> None:
    def answer(peer: Peer, command: Command) -> None:
        for byte in frame(0, b"OK"):
            peer.send(bytes([byte]))
            sleep(0.001)  # sleep: it is read meanwhile

    server.answer = answer_but(b"x", answer)
    producer = start()
    assert send_directly(producer, b"x")[1].wait() == b"OK"
    assert send_directly(producer, b"y")[1].wait() == b"OK"


def test_nothing_is_sent_directly_by_a_producer_that_nobody_allows_it(server: PublishNsqd) -> None:
    producer = new_producer(str(server.address))
    for _ in range(30):
        assert hand_over(producer, b"x").wait() == b"OK"
        assert producer.direct.try_send("t", b"direct", Result()) is None
    in_thread(producer.close)
    assert server.bodies == 30 * [b"x"]


@pytest.mark.parametrize("options", [{"linger": 0.001}, {"publish_timeout": 0.9}, {"histograms": True}], ids=str)
def test_options_that_it_cannot_keep_are_kept(server: PublishNsqd, start: Start, options: dict[str, Any]) -> None:
    producer = start(**options)
    for _ in range(30):
        assert hand_over(producer, b"x").wait() == b"OK"
        assert producer.direct.try_send("t", b"direct", Result()) is None


@pytest.mark.parametrize("codec", ["snappy", "deflate"])
def test_a_connection_that_compresses_is_left_to_the_hub_thread(nsqd_process: Any, codec: str) -> None:
    producer = new_producer(nsqd_process.address, **{codec: True})
    producer.direct.allow()
    for _ in range(30):
        assert hand_over(producer, b"x").wait() == b"OK"
        assert producer.direct.try_send("t", b"direct", Result()) is None
    in_thread(producer.close)


def test_what_is_out_of_the_usual_is_handed_over(server: PublishNsqd, start: Start) -> None:
    producer = start(max_msg_size=1000)
    for body in (b"", 1001 * b"x", bytearray(b"x"), "text", None):
        assert send_directly(producer, b"usual")[1].wait() == b"OK"
        assert producer.direct.try_send("t", body, Result()) is None
    for topic in ("another", "bad topic", b"t", None):
        assert send_directly(producer, b"usual")[1].wait() == b"OK"
        assert producer.direct.try_send(topic, b"x", Result()) is None
    assert set(real_bodies(server)) == {b"usual"}


def test_no_publish_passes_another(server: PublishNsqd, start: Start) -> None:
    producer = start()
    server.answer = answer_but(b"first", stay_mute)
    _, first = send_directly(producer, b"first")
    assert producer.direct.try_send("t", b"too early", Result()) is None
    second = hand_over(producer, b"second")
    until(lambda: b"second" in server.bodies)
    holds(lambda: producer.direct.try_send("t", b"too early", Result()) is None)
    assert real_bodies(server) == [b"first", b"second"]
    for peer in server.peers:  # the reply to the first was missing: the second's was taken for it
        peer.ok()
    assert (first.wait(), second.wait()) == (b"OK", b"OK")


def test_nothing_passes_what_was_handed_over_just_now(server: PublishNsqd, start: Start) -> None:
    producer = start()
    for _ in range(20):
        send_directly(producer, b"x")[1].wait()
        before = hand_over(producer, b"before")
        late = Result()
        passed = producer.direct.try_send("t", b"after", late)
        before.wait()
        if passed is not None:  # the hub thread was quick: it had its reply already
            late.wait()
        assert server.bodies[-1 if passed is None else -2] == b"before"


def test_one_whose_connection_ends_is_tried_again(server: PublishNsqd, start: Start) -> None:
    producer = start(max_backoff_duration=0.1, retry_max_delay=0.1)
    server.answer = answer_but(b"x", cut)
    assert send_directly(producer, b"x")[1].wait() == b"OK"
    assert real_bodies(server) == [b"x", b"x"]
    assert send_directly(producer, b"on the new connection")[1].wait() == b"OK"


def test_one_whose_connection_ends_may_be_stored(server: PublishNsqd, start: Start) -> None:
    producer = start(retry_unknown_outcome=False, max_backoff_duration=0.1)
    server.answer = answer_but(b"x", cut)
    error = send_directly(producer, b"x")[1].wait()
    assert isinstance(error, PublishFailed)
    assert error.possibly_stored
    assert real_bodies(server) == [b"x"]


def test_one_without_reply_has_its_deadline(server: PublishNsqd, start: Start) -> None:
    producer = start(publish_timeout=1.0)
    server.answer = answer_but(b"x", stay_mute)
    error = send_directly(producer, b"x")[1].wait()
    assert isinstance(error, PublishTimeout)
    assert error.possibly_stored


def test_one_that_is_abandoned_may_be_stored(server: PublishNsqd, start: Start) -> None:
    producer = start()
    server.answer = answer_but(b"x", stay_mute)
    publish, result = send_directly(producer, b"x")
    request = PublishRequest("t", b"x", None, None, NO_EXTRAS, result, waits=True)
    request.parts = [publish]
    assert in_thread(producer.abandon, request) is True
    for peer in server.peers:
        peer.ok()
    until(lambda: in_thread(producer.stats)["held"] == 0)
    assert (result.value, result.error) == (None, None)


def test_what_the_system_does_not_take_at_once_follows(server: PublishNsqd, start: Start) -> None:
    large = bytes(range(256)) * 4 * 12 * 1024
    producer = start(max_msg_size=2 * len(large), max_body_size=2 * len(large))
    _, result = send_directly(producer, large)  # the server, in this thread, has read nothing of it yet
    assert result.wait() == b"OK"
    assert real_bodies(server) == [large]
    assert send_directly(producer, b"next")[1].wait() == b"OK"


def test_it_counts_for_max_pending(server: PublishNsqd, start: Start) -> None:
    producer = start(max_pending=1)
    server.answer = answer_but(b"x", stay_mute)
    send_directly(producer, b"x")
    result = Result()
    try:
        producer.hand_over(PublishRequest("t", b"y", None, None, NO_EXTRAS, result, waits=False))
    except PublishFailed as error:
        result.error = error
    assert isinstance(result.wait(), PublishFailed)
    until(lambda: real_bodies(server) == [b"x"])


def test_closing_waits_for_it(server: PublishNsqd, start: Start) -> None:
    producer = start()
    may_reply = Event()

    def answer(peer: Peer, command: Command) -> None:
        may_reply.wait(WAIT)
        agree(peer, command)

    server.answer = answer_but(b"x", answer)
    _, result = send_directly(producer, b"x")
    closing = spawn(in_thread, producer.close)
    until(lambda: not producer.is_running)
    assert producer.direct.try_send("t", b"late", Result()) is None
    assert result.value is None
    may_reply.set()
    closing.get(timeout=WAIT)
    assert result.value == b"OK"
    assert real_bodies(server) == [b"x"]


HUB_FAILS = """
import asyncio, gevent
from nsq_fast import aio, threads
from nsq_fast.errors import PublishFailed
async def main():
    producer = aio.Producer("{address}")
    await producer.start()
    for number in range(100):
        await producer.publish("t", b"%d" % number)
    last = asyncio.ensure_future(producer.publish("t", b"mute"))
    await asyncio.sleep(0)
    ending = threads.Producer("{address}")
    ending.start()
    ending.publish_nowait("t", b"end").add_done_callback(lambda future: gevent.get_hub().loop.break_())
    try:
        await asyncio.wait_for(last, 50)
    except PublishFailed as error:
        print(error.possibly_stored)
asyncio.run(main())
"""
FORK = """
import asyncio, os
from nsq_fast import aio
producer = aio.Producer("{address}")
async def publish(text, count):
    for number in range(count):
        await producer.publish("t", b"%s %d" % (text, number))
loop = asyncio.new_event_loop()
loop.run_until_complete(producer.start())
loop.run_until_complete(publish(b"before", 100))
child = os.fork()
if not child:
    loop = asyncio.new_event_loop()  # the parent's shares its descriptors with it
    loop.run_until_complete(producer.start())
    loop.run_until_complete(publish(b"child", 100))
    os._exit(0)
loop.run_until_complete(publish(b"parent", 100))
loop.run_until_complete(producer.close())
print(os.waitpid(child, 0) == (child, 0))
"""


@pytest.mark.parametrize("program", [HUB_FAILS, FORK], ids=["the hub thread fails", "a fork"])
def test_what_becomes_of_the_hub_thread_is_told(server: PublishNsqd, program: str) -> None:
    server.answer = answer_but(b"mute", stay_mute)
    command = [sys.executable, "-c", program.replace("{address}", str(server.address))]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, check=False, cwd=ROOT)

    done = get_hub().threadpool.apply(run)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert len(set(server.bodies)) == len(server.bodies)
