"""What the tests of Spark share: a session, driver programs, clusters. Where Spark cannot run, all skip and say why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import spark_needs
from support.servers import SERVERS, RealNsqd, find_server
from support.spark import LOCAL, make_ready, quick_checkpoints, spark_environment, spark_settings
from support.spark_replay import MakeTopic, Topic

from nsq_fast.broker import BrokerProcess, ClusterProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from support.journal import Server
    from support.s3_server import S3Server
    from support.spark import Driver

TOPIC_NUMBERS = count()
TIMEOUT = 900  # ends what hangs; a JVM's first minute on a busy machine can be ten


class _CannotImport(pytest.Module):
    def collect(self) -> Any:
        pytest.skip(spark_needs.missing_modules() or "", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return _CannotImport.from_parent(parent, path=module_path) if spark_needs.missing_modules() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.fixture(scope="session")
def java(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where Spark cannot run; has its JVMs and Pythons start quickly where it can."""
    if reason := spark_needs.missing_for_spark():
        pytest.skip(reason)
    make_ready(tmp_path_factory.mktemp("archive"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterProcess]:
    """An embedded redesigned cluster whose leaders may move and die."""
    with ClusterProcess(nodes=3, lookupds=1, takeover_delay=0.2, move_step=0.005, kind=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    """An embedded nsqd of the original NSQ, and its nsqlookupd."""
    with BrokerProcess() as running:
        yield running


@pytest.fixture
def make_topic(cluster: ClusterProcess) -> MakeTopic:
    """A factory of topics of the cluster, unlike all others where they are given no name."""

    def make(partitions: int = 2, replicas: int = 1, *, name: str = "", **flags: Any) -> Topic:
        name = name or f"topic{next(TOPIC_NUMBERS)}"
        multi = {} if flags.get("ordered") else {"multi_part": True}
        cluster.create_topic(name, partitions, replicas, **{"channels": ["spark"], **multi, **flags})
        return Topic(name, str(cluster.lookupds[0].http))

    return make


@pytest.fixture
def topic(make_topic: MakeTopic) -> Topic:
    """A topic of two partitions."""
    return make_topic(replicas=2)


@pytest.fixture(params=["ours", "real"])
def server(
    request: pytest.FixtureRequest, kept_nsqds: dict[str, RealNsqd], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One original nsqd with a topic and a channel: ours in a process of its own, or the real one.

    The next test gets it, too, without what this one has left, unless it is gone or somebody still uses it.
    """
    from support.journal import Server

    if request.param == "real" and find_server("nsqd") is None:
        pytest.skip(f"no real nsqd below {SERVERS}")
    kept = kept_nsqds.pop(f"journal of {request.param}", None)
    made = Server(kept) if kept else Server.start(tmp_path_factory.mktemp("nsqd"), is_real=request.param == "real")
    yield made
    made.client.close()
    if made.process.forget():
        kept_nsqds[f"journal of {request.param}"] = made.process
    else:
        made.process.kill()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    from support.s3_server import S3Server

    made = S3Server()
    yield made
    made.stop()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An object store with a bucket, and credentials for it in the environment."""
    from support.s3 import CREDENTIALS

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    s3_server.requests.clear()
    s3_server.faults.clear()
    return s3_server


@pytest.fixture(scope="session")
def spark(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session for all tests, ``local[2]``, with the source registered. Its calls block the hub of gevent."""
    from pyspark.sql import SparkSession
    from support.spark import remember_classes
    from support.spark_program import register

    builder = SparkSession.builder
    settings = spark_settings(LOCAL, tmp_path_factory.mktemp("spark"))
    for name, value in (settings | quick_checkpoints()).items():
        builder = builder.config(name, value)
    with pytest.MonkeyPatch.context() as patch:  # the JVM keeps it, for the Pythons that it starts; other tests do not
        for name, value in spark_environment().items():
            patch.setenv(name, value)
        session = builder.getOrCreate()
    remember_classes()
    register(session)
    yield session
    session.stop()
    _end_gateway()


def _end_gateway() -> None:
    """The JVM ends when its stdin does; wait for that, so that a run leaves nothing behind."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(30)
        SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture
def spark_driver(java: None, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """A factory of driver programs, not yet started: ``spark_driver(program, master, settings, **arguments)``."""
    from support.spark import Driver

    drivers: list[Driver] = []

    def make(program: str, master: str = LOCAL, settings: dict[str, str] | None = None, **arguments: Any) -> Driver:
        folder = tmp_path / f"spark{len(drivers)}"
        drivers.append(Driver(program, folder, master, settings, **arguments))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.close()


@pytest.fixture(scope="session")
def standalone(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A standalone cluster of a master and two workers: the URL that a driver program takes as its master."""
    from support.spark import standalone_cluster

    with standalone_cluster(tmp_path_factory.mktemp("standalone")) as url:
        yield url


@pytest.fixture(scope="session")
def connect_url(standalone: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Spark Connect server with the executors of the cluster, which nobody else gets from then on.

    Its clients live in processes of their own: a process is either classic or remote.
    """
    from support.spark import connect_server

    with connect_server(tmp_path_factory.mktemp("connect"), standalone) as url:
        yield url
