"""Whom a consumer subscribes to, and how: its topics, nsqds and partitions. Pure.

A redesigned topic takes one subscription for each partition, to its leader;
an nsqd without partitions (all of the original's, old ones in a mixed fleet)
takes one for itself. What kind of subscription a topic needs is learnt from
lookup's meta data unless an option says it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from re import Pattern
from typing import TypeAlias

import msgspec

from nsq_fast.errors import ConfigError
from nsq_fast.names import Address, check_topic, is_valid_name

from .topology import Meta, Nsqd, Topology


class Target(msgspec.Struct, frozen=True):
    """One subscription: an nsqd, a partition that it leads (None for an nsqd without partitions), and the topic."""

    address: Address
    partition: int | None = None
    topic: str = ""

    def __str__(self) -> str:
        place = str(self.address) if self.partition is None else f"{self.address} partition {self.partition}"
        return f"{self.topic} at {place}" if self.topic else place


class Mode(msgspec.Struct, frozen=True):
    """How to subscribe to a topic on redesigned servers."""

    ordered: bool = False
    extend_support: bool = False

    def learn(self, meta: Meta | None, ordered: bool | None) -> Mode:
        """What lookup adds. ``ordered`` is the option: None leaves it to lookup.

        Extended headers stay on once they are, until a server refuses them: no topic loses them unless it is made anew,
        while a lookupd may be behind.
        """
        if meta is None:
            return self
        return Mode(
            ordered=meta.ordered if ordered is None else ordered,
            extend_support=self.extend_support or meta.extend_support,
        )


def targets(topology: Topology, chosen: Collection[int] | None = None, topic: str = "") -> dict[Target, Nsqd]:
    """The subscriptions that ``topic`` takes: all, or only those of the ``chosen`` partitions."""
    found = {
        Target(leader.tcp, number, topic): leader
        for number, leader in topology.partitions.items()
        if chosen is None or number in chosen
    }
    if chosen is None:
        found.update((Target(nsqd.tcp, None, topic), nsqd) for nsqd in topology.unpartitioned)
    return found


def configured(
    addresses: Iterable[Address], chosen: Collection[int] | None, found: Collection[Target], topic: str = ""
) -> Iterator[Target]:
    """The targets that options name, without those of which lookup knows better: ``found``."""
    # A configured nsqd that leads partitions would be subscribed to twice: plainly, and for each partition.
    leaders = {target.address for target in found if target.partition is not None}
    led = {target.partition for target in found}
    for address in addresses:
        for partition in chosen or (None,):
            if address not in leaders if partition is None else partition not in led:
                yield Target(address, partition, topic)


def is_replaced(target: Target, live: Iterable[Target]) -> bool:
    """Whether one of the ``live`` subscriptions of the topic does what that of ``target`` does."""
    return any(
        each.address == target.address if target.partition is None else each.partition == target.partition
        for each in live
        if each.partition is not None
    )


def is_complete(topology: Topology, chosen: Collection[int] | None = None) -> bool:
    """Whether every partition, or every one chosen, has a leader."""
    if chosen is None:
        return topology.is_complete
    known = {*topology.partitions, *topology.excluded_partitions}
    return all(number in known for number in chosen if _exists(topology.meta, number))


def impossible(topology: Topology, chosen: Collection[int] | None) -> str | None:
    """What is wrong with ``chosen`` if the topic can never have any of these partitions; None if nothing is."""
    if chosen is None or topology.is_empty or any(number in topology.partitions for number in chosen):
        return None
    if topology.meta is None:
        return None if topology.partitions else "the topic has no partitions: leave partitions out"
    if any(_exists(topology.meta, number) for number in chosen):
        return None
    return f"partitions={list(chosen)}: the topic has partitions 0 to {topology.meta.partition_num - 1}"


def missing(topology: Topology, chosen: Collection[int] | None) -> list[int]:
    """The ``chosen`` partitions that the topic does not have. They may be added to it later."""
    return [] if topology.meta is None else [number for number in chosen or () if not _exists(topology.meta, number)]


def _exists(meta: Meta | None, number: int) -> bool:
    return meta is None or number < meta.partition_num


TopicArgument: TypeAlias = str | Iterable[str] | re.Pattern[str]


class TopicChoice:
    """The topics that the argument ``topic`` of a consumer names.

    Args:
        topic: the name of a topic, several names, or a compiled regular expression that the whole name of a topic has
            to match. A string is always a name.

    Attributes:
        names: those that were named, each once; empty for a pattern.
        pattern: None where topics are named.

    Raises NameInvalid for a name that no topic can have, ConfigError for what chooses nothing.
    """

    def __init__(self, topic: TopicArgument) -> None:
        self.pattern: Pattern[str] | None = topic if isinstance(topic, re.Pattern) else None
        self.names: tuple[str, ...] = () if isinstance(topic, re.Pattern) else _names(topic)
        if self.pattern is not None and not isinstance(self.pattern.pattern, str):
            raise ConfigError(f"topic={topic!r}: the names of topics are str: compile the pattern from a str, too")

    def __str__(self) -> str:
        return ",".join(self.names) if self.pattern is None else self.pattern.pattern

    @property
    def label(self) -> str:
        """A short name for the choice, in the names of loggers."""
        return str(self) if len(self.names) < 2 else f"{self.names[0]}+{len(self.names) - 1}"

    def matching(self, listed: Iterable[str]) -> list[str]:
        """The topics of a list that the pattern chooses, in order. Names that no topic can have are left out."""
        if self.pattern is None:
            return []
        return sorted({name for name in listed if is_valid_name(name) and self.pattern.fullmatch(name)})


def _names(topic: str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(topic, (str, bytes)) or not isinstance(topic, Iterable):
        return (check_topic(topic),)
    ordered = sorted(topic, key=str) if isinstance(topic, (set, frozenset)) else topic
    names = tuple(dict.fromkeys(check_topic(name) for name in ordered))
    if not names:
        raise ConfigError(f"topic={topic!r}: names no topic: give one name at least, or a pattern")
    return names
