"""A timer that can be set again, for many things that wait.

A gevent timer for each publish would cost more than the publish itself
(1.4 us), so deadlines, retries and lingering batches share one Alarm each,
set to the nearest moment.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from time import monotonic
from typing import Any

from gevent import get_hub

from nsq_fast.runtime.fork import tell_forks
from nsq_fast.runtime.supervised import FAULTS, Supervisor

NEVER = float("inf")
# A loop's notion of now may be stale, and then its timer rings early; this keeps a second try from spinning.
_SHORTEST = 0.0005
# A callback that failed is called again after so many seconds: what it did not get done is still due.
_FAULT_PAUSE = 1.0


class Alarm:
    """Calls ``callback()`` in the hub, once, at the moment it was set to. It must not block.

    A callback that raises is a fault of ours: ``supervisor`` reports it, and it is called again.

    Attributes:
        at: that moment, in ``time.monotonic`` seconds; infinity when it is not set.
    """

    __slots__ = ("__weakref__", "_callback", "_supervisor", "_timer", "at")

    def __init__(self, callback: Callable[[], None], supervisor: Supervisor) -> None:
        self.at = NEVER
        self._callback = callback
        self._supervisor = supervisor
        self._timer: Any = None
        tell_forks(self)

    def set(self, at: float) -> None:
        """Ring at ``at``, unless it is set to ring earlier."""
        if at < self.at:
            self._start(at)

    def stop(self) -> None:
        """Do not ring."""
        self.at = NEVER
        if self._timer is not None:
            self._timer.close()
            self._timer = None

    def forked(self) -> None:
        """In the child of a fork: what it was set for is the parent's."""
        self.stop()

    def _start(self, at: float) -> None:
        self.stop()
        self.at = at
        self._timer = get_hub().loop.timer(max(at - monotonic(), _SHORTEST))
        self._timer.start(self._ring)

    def _ring(self) -> None:
        at = self.at
        self.stop()
        if monotonic() < at:
            self._start(at)
            return
        try:
            self._callback()
        except FAULTS as fault:
            self._supervisor.report("a timer", fault, f"it rings again in {_FAULT_PAUSE} s")
            self.set(monotonic() + _FAULT_PAUSE)


class TimerQueue:
    """Calls many callbacks in the hub, each at its moment, with one Alarm. They must not block."""

    __slots__ = ("_alarm", "_entries", "_numbers", "_supervisor")

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._alarm = Alarm(self._run, supervisor)
        self._entries: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    def add(self, delay: float, callback: Callable[[], object]) -> None:
        """Call ``callback()`` once, in ``delay`` seconds."""
        at = monotonic() + delay
        heapq.heappush(self._entries, (at, next(self._numbers), callback))
        self._alarm.set(at)

    def stop(self) -> None:
        """Call none of them."""
        self._alarm.stop()
        self._entries.clear()

    def _run(self) -> None:
        now = monotonic()
        due = []
        while self._entries and self._entries[0][0] <= now:
            due.append(heapq.heappop(self._entries)[2])
        for callback in due:
            self._call(callback)
        if self._entries:
            self._alarm.set(self._entries[0][0])

    def _call(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except FAULTS as fault:  # the others must still be called
            self._supervisor.report("a timer", fault, "the others go on")
