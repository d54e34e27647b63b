"""Servers for the tests of integrations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from nsq_fast.broker import BrokerProcess


class Nsqd(NamedTuple):
    address: str
    http: str


@pytest.fixture(params=["embedded", "original"])
def memory_nsqd(request: pytest.FixtureRequest) -> Iterator[Nsqd]:
    """An nsqd with a queue in memory, which what is ephemeral needs."""
    if request.param == "original":
        server = request.getfixturevalue("real_nsqd")()
        yield Nsqd(str(server.tcp_address), str(server.http_address))
        return
    with BrokerProcess(lookupd=False) as broker:
        yield Nsqd(str(broker.nsqds[0].tcp), str(broker.nsqds[0].http))
