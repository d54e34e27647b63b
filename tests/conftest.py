"""What every test shares: the servers, and the rule that no greenlet may fail unseen."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
import trustme
from support import compiled, kinds, spark_needs
from support.browser import Browser
from support.cluster import RealCluster, Standalone, missing_for_cluster
from support.fleet import EmbeddedFleet, Fleet
from support.processes import run
from support.scripted_nsqd import ScriptedNsqd
from support.servers import EMBEDDED_NSQD, SERVERS, RealLookupd, RealNsqd, find_server

import nsq_fast
from nsq_fast import threads
from nsq_fast.broker import ClusterProcess, NsqdServer, RedesignedCluster
from nsq_fast.client.loop import FaultReporter

REAL_CLUSTER = "--run-real-cluster"
pytest_plugins = ["nsq_fast.testing", "support.properties"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(REAL_CLUSTER, action="store_true", help="run servers and contract on a real redesigned cluster")
    parser.addoption(
        "--judge-sequences", type=int, default=4, help="of each kind, on a real nsqd and on the embedded one"
    )
    parser.addoption("--bad-days-messages", type=int, default=1_000_000, help="of bad days on it; fewer are quicker")
    parser.addoption("--bad-days-report", type=Path, help="a folder for what bad days tell, as Markdown and JSON")


def pytest_configure() -> None:
    """NSQ_FAST_REQUIRED names families whose tests must not be skipped for want of a server, as in CI.

    Pythons that tests start keep what they compile, whatever the environment says: a thousand would compile it anew.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for family in filter(None, os.environ.get("NSQ_FAST_REQUIRED", "").split(",")):
        for name in ("nsqd", "nsqlookupd"):
            if find_server(name, family) is None:
                raise pytest.UsageError(f"NSQ_FAST_REQUIRED={family}: there is no {name} in {SERVERS / family}")


