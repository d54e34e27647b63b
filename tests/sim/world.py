"""A few nsqds and nsqlookupds of one dialect, with what goes wrong there."""

from __future__ import annotations

from typing import Any

from .clock import SimLoop
from .faults import OF_CLUSTERS, Faults
from .lookupd import ModelLookupd
from .nsqd import ModelNsqd

OF_NSQDS = (
    "cut", "cut_to", "cut_from", "reset", "forget_stream", "freeze", "kill", "vanish", "slow", "small_buffers", "moods",
    "moods",
)  # fmt: skip
OF_LOOKUPDS = ("cut", "freeze", "kill", "vanish", "slow")
LONGEST_NOTICE = 0.5
"""Seconds after which nsqlookupds know what has happened."""


class World:
    """Attributes:
    is_redesigned: the dialect of all.
    is_faulty: whether there are faults.
    """

    def __init__(self, loop: SimLoop, *, most_nsqds: int = 3, faulty: float = 0.7, fewest_lookupds: int = 0) -> None:
        chance = loop.chance
        self.loop, self.network, self.books = loop, loop.network, loop.books
        self.dialect = chance.choice(("original", "redesigned"))
        cluster: list[Any] = []
        self.nsqds = [
            ModelNsqd(self.network, self.books, f"10.1.0.{number}", self.dialect, cluster)
            for number in range(1, chance.randint(1, most_nsqds) + 1)
        ]
        count = chance.randint(1, 3) if self.is_redesigned or chance.happens(0.5) else 0
        self.lookupds = [
            ModelLookupd(self.network, self.books, f"10.2.0.{number}", self.nsqds)
            for number in range(1, max(count, fewest_lookupds) + 1)
        ]
        self.faults = Faults(self.network, self.books, self.nsqds)
        self.faults_of_lookupds = Faults(self.network, self.books, self.lookupds)  # type: ignore[arg-type]
        self.is_faulty = chance.happens(faulty)
        self._is_telling = False
        loop.books.on_change = self._changed

    @property
    def is_redesigned(self) -> bool:
        return self.dialect == "redesigned"

    def make_topic(self, name: str, partitions: int, *, is_ordered: bool = False, is_ext: bool = False) -> None:
        for number in range(partitions if self.is_redesigned else 1):
            log = self.nsqds[number % len(self.nsqds)].log(name, number)
            log.is_ordered, log.is_ext = is_ordered, is_ext
        if not self.is_redesigned:
            for nsqd in self.nsqds:
                nsqd.log(name)
        for lookupd in self.lookupds:
            lookupd.notice()

    def plan_faults(self, within: float, most: int = 8) -> None:
        """Draw them, or none."""
        if not self.is_faulty:
            return
        chance = self.loop.chance
        kinds = (*OF_NSQDS, *OF_CLUSTERS, "move") if self.is_redesigned else OF_NSQDS
        self.faults.plan(chance.randint(1, most), within, kinds)
        if self.lookupds:
            self.faults_of_lookupds.plan(chance.randint(0, 3), within, OF_LOOKUPDS)

    @property
    def last_end(self) -> float:
        return max(self.faults.last_end, self.faults_of_lookupds.last_end)

    def _changed(self) -> None:
        if not self._is_telling:  # what changes in one turn is told at once
            self._is_telling = True
            self.loop.call_soon(self._tell)

    def _tell(self) -> None:
        """Every lookupd hears of what has changed, each after a time of its own."""
        self._is_telling = False
        for lookupd in self.lookupds:
            self.loop.call_later(self.loop.chance.random() * LONGEST_NOTICE, lookupd.notice)

    @property
    def addresses(self) -> dict[str, list[str]]:
        """Where clients find it: arguments of a producer or consumer."""
        if self.lookupds:
            return {"lookupd_http_addresses": [":".join(map(str, lookupd.address)) for lookupd in self.lookupds]}
        return {"nsqd_tcp_addresses": [":".join(map(str, nsqd.address)) for nsqd in self.nsqds]}
