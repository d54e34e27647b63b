"""Spark in tests: its settings, drivers and daemons in processes of their own."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any
from zipfile import ZipFile

from . import processes, spark_python
from .servers import Daemon
from .spark_ledger import Delivered
from .spark_marks import LIMIT, Marks, poll
from .spark_program import GIVEN
from .spark_python import FORKING

# Settings of the small Sparks that tests run: little memory, loopback only, no UI, quiet, files below one folder.


TESTS = Path(__file__).parents[1]

ROOT = TESTS.parent

LOOPBACK = "127.0.0.1"

_QUIET = TESTS / "support" / "log4j2-quiet.properties"

LOCAL = "local[2]"


SECRET = "open-sesame"
UNREACHABLE = {
    "topic": "t",
    "channel": "c",
    "nsqd_tcp_addresses": "127.0.0.1:1",
    "nsqd_http_addresses": "127.0.0.1:1",
    "nsq.auth_secret": SECRET,
    "nsq.lookupd_authorization_secret": f"Bearer {SECRET}",
}
"""Options of a source whose nsqd is nowhere, and whose secrets nothing may show."""


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
    # Not a file of settings: with one in a folder of its class path a JVM takes no archive of classes.
    conf = " ".join(f"--conf {name}={value}" for name, value in SMALL.items())
    return {"JDK_JAVA_OPTIONS": quick_start(), "PYSPARK_SUBMIT_ARGS": f"{conf} pyspark-shell", **place}


def archive() -> Path:
    return home() / "classes.jsa"


def home() -> Path:
    """The home of this Spark, kept between runs: see ``make_ready``."""
    return ROOT / ".pytest_cache" / f"spark-{version('pyspark')}"


def forked_python() -> Path:
    """What Spark starts as the Python of its workers: see ``spark_python``."""
    return home() / "python3"


SMALL = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",  # of Spark's own 200 each is a task, and a state store, of each micro-batch
    # What each operation on a column would ask the JVM, to name a line of the program in an error.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Compiling Java for a query costs more than these few rows; the benchmark and the report at size do it.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.default.parallelism": "2",
}
"""Of every Spark of the tests; of programs, where they do not say otherwise."""


def quick_checkpoints() -> dict[str, str]:
    """For a Spark that nobody kills: checkpoints whose files Java renames.

    Spark's own way, which is used where one is killed, starts a ``readlink`` for each step of each file: 20 in a
    micro-batch. The package of the other one differs by version.
    """
    pyspark = find_spec("pyspark")
    assert pyspark is not None
    assert pyspark.origin is not None
    (jar,) = Path(pyspark.origin).parent.glob("jars/spark-sql_*.jar")
    with ZipFile(jar) as classes:
        name = next(name for name in classes.namelist() if name.endswith("/FileSystemBasedCheckpointFileManager.class"))
    return {"spark.sql.streaming.checkpointFileManagerClass": name.removesuffix(".class").replace("/", ".")}


def spark_settings(master: str, folder: Path) -> dict[str, str]:
    """The configuration of a session: its files go below ``folder``."""
    settings = {
        **SMALL,
        "spark.master": master,
        "spark.app.name": "nsq_fast tests",
        "spark.driver.memory": "1g",
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.extraJavaOptions": java_options(),
        "spark.local.dir": str(folder / "local"),
        "spark.port.maxRetries": "0",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    return settings if master.startswith("local[") else {**settings, **_executor_settings()}


def _executor_settings() -> dict[str, str]:
    return {
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.executor.extraJavaOptions": java_options(),
        "spark.executorEnv.PYTHONPATH": python_path(),
        "spark.executorEnv.PYSPARK_PYTHON": str(forked_python()),
    }


def python_path() -> str:
    """Where Pythons that Spark starts find nsq_fast and the support of the tests."""
    return os.pathsep.join(filter(None, [str(ROOT), str(TESTS), os.environ.get("PYTHONPATH")]))


def spark_environment() -> dict[str, str]:
    """The environment of a process that starts a Spark."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    python = str(forked_python())
    return {
        **given,
        **quick_environment(),
        "PYTHONPATH": python_path(),
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
        "SPARK_LOCAL_IP": LOOPBACK,
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        # The JVM that makes up Spark's command lives 0.1 s: holding the archive against the jars takes it as long.
        "SPARK_LAUNCHER_OPTS": "-Xshare:off",
    }


# A Spark driver program in a process of its own: told where to stop, killed there with its JVM, and started again.
#
# driver = Driver(PROGRAM, tmp_path, master="local-cluster[2,1,1024]", lookupd=str(broker.lookupd.http)) driver.start()
# driver.marks.wait("claimed") driver.kill() driver.start() driver.wait()
#
# The program is a text, run as a script, so that what it defines travels to the executors by value. See
# ``spark_program`` for what it may use.


