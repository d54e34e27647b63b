"""Offsets, and how many rows of a batch come from where. Nothing here asks a server or reads a clock.

An offset names the journal, the batch, and each slot with the rows planned for
it. A batch is planned only once, because an nsqd that has left lookup since may
have rows in the journal.

A *source* is where messages wait: an nsqd, named by its address, or a partition
of a redesigned topic, named ``p3``; where several topics are read, with the
topic before it: ``orders/p3``. A *slot* is one task that reads from a source;
``#1`` marks the second slot of a source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from nsq_fast.errors import ConfigError
from nsq_fast.names import Address, parse_address

_PARTITION = re.compile(r"p([0-9]{1,4})\Z")


class Depth(NamedTuple):
    """What a channel holds at one source: messages that wait, that are with consumers, and that come later."""

    ready: int = 0
    in_flight: int = 0
    deferred: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class Offset(NamedTuple):
    """Where a query is: behind batch ``batch`` of the journal ``journal``.

    Attributes:
        slots: rows planned for each slot of that batch, by the slot's name.
    """

    journal: str
    batch: int = 0
    slots: Mapping[str, int] = {}

    def encode(self) -> dict[str, Any]:
        """As Spark keeps it."""
        return {"j": self.journal, "batch": self.batch, "slots": dict(sorted(self.slots.items()))}

    @classmethod
    def decode(cls, offset: Mapping[str, Any]) -> Offset:
        """From what Spark kept. Raises ConfigError for what is not of this reader."""
        try:
            return cls(str(offset["j"]), int(offset["batch"]), {str(k): int(v) for k, v in offset["slots"].items()})
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(
                f"the checkpoint holds {offset!r}, which is no offset of the journalled reader: it was made with"
                " another reader"
            ) from None

    def following(self, slots: Mapping[str, int]) -> Offset:
        """The offset behind the next batch."""
        return Offset(self.journal, self.batch + 1, slots)

    def numbered(self) -> list[tuple[int, str, int]]:
        """Number, name and rows of each slot; the number is what its files are called by."""
        return [(number, name, rows) for number, (name, rows) in enumerate(sorted(self.slots.items()))]


def partition_source(partition: int) -> str:
    """The source that is a partition."""
    return f"p{partition}"


def source_of(slot: str) -> str:
    """The source of a slot."""
    return slot.partition("#")[0]


def with_topic(topic: str, source: str) -> str:
    """The name of a source where there are several topics."""
    return f"{topic}/{source}"


def topic_of(source: str) -> str | None:
    """The topic in the name of a source; None where there is only one."""
    topic, slash, _ = source.rpartition("/")
    return topic if slash else None


def parse_source(source: str) -> int | Address:
    """The partition, or the nsqd."""
    place = source.rpartition("/")[2]
    found = _PARTITION.match(place)
    return int(found[1]) if found else parse_address(place, 0)


def plan_rows(available: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """Share ``limit`` rows out evenly among the sources; what one source does not have goes to the others.

    A limit of None means all rows. Sources without rows are left out.
    """
    wanted = {source: rows for source, rows in sorted(available.items()) if rows > 0}
    if limit is None or sum(wanted.values()) <= limit:
        return wanted
    planned: dict[str, int] = {}
    left = limit
    for place, (source, rows) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        share = left // (len(wanted) - place)
        planned[source] = min(rows, share)
        left -= planned[source]
    for source in sorted(planned):  # what the divisions left over
        if left and planned[source] < wanted[source]:
            planned[source] += 1
            left -= 1
    return {source: rows for source, rows in planned.items() if rows}


def plan_slots(rows: Mapping[str, int], least: int | None) -> dict[str, int]:
    """Split each source's rows into slots, so that there are ``least`` of them or more, if there are rows enough."""
    if not rows:
        return {}
    each = -(-(least or 1) // len(rows))
    slots: dict[str, int] = {}
    for source, count in rows.items():
        parts = min(each, count)
        for part in range(parts):
            name = source if part == 0 else f"{source}#{part}"
            slots[name] = count // parts + (part < count % parts)
    return slots


class Target:
    """What is left to read of what there was when a run with the trigger AvailableNow began."""

    def __init__(self, depths: Mapping[str, Depth]) -> None:
        self._left = {source: depth.total for source, depth in depths.items()}

    def bound(self, available: Mapping[str, int]) -> dict[str, int]:
        """``available``, as far as it belongs to the target."""
        return {source: min(rows, self._left.get(source, 0)) for source, rows in available.items()}

    def subtract(self, taken: Mapping[str, int]) -> None:
        """These were taken from the servers since."""
        for source, rows in taken.items():
            self._left[source] = max(0, self._left.get(source, 0) - rows)
