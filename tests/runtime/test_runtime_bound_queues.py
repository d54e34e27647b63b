"""The queue of a publish that is bound to a partition: where it is found at once, and where that is left to others."""

from __future__ import annotations

from typing import Any

import pytest

from nsq_fast import Producer
from nsq_fast._bound_queues import BoundQueues
from nsq_fast.protocol.partitioner import KeyPartitioner, hash_behind, hashcode_partition, key_partitioner
from nsq_fast.protocol.partitioner import murmur3_partition as murmur3
from nsq_fast.runtime.loop_turns import LoopTurns
from nsq_fast.runtime.publishing.topic_route import TopicRoute

PARTITIONS = 7


def queues(partition_of_key: KeyPartitioner = murmur3, partition_num: int = PARTITIONS) -> BoundQueues:
    found = BoundQueues(partition_of_key, hash_behind(partition_of_key))
    found.partitions = {number: f"queue {number}" for number in range(partition_num)}
    found.partition_num = partition_num
    return found


@pytest.mark.parametrize("key", [b"", b"0", b"\xff" * 100, "", "key", "schlüssel", "键", "\U0001f511"])
@pytest.mark.parametrize("partition_num", [1, 2, 7, 1000])
def test_a_key_has_the_partition_that_its_hash_says(key: str | bytes, partition_num: int) -> None:
    assert queues(partition_num=partition_num).bound(key, None) == f"queue {murmur3(key, partition_num)}"


def test_hashes_of_all_sizes_are_taken_without_a_sign() -> None:
    found = queues()
    for number in range(2000):
        key = b"%d" % number
        assert found.bound(key, None) == f"queue {murmur3(key, PARTITIONS)}"


def test_another_strategy_is_asked_for_each_key() -> None:
    asked = []

    def last(key: Any, partition_num: int) -> int:
        asked.append(key)
        return partition_num - 1

    found = queues(key_partitioner(last))
    assert [found.bound(key, None) for key in ("a", b"b")] == ["queue 6", "queue 6"]
    assert asked == ["a", b"b"]
    assert queues(hashcode_partition).bound("key", None) == f"queue {hashcode_partition('key', PARTITIONS)}"


def test_a_key_that_a_strategy_refuses_is_left_to_those_who_check_it() -> None:
    def refuse(key: Any, partition_num: int) -> int:
        raise RuntimeError("no")

    assert queues(key_partitioner(refuse)).bound("key", None) is None


@pytest.mark.parametrize("key", ["\ud800", 5, bytearray(b"key"), None], ids=repr)
def test_a_key_that_has_to_be_looked_at_is_left_to_others(key: Any) -> None:
    assert queues().bound(key, None) is None


def test_a_partition_by_number() -> None:
    found = queues()
    assert found.bound(None, 3) == "queue 3"
    for partition in (PARTITIONS, -1, True, "3", 1 << 80):
        assert found.bound(None, partition) is None
    assert found.bound("key", 3) is None


def test_nothing_is_found_while_partitions_are_unknown_or_held() -> None:
    unknown, held = queues(partition_num=0), queues()
    held.held = "all of them wait here"
    for found in (unknown, held):
        assert found.bound("key", None) is None
        assert found.bound(None, 0) is None


def test_a_partition_without_a_queue_is_left_to_others() -> None:
    found = queues()
    found.partitions.clear()
    assert found.bound("key", None) is None
    assert found.bound(None, 0) is None


@pytest.mark.parametrize("kind", [TopicRoute, LoopTurns])
def test_what_every_publish_reads_of_a_class_below_a_compiled_one_is_in_slots(kind: type) -> None:
    assert kind.__dictoffset__ == 0  # the interpreter has no quick way to attributes in the dict of such a class


@pytest.mark.parametrize(
    "name", ["_is_running", "_pending_limit", "_routes", "_thread", "_timeout", "_trace", "_wakeups"]
)
def test_what_every_publish_reads_of_a_producer_is_in_slots(name: str) -> None:
    producer = Producer("127.0.0.1:1")
    assert name not in vars(producer)  # which is taken for the signals, and slow to read from then on
    assert hasattr(producer, name)
