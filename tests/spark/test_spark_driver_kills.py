"""A driver is killed wherever it could hurt its queries: of each reader and of the sink, side by side, in one driver.

Each query goes through all its places, one after the other, so that each of
them is a restart from what the one before has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import processes, spark_journal_program, spark_replay_program
from support.journal import Server, several_servers
from support.servers import find_server
from support.spark import BESIDE, Driver, Program
from support.spark_ledger import account
from support.spark_replay import Topic
from support.spark_replay_program import BATCH, COUNT, next_hold
from support.spark_sink import check_keys, numbered, taken, with_keys

from nsq_fast.broker import BrokerProcess, ClusterProcess

MASTER = "local[8,4]"
"""Tasks are tried again; one of each query holds while others go on."""
PLACES = ("before claim 0", "after claim 0", "after finish 0", "before seal", "in the sink")
POINTS = ("planning", "partitions", "reading", "sink")
FAULTS = {"before": "raise", "read": "exit"}


@pytest.fixture
def originals(tmp_path: Path) -> Iterator[list[Server]]:
    """Two nsqds, real ones where there are any."""
    with several_servers(2, tmp_path, Server.real if find_server("nsqd") else Server.broker) as made:
        yield made


@pytest.fixture
def sink_broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(lookupd=False) as running:
        yield running


@pytest.mark.slow
def test_a_driver_that_is_killed_anywhere_loses_and_doubles_nothing(
    originals: list[Server],
    sink_broker: BrokerProcess,
    cluster: ClusterProcess,
    topic: Topic,
    spark_driver: Callable[..., Driver],
    tmp_path: Path,
) -> None:
    """And tasks of the replayable reader fail. Of what the sink writes, a batch that was killed is there twice."""
    original = originals[0]
    folders = {"journalled": tmp_path / "journalled", "replayable": tmp_path / "replayable"}
    bodies = {"journalled": original.publish(30_000), "replayable": topic.fill(COUNT)}
    given = spark_journal_program.arguments(original, folders["journalled"], dict.fromkeys(PLACES, "hold"))
    journalled = Program(spark_journal_program.PROGRAM, folders["journalled"], **given)
    points = {**dict.fromkeys(POINTS, "hold"), **FAULTS}
    options = {**topic.options, "maxOffsetsPerTrigger": str(BATCH)}
    given = spark_replay_program.arguments(options, folders["replayable"], points)
    replayable = Program(spark_replay_program.PROGRAM, folders["replayable"], **given)
    sinks = KilledStreams(tmp_path / "sinks", sink_broker, cluster)
    adoption = Adoption(originals[1], tmp_path / "adoption")
    programs = [journalled, replayable, sinks.program, *adoption.programs]
    driver = spark_driver(BESIDE, MASTER, programs=[each.given for each in programs])
    driver.start()
    to_come = list(POINTS)
    for number, place in enumerate(PLACES):
        driver.wait_mark(place, marks=journalled.marks)
        held = next_hold(driver, replayable.marks, to_come) if to_come else None
        adoption.before_kill(driver, number)
        if number == 0:
            for each in sinks.topics:
                driver.wait_mark(each, marks=sinks.program.marks)
            assert sinks.committed_before_the_hold()
        elif number <= 2:
            driver.wait_said("sunk")
        driver.kill_driver()
        processes.kill(journalled.marks.pids(place)[0])
        adoption.after_kill(number)
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
    adoption.check()


# A new checkpoint: what the killed query had acknowledged is the first batch of another one, which is killed, too.


WHILE_IT_MAY = f"""
from support.spark_program import marks

marks().wait("begin")
if not marks().count("over"):
    exec({spark_journal_program.PROGRAM!r})