BESIDE = """
from support.spark_program import arguments, beside

beside(arguments()["programs"])
"""

"""A program that runs several, beside each other: give it ``programs``, what each ``Program`` is given."""


class Program:
    """One of several programs in one driver; its files go below ``folder``.

    Attributes:
        marks: its own.
        delivered: what it has in ``out``, one of its arguments; ``checkpoint`` is another.
    """

    def __init__(self, text: str, folder: Path, **arguments: Any) -> None:
        self.marks, self.delivered = Marks(folder / "marks"), Delivered(folder / "out")
        paths = {name: str(folder / name) for name in ("out", "checkpoint")}
        self.given = {"program": text, "arguments": {**paths, **arguments}, "marks": str(folder / "marks")}


class Driver(Daemon):
    """One program, any number of times. ``arguments`` are what it is given; paths and addresses as strings.

    Attributes:
        marks: shared with the program and its tasks.
    """

    def __init__(
        self, program: str, folder: Path, master: str = LOCAL, settings: dict[str, str] | None = None, **arguments: Any
    ) -> None:
        self._folder = folder / "driver"
        self.marks = Marks(self._folder / "marks")
        script = self._folder / "program.py"
        script.write_text(program)
        given = {
            "settings": {**spark_settings(master, self._folder), **(settings or {})},
            "arguments": arguments,
            "marks": str(self._folder / "marks"),
        }
        environment = {**spark_environment(), GIVEN: json.dumps(given)}
        super().__init__([sys.executable, str(script)], env=environment, cwd=self._folder, stdin=subprocess.DEVNULL)
        self._sessions: list[int] = []

    def __enter__(self) -> Driver:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        if self.is_running:
            return
        self._log = self._folder / f"log-{len(self._sessions)}.txt"
        super().start()
        self._sessions.append(self.pid)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int:
        """With what the last run ended: negative when it was killed. AssertionError while it runs."""
        assert self._process is not None
        assert not self.is_running
        return self._process.returncode

    def wait(self, timeout: float = LIMIT) -> None:
        """Return when the program has ended well. Raises AssertionError with its log otherwise."""
        assert self._process is not None
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the program still runs after {timeout} s\n{self.log()}") from None
        assert status == 0, f"the program ended with {status}\n{self.log()}"

    def wait_mark(self, name: str, count: int = 1, timeout: float = LIMIT, marks: Marks | None = None) -> None:
        """Return once a mark was left so often. Raises AssertionError when the program ends before."""
        (marks or self.marks).wait(name, count, timeout, alive=self._must_run)

    def wait_said(self, what: str, count: int = 1, timeout: float = LIMIT) -> dict[str, Any]:
        """What this run of the program said, once it has said it so often. AssertionError when it ends before."""

        def heard() -> list[dict[str, Any]]:
            alive = self.is_running
            found = self.said(what)
            assert alive or len(found) >= count, f"the program has ended\n{self.log()}"
            return found[count - 1 :]

        return poll(heard, timeout, f"{what} said")[0]

    def said(self, what: str) -> list[dict[str, Any]]:
        """What this run of the program said of ``what`` so far."""
        mark = f"said {what}"
        told = zip(self.marks.pids(mark), self.marks.details(mark), strict=False)  # more may come in between
        return [json.loads(facts) for pid, facts in told if pid == self.pid]

    def kill(self) -> None:
        for session in self._sessions:
            processes.kill_session(session)
        self._reap()

    def kill_driver(self) -> None:
        """SIGKILL the program and its JVM only: executors and workers find out by themselves."""
        assert self._process is not None
        jvms = [each.pid for each in self._living() if "org.apache.spark.deploy.SparkSubmit" in each.command]
        for pid in (self._process.pid, *jvms):
            processes.kill(pid)
        self._reap()

    def executors(self) -> list[int]:
        """The JVMs of the executors of a local cluster."""
        return [each.pid for each in self._living() if "CoarseGrainedExecutorBackend" in each.command]

    def workers(self) -> list[int]:
        """Spark's daemons, each by the process that stands for it, and the workers that they have forked."""
        living = self._living()
        forked = {each.pid: each.parent for each in living if f" {FORKING} " in each.command}
        daemons = [each.pid for each in living if "pyspark.daemon" in each.command]
        return daemons + [pid for pid, parent in forked.items() if forked.get(parent) in forked]

    def log(self, lines: int | None = 60) -> str:
        """What this run wrote, or the end of it, then without the calls in the JVM that led to an error."""
        text = self._log.read_text(errors="replace").splitlines()
        if lines is not None:
            text = [line for line in text if not line.startswith("\tat ")][-lines:]
        return "\n".join(text)

    def close(self) -> None:
        self.kill()

    def _must_run(self) -> None:
        assert self.is_running, f"the program has ended\n{self.log()}"

    def _living(self) -> list[processes.Process]:
        return [each for session in self._sessions for each in processes.of_session(session)]

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait()


