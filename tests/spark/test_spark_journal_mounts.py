"""A journal on a file system that driver and executors share: each process sees it through a mount of its own.

Here the mounts are two paths of one folder. ``NSQ_FAST_TEST_MOUNTS=/mnt/a:/mnt/b`` names two mounts of a network file
system in their place.
"""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.journal import Query, Server
from support.spark_ledger import account
from support.spark_settings import python_path
from support.waiting import WAIT

from nsq_fast.errors import JournalClosed, JournalError, JournalTaken

ROWS = 6_000
pytestmark = pytest.mark.parametrize("server", ["ours"], indirect=True)


class Mounts(NamedTuple):
    """Two paths of one folder: where the driver sees it, and where executors do."""

    driver: Path
    executor: Path

    def seen_by_executor(self, task: Any) -> Any:
        """A task, with its paths as an executor with the other mount has them."""
        moved = copy.copy(task)
        moved.path = task.path.replace(str(self.driver), str(self.executor), 1)
        moved.suspects = task.suspects.replace(str(self.driver), str(self.executor), 1)
        assert moved.path != task.path
        return moved


@pytest.fixture
def mounts(tmp_path: Path) -> Mounts:
    if given := os.environ.get("NSQ_FAST_TEST_MOUNTS"):
        name = uuid.uuid4().hex
        first, second = (Path(path) / name for path in given.split(":"))
        first.mkdir()
        return Mounts(first, second)
    (tmp_path / "shared").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "shared")
    return Mounts(tmp_path / "shared", tmp_path / "other")


@pytest.fixture
def query(server: Server, mounts: Mounts) -> Query:
    return Query(mounts.driver / "journal", {**server.options, "nsq.msg_timeout": "2"})


# An attempt in a process of its own, which stands where it is told to, and goes on when a line comes.
ATTEMPT = """
import pickle, sys
from nsq_fast.spark.journal.collect import Collector

class Standing(Collector):
    connections, group = 2, 1

    def claim(self, index, head, columns):
        self.stand(f"before claim {index}")
        stored = super().claim(index, head, columns)
        self.stand(f"after claim {index}")
        return stored

    def stand(self, place):
        if place == sys.argv[2]:
            print(place, flush=True)
            sys.stdin.readline()

with open(sys.argv[1], "rb") as file:
    task = pickle.load(file)
try:
    Standing(task).run()
except Exception as error:
    print(type(error).__name__, flush=True)
"""


class Attempt:
    """One attempt at a task that stands at ``place``."""

    def __init__(self, task: Any, place: str, folder: Path) -> None:
        path = folder / f"{uuid.uuid4().hex}.task"
        path.write_bytes(pickle.dumps(task))
        self._process = subprocess.Popen(
            [sys.executable, "-c", ATTEMPT, str(path), place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == place

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def go_on(self) -> str:
        """Let it; what it said at its end."""
        said, _ = self._process.communicate("go\n", timeout=WAIT)
        return said.strip()


@pytest.mark.parametrize("place", ["before claim 0", "after claim 0", "before claim 1", "after claim 1"])
def test_an_executor_that_is_killed_loses_and_doubles_nothing(
    server: Server, query: Query, mounts: Mounts, tmp_path: Path, place: str
) -> None:
    bodies = server.publish(ROWS)
    query.plan()
    (task,) = query.tasks()
    Attempt(mounts.seen_by_executor(task), place, tmp_path).kill()
    query.done(query.run_task(task))
    query.drain(server)
    account(bodies, query.rows).check()


@pytest.mark.parametrize("is_committed", [False, True])
def test_of_two_attempts_through_two_mounts_one_is_kept(
    server: Server, query: Query, mounts: Mounts, tmp_path: Path, is_committed: bool
) -> None:
    """The other one has finished its work, or Spark has committed it, when the first wakes up."""
    bodies = server.publish(2_000)
    query.plan()
    (task,) = query.tasks()
    task.rows = 1_000
    first = Attempt(mounts.seen_by_executor(task), "before claim 0", tmp_path)
    rows = query.run_task(task)
    if is_committed:
        query.done(rows)
        assert first.go_on() == JournalClosed.__name__
    else:
        assert first.go_on() == JournalTaken.__name__
        assert query.run_task(mounts.seen_by_executor(task)) == rows
        query.done(rows)
    query.drain(server)
    account(bodies, query.rows).check()


def test_a_driver_on_another_machine_goes_on(server: Server, query: Query, mounts: Mounts) -> None:
    bodies = server.publish(ROWS)
    query.plan()
    (task,) = query.tasks()
    rows = query.run_task(mounts.seen_by_executor(task))
    query.move(mounts.executor / "journal")
    assert query.run() == rows
    query.done(rows)
    query.drain(server)
    account(bodies, query.rows).check()


def test_an_executor_that_has_another_file_system_there_says_so(
    server: Server, query: Query, mounts: Mounts, tmp_path: Path
) -> None:
    server.publish(10)
    query.plan()
    (task,) = query.tasks()
    task.path = task.path.replace(str(mounts.driver), str(tmp_path / "local"), 1)
    with pytest.raises(JournalError, match="not on a file system that the driver and all executors share"):
        query.run_task(task)
    server.wait_depth(10, 0, 0)
