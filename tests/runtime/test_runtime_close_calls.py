"""close() and join() called from where nothing can wait, and at the wrong time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest
from gevent.event import Event
from support.publishing import Nsqds, Producers
from support.scripted_nsqd import ScriptedNsqd
from support.waiting import WAIT, until

from nsq_fast import Consumer, Producer
from nsq_fast.client.greenlets import is_interrupting
from nsq_fast.errors import NotRunning

Call = Callable[[Callable[[], Any]], Any]


def at_the_signal(close: Callable[[], Any]) -> None:
    signal.signal(signal.SIGUSR1, lambda number, frame: close())


def kill() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def in_the_main_greenlet(close: Callable[[], Any]) -> None:
    at_the_signal(close)
    kill()


def while_the_hub_waits(close: Callable[[], Any]) -> None:
    at_the_signal(close)
    gevent.get_hub().threadpool.apply(kill)


def in_a_callback_of_the_loop_that_is_interrupted(close: Callable[[], Any]) -> None:
    at_the_signal(close)
    gevent.get_hub().loop.run_callback(kill)


def in_a_callback_of_the_loop(close: Callable[[], Any]) -> None:
    gevent.get_hub().loop.run_callback(close)


def in_a_timer(close: Callable[[], Any]) -> None:
    timer = gevent.get_hub().loop.timer(0.0)
    fired = Event()
    timer.start(lambda: (close(), fired.set()))
    assert fired.wait(WAIT)
    timer.close()


CALLS = [
    in_the_main_greenlet,
    while_the_hub_waits,
    in_a_callback_of_the_loop_that_is_interrupted,
    in_a_callback_of_the_loop,
    in_a_timer,
]


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("call", CALLS)
def test_a_consumer_closes(nsqd: ScriptedNsqd, call: Call) -> None:
    running, release = Event(), Event()
    consumer = Consumer("t", "c", str(nsqd.address), message_handler=lambda c, m: running.set() or release.wait())
    consumer.start(block=False)
    connection = nsqd.connection()
    connection.push(1)
    assert running.wait(10)
    call(consumer.close)
    connection.wait_for(lambda: b"CLS" in connection.words())
    assert not consumer.join(0.01)  # the handler still runs
    release.set()
    assert consumer.join(10)
    assert connection.answered(b"FIN") == [1]


@pytest.mark.parametrize("call", CALLS)
def test_a_producer_closes(publish_nsqd: Nsqds, new_producer: Producers, call: Call) -> None:
    answer = Event()

    def reply(peer: Any, command: Any) -> None:
        answer.wait()
        peer.ok()

    producer = new_producer(publish_nsqd(reply))
    publishing = gevent.spawn(producer.publish, "t", b"x")
    until(lambda: producer.stats()["pending"] == 1)
    call(producer.close)
    until(lambda: not producer.is_running)
    assert not producer.join(0.01)  # the publish is pending
    answer.set()
    assert producer.join(10)
    assert publishing.get(timeout=10) == b"OK"


def test_a_handler_may_wait_for_another_consumer(nsqd: ScriptedNsqd) -> None:
    other = Consumer("other", "c", str(nsqd.address), message_handler=lambda c, m: None)
    other.start(block=False)
    seen: list[bool] = []

    def handler(consumer: Consumer, message: object) -> None:
        other.close()
        seen.append(other.join(0))

    with Consumer("t", "c", str(nsqd.address), message_handler=handler):
        subscribed = until(lambda: [each for each in nsqd.connections if (b"SUB", b"t", b"c") in each.commands])
        subscribed[0].push(1)
        until(lambda: seen == [True])


def test_what_looks_like_a_handler_of_a_signal_and_is_none() -> None:
    def handler(number: int, frame: object) -> bool:
        return is_interrupting()

    assert not handler(15, None)


def fail(sender: object) -> None:
    raise RuntimeError("on purpose")


def test_a_receiver_of_on_close_that_fails_harms_nobody(
    nsqd: ScriptedNsqd, publish_nsqd: Nsqds, new_producer: Producers
) -> None:
    consumer = Consumer("t", "c", str(nsqd.address), message_handler=lambda c, m: None)
    consumer.on_close.connect(fail)
    consumer.start(block=False)
    consumer.close()
    assert consumer.join(0)
    producer = new_producer(publish_nsqd())
    producer.on_close.connect(fail)
    producer.close()
    assert producer.join(0)


def test_join_returns_whatever_ends_a_receiver_of_on_close(nsqd: ScriptedNsqd) -> None:
    def end(consumer: object) -> None:
        raise gevent.GreenletExit

    consumer = Consumer("t", "c", str(nsqd.address), message_handler=lambda c, m: None)
    consumer.on_close.connect(end)
    consumer.start(block=False)
    consumer.close()
    assert consumer.join(0)


def test_join_before_start_says_what_to_do(nsqd: ScriptedNsqd) -> None:
    consumer = Consumer("t", "c", str(nsqd.address), message_handler=lambda c, m: None)
    with pytest.raises(NotRunning, match=r"start\(block=False\) first"):
        consumer.join()
    producer = Producer([str(nsqd.address)])
    with pytest.raises(NotRunning, match=r"call start\(\) first"):
        producer.join()
    consumer.close()
    assert consumer.join(WAIT)
    producer.close()
    assert producer.join(WAIT)
