"""Back-pressure: how many messages a producer may hold at once, and who waits for room.

Callers wait in the order they came. One that is larger than the limit goes
in alone, when nothing else is there.
"""

from __future__ import annotations

from collections import deque
from time import monotonic

from gevent.event import Event


class Room:
    """Counts the messages that a producer holds.

    Attributes:
        limit: the most that may be held.
        used: those held now.
        queue: who waits for room. The fast path looks at ``used`` and ``queue`` itself.
    """

    __slots__ = ("limit", "queue", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.queue: deque[tuple[int, Event]] = deque()

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
        if admitted.is_set():
            return True
        self._leave(entry)
        return False

    def give(self, weight: int) -> None:
        """Go out with ``weight`` messages."""
        self.used -= weight
        if self.queue:
            self._admit()

    def _admit(self) -> None:
        while self.queue and self._fits(self.queue[0][0]):
            weight, admitted = self.queue.popleft()
            self.used += weight
            admitted.set()

    def _fits(self, weight: int) -> bool:
        return self.used + weight <= self.limit or not self.used

    def _leave(self, entry: tuple[int, Event]) -> None:
        if entry[1].is_set():  # admitted, but interrupted before it could run
            self.give(entry[0])
        else:
            self.queue.remove(entry)
            self._admit()
