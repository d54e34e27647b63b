"""What contributors rely on: tools of one version, a CI row for each Python, and tests that wait for what they test."""

from __future__ import annotations

import os
import re
from pathlib import Path

from support import compiled

ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_what_make_check_runs_is_pinned() -> None:
    found = re.search(r"^check = \[(.*?)^\]", PYPROJECT, re.S | re.M)
    assert found is not None
    tools = re.findall(r'"([^"]+)"', found[1])
    assert tools
    assert [tool for tool in tools if "==" not in tool] == []


def test_ci_runs_all_tests_on_each_python_and_fails_where_servers_are_missing() -> None:
    for python in re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT):
        assert re.search(rf'^        python: \[.*"{re.escape(python)}".*\]$', WORKFLOW, re.M)
        assert re.search(rf'python: "{re.escape(python)}",.*make: test', WORKFLOW)
    servers = (ROOT / ".github" / "actions" / "original-servers" / "action.yml").read_text()
    assert "docker cp nsq:/usr/local/bin/nsqd" in servers
    assert "NSQ_FAST_REQUIRED=original" in servers
    assert WORKFLOW.count("- uses: ./.github/actions/original-servers\n") == 2  # all tests, and those of Spark


def test_ci_runs_all_tests_of_spark_with_older_versions() -> None:
    oldest = re.search(r'^spark = \["pyspark\[sql\]>=(4\.\d+)"', PYPROJECT, re.M)
    assert oldest is not None
    assert re.findall(r'{pyspark: "(.*?)"', WORKFLOW) == [oldest[1], "4.1", "4.2"]
    assert re.search(r"- run: python -m pytest .* tests/spark$", WORKFLOW, re.M)


def test_a_run_says_which_compiled_core_it_loads_and_when_that_is_too_old(tmp_path: Path) -> None:
    assert compiled.header()[0].startswith("compiled core: _codec")
    binary, source = tmp_path / "_codec.so", tmp_path / "_codec.pyx"
    for number, each in enumerate((source, binary)):
        each.touch()
        os.utime(each, (1000 + number, 1000 + number))
    assert compiled.newer_than([binary], [source]) == []
    os.utime(source, (2000, 2000))
    assert compiled.newer_than([binary], [source]) == ["_codec.pyx"]


SLEEP = re.compile(r"(?<!\"time\.)\bsleep\((?!0\))")
FIXED_PORT = re.compile(r"(bind|create_server|listen|StreamServer)\(\(?\(\"[\w.:]*\", [1-9]")


def test_a_sleep_says_why_it_is_the_subject_and_no_port_is_fixed() -> None:
    """Whoever waits for something asks whether it is there: ``until``, ``holds``, an event (support/waiting.py).

    In virtual time, as in tests/sim, to sleep is to wait for nothing.
    """
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.parent.name != "chaos" or path.name.startswith("test_")  # the soak is a program that works and waits
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (SLEEP.search(line) and "# sleep: " not in line and path.parent.name != "sim") or FIXED_PORT.search(line)
        if path != Path(__file__)
    ]
    assert lines == []
