"""What tests ask of the sources, and of what was compiled of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from nsq_fast import _codec, _frame

# The compiled modules: their names, and whether those that a run loads are what the sources say (head of each run).


NAMES = (
    "_client",
    "_codec",
    "_dispatch",
    "_frame",
    "_publish_path",
    "_snappy_chunks",
)

"""All of them, as setup.py builds them; tests/test_packaging.py compares a wheel with it."""

BUILT_TWICE = ("_codec", "_frame")

"""Those that each interpreter of a process has for itself."""

SOURCES = ("*.pyx", "*.pxd", "*.pxi")


def header() -> list[str]:
    """What pytest prints: the compiled core, and a warning when its sources have changed since."""
    binaries = [Path(module.__file__) for module in (_codec, _frame)]
    folder = binaries[0].parent
    line = f"compiled core: {', '.join(each.name for each in binaries)}"
    changed = newer_than(binaries, (each for pattern in SOURCES for each in folder.glob(pattern)))
    if not changed:
        return [line]
    return [line, f"WARNING: older than {', '.join(changed)}: `make build` compiles them"]


def newer_than(binaries: Iterable[Path], sources: Iterable[Path]) -> list[str]:
    """Names of the sources that have changed since the oldest of the binaries was made."""
    oldest = min(each.stat().st_mtime for each in binaries)
    return sorted(each.name for each in sources if each.stat().st_mtime > oldest)


# The sources of the package as syntax trees, for tests that hold its structure.


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file. Not to be changed: it is parsed once for all who ask."""
    return ast.parse(path.read_text())
