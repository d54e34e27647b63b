"""Fixtures for the tests of the producer: nsqds that answer publishes as a test says, and producers for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gevent
import pytest
from support.partitions import ScriptedLookup
from support.publishing import REDESIGNED, Leaders, LookupProducers, Nsqds, Producers, PublishNsqd

from nsq_fast import Producer
from nsq_fast.protocol.topology import Topology


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


@pytest.fixture
def lookup_producer(monkeypatch: pytest.MonkeyPatch, new_producer: Producers) -> LookupProducers:
    """A factory of producers whose lookup says what a test wants: ``make(topology, **options)``."""
    lookups: list[ScriptedLookup] = []

    def scripted(*args: Any) -> ScriptedLookup:
        lookups.append(ScriptedLookup(*args))
        return lookups[-1]

    def make(answer: Topology | None = None, **options: Any) -> tuple[Producer, ScriptedLookup]:
        sender = new_producer(lookupd_http_addresses=["127.0.0.1:1"], **options)
        lookup = lookups[-1]
        if answer is not None:
            known = lookup.add_topic
            lookup.answer = answer

            def add_topic(topic: str) -> None:
                known(topic)
                gevent.spawn(lambda: lookup.is_stopped or lookup.listener(topic, lookup.answer))

            monkeypatch.setattr(lookup, "add_topic", add_topic)
        return sender, lookup

    monkeypatch.setattr("nsq_fast.runtime.publishing.routes.LookupPoller", scripted)
    return make


@pytest.fixture
def leaders(publish_nsqd: Nsqds) -> Leaders:
    """Three nsqds that lead a partition each."""
    return {number: publish_nsqd(version=REDESIGNED) for number in range(3)}
