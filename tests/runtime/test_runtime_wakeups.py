"""Callers whose publishes were stored together: resumed in order, whatever each of them does then."""

from __future__ import annotations

import gevent
from gevent import Greenlet, Timeout
from gevent.event import Event
from support.peers import Peer
from support.publishing import Command, Nsqds, Producers
from support.waiting import WAIT


def test_callers_are_resumed_in_order_whatever_they_do_next(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    producer = new_producer(publish_nsqd(), linger=0.01)
    producer.publish("t", b"first")
    order: list[tuple[int, int]] = []
    callers: list[Greenlet] = []

    def call(number: int) -> None:
        for step in range(3):
            producer.publish("t", b"x")
            order.append((step, number))
            if number == 1 and step == 0:
                return
            if number == 3 and step == 0:
                callers[5].kill(block=False)
            if number == 4:
                gevent.sleep(0)

    callers += [gevent.spawn(call, number) for number in range(8)]
    with Timeout(WAIT):
        gevent.joinall(callers, raise_error=True)
    assert [number for step, number in order if step == 0] == list(range(8))
    assert sorted(number for step, number in order if step == 2) == [0, 2, 3, 4, 6, 7]
    assert producer.stats()["held"] == 0


def test_one_that_was_interrupted_keeps_nobody_waiting(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    go = Event()

    def answer(peer: Peer, command: Command) -> None:
        go.wait()
        peer.ok()

    server = publish_nsqd()
    producer = new_producer(server, linger=0.001)
    producer.publish("t", b"first")
    server.answer = answer
    callers = [gevent.spawn(producer.publish, "t", b"x") for _ in range(5)]
    server.wait_commands(2)
    callers[0].kill()
    callers[3].kill(block=False)
    go.set()
    gevent.joinall(callers, timeout=WAIT)
    assert [caller.value for caller in (callers[1], callers[2], callers[4])] == [b"OK"] * 3
