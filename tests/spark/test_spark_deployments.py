"""Both readers and the sink where Spark runs for real: on a standalone cluster, and behind Spark Connect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.spark_driver import Driver
from support.spark_ledger import account, read_sink
from support.spark_settings import LOCAL
from support.waiting import until

from nsq_fast import Consumer, Producer
from nsq_fast.broker import BrokerProcess, ClusterProcess

Drivers = Callable[..., Driver]
BODIES = [b"%06d" % number for number in range(6000)]

# A session that is either classic or remote: on the server of a remote one, the format is registered all the same.
SESSION = """
from support.spark_program import Collector, arguments, register, say, session

given = arguments()
if given["remote"]:
    from pyspark.sql import SparkSession
    spark = SparkSession.builder.remote(given["remote"]).getOrCreate()
    register(spark)
else:
    spark = session()
"""
READ_AND_WRITE = f"""{SESSION}
rows = spark.readStream.format("nsq").options(**given["options"]).load()
writer = rows.writeStream.format("parquet").option("path", given["out"])
query = writer.option("checkpointLocation", given["checkpoint"]).trigger(availableNow=True).start()
query.awaitTermination()
say("read", progress=len(query.recentProgress))
rows = spark.range(given["count"]).repartition(2).selectExpr("lpad(cast(id as string), 6, '0') as body")
rows.write.format("nsq").options(**given["sink"]).mode("append").save()
say("written")
"""


class Servers(NamedTuple):
    """A topic, ``orders``, and what a source of it needs; another, ``back``, to write to."""

    lookupd: str
    source: dict[str, str]


@pytest.fixture(params=["journalled", "replayable"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    """Original servers for the one reader, a redesigned cluster for the other."""
    if request.param == "journalled":
        with BrokerProcess(nsqds=2, msg_timeout=5.0) as broker:
            lookupd = str(broker.lookupd.http)
            yield Servers(lookupd, {"reader": "journalled", "journal": str(tmp_path / "journal")})
    else:
        with ClusterProcess(nodes=3, kind=True) as cluster:
            for topic in ("orders", "back"):
                cluster.create_topic(topic, partitions=2, replicas=2, multi_part=True, channels=["spark"])
            lookupd = ",".join(str(each.http) for each in cluster.lookupds)
            yield Servers(lookupd, {"reader": "replayable", "startingOffsets": "earliest"})


@pytest.fixture(params=["standalone", "connect"])
def deployment(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The master of a driver program, and the server it is a client of."""
    if request.param == "standalone":
        return {"master": request.getfixturevalue("standalone").url, "remote": ""}
    return {"master": LOCAL, "remote": request.getfixturevalue("connect_server").url}


def publish(lookupd: str) -> None:
    with Producer(lookupd_http_addresses=lookupd) as producer:
        for start in range(0, len(BODIES), 500):
            producer.multipublish("orders", BODIES[start : start + 500])


def consume(lookupd: str) -> list[bytes]:
    """All messages that were written, by a client that is not Spark."""
    found: list[bytes] = []
    consumer = Consumer(
        "back",
        "spark",
        lookupd_http_addresses=lookupd,
        message_handler=lambda _, message: found.append(message.body),
        max_in_flight=500,
    )
    consumer.start(block=False)
    until(lambda: len(set(found)) == len(BODIES))
    consumer.close()
    consumer.join()
    return found


def test_a_stream_brings_all_once_and_the_sink_stores_all_that_is_written(
    servers: Servers, deployment: dict[str, Any], spark_driver: Drivers, tmp_path: Path
) -> None:
    publish(servers.lookupd)
    source = {"topic": "orders", "channel": "spark", "lookupd_http_addresses": servers.lookupd, **servers.source}
    source["maxOffsetsPerTrigger"] = "2500"
    sink = {"topic": "back", "lookupd_http_addresses": servers.lookupd}
    paths = {"out": str(tmp_path / "out"), "checkpoint": str(tmp_path / "checkpoint")}
    driver = spark_driver(READ_AND_WRITE, **deployment, **paths, options=source, sink=sink, count=len(BODIES))
    driver.start()
    assert driver.wait_said("read")["progress"] >= 3
    driver.wait_said("written")
    driver.wait()
    rows = read_sink(tmp_path / "out")
    account(BODIES, rows["body"].to_pylist()).check()
    assert set(rows["topic"].to_pylist()) == {"orders"}
    account(BODIES, consume(servers.lookupd)).check()
