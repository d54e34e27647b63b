"""Fill a topic with messages before its clients start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from gevent import sleep

from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import NsqError
from nsq_fast.names import Address
from nsq_fast.runtime import ColumnSubscription, LookupdHTTPClient, Producer

CHANNEL = "bench"
BATCH_BYTES = 1 << 20
_TIMEOUT = 30.0
_POLL = 0.02


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


def wait_until_listed(lookupd: str, topic: str) -> None:
    """Wait until a lookup finds the topic: an nsqd registers it a moment later. Raises NsqError."""
    with LookupdHTTPClient.from_url(lookupd) as client:
        deadline = monotonic() + _TIMEOUT
        while topic not in client.topics()["topics"]:
            if monotonic() > deadline:
                raise NsqError(f"{lookupd} does not list {topic} after {_TIMEOUT:.0f} s: has nsqd reached it?")
            sleep(_POLL)


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
