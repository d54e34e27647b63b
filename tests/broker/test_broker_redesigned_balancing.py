"""Balancing: moves come to an end, empty the nodes that leave, and leave the others with as much as each other."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from nsq_fast.broker.redesigned.coordinator import Move, Placement, next_move, ring

MOST_MOVES = 2000


def moved(placements: list[Placement], move: Move) -> list[Placement]:
    """Placements after a move, as ``Moves`` carries it out."""
    at = next(n for n, each in enumerate(placements) if (each.topic, each.number) == (move.topic, move.number))
    nodes = list(placements[at].nodes)
    if move.is_leader:
        assert nodes[0] == move.origin
        if move.target in nodes:
            nodes.remove(move.target)
        else:
            nodes.remove(move.origin)
        nodes.insert(0, move.target)
    else:
        assert move.origin in nodes[1:]
        assert move.target not in nodes
        nodes[nodes.index(move.origin)] = move.target
    result = [*placements]
    result[at] = placements[at]._replace(nodes=tuple(nodes))
    return result


def balanced(placements: list[Placement], nodes: list[str], leaving: tuple[str, ...] = ()) -> list[Placement]:
    for _ in range(MOST_MOVES):
        move = next_move(placements, nodes, leaving)
        if move is None:
            return placements
        placements = moved(placements, move)
    raise AssertionError(f"no end after {MOST_MOVES} moves")


def leaders(placements: list[Placement]) -> Counter[str]:
    return Counter(each.nodes[0] for each in placements)


def replicas(placements: list[Placement]) -> Counter[str]:
    return Counter(node for each in placements for node in each.nodes)


def random_placements(dice: random.Random, nodes: list[str]) -> Iterator[Placement]:
    for topic in range(dice.randrange(1, 8)):
        may_share = dice.random() < 0.6
        count = dice.randrange(1, min(3, len(nodes)) + 1)
        free = dice.sample(nodes, len(nodes))
        for number in range(dice.randrange(1, 10) if may_share else len(nodes) // count):
            chosen = dice.sample(nodes, count) if may_share else [free.pop() for _ in range(count)]
            yield Placement(f"t{topic}", number, tuple(chosen), may_share)


@pytest.mark.parametrize("group", range(4))
def test_random_clusters(group: int) -> None:
    for seed in range(group * 60, (group + 1) * 60):
        dice = random.Random(seed)
        nodes = [f"n{number}" for number in range(dice.randrange(2, 7))]
        before = list(random_placements(dice, nodes))
        leaving = tuple(dice.sample(nodes, dice.choice((0, 0, 1))))
        after = balanced(before, nodes, leaving)
        staying = [node for node in nodes if node not in leaving]
        for old, new in zip(before, after, strict=True):
            assert len(new.nodes) == len(set(new.nodes)) == len(old.nodes)
            assert new.may_share or not any(
                set(new.nodes) & set(other.nodes) for other in after if other.topic == new.topic and other is not new
            )
            expected = ring(new.topic, new.number, len(new.nodes), staying)
            if new.may_share and expected:
                assert (new.nodes[0], set(new.nodes)) == (expected[0], set(expected))
            # What cannot go anywhere else stays.
            assert not set(leaving) & set(new.nodes) or not expected or not new.may_share
        assert next_move(after, nodes, leaving) is None


def test_partitions_stand_on_a_ring_as_on_the_real_server() -> None:
    # murmur3 of "orders" is 1964526729: what getRebalancedMultiTopicPartitionsFromNameList begins with.
    nodes = ["a", "b", "c", "d"]
    placed = [ring("orders", number, 3, nodes) for number in range(5)]
    first = 1964526729 % 4
    assert placed[0][0] == nodes[first]
    for number, found in enumerate(placed):
        assert found == tuple(nodes[(first + number + step) % 4] for step in range(3))
    assert ring("orders", 0, 5, nodes) == ()


def test_topics_that_do_not_share_nodes_are_spread_by_numbers() -> None:
    before = [Placement(f"t{number}", 0, ("a", "b")) for number in range(12)]
    after = balanced(before, ["a", "b", "c"])
    assert leaders(after) == {"a": 4, "b": 4, "c": 4}
    assert replicas(after) == {"a": 8, "b": 8, "c": 8}


def test_a_leader_moves_to_a_replica_where_that_does() -> None:
    placements = [Placement(f"t{number}", 0, ("a", "b")) for number in range(2)]
    move = next_move(placements, ["a", "b"])
    assert move is not None
    assert (move.origin, move.target, move.is_leader) == ("a", "b", True)


def test_a_topic_that_does_not_share_nodes_stays_apart() -> None:
    placements = [Placement("t", number, (node,), may_share=False) for number, node in enumerate("ab")]
    assert next_move(placements, ["a", "b"]) is None
    after = balanced(placements, ["a", "b", "c"], ("a",))
    assert sorted(each.nodes[0] for each in after) == ["b", "c"]


def test_a_node_that_leaves_keeps_what_nobody_can_take() -> None:
    placements = [Placement("t", 0, ("a", "b"))]
    after = balanced(placements, ["a", "b"], ("a",))
    assert after[0].nodes == ("b", "a")  # it leads no more


def test_a_dead_node_is_left_alone() -> None:
    placements = [Placement("t", number, ("dead", "a")) for number in range(3)]
    assert next_move(placements, ["a", "b"]) is None
