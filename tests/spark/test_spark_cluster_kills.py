"""The driver of a cluster, its executors and tasks are killed wherever it could hurt, and leave tasks that go on.

Its queries run side by side, so that it is started once for all: the journalled reader with its journal in a folder,
in an object store, and with tasks that fail, the replayable one, and one of which a task sleeps until its batch has
long been committed. See also test_spark_driver_kills, where executors are the driver's own process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import processes
from support.journal import Server, several_servers
from support.s3 import BUCKET, CREDENTIALS, REGION
from support.servers import find_server
from support.spark import BESIDE, Driver
from support.spark_journal_program import PROGRAM, WHILE_IT_MAY, Journalled
from support.spark_marks import poll
from support.spark_replay import Topic
from support.spark_replay_program import COUNT, Replayable, next_hold

if TYPE_CHECKING:
    from support.s3_server import S3Server

MASTER = "local-cluster[2,4,1024]"
SETTINGS = {
    "spark.executor.cores": "4",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.task.maxFailures": "8",
}
"""Two executors, with room for tasks that are held; both are there before a task is given to one."""
LATER = 'from support.spark_program import marks\nmarks().wait("begin")\n'
"""Before a program: it begins when it is told to."""
IN_FOLDER = ("after claim 1", "before seal", "in the sink")
IN_STORE = ("after claim 0", "before seal", "in the sink")
FAULTS = {
    "before claim 0": "raise",
    "after claim 1": "raise",
    "after claim 2": "exit",
    "before seal": "exit",
    "before claim 1": "exit",
    "after finish 1": "hold",
}

ZOMBIE = """
from support.journal_places import Placed
from support.spark_program import Collector, arguments, marks, register_faulty, session
from nsq_fast.spark.journal import JournalStreamReader

HERE, ARGUMENTS = marks(), arguments()

class Zombie(Placed):
    def at(self, place):
        if place.startswith("before claim") and HERE.once("zombie"):
            HERE.reach("holds")
            HERE.hold("wakes")

class Reader(JournalStreamReader):
    def make_collector(self, slot):
        return Zombie(slot)

