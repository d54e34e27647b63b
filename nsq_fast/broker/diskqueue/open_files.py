"""How many files are open at once: no more than the process may have, however many there are."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable


class OpenFiles(threading.local):
    """The files that a thread has open. When there are many, the one opened first is closed until it is used again.

    Args:
        most: so many; by default half of what the process may have.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 if most is None else most
        self._close: dict[object, Callable[[], None]] = {}

    def add(self, owner: object, close: Callable[[], None]) -> None:
        """A file is open; ``close`` closes it and calls ``discard``, and its owner opens it when it is used again."""
        self._close[owner] = close
        while len(self._close) > self.most:
            next(iter(self._close.values()))()

    def discard(self, owner: object) -> None:
        """A file is not open any more."""
        self._close.pop(owner, None)


OPEN_FILES = OpenFiles()
