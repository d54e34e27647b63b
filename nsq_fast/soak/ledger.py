"""What became of each message: the invariants of delivery, without clock and sockets.

Every message has a number. A message that was answered OK must be finished at least once on each channel, unless the
only nsqd that had it was killed (an original nsqd keeps what is in flight, and a part of what waits, in memory only).
One whose publish failed without ``possibly_stored`` must never come.
"""

from __future__ import annotations

from collections.abc import Sequence

ANYWHERE = 255
"""The place of a message of which it is not known which nsqd took it."""

_PENDING, _STORED, _UNKNOWN, _REFUSED = range(4)
_MOST = 255


class Ledger:
    """Marks for messages, numbered from 0.

    Attributes:
        stored, unknown, refused: publishes by outcome: answered OK; failed, possibly stored; failed, not stored.
        settled: messages finished at least once, added up over the channels.
        forgiven: on each channel, how many messages a killed nsqd may have taken with it.
    """

    def __init__(self, channels: Sequence[str]) -> None:
        self.channels = tuple(channels)
        self.stored = self.unknown = self.refused = 0
        self.strangers = 0
        self.settled = 0
        self.forgiven = dict.fromkeys(self.channels, 0)
        self._place = bytearray()
        self._outcome = bytearray()
        self._finished = {channel: bytearray() for channel in self.channels}
        self._missing: dict[str, set[int]] = {channel: set() for channel in self.channels}
        self._forgiven: dict[str, set[int]] = {channel: set() for channel in self.channels}
        self._ghosts: set[int] = set()

    def __len__(self) -> int:
        return len(self._outcome)

    def begin(self, place: int = ANYWHERE, count: int = 1) -> range:
        """The numbers of messages that are about to be published to the nsqd ``place``."""
        first = len(self._outcome)
        numbers = range(first, first + count)
        self._place.extend([place] * count)
        self._outcome.extend([_PENDING] * count)
        for channel in self.channels:
            self._finished[channel].extend(bytes(count))
            self._missing[channel].update(numbers)
        return numbers

    def mark_stored(self, numbers: Sequence[int]) -> None:
        """Their publish was answered OK."""
        self._settle(numbers, _STORED)
        self.stored += len(numbers)

    def mark_unknown(self, numbers: Sequence[int]) -> None:
        """Their publish failed, and the error says ``possibly_stored``."""
        self._settle(numbers, _UNKNOWN)
        self.unknown += len(numbers)

    def mark_refused(self, numbers: Sequence[int]) -> None:
        """Their publish failed, and the error says that they were not stored."""
        self._settle(numbers, _REFUSED)
        self.refused += len(numbers)
        for number in numbers:
            if any(self._finished[channel][number] for channel in self.channels):
                self._ghosts.add(number)

    def _settle(self, numbers: Sequence[int], outcome: int) -> None:
        for number in numbers:
            self._outcome[number] = outcome

    def mark_finished(self, channel: str, number: int) -> None:
        """A handler of ``channel`` decided on FIN."""
        if number >= len(self._outcome):
            self.strangers += 1
            return
        finished = self._finished[channel]
        self.settled += not finished[number]
        finished[number] = min(_MOST, finished[number] + 1)
        self._missing[channel].discard(number)
        if self._outcome[number] == _REFUSED:
            self._ghosts.add(number)

    def mark_killed(self, place: int) -> None:
        """The nsqd ``place`` was killed just now: what it alone had and nobody had finished may be gone."""
        for channel in self.channels:
            gone = [number for number in self._missing[channel] if self._place[number] in (place, ANYWHERE)]
            self._forgiven[channel].update(gone)
            self.forgiven[channel] = len(self._forgiven[channel])

    def lost(self, channel: str) -> list[int]:
        """Messages answered OK that were not finished, though no nsqd was killed that had them."""
        forgiven = self._forgiven[channel]
        return sorted(n for n in self._missing[channel] if self._outcome[n] == _STORED and n not in forgiven)

    def _places(self, numbers: Sequence[int]) -> str:
        places = sorted({self._place[number] for number in numbers})
        return f" (nsqd {', '.join('unknown' if place == ANYWHERE else str(place) for place in places)})"

    def finished(self, channel: str) -> int:
        """Messages finished at least once."""
        return len(self._outcome) - self._finished[channel].count(0)

    def duplicated(self, channel: str) -> int:
        """Messages finished more than once."""
        marks = self._finished[channel]
        return len(marks) - marks.count(0) - marks.count(1)

    def came_though_unknown(self) -> int:
        """Messages whose publish had an unknown outcome and that were stored."""
        return sum(
            outcome == _UNKNOWN and any(self._finished[channel][number] for channel in self.channels)
            for number, outcome in enumerate(self._outcome)
        )

    def is_done(self) -> bool:
        """Whether there is nothing to wait for: no publish is under way and nothing that was stored is missing."""
        return _PENDING not in self._outcome and not any(self.lost(channel) for channel in self.channels)

    def violations(self) -> list[str]:
        """What should not be, in words; asked when all has settled."""
        found = [
            f"{channel}: {len(lost):,} messages answered OK were never finished: {_some(lost)}{self._places(lost)}"
            for channel in self.channels
            if (lost := self.lost(channel))
        ]
        if self._ghosts:
            found.append(f"{len(self._ghosts):,} messages came whose publish said not stored: {_some(self._ghosts)}")
        if self.strangers:
            found.append(f"{self.strangers:,} messages came that nobody published")
        if pending := self._outcome.count(_PENDING):
            found.append(f"{pending:,} publishes never came to an end")
        return found


def _some(numbers: Sequence[int] | set[int]) -> str:
    shown = sorted(numbers)[:5]
    return ", ".join(map(str, shown)) + (", ..." if len(numbers) > len(shown) else "")
