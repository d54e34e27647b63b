"""The classes of Spark, loaded and laid out once: a JVM that maps this archive starts in half the time.

It is an archive of Java's class data sharing. A JVM of another version, or with other jars, does not take it, and
starts as it would have.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from .spark_program import GIVEN
from .spark_settings import LOCAL, archive, spark_environment, spark_settings

TIMEOUT = 240.0

# What most tests do, so that its classes are there: tables, Pythons that Spark starts, streams.
_PROGRAM = """
from pyspark.sql import functions as F
from support.spark_program import arguments, session

spark, folder = session(), arguments()["folder"]
numbers = spark.range(100).withColumn("kind", F.col("id") % 3)
numbers.mapInArrow(lambda batches: batches, numbers.schema).write.parquet(folder + "/table")
table = spark.read.parquet(folder + "/table")
table.join(table.groupBy("kind").agg(F.count("*").alias("many")), "kind").orderBy("id").toArrow()
rows = spark.readStream.format("rate").option("rowsPerSecond", 100).load()
query = rows.writeStream.foreachBatch(lambda batch, number: batch.toArrow())
query = query.option("checkpointLocation", folder + "/checkpoint").start()
while query.lastProgress is None or query.lastProgress["batchId"] < 1:
    query.awaitTermination(0.1)
query.stop()
spark.stop()
"""


def make_archive(folder: Path) -> None:
    """Make the archive unless it is there; the Spark that does it has its files in ``folder``.

    Where that cannot be done, tests go on without, and take longer. Other runs wait meanwhile.
    """
    target = archive()
    target.parent.mkdir(exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _make(target, folder)


def _make(target: Path, folder: Path) -> None:
    unfinished = target.with_suffix(".unfinished")
    settings = spark_settings(LOCAL, folder)
    settings["spark.driver.extraJavaOptions"] += f" -XX:ArchiveClassesAtExit={unfinished}"
    given = json.dumps({"settings": settings, "arguments": {"folder": str(folder)}})
    command = [sys.executable, "-c", _PROGRAM]
    environment = {**spark_environment(), GIVEN: given}
    with suppress(subprocess.SubprocessError):
        # The JVM writes the archive after the program has ended; it holds the pipes until it has.
        subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=TIMEOUT, check=True)
        unfinished.replace(target)
