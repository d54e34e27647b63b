"""What one message costs, counted by a program that a client runs behind.

Such a program counts a whole run, start and end included. So the client runs twice, with few messages and with many,
and the difference is what the messages cost.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec


class Counter(msgspec.Struct, frozen=True, kw_only=True):
    """A program that counts.

    Attributes:
        what: it counts, in words.
        wrapper: the command that a client's command follows; it writes its report to the path.
        read: the number in what it wrote; None where there is none.
        share: of the messages of a round, so many are counted, since the client is slower behind it.
        is_slow: only the clients that goals compare are counted.
    """

    what: str
    wrapper: Callable[[Path], list[str]]
    read: Callable[[str], int | None]
    share: float
    is_slow: bool = False


def per_message(counter: Counter, run: Callable[[int, list[str]], int], few: int, many: int) -> float | None:
    """``run(count, wrapper)`` runs the client behind a command. None where nothing was counted, or too few to tell."""
    if many <= few:
        return None
    counts = []
    for count in (few, many):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report"
            run(count, counter.wrapper(report))
            found = counter.read(report.read_text()) if report.exists() else None
        if found is None:
            return None
        counts.append(found)
    return (counts[1] - counts[0]) / (many - few) if counts[1] > counts[0] else None
