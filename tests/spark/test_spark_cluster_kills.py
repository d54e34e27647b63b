"""The driver of a cluster, its executors and tasks are killed wherever it could hurt, and leave tasks that go on.

Its queries run side by side, so that it is killed twice for all: the journalled reader with its journal in a folder,
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
from support.spark_journal_program import Journalled, while_it_may
from support.spark_marks import poll
from support.spark_replay import Topic
from support.spark_replay_program import COUNT, Replayable

if TYPE_CHECKING:
    from support.s3_server import S3Server

MASTER = "local-cluster[2,4,1024]"
SETTINGS = {
    "spark.executor.cores": "4",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.task.maxFailures": "8",
}
"""Two executors, with room for tasks that are held; both are there before a task is given to one."""
IN_FOLDER, IN_STORE = "folder", "store"
PLACES = (
    (IN_FOLDER, "after claim 1", "before seal"),
    (IN_FOLDER, "in the sink"),
    (IN_STORE, "after claim 0", "before seal"),
    (IN_STORE, "in the sink"),
)
"""Of queries with a journal: where it is, and at what the first and the second kill of the driver find them."""
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
HERE.wait("over")
query.stop()
"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    """One for each query with a journal, those of ``PLACES`` first; the last is a real one, where there are any."""
    is_real = find_server("nsqd") is not None
    with several_servers(5, tmp_path) as made, several_servers(1, tmp_path / "last", is_real=is_real) as last:
        yield made + last


class Zombie(Journalled):
    """A query whose first task stops, and wakes up when the next driver has long committed its batch."""

    def __init__(self, server: Server, folder: Path) -> None:
        options = {"maxOffsetsPerTrigger": "2000", "nsq.msg_timeout": "60"}
        super().__init__(server, folder, server.publish(6_000), {}, while_it_may(ZOMBIE), **options)
        self._journal = folder / "journal"
        self.stopped: list[int] = []

    def stop(self, driver: Driver) -> None:
        """Its task sleeps, and its executor, so that nobody ends it."""
        self.marks.reach("begin")
        driver.wait_mark("holds", marks=self.marks)
        worker = self.marks.pids("holds")[0]
        self.stopped = [worker, executor_of(driver, worker)]
        for pid in self.stopped:
            os.kill(pid, signal.SIGSTOP)

    def wake_after_the_commit(self) -> None:
        """Once the next driver has committed the batch."""
        poll(lambda: len(self.delivered.bodies()) >= 4_000, what="two batches")
        poll(lambda: not list(self._journal.glob("*/b1")), what="the first committed")
        self.marks.release("wakes")
        for pid in self.stopped:
            os.kill(pid, signal.SIGCONT)
        poll(lambda: len(self.delivered.bodies()) >= 6_000, what="what the zombie gave back or left")
        self.marks.reach("over")


@pytest.mark.slow
def test_a_driver_of_a_cluster_that_is_killed_loses_and_doubles_nothing(
    servers: list[Server], s3: S3Server, topic: Topic, spark_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    journalled = []
    for number, (where, *places) in enumerate(PLACES):
        store = {"journal": f"s3://{BUCKET}/{number}", "journalEndpoint": s3.url, "journalRegion": REGION}
        options, bodies = store if where == IN_STORE else {}, servers[number].publish(20_000)
        folder, holds = tmp_path / f"{where}{number}", dict.fromkeys(places, "hold")
        journalled.append(Journalled(servers[number], folder, bodies, holds, while_it_may(), **options))
    points, bodies = dict.fromkeys(("before", "reading", "sink"), "hold"), topic.fill(COUNT)
    replayable = Replayable(topic, tmp_path / "replayed", points)
    *_, for_zombie, last = servers
    zombie = Zombie(for_zombie, tmp_path / "zombie")
    slots = {"minPartitions": "2", "maxOffsetsPerTrigger": "16000"}
    failing = Journalled(last, tmp_path / "failing", last.publish(40_000), FAULTS, while_it_may(), **slots)
    failing.marks.reach("begin")
    programs = [each.given for each in (*journalled, replayable, zombie, failing)]
    driver = spark_driver(BESIDE, MASTER, SETTINGS, programs=programs)
    driver.start()

    # An executor, under a task that has not begun to read, while tasks of another query fail.
    driver.wait_mark("before", marks=replayable.marks)
    assert len(driver.executors()) == 2
    driver.wait_mark("after finish 1", marks=failing.marks)
    processes.kill(executor_of(driver, replayable.marks.pids("before")[0]))
    failing.marks.release("after finish 1")
    assert driver.wait_said("left")["count"] == 0
    failing.marks.reach("over")
    replayable.marks.release("before")

    # The driver alone: an executor outlives it a little, and what it does then must not matter; the other sleeps.
    for query in journalled:
        query.marks.reach("begin")
    held = wait_for_places(driver, journalled, 1)
    driver.wait_mark("reading", marks=replayable.marks)
    zombie.stop(driver)
    executors = set(driver.executors()) - set(zombie.stopped)
    assert executors
    assert driver.workers()
    driver.kill_driver()
    assert not driver.is_running
    for pid in held:
        processes.kill(pid)
    driver.start()
    replayable.marks.release("reading")
    poll(lambda: not executors.intersection(driver.executors()), what="the executors gone")
    zombie.wake_after_the_commit()

    # All at once; and a server goes away, too.
    wait_for_places(driver, journalled, 2)
    driver.wait_mark("sink", marks=replayable.marks)
    driver.kill()
    replayable.marks.release("sink")
    servers[0].restart()
    driver.start()
    driver.wait()

    assert [said["count"] for said in driver.said("left")] == [0] * len(PLACES)
    for query, (_, *places) in zip(journalled, PLACES, strict=True):
        query.check(replays=places.count("in the sink"))
    checkpoints = [path for store in tmp_path.glob(f"{IN_STORE}*/checkpoint") for path in store.rglob("*")]
    check_no_secrets(path.read_bytes() for path in checkpoints if path.is_file())
    assert all(replayable.marks.count(name) == 1 for name in points)
    replayable.check(bodies)
    assert replayable.delivered.replays()
    zombie.check()  # it has acknowledged nothing
    assert all(failing.marks.count(place) == 1 for place in FAULTS)
    failing.check()


def wait_for_places(driver: Driver, queries: list[Journalled], kill: int) -> list[int]:
    """The processes that are held at the places of this kill, once they are."""
    held = []
    for query, (_, *places) in zip(queries, PLACES, strict=True):
        for place in places[kill - 1 : kill]:
            driver.wait_mark(place, marks=query.marks)
            held += query.marks.pids(place)
    return held


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
