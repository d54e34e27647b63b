"""How the thread in which messages arrive wakes the one that takes them: through a pipe, which loops can watch."""

from __future__ import annotations

import os
import select
from contextlib import suppress

from gevent.monkey import get_original  # patches nothing: it finds what a program may have patched

_CLOSED = -1


class Wakeup:
    """A pipe that can be read from when there is something new to look at."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._is_woken = False
        self._lock = get_original("_thread", "allocate_lock")()  # native threads write, whatever a program patched

    def fileno(self) -> int:
        """What a loop watches."""
        return self._reader

    def wake(self) -> None:
        """There is something new. In any thread."""
        with self._lock:
            if not self._is_woken and self._writer != _CLOSED:
                self._is_woken = True
                os.write(self._writer, b"\0")

    def clear(self) -> None:
        """Whoever calls this looks at everything afterwards."""
        with self._lock, suppress(BlockingIOError):
            self._is_woken = False
            os.read(self._reader, 1)

    def wait(self, timeout: float | None) -> None:
        """Wait until there is something new, for ``timeout`` seconds at most."""
        waiting = select.poll()  # of gevent, if the program has patched it
        waiting.register(self._reader, select.POLLIN)
        waiting.poll(None if timeout is None else max(1, round(1000 * timeout)))

    def close(self) -> None:
        """Wake nobody any more."""
        with self._lock:
            reader, self._reader = self._reader, _CLOSED
            writer, self._writer = self._writer, _CLOSED
        for descriptor in (reader, writer):
            if descriptor != _CLOSED:
                os.close(descriptor)