def pytest_report_header() -> list[str]:
    found = [name for name in ("original", "redesigned") if find_server("nsqd", name)]
    return [
        f"nsq_fast {nsq_fast.__version__} from {Path(nsq_fast.__file__).parent}",
        *compiled.header(),
        f"real servers: {', '.join(found) or 'none, their tests are skipped'} (below {SERVERS})",
        *spark_needs.header(),
    ]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """The collector of garbage leaves alone what is there for the whole run: each time that it looked at thousands of
    tests and at all modules it would take as long as some tests do."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=kinds.rank)
    for item in items:
        kinds.mark(item)
        if " at 0x" in item.nodeid:  # with an address in it, no two processes of xdist collect the same tests
            raise pytest.UsageError(f"the id of a test differs from run to run: {item.nodeid}; give its values ids")
        if fixture := kinds.unshared(item):
            raise pytest.UsageError(f"{item.nodeid} uses the fixture {fixture}: name its file in kinds.SHARING")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile`` a process runs the tests of a file, and those of files that share a fixture.

    A session of Spark is a JVM that takes seconds to start and to warm up, and half a gigabyte, in every process that
    wants one; a standalone cluster is three. They keep the cores busy, and most other tests wait for something: so
    every other process begins with Spark, and the others with the rest. Spark alone would take half of the time, and
    the rest would leave a core idle then.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class TogetherByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return next((name for name, files in kinds.SHARING.items() if Path(file).stem in files), file)

        def _assign_work_unit(self, node: Any) -> None:
            wants_spark = self.nodes.index(node) % 2 == 0
            mine = next((scope for scope in self.workqueue if kinds.is_of_spark(scope) == wants_spark), None)
            if mine is not None:
                self.workqueue.move_to_end(mine, last=False)
            super()._assign_work_unit(node)

    return TogetherByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is ``async def`` runs on its ``face`` (support/contract.py), on its ``loop`` (client/conftest.py,
    sim/conftest.py), or in an event loop of asyncio, that of its ``new_loop`` (LOOPS of support/processes.py)."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    if "face" in given:
        given["face"].run(pyfuncitem.obj(**given))
    elif "loop" in given:
        run_on = given.pop("loop")
        run_on(lambda loop: pyfuncitem.obj(loop=loop, **given))
    elif "new_loop" in given:
        run(pyfuncitem.obj(**given), given["new_loop"])
    else:
        asyncio.run(pyfuncitem.obj(**given))
    return True


@pytest.fixture(scope="module", autouse=True)
def nothing_left_open() -> Iterator[None]:
    """Sockets of servers that tests have stopped wait for the collector; ``select`` takes none above 1,023."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def no_unseen_errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Fail the test in which a greenlet died of an exception, or something supervised had a fault.

    A test that expects one empties the list.
    """
    errors: list[Any] = []
    hub = gevent.get_hub()
    report = FaultReporter.report

    def reported(supervisor: FaultReporter, name: str, fault: BaseException, consequence: str) -> None:
        errors.append((name, type(fault), fault))
        report(supervisor, name, fault, consequence)

    monkeypatch.setattr(FaultReporter, "report", reported)

    def collect(context: Any, kind: Any, value: Any, traceback: Any) -> None:
        if not issubclass(kind, hub.NOT_ERROR):
            errors.append((context, kind, value))
        original(context, kind, value, traceback)

    original = hub.handle_error
    hub.handle_error = collect
    yield errors
    hub.handle_error = original
    assert not errors, f"a greenlet failed: {errors}"


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """``told(*events)``: what the log says of these events until now."""
    return lambda *events: [each.getMessage() for each in caplog.records if getattr(each, "event", "") in events]


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    """A certificate authority that nobody trusts unless told to."""
    return trustme.CA()


@pytest.fixture(scope="session")
def tls_files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of PEM files: ``cert`` and ``key`` of a server at 127.0.0.1 or localhost, ``ca`` to verify it."""
    issued = authority.issue_cert("127.0.0.1", "localhost")
    folder = tmp_path_factory.mktemp("tls")
    files = {name: str(folder / f"{name}.pem") for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(files["ca"])
    issued.cert_chain_pems[0].write_to_path(files["cert"])
    issued.private_key_pem.write_to_path(files["key"])
    return files


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    """A real browser; skips where there is none."""
    found = spark_needs.find_chromium()
    if found is None:
        pytest.skip(spark_needs.NO_CHROMIUM)
    return Browser(found, tmp_path_factory.mktemp("browser"))


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is bound, so nobody else takes it, and does not listen."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@pytest.fixture
def nsqd(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A scripted nsqd, or one of the class that the test's module names ``NSQD``; stopped after the test."""
    server = getattr(request.module, "NSQD", ScriptedNsqd)()
    if isinstance(server, NsqdServer):
        server.start()
    yield server
    server.stop()


@pytest.fixture
def servers() -> Iterator[Callable[..., Any]]:
    """A factory of scripted nsqds: ``servers(info, replies)``, of another class with ``kind=``."""
    made: list[ScriptedNsqd] = []

    def make(*args: Any, kind: Callable[..., Any] = ScriptedNsqd, **options: Any) -> Any:
        made.append(kind(*args, **options))
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def cluster() -> Iterator[RedesignedCluster]:
    """An embedded cluster of three nodes."""
    with RedesignedCluster(nodes=3, kind=True) as running:
        yield running


@pytest.fixture
def lookups(cluster: RedesignedCluster) -> dict[str, Any]:
    """The option with which clients find that cluster."""
    return {"lookupd_http_addresses": [str(each.http_address) for each in cluster.lookupds]}


@pytest.fixture
def real_nsqd(tmp_path: Path) -> Iterator[Callable[..., RealNsqd]]:
    """A factory of real original nsqds: ``real_nsqd(*flags, https=False)``; skips where there is no binary."""
    if find_server("nsqd") is None:
        pytest.skip(f"no real nsqd below {SERVERS}")
    servers: list[RealNsqd] = []

    def make(*flags: str, https: bool = False) -> RealNsqd:
        path = tmp_path / f"nsqd{len(servers)}"
        path.mkdir()
        servers.append(RealNsqd(path, *flags, https=https))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


@pytest.fixture
def standalone_nsqd(tmp_path: Path) -> Iterator[Standalone]:
    """A real redesigned nsqd without a cluster; skips where there is no binary."""
    if find_server("nsqd", "redesigned") is None:
        pytest.skip(f"no redesigned nsqd below {SERVERS}")
    standalone = Standalone(tmp_path)
    yield standalone
    standalone.stop()


@pytest.fixture
def real_lookupd() -> Iterator[Callable[..., RealLookupd]]:
    """A factory of real original nsqlookupds; skips where there is no binary."""
    if find_server("nsqlookupd") is None:
        pytest.skip(f"no real nsqlookupd below {SERVERS}")
    servers: list[RealLookupd] = []

    def make(*flags: str) -> RealLookupd:
        servers.append(RealLookupd(*flags))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def kept_nsqds() -> Iterator[dict[str, RealNsqd]]:
    kept: dict[str, RealNsqd] = {}
    yield kept
    for server in kept.values():
        server.kill()


@pytest.fixture(params=["embedded", "original"])
def nsqd_process(
    request: pytest.FixtureRequest, kept_nsqds: dict[str, RealNsqd], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealNsqd]:
    """An nsqd that needs nothing of this process, and keeps every message on disk; it has no topics.

    For tests that block the threads of this process, or run an event loop. The next test gets it, too, unless it is
    gone or somebody still uses it: to start one takes longer than most of these tests.
    """
    if request.param == "original" and find_server("nsqd") is None:
        pytest.skip(f"no real nsqd below {SERVERS}")
    server = kept_nsqds.pop(request.param, None)
    if server is None:
        command = EMBEDDED_NSQD if request.param == "embedded" else None
        server = RealNsqd(tmp_path_factory.mktemp("nsqd"), "-mem-queue-size=0", "-sync-every=1", command=command)
    yield server
    if server.forget():
        kept_nsqds[request.param] = server
    else:
        server.kill()


@pytest.fixture
def filled(nsqd_process: RealNsqd, request: pytest.FixtureRequest) -> str:
    """Such an nsqd with messages in the topic t: 0 to 99, or as many as the module says with ``FILLED``."""
    with threads.Producer(nsqd_process.address) as producer:
        producer.multipublish("t", [b"%d" % number for number in range(getattr(request.module, "FILLED", 100))])
    return nsqd_process.address


@pytest.fixture(scope="session")
def embedded_fleet() -> Iterator[Fleet]:
    with ClusterProcess(nodes=3, lookupds=2) as cluster:
        yield EmbeddedFleet(cluster)


@pytest.fixture(scope="session")
def wants_real(request: pytest.FixtureRequest) -> None:
    """Skips what needs a real cluster where there is none, or nobody asked for it."""
    if not request.config.getoption(REAL_CLUSTER):
        pytest.skip(f"takes many minutes: {REAL_CLUSTER} runs it")
    missing = missing_for_cluster()
    if missing is not None:
        pytest.skip(f"{missing}: no real redesigned cluster")


@pytest.fixture(scope="session")
def real_fleet(wants_real: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    cluster = RealCluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield cluster
    finally:
        cluster.stop()
