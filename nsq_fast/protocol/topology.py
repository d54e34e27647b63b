"""Lookup replies of both server families, merged into one immutable picture of a topic.

Every nsqlookupd is asked; each reply becomes a `LookupAnswer`, and `merge`
makes one `Topology` of them whose value does not depend on the order in which
they came. On the original NSQ a topic is a set of producers, and nothing
else. On the redesigned one it has partitions too, each with the nsqd that
leads it, and meta data; old nsqds may stand beside the partitions.

A reply is decoded and checked in one step. What a server may not send raises
RemoteProtocolError; a single peer whose address cannot be used is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec

from ..errors import RemoteProtocolError
from ..names import Address

T = TypeVar("T")

ACCEPT = "application/vnd.nsq; version=1.0"
"""The Accept header, to the letter, that makes negotiating servers send bare JSON and true status codes."""

REDESIGNED_MARK = "-HA."
"""Part of the version of a redesigned server."""

MAX_PARTITION = 1023
_EMPTY: Mapping[int, Any] = MappingProxyType({})


class Nsqd(NamedTuple):
    """One nsqd as nsqlookupd knows it. ``tcp`` (broadcast address and port) identifies it."""

    tcp: Address
    http: Address | None = None
    version: str = ""
    hostname: str = ""
    broadcast_address: str = ""
    distributed_id: str = ""

    @property
    def is_redesigned(self) -> bool:
        """Whether it speaks the redesigned dialect."""
        return REDESIGNED_MARK in self.version


class Meta(NamedTuple):
    """What a redesigned lookupd says of a topic as a whole."""

    partition_num: int = 0
    replica: int = 0
    extend_support: bool = False
    ordered: bool = False
    multi_part: bool = False
    disable_channel_auto_create: bool = False


class LookupAnswer(NamedTuple):
    """The reply of one lookupd for one topic. An unknown topic gives the empty answer."""

    channels: tuple[str, ...] = ()
    producers: tuple[Nsqd, ...] = ()
    partitions: Mapping[int, Nsqd] = _EMPTY
    meta: Meta | None = None


class Topology(NamedTuple):
    """Where a topic lives: all lookupds' answers taken together. Immutable, compared by value."""

    producers: tuple[Nsqd, ...] = ()
    partitions: Mapping[int, Nsqd] = _EMPTY
    meta: Meta | None = None
    channels: tuple[str, ...] = ()

    @property
    def nsqds(self) -> tuple[Nsqd, ...]:
        """Every nsqd once, by address: the leaders and the producers."""
        return _distinct([*self.partitions.values(), *self.producers])

    @property
    def unpartitioned(self) -> tuple[Nsqd, ...]:
        """The nsqds to talk to without a partition: all of the original's; beside partitions, the old ones only."""
        leaders = {nsqd.tcp for nsqd in self.partitions.values()}
        return tuple(
            nsqd for nsqd in self.producers if nsqd.tcp not in leaders and not (leaders and nsqd.is_redesigned)
        )

    @property
    def is_complete(self) -> bool:
        """Whether every partition has a leader. True for a topic without partitions."""
        return self.meta is None or len(self.partitions) >= self.meta.partition_num

    @property
    def is_empty(self) -> bool:
        """Whether no nsqd is known for the topic."""
        return not self.producers and not self.partitions


class TopologyDiff(NamedTuple):
    """What changed from one topology to the next."""

    added: tuple[Nsqd, ...]
    removed: tuple[Nsqd, ...]
    moved: Mapping[int, tuple[Nsqd | None, Nsqd | None]]
    meta_changed: bool

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.moved or self.meta_changed)


def _distinct(nsqds: Iterable[Nsqd]) -> tuple[Nsqd, ...]:
    by_address: dict[Address, list[Nsqd]] = {}
    for nsqd in nsqds:
        by_address.setdefault(nsqd.tcp, []).append(nsqd)
    return tuple(_most_named(same) for _, same in sorted(by_address.items()))


def _most_named(values: list[T]) -> T:
    """The value that occurs most often; of several, the greatest: any order of ``values`` gives the same one."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))
