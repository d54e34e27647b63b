"""How many publishes of a producer have ended, and how."""

from __future__ import annotations


class Outcomes:
    """Counts since the start. One publish to several partitions is several.

    Attributes:
        stored: an nsqd confirmed it.
        refused: it failed, and is not stored.
        unknown: it failed, and a server may have stored it.
    """

    __slots__ = ("refused", "stored", "unknown")

    def __init__(self) -> None:
        self.stored = 0
        self.refused = 0
        self.unknown = 0

    def ended(self, error: BaseException | None) -> None:
        """One has ended, well when ``error`` is None."""
        if error is None:
            self.stored += 1
        elif getattr(error, "possibly_stored", False):
            self.unknown += 1
        else:
            self.refused += 1
