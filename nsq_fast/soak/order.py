"""The invariants of ordered topics: first deliveries of a key in the order of its publishes, one handler at a time."""

from __future__ import annotations

from collections import Counter


class KeyOrder:
    """Sequences per key. A message that comes again is a duplicate, not a violation."""

    def __init__(self) -> None:
        self._late: dict[tuple[int, int], int] = {}
        self._highest: dict[int, int] = {}
        self._seen: dict[int, set[int]] = {}
        self._loose: set[tuple[int, int]] = set()

    def mark_loose(self, key: int, sequence: int) -> None:
        """The publish of this message failed: if it was stored after all, it may be anywhere."""
        self._loose.add((key, sequence))

    def delivered(self, key: int, sequence: int) -> None:
        """A delivery to a handler."""
        seen = self._seen.setdefault(key, set())
        if sequence in seen:
            return
        seen.add(sequence)
        highest = self._highest.get(key, -1)
        if sequence < highest:
            self._late[key, sequence] = highest
        self._highest[key] = max(highest, sequence)

    @property
    def violations(self) -> list[str]:
        """First deliveries of a message after a later one of its key, in words; asked when all has settled."""
        return [
            f"key {key}: message {sequence} came after {highest}"
            for (key, sequence), highest in self._late.items()
            if (key, sequence) not in self._loose
        ]


class Turns:
    """How many handlers run at once, of each partition or over all.

    Attributes:
        most: the highest number seen for any one name.
    """

    def __init__(self) -> None:
        self.most = 0
        self._running: Counter[object] = Counter()

    def enter(self, name: object) -> None:
        """A handler begins."""
        self._running[name] += 1
        self.most = max(self.most, self._running[name])

    def leave(self, name: object) -> None:
        """It ends."""
        self._running[name] -= 1
