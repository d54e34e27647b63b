"""What waits to be delivered in a channel: the first messages in memory, the others by their place in the log.

A backlog that fits into memory never touches the disk again. One that does not
remembers where in the topic's log it goes on, and reads from there when its
memory has been used up: order is kept, and nothing is written twice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from nsq_fast.broker.diskqueue.log import SegmentLog
from nsq_fast.broker.diskqueue.record import size_of
from nsq_fast.broker.diskqueue.segments import Position
from nsq_fast.broker.message import Message

from .due_heap import DueHeap

_REFILL = 2000


class Backlog:
    """The queue of one channel.

    Args:
        capacity: new messages that may stay in memory.
        is_ephemeral: messages for which there is no room are lost.
        takers: for an ephemeral one, how many messages clients would take at once; so many have room as well.

    Attributes:
        memory: the messages that come next.
        cursor: where the log is to be read when ``memory`` is empty; None: there is nothing beyond ``memory``.
        deferred: those that are not ready yet, by the time they are due, since the epoch. They do not count.
    """

    __slots__ = ("_capacity", "_is_ephemeral", "_log", "_takers", "cursor", "deferred", "memory")

    def __init__(self, log: SegmentLog, capacity: int, *, is_ephemeral: bool, takers: Callable[[], int]) -> None:
        self.memory: deque[Message] = deque()
        self.cursor: Position | None = None
        self.deferred: DueHeap[Message] = DueHeap()
        self._is_ephemeral = is_ephemeral
        self._takers = takers
        self._log = log
        self._capacity = capacity

    def __len__(self) -> int:
        return len(self.memory) + self.on_disk

    def __bool__(self) -> bool:
        return bool(self.memory) or self.on_disk > 0

    @property
    def on_disk(self) -> int:
        """How many messages are not in memory."""
        return 0 if self.cursor is None else self._log.count(self.cursor.sequence, self._log.readable_end)

    def has_room(self, count: int) -> bool:
        """Whether so many new messages may stay in memory."""
        return self.cursor is None and len(self.memory) + count <= self._capacity

    def put(self, messages: Sequence[Message]) -> None:
        """Add new messages for which there is room, by ``has_room``."""
        if self._is_ephemeral:
            self._put_while_room(messages)
        else:
            self.memory.extend(messages)

    def put_logged(self, messages: Sequence[Message], frames: Sequence[bytes], start: Position) -> None:
        """Add new messages that the log holds from ``start`` on; what memory has no room for is read back later."""
        if self._is_ephemeral:
            self._put_while_room(messages)
            return
        if self.cursor is not None:
            return
        room = max(0, self._capacity - len(self.memory))
        self.memory.extend(messages[:room])
        if room < len(messages):
            self.cursor = Position(start.sequence + room, start.offset + size_of(frames[:room]))

    def _put_while_room(self, messages: Sequence[Message]) -> None:
        room = self._capacity + self._takers() - len(self.memory)
        self.memory.extend(messages[: max(0, room)])

    def put_back(self, messages: Sequence[Message]) -> None:
        """Add messages that were delivered or deferred: those are never put on disk again."""
        self.memory.extend(messages)

    def restore(self, messages: Sequence[Message], cursor: Position) -> None:
        """Take the messages that were not finished before a restart, and go on reading at ``cursor``."""
        self._sort_in(messages)
        self.cursor = cursor if cursor.sequence < self._log.end.sequence else None

    def read_all(self) -> None:
        """Have all messages that may be read in memory: those in the log are about to become others."""
        while self.cursor is not None:
            messages, self.cursor = self._log.read(self.cursor, _REFILL)
            if not messages or self.cursor.sequence >= self._log.readable_end:
                self.cursor = None
            self._sort_in(messages)

    def ready(self) -> deque[Message]:
        """The messages that come next, read from the log if memory is empty; take from the left what is delivered."""
        while not self.memory and self.cursor is not None:
            messages, self.cursor = self._log.read(self.cursor, _REFILL)
            if self.cursor.sequence >= self._log.end.sequence:
                self.cursor = None
            if not messages:
                break
            self._sort_in(messages)
        return self.memory

    def _sort_in(self, messages: Sequence[Message]) -> None:
        self.memory.extend(self._defer_some(messages))

    def _defer_some(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Put those aside that are not ready yet; the others."""
        now = time.time()
        ready = [message for message in messages if message.due <= now]
        if len(ready) < len(messages):
            for message in messages:
                if message.due > now:
                    self.defer(message)
        return ready

    def defer(self, message: Message) -> None:
        """Add a message that is not ready before its ``due``."""
        self.deferred.put((message,), message.due)

    def pop_due(self, now: float) -> list[Message]:
        """Take out the deferred messages that are ready at ``now``, in seconds since the epoch."""
        due = self.deferred.pop_due(now)
        for message in due:
            message.due = 0.0
        return due

    def unfinished(self) -> Iterator[Message]:
        """Every message that is in memory, ready or not."""
        yield from self.memory
        yield from self.deferred

    def clear(self) -> None:
        """Forget everything."""
        self.memory.clear()
        self.deferred.clear()
        self.cursor = None

    def release(self, held_at: Position) -> None:
        """Let the records through that the log held back from ``held_at`` on."""
        if self._is_ephemeral:
            self._release_while_room(held_at)
            return
        if self.cursor is None and held_at.sequence < self._log.end.sequence:
            self.cursor = held_at
            if len(self) <= self._capacity:
                self.read_all()

    def _release_while_room(self, position: Position) -> None:
        while position.sequence < self._log.end.sequence:
            messages, position = self._log.read(position, _REFILL)
            if not messages:
                break
            self._put_while_room(self._defer_some(messages))
