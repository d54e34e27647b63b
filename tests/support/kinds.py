"""Kinds of tests, as markers: what a folder or a fixture makes of a test, so that no test has to say it."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
OF_FOLDER = {"cli": ("cli",), "spark": ("spark",), "servers": ("kill",), "soak": ("kill",)}
OF_MODULE = {"test_runtime_fork": ("fork",), "test_runtime_flat": ("flat",), "test_spark_replay_kills": ("kill",)}
REAL_FIXTURES = {"real_nsqd", "real_lookupd", "real_fleet", "standalone_nsqd"}
REAL_PARAMETERS = {"original", "real"}  # of fixtures that have the same test run on embedded servers, too


def mark(item: pytest.Item) -> None:
    """Add the markers that follow from where a test stands and from what it uses."""
    folder = item.path.relative_to(TESTS).parts[0]
    for name in (*OF_FOLDER.get(folder, ()), *OF_MODULE.get(item.path.stem, ())):
        item.add_marker(name)
    if _needs_real_server(item):
        item.add_marker("real")


def _needs_real_server(item: pytest.Item) -> bool:
    if REAL_FIXTURES.intersection(getattr(item, "fixturenames", ())):
        return True
    callspec = getattr(item, "callspec", None)
    return callspec is not None and any(
        isinstance(value, str) and value in REAL_PARAMETERS for value in callspec.params.values()
    )