# Daemons of Spark as child processes: a standalone master with its workers, and a Spark Connect server.
#
# They listen on loopback, on ports that they choose themselves and tell in their logs.


START_TIMEOUT = 120.0

_DEPLOY = "org.apache.spark.deploy"


class _Jvm(Daemon):
    """One JVM, whose children end with it."""

    def __init__(self, command: list[str], log: Path, memory: str) -> None:
        environment = {**spark_environment(), "SPARK_NO_DAEMONIZE": "1", "SPARK_DAEMON_MEMORY": memory}
        environment["SPARK_DAEMON_JAVA_OPTS"] = java_options("info")
        super().__init__([str(home() / "bin" / "spark-class"), *command], log, env=environment, cwd=log.parent)

    def kill(self) -> None:
        processes.kill_session(self.pid)
        super().kill()


@contextmanager
def _jvms(folder: Path) -> Iterator[Callable[..., str]]:
    """What starts JVMs; it returns when the log of one matches ``ready``, with the first group of that."""
    with ExitStack() as stack:

        def run(command: list[str], ready: str, name: str, memory: str = "256m") -> str:
            log = folder / f"{name}.log"
            jvm = _Jvm(command, log, memory)
            jvm.start()
            stack.callback(jvm.kill)
            found = poll(lambda: jvm.check() or re.search(ready, log.read_text()), START_TIMEOUT, f"{name} ready")
            assert found is not None
            return found[1]

        yield run


@contextmanager
def standalone_cluster(folder: Path, workers: int = 2) -> Iterator[str]:
    """A master and its workers, one core each, each on a host of its own: Spark speculates on another host only.

    Gives the URL of the master, for ``spark.master``.
    """
    with _jvms(folder) as run:
        command = [f"{_DEPLOY}.master.Master", *_listen(LOOPBACK)]
        url = run(command, r"Starting Spark master at (spark://\S+)", "master")
        for number in range(workers):
            size = ["--cores", "1", "--memory", "640m", "--work-dir", str(folder / f"work{number}")]
            command = [f"{_DEPLOY}.worker.Worker", *_listen(f"127.0.0.{1 + number}"), *size, url]
            run(command, r"(Successfully registered with master)", f"worker{number}")
        yield url


def _listen(host: str) -> list[str]:
    return ["--host", host, "--port", "0", "--webui-port", "0"]


@contextmanager
def connect_server(folder: Path, master: str) -> Iterator[str]:
    """A Spark Connect server. Gives its URL, for ``SparkSession.builder.remote``."""
    settings = {**spark_settings(master, folder), "spark.connect.grpc.binding.address": LOOPBACK}
    settings |= {"spark.connect.grpc.binding.port": "0", "spark.driver.extraJavaOptions": java_options("info")}
    settings["spark.pyspark.python"] = str(forked_python())
    flags = [flag for name, value in settings.items() for flag in ("--conf", f"{name}={value}")]
    server = "org.apache.spark.sql.connect.service.SparkConnectServer"
    with _jvms(folder) as run:
        command = [f"{_DEPLOY}.SparkSubmit", *flags, "--class", server, "spark-internal"]
        port = run(command, r"Spark Connect server started at: .*:(\d+)", "connect", "1g")
        yield f"sc://{LOOPBACK}:{port}"


# A Spark of the tests starts quickly: a home with compiled modules, an archive of classes, names looked up once.


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
    if (target / "bin").resolve() == (installed / "bin").resolve() and forked_python().exists():
        return
    shutil.rmtree(target, ignore_errors=True)
    for zipped in (installed / "python" / "lib").glob("*.zip"):
        (target / "python" / "lib" / zipped.name).mkdir(parents=True)  # Spark looks whether it exists
    forked_python().write_text(f'#!/bin/sh\nexec {sys.executable} -P -S -E {spark_python.__file__} "$@"\n')
    forked_python().chmod(0o755)
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
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            # The JVM writes the archive after the program has ended; it holds the pipe until it has.
            process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            processes.kill_session(process.pid)  # the JVM, too, which may be in the middle of writing
            return
    if process.returncode == 0 and unfinished.exists():
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
