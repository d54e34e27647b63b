"""The watch for silent peers, with short limits and times that the test sets."""

from __future__ import annotations

import socket
import time
from time import monotonic

import gevent
from gevent.event import Event
from support.waiting import WAIT

from nsq_fast.runtime.loop_turns import loop_turns
from nsq_fast.runtime.net.watch import GRACE, SilenceWatch


class Peer:
    def __init__(self, heard_at: float) -> None:
        self.heard_at = heard_at
        self.looks = 0
        self.silent = Event()

    def last_heard(self) -> float:
        self.looks += 1
        return self.heard_at


def test_silence_is_reported_once_after_a_second_look() -> None:
    peer = Peer(monotonic())
    watch = SilenceWatch(0.02, peer.last_heard, peer.silent.set)
    started = monotonic()
    watch.start()
    assert peer.silent.wait(WAIT)
    assert monotonic() - started >= 0.02 + GRACE / 2
    assert peer.looks == 2
    watch.stop()
    watch.stop()


def test_it_does_not_look_early_after_a_time_without_the_hub() -> None:
    loop_turns().wait()
    time.sleep(0.05)  # sleep: blocks the hub
    peer = Peer(monotonic())
    SilenceWatch(0.02, peer.last_heard, peer.silent.set).start()
    assert peer.silent.wait(WAIT)
    assert peer.looks == 2


def test_what_is_heard_in_the_meantime_puts_it_off() -> None:
    peer = Peer(monotonic())
    watch = SilenceWatch(0.02, peer.last_heard, peer.silent.set)
    watch.start()
    peer.heard_at += 0.05
    started = monotonic()
    assert peer.silent.wait(WAIT)
    assert monotonic() - started >= 0.05
    assert peer.looks == 3


def test_stopped_watch_says_nothing() -> None:
    peer = Peer(monotonic())
    watch = SilenceWatch(0.01, peer.last_heard, peer.silent.set)
    watch.start()
    watch.stop()
    assert not peer.silent.wait(0.03)
    assert peer.looks == 0


def test_what_came_while_the_hub_did_not_run_is_heard_first() -> None:
    ours, theirs = socket.socketpair()
    peer = Peer(monotonic())
    readable = gevent.get_hub().loop.io(ours.fileno(), 1)

    def receive() -> None:
        ours.recv(100)
        peer.heard_at = monotonic()

    readable.start(receive)
    watch = SilenceWatch(0.05, peer.last_heard, peer.silent.set)
    watch.start()
    for _ in range(10):
        theirs.send(b"x")
        time.sleep(0.05 + 2 * GRACE)  # sleep: blocks the hub; both a timer and a socket are due
        loop_turns().wait()
    assert not peer.silent.is_set()
    watch.stop()
    readable.close()
    ours.close()
    theirs.close()
