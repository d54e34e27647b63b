"""One connection that fills one segment after another, and knows which of its FINs the server has processed.

It never asks for more messages than were granted: RDY is the number of messages
here that are unfinished plus those still to come. So nothing is left over at
the end, unless another consumer takes messages of the channel.

What the server sends shows which FINs it has processed: it sends the n-th
message only when all messages before it but RDY are finished, and it processes
FINs in their order. A message may also have left by the server's timeout, so
one that was here for long is never taken for finished.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import NamedTuple

from nsq_fast._frame import Columns
from nsq_fast.runtime import ColumnSubscription

STALE = 0.8
"""After this part of the server's message timeout, messages are left to run into it rather than kept."""

SURE = 0.5
"""Within this part of it, none can have run into it."""


class Claimed(NamedTuple):
    """A segment of this connection: its number, how many messages had arrived with its last, since when they could."""

    number: int
    arrived: int
    granted_at: float


class Work(NamedTuple):
    """What was gathered and is being written.

    Attributes:
        ids: all that came, to be finished.
        dropped: the keys of those that are not kept, as the journal holds them already.
        result: the number of the segment; None when it was too late to keep it, or there was nothing to keep.
    """

    ids: bytes
    dropped: frozenset[bytes]
    arrived: int
    granted_at: float
    result: Future[int | None] | None


class JournalConnection:
    """A subscription with its accounts.

    Attributes:
        outstanding: messages asked for that have not arrived.
        work: what is being written; its messages are unfinished.
        unsure: segments of which it is not certain that the server has taken every FIN.
        dropped: the keys of messages that were finished and not kept.
    """

    def __init__(self, subscription: ColumnSubscription) -> None:
        self.subscription = subscription
        self.outstanding = 0
        self.work: Work | None = None
        self.unsure: list[Claimed] = []
        self.dropped: set[bytes] = set()
        self._arrived = 0
        self._largest_rdy = 0
        self._granted_at = time.monotonic()
        self._last_granted_at = self._granted_at

    @property
    def message_timeout(self) -> float:
        """Seconds."""
        return self.subscription.info.msg_timeout

    def grant(self, rows: int) -> None:
        """Ask for so many more messages. To be called before the FINs that make room for them."""
        self.outstanding += rows
        self._largest_rdy = max(self._largest_rdy, self.outstanding)
        self._last_granted_at, self._granted_at = self._granted_at, time.monotonic()
        self.subscription.set_rdy(self.outstanding)

    def give_up(self) -> None:
        """Ask for no more messages, and none of those that were granted."""
        self.outstanding = 0

    def took(self, columns: Columns) -> None:
        """These have arrived."""
        self._arrived += columns.count
        self.outstanding = max(0, self.outstanding - columns.count)

    def begin(self, ids: bytes, dropped: frozenset[bytes], result: Future[int | None] | None) -> None:
        """All that has arrived is being written."""
        self.work = Work(ids, dropped, self._arrived, self._last_granted_at, result)

    def claimed(self, work: Work, number: int) -> None:
        """What was being written is a segment, and is finished next."""
        self.unsure.append(Claimed(number, work.arrived, work.granted_at))

    def sure(self) -> list[int]:
        """The segments that are now known to be finished and were not before."""
        now = time.monotonic()
        known = [
            each
            for each in self.unsure
            if each.arrived <= self._arrived - self._largest_rdy and now - each.granted_at < SURE * self.message_timeout
        ]
        self.unsure = [each for each in self.unsure if each not in known]
        return [each.number for each in known]

    @property
    def deadline(self) -> float:
        """Until when what has arrived may be kept."""
        return self._last_granted_at + STALE * self.message_timeout
