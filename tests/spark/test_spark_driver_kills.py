"""A driver is killed wherever it could hurt its queries: of each reader and of the sink, side by side, in one driver.

Each query goes through all its places, one after the other, so that each of
them is a restart from what the one before has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import processes, spark_journal_program, spark_replay_program
from support.journal import Server
from support.servers import find_server
from support.spark import BESIDE, Driver, Program
from support.spark_replay import Topic
from support.spark_replay_program import BATCH, COUNT, next_hold
from support.spark_sink_program import KilledStreams

from nsq_fast.broker import BrokerProcess, ClusterProcess

MASTER = "local[8,4]"
"""Tasks are tried again; one of each query holds while others go on."""
PLACES = ("before claim 0", "after claim 0", "after finish 0", "before seal", "in the sink")
POINTS = ("planning", "partitions", "reading", "sink")
FAULTS = {"before": "raise", "read": "exit"}


@pytest.fixture
def original(tmp_path: Path) -> Iterator[Server]:
    """A real nsqd where there is one."""
    folder = tmp_path / "nsqd"
    folder.mkdir()
    made = Server.real(folder) if find_server("nsqd") else Server.broker(folder)
    yield made
    made.close()


@pytest.fixture
def sink_broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(lookupd=False) as running:
        yield running


@pytest.mark.slow
def test_a_driver_that_is_killed_anywhere_loses_and_doubles_nothing(
    original: Server,
    sink_broker: BrokerProcess,
    cluster: ClusterProcess,
    topic: Topic,
    spark_driver: Callable[..., Driver],
    tmp_path: Path,
) -> None:
    """And tasks of the replayable reader fail. Of what the sink writes, a batch that was killed is there twice."""
    folders = {"journalled": tmp_path / "journalled", "replayable": tmp_path / "replayable"}
    bodies = {"journalled": original.publish(30_000), "replayable": topic.fill(COUNT)}
    given = spark_journal_program.arguments(original, folders["journalled"], dict.fromkeys(PLACES, "hold"))
    journalled = Program(spark_journal_program.PROGRAM, folders["journalled"], **given)
    points = {**dict.fromkeys(POINTS, "hold"), **FAULTS}
    options = {**topic.options, "maxOffsetsPerTrigger": str(BATCH)}
    given = spark_replay_program.arguments(options, folders["replayable"], points)
    replayable = Program(spark_replay_program.PROGRAM, folders["replayable"], **given)
    sinks = KilledStreams(tmp_path / "sinks", sink_broker, cluster)
    driver = spark_driver(BESIDE, MASTER, programs=[journalled.given, replayable.given, sinks.program.given])
    driver.start()
    to_come = list(POINTS)
    for number, place in enumerate(PLACES):
        driver.wait_mark(place, marks=journalled.marks)
        held = next_hold(driver, replayable.marks, to_come) if to_come else None
        if number == 0:
            for each in sinks.topics:
                driver.wait_mark(each, marks=sinks.program.marks)
            assert sinks.committed_before_the_hold()
        elif number <= 2:
            driver.wait_said("sunk")
        driver.kill_driver()
        processes.kill(journalled.marks.pids(place)[0])
        if number == 1:  # the server goes away, too
            original.restart()
            sinks.lose_last_commit()
        elif number == 2:
            sinks.program.marks.reach("done")
        driver.start()
        if held is not None:  # a task that outlives its driver goes on: what it does must not matter
            replayable.marks.release(held)
            to_come.remove(held)
    driver.wait()
    assert driver.said("left")[0]["count"] == 0
    assert not journalled.marks.count("tried again")  # no task of it failed
    spark_journal_program.check(original, journalled.marks, bodies["journalled"], folders["journalled"], 1)
    assert all(replayable.marks.count(f"{name}-reached") == 1 for name in points)
    assert spark_replay_program.check(folders["replayable"], bodies["replayable"]).replays()
    sinks.check()


@pytest.mark.slow
def test_a_new_checkpoint_after_a_killed_driver(
    original: Server, spark_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    """What the killed query had acknowledged is the first batch of another one, which is killed with it in its sink."""
    bodies = original.publish(6_000)
    journal = str(tmp_path / "journal")
    given = spark_journal_program.arguments(original, tmp_path / "old", {"before seal": "hold"}, journal=journal)
    old = spark_driver(spark_journal_program.PROGRAM, MASTER, **given)
    old.start()
    old.wait_mark("before seal")
    old.kill_driver()
    processes.kill(old.marks.pids("before seal")[0])
    folder = tmp_path / "new"
    given = spark_journal_program.arguments(original, folder, {"in the sink": "hold"}, journal=journal)
    new = spark_driver(spark_journal_program.PROGRAM, MASTER, **given)
    new.start()
    new.wait_mark("in the sink")
    new.kill_driver()
    new.start()
    new.wait()
    spark_journal_program.check(original, new.marks, bodies, folder, 1)
