"""docs/guarantees.md names the tests that show each promise: they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "guarantees.md").read_text()
NAMED = sorted(set(re.findall(r"`(test_\w+)::(\w+)`", PAGE)))


def functions(module: str) -> set[str]:
    """The names of the functions of a test module, wherever it stands."""
    (path,) = TESTS.rglob(f"{module}.py")
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("module", sorted({module for module, _ in NAMED}))
def test_every_test_that_is_named_exists(module: str) -> None:
    assert {name for where, name in NAMED if where == module} - functions(module) == set()


def test_every_promise_names_what_shows_it() -> None:
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        is_promise = line.startswith("|") and cells[-1] not in ("", "shown by", "-") and not set(line) <= set("|-")
        if is_promise and "tested by" not in line:
            assert re.search(r"`test_\w+::\w+`", cells[-1]), line
    assert len(NAMED) > 60


def test_the_readme_leads_here() -> None:
    assert "(docs/guarantees.md)" in (TESTS.parent / "README.md").read_text()
