"""A Spark driver program in a process of its own: told where to stop, killed there with its JVM, and started again.

    driver = Driver(PROGRAM, tmp_path, master=LOCAL_CLUSTER, lookupd=str(broker.lookupd.http))
    driver.start()
    driver.marks.wait("claimed")
    driver.kill()
    driver.start()
    driver.wait()

The program is a text, run as a script, so that what it defines travels to the
executors by value. See ``spark_program`` for what it may use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from . import processes
from .spark_marks import LIMIT, Marks, poll
from .spark_program import GIVEN, SAID
from .spark_settings import LOCAL, spark_environment, spark_settings

BESIDE = """
from support.spark_program import arguments, beside

beside(arguments()["programs"])
"""
"""A program that runs several, beside each other: give it ``programs``, what each ``Program`` is given."""


class Program:
    """One of several programs in one driver; ``marks`` are its own, in a folder of its own."""

    def __init__(self, text: str, folder: Path, **arguments: Any) -> None:
        self.marks = Marks(folder / "marks")
        self.given = {"program": text, "arguments": arguments, "marks": str(folder / "marks")}


class Driver:
    """One program, any number of times. ``arguments`` are what it is given; paths and addresses as strings.

    Attributes:
        marks: shared with the program and its tasks.
    """

    def __init__(
        self, program: str, folder: Path, master: str = LOCAL, settings: dict[str, str] | None = None, **arguments: Any
    ) -> None:
        self._folder = folder / "driver"
        self.marks = Marks(self._folder / "marks")
        self._script = self._folder / "program.py"
        self._script.write_text(program)
        given = {
            "settings": {**spark_settings(master, self._folder), **(settings or {})},
            "arguments": arguments,
            "marks": str(self._folder / "marks"),
        }
        self._environment = {**spark_environment(), GIVEN: json.dumps(given)}
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: list[int] = []
        self._runs = 0

    def __enter__(self) -> Driver:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Start the program; without effect while it runs."""
        if self.is_running:
            return
        self._runs += 1
        with self._path("out").open("wb") as out, self._path("log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(self._script)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env=self._environment,
                cwd=self._folder,
                start_new_session=True,
            )
        self._sessions.append(self._process.pid)

    @property
    def is_running(self) -> bool:
        """Whether the driver's Python lives."""
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
        lines = self._path("out").read_text().split("\n")[:-1]
        facts = [json.loads(line.removeprefix(SAID)) for line in lines if line.startswith(SAID)]
        return [fact for fact in facts if fact["what"] == what]

    def kill(self) -> None:
        """SIGKILL the program, its JVM, its executors and their workers; return when all are gone."""
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
        """The Python workers of the tasks, and the daemons that fork them."""
        return [each.pid for each in self._living() if "pyspark.daemon" in each.command]

    def log(self, lines: int | None = 60) -> str:
        """The end of what this run wrote to stderr."""
        text = self._path("log").read_text(errors="replace").splitlines()
        return "\n".join(text if lines is None else text[-lines:])

    def close(self) -> None:
        """Nothing of it is left."""
        self.kill()

    def _must_run(self) -> None:
        assert self.is_running, f"the program has ended\n{self.log()}"

    def _living(self) -> list[processes.Process]:
        return [each for session in self._sessions for each in processes.of_session(session)]

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait()

    def _path(self, kind: str) -> Path:
        return self._folder / f"{kind}-{self._runs}{os.extsep}txt"
