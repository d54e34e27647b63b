"""Streams of the journalled reader on Spark: drivers, executors and workers are killed wherever it could hurt.

One query goes through all the places where its driver is killed, one after the
other, so that each of them is a restart from what the one before has left. See
also test_spark_driver_kills.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.journal import Server
from support.s3 import BUCKET, CREDENTIALS, REGION
from support.spark_driver import BESIDE, Driver, Program
from support.spark_journal_program import PROGRAM, arguments, check
from support.spark_ledger import Delivered
from support.spark_marks import poll
from support.spark_settings import LOCAL_CLUSTER, LOCAL_CLUSTER_OF_ONE, LOCAL_RETRYING

if TYPE_CHECKING:
    from support.s3_server import S3Server

Drivers = Callable[..., Driver]


@pytest.fixture
def another_server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "another"
    folder.mkdir()
    made = Server.broker(folder)
    yield made
    made.close()


@pytest.mark.parametrize("server", ["ours"], indirect=True)
def test_a_driver_of_a_cluster_that_is_killed_loses_and_doubles_nothing(
    server: Server, another_server: Server, s3: S3Server, spark_driver: Drivers, tmp_path: Path
) -> None:
    """Two queries in one driver: the journal of one is in a folder, that of the other in an object store."""
    folder, store = tmp_path / "folder", tmp_path / "store"
    bodies = server.publish(30_000)
    places = ("after claim 1", "before seal", "in the sink")
    in_folder = Program(PROGRAM, folder, **arguments(server, folder, dict.fromkeys(places, "hold")))
    stored = another_server.publish(20_000)
    places_of_store = ("after claim 0", "before seal", "in the sink")
    where = {"journal": f"s3://{BUCKET}/stream", "journalEndpoint": s3.url, "journalRegion": REGION}
    given = arguments(another_server, store, dict.fromkeys(places_of_store, "hold"), **where)
    in_store = Program(PROGRAM, store, **given)
    driver = spark_driver(BESIDE, LOCAL_CLUSTER_OF_ONE, programs=[in_folder.given, in_store.given])
    for number, (place, place_of_store) in enumerate(zip(places, places_of_store, strict=True)):
        driver.start()
        driver.wait_mark(place, marks=in_folder.marks)
        driver.wait_mark(place_of_store, marks=in_store.marks)
        driver.kill()
        if number == 1:  # a server goes away, too
            server.restart()
    driver.start()
    driver.wait()
    assert [said["count"] for said in driver.said("left")] == [0, 0]
    check(server, in_folder.marks, bodies, folder, 1)
    check(another_server, in_store.marks, stored, store, 1)
    kept = [each.read_bytes() for each in (store / "checkpoint").rglob("*") if each.is_file()]
    assert kept
    assert not [name for name, secret in CREDENTIALS.items() if any(secret.encode() in data for data in kept)]


@pytest.mark.parametrize(("master", "server"), [(LOCAL_RETRYING, "ours"), (LOCAL_CLUSTER, "real")], indirect=["server"])
def test_tasks_that_fail_lose_and_double_nothing(
    server: Server, master: str, spark_driver: Drivers, tmp_path: Path
) -> None:
    bodies = server.publish(40_000)
    places = {"before claim 0": "raise", "after claim 1": "raise", "after claim 2": "exit", "before seal": "exit"}
    if master == LOCAL_CLUSTER:
        places |= {"before claim 1": "exit", "after finish 1": "hold"}
    settings = {"spark.speculation": "true", "spark.speculation.interval": "50ms", "spark.speculation.quantile": "0.5"}
    given = arguments(server, tmp_path, places, minPartitions="2", maxOffsetsPerTrigger="16000")
    driver = spark_driver(PROGRAM, master, {**settings, "spark.task.maxFailures": "8"}, **given)
    driver.start()
    if master == LOCAL_CLUSTER:
        driver.wait_mark("after finish 1")
        os.kill(driver.executors()[0], signal.SIGKILL)
        driver.marks.release("after finish 1 go")
    driver.wait()
    assert driver.said("left")[0]["count"] == 0
    assert all(driver.marks.count(place) == 1 for place in places)
    check(server, driver.marks, bodies, tmp_path, 0)


LATE = """
from support.spark_program import Collector, arguments, marks, session
from nsq_fast.spark.journal import JournalStreamReader
from nsq_fast.spark.journal.collect import Collector as Task
from nsq_fast.spark.source import NsqDataSource

HERE, ARGUMENTS = marks(), arguments()

class Zombie(Task):
    def claim(self, index, head, columns):
        if HERE.once("zombie"):
            HERE.reach("holds")
            HERE.hold("wakes")
            try:
                return super().claim(index, head, columns)
            except Exception as error:
                HERE.reach("failed", type(error).__name__)
                raise
        return super().claim(index, head, columns)

class Reader(JournalStreamReader):
    def make_collector(self, slot):
        return Zombie(slot)

class Source(NsqDataSource):
    @classmethod
    def name(cls):
        return "faulty"  # PySpark before 4.2 keeps the name that it has found by itself

    def make_stream_reader(self, kind, options):
        return Reader(options)

spark = session()
spark.dataSource.register(Source)
reader = spark.readStream.format("faulty").options(**ARGUMENTS["options"])
writer = reader.load().writeStream.foreachBatch(Collector(ARGUMENTS["out"]))
query = writer.option("checkpointLocation", ARGUMENTS["checkpoint"]).start()
HERE.wait("enough")
query.stop()
"""


@pytest.mark.parametrize("server", ["ours"], indirect=True)
def test_a_zombie_of_a_killed_driver_acknowledges_nothing_after_the_commit(
    server: Server, spark_driver: Drivers, tmp_path: Path
) -> None:
    """Its driver is killed, its worker stopped, and goes on when the next driver has long committed the batch."""
    bodies = server.publish(6_000)
    given = arguments(server, tmp_path, {}, maxOffsetsPerTrigger="2000", **{"nsq.msg_timeout": "60"})
    driver = spark_driver(LATE, LOCAL_CLUSTER_OF_ONE, **given)
    driver.start()
    driver.wait_mark("holds")
    (zombie,) = driver.marks.pids("holds")
    stopped = [zombie, *driver.executors()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    driver.kill_driver()
    driver.start()
    delivered = Delivered(tmp_path / "out")
    poll(lambda: len(delivered.bodies()) >= 4_000, what="two batches")
    poll(lambda: not list((tmp_path / "journal").glob("*/b1")), what="the first committed")
    driver.marks.release("wakes")
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    poll(lambda: len(delivered.bodies()) >= 6_000, what="what the zombie gave back or left")
    driver.marks.reach("enough")
    driver.wait()
    check(server, driver.marks, bodies, tmp_path, 0)
