"""Kinds of tests, as markers: what a folder or a fixture makes of a test, so that no test has to say it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
OF_FOLDER = {"cli": ("cli",), "spark": ("spark",), "servers": ("kill",), "chaos": ("kill",)}
OF_MODULE = {
    "test_cookbook": ("slow",),  # each of its programs is a process or several
    "test_sim_fleet": ("slow",),  # its questions are small, and take seconds
    "test_client_fork": ("fork",),
    "test_client_flat": ("flat",),
    "test_spark_cluster_kills": ("kill",),
    "test_spark_driver_kills": ("kill",),
    "test_spark_task_faults": ("kill",),
}
SHARING = {
    "spark": {
        "test_spark_replay_stream", "test_spark_sink", "test_spark_source", "test_spark_trace", "test_spark_versions",
    },
    "standalone": {"test_spark_deployments"},
}  # fmt: skip
"""Fixtures of a whole run that take long to make, and the files that use them: see ``conftest``."""

LONGEST_FIRST = (
    "test_spark_sink", "test_spark_cluster_kills", "test_spark_driver_kills", "test_spark_day",
    "test_spark_deployments", "test_spark_task_faults", "test_spark_docs", "test_spark_trace_report",
    "test_spark_bench", "test_soak", "test_sim", "test_packaging", "test_docs", "test_worker_run", "test_cli_bench",
    "test_client_bad_days", "test_contract_servers", "test_client_connection", "test_contract_progress",
    "test_contract_producer", "test_contract_consumer", "test_client_consumer_redesigned",
    "test_client_producer_failures",
)  # fmt: skip
"""Files that take minutes begin first, and those that share a fixture with them: what runs side by side is then done at
about the same time."""

REAL_FIXTURES = {"real_nsqd", "real_lookupd", "real_fleet", "real_cluster", "standalone_nsqd"}
REAL_PARAMETERS = {"original", "real"}  # of fixtures that have the same test run on embedded servers, too


def rank(item: pytest.Item) -> int:
    """The place of a test's file among those that are not in the order of their names."""
    return _of_file(item.path)[0]


@cache
def _of_file(path: Path) -> tuple[int, tuple[str, ...]]:
    """The rank of a file, and the markers of its tests: every process of a run asks for thousands of tests."""
    place = LONGEST_FIRST.index(path.stem) if path.stem in LONGEST_FIRST else len(LONGEST_FIRST)
    return place, (*OF_FOLDER.get(path.relative_to(TESTS).parts[0], ()), *OF_MODULE.get(path.stem, ()))


def is_of_spark(scope: str) -> bool:
    """Whether what one process is to run, a file or the files of ``SHARING``, needs Spark."""
    return scope in SHARING or "/spark/" in scope


def unshared(item: pytest.Item) -> str | None:
    """The fixture that a test uses in a file that is not known to share it."""
    used = getattr(item, "fixturenames", ())
    return next((name for name, files in SHARING.items() if name in used and item.path.stem not in files), None)


def mark(item: pytest.Item) -> None:
    """Add the markers that follow from where a test stands and from what it uses."""
    for name in _of_file(item.path)[1]:
        item.add_marker(name)
    if _needs_real_server(item):
        item.add_marker("real")
    if "uvloop" in item.name.partition("[")[2]:
        item.add_marker("uvloop")


def _needs_real_server(item: pytest.Item) -> bool:
    if REAL_FIXTURES.intersection(getattr(item, "fixturenames", ())):
        return True
    callspec = getattr(item, "callspec", None)
    return callspec is not None and any(
        isinstance(value, str) and value in REAL_PARAMETERS for value in callspec.params.values()
    )
