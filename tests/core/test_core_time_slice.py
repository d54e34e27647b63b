"""The hot loop of a worker: when it stops calling handlers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from time import monotonic
from types import SimpleNamespace

import pytest

from nsq_fast._codec import Message
from nsq_fast._time_slice import Caller, TimeSlice

Handle = Callable[[object, Message], None]


class Loop:
    """A slice that ends at ``end``, and ten messages that wait."""

    def __init__(self, end: float) -> None:
        self.finished: list[Message] = []
        self.slice = TimeSlice(self.finished, lambda: None, end)
        self.inbound = SimpleNamespace(waiting=deque(Message(1, 1, b"%016d" % number, b"") for number in range(10)))
        self.failures: list[BaseException] = []
        self._disposition = SimpleNamespace(
            max_tries=100, consumer=None, failed=lambda message, error: self.failures.append(error)
        )

    def handle(self, handler: Handle) -> tuple[bool, int]:
        """Whether the slice is over, and how many messages still wait."""
        is_over = self.slice.handle(Caller(), self.inbound, self._disposition, handler)
        return is_over, len(self.inbound.waiting)


def ignore(consumer: object, message: Message) -> None:
    pass


@pytest.mark.parametrize("end", [math.inf, 1e300, 1e15])
def test_all_messages_are_handled_in_a_slice_that_is_long_enough(end: float) -> None:
    loop = Loop(end)
    assert loop.handle(ignore) == (False, 0)
    assert len(loop.finished) == 10


@pytest.mark.parametrize("end", [0.0, -math.inf])
def test_a_slice_that_is_over_has_one_message(end: float) -> None:
    loop = Loop(end)
    assert loop.handle(ignore) == (True, 9)
    assert loop.handle(ignore) == (True, 8)


@pytest.mark.parametrize("slow", [1, 2, 5])
@pytest.mark.parametrize("seconds", [0.001, 0.02])
def test_the_slice_is_over_after_the_handler_in_which_its_time_passes(slow: int, seconds: float) -> None:
    loop = Loop(monotonic() + 1e6)
    calls = 0

    def handle(consumer: object, message: Message) -> None:
        nonlocal calls
        calls += 1
        if calls == slow:
            loop.slice.end = end = monotonic() + seconds
            while monotonic() <= end:
                pass

    assert loop.handle(handle) == (True, 10 - slow)


def test_an_end_that_is_set_earlier_by_a_handler_counts_at_once() -> None:
    loop = Loop(monotonic() + 1e6)

    def handle(consumer: object, message: Message) -> None:
        if len(loop.inbound.waiting) == 4:
            loop.slice.end = 0.0

    assert loop.handle(handle) == (True, 4)


def test_time_that_passes_between_quick_handlers_is_seen_in_time() -> None:
    """It ends with the handler in which its end is."""
    loop = Loop(0.0)
    step = 0.002
    loop.slice.end = end = monotonic() + 4.5 * step
    ended_at: list[float] = []

    def handle(consumer: object, message: Message) -> None:
        until = monotonic() + step
        while monotonic() < until:
            pass
        ended_at.append(monotonic())

    assert loop.handle(handle)[0]
    assert all(at <= end for at in ended_at[:-1])
    assert not loop.failures
