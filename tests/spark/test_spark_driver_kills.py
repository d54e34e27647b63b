"""A driver is killed wherever it could hurt its queries: of each reader and of the sink, side by side, in one driver.

The driver is killed twice. What one query alone is at when that happens, several are side by side; the second kill
hits each where it has begun again from what the first has left.
"""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support import processes
from support.journal import Server, several_servers
from support.servers import find_server
from support.spark import BESIDE, ROOT, Driver, Program
from support.spark_journal_program import Journalled, while_it_may
from support.spark_ledger import account
from support.spark_replay import MakeTopic
from support.spark_replay_program import COUNT, Replayable
from support.spark_sink import check_keys, numbered, taken, with_keys
from support.waiting import PROCESS, until

from nsq_fast import NsqdHTTPClient, Producer
from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.broker.process import ServerAddresses

MASTER = "local[12,4]"
"""Tasks are tried again; one of each query holds while others go on."""
PLACES = (("before claim 0", "after claim 0"), ("after finish 0", "before seal"), ("in the sink",))
"""Of the journalled queries, at each of the two kills."""
POINTS = (("planning", "partitions"), ("reading", "sink"))
"""Of the replayable ones."""
FAULTS = {"before": "raise", "read": "exit"}


@pytest.fixture
def originals(tmp_path: Path) -> Iterator[list[Server]]:
    """One nsqd for each journal, real ones where there are any."""
    with several_servers(4, tmp_path, is_real=find_server("nsqd") is not None) as made:
        yield made


@pytest.mark.slow
def test_a_driver_that_is_killed_anywhere_loses_and_doubles_nothing(
    originals: list[Server],
    broker: BrokerProcess,
    cluster: ClusterProcess,
    make_topic: MakeTopic,
    spark_driver: Callable[..., Driver],
    tmp_path: Path,
) -> None:
    """And tasks of the replayable reader fail. Of what the sink writes, a batch that was killed is there twice."""
    *for_places, for_adoption = originals
    journalled = [
        Journalled(server, tmp_path / f"journalled{number}", server.publish(20_000), dict.fromkeys(places, "hold"))
        for number, (server, places) in enumerate(zip(for_places, PLACES, strict=True))
    ]
    replayable = []
    for points in POINTS:
        topic = make_topic()
        bodies = topic.fill(COUNT)
        replayable.append(Replayable(topic, tmp_path / topic.name, {**dict.fromkeys(points, "hold"), **FAULTS}))
    sinks = KilledStreams(tmp_path / "sinks", broker, cluster)
    adoption = Adoption(for_adoption, tmp_path / "adoption")
    bills = Bills(tmp_path / "bills", broker, cluster)
    programs = [*journalled, *replayable, sinks.program, *adoption.programs, *bills.programs]
    driver = spark_driver(BESIDE, MASTER, programs=[each.given for each in programs])
    driver.start()
    for kill in range(2):
        held = [(query, places[kill]) for query, places in zip(journalled, PLACES, strict=True) if places[kill:]]
        outliving = [(query, points[kill]) for query, points in zip(replayable, POINTS, strict=True)]
        for query, place in held + outliving:
            driver.wait_mark(place, marks=query.marks)
        adoption.before_kill(driver, kill)
        if kill == 0:
            for each in sinks.topics:
                driver.wait_mark(each, marks=sinks.program.marks)
            assert sinks.committed_before_the_hold()
            for program in bills.programs:
                driver.wait_mark("published", marks=program.marks)
        else:
            driver.wait_said("sunk")
        driver.kill_driver()
        for query, place in held:
            processes.kill(query.marks.pids(place)[0])
        adoption.after_kill(kill)
        if kill == 1:  # the server goes away, too
            for_places[0].restart()
            sinks.lose_last_commit()
        driver.start()
        for query, point in outliving:  # a task that outlives its driver goes on: what it does must not matter
            query.marks.release(point)
    driver.wait()
    assert [said["count"] for said in driver.said("left")] == [0] * 4
    for query in journalled:
        assert not query.marks.count("tried again")  # no task of it failed
        query.check()
    assert journalled[-1].delivered.replays()
    for query, points in zip(replayable, POINTS, strict=True):
        assert all(query.marks.count(name) == 1 for name in (*points, *FAULTS))
        query.check(bodies)
    assert replayable[-1].delivered.replays()
    sinks.check()
    adoption.check()
    bills.check()


# A new checkpoint: what the killed query had acknowledged is the first batch of another one, which is killed, too.


