"""Waiting for a condition that several greenlets can make true."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from gevent.event import Event


class Changes:
    """Wakes those who wait for a condition whenever something happened that may bear on it."""

    def __init__(self) -> None:
        self._changed = Event()

    def notify(self) -> None:
        """Have who waits look at its condition again."""
        self._changed.set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the next ``notify``, for ``timeout`` seconds at most."""
        self._changed.clear()
        self._changed.wait(timeout)

    def wait_while(self, condition: Callable[[], bool], deadline: float | None = None) -> bool:
        """Wait until ``condition`` no longer holds; False if it still does at ``deadline`` (monotonic)."""
        while condition():
            timeout = None if deadline is None else deadline - monotonic()
            if timeout is not None and timeout <= 0.0:
                return False
            self.wait(timeout)
        return True
