"""Leaves out messages that the journal holds already. Costs nothing while there are no suspects."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

from nsq_fast._codec import MESSAGE_ID_SIZE

from .segment import Stored, StoredColumns, keys_of
from .suspects import Suspects

_WIDTHS = {
    "timestamps": 8, "attempts": 2, "ids": MESSAGE_ID_SIZE, "internal_ids": 8, "trace_ids": 8, "offsets": 8, "sizes": 4,
    "ext_versions": 1,
}  # fmt: skip


class Screen:
    """Compares what arrives with the suspects; None lets everything pass."""

    def __init__(self, suspects: Suspects | None) -> None:
        self._suspects = suspects
        self._known = suspects.load() if suspects is not None else set()

    def drop_known(self, columns: Any, unsure: Callable[[], Iterable[Stored]] = list) -> tuple[Any, frozenset[bytes]]:
        """The messages that are new, as columns, and the keys of the others.

        ``unsure`` are segments of the same batch that may not be finished; it is called when something comes again.
        """
        if self._suspects is None:
            return columns, frozenset()
        known = self._known
        if _has_redelivered(columns):
            self._known = known = self._suspects.load()  # there may be more by now
            known = known.union(*(segment.message_keys() for segment in unsure()))
        if not known:
            return columns, frozenset()
        keys = keys_of(columns)
        met = known.intersection(keys)
        if not met:
            return columns, frozenset()
        return take(columns, [row for row, key in enumerate(keys) if key not in met]), frozenset(met)


def _has_redelivered(columns: Any) -> bool:
    return bool(columns.count) and max(array("H", columns.attempts)) > 1


def take(columns: Any, rows: list[int]) -> StoredColumns:
    """These rows of columns."""
    found: dict[str, Any] = {}
    for name, width in _WIDTHS.items():
        column = getattr(columns, name)
        found[name] = None if column is None else _fixed(bytes(column), width, rows)
    found["body_offsets"], found["body"] = _variable(columns.body_offsets, columns.body, rows)
    if columns.ext is not None:
        found["ext_offsets"], found["ext"] = _variable(columns.ext_offsets, columns.ext, rows)
    return StoredColumns(count=len(rows), **found)


def _fixed(column: bytes, width: int, rows: list[int]) -> bytes:
    return b"".join([column[width * row : width * row + width] for row in rows])


def _variable(offsets: Any, data: Any, rows: list[int]) -> tuple[bytes, bytes]:
    starts, view = array("i", bytes(offsets)), memoryview(data)
    pieces = [view[starts[row] : starts[row + 1]] for row in rows]
    ends = array("i", [0])
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    return ends.tobytes(), b"".join(pieces)
