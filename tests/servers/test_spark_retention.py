"""A real nsqd's retention takes rows away that a query of Spark was to read: it is told, and nothing else is missed.

For ``--run-real-cluster`` only; on the embedded cluster ``tests/spark`` has the log forget what it is told to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import spark_needs
from support.cluster import RealCluster
from support.spark_replay import Topic
from support.waiting import until

from nsq_fast import Producer
from nsq_fast.errors import DataLost

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.real,
    pytest.mark.kill,
    pytest.mark.skipif(spark_needs.missing_modules() is not None, reason=str(spark_needs.missing_modules())),
]

# youzan/nsq: consistence/nsqd_coordinator.go, checkAndCleanOldData, doLogQClean: every ten minutes nsqd cleans all but
# so many bytes for each day, the last 512 KiB, and the last 1,000 publishes (commitlog.go, MIN_KEEP_LOG_ITEM), by
# whole files.
CLEANS_EVERY = 600.0
KEEPS_LITTLE = ("-retention-size-per-day=16", f"-max-bytes-per-file={128 * 1024}")
COUNT = 4_000
SIZE = 1_000


@pytest.fixture
def cluster(wants_real: None, tmp_path: Path) -> Iterator[RealCluster]:
    made = RealCluster(tmp_path, 1, lookupds=1, nsqd_flags=KEEPS_LITTLE)
    yield made
    made.stop()


@pytest.fixture
def topic(cluster: RealCluster) -> Topic:
    cluster.create_topic("kept", channels=("spark",))
    return Topic("kept", cluster.lookupds[0])


def test_what_the_retention_of_nsqd_has_taken_is_told(topic: Topic) -> None:
    from nsq_fast.spark.options import SourceOptions
    from nsq_fast.spark.replay import ReplayBatchReader, ReplayStreamReader
    from nsq_fast.spark.versions import ReadAllAvailable

    def options(**given: str) -> SourceOptions:
        return SourceOptions.parse({**topic.options, "columns": "offset,body", **given})

    bodies = [b"%07d" % number + b"." * SIZE for number in range(COUNT)]
    with Producer(lookupd_http_addresses=topic.lookupd) as producer:
        for body in bodies:  # each by itself: the log of publishes is what nsqd keeps by number
            producer.publish(topic.name, body, partition=0)
    record = topic.stats(0)["backend_depth"] // COUNT
    kept = clean(topic)
    lost = rf"topic '{topic.name}', partition 0: offsets 0 up to (\d+) are lost: .*failOnDataLoss"
    asked = {"0": 0}

    with pytest.raises(DataLost, match=lost) as told:
        ReplayStreamReader(options()).latestOffset(asked, ReadAllAvailable())
    found = re.search(lost, str(told.value))
    assert found is not None
    first = int(found[1])  # nsqd has more on disk than it can still find
    assert kept <= first < COUNT * record
    with pytest.raises(DataLost, match=lost.replace(r"(\d+)", str(first))):
        ReplayBatchReader(options(startingOffsets='{"0": 0}')).partitions()

    tolerant = options(startingOffsets='{"0": 0}', failOnDataLoss="false")
    rows = read(ReplayBatchReader(tolerant))
    assert first % record == 0
    assert rows == list(zip(range(first, COUNT * record, record), bodies[first // record :], strict=True))
    assert read(ReplayBatchReader(options())) == rows


def clean(topic: Topic) -> int:
    """Somebody empties the channel, so that nsqd may clean the log, and it does; where the log begins then."""
    topic.call(0, "POST", "/channel/empty", channel="spark")
    until(lambda: topic.channels(0)["spark"]["depth"] == 0)
    return int(until(lambda: int(topic.stats(0)["backend_start"]), 2 * CLEANS_EVERY, every=1.0))


def read(reader: Any) -> list[tuple[int, bytes]]:
    """The offsets and bodies of a batch."""
    batches = [batch for piece in reader.partitions() for batch in reader.read(piece)]
    return [(row["offset"], row["body"]) for batch in batches for row in batch.to_pylist()]
