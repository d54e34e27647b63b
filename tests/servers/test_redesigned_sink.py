"""The sink of Spark on a redesigned cluster whose leaders move and die: nothing is lost, keys keep their order.

One task of it, without Spark: what fails here fails below Spark.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import gevent
import pytest

pytest.importorskip("pyspark", reason="the sink needs pyspark")
pytest.importorskip("pyarrow", reason="the sink needs pyarrow")

import pyarrow as pa
from support.fleet import Fleet
from support.scenarios import Scale
from support.spark_ledger import account
from support.spark_sink import CHANNEL, batch, numbered, taken
from support.waiting import until

from nsq_fast.protocol.partitioner import murmur3_partition
from nsq_fast.spark.options import SinkOptions
from nsq_fast.spark.sink.task import TaskWriter

PARTITIONS = 3
KEYS = 100
TOPIC = "spark-sink"
STEP = 200


def slowly(count: int, seconds: float) -> Iterator[pa.RecordBatch]:
    """Batches of rows with keys, spread over some seconds. Runs in a thread."""
    for first in range(0, count, STEP):
        yield batch(body=numbered(STEP, first), key=[f"key-{number % KEYS}" for number in range(first, first + STEP)])
        time.sleep(seconds * STEP / count)


def test_a_write_while_leaders_move_and_die(fleet: Fleet, small: Scale, report: list[str]) -> None:
    count, seconds = small.messages, 40.0 if fleet.is_real else 2.0
    fleet.wait_stable()
    fleet.create_topic(TOPIC, PARTITIONS, 2, multi_part=True, channels=(CHANNEL,))
    lookupds = ",".join(fleet.lookupds)
    options = {"topic": TOPIC, "lookupd_http_addresses": lookupds, "nsq.linger_max_messages": "20"}
    writer = TaskWriter(SinkOptions.parse(options), {"body": "body", "key": "key"})
    writing = gevent.spawn(writer.write, slowly(count, seconds))
    gevent.sleep(seconds / 10)
    moved = [fleet.move_leader(TOPIC, number) for number in range(PARTITIONS)]
    gevent.sleep(seconds / 10)
    node = fleet.kill_leader(TOPIC, 1)
    gevent.sleep(seconds / 4)
    fleet.restart(node)
    rows = writing.get(timeout=small.patience).rows
    leaders = until(lambda: len(found := fleet.leaders(TOPIC)) == PARTITIONS and found, small.patience)
    stored = {
        number: taken(address, TOPIC, count, partition=number, advanced=True) for number, address in leaders.items()
    }
    found = account(numbered(count), [body for bodies in stored.values() for body in bodies])
    report.append(f"{rows} rows, {sum(moved)} leaders moved, one killed: {found}")
    assert rows == count
    assert not found.lost
    assert not found.unexpected
    for number, bodies in stored.items():
        firsts = list(dict.fromkeys(bodies))
        for key in range(KEYS):
            if murmur3_partition(f"key-{key}", PARTITIONS) == number:
                mine = [body for body in firsts if int(body) % KEYS == key]
                assert mine == numbered(count)[key::KEYS]
