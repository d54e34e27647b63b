"""What a thread waits for that publishes."""

from __future__ import annotations

import math
from time import monotonic

from .reply import Reply
from .thread_wakeups import thread_wakeups

FIRST_PATIENCE = 0.01
PATIENCE = 1.0
"""Seconds after which a thread that waits looks whether another one keeps it waiting: the first time, and later."""


class PublishReply(Reply):
    """The result of a publish. A thread is woken for it in its turn: see ``thread_wakeups``."""

    __slots__ = ("_has_left",)

    def __init__(self) -> None:
        super().__init__()
        self._has_left = False

    @property
    def blocks(self) -> bool:
        """Whether it is a thread that waits, not a greenlet."""
        return self._lock is not None

    def wake(self) -> bool:
        """Wake the thread; False if it waits no more."""
        self._lock.release()
        # It may leave now. One of the two finds the lock free then: that one knows that nobody is on the way.
        return not (self._has_left and self._lock.acquire(False))

    def _release(self) -> None:
        thread_wakeups.add(self)

    def _block(self, timeout: float | None) -> bool:
        end = math.inf if timeout is None else monotonic() + max(0.0, timeout)
        patience = FIRST_PATIENCE if timeout is None else min(FIRST_PATIENCE, max(0.0, timeout))
        try:
            while not self._lock.acquire(True, patience):
                if self.is_set:
                    thread_wakeups.overdue()
                    break
                thread_wakeups.ask_all()
                patience = min(PATIENCE, end - monotonic())
                if patience <= 0.0:
                    break
            else:
                thread_wakeups.woke()
                return True
        except BaseException:
            self._leave()
            raise
        self._leave()
        return self.is_set

    def _leave(self) -> None:
        """Wait no more: nobody is to wait for this thread."""
        self._has_left = True
        if self._lock.acquire(False):
            thread_wakeups.woke()
