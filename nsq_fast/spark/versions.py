"""What PySpark's versions have of data sources, in one place; stand-ins for names that older ones lack.

| | 3.5 | 4.0 | 4.1 | 4.2 and newer |
|---|---|---|---|---|
| sources, sinks | - | yes | yes | yes |
| a streaming sink takes | - | rows | Arrow | Arrow |
| a batch is told what rows the query filters for | - | no | yes | yes |
| a source is told where to go on, and how much it may read | - | no | no | yes |
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from nsq_fast._lazy import get_logger
from nsq_fast.errors import ConfigError, NsqError
from nsq_fast.log_events import SPARK_ERROR

logger: logging.Logger = get_logger(__name__)


if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceArrowWriter,
        DataSourceReader,
        DataSourceStreamReader,
        InputPartition,
        WriterCommitMessage,
    )
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamWriterBase
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

    TELLS_START = STREAMS_ARROW = PUSHES_FILTERS = True
else:
    try:
        from pyspark.sql import datasource
        from pyspark.sql.datasource import (
            DataSource,
            DataSourceArrowWriter,
            DataSourceReader,
            DataSourceStreamReader,
            InputPartition,
            WriterCommitMessage,
        )
    except ImportError:  # 3.5: ``foreach_batch_sink`` and ``read_batch`` alone work
        datasource = DataSourceArrowWriter = WriterCommitMessage = object

        class DataSourceReader:
            """Its readers are called by ``read_batch``, not by Spark."""

        DataSourceStreamReader = DataSourceReader

        class DataSource:
            def __init__(self, options):
                self.options = options

        class InputPartition:
            def __init__(self, value):
                self.value = value

    STREAMS_ARROW = hasattr(datasource, "DataSourceStreamArrowWriter")
    PUSHES_FILTERS = hasattr(getattr(datasource, "DataSourceReader", None), "pushFilters")
    StreamWriterBase = getattr(
        datasource, "DataSourceStreamArrowWriter", getattr(datasource, "DataSourceStreamWriter", object)
    )

    try:
        from pyspark.sql.streaming.datasource import (
            ReadAllAvailable,
            ReadLimit,
            ReadMaxRows,
            SupportsTriggerAvailableNow,
        )

        TELLS_START = True
    except ImportError:
        TELLS_START = False

        class ReadLimit:
            """How much a batch may have."""

        @dataclass
        class ReadAllAvailable(ReadLimit):
            """All that there is."""

        @dataclass
        class ReadMaxRows(ReadLimit):
            max_rows: int

        class SupportsTriggerAvailableNow:
            """Spark reads one batch of all there is by itself."""


__all__ = [
    "PUSHES_FILTERS",
    "STREAMS_ARROW",
    "TELLS_START",
    "DataSource",
    "DataSourceArrowWriter",
    "DataSourceReader",
    "DataSourceStreamReader",
    "InputPartition",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "StreamWriterBase",
    "SupportsTriggerAvailableNow",
    "WriterCommitMessage",
]


# Errors of ours reach the user as one line, where Spark lets a Python data source do that.
#
# Spark sends the traceback of an exception from a Python worker to the driver,
# with our message as its last line. It leaves the traceback out when
# ``SPARK_HIDE_TRACEBACK`` is in the environment of the worker, which ends after
# an exception in any case (pyspark: ``util.py``, ``handle_worker_exception``).
# The traceback goes to the log of the worker, at level INFO.


_HIDE = "SPARK_HIDE_TRACEBACK"
_OF_WORKERS = "PYTHON_WORKER_FACTORY_"

P = ParamSpec("P")
T = TypeVar("T")


def plain_errors(call: Callable[P, T]) -> Callable[P, T]:
    """A method that Spark calls in a worker. It does not fit generators: see ``plainly``."""

    @functools.wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except NsqError as error:
            _hide_traceback(error)
            raise

    return wrapped


def plainly(items: Iterator[T]) -> Iterator[T]:
    """What a task reads, with the errors of ``plain_errors``."""
    spare_modules()
    try:
        yield from items
    except NsqError as error:
        _hide_traceback(error)
        raise


def in_worker() -> bool:
    """Whether Spark has started this process."""
    return any(name.startswith(_OF_WORKERS) for name in os.environ)


def _hide_traceback(error: NsqError) -> None:
    if in_worker():
        logger.info("%s", error, exc_info=True, extra=SPARK_ERROR)
        hide_tracebacks()


def hide_tracebacks() -> None:
    """Of what is raised in this worker next, by Spark too."""
    if in_worker():
        os.environ[_HIDE] = "1"


def show_tracebacks() -> None:
    os.environ.pop(_HIDE, None)


@lru_cache(maxsize=1)
def spare_modules() -> None:
    """Once in a worker: leave what it has imported out of what is searched for garbage.

    Spark has a worker that it keeps search all of it after each task (pyspark: ``daemon.py``): 40 ms of CPU, an eighth
    of what a micro-batch of 90,000 rows costs JVM and Python (nsq-fast bench: spark-stream).
    """
    if in_worker():
        gc.freeze()


# Check that the Python that Spark starts for its workers can run the source: it need not be the one of the driver.


_TIMEOUT = 60.0
_PROBE = """
import sys
if sys.version_info[:2] != {version}:
    sys.exit("is Python %d.%d, and the driver {version[0]}.{version[1]}" % sys.version_info[:2])
try:
    import nsq_fast.columns, pyarrow, pandas  # the one that needs most of what nsq_fast depends on
except ImportError as error:
    sys.exit("has no " + str(error.name))
"""


def check_workers(spark: Any) -> None:
    """Raise ConfigError when the workers of a session on this machine have another Python, or one without nsq_fast.

    A session of Spark Connect is not looked at: its workers are the server's.
    """
    context = getattr(spark, "_sc", None)
    python = getattr(context, "pythonExec", None)
    if python is None or _is_this(python):
        return
    fault = _fault(python, os.environ.get("PYTHONPATH", ""))
    if fault:
        raise ConfigError(
            f"the Python of Spark's workers, {python}, {fault}: set PYSPARK_PYTHON={sys.executable} in the environment"
            " before the session is made, or install nsq-fast[spark] there"
        )


def _is_this(python: str) -> bool:
    # In the same folder, too: the python of a virtual environment is a link to one that lacks its packages.
    found = shutil.which(python)
    return found is not None and all(
        name(os.path.abspath(found)) == name(os.path.abspath(sys.executable))
        for name in (os.path.dirname, os.path.realpath)
    )


@lru_cache
def _fault(python: str, path: str) -> str:
    """What is amiss with an interpreter, in words; empty for nothing. ``path``: PYTHONPATH, of which it depends."""
    program = _PROBE.format(version=sys.version_info[:2])
    try:
        done = subprocess.run(
            [python, "-c", program],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be started ({error})"
    if not done.returncode:
        return ""
    return done.stderr.strip().rpartition("\n")[2] or f"ends with status {done.returncode}, and says nothing"
