"""Streams into the sink that are held in the middle of a batch, once; and what must be true afterwards.

Each has files to read, one in a batch. When all have ended, the program says
``sunk``; it does nothing more once the mark ``done`` is there.
"""

from __future__ import annotations

from pathlib import Path

from nsq_fast.broker import BrokerProcess, ClusterProcess

from .spark import Program
from .spark_ledger import account
from .spark_sink import check_keys, numbered, taken, with_keys

SIZE, FILES = 500, 5
HELD_BATCH = 2

PROGRAM = """
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
    """One stream into a topic, and one into another with idempotence keys, by which consumers can tell copies.

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
        self.program = Program(PROGRAM, folder, sinks=given, held=str(HELD_BATCH), **paths)

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
            assert len(batches) in {
                FILES - 1,
                FILES,
            }  # killed between two steps of planning, Spark gives a batch two files

    def _reports(self, topic: str) -> Path:
        return self._folder / "reports" / topic

    def _commits(self, topic: str) -> list[Path]:
        return list((self._folder / f"checkpoint-{topic}" / "commits").glob("[0-9]*"))
