"""The messages of a channel that wait for their time: a heap, the earliest first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from nsq_fast.broker.message import Message


class DeferredQueue:
    """Messages by the time they are due (nsqio/nsq: nsqd/channel.go, deferredPQ)."""

    __slots__ = ("_heap", "_ties")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Message]] = []
        self._ties = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Message]:
        return (message for _, _, message in self._heap)

    def put(self, message: Message) -> None:
        """Add a message; ``due`` is when it becomes ready."""
        heapq.heappush(self._heap, (message.due, next(self._ties), message))

    def pop_due(self, now: float) -> list[Message]:
        """Take out the messages that are ready at ``now``, in seconds since the epoch."""
        ready: list[Message] = []
        while self._heap and self._heap[0][0] <= now:
            message = heapq.heappop(self._heap)[2]
            message.due = 0.0
            ready.append(message)
        return ready

    def clear(self) -> None:
        """Forget everything."""
        self._heap.clear()
