"""A journal on a file system that driver and executors share: each process sees it through a mount of its own.

Here the mounts are two paths of one folder. ``NSQ_FAST_TEST_MOUNTS=/mnt/a:/mnt/b`` names two mounts of a network file
system in their place.
"""

from __future__ import annotations

import copy
import os
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.journal import Query, Server, check_killed_attempt, check_late_attempt
from support.spark_ledger import account

from nsq_fast.errors import JournalError

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


@pytest.mark.parametrize("place", ["before claim 0", "after claim 0", "before claim 1", "after claim 1"])
def test_an_executor_that_is_killed_loses_and_doubles_nothing(
    server: Server, query: Query, mounts: Mounts, tmp_path: Path, place: str
) -> None:
    check_killed_attempt(server, query, mounts.seen_by_executor, place, tmp_path)


@pytest.mark.parametrize("is_committed", [False, True])
def test_of_two_attempts_through_two_mounts_one_is_kept(
    server: Server, query: Query, mounts: Mounts, tmp_path: Path, is_committed: bool
) -> None:
    check_late_attempt(server, query, mounts.seen_by_executor, is_committed, tmp_path)


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
