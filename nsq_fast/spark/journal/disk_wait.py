"""What part of its time a task waits for the disk."""

from __future__ import annotations

from concurrent.futures import Future
from time import monotonic
from typing import TypeVar

LONG = 0.5
"""From this part on the disk is much slower than the server."""

T = TypeVar("T")


class DiskWait:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._began = monotonic()
        self._waited = 0.0

    @property
    def is_long(self) -> bool:
        """Whether most of the time was spent waiting."""
        return self._waited > LONG * (monotonic() - self._began)

    def result(self, of: Future[T]) -> T:
        """What is written, once it is. Raises what the writing raised."""
        began = monotonic()
        try:
            return of.result()
        finally:
            self._waited += monotonic() - began
