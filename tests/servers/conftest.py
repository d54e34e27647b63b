"""The clusters that scenarios run on: the embedded one always, a real one when it is asked for and can be started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support.cluster import Network, RealCluster, missing_for_cluster, missing_for_namespaces
from support.fleet import Fleet
from support.scenarios import Scale

OPTION = "--run-real-cluster"
REAL_TIMEOUT = 1800
_reports: list[str] = []


def pytest_report_header(config: pytest.Config) -> str:
    missing = missing_for_cluster()
    if not config.getoption(OPTION):
        return f"real redesigned cluster: not used; {OPTION} uses it"
    return f"real redesigned cluster: {f'cannot be used, {missing}' if missing else 'etcd, 2 nsqlookupds, 3 nsqds'}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _reports:
        terminalreporter.section("what was proved")
        for line in _reports:
            terminalreporter.write_line(line)


@pytest.fixture
def report(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[list[str]]:
    """Lines that stand at the end of the run."""
    lines: list[str] = []
    yield lines
    _reports.extend(f"{request.node.originalname} ({fleet.name}): {line}" for line in lines)


@pytest.fixture
def printed() -> Iterator[list[str]]:
    """Lines that stand at the end of the run as they are."""
    lines: list[str] = []
    yield lines
    _reports.extend(lines)


@pytest.fixture
def real_cluster(wants_real: None, tmp_path: Path) -> Iterator[RealCluster]:
    """A real cluster for one test, whose nsqds are on hosts of their own where the machine has such."""
    with ExitStack() as stack:
        missing = missing_for_namespaces()
        network = None if missing else stack.enter_context(closing(Network(3)))
        folder = tmp_path / "cluster"
        folder.mkdir()
        cluster = RealCluster(folder, network=network, no_network=missing or "")
        stack.callback(cluster.stop)
        yield cluster


@pytest.fixture(params=["embedded", pytest.param("real", marks=pytest.mark.timeout(REAL_TIMEOUT))])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    """The same test on the embedded cluster and on the real one."""
    found: Fleet = request.getfixturevalue(f"{request.param}_fleet")
    return found


@pytest.fixture
def small(fleet: Fleet) -> Scale:
    """How much of everything."""
    return Scale(10_000, patience=120.0) if fleet.is_real else Scale(1_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a server may keep its data."""
    path = tmp_path / "data"
    path.mkdir()
    return path