spark = session()
register_faulty(spark, Reader)
reader = spark.readStream.format("faulty").options(**ARGUMENTS["options"])
writer = reader.load().writeStream.foreachBatch(Collector(ARGUMENTS["out"]))
writer = writer.option("checkpointLocation", ARGUMENTS["checkpoint"])
query = writer.trigger(processingTime="200 milliseconds").start()
HERE.wait("enough")
query.stop()
"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    """One for each query with a journal; the last is a real one, where there are any."""
    is_real = find_server("nsqd") is not None
    with several_servers(3, tmp_path) as made, several_servers(1, tmp_path / "last", is_real=is_real) as last:
        yield made + last


class Zombie(Journalled):
    """A query whose first task stops, and wakes up when the next driver has long committed its batch."""

    def __init__(self, server: Server, folder: Path) -> None:
        options = {"maxOffsetsPerTrigger": "2000", "nsq.msg_timeout": "60"}
        super().__init__(server, folder, server.publish(6_000), {}, LATER + ZOMBIE, **options)
        self._journal = folder / "journal"
        self._stopped: list[int] = []

    def stop(self, driver: Driver) -> None:
        """Its task sleeps, and the executors, so that nobody ends it."""
        self.marks.reach("begin")
        driver.wait_mark("holds", marks=self.marks)
        self._stopped = [self.marks.pids("holds")[0], *driver.executors()]
        for pid in self._stopped:
            os.kill(pid, signal.SIGSTOP)

    def wake_after_the_commit(self) -> None:
        """Once the next driver has committed the batch."""
        poll(lambda: len(self.delivered.bodies()) >= 4_000, what="two batches")
        poll(lambda: not list(self._journal.glob("*/b1")), what="the first committed")
        self.marks.release("wakes")
        for pid in self._stopped:
            os.kill(pid, signal.SIGCONT)
        poll(lambda: len(self.delivered.bodies()) >= 6_000, what="what the zombie gave back or left")
        self.marks.reach("enough")


@pytest.mark.slow
def test_a_driver_of_a_cluster_that_is_killed_loses_and_doubles_nothing(
    servers: list[Server], s3: S3Server, topic: Topic, spark_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    folder, store, replayed = tmp_path / "folder", tmp_path / "store", tmp_path / "replayed"
    places, bodies = dict.fromkeys(IN_FOLDER, "hold"), servers[0].publish(30_000)
    in_folder = Journalled(servers[0], folder, bodies, places, LATER + PROGRAM)
    places, bodies = dict.fromkeys(IN_STORE, "hold"), servers[1].publish(20_000)
    where = {"journal": f"s3://{BUCKET}/stream", "journalEndpoint": s3.url, "journalRegion": REGION}
    in_store = Journalled(servers[1], store, bodies, places, LATER + PROGRAM, **where)
    points, bodies = dict.fromkeys(("before", "reading", "sink"), "hold"), topic.fill(COUNT)
    replayable = Replayable(topic, replayed, points)
    zombie = Zombie(servers[2], tmp_path / "zombie")
    slots = {"minPartitions": "2", "maxOffsetsPerTrigger": "16000"}
    failing = Journalled(servers[3], tmp_path / "failing", servers[3].publish(40_000), FAULTS, WHILE_IT_MAY, **slots)
    failing.marks.reach("begin")
    programs = [each.program.given for each in (in_folder, in_store, replayable, zombie, failing)]
    driver = spark_driver(BESIDE, MASTER, SETTINGS, programs=programs)
    driver.start()

    # An executor, under a task that has not begun to read, while tasks of another query fail.
    assert next_hold(driver, replayable, ["before"])
    assert len(driver.executors()) == 2
    driver.wait_mark("after finish 1", marks=failing.marks)
    processes.kill(executor_of(driver, replayable.marks.pids("before")[0]))
    failing.marks.release("after finish 1")
    assert driver.wait_said("left")["count"] == 0
    failing.marks.reach("over")
    replayable.marks.release("before")

    # The driver alone: its executors outlive it a little, and what they do then must not matter.
    for program, place in ((in_folder, IN_FOLDER[0]), (in_store, IN_STORE[0])):
        program.marks.reach("begin")
        driver.wait_mark(place, marks=program.marks)
    held = next_hold(driver, replayable, ["reading", "sink"])
    executors = driver.executors()
    assert executors
    assert driver.workers()
    driver.kill_driver()
    assert not driver.is_running
    for program, place in ((in_folder, IN_FOLDER[0]), (in_store, IN_STORE[0])):
        processes.kill(program.marks.pids(place)[0])
    driver.start()
    replayable.marks.release(held)
    poll(lambda: not set(executors).intersection(driver.executors()), what="the executors gone")

    # All at once; and a server goes away, too.
    for program, place in ((in_folder, IN_FOLDER[1]), (in_store, IN_STORE[1])):
        driver.wait_mark(place, marks=program.marks)
    held = next_hold(driver, replayable, {"reading", "sink"} - {held})
    driver.kill()
    replayable.marks.release(held)
    servers[0].restart()
    driver.start()

    # The driver alone, and a task is left that sleeps. The replayable reader has read all by then.
    driver.wait_said("progress")
    for program, place in ((in_folder, IN_FOLDER[2]), (in_store, IN_STORE[2])):
        driver.wait_mark(place, marks=program.marks)
    zombie.stop(driver)
    driver.kill_driver()
    driver.start()
    zombie.wake_after_the_commit()
    driver.wait()

    assert [said["count"] for said in driver.said("left")] == [0, 0]
    in_folder.check(replays=1)
    in_store.check(replays=1)
    check_no_secrets(each.read_bytes() for each in (store / "checkpoint").rglob("*") if each.is_file())
    assert all(replayable.marks.count(name) == 1 for name in points)
    replayable.check(bodies)
    assert replayable.delivered.replays()
    zombie.check()  # it has acknowledged nothing
    assert all(failing.marks.count(place) == 1 for place in FAULTS)
    failing.check()


def executor_of(driver: Driver, worker: int) -> int:
    """The executor whose Python daemon forked a worker."""
    executors = driver.executors()
    parents = {process.pid: process.parent for process in processes.of_session(os.getsid(worker))}
    while worker not in executors:
        worker = parents[worker]
    return worker


def check_no_secrets(files: Iterable[bytes]) -> None:
    """A checkpoint holds none of the credentials of the object store."""
    kept = list(files)
    assert kept
    assert not [name for name, secret in CREDENTIALS.items() if any(secret.encode() in data for data in kept)]
