"""What contributors rely on: tools of one version, a CI row for each Python, commit messages that say why."""

from __future__ import annotations

import importlib.util
import re
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
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
    assert "docker cp nsq:/usr/local/bin/nsqd" in WORKFLOW
    assert "NSQ_FAST_REQUIRED=original" in WORKFLOW


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
