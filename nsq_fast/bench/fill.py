"""Fill a topic with messages before its clients start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nsq_fast.config import ConnectionConfig
from nsq_fast.names import Address
from nsq_fast.runtime import ColumnSubscription, Producer

CHANNEL = "bench"
BATCH_BYTES = 1 << 20
_TIMEOUT = 30.0


def create_channel(nsqd: Address, topic: str, options: Mapping[str, Any]) -> None:
    """Make the channel by subscribing once, so that it gets what is published from now on. Raises NsqError.

    Args:
        options: of a client, here and below.
    """
    config = ConnectionConfig(**{name: value for name, value in options.items() if name in ConnectionConfig.names()})
    subscription = ColumnSubscription(nsqd, topic, CHANNEL, config)
    subscription.open()
    subscription.close()


def fill(nsqds: Sequence[Address], topic: str, count: int, size: int, options: Mapping[str, Any]) -> None:
    """Share ``count`` bodies of ``size`` bytes out over nsqds. Raises NsqError."""
    for number, nsqd in enumerate(nsqds):
        create_channel(nsqd, topic, options)
        with Producer([nsqd], **options) as producer:
            for many in _batches(_share(count, number, len(nsqds)), size):
                producer.multipublish(topic, [b"x" * size] * many, timeout=_TIMEOUT)


def fill_partitions(
    lookupds: Sequence[str], topic: str, partitions: int, count: int, size: int, options: Mapping[str, Any]
) -> None:
    """Share ``count`` bodies out over the partitions of a topic. Raises NsqError."""
    with Producer(lookupd_http_addresses=lookupds, **options) as producer:
        for partition in range(partitions):
            for many in _batches(_share(count, partition, partitions), size):
                producer.multipublish(topic, [b"x" * size] * many, partition=partition, timeout=_TIMEOUT)


def _share(count: int, number: int, places: int) -> int:
    return count * (number + 1) // places - count * number // places


def _batches(count: int, size: int) -> list[int]:
    most = max(1, min(1000, BATCH_BYTES // (size + 4)))
    return [most] * (count // most) + ([count % most] if count % most else [])
