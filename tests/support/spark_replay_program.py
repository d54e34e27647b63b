"""A query of the replayable reader that holds, fails or dies where a test wants it, and what must be true then."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .spark import Program
from .spark_ledger import Delivered, account
from .spark_replay import Topic

COUNT = 60_000
"""Messages for a query of two batches, of which each point is reached in one."""
BATCH = 40_000
"""In two tasks, each of which hands on 10,000 rows and has as many to come when it is held."""

PROGRAM = """
from nsq_fast.spark.replay import ReplayStreamReader
from nsq_fast.spark.replay.reading import PieceReader
from support.spark_program import Collector, Places, arguments, marks, register_faulty, run_to_end, say, session

given, here = arguments(), marks()
point = Places(given["places"], here).at

class Reader(PieceReader):
    def batches(self):
        here.reach("attempt", f"{self.piece.partition}:{self.piece.start}")
        point("before")
        batches = super().batches()
        yield next(batches)
        point("reading")
        yield from batches
        point("read")

class StreamReader(ReplayStreamReader):
    def latestOffset(self, *given):  # nothing before PySpark 4.2
        point("planning")
        end = super().latestOffset(*given)
        point("planned")
        return end

    def partitions(self, start, end):
        point("partitions")
        return super().partitions(start, end)

    def commit(self, end):
        point("commit")
        super().commit(end)

    def make_piece_reader(self, piece):
        return Reader(self.options, piece)

spark = session()
register_faulty(spark, StreamReader)
rows = spark.readStream.format("faulty").options(**given["options"]).load()
collect = Collector(given["out"], ["partition", "offset", "body"])

def sink(frame, number):
    collect(frame, number)
    point("sink")
    say("batch", number=number)

writer = rows.writeStream.foreachBatch(sink).option("checkpointLocation", given["checkpoint"])
if given["forever"]:
    query = writer.trigger(processingTime="200 milliseconds").start()
    while not here.count("end"):
        query.awaitTermination(0.1)
    query.processAllAvailable()
    query.stop()
else:
    run_to_end(lambda: writer.trigger(availableNow=True).start().awaitTermination())
say("progress", attempts=here.count("attempt"))
"""


class Replayable(Program):
    """One for a driver.

    Args:
        places: see ``Places``.
        forever: until the mark ``end``.
        before: what the program does first.
    """

    def __init__(
        self,
        topic: Topic,
        folder: Path,
        places: dict[str, str],
        *,
        limit: int = BATCH,
        forever: bool = False,
        before: str = "",
    ) -> None:
        options = {"startingOffsets": "earliest", "columns": "*", **topic.options, "maxOffsetsPerTrigger": str(limit)}
        super().__init__(before + PROGRAM, folder, options=options, places=places, forever=forever)

    def check(self, bodies: list[bytes], unknown: Iterable[bytes] = ()) -> None:
        check(self.delivered, bodies, unknown)


def check(delivered: Delivered, bodies: list[bytes], unknown: Iterable[bytes] = ()) -> None:
    """Nothing lost, nothing twice, replays the same, and each partition in its order."""
    account(bodies, delivered.bodies(), unknown).check()
    delivered.check_replays()
    check_order(delivered)


def check_order(delivered: Delivered) -> None:
    """Each partition was read without a gap: every message begins where the one before ends."""
    expected: dict[int, int] = {}
    rows = zip(*(delivered.column(name) for name in ("partition", "offset", "size")), strict=True)
    for partition, offset, size in rows:
        assert offset == expected.get(partition, offset), (partition, offset, expected[partition])
        expected[partition] = offset + size
