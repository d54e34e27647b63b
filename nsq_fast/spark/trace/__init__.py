"""Traces on Spark: from the logs of producers and consumers to tables, and to a report.

    records = read_logs(spark, ["producer.log", "consumers/*.log.gz"])
    write_tables(spark, records, "tables")
    write_report(spark, "tables", "report.html")

``stream_tables`` writes the same tables from a stream. All is Spark SQL: no record passes through Python, and nothing
but figures of the report comes to the driver. ``schema`` says what the tables hold.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from nsq_fast.errors import ConfigError, NsqError
from nsq_fast.spark import names_of_extra

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .local import local_figures as local_figures
    from .page import html as html
    from .page import write_report as write_report
    from .queries import figures_of as figures_of
    from .queries import parse_lines as parse_lines
    from .queries import read_logs as read_logs
    from .queries import read_table as read_table
    from .queries import stream_logs as stream_logs
    from .queries import write_tables as write_tables
    from .schema import TABLES as TABLES
    from .schema import Figures as Figures
    from .schema import TraceSettings as TraceSettings
    from .stream import stream_tables as stream_tables

_HOME = {
    "Figures": "schema",
    "TABLES": "schema",
    "TraceSettings": "schema",
    "figures_of": "queries",
    "html": "page",
    "local_figures": "local",
    "parse_lines": "queries",
    "read_logs": "queries",
    "read_table": "queries",
    "stream_logs": "queries",
    "stream_tables": "stream",
    "write_report": "page",
    "write_tables": "queries",
}

__all__ = list(_HOME)

if not TYPE_CHECKING:
    __getattr__ = names_of_extra(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)


# A local session of Spark for a program that has none, once Spark is seen to be able to run here.


OLDEST_JAVA = 17
_INSTALL = f"install Java {OLDEST_JAVA} or newer (Debian: apt-get install openjdk-17-jre-headless), or set JAVA_HOME"


def missing() -> str | None:
    """Why Spark cannot run here, and what to do about it; None when it can."""
    try:
        import pyspark  # noqa: F401
    except ImportError:
        return "Spark needs pyspark: pip install 'nsq-fast[spark]' (Python 3.11 or newer)"
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home, "bin")) if home else None)
    if java is None:
        return f"Spark needs Java, and there is none{f' in JAVA_HOME={home}' if home else ''}: {_INSTALL}"
    version = _java_version(java)
    if version < OLDEST_JAVA:
        return f"Spark needs a newer Java than {version or 'that'} of {java}: {_INSTALL}"
    return None


def _java_version(java: str) -> int:
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    return int(found[1]) if found else 0


def local_session(
    master: str = "local[*]",
    memory: str = "1g",
    partitions: int = 8,
    settings: Mapping[str, str] | None = None,
    *,
    is_verbose: bool = False,
) -> SparkSession:
    """Start a session, or return the one that runs. Raises ConfigError when something is missing.

    Args:
        memory: of the JVM. Most of what does not fit goes to disk, below ``spark.local.dir``.
        partitions: into how many parts a shuffle goes; each should fit into memory several times.
        settings: of Spark; they go before all others.
    """
    if reason := missing():
        raise ConfigError(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about versions of pandas, which is not used here
        from pyspark.sql import SparkSession

    quiet = {} if is_verbose else {"spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_quiet_log()}"}
    chosen = {
        "spark.app.name": "nsq_fast traces",
        "spark.driver.memory": memory,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
        "spark.sql.shuffle.partitions": str(partitions),
        "spark.sql.catalogImplementation": "in-memory",
        # Else each operation on a column asks the JVM, to name a line of this program in an error: a third of the CPU
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        **quiet,
        **(settings or {}),
    }
    builder = SparkSession.builder.master(master)
    for name, value in chosen.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


@contextmanager
def explained() -> Iterator[None]:
    """What Spark refuses, or fails with, becomes an NsqError of the first lines that it says; Java's are on stderr."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise NsqError(f"Spark: {' '.join(str(error).splitlines()[:2])}") from error


def _quiet_log() -> str:
    return str(files(__package__).joinpath("log4j2.properties"))
