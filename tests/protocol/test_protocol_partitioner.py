"""Round robin, and keys to partitions as youzan's Go and Java clients do it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsq_fast.errors import ConfigError
from nsq_fast.protocol.partitioner import (
    RoundRobin,
    hashcode_partition,
    java_long_hash,
    java_string_hash,
    key_partitioner,
    murmur3_partition,
    partition_of_hash,
)

# Computed with a murmur3 library in Go, and on a JVM: partitions for 3, 4 and 8.
MURMUR3 = [
    ("a", (2, 2, 2)),
    ("hello", (1, 3, 7)),
    ("order-12345", (2, 2, 6)),
    ("123456789", (0, 2, 2)),
    ("中文", (2, 3, 7)),
    ("user:1001", (2, 0, 0)),
    ("polygenelubricants", (2, 0, 0)),
]
STRING_HASHES = [
    ("", 0, (0, 0, 0)),
    ("a", 97, (1, 1, 1)),
    ("hello", 99162322, (1, 2, 2)),
    ("order-12345", 478832884, (1, 0, 4)),
    ("123456789", -1867378635, (0, 3, 3)),
    ("中文", 646394, (2, 2, 2)),
    ("user:1001", 303304367, (2, 3, 7)),
    ("polygenelubricants", -2147483648, (2, 0, 0)),
]


@pytest.mark.parametrize(("key", "partitions"), MURMUR3)
def test_murmur3_agrees_with_the_go_client(key: str, partitions: tuple[int, ...]) -> None:
    assert tuple(murmur3_partition(key, number) for number in (3, 4, 8)) == partitions
    assert tuple(murmur3_partition(key.encode(), number) for number in (3, 4, 8)) == partitions


@pytest.mark.parametrize(("key", "java_hash", "partitions"), STRING_HASHES)
def test_hashcode_of_strings_agrees_with_the_java_client(key: str, java_hash: int, partitions: tuple[int, ...]) -> None:
    assert java_string_hash(key) == java_hash
    assert tuple(hashcode_partition(key, number) for number in (3, 4, 8)) == partitions


@pytest.mark.parametrize(
    ("key", "java_hash", "partitions"), [(1234567890123, 1912276436, (2, 0, 4)), (-5, 4, (1, 0, 4))]
)
def test_hashcode_of_longs_agrees_with_the_java_client(key: int, java_hash: int, partitions: tuple[int, ...]) -> None:
    assert java_long_hash(key) == java_hash
    assert tuple(hashcode_partition(key, number) for number in (3, 4, 8)) == partitions


def test_a_java_integer_is_its_own_hash() -> None:
    assert [partition_of_hash(-7, number) for number in (3, 4, 8)] == [1, 3, 7]


def test_characters_beyond_the_basic_plane_count_as_two_code_units() -> None:
    assert java_string_hash("\U0001f600") == 0xD83D * 31 + 0xDE00


@given(st.text(), st.integers(1, 254))
def test_every_key_has_a_partition(key: str, partition_num: int) -> None:
    assert 0 <= hashcode_partition(key, partition_num) < partition_num
    assert 0 <= murmur3_partition(key.encode("utf-8", "surrogatepass"), partition_num) < partition_num


def test_keys_that_mean_nothing_to_a_strategy_are_refused() -> None:
    with pytest.raises(TypeError, match="bytes"):
        hashcode_partition(b"a", 3)
    with pytest.raises(TypeError, match="int"):
        murmur3_partition(5, 3)
    with pytest.raises(ValueError, match="long"):
        hashcode_partition(1 << 63, 3)
    with pytest.raises(ValueError, match="partition_num"):
        murmur3_partition("a", 0)
    with pytest.raises(ConfigError, match="murmur3, hashcode"):
        key_partitioner("md5")
    assert key_partitioner("murmur3") is murmur3_partition


def test_round_robin_takes_turns_and_bears_a_changing_list() -> None:
    turn = RoundRobin(start=1)
    assert [turn.choose("abc") for _ in range(4)] == ["b", "c", "a", "b"]
    assert turn.choose("x") == "x"
    with pytest.raises(IndexError):
        turn.choose([])
