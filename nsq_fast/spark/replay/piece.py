"""A piece of work for one task: a range of one partition's log, and how a batch is cut into pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from pyspark.sql.datasource import InputPartition

from nsq_fast.spark.discovery import Nsqd

from .log import Log
from .position import Offsets


@dataclass(frozen=True)
class Route:
    """How a partition was to be read when the batch was planned; a task that finds it out of date asks for itself."""

    nsqd: Nsqd
    is_ordered: bool
    is_ext: bool
    has_fixed_channels: bool

    @classmethod
    def of(cls, log: Log) -> Route:
        """The route that a log shows."""
        return cls(log.nsqd, log.is_ordered, log.is_ext, log.has_fixed_channels)


class Piece(InputPartition):
    """The records of ``partition`` that begin from offset ``start`` up to ``end``. ``route``: None when unknown."""

    def __init__(self, partition: int, start: int, end: int, route: Route | None) -> None:
        super().__init__(f"{partition}:{start}-{end}")
        self.partition = partition
        self.start = start
        self.end = end
        self.route = route


def pieces(starts: Offsets, ends: Offsets, routes: Mapping[int, Route], minimum: int | None) -> list[Piece]:
    """The pieces of a batch: one for each partition that has something, or more to make ``minimum`` of them.

    A cut may fall within a record: that belongs to the piece in which it begins.
    """
    sizes = {partition: end - starts.get(partition, 0) for partition, end in sorted(ends.items())}
    sizes = {partition: size for partition, size in sizes.items() if size > 0}
    counts = _shares(sizes, minimum or 0)
    return [
        Piece(partition, starts.get(partition, 0) + begin, starts.get(partition, 0) + end, routes.get(partition))
        for partition, size in sizes.items()
        for begin, end in _cuts(size, counts[partition])
    ]


def _shares(sizes: Mapping[int, int], minimum: int) -> dict[int, int]:
    if len(sizes) >= minimum:
        return dict.fromkeys(sizes, 1)
    total = sum(sizes.values())
    return {partition: max(1, -(-minimum * size // total)) for partition, size in sizes.items()}


def _cuts(size: int, count: int) -> list[tuple[int, int]]:
    cuts = [size * number // count for number in range(count + 1)]
    return [(begin, end) for begin, end in pairwise(cuts) if end > begin]
