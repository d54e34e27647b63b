"""How busy a node is, as the real nsqlookupd figures it: the *load factor*, about 0 to 100. No clock, no I/O.

Four fifths of it are what is published, a tenth what channels have left to consume, and a tenth what is stored (youzan/
nsq: consistence/data_placement_mgr.go, GetNodeLoadFactor, GetNodeAvgWriteLevel, convertQPSLevel; coordinator_rpc.go,
GetTopicStats).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

HOURS = 24
_MEGABYTE = 1 << 20
_KILOBYTES_AN_HOUR = 3600 * 1024
_MOST_LEVEL = 100.0
_MOST_LEFT = 50 * 1024
_MOST_STORED = 200 * 1024
_PUBLISH_SHARE, _LEFT_SHARE, _STORED_SHARE, _REPLICA_SHARE = 80.0, 10.0, 10.0, 5.0


class Load(NamedTuple):
    """What a partition is about, or several together.

    Attributes:
        published: bytes an hour.
        left: megabytes that channels have left to consume, and one for each channel.
        stored: megabytes that are stored, and one for each partition.
        with_channels: partitions that have channels.
        partitions: how many.
    """

    published: int = 0
    left: int = 0
    stored: int = 0
    with_channels: int = 0
    partitions: int = 0

    @property
    def rate(self) -> int:
        """Kilobytes a second that are published."""
        return self.published // _KILOBYTES_AN_HOUR


NO_LOAD = Load()


class HourlyBytes:
    """How much was published to a partition in each hour of the day.

    Attributes:
        hours: bytes in each hour; those of an hour stay until the next day has it.
    """

    def __init__(self, total: int = 0) -> None:
        self.hours = [0] * HOURS
        self._hour = -1
        self._total = total

    def note(self, total: int, hour: int) -> None:
        """So many bytes have been published in all, and it is this hour of the day."""
        if hour != self._hour:
            self._hour = hour
            self.hours[hour] = 0
        self.hours[hour] += total - self._total
        self._total = total


def load_of(hours: Sequence[int], stored: int, depths: Iterable[int]) -> Load:
    """The load of a partition.

    Args:
        hours: bytes published in each hour of the last day; the quarter with the least does not count.
        stored: bytes that its log has.
        depths: bytes that each of its channels has left.
    """
    counted = sorted(hours)[len(hours) // 4 :]
    left = [depth // _MEGABYTE + 1 for depth in depths]
    return Load((sum(counted) + 10) // len(counted), sum(left), stored // _MEGABYTE + 1, bool(left), 1)


def total(loads: Iterable[Load]) -> Load:
    """Several loads together."""
    sums = [sum(column) for column in zip(*loads, strict=True)]
    return Load(*sums) if sums else NO_LOAD


def load_factors(led: Load, held: Load) -> tuple[float, float]:
    """The load factor of a node as a leader, and that with its replicas.

    Args:
        led: what the node leads.
        held: what it has a replica of, also as the leader.
    """
    level = publish_level(held.rate)
    left = min(led.left + led.with_channels, _MOST_LEFT)
    stored = min(led.stored + led.partitions, _MOST_STORED)
    leader = (
        level / _MOST_LEVEL * _PUBLISH_SHARE + left / _MOST_LEFT * _LEFT_SHARE + stored / _MOST_STORED * _STORED_SHARE
    )
    return leader, leader + min(held.stored + held.partitions, _MOST_STORED) / _MOST_STORED * _REPLICA_SHARE


def publish_level(rate: int) -> float:
    """How much it is to publish so many kilobytes a second, as a number up to 100 (convertQPSLevel)."""
    if rate <= 3:
        return 1.0 + rate
    if rate <= 30:
        return 4.0 + (rate - 3) / 3
    if rate <= 300:
        return 13.0 + (rate - 30) / 15
    if rate <= 1000:
        return 31.0 + (rate - 300) / 35
    if rate <= 2000:
        return 51.0 + math.log2(1.0 + (rate - 1000))
    if rate <= 8000:
        return 61.0 + math.log2(1.0 + (rate - 2000))
    if rate <= 16000:
        return 74.0 + math.log2(1.0 + (rate - 8000))
    return _MOST_LEVEL


def most_load(average: float, most: float) -> float:
    """The leader load factor from which on a node is too busy, where the nodes have this on average, and at most.

    (DoBalance.)
    """
    if average < 4 and most < 8:
        return math.inf
    return average * (1.3 if average >= 20 else 2.0)
