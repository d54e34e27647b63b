"""Which leaders lookup names, and what plain connections to them can do. No client of ours is asked.

A publish that was refused is a fault of the cluster when a plain connection could not publish to that
partition either; and a client is late from the moment on at which a plain connection could do what it does.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

from gevent import Greenlet, Timeout, killall, sleep, spawn

from nsq_fast.client.admin import LookupdHTTPClient
from nsq_fast.errors import NsqError
from nsq_fast.names import Address
from support.fleet import leaders
from support.redesigned import sized
from support.wire import WireClient

from .records import HEAD, PROBE_KEY

LOOK_PAUSE = 0.05
PROBE_PAUSE = 0.25
SUBSCRIBE_PAUSE = 0.1
PATIENCE = 1.0
"""Seconds that one question of a watcher may take."""

READ, WRITE = "r", "w"


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
        """Look no more."""
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
        """What the server answers to a command; None when it did not."""
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
