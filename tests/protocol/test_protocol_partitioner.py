"""Round robin, and keys to partitions as youzan's Go and Java clients do it."""

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

# More of the same origin: MurmurHash3 of the UTF-8 bytes by Go's spaolacci/murmur3, String and Long.hashCode by
# a JVM, and the partitions of 3, 7, 16 and 254.
GO_HASHES = [
    ("", 0, (0, 0, 0, 0)),
    ("Straße", 1561572846, (0, 1, 14, 150)),
    ("ключ", 2589532226, (2, 1, 2, 194)),
    ("😀 smile", 3428722043, (2, 5, 11, 173)),
    ("user:9999999999", 2473400226, (0, 3, 2, 42)),
    ("\0", 1364076727, (1, 6, 7, 207)),
    ("AaAaBB", 575277197, (2, 5, 13, 217)),
    ("BBBBAa", 1764903283, (1, 3, 3, 31)),
    ("The quick brown fox jumps over the lazy dog", 776992547, (2, 2, 3, 197)),
    ("\U0001d4b3-mixed-中文", 1732519482, (0, 1, 10, 214)),
    ("tail1", 3138299663, (2, 2, 15, 123)),
    ("tail12", 641306393, (2, 0, 9, 81)),
    ("tail123", 3714286843, (1, 1, 11, 139)),
    ("tail1234", 1494427091, (2, 3, 3, 57)),
]
JAVA_HASHES = [
    ("Straße", -1808122922, (2, 4, 10, 46)),
    ("ключ", 33309882, (0, 4, 10, 68)),
    ("😀 smile", -1559691765, (0, 2, 5, 193)),
    ("user:9999999999", 2131110575, (2, 6, 15, 29)),
    ("\0", 0, (0, 0, 0, 0)),
    ("AaAaBB", 1952508096, (0, 0, 0, 190)),
    ("BBBBAa", 1952508096, (0, 0, 0, 190)),
    ("The quick brown fox jumps over the lazy dog", -609428141, (2, 0, 13, 99)),
    ("\U0001d4b3-mixed-中文", -2036380197, (0, 5, 5, 221)),
    ("tail12", -881170831, (1, 2, 15, 127)),
]
JAVA_LONGS = [
    (0, 0, (0, 0, 0, 0)),
    (-1, 0, (0, 0, 0, 0)),
    (1 << 32, 1, (1, 1, 1, 1)),
    ((1 << 63) - 1, -2147483648, (2, 2, 0, 8)),
    (-(1 << 63), -2147483648, (2, 2, 0, 8)),
    (-4294967297, 1, (1, 1, 1, 1)),
    (9007199254740993, 2097153, (0, 2, 1, 129)),
    (1 << 31, -2147483648, (2, 2, 0, 8)),
]


@pytest.mark.parametrize(("key", "murmur3", "partitions"), GO_HASHES)
def test_murmur3_of_more_keys(key: str, murmur3: int, partitions: tuple[int, ...]) -> None:
    assert murmur3_partition(key, 1 << 32) == murmur3
    assert tuple(murmur3_partition(key, number) for number in (3, 7, 16, 254)) == partitions


@pytest.mark.parametrize(("key", "java_hash", "partitions"), JAVA_HASHES)
def test_hashcode_of_more_strings(key: str, java_hash: int, partitions: tuple[int, ...]) -> None:
    assert java_string_hash(key) == java_hash
    assert tuple(hashcode_partition(key, number) for number in (3, 7, 16, 254)) == partitions


@pytest.mark.parametrize(("key", "java_hash", "partitions"), JAVA_LONGS)
def test_hashcode_of_more_longs(key: int, java_hash: int, partitions: tuple[int, ...]) -> None:
    assert java_long_hash(key) == java_hash
    assert tuple(hashcode_partition(key, number) for number in (3, 7, 16, 254)) == partitions


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
    with pytest.raises(ValueError, match="lone surrogates"):
        murmur3_partition("\ud800", 3)
    with pytest.raises(ConfigError, match="murmur3, hashcode"):
        key_partitioner("md5")
    assert key_partitioner("murmur3") is murmur3_partition
