"""Settings of the small Sparks that tests run: little memory, loopback only, no UI, quiet, files below one folder."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
LOOPBACK = "127.0.0.1"
_QUIET = TESTS / "support" / "log4j2-quiet.properties"
LOCAL = "local[2]"
LOCAL_CLUSTER = "local-cluster[2,1,1024]"


def java_options(level: str = "error") -> str:
    """Options of every JVM: what it logs, and how little it does at its start."""
    return f"-Dlog4j2.configurationFile={_QUIET} -Dnsq.log.level={level} {quick_start()}"


def quick_start() -> str:
    """Options of a JVM with which it starts in half the time.

    For code of one tier it reserves a fifth as much as for all: a session of many tests would always be clearing it.
    """
    options = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
    return f"{options} -XX:SharedArchiveFile={archive()} -Xlog:disable" if archive().exists() else options


def quick_environment() -> dict[str, str]:
    """The same for every Spark that a process starts, as programs of the documentation do without any options."""
    place = {"SPARK_HOME": str(home())} if home().exists() else {}
    return {"JDK_JAVA_OPTIONS": quick_start(), **place}


def archive() -> Path:
    """Where the classes of this Spark are kept between runs: see ``spark_start``."""
    return home() / "classes.jsa"


def home() -> Path:
    """The home of this Spark, kept between runs: see ``spark_start``."""
    return ROOT / ".pytest_cache" / f"spark-{version('pyspark')}"


def spark_settings(master: str, folder: Path) -> dict[str, str]:
    """The configuration of a session: its files go below ``folder``."""
    settings = {
        "spark.master": master,
        "spark.app.name": "nsq_fast tests",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.extraJavaOptions": java_options(),
        "spark.local.dir": str(folder / "local"),
        "spark.port.maxRetries": "0",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        # What each operation on a column would ask the JVM, to name a line of the program in an error.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        # Compiling Java for a query costs more than these few rows; programs of the pages and commands do it.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.default.parallelism": "2",
    }
    return settings if master.startswith("local[") else {**settings, **_executor_settings()}


def _executor_settings() -> dict[str, str]:
    return {
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.executor.extraJavaOptions": java_options(),
        "spark.executorEnv.PYTHONPATH": python_path(),
        "spark.executorEnv.PYSPARK_PYTHON": sys.executable,
    }


def python_path() -> str:
    """Where Pythons that Spark starts find nsq_fast and the support of the tests."""
    return os.pathsep.join(filter(None, [str(ROOT), str(TESTS), os.environ.get("PYTHONPATH")]))


def spark_environment() -> dict[str, str]:
    """The environment of a process that starts a Spark."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    return {
        **given,
        **quick_environment(),
        "PYTHONPATH": python_path(),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": LOOPBACK,
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        # The JVM that makes up Spark's command lives 0.1 s: holding the archive against the jars takes it as long.
        "SPARK_LAUNCHER_OPTS": "-Xshare:off",
    }
