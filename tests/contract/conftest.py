"""The faces, and servers of each kind that have messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cluster import Standalone
from support.contract import BODIES, FACES, Face, Place, Topic
from support.fleet import Fleet
from support.servers import EMBEDDED_NSQD, RealNsqd, find_server


@pytest.fixture(params=FACES, ids=lambda face: str(face.name))
def face(request: pytest.FixtureRequest) -> Face:
    """Each in turn."""
    found: Face = request.param
    return found


@pytest.fixture(scope="session")
def embedded_nsqd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNsqd]:
    server = RealNsqd(tmp_path_factory.mktemp("embedded"), command=EMBEDDED_NSQD)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def original_nsqd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNsqd]:
    if find_server("nsqd") is None:
        pytest.skip("no real nsqd")
    server = RealNsqd(tmp_path_factory.mktemp("original"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def real_redesigned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    if find_server("nsqd", "redesigned") is None:
        pytest.skip("no real redesigned nsqd")
    server = Standalone(tmp_path_factory.mktemp("redesigned"))
    yield server
    server.stop()


@pytest.fixture(params=["embedded", "original", "embedded cluster", "redesigned", "real cluster"])
def place(request: pytest.FixtureRequest) -> Place:
    """Servers of each kind, started once; a real cluster with ``--run-real-cluster`` only: it takes minutes."""
    if request.param in ("embedded", "original"):
        return Place({"nsqd_tcp_addresses": request.getfixturevalue(f"{request.param}_nsqd").address}, lambda *_: None)
    options = {"lookupd_poll_interval": 1.0}
    if request.param == "redesigned":
        real: Standalone = request.getfixturevalue("real_redesigned")
        servers = {"lookupd_http_addresses": str(real.lookupd_address), **options}
        return Place(servers, lambda name, _: real.create_topic(name, "c"), takes_keys=False)
    fleet: Fleet = request.getfixturevalue(f"{request.param.split()[0]}_fleet")
    servers = {"lookupd_http_addresses": fleet.lookupds, **options}
    return Place(servers, lambda name, partitions: fleet.create_topic(name, partitions, 1, channels=("c",)))


@pytest.fixture
def topic(place: Place) -> Topic:
    """It has the messages of BODIES."""
    return Topic(place, BODIES)
