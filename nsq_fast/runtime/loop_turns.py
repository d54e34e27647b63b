"""Turns of the hub's loop: when it last looked at timers and sockets, and waiting until it does again.

``gevent.sleep(0)`` does not reach the loop: gevent runs the callbacks that are
ready, looks at the clock after 50 of them only, and goes on to timers and
sockets when 5 ms are over (gevent: src/gevent/libev/corecext.pyx,
loop._run_callbacks). With handlers of 20 ms that is a second. So who has kept
the thread for a time slice waits here: timers, sockets and what they cause come
first, then those who wait, one after the other in the order in which they came,
for a time slice together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic, time
from typing import Any
from weakref import WeakKeyDictionary

from gevent import get_hub, sleep
from gevent.hub import Waiter

from nsq_fast._dispatch import TurnTimes

SLICE = 0.005
"""Seconds that one greenlet after the other may use before timers and sockets have their turn."""

LAST = -2
"""The lowest priority of libev: called after all other watchers that are ready in the same turn."""

FIRST = 2
"""The highest."""

_all: WeakKeyDictionary[Any, LoopTurns] = WeakKeyDictionary()


def loop_turns() -> LoopTurns:
    """Those of the calling greenlet's hub."""
    hub = get_hub()
    turns = _all.get(hub)
    if turns is None:
        turns = _all[hub] = LoopTurns(hub.loop)
    return turns


class LoopTurns(TurnTimes):
    """The turns of one loop.

    All times are of ``time.monotonic()``. What is done in each turn is in TurnTimes, which is compiled.
    """

    _loop: Any
    _run_callback: Callable[..., Any]

    __slots__ = ("_is_armed", "_iteration", "_now", "_timer", "_waiting")

    def __init__(self, loop: Any) -> None:
        super().__init__(loop)
        self._now = loop.now
        self._timer = loop.timer(0.0, priority=LAST)
        self._iteration = -1
        self._waiting: deque[Waiter[Any]] = deque()
        self._is_armed = False

    def is_overdue(self, now: float) -> bool:
        """Whether the loop has not had its turn for a time slice."""
        return now > self.due_at and not self._has_turned(now)

    @property
    def iteration(self) -> int:
        """The number of the present turn; may be asked in any thread. Raises when the hub was destroyed."""
        return int(self._loop.iteration)

    @property
    def noted_iteration(self) -> int:
        """The number of the turn that ``began_at`` and ``due_at`` speak of."""
        return self._iteration

    def give_way(self) -> None:
        """Let other greenlets run, and timers and sockets if they are overdue."""
        if self.is_overdue(monotonic()):
            self.wait()
        else:
            sleep(0)

    def _has_turned(self, now: float) -> bool:
        """Take note of a turn that there was meanwhile; whether that was within the last time slice."""
        iteration = self._loop.iteration
        if iteration == self._iteration:
            return False
        self._iteration = iteration
        # The loop has the time of its last turn on the wall clock, which may have been set since.
        self.began_at = now - max(0.0, time() - self._now())
        self.due_at = self.began_at + SLICE
        return now <= self.due_at

    def wait(self) -> None:
        """Let timers, sockets and other greenlets have their turn; return when it is the caller's again."""
        waiter: Waiter[Any] = Waiter()
        self._waiting.append(waiter)
        self._arm()
        try:
            waiter.get()
        finally:
            if waiter in self._waiting:  # the caller was killed
                self._waiting.remove(waiter)

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            self._timer.start(self._turned)

    def _turned(self) -> None:
        # What was read just now may have to be answered: what sends the answer is a callback that waits already.
        self._timer.stop()
        self._run_callback(self._resume)

    def _resume(self) -> None:
        """Resume those who wait, one at least, until the next turn is due."""
        self._is_armed = False
        self._iteration = self._loop.iteration
        self.began_at = monotonic()
        self.due_at = self.began_at + SLICE
        while self._waiting:
            self._waiting.popleft().switch(None)
            if self._waiting and self.is_overdue(monotonic()):
                self._arm()
                return
