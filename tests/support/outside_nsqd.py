"""An nsqd in a process of its own, for tests of handlers that block this one, or run on other threads."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nsq_fast import Consumer, Producer
from nsq_fast.broker import BrokerProcess
from support.waiting import block_until


class Server:
    """An nsqd, asked without a turn of the hub."""

    def __init__(self, tcp: object, http: object) -> None:
        self.tcp = str(tcp)
        self._http = http

    def channel(self) -> dict[str, Any]:
        """The stats of the channel "c" of the topic "t"."""
        with urllib.request.urlopen(f"http://{self._http}/stats?format=json&topic=t", timeout=5) as reply:
            (topic,) = json.load(reply)["topics"]
        (channel,) = topic["channels"]
        return channel

    def finished(self) -> int:
        """FINs that came from consumers that are connected."""
        return sum(client["finish_count"] for client in self.channel()["clients"])

    def wait_finished(self, count: int) -> None:
        """Block the process until so many FINs came."""
        block_until(lambda: self.finished() >= count, f"{count} FINs")


@pytest.fixture(params=["embedded", "original"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with _running(request) as running:
        yield running


@pytest.fixture
def second_server(request: pytest.FixtureRequest, server: Server) -> Iterator[Server]:
    """Another nsqd of the same kind."""
    request.param = request.node.callspec.params["server"]
    with _running(request) as running:
        yield running


@contextmanager
def _running(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "original":
        nsqd = request.getfixturevalue("real_nsqd")()
        yield Server(nsqd.tcp_address, nsqd.http_address)
        return
    with BrokerProcess() as broker:
        yield Server(broker.nsqd.tcp, broker.nsqd.http)


@pytest.fixture
def handle_many(server: Server) -> Iterator[Callable[..., Consumer]]:
    """A factory: publish so many messages, and handle them."""
    consumers: list[Consumer] = []

    def make(count: int, **options: Any) -> Consumer:
        consumers.append(Consumer("t", "c", server.tcp, **{"max_in_flight": count, **options}))
        with Producer([server.tcp]) as producer:
            producer.multipublish("t", [b"%d" % number for number in range(count)])
        consumers[-1].start(block=False)
        return consumers[-1]

    yield make
    for consumer in consumers:
        consumer.close(drain=False)
