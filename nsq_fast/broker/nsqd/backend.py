"""The backend queue of a channel: the messages for which there was no room in its memory, first in, first out.

In the original it is a file of its own (nsqio/nsq: nsqd/channel.go, put; nsqio/go-diskqueue). Here all channels of a
topic share the topic's log, so nothing is written twice: a queue is the place from which on its channel reads the
log, and the gaps behind that place, for the messages that the channel has in memory or is done with.

A message that comes back after a delivery stays in memory, and has its place in the order of the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from nsq_fast.broker.diskqueue.log import SegmentLog
from nsq_fast.broker.diskqueue.segments import Position
from nsq_fast.broker.message import Message

from .gaps import Gap, Gaps

_READ_AHEAD = 2000
_MANY_GAPS = 10_000
"""Gaps that a checkpoint is quickly written with. A channel that has more fills its memory again when it has fewer."""


class BackendQueue:
    """The backend queue of one channel.

    Args:
        log: the topic's. Its readers may not pass what the topic holds back: that is in no queue yet.
        sort_out: takes the messages that are read, and gives back those that are ready; it keeps the others.

    Attributes:
        cursor: where the log is to be read next; None: nothing in it is for this queue.
    """

    __slots__ = ("_damages", "_gaps", "_log", "_read_ahead", "_returned", "_sort_out", "cursor")

    def __init__(self, log: SegmentLog, sort_out: Callable[[Sequence[Message]], Iterable[Message]]) -> None:
        self.cursor: Position | None = None
        self._log = log
        self._sort_out = sort_out
        self._gaps = Gaps()
        self._damages = 0
        self._read_ahead: deque[Message] = deque()
        # Messages that came back, each with the number of the record that it comes before.
        self._returned: deque[tuple[int, Message]] = deque()

    def __len__(self) -> int:
        return len(self._read_ahead) + len(self._returned) + self._unread

    def __bool__(self) -> bool:
        return self.cursor is not None or bool(self._read_ahead) or bool(self._returned)

    @property
    def _unread(self) -> int:
        if self.cursor is None:
            return 0
        log = self._log
        left_out = self._gaps.records
        if log.damages:  # a gap may have numbers without records
            left_out = sum(log.count(gap.first, gap.end.sequence) for gap in self._gaps)
        return max(0, log.count(self.cursor.sequence, log.readable_end) - left_out)

    @property
    def has_many_gaps(self) -> bool:
        """Whether it should get no more gaps for a while."""
        return len(self._gaps) >= _MANY_GAPS

    # --- in ----------------------------------------------------------------------------------------------------------

    def add_from(self, position: Position) -> None:
        """Add all that the log has from a position on, and what will be behind that, as far as no gap leaves it out."""
        if self.cursor is None and position.sequence < self._log.readable_end:
            self.cursor = position

    def leave_out(self, first: int, end: Position) -> None:
        """Leave out the records from number ``first`` to before ``end``, which lie behind all others of the queue."""
        if self.cursor is not None and first < end.sequence:
            self._gaps.add(Gap(first, end))
            self._move_to(self.cursor)

    def put_back(self, messages: Sequence[Message]) -> None:
        """Add messages that were delivered or deferred."""
        end = self._log.readable_end
        self._returned.extend((end, message) for message in messages)

    def restore(self, cursor: Position, gaps: Iterable[Gap], delivered: Iterable[Message]) -> None:
        """Begin at a position, with gaps behind it, and messages from such gaps that were delivered before."""
        self._returned.extend((message.sequence, message) for message in delivered)
        self._damages = self._log.damages
        self.add_from(cursor)
        for gap in gaps:
            self.leave_out(*gap)

    # --- out ---------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[Message]:
        """Take out the next messages; fewer than ``count`` only when there are no more."""
        read_ahead = self._read_ahead
        if count <= len(read_ahead) and not self._returned:
            return [read_ahead.popleft() for _ in range(count)]
        taken: list[Message] = []
        while len(taken) < count:
            if self._comes_back_next():
                taken.append(self._returned.popleft()[1])
            elif read_ahead:
                at_once = 1 if self._returned else min(count - len(taken), len(read_ahead))
                taken += [read_ahead.popleft() for _ in range(at_once)]
            elif self.cursor is not None:
                self._read(self.cursor)
            else:
                break
        return taken

    def _comes_back_next(self) -> bool:
        if not self._returned:
            return False
        before = self._returned[0][0]
        if self._read_ahead:
            return before <= self._read_ahead[0].sequence
        return self.cursor is None or before <= self.cursor.sequence

    def _read(self, cursor: Position) -> None:
        messages, end = self._log.read(cursor, _READ_AHEAD)
        if self._damages != self._log.damages:
            # Numbers are not what they were when the gaps were made: rather a message again than none.
            self._damages = self._log.damages
            self._gaps.forget(sorted(self._log.inexact_numbers()))
        self._read_ahead.extend(self._sort_out(self._gaps.outside(messages)))
        self._move_to(end if messages else Position(self._log.readable_end, 0))

    def _move_to(self, position: Position) -> None:
        position = self._gaps.pass_at(position)
        self.cursor = position if position.sequence < self._log.readable_end else None
        if self.cursor is None:
            self._gaps.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.cursor = None
        self._gaps.clear()
        self._read_ahead.clear()
        self._returned.clear()

    # --- for a checkpoint --------------------------------------------------------------------------------------------

    def in_memory(self) -> Iterator[Message]:
        """Every message of the queue that is in memory."""
        yield from self._read_ahead
        yield from (message for _, message in self._returned)

    def unread(self) -> list[tuple[int, int]]:
        """The numbers of the records that were not read yet: ranges of (first, one after the last)."""
        return [] if self.cursor is None else list(self._gaps.between(self.cursor.sequence, self._log.readable_end))
