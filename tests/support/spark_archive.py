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

from .spark_home import make_home
from .spark_program import GIVEN
from .spark_settings import LOCAL, archive, home, spark_environment, spark_settings

TIMEOUT = 240.0

# What most tests do, so that its classes are there: tables, Pythons that Spark starts, streams.
_PROGRAM = """
from pyspark.sql import functions as F
from support.spark_program import arguments, session

spark, folder = session(), arguments()["folder"]
numbers = spark.range(100).withColumn("kind", F.col("id") % 3)
numbers.mapInArrow(lambda batches: batches, numbers.schema).write.parquet(folder + "/table")
table = spark.read.parquet(folder + "/table")
for compiled, mode in (("true", "FALLBACK"), ("false", "NO_CODEGEN")):
    spark.conf.set("spark.sql.codegen.wholeStage", compiled)
    spark.conf.set("spark.sql.codegen.factoryMode", mode)
    table.join(table.groupBy("kind").agg(F.count("*").alias("many")), "kind").orderBy("id").toArrow()
rows = spark.readStream.format("rate").option("rowsPerSecond", 100).load()
query = rows.writeStream.foreachBatch(lambda batch, number: batch.toArrow())
query = query.option("checkpointLocation", folder + "/checkpoint").start()
while query.lastProgress is None or query.lastProgress["batchId"] < 1:
    query.awaitTermination(0.1)
query.stop()
spark.stop()
"""


def make_ready(folder: Path) -> None:
    """Make the home and the archive unless they are there; the Spark that does it has its files in ``folder``.

    Where no archive can be made, tests go on without, and take longer. Other runs wait meanwhile.
    """
    home().parent.mkdir(exist_ok=True)
    with Path(f"{home()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_home(home())
        if not archive().exists():
            _make(archive(), folder)


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
