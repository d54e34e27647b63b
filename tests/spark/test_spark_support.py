"""The tools of these tests do what the tests rely on: kills are complete, accounts are right, clusters run Python."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import kinds, processes
from support.side_by_side import TogetherByFile
from support.spark_driver import Driver
from support.spark_ledger import Delivered, account, read_sink
from support.spark_marks import poll

Drivers = Callable[..., Driver]

# Needs no Spark: what is looked at here is what a kill does, and what is told of batches that run again.
COLLECT = """
from pathlib import Path

import pyarrow as pa
from support.spark_program import Collector, arguments, marks, say

class Frame:
    def __init__(self, number):
        self.number = number

    def toArrow(self):
        return pa.table({"body": [b"%d" % each for each in range(10 * self.number, 10 * self.number + 10)]})

collect, checkpoint = Collector(arguments()["out"]), Path(arguments()["checkpoint"])
for number in range(int(checkpoint.read_text()) if checkpoint.exists() else 0, 5):
    collect(Frame(number), number)
    say("batch", number=number)
    if number == 2:
        marks().hold("second")
    checkpoint.write_text(str(number + 1))
marks().wait("enough")
"""


def paths(folder: Path) -> dict[str, str]:
    return {"out": str(folder / "out"), "checkpoint": str(folder / "checkpoint")}


def test_a_program_is_killed_at_a_mark_and_goes_on_from_its_checkpoint(spark_driver: Drivers, tmp_path: Path) -> None:
    driver = spark_driver(COLLECT, **paths(tmp_path))
    driver.start()
    driver.wait_mark("second")
    driver.kill()
    assert not driver.is_running
    driver.marks.release("second")
    driver.start()
    driver.wait_said("batch", 3)
    driver.marks.reach("enough")
    driver.wait()
    delivered = Delivered(tmp_path / "out")
    assert 2 in delivered.replays()
    delivered.check_replays()
    bodies = delivered.bodies()
    account([b"%d" % number for number in range(len(bodies))], bodies).check()


def test_a_failed_program_is_told_with_its_log(spark_driver: Drivers) -> None:
    driver = spark_driver("raise ValueError('for the log')")
    driver.start()
    with pytest.raises(AssertionError, match="for the log"):
        driver.wait_mark("never")
    assert "ValueError: for the log" in driver.fails()


def test_the_session_writes_what_the_reader_of_its_sink_finds(spark: Any, tmp_path: Path) -> None:
    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    writer = stream.writeStream.format("parquet").option("path", str(tmp_path / "sink"))
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    metadata = tmp_path / "sink" / "_spark_metadata"
    poll(lambda: metadata.is_dir() and len(list(metadata.glob("[0-9]*"))) >= 3, what="three batches")
    query.stop()
    values = read_sink(tmp_path / "sink")["value"].to_pylist()
    assert sorted(values) == list(range(len(values)))
    assert len(values) >= 15


def test_pythons_of_spark_import_pyspark_as_it_is_installed(spark: Any) -> None:
    """Not its sources, which each would have to compile."""
    import pyspark

    task = spark.sparkContext.parallelize([0], 1).map(lambda _: __import__("pyspark").__file__)
    assert task.collect() == [pyspark.__file__]


def test_an_account_tells_lost_duplicated_and_unexpected() -> None:
    told = account([b"a", b"b", b"c"], [b"a", b"a", b"x", b"maybe"], uncertain=[b"maybe", b"never"])
    assert (told.published, told.delivered, told.extra) == (3, 4, 1)
    assert (told.lost, told.duplicated, told.unexpected) == ({b"b", b"c"}, {b"a": 2}, {b"x"})
    with pytest.raises(AssertionError, match="2 lost"):
        told.check(duplicates=1)
    with pytest.raises(AssertionError, match="1 duplicates"):
        account([b"a"], [b"a", b"a"]).check()
    account([b"a"], [b"a", b"a"]).check(duplicates=1)


def test_files_that_share_a_fixture_are_given_to_one_process() -> None:
    split = TogetherByFile.__new__(TogetherByFile)._split_scope
    shared = {split(f"tests/spark/{name}.py::test_it[a::b]") for name in kinds.SHARING["spark"]}
    assert len(shared) == 1
    others = ("tests/spark/test_spark_docs.py", "tests/spark/test_spark_day.py")
    assert tuple(split(f"{name}::test_it") for name in others) == others
    assert all((Path(__file__).parent / f"{name}.py").exists() for files in kinds.SHARING.values() for name in files)


def test_the_processes_of_a_session_are_known(tmp_path: Path) -> None:
    assert os.getpid() in [each.pid for each in processes.of_session(os.getsid(0))]
