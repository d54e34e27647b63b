"""Back-pressure: how many messages a producer may hold at once, and who waits for room.

Callers wait in the order they came, and nobody passes one that was let in and
has not gone on yet: the order of publishes is the order of the calls. One that
is larger than the limit goes in alone, when nothing else is there.
"""

from __future__ import annotations

from collections import deque
from time import monotonic

from gevent.event import Event


class PendingLimit:
    """Counts the messages that a producer holds.

    Attributes:
        limit: the most that may be held.
        used: those held now.
        queue: who waits for room, or was let in and is about to go on. The fast path looks at ``used`` and ``queue``
            itself.
    """

    __slots__ = ("_admitted", "limit", "queue", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.queue: deque[tuple[int, Event]] = deque()
        self._admitted = 0  # how many at the head of the queue were let in

    def fits(self, weight: int) -> bool:
        """Whether ``weight`` messages may come in now."""
        return not self.queue and self._fits(weight)

    def take(self, weight: int, deadline: float) -> bool:
        """Come in with ``weight`` messages, waiting for room until ``deadline`` (monotonic); False: none came free."""
        if self.fits(weight):
            self.used += weight
            return True
        admitted = Event()
        entry = (weight, admitted)
        self.queue.append(entry)
        try:
            admitted.wait(max(deadline - monotonic(), 0.0))
        except BaseException:
            self._leave(entry)
            raise
        if not admitted.is_set():
            self._leave(entry)
            return False
        self.queue.remove(entry)
        self._admitted -= 1
        self._admit()
        return True

    def give(self, weight: int) -> None:
        """Go out with ``weight`` messages."""
        self.used -= weight
        if self.queue:
            self._admit()

    def _admit(self) -> None:
        while self._admitted < len(self.queue) and self._fits(self.queue[self._admitted][0]):
            weight, admitted = self.queue[self._admitted]
            self._admitted += 1
            self.used += weight
            admitted.set()

    def _fits(self, weight: int) -> bool:
        return self.used + weight <= self.limit or not self.used

    def _leave(self, entry: tuple[int, Event]) -> None:
        self.queue.remove(entry)
        if entry[1].is_set():  # admitted, but interrupted before it could run
            self._admitted -= 1
            self.used -= entry[0]
        self._admit()
