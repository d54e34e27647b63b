"""What is whole in a segment that is damaged. Pure functions over bytes.

``whole_spans`` finds the records that are whole. ``number`` gives them their numbers
again, as far as they can be known, because checkpoints name records by number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .record import SMALLEST, Record, hidden_record, next_record, parse, record_at, size_of_first

_WINDOW = 64 * 1024


class Span(NamedTuple):
    """Records without a gap between them: where the first begins, where the last ends, and how many there are."""

    start: int
    end: int
    records: int


class Piece(NamedTuple):
    """A span with the number of its first record.

    ``is_exact``: that number is known. If not, it is at least what it was, so nothing counts as read that was not.
    """

    first: int
    span: Span
    is_exact: bool

    @property
    def end(self) -> int:
        """The number after that of the last record."""
        return self.first + self.span.records


class Whole(NamedTuple):
    """What is whole in a segment: the spans, and the id of the last message."""

    spans: list[Span]
    last_id: bytes


class _Stretch(NamedTuple):
    """Whole records that follow each other: where the first begins, where the last ends, and the ids of all."""

    start: int
    end: int
    ids: Sequence[bytes]


def whole_spans(data: bytes) -> Whole:
    """The whole records of a segment."""
    stretches = list(_stretches(data))
    ids = [id for stretch in stretches for id in stretch.ids]
    if len(set(ids)) < len(ids):
        records = _drop_duplicates([record for stretch in stretches for record in _records_of(data, stretch)])
        stretches = [_Stretch(record.start, record.end, [record.id]) for record in records]
    spans: list[Span] = []
    for stretch in stretches:
        if spans and spans[-1].end == stretch.start:
            spans[-1] = Span(spans[-1].start, stretch.end, spans[-1].records + len(stretch.ids))
        else:
            spans.append(Span(stretch.start, stretch.end, len(stretch.ids)))
    return Whole(spans, stretches[-1].ids[-1] if stretches else b"")


def _stretches(data: bytes) -> Iterator[_Stretch]:
    record = next_record(data, 0)
    slow_until = 0
    while record is not None:
        if record.start >= slow_until:
            messages, used, is_damaged = parse(data[record.start : record.start + _WINDOW], 0, _WINDOW)
            if messages and not is_damaged:
                end = record.start + used
                yield _Stretch(record.start, end, [message.id for message in messages])
                record = record_at(data, end) or next_record(data, end)
                continue
            slow_until = record.start + _WINDOW
        after = record_at(data, record.end)
        hidden = hidden_record(data, record.start, record.id, after.id if after is not None else b"")
        if hidden is not None:
            record = hidden  # the one that it is in has a wrong size
            continue
        yield _Stretch(record.start, record.end, [record.id])
        record = after or next_record(data, record.end)


def _records_of(data: bytes, stretch: _Stretch) -> Iterator[Record]:
    start = stretch.start
    for id in stretch.ids:
        end = start + size_of_first(data[start : start + 4])
        yield Record(start, end, id)
        start = end


def _drop_duplicates(records: list[Record]) -> list[Record]:
    """Leave out the records whose ids have become those of others: two messages in flight need two ids."""
    by_id: dict[bytes, int] = {}
    wrong: set[int] = set()
    for index, record in enumerate(records):
        other = by_id.setdefault(record.id, index)
        if other != index:
            wrong.add(other if _is_misplaced(records, other, index) else index)
    return [record for index, record in enumerate(records) if index not in wrong] if wrong else records


def _is_misplaced(records: list[Record], first: int, second: int) -> bool:
    """Whether of two records with the same id the first is the wrong one: ids increase, mostly by one."""
    if first + 1 < second:
        return records[first + 1].id < records[first].id
    id = records[first].id
    before, after = records[first - 1 : first], records[second + 1 : second + 2]
    return any(_steps(record.id, id) == 2 for record in before) or any(_steps(id, record.id) == 1 for record in after)


def _steps(id: bytes, next_id: bytes) -> int:
    try:
        return int(next_id, 16) - int(id, 16)
    except ValueError:
        return 0


def number(spans: Sequence[Span], size: int, first: int, end: int | None) -> list[Piece]:
    """Give spans their numbers.

    Args:
        size: bytes of the segment.
        first: the number of the segment's first record.
        end: the number that follows the segment's last record; None when that is not known.
    """
    if not spans:
        return []
    has_prefix = spans[0].start == 0
    pieces = [Piece(first, spans[0], True)] if has_prefix else []
    rest = spans[len(pieces) :]
    least = pieces[0].end if pieces else first
    is_known = end is not None and len(rest) == 1 and rest[0].end == size and end - least <= _most(spans)
    if end is None:
        end = least + _most(spans)
    # From the end backwards: no record gets a smaller number than it had.
    numbered: list[Piece] = []
    at = max(end, least + sum(span.records for span in rest))
    for span in reversed(rest):
        at -= span.records
        numbered.append(Piece(at, span, is_known))
    return pieces + numbered[::-1]


def _most(spans: Sequence[Span]) -> int:
    """How many records there can have been from the first gap to the end of the last span."""
    has_prefix = spans[0].start == 0
    count, at = 0, spans[0].end if has_prefix else 0
    for span in spans[1 if has_prefix else 0 :]:
        count += 1 + (span.start - at) // SMALLEST + span.records
        at = span.end
    return count
