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

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from nsq_fast.broker.message import Message
from nsq_fast.log_events import BROKER_DATA_DAMAGED, BROKER_FILE_IGNORED

from .record import join, parse, size_of_first
from .segment import SUFFIX, Segment
from .segments import Place, Position, Segments

logger = logging.getLogger("nsq_fast.broker.diskqueue")

_READ_SIZE = 256 * 1024
_ALL = 2**31


class SegmentLog:
    """The log of one topic.

    Args:
        folder: where its segments are; None: in files without a name, which end with the process.
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
        self._segments = Segments()
        if folder is not None and folder.is_dir():
            self._open(folder)

    @property
    def readable_end(self) -> int:
        """The number of the first record that readers may not see."""
        return self.end.sequence if self.held_at is None else self.held_at.sequence

    @property
    def first(self) -> int:
        """The number of the first record that is still there, or would be."""
        segments = self._segments.all
        return segments[0].first if segments else self.end.sequence

    def count(self, first: int, end: int) -> int:
        """How many records there are from number ``first`` to before ``end``, as far as damage is known."""
        return self._segments.count(first, end)

    @property
    def damages(self) -> int:
        """How many times damage was found since it was opened."""
        return self._segments.damages

    def inexact_numbers(self) -> Iterator[int]:
        """The numbers of records that may have had smaller ones before a damage: checkpoints do not know them."""
        return self._segments.inexact_numbers()

    # --- writing -----------------------------------------------------------------------------------------------------

    def append(self, frames: Sequence[bytes]) -> Position:
        """Write the records of frames with one write; the position of the first.

        Raises OSError with nothing of them kept.
        """
        segment = self._last
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
            if self._last is not None:
                self._last.sync()
        segment = Segment(path, first)
        self._segments.all.append(segment)
        return segment

    @property
    def _last(self) -> Segment | None:
        segments = self._segments.all
        return segments[-1] if segments else None

    def sync(self) -> None:
        """Bring what was written to the disk itself. Blocks."""
        if self.unsynced and self._last is not None:
            self._last.sync()
        self.unsynced = 0

    def take_unsynced(self) -> int | None:
        """A descriptor for another thread to sync and close, of the segment that is written to; None: nothing to do."""
        if not self.unsynced or self._last is None:
            return None
        self.unsynced = 0
        return self._last.duplicate()

    # --- reading -----------------------------------------------------------------------------------------------------

    def read(self, position: Position, count: int) -> tuple[list[Message], Position]:
        """Up to ``count`` messages from ``position`` on, in as few as come with one read; and where to go on.

        None at all only when there are none before the readable end.
        """
        return self._read(position, count, self.readable_end)

    def _read(self, position: Position, count: int, end: int) -> tuple[list[Message], Position]:
        while position.sequence < end:
            place = self._segments.locate(position, self.end.sequence)
            if place is None or place.position.sequence >= end:
                # Only a gap. The record of that number will begin a segment, so its offset does not matter.
                return [], self.end if end == self.end.sequence else Position(end, 0)
            found = self._read_at(place, min(count, end - place.position.sequence))
            if found is not None:
                return found
            if place.segment.pieces is None:
                self._segments.examine(place.segment, self.end.sequence)
            else:
                self._segments.give_up(place.segment, self.end.sequence)
            position = place.position
        return [], position

    def _read_at(self, place: Place, count: int) -> tuple[list[Message], Position] | None:
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
            logger.error("%s: reading at byte %d failed: %s", segment, offset, error, extra=BROKER_DATA_DAMAGED)
            return None
        if parsed.is_damaged or not parsed.messages:
            return None
        return parsed.messages, Position(sequence + len(parsed.messages), offset + parsed.used)

    def seek(self, sequence: int, start: Position | None = None) -> Position:
        """The position of a record by its number, the nearest one that is still there.

        Looks from ``start`` on, or from the beginning of a segment.
        """
        segments = self._segments
        if sequence >= self.end.sequence or not segments.all:
            return self.end
        sequence = max(sequence, self.first)
        at = Position(segments.all[segments.index_of(sequence)].first, 0)
        if start is not None:
            at = max(at, start)
        while at.sequence < sequence:
            _, at = self._read(at, _ALL, sequence)
        return at

    def start_at(self, sequence: int) -> None:
        """Give the next record at least this number: so many there have been."""
        if sequence > self.end.sequence:
            self.end = Position(sequence, 0)
            if self._last is not None and self._last.pieces is None:
                self._segments.examine(self._last, sequence)
            self._segments.find_gaps(sequence)

    # --- segments ----------------------------------------------------------------------------------------------------

    def remove_before(self, sequence: int) -> None:
        """Remove the segments that hold only records before ``sequence``."""
        segments = self._segments.all
        while segments and self._segments.end_of(0, self.end.sequence) <= sequence:
            if len(segments) == 1 and not _is_used_up(segments[0], self._segment_size):
                return
            segments.pop(0).remove()
            if not segments:
                self.end = Position(self.end.sequence, 0)

    def close(self) -> None:
        """Close the files."""
        for segment in self._segments.all:
            segment.close()
        self._segments.all.clear()

    def _open(self, folder: Path) -> None:
        segments = self._segments.all
        names = _names_in(folder)
        for path in (folder / name for name in sorted(names) if name.endswith(SUFFIX)):
            if path.stem.isdecimal():
                segments.append(Segment(path, int(path.stem), path.stat().st_size))
            else:
                logger.warning(
                    "%s is no part of the log: its name is no number; it is left alone", path, extra=BROKER_FILE_IGNORED
                )
        segments.sort(key=lambda segment: segment.first)
        if self._last is not None:
            self._recover(self._last)
        for segment in segments:
            if segment.pieces is None and segment.aside is not None and segment.aside.name in names:
                self._segments.examine(segment, self.end.sequence)  # it was damaged before

    def _recover(self, last: Segment) -> None:
        """Count the records of the last segment."""
        self.end = Position(last.first, 0)
        while self.end.offset < last.size:
            found = self._read_at(Place(last, self.end, last.size), _ALL)
            if found is None:
                self.last_id = self._segments.examine(last, None)
                self.end = Position(last.pieces_end, 0)
                return
            messages, self.end = found
            self.last_id = messages[-1].id


def _is_used_up(last: Segment, segment_size: int) -> bool:
    """Whether the segment that is written to may be removed: not before it has some size, for a file costs more."""
    return last.pieces is not None or last.size >= min(segment_size, _READ_SIZE)


def _names_in(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))  # a glob takes ten times as long, for each of many topics
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return set()
