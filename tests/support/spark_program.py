"""For driver programs of the tests (see ``spark``): their session, what they were given, and what they tell.

from support.spark_program import Collector, arguments, marks, say, session

spark = session()
...writeStream.foreachBatch(Collector(arguments()["out"])).start()
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .spark_marks import Marks

GIVEN = "NSQ_FAST_TEST_PROGRAM"
# By programs that run beside each other: where two threads import pyspark at once, one of them finds half of it.
_IMPORTED_FIRST = (
    "pandas",
    "pyarrow",
    "pyspark.sql",
    "nsq_fast.spark.journal.collect",
    "nsq_fast.spark.replay.reading",
)
_running = threading.local()  # a program that runs beside others, in this thread


def _given() -> dict[str, Any]:
    given: dict[str, Any] = json.loads(os.environ[GIVEN])
    return {**given, **getattr(_running, "given", {})}


def arguments() -> dict[str, Any]:
    arguments: dict[str, Any] = _given()["arguments"]
    return arguments


def marks() -> Marks:
    return Marks(_given()["marks"])


def session(**settings: str) -> Any:
    """The SparkSession, as the test wants it; it finds the source by itself."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for name, value in {**_given()["settings"], **settings}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    if hasattr(_running, "given"):
        spark = spark.newSession()  # what programs register under the same name stays theirs
        spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)  # where a writer looks for its format
    return spark


def register(spark: Any) -> None:
    import nsq_fast.spark

    nsq_fast.spark.register(spark)


def register_faulty(spark: Any, stream_reader: Callable[[Any], Any]) -> None:
    """Make the format ``faulty`` known: the source, with a stream reader of the program's own, made of the options."""
    from nsq_fast.spark import NsqDataSource

    class Source(NsqDataSource):
        @classmethod
        def name(cls) -> str:
            return "faulty"  # PySpark before 4.2 keeps the name that it has found by itself

        def make_stream_reader(self, kind: str, options: Any) -> Any:
            return stream_reader(options)

    spark.dataSource.register(Source)


def say(what: str, **facts: Any) -> None:
    """Tell the test, which waits with ``Driver.wait_said(what)``, by a mark of the driver, also from one beside."""
    Marks(json.loads(os.environ[GIVEN])["marks"]).reach(f"said {what}", json.dumps(facts))


def run_to_end(run: Callable[[], object]) -> None:
    """Run a query to its end; again when its Python took more than 10 s to start, for which Spark ends it."""
    from pyspark.errors import StreamingQueryException

    try:
        run()
    except StreamingQueryException as error:
        if "Python worker failed to connect back" not in str(error):
            raise
        run_to_end(run)


class Places:
    """Where a program and its tasks are held, fail or die: each for once in all runs, and those that hold in order.

    Args:
        actions: what happens at each place: ``hold``, ``raise``, ``exit``. See ``Marks.hold``.
    """

    def __init__(self, actions: dict[str, str], here: Marks) -> None:
        self._actions, self._here = actions, here

    def at(self, place: str) -> None:
        if place not in self._actions or not self._is_next(place) or not self._here.once(place):
            return
        action = self._actions[place]
        if action == "hold":
            self._here.hold(place)
            return
        self._here.reach(place)
        if action == "exit":
            os._exit(3)
        raise RuntimeError(place)

    def _is_next(self, place: str) -> bool:
        """A driver is killed at one place after the other."""
        holds = [each for each, action in self._actions.items() if action == "hold"]
        before = holds[: holds.index(place)] if place in holds else []
        return all(self._here.count(each) for each in before)


def beside(programs: Iterable[dict[str, Any]]) -> None:
    """Run programs in one driver, each with ``arguments``, ``marks`` and a session of its own.

    Returns when all have ended; raises what one has raised.
    """
    for name in _IMPORTED_FIRST:
        importlib.import_module(name)
    session()
    outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    threads = [threading.Thread(target=_run, args=(given, outcomes), daemon=True) for given in programs]
    for thread in threads:
        thread.start()
    for _ in threads:
        if (error := outcomes.get()) is not None:
            raise error


def _run(given: dict[str, Any], outcomes: queue.SimpleQueue[BaseException | None]) -> None:
    _running.given = given
    try:
        exec(compile(given["program"], "program", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        outcomes.put(error)
    else:
        outcomes.put(None)


class Collector:
    """A ``foreachBatch`` function that keeps each batch as one Arrow file, whole or not at all, and notes its content.

    A batch that runs again replaces its file, so what it keeps is as exact as the
    source is. ``Delivered`` reads it. ``columns`` are what the hash is over.
    """

    def __init__(self, folder: str | os.PathLike[str], columns: Sequence[str] = ("body",)) -> None:
        self._folder = Path(folder)
        self._columns = list(columns)
        self._folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, batch: Any, number: int) -> None:
        import pyarrow as pa

        table = batch.toArrow()
        self._note(number, table)
        part = self._folder / f"batch-{number}.part"
        with pa.OSFile(str(part), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        part.replace(self._folder / f"batch-{number}.arrow")

    def _note(self, number: int, table: Any) -> None:
        rows = sorted(zip(*(table[name].to_pylist() for name in self._columns), strict=True), key=repr)
        note = {
            "batch": number,
            "rows": table.num_rows,
            "hash": hashlib.sha256(repr(rows).encode()).hexdigest(),
            "pid": os.getpid(),
        }
        with (self._folder / "runs.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")
