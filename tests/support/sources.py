"""The sources of the package as syntax trees, for tests that hold its structure."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file. Not to be changed: it is parsed once for all who ask."""
    return ast.parse(path.read_text())
