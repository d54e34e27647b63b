"""Which partition to move, so that the nodes have the same to do. No clock, no I/O.

Nodes that leave are emptied first. Then one that is much busier than the others gives load away; then the nodes get the
same number of leaders of each topic, of leaders, and of replicas (youzan/nsq: consistence/data_placement_mgr.go,
processRemovingNodes, DoBalance). Each move lowers a cost that is compared in this order, so that moves come to an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

MUCH_BUSIER = 1.5
"""A node whose load is more than so many times the average is to give some of it away."""


class Placement(NamedTuple):
    """Where a partition stands.

    Attributes:
        nodes: ids of the nodes that have it; the first leads it.
        load: what its leader has to do, in any unit.
        may_share: whether a node may have several partitions of the topic.
    """

    topic: str
    number: int
    nodes: tuple[str, ...]
    load: int = 0
    may_share: bool = True


class Move(NamedTuple):
    """What to move: the leadership of a partition, or a replica that does not lead.

    A node that gets the leadership and has no replica gets that of the former leader.
    """

    topic: str
    number: int
    origin: str
    target: str
    is_leader: bool


class _Cost(NamedTuple):
    """By how much a move changes what is to be as small as possible; the first one counts most."""

    replicas_leaving: int
    leaders_leaving: int
    excess_load: int
    leaders_of_topic: int
    leaders: int
    replicas: int


_NO_CHANGE = _Cost(0, 0, 0, 0, 0, 0)


def next_move(placements: Sequence[Placement], nodes: Collection[str], leaving: Collection[str] = ()) -> Move | None:
    """The move that helps most; None when none does.

    Args:
        nodes: those that can be talked to.
        leaving: those of them that are to have nothing in the end.
    """
    tally = _Tally(placements, nodes, leaving)
    best, least = None, _NO_CHANGE
    for placement in placements:
        for move in _moves_of(placement, tally):
            cost = tally.cost(placement, move)
            if cost < least:
                best, least = move, cost
    return best


def _moves_of(placement: Placement, tally: _Tally) -> Iterator[Move]:
    """The moves of a partition that are possible."""
    topic, number, (leader, *others) = placement.topic, placement.number, placement.nodes
    if leader not in tally.nodes:
        return
    for target in tally.staying:
        if target in others:
            yield Move(topic, number, leader, target, True)
        elif target != leader and (placement.may_share or not tally.of_topic[topic, target]):
            yield Move(topic, number, leader, target, True)
            for origin in others:
                if origin in tally.nodes:
                    yield Move(topic, number, origin, target, False)


class _Tally:
    """What each node has."""

    def __init__(self, placements: Sequence[Placement], nodes: Collection[str], leaving: Collection[str]) -> None:
        self.nodes = set(nodes)
        self.leaving = set(leaving)
        self.staying = sorted(self.nodes - self.leaving)
        self.leaders: Counter[str] = Counter()
        self.leaders_of: Counter[tuple[str, str]] = Counter()
        self.of_topic: Counter[tuple[str, str]] = Counter()
        self.replicas: Counter[str] = Counter()
        self.load: Counter[str] = Counter()
        for placement in placements:
            leader = placement.nodes[0]
            self.leaders[leader] += 1
            self.leaders_of[placement.topic, leader] += 1
            self.load[leader] += placement.load
            for node in placement.nodes:
                self.replicas[node] += 1
                self.of_topic[placement.topic, node] += 1
        self._much = int(MUCH_BUSIER * self.load.total() / max(1, len(self.staying)))

    def cost(self, placement: Placement, move: Move) -> _Cost:
        """What a move changes."""
        topic, origin, target = move.topic, move.origin, move.target
        leaves = int(origin in self.leaving)
        is_copied = target not in placement.nodes
        return _Cost(
            -leaves * is_copied,
            -leaves * move.is_leader,
            self._change_of_excess(placement.load, origin, target) * move.is_leader,
            _change(self.leaders_of[topic, origin], self.leaders_of[topic, target]) * move.is_leader,
            _change(self.leaders[origin], self.leaders[target]) * move.is_leader,
            _change(self.replicas[origin], self.replicas[target]) * is_copied,
        )

    def _change_of_excess(self, load: int, origin: str, target: str) -> int:
        before = self._excess(self.load[origin]) + self._excess(self.load[target])
        return self._excess(self.load[origin] - load) + self._excess(self.load[target] + load) - before

    def _excess(self, load: int) -> int:
        return max(0, load - self._much)


def _change(origin: int, target: int) -> int:
    """By how much the sum of the squares changes when the one gets one less, and the other one more."""
    return 2 * (target - origin + 1)
