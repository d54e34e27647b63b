"""What waits to be delivered in a channel: the first messages in memory, the others by their place in the log.

A backlog that fits into memory never touches the disk again. One that does not
remembers where in the topic's log it goes on, and reads from there when its
memory has been used up: order is kept, and nothing is written twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from nsq_fast.broker.diskqueue.log import Position, SegmentLog
from nsq_fast.broker.diskqueue.record import size_of
from nsq_fast.broker.message import Message

_REFILL = 2000


class Backlog:
    """The queue of one channel.

    Attributes:
        memory: the messages that come next.
        cursor: where the log is to be read when ``memory`` is empty; None: there is nothing beyond ``memory``.
    """

    __slots__ = ("_capacity", "_log", "cursor", "memory")

    def __init__(self, log: SegmentLog, capacity: int) -> None:
        self.memory: deque[Message] = deque()
        self.cursor: Position | None = None
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
        """Add messages for which there is room, or that come back: those are never put on disk again."""
        self.memory.extend(messages)

    def put_logged(self, messages: Sequence[Message], frames: Sequence[bytes], start: Position) -> None:
        """Add messages that the log holds from ``start`` on; what memory has no room for is read back later."""
        if self.cursor is not None:
            return
        room = max(0, self._capacity - len(self.memory))
        self.memory.extend(messages[:room])
        if room < len(messages):
            self.cursor = Position(start.sequence + room, start.offset + size_of(frames[:room]))

    def put_while_room(self, messages: Sequence[Message]) -> None:
        """Add messages of which those without room are lost: an ephemeral channel's way."""
        self.memory.extend(messages[: max(0, self._capacity - len(self.memory))])

    def read(self) -> list[Message]:
        """The next messages of the log, as many as one read gives. The caller puts them where they belong."""
        if self.cursor is None:
            return []
        messages, self.cursor = self._log.read(self.cursor, _REFILL)
        if self.cursor.sequence >= self._log.end.sequence:
            self.cursor = None
        return messages

    def clear(self) -> None:
        """Forget everything."""
        self.memory.clear()
        self.cursor = None

    def release(self, held_at: Position) -> None:
        """Let the records through that the log held back from ``held_at`` on."""
        if self.cursor is None and held_at.sequence < self._log.end.sequence:
            self.cursor = held_at
