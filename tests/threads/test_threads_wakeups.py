"""Threads that wait for their publishes: they are woken a few at a time, and none depends on another one for good."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.publishing import PublishNsqd
from support.waiting import WAIT, until

from nsq_fast.runtime.crossing import publish_reply
from nsq_fast.runtime.crossing.publish_reply import PublishReply
from nsq_fast.runtime.crossing.thread_wakeups import AT_ONCE, ThreadWakeups
from nsq_fast.threads import Producer

ROOT = Path(__file__).parent.parent.parent


class Sleeper:
    """A thread that waits; the test says when it runs."""

    def __init__(self, has_left: bool = False) -> None:
        self.is_awake = False
        self.has_left = has_left

    def wake(self) -> bool:
        self.is_awake = True
        return not self.has_left


class Gatherer:
    """Counts how often it was asked."""

    count = 0

    def ask(self) -> None:
        self.count += 1


def sleeping(wakeups: ThreadWakeups, count: int) -> list[Sleeper]:
    """Sleepers that are to be woken."""
    sleepers = [Sleeper() for _ in range(count)]
    for sleeper in sleepers:
        wakeups.add(sleeper)
    return sleepers


def awake(sleepers: list[Sleeper]) -> int:
    return sum(sleeper.is_awake for sleeper in sleepers)


def test_a_few_are_woken_and_each_wakes_the_next() -> None:
    wakeups = ThreadWakeups()
    sleepers = sleeping(wakeups, 3 * AT_ONCE)
    for number in range(AT_ONCE, 3 * AT_ONCE + 1):
        assert [sleeper.is_awake for sleeper in sleepers] == [True] * number + [False] * (3 * AT_ONCE - number)
        wakeups.woke()
    for _ in range(AT_ONCE - 1):
        wakeups.woke()
    assert awake(sleeping(wakeups, 2 * AT_ONCE)) == AT_ONCE  # as many as before, not more


def test_one_that_has_left_keeps_nobody_waiting() -> None:
    wakeups = ThreadWakeups()
    for _ in range(3 * AT_ONCE):
        wakeups.add(Sleeper(has_left=True))
    assert awake(sleeping(wakeups, AT_ONCE)) == AT_ONCE


def test_others_go_on_without_those_that_were_woken_and_never_ran() -> None:
    wakeups = ThreadWakeups()
    sleepers = sleeping(wakeups, 2 * AT_ONCE)
    wakeups.overdue()
    assert awake(sleepers) == 2 * AT_ONCE


def test_what_gathers_is_asked_once_by_the_last_one() -> None:
    wakeups = ThreadWakeups()
    gatherer = Gatherer()
    assert not wakeups.gather(gatherer)  # nobody is on the way
    sleeping(wakeups, AT_ONCE + 1)
    for _ in range(AT_ONCE):
        assert wakeups.gather(gatherer)
        wakeups.woke()
    assert gatherer.count == 0
    wakeups.woke()
    assert gatherer.count == 1
    wakeups.woke()
    assert gatherer.count == 1


def test_a_child_of_a_fork_waits_for_no_thread_of_its_parent() -> None:
    wakeups = ThreadWakeups()
    sleeping(wakeups, 2 * AT_ONCE)
    wakeups.gather(Gatherer())
    wakeups.forked()
    assert not wakeups.gather(Gatherer())
    assert awake(sleeping(wakeups, AT_ONCE)) == AT_ONCE


def test_a_thread_that_is_interrupted_leaves_its_place_to_others() -> None:
    program = """
import signal, sys, threading
from nsq_fast.runtime.crossing.publish_reply import PublishReply
from nsq_fast.runtime.crossing.thread_wakeups import AT_ONCE, thread_wakeups
class Stop(BaseException):
    pass
def stop(*_):
    raise Stop
def interrupt(ident):
    while sys._current_frames()[ident].f_code.co_name != "_block":
        turn.wait(0.001)
    signal.pthread_kill(ident, signal.SIGUSR1)
turn = threading.Event()
signal.signal(signal.SIGUSR1, stop)
replies = [PublishReply() for _ in range(AT_ONCE)]
for reply in replies:
    interrupting = threading.Thread(target=interrupt, args=(threading.get_ident(),))
    interrupting.start()
    try:
        reply.get()
    except Stop:
        interrupting.join()
    else:
        raise AssertionError("not interrupted")
for reply in replies:
    reply.set(b"OK")  # nobody takes it
assert not thread_wakeups.gather(None), "somebody is on the way"
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reply_that_is_not_announced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wakeups = ThreadWakeups()
    monkeypatch.setattr(publish_reply, "thread_wakeups", wakeups)
    sleeping(wakeups, AT_ONCE)  # they never run
    gatherer = Gatherer()
    assert wakeups.gather(gatherer)
    replies: list[PublishReply] = []
    results: list[bytes] = []

    def wait() -> None:
        replies.append(PublishReply())
        results.append(replies[0].get())

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: gatherer.count == 1)  # what the thread waits for may depend on it
    replies[0].set(b"OK")
    waiting.join(WAIT)
    assert results == [b"OK"]
    assert not wakeups.gather(gatherer)


def test_a_reply_is_waited_for_no_longer_than_asked() -> None:
    results: list[bool] = []

    def wait() -> None:
        reply = PublishReply()
        results.append(reply.wait(0.05))
        reply.set(b"OK")
        results.append(reply.wait())

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(WAIT)
    assert results == [False, True]


def test_what_crosses_together_leaves_as_one_command() -> None:
    nsqd = PublishNsqd()
    held, go = threading.Event(), threading.Event()

    def hold(_: object) -> None:  # the hub thread, so that it finds all of them at once
        held.set()
        go.wait(WAIT)

    with Producer(str(nsqd.address)) as producer:
        first = producer.publish_nowait("t", b"first")
        first.add_done_callback(hold)
        until(held.is_set)
        futures = [producer.publish_nowait("t", b"%d" % number) for number in range(5)]
        go.set()
        until(lambda: all(future.done() for future in futures))
    assert [command.bodies for command in nsqd.commands] == [[b"first"], [b"0", b"1", b"2", b"3", b"4"]]
    nsqd.stop()
