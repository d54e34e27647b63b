"""Servers for the tests of the command line."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.commands import Servers, started


@pytest.fixture(scope="module", params=["embedded", "real"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield started(request.param, stack, tmp_path_factory)


@pytest.fixture(scope="module")
def redesigned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield started("redesigned", stack, tmp_path_factory)


@pytest.fixture(scope="module", params=["embedded", "real", "redesigned"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield started(request.param, stack, tmp_path_factory)


@pytest.fixture
def topic() -> str:
    return f"topic-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def no_servers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names no servers, and none listens where those of this machine are looked for."""
    for name in ("NSQ_LOOKUPD_HTTP_ADDRESSES", "NSQD_TCP_ADDRESSES", "NSQD_HTTP_ADDRESSES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("nsq_fast.cli.servers.LOCAL", "127.255.255.254")
