"""Which partition a message with a key goes to.

A key decides over the number of partitions the topic *has*
(`Meta.partition_num`), available or not: order by key would be lost if a key
moved while its partition has no leader. Two clients that publish the same
keys must choose the same strategy; youzan's differ, and no mapping agrees
with both:

- ``murmur3``, as youzan's Go client: MurmurHash3 x86 32 bit with seed 0 of
  the bytes of the key (UTF-8 for str), unsigned, modulo the partitions.
- ``hashcode``, as youzan's Java client: ``Math.abs(key.hashCode() % n)``,
  where str is a Java String and int a Java Long.

Whoever has another mapping gives a function of their own, as in the Java client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from mmh3 import hash as _murmur3

from nsq_fast.errors import ConfigError

Key: TypeAlias = "str | bytes | int"
KeyPartitioner = Callable[[Key, int], int]

_INT_SIGN = 1 << 31
_INT_MASK = (1 << 32) - 1


def murmur3_partition(key: Key, partition_num: int) -> int:
    """The partition of ``key`` (str or bytes) as youzan's Go client computes it.

    Raises TypeError for anything else, and ValueError for a str that UTF-8 has no bytes for.
    """
    if partition_num < 1:
        _checked(partition_num)
    try:
        # Never a str: mmh3 ends the process where one has no bytes.
        data = key.encode() if isinstance(key, str) else key
        found: int = _murmur3(data, 0, False) % partition_num  # type: ignore[arg-type]  # it raises TypeError then
    except TypeError:
        raise TypeError(f"key for murmur3 must be str or bytes, not {type(key).__name__}") from None
    except UnicodeEncodeError:
        raise ValueError(f"key {key!r} holds lone surrogates, which UTF-8 cannot carry to a server") from None
    return found


def hashcode_partition(key: Key, partition_num: int) -> int:
    """The partition of ``key`` (str, or int as Long) as youzan's Java client computes it.

    Raises TypeError for bytes: Java hashes an array by its address.
    """
    if isinstance(key, str):
        return partition_of_hash(java_string_hash(key), partition_num)
    if isinstance(key, int) and not isinstance(key, bool):
        return partition_of_hash(java_long_hash(key), partition_num)
    raise TypeError(f"key for hashcode must be str or int, not {type(key).__name__}")


def partition_of_hash(java_hash: int, partition_num: int) -> int:
    """``Math.abs(hash % n)``; Java's remainder has the sign of the dividend, so this is ``abs(hash) % n``."""
    return abs(java_hash) % _checked(partition_num)


def java_string_hash(text: str) -> int:
    """``String.hashCode()``: over UTF-16 code units, wrapping at 32 bits, signed."""
    # A char of Java is a UTF-16 code unit, and half of a surrogate pair is one too.
    data = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for index in range(0, len(data), 2):
        value = (31 * value + (data[index] << 8 | data[index + 1])) & _INT_MASK
    return _signed(value)


def java_long_hash(value: int) -> int:
    """``Long.hashCode()``. Raises ValueError outside 64 bits. An Integer's hash is its value."""
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"key {value} does not fit a Java long")
    unsigned = value & (1 << 64) - 1
    return _signed((unsigned ^ unsigned >> 32) & _INT_MASK)


def _signed(value: int) -> int:
    return value - (1 << 32) if value & _INT_SIGN else value


def _checked(partition_num: int) -> int:
    if partition_num < 1:
        raise ValueError(f"partition_num={partition_num}: must be at least 1")
    return partition_num


KEY_PARTITIONERS: Mapping[str, KeyPartitioner] = MappingProxyType(
    {"murmur3": murmur3_partition, "hashcode": hashcode_partition}
)


def key_partitioner(strategy: str | KeyPartitioner) -> KeyPartitioner:
    """The function for ``strategy``, a name or a function; raise ConfigError for a name that does not exist.

    What a function of the user's raises, or returns that is no number of a partition, becomes a ConfigError.
    """
    if callable(strategy):
        return _checking(strategy)
    try:
        return KEY_PARTITIONERS[strategy]
    except KeyError:
        raise ConfigError(f"key strategy {strategy!r}: must be one of {', '.join(KEY_PARTITIONERS)}") from None


def _checking(function: KeyPartitioner) -> KeyPartitioner:
    name = getattr(function, "__name__", repr(function))

    def partition(key: Key, partition_num: int) -> int:
        call = f"key_strategy: {name}({key!r:.100}, {partition_num})"
        try:
            number = function(key, partition_num)
        except Exception as error:
            raise ConfigError(f"{call} failed: {error!r}") from error
        if type(number) is not int or not 0 <= number < partition_num:
            raise ConfigError(f"{call} is {number!r:.100}: must be a whole number, 0 to {partition_num - 1}")
        return number

    return partition
