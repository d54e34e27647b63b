"""What an attempt has claimed so far, and which of it the server may deliver again."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from nsq_fast._codec import MESSAGE_ID_SIZE

from .chain import Chain, uncertain_elsewhere
from .segment import Head, Stored
from .suspects import Suspects

Claim = Callable[[int, Head, Any], Stored]
"""Writes a segment: its number, its head, its columns."""


class Claims:
    """The segments of one attempt at a slot.

    Args:
        head: what the heads of all segments have in common.
        suspects: where messages that may come again are written down; None: they pass.

    Attributes:
        segments: those that were claimed, by number.
    """

    def __init__(self, chain: Chain, head: Head, claim: Claim, suspects: Suspects | None) -> None:
        self.segments: list[Stored] = []
        self._chain = chain
        self._head = head
        self._claim = claim
        self._suspects = suspects
        self._unsure: Counter[int] = Counter()

    def keep(self, columns: Any, connections: int) -> int:
        """Write what several connections have gathered as one segment, and return its number. In a thread."""
        number = len(self.segments)
        head = self._head.of(columns.count, tuple(self._open()))
        self.segments.append(self._claim(number, head, columns))
        self._unsure[number] = connections
        return number

    def sure(self, numbers: Iterable[int]) -> None:
        """Of these segments the server has taken every FIN of one connection."""
        for number in numbers:
            self._unsure[number] -= 1

    def unfinished(self) -> list[Stored]:
        """Segments claimed in this batch that may be delivered again.

        They are those of this slot, and of slots whose attempt may have died.
        """
        ours = [self.segments[number] for number in self._open()]
        with contextlib.suppress(FileNotFoundError):  # too late for this attempt, as its next claim will tell
            return ours + uncertain_elsewhere(self._chain.storage, self._chain.slot)
        return ours

    def suspect(self, segments: Iterable[Stored]) -> None:
        """The messages of these may come again."""
        if self._suspects is not None:
            self._suspects.add(message_keys(segments))

    def suspect_late(self, ids: set[bytes]) -> None:
        """The FINs of messages with these ids came too late."""
        if ids and self._suspects is not None:
            self._suspects.add(key for key in message_keys(self.segments) if key[:MESSAGE_ID_SIZE] in ids)

    def _open(self) -> list[int]:
        """The segments whose FINs the server may not have taken."""
        return sorted(number for number, connections in list(self._unsure.items()) if connections > 0)


def message_keys(segments: Iterable[Stored]) -> Iterable[bytes]:
    """What their messages are known by."""
    return (key for segment in segments for key in segment.message_keys())
