"""Which leaders lookup names, what plain connections to them can do, and how long clients took to follow.

No client of ours is asked. A publish that was refused is a fault of the cluster when a plain connection could not
publish to that partition either; and a client is late from the moment on at which one could do what it does.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import quantiles
from time import monotonic_ns
from typing import Any, NamedTuple

from gevent import Greenlet, Timeout, killall, sleep, spawn
from support.fleet import leaders
from support.ledger import HEAD, PROBE_KEY, Kind, Row
from support.wire import WireClient, sized

from nsq_fast.client.admin import LookupdHTTPClient
from nsq_fast.errors import NsqError
from nsq_fast.names import Address

LOOK_PAUSE = 0.05
PROBE_PAUSE = 0.25
SUBSCRIBE_PAUSE = 0.1
PATIENCE = 1.0
"""Seconds that one question of a watcher may take."""

READ, WRITE = "r", "w"
SECOND = 1_000_000_000
STALL = SECOND
"""ns without a publish of plain connections, which try four times a second."""

LEAD = SECOND
"""ns by which a client may hear of a leader before the watch does."""


class NoLeadingLookupd(Exception):
    """There is none now."""


_AWAY = (NoLeadingLookupd, KeyError, struct.error, NsqError, OSError, EOFError, Timeout, ValueError)


@dataclass
class Change:
    """Another leader of a partition. Times are of ``time.monotonic_ns``; None: it did not happen.

    Attributes:
        left, leader: the nsqds that led before, and now.
        named: when lookup first named it, for the one access and for the other.
        publishable: when a plain connection could publish there.
        subscribable: when one could subscribe there.
        ended: when lookup named another again.
    """

    partition: int
    left: Address
    leader: Address
    named: dict[str, int] = field(default_factory=dict)
    publishable: int | None = None
    subscribable: int | None = None
    ended: int | None = None


class Watch:
    """Looks at a topic until it is closed.

    Attributes:
        changes: of leaders, in the order in which lookup named them.
        accepted: partition -> when a plain connection could publish there.
    """

    def __init__(self, lookupds: Sequence[str], topic: str, partitions: int, probe_channel: str) -> None:
        self.changes: list[Change] = []
        self.accepted: dict[int, list[int]] = {number: [] for number in range(partitions)}
        self._lookupds, self._topic, self._channel = list(lookupds), topic, probe_channel
        self._named: dict[int, Address] = leaders(self._lookupds[0], topic)
        assert len(self._named) == partitions, self._named
        self._leader = dict(self._named)
        self._last: dict[int, Change] = {}
        self._subscribing: list[Greenlet[..., Any]] = []
        self._loops = [spawn(self._look_on), *(spawn(self._probe, number) for number in range(partitions))]

    def leaders(self) -> dict[int, Address]:
        """Partition -> leader for publishes, as lookup named it last."""
        return dict(self._named)

    def is_taking_publishes(self, since: int) -> bool:
        """Whether a plain connection could publish to each partition after a time."""
        return all(times and times[-1] > since for times in self.accepted.values())

    def close(self) -> None:
        killall([*self._loops, *self._subscribing])

    def _look_on(self) -> None:
        while True:
            with suppress(*_AWAY), Timeout(PATIENCE):
                self._look_at(self._leading_lookupd())
            sleep(LOOK_PAUSE)  # sleep: looks again and again

    def _leading_lookupd(self) -> str:
        """Of several nsqlookupds one knows; the others hear of it from etcd."""
        for lookupd in self._lookupds:
            with suppress(*_AWAY), LookupdHTTPClient.from_url(lookupd) as client:
                leader = client.list_lookupds()["lookupdleader"]
                return f"{leader['NodeIP']}:{leader['HttpPort']}"
        raise NoLeadingLookupd("no nsqlookupd says which of them leads")

    def _look_at(self, lookupd: str) -> None:
        for access in (READ, WRITE):
            found = leaders(lookupd, self._topic, access)
            for partition, leader in found.items():
                self._note(access, partition, leader)
        self._named = found

    def _note(self, access: str, partition: int, leader: Address) -> None:
        before = self._leader[partition]
        if before != leader:
            self._change(partition, before, leader)
        change = self._last.get(partition)
        if change is not None:
            change.named.setdefault(access, monotonic_ns())

    def _change(self, partition: int, before: Address, leader: Address) -> None:
        ended = self._last.get(partition)
        if ended is not None:
            ended.ended = monotonic_ns()
        change = self._last[partition] = Change(partition, before, leader)
        self._leader[partition] = leader
        self.changes.append(change)
        self._subscribing.append(spawn(self._subscribe, change))

    def _probe(self, partition: int) -> None:
        """Publish to the leader of a partition, again and again."""
        number = 0
        client = _Probe()
        while True:
            leader = self._leader[partition]
            number += 1
            body = HEAD.pack(PROBE_KEY, partition << 32 | number)
            command = f"PUB {self._topic} {partition}\n".encode() + sized(body)
            if client.ask(leader, command) == b"OK":
                self.accepted[partition].append(monotonic_ns())
                self._publishable(partition, leader)
            sleep(PROBE_PAUSE)  # sleep: the pace of the probes

    def _publishable(self, partition: int, leader: Address) -> None:
        change = self._last.get(partition)
        if change is not None and change.leader == leader and change.publishable is None:
            change.publishable = monotonic_ns()

    def _subscribe(self, change: Change) -> None:
        """Subscribe to the channel of the watch until that is possible, at a new leader."""
        command = f"SUB_ORDERED {self._topic} {self._channel} {change.partition}\n".encode()
        while change.ended is None:
            client = _Probe()
            if client.ask(change.leader, command) == b"OK":
                change.subscribable = monotonic_ns()
                client.close()
                return
            client.close()
            sleep(SUBSCRIBE_PAUSE)  # sleep: the pace of the probes


class _Probe:
    """A plain connection, made anew when it has failed."""

    def __init__(self) -> None:
        self._client: WireClient | None = None
        self._address: Address | None = None

    def ask(self, address: Address, command: bytes) -> bytes | None:
        if address != self._address:
            self.close()
        try:
            with Timeout(PATIENCE):
                if self._client is None:
                    self._client, self._address = WireClient(address), address
                answer = self._client.command(command)
        except _AWAY:
            self.close()
            return None
        if answer != b"OK":
            self.close()
        return answer

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None


class Window(NamedTuple):
    """By how many seconds clients were later than they could be, after one change of a leader.

    Attributes:
        named: from when lookup named the leader.
        ready: from when lookup had named it, and a plain connection could do the same there.
    """

    change: Change
    named: float
    ready: float


@dataclass
class Windows:
    """The windows of all changes.

    Attributes:
        passed_over: changes that ended, or whose leader was never ready, before a client could be there.
        never: changes after which no client came, although there was time.
    """

    all: list[Window] = field(default_factory=list)
    passed_over: int = 0
    never: list[Change] = field(default_factory=list)

    @property
    def ready(self) -> list[float]:
        return [window.ready for window in self.all]


def measure(
    changes: Sequence[Change],
    rows: Iterable[Row],
    nodes: Sequence[Address],
    access: str,
    grace: float,
    accepted: Mapping[int, Sequence[int]],
) -> Windows:
    """The windows of publishers (WRITE) or of consumers (READ).

    Args:
        rows: what they did, in order: what was stored, or begun.
        grace: seconds that a leader has to be there for its change to count where no client came.
        accepted: partition -> when plain connections could publish there: a leader may stop to take publishes
            after its first ones, as while a replica leaves; then it was not ready before it took them again.
    """
    wanted = Kind.STORED if access == WRITE else Kind.BEGUN
    times: dict[tuple[int, int], list[int]] = defaultdict(list)
    over = 0  # when the run was: what it failed to do counts
    for row in rows:
        over = max(over, row.at)
        if row.kind == wanted:
            times[row.partition, row.node].append(row.at)
    windows = Windows()
    for change in changes:
        ready = change.publishable if access == WRITE else _consumable(change)
        if ready is None or access not in change.named:
            windows.passed_over += 1
            continue
        named = change.named[access]
        ready = max(ready, named)
        there = times[change.partition, nodes.index(change.leader)]
        first = next(iter(there[bisect_left(there, named - LEAD) :]), None)
        if first is not None and (change.ended is None or first < change.ended):
            if access == WRITE:
                ready = _ready_again(ready, first, accepted.get(change.partition, ()))
            windows.all.append(Window(change, max(0, first - named) / SECOND, max(0, first - ready) / SECOND))
        elif (over if change.ended is None else change.ended) - ready < grace * SECOND:
            windows.passed_over += 1
        else:
            windows.never.append(change)
    return windows


def _ready_again(ready: int, first: int, accepted: Sequence[int]) -> int:
    """The end of the last time between the two in which no plain connection could publish for STALL."""
    times = [ready, *(at for at in accepted if ready < at < first)]
    return max((after for before, after in pairwise(times) if after - before > STALL), default=ready)


def _consumable(change: Change) -> int | None:
    """When a consumer could subscribe at a leader, and there was a message there, which the watch had published."""
    if change.subscribable is None or change.publishable is None:
        return None
    return max(change.subscribable, change.publishable)


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which so many percent of the values are; 0 where there are none."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return quantiles(values, n=100, method="inclusive")[percent - 1]
