"""What must be true of a run, without clock and sockets: bodies, the ledger of messages, their order, and whether the
clients are well: connections that get messages, bounds that hold, resources that stay level.

Every message has a number. A message that was answered OK must be finished at least once on each channel, unless the
only nsqd that had it was killed (an original nsqd keeps what is in flight, and a part of what waits, in memory only).
One whose publish failed without ``possibly_stored`` must never come.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

_NUMBER = struct.Struct(">Q")
_CHECK = struct.Struct(">I")
_SIZES = (0, 20, 100, 200, 200, 500, 3000)


def encode_body(number: int) -> bytes:
    content = _NUMBER.pack(number) + bytes([number % 251]) * _SIZES[number % len(_SIZES)]
    return content + _CHECK.pack(crc32(content))


def decode_body(body: bytes) -> int | None:
    """The number of the message; None where the body is not what was published."""
    content, check = body[: -_CHECK.size], body[-_CHECK.size :]
    if len(content) < _NUMBER.size or _CHECK.pack(crc32(content)) != check:
        return None
    return int(_NUMBER.unpack_from(content)[0])


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
        forgiven = self._forgiven[channel]
        return sorted(n for n in self._missing[channel] if self._outcome[n] == _STORED and n not in forgiven)

    def _places(self, numbers: Sequence[int]) -> str:
        places = sorted({self._place[number] for number in numbers})
        return f" (nsqd {', '.join('unknown' if place == ANYWHERE else str(place) for place in places)})"

    def finished(self, channel: str) -> int:
        return len(self._outcome) - self._finished[channel].count(0)

    def duplicated(self, channel: str) -> int:
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
        self._running[name] += 1
        self.most = max(self.most, self._running[name])

    def leave(self, name: object) -> None:
        self._running[name] -= 1


PATIENCE = 6.0
"""Seconds in a calm after which a connection that asks for nothing is stuck."""

MAX_MORE_RSS = 64 << 20
MAX_MORE_FDS = 12
MAX_MORE_GREENLETS = 24


class ConnectionSample(NamedTuple):
    """One connection of a consumer at one moment. ``is_excused``: a backoff or pause, in which RDY 0 is right."""

    consumer: str
    address: str
    is_connected: bool
    rdy: int
    in_flight: int
    is_excused: bool = False

    @property
    def is_well(self) -> bool:
        """Whether messages come, or can come."""
        return self.is_excused or (self.is_connected and (self.rdy > 0 or self.in_flight > 0))


class Stuck:
    """Connections that stay without RDY, or unmade, though nothing is wrong.

    ``sample`` is called with what is seen; ``begin_calm`` when all faults are over.
    """

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._calm_since: float | None = None
        self._bad_since: dict[tuple[str, str], float] = {}
        self._told: set[tuple[str, str, float]] = set()

    def begin_calm(self, now: float) -> None:
        """From now on nothing is wrong with servers and links."""
        self._calm_since = now

    def end_calm(self) -> None:
        self._calm_since = None

    def sample(self, now: float, connections: list[ConnectionSample]) -> None:
        current = {(each.consumer, each.address): each for each in connections}
        for name in list(self._bad_since):
            if name not in current or current[name].is_well:
                del self._bad_since[name]
        for name, each in current.items():
            if not each.is_well:
                self._judge(now, each, self._bad_since.setdefault(name, now))

    def _judge(self, now: float, sample: ConnectionSample, since: float) -> None:
        if self._calm_since is None:
            return
        seconds = now - max(since, self._calm_since)
        incident = (sample.consumer, sample.address, self._calm_since)
        if seconds >= PATIENCE and incident not in self._told:
            self._told.add(incident)
            what = f"RDY {sample.rdy}, nothing in flight" if sample.is_connected else "not connected"
            self.violations.append(f"{sample.consumer}, nsqd {sample.address}: {what}, {seconds:.0f} s into a calm")


class Bound:
    """A number that must not pass a limit, such as messages held."""

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.most = 0

    def sample(self, value: int) -> None:
        self.most = max(self.most, value)

    @property
    def violations(self) -> list[str]:
        return [f"{self.name}: {self.most:,}, at most {self.limit:,} allowed"] if self.most > self.limit else []


class Resources(NamedTuple):
    """What this process has."""

    rss: int
    fds: int
    greenlets: int


def growth(first: Resources, last: Resources) -> list[str]:
    """What is not flat between two samples of the same state, such as two calms."""
    found = []
    for name, more, limit in (
        ("bytes of memory", last.rss - first.rss, MAX_MORE_RSS),
        ("file descriptors", last.fds - first.fds, MAX_MORE_FDS),
        ("greenlets", last.greenlets - first.greenlets, MAX_MORE_GREENLETS),
    ):
        if more > limit:
            found.append(f"{more:,} {name} more than at the first calm, at most {limit:,} allowed")
    return found


class Accounts(NamedTuple):
    """What was finished and requeued, as one side counts it.

    Attributes:
        refused: of a consumer: responses that nsqd refused, which had taken the message back before they came.
    """

    finished: int
    requeued: int
    refused: int = 0

    def minus(self, other: Accounts) -> Accounts:
        """What came since ``other``."""
        return Accounts(self.finished - other.finished, self.requeued - other.requeued, self.refused - other.refused)


def disagreements(client: Mapping[str, Accounts], servers: Mapping[str, Accounts]) -> list[str]:
    """Where a consumer's counts differ from those of its nsqds, over a time without faults; by consumer."""
    return [
        f"{name}: counts {ours.finished:,} FIN and {ours.requeued:,} REQ, of which {ours.refused:,} were refused, "
        f"the nsqds {theirs.finished:,} and {theirs.requeued:,}"
        for name, ours in client.items()
        if not _agree(ours, theirs := servers.get(name, Accounts(0, 0)))
    ]


def _agree(ours: Accounts, theirs: Accounts) -> bool:
    """Whether each response that nsqd does not count is one that it refused: FIN, REQ or TOUCH."""
    missing = ours.finished - theirs.finished, ours.requeued - theirs.requeued
    return min(missing) >= 0 and sum(missing) <= ours.refused
