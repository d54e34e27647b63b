"""`nsq-fast trace-report` in the process of the tests, with their session."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result
from support import trace_logs
from support.spark_settings import LOCAL
from support.trace_command import run

from nsq_fast.cli import main

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Compiling Java for a query costs more than so few rows; the report at size and the demo do it.
WITHOUT_CODE = [f"--conf=spark.sql.codegen.{name}" for name in ("wholeStage=false", "factoryMode=NO_CODEGEN")]


@pytest.fixture
def report_here(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command in this process, with the session of all tests: starting one takes longer than so small a report."""
    monkeypatch.setattr(type(spark), "stop", lambda session: None)
    return lambda *given: CliRunner().invoke(main, ["trace-report", "--master", LOCAL, *map(str, given)])


def test_a_report_on_logs_and_again_on_its_tables(
    java: None, tmp_path: Path, report_here: Callable[..., Result]
) -> None:
    log = trace_logs.good_log()
    planted = trace_logs.plant(log)
    trace_logs.write_logs(trace_logs.records_of(log), tmp_path / "logs")
    small = ("--memory", "512m", "--master", "local[2]", *WITHOUT_CODE)
    first = run("trace-report", tmp_path / "logs", "--tables", tmp_path / "tables", "--json", *small)
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout)
    assert (found["lost"], found["duplicates"], found["violations"]) == (
        len(planted.lost),
        len(planted.duplicates),
        len(planted.violations),
    )
    again = report_here("--tables", tmp_path / "tables", "--html", tmp_path / "report.html")
    assert again.exit_code == 0, again.output
    assert f"{len(planted.lost):,} │ published, never finished" in again.output
    assert "NSQ traces" in (tmp_path / "report.html").read_text()


def test_logs_in_which_nothing_was_traced(tmp_path: Path, report_here: Callable[..., Result]) -> None:
    log = tmp_path / "some.log"
    log.write_text("INFO started\n")
    done = report_here(log, "--json")
    assert done.exit_code == 2
    assert "nothing was traced" in done.output
    assert isinstance(done.exception, SystemExit)  # and not a traceback
