"""Turns of the loop: timers have theirs however many greenlets are ready, and those who wait come in order."""

from __future__ import annotations

import time
from itertools import pairwise

import gevent
from gevent.event import Event

from nsq_fast.client.greenlets import SLICE, loop_turns


def block(seconds: float) -> None:
    time.sleep(seconds)  # sleep: the loop is kept from its turns


def test_a_loop_is_overdue_after_a_time_slice_without_a_turn() -> None:
    turns = loop_turns()
    turns.wait()
    assert not turns.is_overdue(turns.began_at)
    assert turns.is_overdue(turns.began_at + 2 * SLICE)
    block(2 * SLICE)
    gevent.sleep(0)  # which does not reach the loop
    assert turns.is_overdue(time.monotonic())
    turns.wait()
    assert not turns.is_overdue(turns.began_at)


def test_a_turn_that_was_long_ago_does_not_count() -> None:
    turns = loop_turns()
    turns.wait()
    block(2 * SLICE)
    assert turns.is_overdue(time.monotonic())


def test_those_who_wait_are_resumed_in_order_and_timers_in_between() -> None:
    came: list[int] = []
    resumed: list[int] = []
    fired: list[int] = []

    def work(number: int) -> None:
        for _ in range(3):
            came.append(number)
            loop_turns().wait()
            resumed.append(number)
            block(2 * SLICE)

    def tick() -> None:
        while True:
            gevent.sleep(0.0001)  # sleep: a timer that is always due
            fired.append(len(resumed))

    ticking = gevent.spawn(tick)
    gevent.joinall([gevent.spawn(work, number) for number in range(10)], raise_error=True)
    ticking.kill()
    assert resumed == came
    assert max(after - before for before, after in pairwise([0, *fired])) <= 2


def test_one_who_is_killed_while_waiting_keeps_nobody_else_waiting() -> None:
    done: list[int] = []

    def wait(number: int) -> None:
        loop_turns().wait()
        done.append(number)

    waiting = [gevent.spawn(wait, number) for number in range(3)]
    gevent.sleep(0)
    waiting[0].kill(block=False)
    gevent.joinall(waiting, timeout=10)
    assert done == [1, 2]


def test_what_is_asked_for_comes_at_the_end_of_the_turn_although_one_before_it_is_interrupted() -> None:
    done: list[int] = []
    over = Event()

    def interrupted() -> None:
        done.append(1)
        loop_turns().at_end(lambda: done.append(3))
        raise gevent.GreenletExit

    turns = loop_turns()
    turns.at_end(interrupted)
    turns.at_end(lambda: done.append(2))
    turns.at_end(over.set)
    assert done == []
    assert over.wait(60)
    gevent.sleep(0)
    assert sorted(done) == [1, 2, 3]
