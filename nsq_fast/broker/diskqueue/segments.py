"""The segments of a log in their order, with what is missing between and in them."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterator
from typing import NamedTuple

from nsq_fast.log_events import BROKER_DATA_DAMAGED

from .damage import Whole, number, whole_spans
from .segment import Segment

logger = logging.getLogger("nsq_fast.broker.diskqueue")


class Position(NamedTuple):
    """Where a record begins: its number, and its offset in the segment that holds it."""

    sequence: int
    offset: int


class Place(NamedTuple):
    """Where to read: a segment, the position there, and the offset at which the readable bytes end."""

    segment: Segment
    position: Position
    stop: int


class Segments:
    """The segments of one log. ``end`` is always the number that the log's next record gets.

    Attributes:
        all: the segments, the oldest first.
        damages: how many times damage was found.
    """

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self.damages = 0
        # Numbers without records: ranges of (first, one after the last), in order.
        self._gaps: list[tuple[int, int]] = []

    def locate(self, position: Position, end: int) -> Place | None:
        """Where the record of a position stands, or the first one behind it; None if there is none."""
        for segment in self.all[self.index_of(position.sequence) :]:
            if position.sequence <= segment.first:
                # Also the end of one segment, which is the beginning of the next.
                position = Position(segment.first, 0)
            if segment.pieces is None:
                if position.offset < segment.size:
                    return Place(segment, position, segment.size)
                self.examine(segment, end)  # it ends too early
            place = _place_in_pieces(segment, position)
            if place is not None:
                return place
        return None

    def index_of(self, sequence: int) -> int:
        """The index of the segment that a number belongs to; 0 for a number before the first one."""
        return max(0, bisect.bisect_right(self.all, sequence, key=lambda segment: segment.first) - 1)

    def end_of(self, index: int, end: int) -> int:
        """The number after that of the last record that a segment should have."""
        return self.all[index + 1].first if index + 1 < len(self.all) else end

    def count(self, first: int, end: int) -> int:
        """How many records there are from number ``first`` to before ``end``, as far as damage is known."""
        if not self._gaps:
            return max(0, end - first)
        missing = sum(max(0, min(end, stop) - max(first, start)) for start, stop in self._gaps)
        return max(0, end - first - missing)

    def inexact_numbers(self) -> Iterator[int]:
        """The numbers of records that may have had smaller ones before a damage: checkpoints do not know them."""
        for segment in self.all:
            for piece in segment.pieces or ():
                if not piece.is_exact:
                    yield from range(piece.first, piece.end)

    # --- damage ------------------------------------------------------------------------------------------------------

    def examine(self, segment: Segment, end: int | None) -> bytes:
        """Find what is whole in a segment that is damaged or too short, and say what is lost.

        Returns the id of its last message. ``end`` is None for the last segment of a log whose end is not known yet.
        """
        self.damages += 1
        whole = Whole([], b"")
        try:
            whole = whole_spans(segment.read(0, segment.size))
        except OSError as error:
            logger.error("%s cannot be read: %s", segment, error, extra=BROKER_DATA_DAMAGED)
        if end is not None:
            end = self.end_of(self.all.index(segment), end)
        segment.pieces = number(whole.spans, segment.size, segment.first, end)
        end = segment.pieces_end if end is None else end
        self.find_gaps(end)
        _report(segment, end)
        return whole.last_id

    def give_up(self, segment: Segment, end: int) -> None:
        """Read no more of a segment: what was whole in it is not any more, or cannot be read."""
        logger.error("%s: what was whole in it cannot be read any more and is lost", segment, extra=BROKER_DATA_DAMAGED)
        self.damages += 1
        segment.pieces = []
        self.find_gaps(end)

    def find_gaps(self, end: int) -> None:
        """Note the numbers that have no records."""
        self._gaps = [gap for index in range(len(self.all)) for gap in self._gaps_of(index, end)]

    def _gaps_of(self, index: int, end: int) -> Iterator[tuple[int, int]]:
        segment = self.all[index]
        if segment.pieces is None:
            return
        at = segment.first
        for piece in segment.pieces:
            if at < piece.first:
                yield at, piece.first
            at = piece.end
        if at < self.end_of(index, end):
            yield at, self.end_of(index, end)


def _place_in_pieces(segment: Segment, position: Position) -> Place | None:
    """The record of a position, or the first one behind it, in a segment that is damaged."""
    for piece in segment.pieces or ():
        if position.sequence < piece.end:
            span = piece.span
            if piece.first < position.sequence and span.start < position.offset < span.end:
                return Place(segment, position, span.end)
            return Place(segment, Position(piece.first, span.start), span.end)
    return None


def _report(segment: Segment, end: int) -> None:
    pieces = segment.pieces or ()
    whole = sum(piece.span.records for piece in pieces)
    bad = segment.size - sum(piece.span.end - piece.span.start for piece in pieces)
    if bad:
        aside = segment.keep_aside()
        first_bad = pieces[0].span.end if pieces and pieces[0].span.start == 0 else 0
        logger.error(
            "%s is damaged: %d of its %d bytes, from byte %d on, hold no whole message and are lost;"
            " %d whole messages are read from it; %s",
            segment, bad, segment.size, first_bad, whole,
            f"the file is kept as {aside}" if aside else "the file could not be kept under another name",
            extra=BROKER_DATA_DAMAGED,
        )  # fmt: skip
    elif whole < end - segment.first:
        logger.error(
            "%s: %d messages behind it are missing: the next one that is known of is number %d",
            segment, end - segment.first - whole, end, extra=BROKER_DATA_DAMAGED,
        )  # fmt: skip
