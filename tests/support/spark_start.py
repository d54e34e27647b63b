"""A Spark of the tests starts quickly: a home with compiled modules, an archive of classes, names looked up once."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

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
        _make_home(home())
        if not archive().exists():
            _make_archive(archive(), folder)


def _make_home(target: Path) -> None:
    """A home in which Spark's Pythons import pyspark as it is installed.

    Spark has them import it from ``pyspark.zip`` in its home. That file holds sources only, so each of the ten Pythons
    of a small query compiles what it imports: 0.9 s instead of 0.3. Here an empty folder has the place of that file.
    """
    import pyspark

    installed = Path(pyspark.__file__).parent
    if (target / "bin").resolve() == (installed / "bin").resolve():
        return
    shutil.rmtree(target, ignore_errors=True)
    for zipped in (installed / "python" / "lib").glob("*.zip"):
        (target / "python" / "lib" / zipped.name).mkdir(parents=True)  # Spark looks whether it exists
    for name in ("jars", "sbin", "bin"):  # the last one tells that it is whole
        (target / name).symlink_to(installed / name)


def _make_archive(target: Path, folder: Path) -> None:
    """An archive of Java's class data sharing, with which a JVM starts in half the time.

    A JVM of another version, or with other jars, does not take it, and starts as it would have.
    """
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


def remember_classes() -> None:
    """Have PySpark ask the JVM of this process once for each class and method.

    py4j asks it what a name is each time it is used, and PySpark names ``functions`` for each operation on a column.
    The JVM looks for such a short name in all jars of Spark: of queries with many columns that was a tenth of the CPU.
    """
    from py4j.java_gateway import JavaClass, JavaMember, JVMView
    from pyspark import SparkContext

    class Class(JavaClass):  # type: ignore[misc]  # py4j has no types
        def __getattr__(self, name: str) -> Any:
            found = super().__getattr__(name)
            if isinstance(found, JavaMember):
                self.__dict__[name] = found
            return found

    class View(JVMView):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            found = super().__getattr__(name)
            if isinstance(found, JavaClass):
                found = self.__dict__[name] = Class(found._fqn, found._gateway_client)
            return found

    view = SparkContext._jvm
    assert view is not None
    SparkContext._jvm = View(view._gateway_client, view._jvm_name, view._id)
