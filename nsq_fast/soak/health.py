"""Whether the clients are well: connections that get messages, bounds that hold, resources that stay level.

Judged from samples that somebody else takes, so without clock and sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
        """Faults may come."""
        self._calm_since = None

    def sample(self, now: float, connections: list[ConnectionSample]) -> None:
        """Look at every connection there is now."""
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
        """What it is now."""
        self.most = max(self.most, value)

    @property
    def violations(self) -> list[str]:
        """The one sentence, if the limit was passed."""
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
