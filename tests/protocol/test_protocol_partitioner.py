"""Keys to partitions as youzan's Go and Java clients have them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsq_fast.errors import ConfigError
from nsq_fast.protocol.partitioner import (
    hashcode_partition,
    java_long_hash,
    java_string_hash,
    key_partitioner,
    murmur3_partition,
    partition_of_hash,
)

COUNTS = (3, 4, 7, 8, 16, 254)
# MurmurHash3 of the UTF-8 bytes by Go's spaolacci/murmur3.
GO_HASHES = {
    "": 0, "Straße": 1561572846, "ключ": 2589532226, "😀 smile": 3428722043, "user:9999999999": 2473400226,
    "\0": 1364076727, "AaAaBB": 575277197, "BBBBAa": 1764903283,
    "The quick brown fox jumps over the lazy dog": 776992547, "\U0001d4b3-mixed-中文": 1732519482,
    "tail1": 3138299663, "tail12": 641306393, "tail123": 3714286843, "tail1234": 1494427091,
}  # fmt: skip
# String.hashCode and Long.hashCode by a JVM.
JAVA_HASHES = {
    "": 0, "a": 97, "hello": 99162322, "order-12345": 478832884, "123456789": -1867378635, "中文": 646394,
    "user:1001": 303304367, "polygenelubricants": -2147483648, "Straße": -1808122922, "ключ": 33309882,
    "😀 smile": -1559691765, "user:9999999999": 2131110575, "\0": 0, "AaAaBB": 1952508096, "BBBBAa": 1952508096,
    "The quick brown fox jumps over the lazy dog": -609428141, "\U0001d4b3-mixed-中文": -2036380197,
    "tail12": -881170831,
    0: 0, -1: 0, 1 << 32: 1, (1 << 63) - 1: -2147483648, -(1 << 63): -2147483648, -4294967297: 1,
    9007199254740993: 2097153, 1 << 31: -2147483648, 1234567890123: 1912276436, -5: 4,
}  # fmt: skip
# What the two clients themselves make of some, for 3, 4 and 8 partitions.
GO_PARTITIONS = {
    "a": (2, 2, 2), "hello": (1, 3, 7), "order-12345": (2, 2, 6), "123456789": (0, 2, 2), "中文": (2, 3, 7),
    "user:1001": (2, 0, 0), "polygenelubricants": (2, 0, 0),
}  # fmt: skip
JAVA_PARTITIONS = {
    "": (0, 0, 0), "a": (1, 1, 1), "hello": (1, 2, 2), "order-12345": (1, 0, 4), "123456789": (0, 3, 3),
    "中文": (2, 2, 2), "user:1001": (2, 3, 7), "polygenelubricants": (2, 0, 0), 1234567890123: (2, 0, 4), -5: (1, 0, 4),
}  # fmt: skip


@pytest.mark.parametrize(("key", "murmur3"), GO_HASHES.items())
def test_murmur3_is_that_of_the_go_client(key: str, murmur3: int) -> None:
    assert murmur3_partition(key, 1 << 32) == murmur3
    for count in COUNTS:
        assert murmur3_partition(key, count) == murmur3_partition(key.encode(), count) == murmur3 % count


@pytest.mark.parametrize(("key", "java_hash"), JAVA_HASHES.items())
def test_hashcode_is_that_of_the_java_client(key: str | int, java_hash: int) -> None:
    assert (java_string_hash(key) if isinstance(key, str) else java_long_hash(key)) == java_hash
    for count in COUNTS:
        assert hashcode_partition(key, count) == abs(java_hash) % count


def test_partitions_are_those_of_both_clients() -> None:
    for key, partitions in GO_PARTITIONS.items():
        assert tuple(murmur3_partition(key, count) for count in (3, 4, 8)) == partitions
    for java_key, partitions in JAVA_PARTITIONS.items():
        assert tuple(hashcode_partition(java_key, count) for count in (3, 4, 8)) == partitions
    assert [partition_of_hash(-7, count) for count in (3, 4, 8)] == [1, 3, 7], "an Integer's hash is its value"


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
    with pytest.raises(ValueError, match="lone surrogates"):
        murmur3_partition("\ud800", 3)
    with pytest.raises(ConfigError, match="murmur3, hashcode"):
        key_partitioner("md5")
    assert key_partitioner("murmur3") is murmur3_partition
