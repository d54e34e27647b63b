"""What waits to be delivered in a channel: a queue in memory, and one on disk for what memory has no room for.

nsqio/nsq: nsqd/channel.go, put; nsqd/protocol_v2.go, messagePump. A message takes the
place in memory that is free when it comes, whatever waits on disk, and a delivery
takes the first one of either queue at random: so the order is kept only as long as
all messages have room in memory. With ``preserve_order`` it is always kept.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from nsq_fast.broker.diskqueue.log import SegmentLog
from nsq_fast.broker.diskqueue.record import size_of
from nsq_fast.broker.diskqueue.segments import Position
from nsq_fast.broker.message import Message

from .backend import BackendQueue
from .due_heap import DueHeap
from .gaps import Gap

_REFILL = 2000


class Backlog:
    """The queues of one channel.

    Args:
        capacity: messages that memory has room for.
        is_ephemeral: messages for which there is no room are lost.
        takers: for an ephemeral one, how many messages clients would take at once; so many have room as well.
        preserve_order: messages go behind those that wait on disk, and come after those in memory.

    Attributes:
        memory: the queue in memory.
        backend: the queue on disk.
        deferred: those that are not ready yet, by the time they are due, since the epoch. They do not count.
    """

    __slots__ = ("_capacity", "_is_ephemeral", "_log", "_preserve_order", "_takers", "backend", "deferred", "memory")

    def __init__(
        self,
        log: SegmentLog,
        capacity: int,
        *,
        is_ephemeral: bool,
        takers: Callable[[], int],
        preserve_order: bool = False,
    ) -> None:
        self.memory: deque[Message] = deque()
        self.backend = BackendQueue(log, self._sort_out)
        self.deferred: DueHeap[Message] = DueHeap()
        self._is_ephemeral = is_ephemeral
        self._takers = takers
        self._log = log
        self._capacity = capacity
        self._preserve_order = preserve_order

    def __len__(self) -> int:
        return len(self.memory) + len(self.backend)

    def __bool__(self) -> bool:
        return bool(self.memory) or bool(self.backend)

    # --- in ----------------------------------------------------------------------------------------------------------

    def has_room(self, count: int) -> bool:
        """Whether so many new messages have room in memory."""
        if self.backend:
            return count <= self._room()
        return len(self.memory) + count <= self._capacity

    def _room(self) -> int:
        if self.backend and (self._preserve_order or self.backend.has_many_gaps):
            return 0
        return max(0, self._capacity - len(self.memory))

    def put(self, messages: Sequence[Message]) -> None:
        """Add new messages for which there is room, by ``has_room``."""
        if self._is_ephemeral:
            self._put_while_room(messages)
        else:
            self.memory.extend(messages)

    def put_logged(self, messages: Sequence[Message], frames: Sequence[bytes], start: Position) -> None:
        """Add new messages that the log holds from ``start`` on; memory takes those that it has room for."""
        if self._is_ephemeral:
            self._put_while_room(messages)
            return
        room = self._room()
        self.memory.extend(messages[:room] if room < len(messages) else messages)
        if room < len(messages) or self.backend:
            in_memory = frames[:room]
            self._go_on_behind(
                start.sequence, Position(start.sequence + len(in_memory), start.offset + size_of(in_memory))
            )

    def _go_on_behind(self, first: int, end: Position) -> None:
        """Have in the backend queue what the log has from ``end`` on, and not the records from ``first`` to there."""
        self.backend.leave_out(first, end)
        self.backend.add_from(end)

    def _put_while_room(self, messages: Sequence[Message]) -> None:
        room = self._capacity + self._takers() - len(self.memory)
        self.memory.extend(messages[: max(0, room)])

    def put_back(self, messages: Sequence[Message]) -> None:
        """Add messages that were delivered or deferred: those are never put on disk again."""
        if self._preserve_order:
            self.memory.extend(messages)
        elif self._is_ephemeral:
            self._put_while_room(messages)
        else:
            room = max(0, self._capacity - len(self.memory))
            self.memory.extend(messages[:room])
            self.backend.put_back(messages[room:])

    def defer(self, message: Message) -> None:
        """Add a message that is not ready before its ``due``."""
        self.deferred.put((message,), message.due)

    def release(self, held_at: Position, deferred: Iterable[tuple[Message, Position]] = ()) -> None:
        """Let the records through that the topic held back from ``held_at`` on.

        ``deferred``: those of them that are known to be deferred, each with the position behind it. They need no room.
        """
        if self._is_ephemeral:
            self._release_while_room(held_at)
            return
        position, room = held_at, self._room()
        while room > 0 and position.sequence < self._log.end.sequence:
            messages, position = self._log.read(position, room)
            if not messages:
                break
            ready = self._sort_out(messages)
            self.memory.extend(ready)
            room -= len(ready)
        self._go_on_behind(held_at.sequence, position)
        for message, end in deferred:
            if message.sequence >= position.sequence:
                self.defer(message.copy())
                self.backend.leave_out(message.sequence, end)

    def _release_while_room(self, position: Position) -> None:
        while position.sequence < self._log.end.sequence:
            messages, position = self._log.read(position, _REFILL)
            if not messages:
                break
            self._put_while_room(self._sort_out(messages))

    def restore(self, cursor: Position, gaps: Sequence[Gap], delivered: Sequence[Message]) -> None:
        """Take what was not finished before a restart: the log from ``cursor`` on without the gaps, and ``delivered``.

        nsqio/nsq: nsqd/channel.go, flush: nothing is in memory then.
        """
        self.backend.restore(cursor, gaps, self._sort_out(delivered))

    def _sort_out(self, messages: Sequence[Message]) -> list[Message]:
        """Put those aside that are not ready yet; the others."""
        now = time.time()
        ready = [message for message in messages if message.due <= now]
        if len(ready) < len(messages):
            for message in messages:
                if message.due > now:
                    self.defer(message)
        return ready

    # --- out ---------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[Message]:
        """Take out the messages that come next; fewer than ``count`` only when there are no more."""
        memory, backend = self.memory, self.backend
        if not backend:
            return [memory.popleft() for _ in range(min(count, len(memory)))]
        if self._preserve_order:
            return self._take_in_order(count)
        if not memory:
            return backend.take(count)
        taken: list[Message] = []
        while len(taken) < count and memory and backend:
            # Of two that are ready, Go's select takes either.
            taken += [memory.popleft()] if random.getrandbits(1) else backend.take(1)
        taken += backend.take(count - len(taken))
        taken += [memory.popleft() for _ in range(min(count - len(taken), len(memory)))]
        return taken

    def _take_in_order(self, count: int) -> list[Message]:
        if not self.memory:
            # What is put back goes behind them, and does not keep the others waiting for ever.
            self.memory.extend(self.backend.take(_REFILL))
        return [self.memory.popleft() for _ in range(min(count, len(self.memory)))]

    def pop_due(self, now: float) -> list[Message]:
        """Take out the deferred messages that are ready at ``now``, in seconds since the epoch."""
        due = self.deferred.pop_due(now)
        for message in due:
            message.due = 0.0
        return due

    def clear(self) -> None:
        """Forget everything."""
        self.memory.clear()
        self.deferred.clear()
        self.backend.clear()

    def in_memory(self) -> Iterator[Message]:
        """Every message that is in memory, ready or not."""
        yield from self.memory
        yield from self.backend.in_memory()
        yield from self.deferred
