"""Both readers and the sink where Spark runs for real: on a standalone cluster, by itself and behind Spark Connect."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import processes, spark
from support.spark import BESIDE, ROOT, Driver, spark_environment
from support.spark_ledger import account, read_sink
from support.spark_marks import LIMIT
from support.spark_replay import Topic
from support.spark_replay_program import COUNT, Replayable
from support.spark_sink import all_of

from nsq_fast import Producer
from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.spark.versions import TELLS_START

Drivers = Callable[..., Driver]
BODIES = [b"%06d" % number for number in range(6000)]

READ_AND_WRITE = """
from pyspark.sql import SparkSession
from support.spark_program import arguments, register, say

given = arguments()
spark = SparkSession.builder.remote(given["remote"]).getOrCreate()
register(spark)  # on the server
for each in given["jobs"]:
    rows = spark.readStream.format("nsq").options(**each["options"]).load()
    writer = rows.writeStream.format("parquet").option("path", each["out"])
    query = writer.option("checkpointLocation", each["checkpoint"]).trigger(availableNow=True).start()
    query.awaitTermination()
    say("read", progress=len(query.recentProgress))
    rows = spark.range(given["count"]).repartition(2).selectExpr("lpad(cast(id as string), 6, '0') as body")
    rows.write.format("nsq").options(**each["sink"]).mode("append").save()
    say("written")
"""


class Servers(NamedTuple):
    """A topic, ``orders``, and what a source of it needs; another, ``back``, to write to."""

    lookupd: str
    source: dict[str, str]


@pytest.fixture
def both(tmp_path: Path) -> Iterator[dict[str, Servers]]:
    """Original servers for the journalled reader, a redesigned cluster for the replayable one."""
    with BrokerProcess(nsqds=2, msg_timeout=5.0) as broker, ClusterProcess(nodes=3, kind=True) as cluster:
        for topic in ("orders", "back"):
            cluster.create_topic(topic, partitions=2, replicas=2, multi_part=True, channels=["spark"])
        journalled = {"reader": "journalled", "journal": str(tmp_path / "journal")}
        replayable = {"reader": "replayable", "startingOffsets": "earliest"}
        yield {
            "journalled": Servers(str(broker.lookupd.http), journalled),
            "replayable": Servers(",".join(str(each.http) for each in cluster.lookupds), replayable),
        }


def publish(lookupd: str) -> None:
    with Producer(lookupd_http_addresses=lookupd) as producer:
        for start in range(0, len(BODIES), 500):
            producer.multipublish("orders", BODIES[start : start + 500])


@pytest.mark.slow
@pytest.mark.kill
def test_two_attempts_at_one_task_of_the_replayable_reader(
    standalone: str, spark_driver: Drivers, topic: Topic, tmp_path: Path
) -> None:
    """On two hosts, and before the server of Spark Connect has all their cores."""
    bodies = topic.fill(COUNT)
    speculative = {
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.multiplier": "1.0",
        "spark.speculation.quantile": "0.1",
        "spark.speculation.minTaskRuntime": "50ms",
    }
    query = Replayable(topic, tmp_path / "query", {"reading": "hold"})
    driver = spark_driver(BESIDE, standalone, speculative, programs=[query.given])
    driver.start()
    driver.wait_mark("reading", marks=query.marks)
    batches = 2 if TELLS_START else 1  # PySpark before 4.2 asks for one with availableNow
    driver.wait_said("batch", batches)  # the other attempt has done it, while the first still held its channel
    query.marks.release("reading")
    driver.wait()
    attempts = query.marks.details("attempt")
    assert len(attempts) > len(set(attempts))
    query.check(bodies)


def test_a_stream_brings_all_once_and_the_sink_stores_all_that_is_written(
    both: dict[str, Servers], connect_url: str, spark_driver: Drivers, tmp_path: Path
) -> None:
    """With each reader, one after the other: executors are started once."""
    for servers in both.values():
        publish(servers.lookupd)
    jobs = [job(servers, tmp_path / reader) for reader, servers in both.items()]
    driver = spark_driver(READ_AND_WRITE, remote=connect_url, jobs=jobs, count=len(BODIES))
    driver.start()
    driver.wait()
    assert len(driver.said("written")) == len(jobs)
    assert all(said["progress"] >= (3 if TELLS_START else 1) for said in driver.said("read"))
    for reader, servers in both.items():
        rows = read_sink(tmp_path / reader / "out")
        account(BODIES, rows["body"].to_pylist()).check()
        assert set(rows["topic"].to_pylist()) == {"orders"}, reader
        account(BODIES, all_of("back", "spark", servers.lookupd, len(BODIES))).check()


def job(servers: Servers, folder: Path) -> dict[str, Any]:
    """What the program does with one reader; its files go below ``folder``."""
    source = {"topic": "orders", "channel": "spark", "lookupd_http_addresses": servers.lookupd, **servers.source}
    if TELLS_START:  # PySpark before 4.2 reads one batch with availableNow, and what is above the limit in the next run
        source["maxOffsetsPerTrigger"] = "2500"
    sink = {"topic": "back", "lookupd_http_addresses": servers.lookupd}
    return {"options": source, "sink": sink, "out": str(folder / "out"), "checkpoint": str(folder / "checkpoint")}


def test_the_program_of_the_page_reads_through_spark_connect(connect_url: str, tmp_path: Path) -> None:
    from pyarrow import parquet

    page = (ROOT / "docs" / "spark-examples.md").read_text().partition("## Spark Connect")[2]
    program = page.partition("```python\n")[2].partition("```")[0].replace("/var/lib", str(tmp_path))
    (tmp_path / "orders").mkdir()
    with BrokerProcess() as broker:
        lookupd = str(broker.lookupd.http)
        publish(lookupd)
        assert "sc://127.0.0.1:15002" in program
        assert "127.0.0.1:4161" in program
        program = program.replace("sc://127.0.0.1:15002", connect_url).replace("127.0.0.1:4161", lookupd)
        done = subprocess.run(
            [sys.executable, "-c", program], env=spark_environment(), capture_output=True, text=True, timeout=LIMIT
        )
    assert done.returncode == 0, done.stderr
    rows = parquet.read_table(tmp_path / "orders" / "connect")["text"].to_pylist()
    assert sorted(rows) == [body.decode() for body in BODIES]


SLEEPS = """
import os, pathlib, subprocess
child = subprocess.Popen(["sleep", "600"])
pathlib.Path("pid").write_text(f"{child.pid} {os.getsid(child.pid)}")
child.wait()
"""


def test_a_spark_that_makes_no_archive_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its JVM, which would keep a core busy while all tests run."""
    monkeypatch.setattr(spark, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(spark, "_PROGRAM", SLEEPS)
    for limit in (2.0, 20.0, 200.0):  # in which it is to have started
        monkeypatch.setattr(spark, "TIMEOUT", limit)
        spark.make_ready(tmp_path)
        assert not spark.archive().exists()
        if (tmp_path / "pid").exists():
            break
    child, session = map(int, (tmp_path / "pid").read_text().split())
    assert child not in [each.pid for each in processes.of_session(session)]
