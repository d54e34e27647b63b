"""One run: its schedule, what is looked at meanwhile and at the end, and what came of it."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any

from gevent import Greenlet, joinall, sleep, spawn
from gevent.event import Event

from nsq_fast.errors import NsqError

from .clients import Scene
from .faults import KINDS, Fault, Schedule, plan
from .invariants import Accounts, Resources, Stuck, disagreements, growth
from .invariants import Outcome as Published


def render(outcome: Outcome) -> str:
    """What came of a run, for people."""
    return "\n".join(_lines(outcome))


def _lines(outcome: Outcome) -> Iterator[str]:
    yield f"{outcome.name}: {outcome.seconds:,.0f} s, seed {outcome.seed}"
    yield f"faults: {_counts(outcome.faults)}"
    yield f"publishes: {_counts(outcome.publishes)}"
    yield f"{outcome.garbled:,} deliveries of a changed body, each handed back"
    yield from map(str, outcome.resources[:1] + outcome.resources[-1:])
    for channel, counts in outcome.channels.items():
        yield f"{channel}: {_counts(counts)}"
    yield from (f"VIOLATED  {violation}" for violation in outcome.violations)
    yield "PASS" if outcome.passed else "INTERRUPTED" if outcome.is_interrupted else "FAIL"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items()) or "none"


DRAIN_TIMEOUT = 45.0
"""Seconds without any progress after which what is left will not come."""
SETTLE_TIMEOUT = 15.0
_TICK = 0.2
_EXTRA = 200
_MOST_COMPARISONS = 3
LEVEL = {"resident_kib": 65_536, "files": 12, "greenlets": 24}
"""How much more of each there may be at the end than in the first calm."""

Tell = Callable[[str], object]


@dataclasses.dataclass
class Outcome:
    """What came of a run. It passed when there are no ``violations`` and it was not interrupted."""

    name: str
    seed: int
    seconds: float
    faults: dict[str, int]
    publishes: dict[str, int]
    channels: dict[str, dict[str, int]]
    garbled: int
    resources: list[Resources]
    violations: list[str]
    is_interrupted: bool = False

    @property
    def passed(self) -> bool:
        return not (self.violations or self.is_interrupted)


class Run:
    """A soak on one scene.

    Args:
        scene: started servers.
        schedule: what goes wrong when.
        tell: called with a line for each thing that happens.
    """

    def __init__(self, scene: Scene, schedule: Schedule, tell: Tell) -> None:
        self._scene = scene
        self._schedule = schedule
        self._tell = tell
        self._stuck = Stuck()
        self._resources: list[Resources] = []
        self._violations: list[str] = []
        self._happened: Counter[str] = Counter()
        self._ends: dict[str, Greenlet[..., Any]] = {}
        self._began = monotonic()

    def go(self, stop: Event) -> Outcome:
        """Run until the schedule is over, or ``stop`` is set; then drain, check and close."""
        scene = self._scene
        # Samples look at what this run makes. In a large process a look at everything keeps its greenlets waiting.
        gc.freeze()
        self._began = monotonic()
        scene.start()
        watcher = spawn(self._watch)
        try:
            self._live_through(stop)
            scene.publishers.stop()
            self._drain("after the faults")
            self._compare_accounts()
            self._resources.append(Resources.now())
        finally:
            watcher.kill()
            scene.consumers.close()
            scene.publishers.close()
            gc.unfreeze()
        return self._outcome(stop.is_set())

    # The schedule

    def _live_through(self, stop: Event) -> None:
        waiting = [(fault.at, fault) for fault in self._schedule.faults]
        steps: list[tuple[float, Fault | None]] = [*waiting, *((start, None) for start, _ in self._schedule.calms)]
        for at, fault in sorted(steps, key=lambda step: step[0]):
            if stop.wait(max(0.0, self._began + at - monotonic())):
                break
            if fault is not None:
                self._begin(fault)
                continue
            joinall(list(self._ends.values()), raise_error=True)
            self._calm(stop, next(end for start, end in self._schedule.calms if start == at))
        joinall(list(self._ends.values()), raise_error=True)

    def _begin(self, fault: Fault) -> None:
        if fault.target in self._ends:
            self._ends.pop(fault.target).get()  # a server may be slow to start again
        self._tell(str(fault))
        self._happened[fault.kind] += 1
        if fault.kind in KINDS:
            self._scene.links.fault(fault.target, fault.kind)
        else:
            self._scene.begin(fault)
        self._ends[fault.target] = spawn(self._end, fault, stop_at=self._began + fault.until)

    def _end(self, fault: Fault, stop_at: float) -> None:
        sleep(max(0.0, stop_at - monotonic()))
        if fault.kind in KINDS:
            self._scene.links.clear(fault.target)
        else:
            self._scene.end(fault)

    def _calm(self, stop: Event, until: float) -> None:
        """Nothing is wrong: what is well now must stay well, and resources stay level from one calm to the next."""
        self._stuck.begin_calm(monotonic())
        stop.wait(max(0.0, self._began + until - monotonic()))
        self._stuck.end_calm()
        self._resources.append(Resources.now())
        ledger = self._scene.ledger
        waiting = max(len(ledger.lost(channel)) for channel in ledger.channels)
        stored = ledger.count(Published.STORED)
        self._tell(f"{until:8.1f} s  calm: {stored:,} published, {waiting:,} not finished yet, {self._resources[-1]}")

    def _watch(self) -> None:
        while True:
            self._stuck.sample(monotonic(), self._scene.consumers.sample())
            sleep(_TICK)

    # The end

    def _drain(self, when: str) -> None:
        """Wait until everything that was stored is finished and the servers hold nothing, while there is progress."""
        scene = self._scene
        left: dict[str, int] = {"unknown": 0}
        settled, progress_at = -1, monotonic()
        while monotonic() - progress_at < DRAIN_TIMEOUT:
            with suppress(NsqError):
                left = scene.left()
                if not left and not scene.consumers.running and scene.ledger.is_done():
                    return
            if scene.ledger.settled != settled:
                settled, progress_at = scene.ledger.settled, monotonic()
            sleep(_TICK)
        held = ", ".join(f"{count:,} {state}" for state, count in left.items()) or "nothing"
        self._violations.append(f"{when} nothing was finished for {DRAIN_TIMEOUT:.0f} s; the nsqds still hold: {held}")

    def _compare_accounts(self) -> None:
        """Without faults, what consumers say that they finished is what the nsqds say.

        These count by connection. One that ends takes its counts along, as where the machine has stood still for longer
        than two heartbeats: then it is compared anew.
        """
        for _ in range(_MOST_COMPARISONS):
            if self._violations:
                return
            connections = self._connections()
            found = self._disagreements()
            if connections == self._connections():
                self._violations += found
                return
        self._violations.append("after the last fault connections end again and again")

    def _disagreements(self) -> list[str]:
        scene = self._scene
        before = scene.consumers.accounts(), self._server_accounts()
        scene.publish_some(_EXTRA)
        self._drain("after the last publishes")
        deadline = monotonic() + SETTLE_TIMEOUT
        while True:
            after = scene.consumers.accounts(), self._server_accounts()
            client, servers = (
                {name: side[name].minus(start.get(name, Accounts(0, 0))) for name in side}
                for side, start in zip(after, before, strict=True)
            )
            found = disagreements(client, servers)
            if not found or monotonic() > deadline:
                return found
            sleep(_TICK)

    def _connections(self) -> set[tuple[str, str]]:
        return {(client["channel"], client["remote_address"]) for client in self._scene.clients()}

    def _server_accounts(self) -> dict[str, Accounts]:
        accounts: dict[str, Accounts] = {}
        for client in self._scene.clients():
            known = accounts.get(client["channel"], Accounts(0, 0))
            accounts[client["channel"]] = Accounts(
                known.finished + client["finish_count"], known.requeued + client["requeue_count"]
            )
        return accounts

    def _outcome(self, is_interrupted: bool) -> Outcome:
        scene, ledger = self._scene, self._scene.ledger
        violations = [*self._violations, *ledger.violations(), *self._stuck.violations, *scene.violations]
        violations += scene.publishers.violations + scene.consumers.violations
        violations += growth(self._resources[:1], self._resources[-1:], LEVEL)
        publishes = {
            "answered OK": ledger.count(Published.STORED),
            "outcome unknown": ledger.count(Published.UNKNOWN),
            "of these stored": ledger.came_though_unknown(),
            "not stored": ledger.count(Published.REFUSED),
        }
        channels = {
            channel: {
                "finished": ledger.finished(channel),
                "again": ledger.duplicated[channel],
                "lost with a killed nsqd that alone had them": len(ledger.forgiven[channel]),
                "lost": len(ledger.lost(channel)),
            }
            for channel in ledger.channels
        }
        return Outcome(
            scene.name,
            self._schedule.seed,
            monotonic() - self._began,
            dict(self._happened),
            publishes,
            channels,
            scene.consumers.garbled,
            self._resources,
            violations,
            is_interrupted,
        )


def soak(scene: Scene, seed: int, seconds: float, stop: Event, tell: Tell) -> Outcome:
    """Run a soak on started servers. Raises NsqError when a server cannot be started again."""
    return Run(scene, plan(seed, seconds, scene.menu), tell).go(stop)
