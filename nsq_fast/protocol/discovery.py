"""Which of the nsqds that lookup names are used: the option ``discovery_filter``. Pure.

A filter is a function of one ``Nsqd``, or a mapping of its fields to patterns.
What it leaves out is kept in the topology, so that nobody takes the partitions
that those nsqds lead for partitions without a leader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import msgspec

from nsq_fast.printable import printable

from .topology import Nsqd, Topology

Keep = Callable[[Nsqd], object]

MOST_NAMED = 10
"""Nsqds that are named in a problem."""


def keep_of(option: Any) -> Keep | None:
    """The function that ``discovery_filter`` stands for; None: all nsqds are used.

    In a mapping, which LookupConfig has checked, every field must match one of its patterns, as in a shell.
    """
    if option is None or callable(option):
        return option  # type: ignore[no-any-return]
    rules = {field: [text] if isinstance(text, str) else list(text) for field, text in option.items()}

    def keep(nsqd: Nsqd) -> bool:
        return all(any(fnmatchcase(getattr(nsqd, field), text) for text in texts) for field, texts in rules.items())

    return keep


def only(topology: Topology, keep: Keep) -> Topology:
    """The topology without the nsqds that ``keep`` is false for. Raises what ``keep`` raises."""
    kept = {nsqd for nsqd in topology.nsqds if keep(nsqd)}
    excluded = tuple(nsqd for nsqd in topology.nsqds if nsqd not in kept)
    if not excluded:
        return topology
    addresses = {nsqd.tcp for nsqd in kept}
    partitions = {number: leader for number, leader in topology.partitions.items() if leader.tcp in addresses}
    return msgspec.structs.replace(
        topology,
        producers=tuple(nsqd for nsqd in topology.producers if nsqd.tcp in addresses),
        partitions=MappingProxyType(partitions),
        problem=topology.problem if kept else _none_left(excluded),
        excluded=excluded,
        excluded_partitions=tuple(number for number in topology.partitions if number not in partitions),
    )


def left_out(partitions: Sequence[int]) -> str:
    """What to say of partitions that nobody will take."""
    return f"discovery_filter leaves out the leaders of partitions {', '.join(map(str, sorted(partitions)))}"


def _none_left(excluded: tuple[Nsqd, ...]) -> str:
    named = ", ".join(_described(nsqd) for nsqd in excluded[:MOST_NAMED])
    more = f" and {len(excluded) - MOST_NAMED} others" if len(excluded) > MOST_NAMED else ""
    return f"discovery_filter leaves none of the {len(excluded)} nsqds that lookup names: {named}{more}"


def _described(nsqd: Nsqd) -> str:
    """Its address, and what a mapping may have looked at."""
    fields = {
        "hostname": nsqd.hostname,
        "region": nsqd.topology_region,
        "zone": nsqd.topology_zone,
        "id": nsqd.distributed_id,
    }
    shown = ", ".join(f"{name} {printable(text)}" for name, text in fields.items() if text)
    return f"{nsqd.tcp} ({shown})" if shown else str(nsqd.tcp)
