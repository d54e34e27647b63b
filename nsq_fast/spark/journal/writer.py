"""The thread that writes segments. What is gathered while it waits for the disk goes into one segment, not several.

So the slower the disk, the larger the segments, and the more rows for each fsync.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Any, NamedTuple

from nsq_fast._frame import Columns, join_columns


class _Part(NamedTuple):
    columns: Any
    deadline: float
    result: Future[int | None]


class Writer:
    """Writes in the order of the calls. Use it in a ``with`` block: everything is written when the block ends.

    Args:
        keep: makes a segment of columns, and of so many parts, and returns its number.
        group: most parts of a segment.
        max_bytes: of bodies, from which on nothing more is put into a segment.
    """

    def __init__(self, keep: Callable[[Any, int], int], group: int, max_bytes: int) -> None:
        self._keep = keep
        self._group = group
        self._max_bytes = max_bytes
        self._waiting: deque[_Part] = deque()
        self._pool = ThreadPoolExecutor(1, "nsq-journal")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def write(self, columns: Any, deadline: float) -> Future[int | None]:
        """The number of the segment to come, or None when it was not begun before ``deadline`` (monotonic)."""
        result: Future[int | None] = Future()
        self._waiting.append(_Part(columns, deadline, result))
        self._pool.submit(self._work)
        return result

    def _work(self) -> None:
        parts = self._take()
        if not parts:  # written with an earlier one
            return
        try:
            columns = parts[0].columns if len(parts) == 1 else join_columns([part.columns for part in parts])
            number = self._keep(columns, len(parts))
        except BaseException as error:
            for part in parts:
                part.result.set_exception(error)
        else:
            for part in parts:
                part.result.set_result(number)

    def _take(self) -> list[_Part]:
        parts: list[_Part] = []
        size = 0
        while self._waiting and len(parts) < self._group and size < self._max_bytes:
            if parts and not (isinstance(self._waiting[0].columns, Columns) and isinstance(parts[0].columns, Columns)):
                break
            part = self._waiting.popleft()
            if monotonic() > part.deadline:
                part.result.set_result(None)
                continue
            parts.append(part)
            size += len(part.columns.body)
        return parts
