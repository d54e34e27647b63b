"""The append-only log of a topic on disk: segments of records, each with a number.

``append`` is one pwrite(2), so what it has written survives the end of the
process however it ends. It survives a power loss once ``sync`` has returned.
A segment is named after its first record and is removed as a whole. The
folder comes into being with the first record.

A segment that is damaged is not written to any more. What is whole in it is
read, what is not leaves a gap in the numbers, and the file is kept under
another name.
"""

from __future__ import annotations

import bisect
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from nsq_fast.broker.message import Message

from .damage import Whole, number, whole_spans
from .record import join, parse, size_of_first
from .segment import SUFFIX, Segment

logger = logging.getLogger("nsq_fast.broker.diskqueue")

_READ_SIZE = 256 * 1024
_ALL = 2**31


class Position(NamedTuple):
    """Where a record begins: its number, and its offset in the segment that holds it."""

    sequence: int
    offset: int


class _Place(NamedTuple):
    """Where to read: a segment, the position there, and the offset at which the readable bytes end."""

    segment: Segment
    position: Position
    stop: int


class SegmentLog:
    """The log of one topic.

    Args:
        folder: where its segments are; None: in files without a name, which nobody finds again.
        segment_size: bytes after which a new segment begins.

    Attributes:
        end: the position of the next record.
        unsynced: records written since the last ``sync``.
        last_id: the id of the last message that was there when the log was opened; empty if there was none.
        held_at: readers may not pass this position; None: they may read to the end.
    """

    def __init__(self, folder: Path | None, segment_size: int) -> None:
        self.folder = folder
        self.end = Position(0, 0)
        self.unsynced = 0
        self.last_id = b""
        self.held_at: Position | None = None
        self._segment_size = segment_size
        self._segments: list[Segment] = []
        # Numbers without records: ranges of (first, one after the last), in order.
        self._gaps: list[tuple[int, int]] = []
        if folder is not None and folder.is_dir():
            self._open(folder)

    @property
    def readable_end(self) -> int:
        """The number of the first record that readers may not see."""
        return self.end.sequence if self.held_at is None else self.held_at.sequence

    @property
    def first(self) -> int:
        """The number of the first record that is still there, or would be."""
        return self._segments[0].first if self._segments else self.end.sequence

    def count(self, first: int, end: int) -> int:
        """How many records there are from number ``first`` to before ``end``, as far as damage is known."""
        missing = sum(max(0, min(end, stop) - max(first, start)) for start, stop in self._gaps)
        return max(0, end - first - missing)

    def inexact_numbers(self) -> Iterator[int]:
        """The numbers of records that may have had smaller ones before a damage: checkpoints do not know them."""
        for segment in self._segments:
            for piece in segment.pieces or ():
                if not piece.is_exact:
                    yield from range(piece.first, piece.end)

    # --- writing -----------------------------------------------------------------------------------------------------

    def append(self, frames: Sequence[bytes]) -> Position:
        """Write the records of frames with one write; the position of the first.

        Raises OSError with nothing of them kept.
        """
        segment = self._segments[-1] if self._segments else None
        if segment is None or segment.size >= self._segment_size or segment.pieces is not None:
            segment = self._roll()
        start = Position(self.end.sequence, segment.size)
        segment.write(join(frames))
        self.end = Position(start.sequence + len(frames), segment.size)
        self.unsynced += len(frames)
        return start

    def _roll(self) -> Segment:
        first, path = self.end.sequence, None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{first:020d}{SUFFIX}"
            if self._segments:
                os.fsync(self._segments[-1].fd)
        segment = Segment(path, first)
        self._segments.append(segment)
        return segment

    def sync(self) -> None:
        """Bring what was written to the disk itself. Blocks."""
        self.unsynced = 0
        if self._segments:
            os.fsync(self._segments[-1].fd)

    def take_unsynced(self) -> int | None:
        """A descriptor for another thread to sync and close, of the segment that is written to; None: nothing to do."""
        if not self.unsynced or not self._segments:
            return None
        self.unsynced = 0
        return os.dup(self._segments[-1].fd)

    # --- reading -----------------------------------------------------------------------------------------------------

    def read(self, position: Position, count: int) -> tuple[list[Message], Position]:
        """Up to ``count`` messages from ``position`` on, in as few as come with one read; and where to go on.

        None at all only when there are none before the readable end.
        """
        return self._read(position, count, self.readable_end)

    def _read(self, position: Position, count: int, end: int) -> tuple[list[Message], Position]:
        while position.sequence < end:
            place = self._locate(position)
            if place is None or place.position.sequence >= end:
                # Only a gap. The record of that number will begin a segment, so its offset does not matter.
                return [], self.end if end == self.end.sequence else Position(end, 0)
            found = self._read_at(place, min(count, end - place.position.sequence))
            if found is not None:
                return found
            if place.segment.pieces is None:
                self._examine(place.segment)
            else:
                self._give_up(place.segment)
            position = place.position
        return [], position

    def _read_at(self, place: _Place, count: int) -> tuple[list[Message], Position] | None:
        """The next messages of a segment, and where to go on; None if that is damaged here."""
        segment, (sequence, offset), stop = place
        is_checked = segment.pieces is not None
        try:
            data = segment.read(offset, min(_READ_SIZE, stop - offset))
            parsed = parse(data, sequence, count, is_checked=is_checked)
            if not parsed.messages and not parsed.is_damaged:
                # One that is larger than a read.
                data = segment.read(offset, min(size_of_first(data), stop - offset))
                parsed = parse(data, sequence, count, is_checked=is_checked)
        except OSError as error:
            logger.error("%s: reading at byte %d failed: %s", segment, offset, error)
            return None
        if parsed.is_damaged or not parsed.messages:
            return None
        return parsed.messages, Position(sequence + len(parsed.messages), offset + parsed.used)

    def _locate(self, position: Position) -> _Place | None:
        """Where the record of a position stands, or the first one behind it; None if there is none."""
        index = bisect.bisect_right(self._segments, position.sequence, key=lambda segment: segment.first) - 1
        for segment in self._segments[max(index, 0) :]:
            if position.sequence <= segment.first:
                # Also the end of one segment, which is the beginning of the next.
                position = Position(segment.first, 0)
            if segment.pieces is None:
                if position.offset < segment.size:
                    return _Place(segment, position, segment.size)
                self._examine(segment)  # it ends too early
            place = _place_in_pieces(segment, position)
            if place is not None:
                return place
        return None

    def seek(self, sequence: int) -> Position:
        """The position of a record by its number, the nearest one that is still there."""
        if sequence >= self.end.sequence or not self._segments:
            return self.end
        sequence = max(sequence, self.first)
        index = bisect.bisect_right(self._segments, sequence, key=lambda segment: segment.first) - 1
        at = Position(self._segments[index].first, 0)
        while at.sequence < sequence:
            _, at = self._read(at, _ALL, sequence)
        return at

    # --- damage ------------------------------------------------------------------------------------------------------

    def _examine(self, segment: Segment, *, is_end_known: bool = True) -> None:
        """Find what is whole in a segment that is damaged or too short, and say what is lost."""
        end = self._end_of(self._segments.index(segment)) if is_end_known else None
        whole = Whole([], b"")
        try:
            whole = whole_spans(segment.read(0, segment.size))
        except OSError as error:
            logger.error("%s cannot be read: %s", segment, error)
        segment.pieces = number(whole.spans, segment.size, segment.first, end)
        if end is None:
            # Its own name must not be that of the next segment.
            end = max([segment.first + 1, *(piece.end for piece in segment.pieces)])
            self.end, self.last_id = Position(end, 0), whole.last_id
        self._find_gaps()
        _report(segment, end)

    def _give_up(self, segment: Segment) -> None:
        """Read no more of a segment: what was whole in it is not any more, or cannot be read."""
        logger.error("%s: what was whole in it cannot be read any more and is lost", segment)
        segment.pieces = []
        self._find_gaps()

    def _find_gaps(self) -> None:
        self._gaps = [gap for index in range(len(self._segments)) for gap in self._gaps_of(index)]

    def _gaps_of(self, index: int) -> Iterator[tuple[int, int]]:
        segment = self._segments[index]
        if segment.pieces is None:
            return
        at = segment.first
        for piece in segment.pieces:
            if at < piece.first:
                yield at, piece.first
            at = piece.end
        if at < self._end_of(index):
            yield at, self._end_of(index)

    def start_at(self, sequence: int) -> None:
        """Give the next record at least this number: so many there have been."""
        if sequence > self.end.sequence:
            self.end = Position(sequence, 0)
            if self._segments and self._segments[-1].pieces is None:
                self._examine(self._segments[-1])
            self._find_gaps()

    # --- segments ----------------------------------------------------------------------------------------------------

    def remove_before(self, sequence: int) -> None:
        """Remove the segments that hold only records before ``sequence``."""
        while self._segments and self._end_of(0) <= sequence and (len(self._segments) > 1 or self._is_used_up()):
            self._segments.pop(0).remove()
            if not self._segments:
                self.end = Position(self.end.sequence, 0)

    def close(self) -> None:
        """Close the files."""
        for segment in self._segments:
            os.close(segment.fd)
        self._segments.clear()

    def _open(self, folder: Path) -> None:
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            if path.stem.isdecimal():
                self._segments.append(Segment(path, int(path.stem), path.stat().st_size))
            else:
                logger.warning("%s is no part of the log: its name is no number; it is left alone", path)
        if self._segments:
            self._segments.sort(key=lambda segment: segment.first)
            self._recover(self._segments[-1])
        for segment in self._segments:
            if segment.pieces is None and segment.aside is not None and segment.aside.exists():
                self._examine(segment)  # it was damaged before

    def _recover(self, last: Segment) -> None:
        """Count the records of the last segment."""
        self.end = Position(last.first, 0)
        while self.end.offset < last.size:
            found = self._read_at(_Place(last, self.end, last.size), _ALL)
            if found is None:
                self._examine(last, is_end_known=False)
                return
            messages, self.end = found
            self.last_id = messages[-1].id

    def _end_of(self, index: int) -> int:
        return self._segments[index + 1].first if index + 1 < len(self._segments) else self.end.sequence

    def _is_used_up(self) -> bool:
        # The segment that is written to goes only when it has grown to some size: a file a message costs more.
        segment = self._segments[-1]
        return segment.pieces is not None or segment.size >= min(self._segment_size, _READ_SIZE)


def _place_in_pieces(segment: Segment, position: Position) -> _Place | None:
    """The record of a position, or the first one behind it, in a segment that is damaged."""
    for piece in segment.pieces or ():
        if position.sequence < piece.end:
            span = piece.span
            if piece.first < position.sequence and span.start < position.offset < span.end:
                return _Place(segment, position, span.end)
            return _Place(segment, Position(piece.first, span.start), span.end)
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
        )  # fmt: skip
    elif whole < end - segment.first:
        logger.error(
            "%s: %d messages behind it are missing: the next one that is known of is number %d",
            segment, end - segment.first - whole, end,
        )  # fmt: skip
