"""Registering the format where Spark starts its workers with another Python than the driver's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import nsq_fast.spark
from nsq_fast.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Python = Callable[[str], str]
ADVICE = f"set PYSPARK_PYTHON={sys.executable} in the environment before the session is made"


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Another Python: a shell script that starts this one."""

    def make(line: str) -> str:
        path = tmp_path / "python3"
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
        return str(path)

    return make


class Session:
    """A session, of which only the Python of its workers matters."""

    def __init__(self, python: str | None) -> None:
        self.registered: list[Any] = []
        self.dataSource = SimpleNamespace(register=self.registered.append)
        if python is not None:
            self._sc = SimpleNamespace(pythonExec=python)


NO_PACKAGES = f'exec {sys.executable} -I -S "$@"'
OLD = f"""exec {sys.executable} -c 'import sys; sys.version_info = (3, 8, 0); exec(sys.argv[1])' "$2" """


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (NO_PACKAGES, "has no nsq_fast"),
        (OLD, f"is Python 3.8, and the driver {sys.version_info[0]}.{sys.version_info[1]}"),
        ("exit 3", "ends with status 3, and says nothing"),
        ("kill -9 $$", "ends with status -9, and says nothing"),
    ],
)
def test_a_python_that_cannot_run_the_source_is_refused(python: Python, line: str, reason: str) -> None:
    session = Session(python(line))
    with pytest.raises(ConfigError) as refused:
        nsq_fast.spark.register(session)
    assert reason in str(refused.value)
    assert ADVICE in str(refused.value)
    assert "\n" not in str(refused.value)
    assert session.registered == []


def test_a_python_without_something_that_nsq_fast_depends_on_is_refused(python: Python, tmp_path: Path) -> None:
    (tmp_path / "gevent.py").write_text("raise ModuleNotFoundError('no gevent', name='gevent')\n")
    paths = ":".join(filter(None, [str(tmp_path), *sys.path]))
    with pytest.raises(ConfigError, match=r"has no gevent: set PYSPARK_PYTHON=.*, or install nsq-fast\[spark\] there"):
        nsq_fast.spark.register(Session(python(f'PYTHONPATH={paths} exec {sys.executable} "$@"')))


def test_a_python_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"python9, cannot be started \(.*No such file"):
        nsq_fast.spark.register(Session(str(tmp_path / "python9")))


def test_another_python_that_can_run_it_is_taken(python: Python) -> None:
    paths = ":".join(filter(None, sys.path))
    for found in (python(f'PYTHONPATH={paths} exec {sys.executable} "$@"'), sys.executable, None):
        session = Session(found)
        nsq_fast.spark.register(session)
        assert session.registered == [nsq_fast.spark.NsqDataSource]


def test_a_real_session_is_refused_in_a_line(
    spark: SparkSession, python: Python, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", python(NO_PACKAGES))
    with pytest.raises(ConfigError, match="has no nsq_fast"):
        nsq_fast.spark.register(spark)
