"""Streams of the journalled reader on Spark: drivers, executors and workers are killed wherever it could hurt.

One query goes through all the places where its driver is killed, one after the
other, so that each of them is a restart from what the one before has left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.journal import CHANNEL, TOPIC, Server
from support.s3 import BUCKET, CREDENTIALS, REGION
from support.spark_driver import Driver
from support.spark_ledger import Delivered, account
from support.spark_marks import poll
from support.spark_settings import LOCAL, LOCAL_CLUSTER, LOCAL_CLUSTER_OF_ONE, LOCAL_RETRYING

if TYPE_CHECKING:
    from support.s3_server import S3Server

Drivers = Callable[..., Driver]

PROGRAM = """
import os, time
from support.spark_marks import LIMIT
from support.spark_program import Collector, arguments, marks, say, session
from nsq_fast.runtime.admin import NsqdHTTPClient
from nsq_fast.spark.journal import JournalStreamReader
from nsq_fast.spark.journal.collect import Collector as Task
from nsq_fast.spark.source import NsqDataSource

HERE, ARGUMENTS = marks(), arguments()
PLACES = ARGUMENTS["places"]

def is_next(place):
    # a driver is killed at one place after the other
    order = list(PLACES)
    return all(PLACES[each] != "hold" or HERE.count(each) for each in order[:order.index(place)])

def at(place):
    # stand at a place of the plan once, in whatever process
    if place in PLACES and is_next(place) and HERE.once(place):
        action = PLACES[place]
        HERE.reach(place)
        if action == "raise":
            raise RuntimeError(place)
        if action == "exit":
            os._exit(3)
        HERE.hold(place + " go")

class Faulty(Task):
    connections, group = 2, 1  # segments are numbered alike, however slow the disk is

    def claim(self, index, head, columns):
        at(f"before claim {index}")
        stored = super().claim(index, head, columns)
        at(f"after claim {index}")
        return stored

    def finish(self, connection, ids):
        if connection.unsure:
            at(f"before finish {connection.unsure[-1].number}")
        super().finish(connection, ids)
        if connection.unsure:
            at(f"after finish {connection.unsure[-1].number}")

    def seal(self, index, head):
        at("before seal")
        super().seal(index, head)
        at("after seal")

class Reader(JournalStreamReader):
    def make_collector(self, slot):
        return Faulty(slot)

class Source(NsqDataSource):
    @classmethod
    def name(cls):
        return "faulty"  # PySpark before 4.2 keeps the name that it has found by itself

    def make_stream_reader(self, kind, options):
        return Reader(options)

spark = session()
spark.dataSource.register(Source)
collect = Collector(ARGUMENTS["out"])

def sink(batch, number):
    collect(batch, number)
    at("in the sink")

def run():
    reader = spark.readStream.format("faulty").options(**ARGUMENTS["options"])
    writer = reader.load().writeStream.foreachBatch(sink).option("checkpointLocation", ARGUMENTS["checkpoint"])
    writer.trigger(availableNow=True).start().awaitTermination()

host, port = ARGUMENTS["http"].rsplit(":", 1)
client = NsqdHTTPClient(host, int(port))
deadline = time.monotonic() + LIMIT
while time.monotonic() < deadline:
    run()
    (channel,) = client.stats("orders")["topics"][0]["channels"]
    left = channel["depth"] + channel["in_flight_count"] + channel["deferred_count"]
    if left:
        time.sleep(0.2)  # sleep: looks again and again
    elif all(HERE.count(place) for place in PLACES):
        break
    else:  # on a slow machine, slots end with their first segment: a place within a later one is still to come
        HERE.reach("more")
        client.multipublish("orders", [b"%d.%d" % (HERE.count("more"), each) for each in range(8000)], binary=True)
say("left", count=left)
"""


def arguments(server: Server, folder: Path, places: dict[str, str], **options: str) -> dict[str, object]:
    given = {
        "topic": TOPIC,
        "channel": CHANNEL,
        "journal": str(folder / "journal"),
        "maxOffsetsPerTrigger": "8000",
        "nsq.msg_timeout": "3",
        **server.options,
        **options,
    }
    paths = {"out": str(folder / "out"), "checkpoint": str(folder / "checkpoint")}
    return {"options": given, "places": places, "http": str(server.http), **paths}


def check(server: Server, driver: Driver, bodies: list[bytes], folder: Path, replays: int) -> None:
    """``bodies`` are those of the test; the program may have published more."""
    assert server.depth() == (0, 0, 0)
    delivered = Delivered(folder / "out")
    more = [b"%d.%d" % (turn + 1, each) for turn in range(driver.marks.count("more")) for each in range(8000)]
    account(bodies + more, delivered.bodies()).check()
    delivered.check_replays()
    assert len(delivered.replays()) >= replays


PLACES = ("before claim 0", "after claim 0", "after finish 0", "before seal", "in the sink")


@pytest.mark.parametrize("server", ["ours"], indirect=True)
def test_a_driver_that_is_killed_goes_on_from_an_object_store(
    server: Server, s3: S3Server, spark_driver: Drivers, tmp_path: Path
) -> None:
    bodies = server.publish(20_000)
    places = ("after claim 0", "before seal", "in the sink")
    where = {"journal": f"s3://{BUCKET}/stream", "journalEndpoint": s3.url, "journalRegion": REGION}
    given = arguments(server, tmp_path, dict.fromkeys(places, "hold"), **where)
    driver = spark_driver(PROGRAM, LOCAL_CLUSTER_OF_ONE, **given)
    for place in places:
        driver.start()
        driver.wait_mark(place)
        driver.kill()
    driver.start()
    driver.wait()
    assert driver.said("left")[0]["count"] == 0
    check(server, driver, bodies, tmp_path, 1)
    kept = [each.read_bytes() for each in (tmp_path / "checkpoint").rglob("*") if each.is_file()]
    assert kept
    assert not [name for name, secret in CREDENTIALS.items() if any(secret.encode() in data for data in kept)]


@pytest.mark.parametrize(("master", "server"), [(LOCAL, "real"), (LOCAL_CLUSTER_OF_ONE, "ours")], indirect=["server"])
def test_a_driver_that_is_killed_anywhere_loses_and_doubles_nothing(
    server: Server, master: str, spark_driver: Drivers, tmp_path: Path
) -> None:
    bodies = server.publish(30_000)
    places = PLACES if master == LOCAL else ("after claim 1", "before seal", "in the sink")
    driver = spark_driver(PROGRAM, master, **arguments(server, tmp_path, dict.fromkeys(places, "hold")))
    for number, place in enumerate(places):
        driver.start()
        driver.wait_mark(place)
        driver.kill()
        if number == 1:  # the server goes away, too
            server.restart()
    driver.start()
    driver.wait()
    assert driver.said("left")[0]["count"] == 0
    check(server, driver, bodies, tmp_path, 1)


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
    check(server, driver, bodies, tmp_path, 0)


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
    check(server, driver, bodies, tmp_path, 0)
