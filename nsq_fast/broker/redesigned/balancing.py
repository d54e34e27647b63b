"""Which partition to move, so that the nodes have the same to do. No clock, no I/O.

The partitions of a topic that may share nodes stand on a *ring* of all nodes, which begins at a node that the name of
the topic gives: the first node of a partition leads it, the next ones have its replicas, and the next partition begins
one node further. Others are moved: away from nodes that leave, then from a node that is too busy (``load``), then until
the nodes have the same number of leaders, and of replicas (youzan/nsq: consistence/data_placement_mgr.go,
getRebalancedMultiTopicPartitionsFromNameList, DoBalance; nsqlookup_coordinator.go, processRemovingNodes). Each move
lowers a cost that is compared in this order, so that moves come to an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import mmh3

from .load import NO_LOAD, Load, load_factors, most_load, total


def ring(topic: str, number: int, replicas: int, nodes: Sequence[str]) -> tuple[str, ...]:
    """The nodes of a partition on the ring, the leader first; none where there are fewer nodes than replicas.

    Args:
        nodes: all, in the order of the ring (the real server sorts their ids).
    """
    if len(nodes) < replicas:
        return ()
    first = mmh3.hash(topic, 0, False) + number
    return tuple(nodes[(first + step) % len(nodes)] for step in range(replicas))


class Placement(NamedTuple):
    """Where a partition stands.

    Attributes:
        nodes: ids of the nodes that have it; the first leads it.
        load: what there is to do for it.
        may_share: whether a node may have several partitions of the topic: then they stand on the ring.
    """

    topic: str
    number: int
    nodes: tuple[str, ...]
    load: Load = NO_LOAD
    may_share: bool = False


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

    replicas_leaving: int = 0
    leaders_leaving: int = 0
    off_the_ring: int = 0
    load: int = 0
    leaders: int = 0
    replicas: int = 0


_NO_CHANGE = _Cost()


def next_move(placements: Sequence[Placement], nodes: Sequence[str], leaving: Collection[str] = ()) -> Move | None:
    """The move that helps most; None when none does.

    Args:
        nodes: those that can be talked to, in the order of the ring.
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

    def __init__(self, placements: Sequence[Placement], nodes: Sequence[str], leaving: Collection[str]) -> None:
        self.nodes = set(nodes)
        self.leaving = set(leaving)
        self.staying = [node for node in nodes if node not in self.leaving]
        self.leaders: Counter[str] = Counter()
        self.of_topic: Counter[tuple[str, str]] = Counter()
        self.replicas: Counter[str] = Counter()
        led, held = dict.fromkeys(nodes, NO_LOAD), dict.fromkeys(nodes, NO_LOAD)
        self._rates: Counter[str] = Counter()
        for placement in placements:
            leader, load = placement.nodes[0], placement.load
            self.leaders[leader] += 1
            led[leader] = total((led.get(leader, NO_LOAD), load))
            for node in placement.nodes:
                self.replicas[node] += 1
                self.of_topic[placement.topic, node] += 1
                self._rates[node] += load.rate
                held[node] = total((held.get(node, NO_LOAD), load))
        factors = {node: load_factors(led[node], held[node])[0] for node in nodes}
        most = most_load(sum(factors.values()) / len(factors), max(factors.values())) if factors else 0.0
        self._too_busy = {node for node, factor in factors.items() if factor > most}

    def cost(self, placement: Placement, move: Move) -> _Cost:
        """What a move changes."""
        origin, target = move.origin, move.target
        leaves = int(origin in self.leaving)
        is_copied = target not in placement.nodes
        leaving = _Cost(-leaves * is_copied, -leaves * move.is_leader)
        expected = ring(placement.topic, placement.number, len(placement.nodes), self.staying)
        if placement.may_share and expected:
            return leaving._replace(off_the_ring=_change_of_ring(placement, move, expected))
        return leaving._replace(
            load=self._change_of_load(placement.load.rate, origin, target) if is_copied else 0,
            leaders=_change(self.leaders[origin], self.leaders[target]) * move.is_leader,
            replicas=_change(self.replicas[origin], self.replicas[target]) * is_copied,
        )

    def _change_of_load(self, rate: int, origin: str, target: str) -> int:
        """What a move changes for the better counts only where a node is too busy."""
        change = 2 * rate * (self._rates[target] - self._rates[origin] + rate)
        return change if change > 0 or origin in self._too_busy else 0


def _change_of_ring(placement: Placement, move: Move, expected: tuple[str, ...]) -> int:
    """By how much a move brings a partition nearer to its nodes on the ring."""
    leader, nodes = placement.nodes[0], set(placement.nodes)
    nodes_then = nodes if move.target in nodes else nodes - {move.origin} | {move.target}
    leader_then = move.target if move.is_leader else leader
    missing = len(set(expected) - nodes_then) - len(set(expected) - nodes)
    return 2 * missing + (leader_then != expected[0]) - (leader != expected[0])


def _change(origin: int, target: int) -> int:
    """By how much the sum of the squares changes when the one gets one less, and the other one more."""
    return 2 * (target - origin + 1)
