"""What goes wrong when: made of a seed alone, so that a run can be repeated.

Time goes in cycles: a storm, in which faults come and go, then a calm, in which nothing is wrong and the state of the
clients is looked at. Nothing here touches a server.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

STORM, CALM = 20.0, 12.0
MOST_AT_ONCE = 2
_GAP = (0.3, 2.5)
_FIRST = 2.0


class Kind(NamedTuple):
    """A kind of fault: how long it lasts, in seconds, and how often it is chosen relative to others."""

    name: str
    shortest: float
    longest: float
    weight: int = 1


class Fault(NamedTuple):
    """One thing that goes wrong: ``at`` seconds after the start, for ``seconds``."""

    at: float
    seconds: float
    kind: str
    target: str

    @property
    def until(self) -> float:
        """When it ends."""
        return self.at + self.seconds

    def __str__(self) -> str:
        return f"{self.at:8.1f} s  {self.kind:<10} {self.target:<14} {self.seconds:5.1f} s"


class Schedule(NamedTuple):
    """All faults in the order of their beginnings, and the calms as (beginning, end)."""

    seed: int
    seconds: float
    faults: tuple[Fault, ...]
    calms: tuple[tuple[float, float], ...]


def plan(seed: int, seconds: float, menu: Sequence[tuple[Kind, Sequence[str]]]) -> Schedule:
    """The faults of a run.

    Args:
        seconds: how long it is; its end is a calm.
        menu: the kinds of faults, each with what it may befall. A target has one fault at a time.
    """
    chance = random.Random(seed)
    faults: list[Fault] = []
    calms: list[tuple[float, float]] = []
    start = 0.0
    while seconds - start > 2 * CALM:
        end = min(start + STORM + CALM, seconds)
        if seconds - end <= 2 * CALM:
            end = seconds  # what is left is too short for a cycle of its own
        faults += _storm(chance, start + _FIRST, end - CALM, menu)
        calms.append((end - CALM, end))
        start = end
    return Schedule(seed, seconds, tuple(sorted(faults)), tuple(calms))


def _storm(chance: random.Random, start: float, end: float, menu: Sequence[tuple[Kind, Sequence[str]]]) -> list[Fault]:
    faults: list[Fault] = []
    now = start
    while now < end:
        kind, targets = chance.choices(menu, [kind.weight for kind, _ in menu])[0]
        length = min(round(chance.uniform(kind.shortest, kind.longest), 1), end - now)
        target = chance.choice(targets)
        running = [fault for fault in faults if fault.until > now]
        if len(running) < MOST_AT_ONCE and all(fault.target != target for fault in running):
            faults.append(Fault(round(now, 1), round(length, 1), kind.name, target))
        now += chance.uniform(*_GAP)
    return faults
