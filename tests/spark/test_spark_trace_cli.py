"""`nsq-fast trace-report`, and the end of `nsq-fast demo`: those that need no session of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.spark_marks import LIMIT
from support.spark_settings import quick_environment
from support.trace_command import run

from nsq_fast.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give at least one LOG"),
        (["x.log"], "say what to write"),
        (["x.log", "--html", "x.html", "--window", "soon"], "not a duration"),
        (["x.log", "--html", "x.html", "--window", "0"], "window=0.0"),
        (["x.log", "--html", "x.html", "--conf", "spark.ui.port"], "not name=value"),
        (["{missing}.log", "--html", "x.html"], "names no file"),
        (["{missing}.log", "--html", "x.html", "--local"], "names no file"),
        (["x.log", "--tables", "t", "--local"], "--tables is for Spark"),
        (["x.log", "--json", "--local", "--conf", "a=b"], "--conf is for Spark"),
    ],
)
def test_wrong_arguments_are_said_in_a_line(java: None, arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["trace-report", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr
    assert isinstance(done.exception, SystemExit)  # and not a traceback


def test_wrong_arguments_are_said_by_a_process_without_a_traceback(java: None) -> None:
    done = run("trace-report", "{missing}.log", "--html", "x.html")
    assert done.returncode == 2
    assert "names no file" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_program_that_measures_finds_what_it_planted(java: None, tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "bench" / "spark_trace.py"
    arguments = ["--records", "40000", "--memory", "512m", "--partitions", "2", "--folder", tmp_path]
    command = [sys.executable, program, *arguments, "--json", tmp_path / "figures.json"]
    given = {"SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(program.parents[1])}
    env = {**os.environ, **quick_environment(), **given}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "figures.json").read_text())["found"]
    assert found == {"lost": 1, "duplicates": 1, "violations": 1, "skews": 0}


OLD_JAVA = "#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n"


@pytest.mark.parametrize(
    ("file", "text", "variable", "arguments", "told"),
    [
        ("none", "", "PATH", (), ("apt-get install openjdk-17-jre-headless", "Or report without Spark: --local")),
        ("bin/java", OLD_JAVA, "JAVA_HOME", (), ("newer Java than 8",)),
        ("pyspark.py", "raise ImportError('no pyspark')\n", "PYTHONPATH", (), ("pip install 'nsq-fast[spark]'",)),
        (
            "duckdb.py",
            "raise ModuleNotFoundError('no duckdb', name='duckdb')\n",
            "PYTHONPATH",
            ("--local",),
            ("pip install 'nsq-fast[trace]'",),
        ),
    ],
    ids=["no Java", "old Java", "no PySpark", "no DuckDB"],
)
def test_what_is_missing_is_said_with_how_to_get_it(
    tmp_path: Path, file: str, text: str, variable: str, arguments: tuple[str, ...], told: tuple[str, ...]
) -> None:
    log = tmp_path / "some.log"
    log.write_text("INFO started\n")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    (tmp_path / file).chmod(0o755)
    done = run("trace-report", log, "--json", *arguments, **{"JAVA_HOME": "", variable: str(tmp_path)})
    assert done.returncode == 1
    for words in told:
        assert words in done.stderr


def test_the_demo_ends_with_a_report_on_its_own_traces(java: None, tmp_path: Path) -> None:
    page = tmp_path / "traces.html"
    done = run("demo", "--messages", "2000", "--ordered-messages", "1000", "--trace-html", page, "--json")
    assert done.returncode == 0, done.stderr
    assert "Spark reports on them" in done.stderr  # it takes long, and nothing else is said meanwhile
    found = json.loads(done.stdout)["traces"]
    assert (found["finished"], found["lost"], found["violations"]) == (1000, 0, 0)
    assert "NSQ traces" in page.read_text()


def test_the_demo_says_in_a_line_why_there_is_no_report(tmp_path: Path) -> None:
    done = run("demo", "--messages", "1000", "--ordered-messages", "200", PATH=str(tmp_path), JAVA_HOME="")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "no trace report" in line]
    assert "Java" in line
