"""Does an ordered partition keep its order? Pure: positions in, verdicts out.

A redesigned server numbers the messages of a partition (internal id) and
stores them one behind the other (offset). Neither may go backwards from one
delivery to the next; the same message again is a redelivery and no breach.
The ledger outlives connections: a new leader goes on where the old one was.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import NamedTuple


class Position(NamedTuple):
    """Where a message lies in its partition: unsigned internal id, and offset of its record in bytes."""

    internal_id: int
    offset: int


class Verdict(Enum):
    """How a message lies to the one delivered before it."""

    NEXT = "next"
    AGAIN = "again"
    BACKWARDS = "backwards"


class OrderLedger:
    """The last position of each partition.

    Attributes:
        repeated: messages that were delivered again.
        violations: messages that lay before the last one.
    """

    __slots__ = ("_last", "repeated", "violations")

    def __init__(self) -> None:
        self.repeated: int = 0
        self.violations: int = 0
        self._last: dict[Hashable, tuple[int, int]] = {}

    def last(self, partition: Hashable) -> Position | None:
        """The position that the next message is measured by; None before the first."""
        last = self._last.get(partition)
        return None if last is None else Position(*last)

    def moves_on(self, partition: Hashable, internal_id: int, offset: int) -> bool:
        """Move on to a message that lies behind the last one, as nearly all do; False leaves it to ``check``."""
        last = self._last.get(partition)
        if last is None or internal_id <= last[0] or offset <= last[1]:
            return False
        self._last[partition] = internal_id, offset
        return True

    def check(self, partition: Hashable, seen: Position) -> Verdict:
        """Judge the next message of a partition, and move on to it unless it lies behind."""
        last = self.last(partition)
        if last is None:
            self._last[partition] = seen
            return Verdict.NEXT
        if seen == last:
            self.repeated += 1
            return Verdict.AGAIN
        if seen.internal_id < last.internal_id or seen.offset < last.offset:
            self.violations += 1
            return Verdict.BACKWARDS
        self._last[partition] = seen
        return Verdict.NEXT

    def rewind(self, partition: Hashable, position: Position) -> None:
        """Go on from ``position``: a message that lay behind was delivered all the same.

        What follows it is then in order: a partition set back by an administrator is one violation, not thousands.
        """
        self._last[partition] = position
