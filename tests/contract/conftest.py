"""The faces, and servers of each kind that have messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.contract import BODIES, FACES, Face, Queue
from support.fleet import Fleet
from support.servers import EMBEDDED_NSQD, RealNsqd, find_server

from nsq_fast.threads import Producer


@pytest.fixture(params=FACES, ids=lambda face: str(face.name))
def face(request: pytest.FixtureRequest) -> Face:
    """Each in turn."""
    found: Face = request.param
    return found


@pytest.fixture
def filled(nsqd_process: Any) -> str:
    """An nsqd of its own with the messages 0 to 99 in the topic t, for tests that stop it."""
    with Producer(nsqd_process.address) as producer:
        producer.multipublish("t", sorted(BODIES))
    return str(nsqd_process.address)


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


@pytest.fixture(params=["embedded", "original", "embedded cluster", "real cluster"])
def queue(request: pytest.FixtureRequest) -> Queue:
    """On servers of each kind; on a real redesigned cluster with ``--run-real-cluster``, which takes minutes."""
    if "cluster" not in request.param:
        nsqd: RealNsqd = request.getfixturevalue(f"{request.param}_nsqd")
        return Queue({"nsqd_tcp_addresses": nsqd.address}, lambda topic: None)
    fleet: Fleet = request.getfixturevalue(f"{request.param.split()[0]}_fleet")
    return Queue(
        {"lookupd_http_addresses": fleet.lookupds}, lambda topic: fleet.create_topic(topic, 1, 1, channels=("c",))
    )
