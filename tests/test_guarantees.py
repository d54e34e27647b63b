"""Pages that name the tests which show what they say: docs/guarantees.md, docs/reliability.md, THREAT_MODEL.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PAGES = {name: (ROOT / name).read_text() for name in ("docs/guarantees.md", "docs/reliability.md", "THREAT_MODEL.md")}
NAMED = {name: sorted(set(re.findall(r"`(test_\w+)::(\w+)`", page))) for name, page in PAGES.items()}


def functions(module: str) -> set[str]:
    """The names of the functions of a test module, wherever it stands."""
    (path,) = TESTS.rglob(f"{module}.py")
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("module", sorted({module for named in NAMED.values() for module, _ in named}))
def test_every_test_that_is_named_exists(module: str) -> None:
    names = {name for named in NAMED.values() for where, name in named if where == module}
    assert names - functions(module) == set()


@pytest.mark.parametrize(
    ("page", "least"), [("docs/guarantees.md", 60), ("docs/reliability.md", 10), ("THREAT_MODEL.md", 50)]
)
def test_every_promise_names_what_shows_it(page: str, least: int) -> None:
    assert len(NAMED[page]) > least
    for line in PAGES[page].splitlines() if page != "docs/reliability.md" else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        is_promise = line.startswith("|") and cells[-1] not in ("", "shown by", "-") and not set(line) <= set("|-")
        if is_promise and "tested by" not in line:
            assert re.search(r"`test_\w+::\w+`", cells[-1]), line


def test_the_readme_leads_here() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page for page in PAGES if f"({page})" not in readme] == []
