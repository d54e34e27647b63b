"""For tests of the sink: batches in, and what the servers have of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from nsq_fast import ColumnSubscription, Consumer
from nsq_fast.broker import ClusterProcess
from nsq_fast.config import ConnectionConfig
from nsq_fast.names import Address
from nsq_fast.spark.options import SinkOptions
from nsq_fast.spark.sink import TaskReport, TaskWriter

from .fleet import unanswered
from .spark_ledger import account
from .waiting import until

CHANNEL = "check"


def batch(**columns: Any) -> pa.RecordBatch:
    """An Arrow batch of lists, or of arrays where the type matters."""
    return pa.record_batch(
        {name: values if isinstance(values, pa.Array) else pa.array(values) for name, values in columns.items()}
    )


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def write(batches: Iterable[pa.RecordBatch], **options: str) -> TaskReport:
    items = list(batches)
    names = {name.lower(): name for name in items[0].schema.names}
    return TaskWriter(SinkOptions.parse(options), names).write(iter(items))


def taken(address: Address, topic: str, count: int, **how: Any) -> list[bytes]:
    """Take ``count`` messages, or those that come, and see that no more do."""
    found: list[bytes] = []
    with ColumnSubscription(address, topic, CHANNEL, ConnectionConfig(output_buffer_timeout=25), **how) as source:
        source.set_rdy(2000)
        while columns := source.fetch(5.0 if len(found) < count else 0.3):
            if not columns.count:
                break
            offsets = memoryview(columns.body_offsets).cast("i")
            found += [columns.body[begin:end] for begin, end in itertools.pairwise(offsets)]
            source.finish(columns.ids)
    return found


def all_of(topic: str, channel: str, lookupd: str, count: int) -> list[bytes]:
    """What a client that is not Spark gets until there are so many bodies."""
    return _consumed(topic, channel, lookupd, lambda found: len(set(found)) >= count)[0]


def _consumed(
    topic: str, channel: str, lookupds: str, is_done: Callable[[list[bytes]], object], **options: Any
) -> tuple[list[bytes], int]:
    """What a handler gets until it is done, and how many copies its consumer finished."""
    found: list[bytes] = []
    consumer = Consumer(
        topic,
        channel,
        lookupd_http_addresses=lookupds,
        message_handler=lambda _, message: found.append(message.body),
        max_in_flight=1000,
        **options,
    )
    with consumer:
        until(lambda: is_done(found))
    return found, consumer.stats().totals.suppressed


def lookupds(cluster: ClusterProcess) -> str:
    return ",".join(str(lookupd.http) for lookupd in cluster.lookupds)


def with_keys(cluster: ClusterProcess, topic: str) -> dict[str, str]:
    """Options of a sink whose messages have idempotence keys; makes the topic."""
    cluster.create_topic(topic, 2, 2, ext=True, multi_part=True, channels=["check", "handle"])
    return {"topic": topic, "lookupd_http_addresses": lookupds(cluster), "idempotenceKey": "true"}


def consumed(cluster: ClusterProcess, topic: str, channel: str, suppress_retried: int = 0) -> tuple[list[bytes], int]:
    """What a handler gets of all that a channel has, and how many copies its consumer finished."""

    def is_done(found: list[bytes]) -> bool:
        return bool(found) and unanswered(str(cluster.lookupds[0].http), topic, channel) == 0

    return _consumed(topic, channel, lookupds(cluster), is_done, suppress_retried=suppress_retried)


def check_keys(cluster: ClusterProcess, topic: str, expected: list[bytes]) -> int:
    """Whoever suppresses copies gets every row once; how many copies there are."""
    stored, _ = consumed(cluster, topic, "check")
    copies = account(expected, stored).extra
    bodies, suppressed = consumed(cluster, topic, "handle", suppress_retried=len(expected))
    account(expected, bodies).check()
    assert suppressed == copies
    return copies