"""


class Adoption:
    """A query that is killed with the first driver, and another with its journal, killed with the second in its sink.

    Attributes:
        programs: for the driver, in which they do nothing before their time and after it.
    """

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._folder = server, folder / "new"
        self._bodies = server.publish(6_000)
        self.programs = [
            Program(
                WHILE_IT_MAY,
                folder / name,
                **spark_journal_program.arguments(server, folder / name, places, journal=str(folder / "journal")),
            )
            for name, places in (("old", {"before seal": "hold"}), ("new", {"in the sink": "hold"}))
        ]
        self._old, self._new = (each.marks for each in self.programs)
        self._old.reach("begin")

    def before_kill(self, driver: Driver, number: int) -> None:
        if number == 0:
            driver.wait_mark("before seal", marks=self._old)
        elif number == 1:
            driver.wait_mark("in the sink", marks=self._new)
        elif number == 2:
            assert driver.wait_said("left")["count"] == 0

    def after_kill(self, number: int) -> None:
        if number == 0:
            processes.kill(self._old.pids("before seal")[0])
            self._old.reach("over")
            self._new.reach("begin")
        elif number == 2:
            self._new.reach("over")

    def check(self) -> None:
        spark_journal_program.check(self._server, self._new, self._bodies, self._folder, 1)


# What is written into the sink when the driver is killed.


SIZE, FILES = 500, 5
HELD_BATCH = 2

STREAMS = """
from pyspark import TaskContext
from support.spark_program import arguments, marks, say, session

given, here = arguments(), marks()

def holding(topic):
    def pass_on(batches):
        for batch in batches:
            yield batch  # is on its way to the server
            if TaskContext.get().getLocalProperty("streaming.sql.batchId") == given["held"] and here.once(topic):
                here.hold(topic)

    return pass_on

def start(spark, options):
    rows = spark.readStream.schema("body string").option("maxFilesPerTrigger", 1).text(given["files"])
    rows = rows.withColumnRenamed("value", "body")
    rows = rows.mapInArrow(holding(options["topic"]), rows.schema)
    writer = rows.writeStream.format("nsq").options(**options).trigger(availableNow=True)
    return writer.option("checkpointLocation", given["checkpoint"] + options["topic"]).start()

if not here.count("done"):
    spark = session()
    for query in [start(spark, options) for options in given["sinks"]]:
        query.awaitTermination()
    say("sunk")
"""


class KilledStreams:
    """Streams into the sink that are held in the middle of a batch, once; and what must be true afterwards.

    One goes into a topic, and one into another with idempotence keys, by which consumers can tell copies. Each has
    files to read, one in a batch. When both have ended, the program says ``sunk``; it does nothing more once the mark
    ``done`` is there.

    Attributes:
        topics: the marks at which they are held.
        program: for the driver.
    """

    def __init__(self, folder: Path, broker: BrokerProcess, cluster: ClusterProcess) -> None:
        self._broker, self._cluster, self._folder = broker, cluster, folder
        files = folder / "files"
        files.mkdir(parents=True)
        for number in range(FILES):
            lines = range(number * SIZE, (number + 1) * SIZE)
            (files / f"{number:02}.txt").write_text("".join(f"{line}\n" for line in lines))
        plain = {"topic": "stream", "nsqd_tcp_addresses": str(broker.nsqd.tcp)}
        sinks = [plain, with_keys(cluster, "stream-keyed")]
        self.topics = [each["topic"] for each in sinks]
        given = [{**options, "reportPath": str(self._reports(options["topic"]))} for options in sinks]
        paths = {"files": str(files), "checkpoint": str(folder / "checkpoint-")}
        self.program = Program(STREAMS, folder, sinks=given, held=str(HELD_BATCH), **paths)

    def committed_before_the_hold(self) -> bool:
        """Whether the batches before that in which they are held are committed."""
        return all(list(self._reports(topic).glob(f"batch-{HELD_BATCH - 1}-*.json")) for topic in self.topics)

    def lose_last_commit(self) -> None:
        """Leave the checkpoint of the stream with keys as a driver does that is killed just before a commit."""
        last = max(self._commits("stream-keyed"), key=lambda path: int(path.name))
        for path in (last, last.with_name(f".{last.name}.crc")):
            path.unlink()

    def check(self) -> None:
        """Nothing is lost, the batch that was held is there twice, and with keys the one without a commit."""
        rows = numbered(FILES * SIZE)
        account(rows, taken(self._broker.nsqd.tcp, "stream", len(rows))).check(duplicates=SIZE)
        assert SIZE <= check_keys(self._cluster, "stream-keyed", rows) <= 2 * SIZE
        for topic in self.topics:
            batches = {path.name.split("-")[1] for path in self._reports(topic).glob("batch-*.json")}
            assert batches == {path.name for path in self._commits(topic)}
            # Killed between two steps of planning, Spark gives a batch two files.
            assert len(batches) in {FILES - 1, FILES}

    def _reports(self, topic: str) -> Path:
        return self._folder / "reports" / topic

    def _commits(self, topic: str) -> list[Path]:
        return list((self._folder / f"checkpoint-{topic}" / "commits").glob("[0-9]*"))
