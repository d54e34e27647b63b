"""Wakes the threads whose publishes are over, a few at a time, and has what they publish next leave together.

A thread that wakes up waits for the GIL next. Sixteen that are woken at once
fall asleep once more each, and whoever has the GIL is interrupted for them. So
a few are woken, and each of them wakes another one as soon as it runs: that is
half the switches. What they publish next waits meanwhile for the last of them,
and crosses with one wake-up of the hub thread for all, as one command
(``nsq-fast bench publish --client "nsq_fast threads" --mode concurrent``).

No thread depends on another one for good: one that was not woken in time, or
whose request was not, finds that out by itself.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from nsq_fast.runtime.fork import tell_forks

AT_ONCE = 3
"""So many may be on their way. With one nobody may run for a moment; from four on they stand in line for the GIL."""


class Sleeper(Protocol):
    """A thread that waits."""

    def wake(self) -> bool:
        """Wake it; it calls ``woke`` when it runs. False if it waits no more, and will not."""


class Gatherer(Protocol):
    """What has requests of threads, which the hub thread is to take."""

    def ask(self) -> object:
        """Have the hub thread take them, in any thread. Must not block, nor raise."""


class ThreadWakeups:
    """Those of one process. Its methods belong to every thread."""

    def __init__(self) -> None:
        self.forked()
        tell_forks(self)

    def forked(self) -> None:
        """In the child of a fork: no other thread is there."""
        self._due: deque[Sleeper] = deque()
        self._free: deque[None] = deque([None] * AT_ONCE)  # a place for each that may be on its way
        self._gathering: dict[Gatherer, None] = {}

    def add(self, sleeper: Sleeper) -> None:
        """Wake a thread soon."""
        self._due.append(sleeper)
        self._wake()

    def woke(self) -> None:
        """In a thread that was woken: others may be."""
        if len(self._free) < AT_ONCE:
            self._free.append(None)
        self._wake()
        if self._gathering and self._is_quiet:
            self.ask_all()

    def overdue(self) -> None:
        """A thread was not woken in time: those on their way are lost, or slow. Go on without them."""
        while len(self._free) < AT_ONCE:
            self._free.append(None)
        self._wake()

    def gather(self, gatherer: Gatherer) -> bool:
        """Have it asked when no thread is on its way. False where none is now: it is not asked then."""
        if self._is_quiet:
            return False
        self._gathering[gatherer] = None
        if self._is_quiet:  # the last one did not see it
            self.ask_all()
        return True

    def ask_all(self) -> None:
        """Ask those that gather now."""
        while self._gathering:
            try:
                gatherer, _ = self._gathering.popitem()
            except KeyError:  # another thread was faster
                return
            gatherer.ask()

    @property
    def _is_quiet(self) -> bool:
        return len(self._free) >= AT_ONCE

    def _wake(self) -> None:
        due, free = self._due, self._free
        while due:
            try:
                free.pop()
            except IndexError:
                return  # whoever has a place looks at those that are due when it has given it back
            try:
                sleeper = due.popleft()
            except IndexError:  # another thread was faster
                free.append(None)
                continue  # and may have found no place for one that has come since
            if not sleeper.wake():
                free.append(None)


thread_wakeups = ThreadWakeups()
