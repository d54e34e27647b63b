"""What a worker does when it has handled all that there was: whether it reads on, or leaves."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep
from types import SimpleNamespace

import pytest

from nsq_fast._codec import HeldMessages, Message
from nsq_fast._dispatch import Dispatcher, HandlerLimit, InboundQueue, PromptFins, Tally, TurnTimes
from nsq_fast._time_slice import Caller


class Turns(TurnTimes):
    """A loop whose next turn is far away, until it is due."""

    def __init__(self) -> None:
        self.due_at = monotonic() + 1e6

    def is_overdue(self, now: float) -> bool:
        return now > self.due_at

    def wait(self) -> None:
        self.due_at = monotonic() + 1e6


class Worker:
    """One worker of one connection; ``arrives`` is called for each read, and may deliver messages."""

    def __init__(self, limit: HandlerLimit, arrives: Callable[[], None]) -> None:
        self.flushes = 0
        self._arrives = arrives
        self.connection = SimpleNamespace(
            session=SimpleNamespace(ledger=HeldMessages()),
            finished=[],
            schedule_flush=lambda: None,
            flush=self._flush,
            read_for_reader=self._read,
        )
        self.turns = Turns()
        self.dispatcher = Waking(self.turns, 0.005, PromptFins(), limit, Tally(), lambda: None, lambda: None)
        self.dispatcher.source = self.connection
        self.inbound = InboundQueue(self.connection, lambda now: None)
        self.caller = Caller()
        self.caller.began = monotonic()

    def _flush(self) -> None:
        self.flushes += 1

    def _read(self) -> bool:
        self._arrives()
        return True

    def deliver(self) -> None:
        """A message has come."""
        self.inbound.waiting.append(Message(1, 1, b"0123456789abcdef", b""))
        self.dispatcher.put(self.inbound, 1)

    def begin(self) -> None:
        """Take a message and handle it."""
        self.deliver()
        assert self.dispatcher.take() is self.inbound
        self.inbound.waiting.clear()

    def read_on(self) -> bool:
        return self.dispatcher.read_on(self.inbound, self.caller)


class Waking(Dispatcher):
    woken = 0

    def wake(self) -> None:
        self.woken += 1


def one_at_a_time() -> HandlerLimit:
    return HandlerLimit(lambda: 1)


def test_who_reads_a_message_goes_on_with_it_and_its_fins_have_left() -> None:
    worker = Worker(one_at_a_time(), lambda: worker.deliver())
    worker.begin()
    for count in range(1, 4):
        assert worker.read_on()
        assert worker.flushes == count
        assert (worker.caller.end, worker.inbound.slice.end) == (worker.turns.due_at, worker.turns.due_at)
        worker.inbound.waiting.clear()


def test_a_slice_ends_with_the_first_deadline_of_a_message() -> None:
    worker = Worker(one_at_a_time(), lambda: worker.deliver())
    worker.begin()
    worker.inbound.ledger.next_deadline = 5.0
    assert worker.read_on()
    assert worker.inbound.slice.end == 5.0


def test_who_reads_nothing_leaves() -> None:
    worker = Worker(one_at_a_time(), lambda: None)
    worker.begin()
    assert not worker.read_on()


def test_the_loop_has_its_turn_before_what_came_is_handled() -> None:
    def arrives() -> None:
        worker.deliver()
        worker.turns.due_at = 0.0

    worker = Worker(one_at_a_time(), arrives)
    worker.begin()
    assert not worker.read_on()
    worker.dispatcher.leave(worker.inbound)
    assert worker.dispatcher.take() is worker.inbound, "it waits no longer than for the turn"
    assert worker.turns.due_at > 0.0


def test_nothing_is_handled_after_a_stop() -> None:
    def arrives() -> None:
        worker.deliver()
        worker.dispatcher.is_stopped = True

    worker = Worker(one_at_a_time(), arrives)
    worker.begin()
    assert not worker.read_on()
    worker.dispatcher.leave(worker.inbound)
    assert worker.dispatcher.take() is None


def test_another_connection_or_another_queue_is_looked_at() -> None:
    worker = Worker(one_at_a_time(), lambda: worker.deliver())
    worker.begin()
    other = InboundQueue(worker.connection, lambda now: None)
    worker.dispatcher.put(other, 1)
    assert not worker.read_on()
    worker = Worker(one_at_a_time(), lambda: worker.deliver())
    worker.begin()
    worker.dispatcher.source = None
    assert not worker.read_on()


def test_who_waits_for_a_message_takes_no_place_of_a_handler() -> None:
    """Meanwhile another begins; then there are too many, and the first leaves with what has come."""
    limit = one_at_a_time()
    second = Worker(limit, lambda: None)

    def arrives() -> None:
        second.begin()
        first.deliver()

    first = Worker(limit, arrives)
    first.begin()
    assert not first.read_on()
    first.dispatcher.leave(first.inbound)
    second.dispatcher.leave(second.inbound)
    assert first.dispatcher.take() is first.inbound, "the place is free again"


def test_the_place_of_a_handler_is_kept_when_reading_fails() -> None:
    def fails() -> None:
        raise KeyboardInterrupt

    worker = Worker(one_at_a_time(), fails)
    worker.begin()
    with pytest.raises(KeyboardInterrupt):
        worker.read_on()
    worker.dispatcher.leave(worker.inbound)
    worker.begin()  # there is one place, no more and no less
    other = Worker(one_at_a_time(), lambda: None)
    other.begin()


def test_time_that_passes_until_a_message_comes_is_no_work() -> None:
    def arrives() -> None:
        sleep(0.05)  # sleep: what is not to be counted
        worker.deliver()

    worker = Worker(one_at_a_time(), arrives)
    worker.begin()
    worker.caller.began = began = monotonic()
    for _ in range(10):
        assert worker.read_on()
        worker.inbound.waiting.clear()
    worker.dispatcher.handled(worker.caller.began, 0)
    assert worker.dispatcher.load.busy < (monotonic() - began) / 2
