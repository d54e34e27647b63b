"""What must be true of a run: bodies, the ledger of messages, their order, and whether the clients are well:
connections that get messages, bounds that hold, resources that stay level.

Every message has a number. A message that was answered OK must be finished at least once on each channel, unless the
only nsqd that had it was killed (an original nsqd keeps what is in flight, and a part of what waits, in memory only).
One whose publish failed without ``possibly_stored`` must never come.
"""

from __future__ import annotations

import gc
import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec
from greenlet import greenlet

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


class Outcome(IntEnum):
    """What became of a publish."""

    PENDING = 0
    STORED = 1
    """Answered OK."""

    UNKNOWN = 2
    """Failed, and possibly stored."""

    REFUSED = 3
    """Failed, and not stored."""


class Ledger:
    """Marks for messages, numbered from 0. What it keeps of one that is over is two bytes.

    Attributes:
        strangers: messages that came and that nobody published.
        duplicated: on each channel, how often a message was finished that had been before.
        forgiven: on each channel, messages that a killed nsqd may have taken with it.
    """

    def __init__(self, channels: Sequence[str]) -> None:
        self.channels = tuple(channels)
        self.strangers = 0
        self.duplicated: Counter[str] = Counter()
        self.forgiven: dict[str, set[int]] = {channel: set() for channel in self.channels}
        self._place = bytearray()
        self._outcome = bytearray()
        self._missing: dict[str, set[int]] = {channel: set() for channel in self.channels}
        self._ghosts: set[int] = set()

    def begin(self, place: int = ANYWHERE, count: int = 1) -> range:
        """The numbers of messages that are about to be published to the nsqd ``place``."""
        first = len(self._outcome)
        numbers = range(first, first + count)
        self._place.extend([place] * count)
        self._outcome.extend([Outcome.PENDING] * count)
        for missing in self._missing.values():
            missing.update(numbers)
        return numbers

    def mark(self, numbers: Sequence[int], outcome: Outcome) -> None:
        for number in numbers:
            self._outcome[number] = outcome
            if outcome == Outcome.REFUSED and self._has_come(number):
                self._ghosts.add(number)

    def mark_finished(self, channel: str, number: int) -> None:
        """A handler of ``channel`` decided on FIN."""
        if number >= len(self._outcome):
            self.strangers += 1
            return
        self.duplicated[channel] += number not in self._missing[channel]
        self._missing[channel].discard(number)
        if self._outcome[number] == Outcome.REFUSED:
            self._ghosts.add(number)

    def mark_killed(self, place: int) -> None:
        """The nsqd ``place`` was killed just now: what it alone had and nobody had finished may be gone."""
        for channel, missing in self._missing.items():
            self.forgiven[channel].update(each for each in missing if self._place[each] in (place, ANYWHERE))

    def count(self, outcome: Outcome) -> int:
        return self._outcome.count(outcome)

    def finished(self, channel: str) -> int:
        return len(self._outcome) - len(self._missing[channel])

    @property
    def settled(self) -> int:
        """Messages finished at least once, added up over the channels."""
        return sum(map(self.finished, self.channels))

    def lost(self, channel: str) -> list[int]:
        missing = self._missing[channel] - self.forgiven[channel]
        return sorted(number for number in missing if self._outcome[number] == Outcome.STORED)

    def came_though_unknown(self) -> int:
        """Messages whose publish had an unknown outcome and that were stored."""
        outcomes = enumerate(self._outcome)
        return sum(outcome == Outcome.UNKNOWN and self._has_come(number) for number, outcome in outcomes)

    def is_done(self) -> bool:
        """Whether there is nothing to wait for: no publish is under way and nothing that was stored is missing."""
        return not self.count(Outcome.PENDING) and not any(map(self.lost, self.channels))

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
        if pending := self.count(Outcome.PENDING):
            found.append(f"{pending:,} publishes never came to an end")
        return found

    def _has_come(self, number: int) -> bool:
        return any(number not in missing for missing in self._missing.values())

    def _places(self, numbers: Sequence[int]) -> str:
        places = sorted({self._place[number] for number in numbers})
        return f" (nsqd {', '.join('unknown' if place == ANYWHERE else str(place) for place in places)})"


def _some(numbers: Sequence[int] | set[int]) -> str:
    shown = sorted(numbers)[:5]
    return ", ".join(map(str, shown)) + (", ..." if len(numbers) > len(shown) else "")


class KeyOrder:
    """Sequences per key. A message that comes again is a duplicate, not a violation."""

    def __init__(self) -> None:
        self._late: dict[tuple[int, int], int] = {}
        self._highest: dict[int, int] = {}
        self._skipped: set[tuple[int, int]] = set()
        self._loose: set[tuple[int, int]] = set()

    def mark_loose(self, key: int, sequence: int) -> None:
        """The publish of this message failed: if it was stored after all, it may be anywhere."""
        self._loose.add((key, sequence))

    def delivered(self, key: int, sequence: int) -> None:
        highest = self._highest.get(key, -1)
        if sequence > highest:
            self._skipped.update((key, skipped) for skipped in range(highest + 1, sequence))
            self._highest[key] = sequence
        elif (key, sequence) in self._skipped:
            self._skipped.discard((key, sequence))
            self._late[key, sequence] = highest

    @property
    def violations(self) -> list[str]:
        """First deliveries of a message after a later one of its key, in words; asked when all has settled."""
        return [
            f"key {key}: message {sequence} came after {highest}"
            for (key, sequence), highest in self._late.items()
            if (key, sequence) not in self._loose
        ]


PATIENCE = 6.0
"""Seconds in a calm after which a connection that asks for nothing is stuck."""


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
        self._running: Counter[object] = Counter()

    def sample(self, value: int) -> None:
        self.most = max(self.most, value)

    @contextmanager
    def turn(self, where: object) -> Iterator[None]:
        """The number is how many of these run at once there."""
        self._running[where] += 1
        self.sample(self._running[where])
        try:
            yield
        finally:
            self._running[where] -= 1

    @property
    def violations(self) -> list[str]:
        return [f"{self.name}: {self.most:,}, at most {self.limit:,} allowed"] if self.most > self.limit else []


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has, once garbage is collected."""

    resident_kib: int
    files: int
    greenlets: int
    objects: int

    @classmethod
    def now(cls) -> Resources:
        gc.collect()
        objects = gc.get_objects()
        return cls(
            resident_kib=int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_KIB,
            files=len(os.listdir("/proc/self/fd")),
            greenlets=sum(isinstance(each, greenlet) and not each.dead for each in objects),
            objects=len(objects),
        )

    def __str__(self) -> str:
        return f"{self.resident_kib / 1024:.1f} MiB, {self.files} files, {self.greenlets} greenlets"


_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


def growth(before: Sequence[Resources], after: Sequence[Resources], allowed: Mapping[str, int]) -> list[str]:
    """Of what there was more than allowed at the most of the later moments, compared with the earlier ones."""
    most = {name: [max(getattr(each, name) for each in found) for found in (before, after)] for name in allowed}
    return [
        f"{name} grew from {early:,} to {late:,}, by more than {allowed[name]:,}"
        for name, (early, late) in most.items()
        if late - early > allowed[name]
    ]


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
