"""Messages by the time at which something becomes of them: a heap, from which each can be taken out by its id.

nsqio/nsq: nsqd/in_flight_pqueue.go, internal/pqueue/pqueue.go.

Most messages are finished between two scans. So a message gets its place in the
heap when the heap is next asked what is due; until then it stands in a dict
only, and putting in and taking out cost what they cost in a dict. A message that
is taken out leaves its place behind; when most places are left behind, the heap
is made again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar


class Timed(Protocol):
    """A message as the heap holds it. It is in one heap at a time.

    Attributes:
        id: unlike that of any other in the heap.
        priority: the time at which it is due.
        is_placed: whether it has a place in the heap; the heap sets it.
    """

    id: bytes
    priority: float
    is_placed: bool


TimedT = TypeVar("TimedT", bound=Timed)

SPARE = 1024
"""Places that may be left behind before the heap is made again."""


class DueHeap(Generic[TimedT]):
    """A heap of messages. All times given to one heap are of one clock.

    Attributes:
        messages: by id, in the order in which they came. One with its ``priority`` may be added directly, as ``put``
            does; one that is done with for good may be popped directly.
    """

    __slots__ = ("_heap", "_ties", "messages")

    def __init__(self) -> None:
        # Those that have no place yet are the last ones.
        self.messages: dict[bytes, TimedT] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._ties = itertools.count()

    def __len__(self) -> int:
        return len(self.messages)

    def __contains__(self, id: bytes) -> bool:
        return id in self.messages

    def __iter__(self) -> Iterator[TimedT]:
        return iter(self.messages.values())

    @property
    def places(self) -> int:
        """How many places the heap has, those that were left behind too."""
        return len(self._heap)

    def put(self, messages: Sequence[TimedT], time: float) -> None:
        """Add messages that are due at this time."""
        for message in messages:
            message.priority = time
            self.messages[message.id] = message

    def move(self, message: TimedT, time: float) -> None:
        """Have a message that is here due at another time."""
        if message.priority == time:
            return
        message.priority = time
        if message.is_placed:
            self._place(message)

    def pop(self, id: bytes) -> TimedT | None:
        """Take a message out; None if it is not here."""
        message = self.messages.pop(id, None)
        if message is not None:
            message.is_placed = False
        return message

    def pop_due(self, now: float) -> list[TimedT]:
        """Take out the messages whose time has come, the earliest first; those of one time as they came."""
        if not self.messages:
            self._heap.clear()
            return []
        self._place_new()
        due: list[TimedT] = []
        while self._heap and self._heap[0][0] <= now:
            place = heapq.heappop(self._heap)
            if self._is_taken(place):
                due.append(self.messages.pop(place[2]))
        for message in due:
            message.is_placed = False
        return due

    def clear(self) -> None:
        """Forget every message."""
        for message in self.messages.values():
            message.is_placed = False
        self.messages.clear()
        self._heap.clear()

    def _place_new(self) -> None:
        new = list(itertools.takewhile(lambda message: not message.is_placed, reversed(self.messages.values())))
        for message in reversed(new):
            message.is_placed = True
            self._place(message)

    def _place(self, message: TimedT) -> None:
        heapq.heappush(self._heap, (message.priority, next(self._ties), message.id))
        if len(self._heap) > 2 * len(self.messages) + SPARE:
            self._heap = [place for place in self._heap if self._is_taken(place)]
            heapq.heapify(self._heap)

    def _is_taken(self, place: tuple[float, int, bytes]) -> bool:
        """Whether the message of a place is still here, and was not moved."""
        message = self.messages.get(place[2])
        return message is not None and message.priority == place[0]