class Adoption:
    """A query that is killed with the first driver, and another with its journal, killed with the second in its sink.

    Attributes:
        programs: for the driver, in which they do nothing before their time and after it.
    """

    def __init__(self, server: Server, folder: Path) -> None:
        bodies = server.publish(6_000)
        old, self._query = (
            Journalled(server, folder / name, bodies, {place: "hold"}, while_it_may(), journal=str(folder / "journal"))
            for name, place in (("old", "before seal"), ("new", "in the sink"))
        )
        self.programs = [old, self._query]
        self._old, self._new = old.marks, self._query.marks
        self._old.reach("begin")

    def before_kill(self, driver: Driver, number: int) -> None:
        place, marks = [("before seal", self._old), ("in the sink", self._new)][number]
        driver.wait_mark(place, marks=marks)

    def after_kill(self, number: int) -> None:
        if number == 0:
            processes.kill(self._old.pids("before seal")[0])
            self._old.reach("over")
            self._new.reach("begin")

    def check(self) -> None:
        self._query.check(replays=1)


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

spark = session()
for query in [start(spark, options) for options in given["sinks"]]:
    query.awaitTermination()
say("sunk")
"""


class KilledStreams:
    """Streams into the sink that are held in the middle of a batch, once; and what must be true afterwards.

    One goes into a topic, and one into another with idempotence keys, by which consumers can tell copies. Each has
    files to read, one in a batch. When both have ended, the program says ``sunk``.

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


# docs/spark-examples.md, "Exactly once into NSQ": its programs, killed when a batch is published and not committed.


PAGE = (ROOT / "docs" / "spark-examples.md").read_text().partition("## Exactly once into NSQ")[2]

OF_REDESIGNED, OF_ORIGINAL, CONSUMER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

ORDERS = [f"order {number}" for number in range(300)]

PUBLISHING = """
from support.spark_program import arguments, marks, run_to_end

at = marks()
def held(publish):
    def wrapped(rows, batch):
        publish(rows, batch)
        if batch == 0 and at.once("killed"):
            at.hold("published")
    return wrapped
if not at.count("done"):
    run_to_end(lambda: exec(arguments()["source"], globals()))
    at.reach("done")
"""


class Bills:
    """The programs of the page, each held when all of its first batch is published, in the first run.

    Attributes:
        programs: for the driver.
    """

    def __init__(self, folder: Path, broker: BrokerProcess, cluster: ClusterProcess) -> None:
        with NsqdHTTPClient(*broker.nsqd.http) as client:
            for topic, channel in (("orders", "bills"), ("bills", "ledger")):
                client.create_topic(topic)
                client.create_channel(topic, channel)
        cluster.create_topic("orders", 2, 1, multi_part=True, channels=["bills"])
        cluster.create_topic("bills", 2, 1, multi_part=True, ext=True, channels=["ledger"])
        self.programs: list[Program] = []
        self._places: list[tuple[Path, str, list[ServerAddresses]]] = []
        for text, lookupd, nsqds in (
            (OF_ORIGINAL, str(broker.lookupd.http), broker.nsqds),
            (OF_REDESIGNED, str(cluster.lookupds[0].http), cluster.nsqds),
        ):
            own = folder / f"{len(self.programs)}"
            (own / "orders").mkdir(parents=True)
            assert "foreachBatch(publish)" in text
            source = _here(text, own, lookupd).replace("foreachBatch(publish)", "foreachBatch(held(publish))")
            self.programs.append(Program(PUBLISHING, own, source=source))
            self._places.append((own, lookupd, nsqds))
            with Producer(lookupd_http_addresses=lookupd) as producer:
                producer.multipublish("orders", [order.encode() for order in ORDERS])

    def check(self) -> None:
        """What a consumer, the program of the page, has in its ledger when it has had all messages, copies too.

        Copies are of the first batch, which need not be all there is: a task ends when its server is slow to send more.
        """
        for folder, lookupd, nsqds in self._places:
            process = subprocess.Popen([sys.executable, "-c", _here(CONSUMER, folder, lookupd)], cwd=ROOT)
            try:
                until(lambda nsqds=nsqds: _bills(nsqds)[1] == 0, PROCESS, 0.1)
                assert _bills(nsqds)[0] > len(ORDERS), "there are no copies"
            finally:
                process.kill()
                process.wait()
            with closing(sqlite3.connect(folder / "orders" / "ledger.db")) as ledger:
                assert sorted(text for (text,) in ledger.execute("SELECT text FROM bills")) == sorted(ORDERS)


def _here(text: str, folder: Path, lookupd: str) -> str:
    assert "127.0.0.1:4161" in text
    return text.replace("127.0.0.1:4161", lookupd).replace("/var/lib", str(folder))


def _bills(nsqds: list[ServerAddresses]) -> tuple[int, int]:
    """How many messages there were for the consumer, and how many of them it has not finished."""
    topics = []
    for nsqd in nsqds:
        with NsqdHTTPClient(*nsqd.http) as client:
            topics += client.stats("bills")["topics"]
    held = ("depth", "in_flight_count", "deferred_count")
    left = sum(channel[name] for topic in topics for channel in topic["channels"] for name in held)
    return sum(topic["message_count"] for topic in topics), left
