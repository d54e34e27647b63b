"""What contributors rely on: tools of one version, a CI row for each Python, commit messages that say why."""

from __future__ import annotations

import importlib.util
import os
import re
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
from support import compiled

ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
SERVERS = (ROOT / ".github" / "actions" / "original-servers" / "action.yml").read_text()
PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)


def test_what_make_check_runs_is_pinned() -> None:
    found = re.search(r"^check = \[(.*?)^\]", PYPROJECT, re.S | re.M)
    assert found is not None
    tools = re.findall(r'"([^"]+)"', found[1])
    assert tools
    assert [tool for tool in tools if "==" not in tool] == []


@pytest.mark.parametrize("python", PYTHONS)
def test_ci_runs_the_inner_loop_and_everything_on_each_python(python: str) -> None:
    quick = re.search(r"^        python: \[(.*)\]$", WORKFLOW, re.M)
    assert quick is not None
    assert f'"{python}"' in quick[1]
    assert re.search(rf'python: "{re.escape(python)}",.*make: test', WORKFLOW)


def test_ci_fails_where_the_original_servers_are_missing() -> None:
    assert "docker cp nsq:/usr/local/bin/nsqd" in SERVERS
    assert "NSQ_FAST_REQUIRED=original" in SERVERS
    assert WORKFLOW.count("- uses: ./.github/actions/original-servers\n") == 2  # all tests, and those of Spark


def test_ci_runs_all_tests_of_spark_with_older_versions() -> None:
    oldest = re.search(r'^spark = \["pyspark\[sql\]>=(4\.\d+)"', PYPROJECT, re.M)
    assert oldest is not None
    assert re.findall(r'{pyspark: "(.*?)"', WORKFLOW) == [oldest[1], "4.1", "4.2"]
    assert re.search(r"- run: python -m pytest .* tests/spark$", WORKFLOW, re.M)


@pytest.fixture(scope="module")
def checker() -> Any:
    path = ROOT / ".ci" / "commit-message"
    loader = SourceFileLoader("commit_message", str(path))
    spec = importlib.util.spec_from_loader("commit_message", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "message",
    [
        "Cut a message off at 72 characters\n\nThe rest is not shown.\n",
        "# a comment of git\nCut it off\n\nThe rest is not shown.\n# another\n",
        "x" * 72 + "\n\nWhy.\n",
        "Merge branch 'main'\n",
        "Revert it\n",
    ],
)
def test_a_commit_message_that_is_taken(checker: Any, message: str) -> None:
    assert checker.faults(message) == []


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("x" * 73 + "\n\nWhy.\n", "73 characters"),
        ("Cut it off.\n\nWhy.\n", "full stop"),
        ("Cut it off\nwithout an empty line\n", "second line"),
        ("Cut it off\n", "no body"),
        ("Cut it off\n\n# a comment\n", "no body"),
    ],
)
def test_a_commit_message_that_is_refused(checker: Any, message: str, fault: str) -> None:
    assert any(fault in each for each in checker.faults(message))


def test_a_run_says_which_compiled_core_it_loads_and_when_that_is_too_old(tmp_path: Path) -> None:
    assert compiled.header()[0].startswith("compiled core: _codec")
    binary, source = tmp_path / "_codec.so", tmp_path / "_codec.pyx"
    for number, each in enumerate((source, binary)):
        each.touch()
        os.utime(each, (1000 + number, 1000 + number))
    assert compiled.newer_than([binary], [source]) == []
    os.utime(source, (2000, 2000))
    assert compiled.newer_than([binary], [source]) == ["_codec.pyx"]


FIXTURE = re.compile(r"^@pytest\.fixture.*\n(?:@.*\n)*def (\w+)\(", re.M)


@pytest.mark.parametrize("name", ["nsqd", "consume"])
def test_a_fixture_that_many_tests_use_stands_once(name: str) -> None:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    assert len([path for path in paths if name in FIXTURE.findall(path.read_text())]) == 1


SLEEP = re.compile(r"(?<!\"time\.)\bsleep\((?!0\))")


def test_a_sleep_says_why_it_is_the_subject() -> None:
    """Whoever waits for something asks whether it is there: ``until``, ``holds``, an event (support/waiting.py).

    In virtual time, as in tests/sim, to sleep is to wait for nothing.
    """
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.parent.name != "chaos" or path.name.startswith("test_")  # the soak is a program that works and waits
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if SLEEP.search(line) and "# sleep: " not in line and path != Path(__file__) and path.parent.name != "sim"
    ]
    assert lines == []
