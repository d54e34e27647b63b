"""The faces, and servers of each kind that have messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

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
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """``running(kind)``: an nsqd of that kind, started once; skips where there is none."""
    with ExitStack() as stack:

        @cache
        def start(kind: str) -> Any:
            if kind != "embedded" and find_server("nsqd", kind) is None:
                pytest.skip(f"no real {kind} nsqd")
            folder = tmp_path_factory.mktemp(kind)
            command = EMBEDDED_NSQD if kind == "embedded" else None
            server = Standalone(folder) if kind == "redesigned" else RealNsqd(folder, command=command)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture(params=["embedded", "original", "embedded cluster", "redesigned", "real cluster"])
def place(request: pytest.FixtureRequest, running: Callable[[str], Any]) -> Place:
    """Servers of each kind, started once; a real cluster with ``--run-real-cluster`` only: it takes minutes."""
    if request.param in ("embedded", "original"):
        return Place({"nsqd_tcp_addresses": running(request.param).address}, lambda *_: None)
    options = {"lookupd_poll_interval": 1.0}
    if request.param == "redesigned":
        real: Standalone = running("redesigned")
        servers = {"lookupd_http_addresses": str(real.lookupd_address), **options}
        return Place(servers, lambda name, _: real.create_topic(name, "c"), takes_keys=False)
    fleet: Fleet = request.getfixturevalue(f"{request.param.split()[0]}_fleet")
    servers = {"lookupd_http_addresses": fleet.lookupds, **options}
    return Place(servers, lambda name, partitions: fleet.create_topic(name, partitions, 1, channels=("c",)))


@pytest.fixture
def topic(place: Place) -> Topic:
    """It has the messages of BODIES."""
    return Topic(place, BODIES)
