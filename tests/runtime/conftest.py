"""Fixtures for the tests of the producer: nsqds that answer publishes as a test says, and producers for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.publishing import Nsqds, Producers, PublishNsqd

from nsq_fast import Producer


@pytest.fixture
def publish_nsqd() -> Iterator[Nsqds]:
    """A factory of scripted nsqds."""
    servers: list[PublishNsqd] = []

    def make(*args: Any, **info: Any) -> PublishNsqd:
        servers.append(PublishNsqd(*args, **info))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def new_producer() -> Iterator[Producers]:
    """A factory of started producers for scripted nsqds; they retry quickly, and each publish is a command."""
    producers: list[Producer] = []

    def make(*servers: PublishNsqd, **options: Any) -> Producer:
        options = {"coalesce": False, "publish_timeout": 5.0, "retry_base_delay": 0.001, **options}
        producers.append(Producer([server.address for server in servers], **options))
        producers[-1].start()
        return producers[-1]

    yield make
    for each in producers:
        each.close(timeout=0.5)
