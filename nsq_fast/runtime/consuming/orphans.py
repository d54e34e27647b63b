"""Messages of lost connections that the program has got and not answered.

nsqd delivers them again elsewhere, but here they still take memory and handlers: they count towards ``max_in_flight``
until they are answered, or until the time is over that they had.
"""

from __future__ import annotations

from nsq_fast._codec import Message
from nsq_fast.protocol.in_flight import InFlight


class Orphans:
    """The ledgers of the lost connections of one consumer.

    Attributes:
        counted: what ``count`` returned last; any thread may read it.
    """

    def __init__(self) -> None:
        self._ledgers: list[InFlight] = []
        self.counted = 0

    def adopt(self, ledger: InFlight) -> None:
        """A connection is lost. What nobody has begun to handle must be marked as responded before."""
        if ledger.pending():
            self._ledgers.append(ledger)
            self.count()

    def count(self) -> int:
        """How many messages there are."""
        # A ledger that is empty is done with: nothing is ever added to that of a lost connection.
        counts = [len(ledger.pending()) for ledger in self._ledgers]
        self._ledgers = [ledger for ledger, count in zip(self._ledgers, counts, strict=True) if count]
        self.counted = sum(counts)
        return self.counted

    def expire(self, now: float) -> list[Message]:
        """Take out and return those whose time is over at ``now`` (monotonic)."""
        expired = [message for ledger in self._ledgers for message in ledger.expire(now)]
        self.count()
        return expired

    @property
    def next_deadline(self) -> float:
        """Before this moment ``expire`` finds nothing."""
        return min((ledger.next_deadline for ledger in self._ledgers), default=float("inf"))
