"""The sink of Spark on a redesigned cluster whose leaders move and die: nothing is lost, keys keep their order.

One task of it, without Spark: what fails here fails below Spark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import gevent
import pytest

pytest.importorskip("pyspark", reason="the sink needs pyspark")
pytest.importorskip("pyarrow", reason="the sink needs pyarrow")

import pyarrow as pa
from support.fleet import Fleet
from support.scenarios import Scale, kill_and_restart
from support.spark_ledger import account
from support.spark_sink import CHANNEL, batch, numbered, taken
from support.waiting import until

from nsq_fast.protocol.publishing import murmur3_partition
from nsq_fast.spark.options import SinkOptions
from nsq_fast.spark.sink import TaskWriter

PARTITIONS = 3
KEYS = 100
TOPIC = "spark-sink"
STEP = 100


def slowly(first: int, count: int, seconds: float) -> Iterator[pa.RecordBatch]:
    """Batches of rows with keys, spread over some seconds. Runs in a thread."""
    for start in range(first, first + count, STEP):
        yield batch(body=numbered(STEP, start), key=[f"key-{number % KEYS}" for number in range(start, start + STEP)])
        time.sleep(seconds * STEP / count)  # sleep: rows that come for some seconds


def write_during(fleet: Fleet, first: int, count: int, patience: float, trouble: Callable[[], object]) -> int:
    """One task writes ``count`` rows while there is ``trouble``; how many it says are stored."""
    seconds = 40.0 if fleet.is_real else 2.0
    options = {"topic": TOPIC, "lookupd_http_addresses": ",".join(fleet.lookupds), "nsq.linger_max_messages": "20"}
    writer = TaskWriter(SinkOptions.parse(options), {"body": "body", "key": "key"})
    writing = gevent.spawn(writer.write, slowly(first, count, seconds))
    gevent.sleep(seconds / 10)  # sleep: the trouble comes in the midst of it
    trouble()
    return int(writing.get(timeout=patience).rows)


def test_a_write_while_leaders_move_and_die(fleet: Fleet, small: Scale, report: list[str]) -> None:
    half, moved = small.messages // 2, []
    fleet.create_topic(TOPIC, PARTITIONS, 2, multi_part=True, channels=(CHANNEL,))

    def move() -> None:
        moved.extend(fleet.move_leader(TOPIC, number) for number in range(PARTITIONS))

    def kill() -> None:
        # Not at once back: a real nsqd that is would lead on, without what it had not yet on disk.
        kill_and_restart(fleet, TOPIC, 1, small.patience)

    rows = 0
    for first, trouble in ((0, move), (half, kill)):
        # One at a time: a leader that has moved and has no second replica yet takes with it what it has confirmed.
        fleet.wait_stable()
        rows += write_during(fleet, first, half, small.patience, trouble)
    leaders = until(lambda: len(found := fleet.leaders(TOPIC)) == PARTITIONS and found, small.patience)
    keys_of = {
        number: [key for key in range(KEYS) if murmur3_partition(f"key-{key}", PARTITIONS) == number]
        for number in leaders
    }
    stored = {
        number: taken(address, TOPIC, len(keys_of[number]) * small.messages // KEYS, partition=number, advanced=True)
        for number, address in leaders.items()
    }
    found = account(numbered(small.messages), [body for bodies in stored.values() for body in bodies])
    report.append(f"{rows} rows, {sum(moved)} leaders moved, one killed: {found}")
    assert rows == small.messages
    assert not found.lost
    assert not found.unexpected
    for number, bodies in stored.items():
        firsts = list(dict.fromkeys(bodies))
        for key in keys_of[number]:
            mine = [body for body in firsts if int(body) % KEYS == key]
            assert mine == numbered(small.messages)[key::KEYS]
