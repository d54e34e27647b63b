"""A query of the replayable reader that holds, fails or dies where a test wants it; and what must be true afterwards.

Each point is for once in all runs of the program: ``points`` says what happens
there (``hold``, ``raise``, ``exit``). ``forever``: until the mark ``end``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .spark import Driver
from .spark_ledger import Delivered, account
from .spark_marks import Marks, poll

COUNT = 60_000
"""Messages for a query of two batches, of which each point is reached in one."""
BATCH = 40_000
"""In two tasks, each of which hands on 10,000 rows and has as many to come when it is held."""

PROGRAM = """
import os, time

from nsq_fast.spark.replay import ReplayStreamReader
from nsq_fast.spark.replay.reading import PieceReader
from support.spark_program import Collector, arguments, marks, register_faulty, run_to_end, say, session

given, here = arguments(), marks()

def point(name):
    if name not in given["points"] or not here.once(name):
        return
    action = given["points"][name]
    here.reach(name + "-reached")
    if action == "hold":
        here.hold(name)
    elif action == "raise":
        raise RuntimeError("a fault of the test")
    elif action == "exit":
        os._exit(3)

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
    run_to_end(writer.trigger(availableNow=True).start)
say("progress", attempts=here.count("attempt"))
"""


def arguments(
    options: dict[str, str], folder: Path, points: dict[str, str], forever: bool = False
) -> dict[str, object]:
    """What the program is given; its files go below ``folder``."""
    paths = {"out": str(folder / "out"), "checkpoint": str(folder / "checkpoint")}
    options = {"startingOffsets": "earliest", "columns": "*", **options}
    return {"options": options, "points": points, "forever": forever, **paths}


def next_hold(driver: Driver, marks: Marks, points: Iterable[str]) -> str:
    """Which of these points the program holds at, once it does."""

    def held() -> list[str]:
        assert driver.is_running, driver.log()
        return [name for name in points if marks.count(name)]

    return poll(held, what="the next point")[0]


def check(folder: Path, bodies: list[bytes]) -> Delivered:
    """Nothing lost, nothing twice, replays the same, and each partition in its order."""
    delivered = Delivered(folder / "out")
    account(bodies, delivered.bodies()).check()
    delivered.check_replays()
    check_order(delivered)
    return delivered


def check_order(delivered: Delivered) -> None:
    """Each partition was read without a gap: every message begins where the one before ends."""
    expected: dict[int, int] = {}
    rows = zip(*(delivered.column(name) for name in ("partition", "offset", "size")), strict=True)
    for partition, offset, size in rows:
        assert offset == expected.get(partition, offset), (partition, offset, expected[partition])
        expected[partition] = offset + size
