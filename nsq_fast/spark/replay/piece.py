"""A piece of work for one task: a range of one partition's log, and how a batch is cut into pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from pyspark.sql.datasource import InputPartition

from nsq_fast.spark.discovery import Nsqd

from .log import Log
from .position import TopicOffsets

Place = tuple[str, int]
"""A topic and a partition."""


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
    """The records of a partition that begin from offset ``start`` up to ``end``. ``route``: None when unknown."""

    def __init__(self, topic: str, partition: int, start: int, end: int, route: Route | None) -> None:
        super().__init__(f"{topic}-{partition}:{start}-{end}")
        self.topic = topic
        self.partition = partition
        self.start = start
        self.end = end
        self.route = route


Routes = Mapping[str, Mapping[int, Route]]
"""Topic -> partition -> route."""


def pieces(starts: TopicOffsets, ends: TopicOffsets, routes: Routes, minimum: int | None) -> list[Piece]:
    """The pieces of a batch: one for each partition that has something, or more to make ``minimum`` of them.

    A cut may fall within a record: that belongs to the piece in which it begins.
    """
    begins = {(topic, each): starts.get(topic, {}).get(each, 0) for topic in ends for each in ends[topic]}
    sizes = {(topic, each): ends[topic][each] - begin for (topic, each), begin in sorted(begins.items())}
    sizes = {place: size for place, size in sizes.items() if size > 0}
    counts = _shares(sizes, minimum or 0)
    return [
        Piece(topic, partition, begins[topic, partition] + begin, begins[topic, partition] + end, route)
        for (topic, partition), size in sizes.items()
        for route in [routes.get(topic, {}).get(partition)]
        for begin, end in _cuts(size, counts[topic, partition])
    ]


def _shares(sizes: Mapping[Place, int], minimum: int) -> dict[Place, int]:
    if len(sizes) >= minimum:
        return dict.fromkeys(sizes, 1)
    total = sum(sizes.values())
    return {place: max(1, -(-minimum * size // total)) for place, size in sizes.items()}


def _cuts(size: int, count: int) -> list[tuple[int, int]]:
    cuts = [size * number // count for number in range(count + 1)]
    return [(begin, end) for begin, end in pairwise(cuts) if end > begin]
