"""What the tests of the client share: the loops on which it runs, nsqds that do as a test says, and the consumers and
producers for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import pytest
from support.partitions import HasAddress, PartitionNsqd, ScriptedLookup, lookup_of, topology
from support.publishing import REDESIGNED, Answer, Leaders, LookupProducers, Nsqds, Producers, PublishNsqd, agree
from support.scenarios import Records
from support.waiting import WAIT

from nsq_fast import Consumer, Producer, TraceLog
from nsq_fast.broker import LookupdServer, NsqdServer
from nsq_fast.broker.options import NsqdOptions
from nsq_fast.client.asyncio_loop import AsyncioLoop
from nsq_fast.client.gevent_loop import GeventLoop, run
from nsq_fast.protocol.topology import Topology


@pytest.fixture(params=["embedded", "original"])
def family(request: pytest.FixtureRequest) -> str:
    """Which servers a test runs against."""
    return str(request.param)


@pytest.fixture
def make_nsqd(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A factory of nsqds: ``make_nsqd(lookupd, **options)``, with options that both families have."""
    servers: list[NsqdServer] = []

    def make(lookupd: Any = None, **options: Any) -> Any:
        if family == "original":
            flags = [f"-{name.replace('_', '-')}={value}" for name, value in options.items()]
            flags += [] if lookupd is None else [f"-lookupd-tcp-address={lookupd.tcp_address}"]
            return request.getfixturevalue("real_nsqd")(*flags)
        path = tmp_path / f"embedded{len(servers)}"
        path.mkdir()
        servers.append(NsqdServer(NsqdOptions(data_path=str(path), **options)))
        if lookupd is not None:
            servers[-1].register_at(lookupd.tcp_address)
        servers[-1].start()
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


@pytest.fixture
def make_lookupd(family: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """A factory of nsqlookupds."""
    if family == "original":
        yield request.getfixturevalue("real_lookupd")
        return
    with ExitStack() as stack:
        yield lambda: stack.enter_context(LookupdServer())


@pytest.fixture
def nsqds(servers: Callable[..., Any]) -> Callable[..., Any]:
    """A factory of scripted nsqds, redesigned ones by default."""
    return lambda *args, kind=PartitionNsqd, **options: servers(*args, kind=kind, **options)


@pytest.fixture
def new_trace() -> Callable[[], tuple[TraceLog, list[Any]]]:
    """A factory of trace logs, each with the records that are written to it."""

    def make() -> tuple[TraceLog, list[Any]]:
        handler, log = Records(), logging.Logger("of this test", logging.INFO)
        log.addHandler(handler)
        return TraceLog(log), handler.all

    return make


@pytest.fixture
def scripted_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookup of consumers is told by the test what it finds: ``lookup_of(consumer).tell(...)``."""
    monkeypatch.setattr("nsq_fast.client.lookup.LookupPoller", ScriptedLookup)


@pytest.fixture
def start_consumer() -> Iterator[Callable[..., Consumer]]:
    """A factory of consumers, which are closed after the test; one that has a handler is started."""
    consumers: list[Consumer] = []

    def start(*args: Any, **options: Any) -> Consumer:
        consumers.append(Consumer(*args, **{"max_in_flight": 10, "max_backoff_duration": 0, **options}))
        if any(options.get(name) is not None for name in ("message_handler", "batch_handler")):
            consumers[-1].start(block=False)
        return consumers[-1]

    yield start
    for consumer in consumers:
        consumer.close(drain=False)


@pytest.fixture
def consume(request: pytest.FixtureRequest, start_consumer: Callable[..., Consumer]) -> Callable[..., Consumer]:
    """A factory: ``consume(handler, *nsqds, found=topology, **options)``, by default from the fixture ``nsqd``.

    ``found`` is what a scripted lookup says. Options of all consumers of a module stand in its ``CONSUME``, the names
    of ``topic`` and ``channel`` among them.
    """
    common = {"topic": "topic", "channel": "channel", **getattr(request.module, "CONSUME", {})}

    def start(handler: Any = None, *nsqds: HasAddress, found: Topology | None = None, **options: Any) -> Consumer:
        options = {**common, **options}
        if found is not None:
            request.getfixturevalue("scripted_lookup")
            options["lookupd_http_addresses"] = "lookup:4161"
        elif "lookupd_http_addresses" not in options:
            nsqds = nsqds or (request.getfixturevalue("nsqd"),)
            options["nsqd_tcp_addresses"] = [str(each.address) for each in nsqds]
        consumer = start_consumer(options.pop("topic"), options.pop("channel"), message_handler=handler, **options)
        if found is not None and consumer.is_running:
            lookup_of(consumer).tell(found)
        return consumer

    return start


@pytest.fixture
def publish_nsqd(servers: Callable[..., Any]) -> Nsqds:
    """A factory of scripted nsqds that answer publishes."""
    return lambda *args, **info: servers(*args, kind=PublishNsqd, **info)


@pytest.fixture
def new_producer() -> Iterator[Producers]:
    """A factory of started producers for scripted nsqds; they retry quickly, and each publish is a command."""
    producers: list[Producer] = []

    def make(*servers: PublishNsqd, **options: Any) -> Producer:
        options = {"coalesce": False, "publish_timeout": WAIT, "retry_base_delay": 0.001, **options}
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

    monkeypatch.setattr("nsq_fast.client.lookup.LookupPoller", scripted)
    return make


@pytest.fixture
def leaders(publish_nsqd: Nsqds) -> Leaders:
    """Three nsqds that lead a partition each."""
    return {number: publish_nsqd(version=REDESIGNED) for number in range(3)}


@pytest.fixture
def publishing(publish_nsqd: Nsqds, new_producer: Producers) -> Callable[..., tuple[PublishNsqd, Producer]]:
    """``publishing(answer, **options)``: a scripted nsqd, and a producer that publishes to it."""

    def make(answer: Answer = agree, **options: Any) -> tuple[PublishNsqd, Producer]:
        nsqd = publish_nsqd(answer)
        return nsqd, new_producer(nsqd, **options)

    return make


@pytest.fixture
def leading(publish_nsqd: Nsqds, lookup_producer: LookupProducers) -> Callable[..., tuple[PublishNsqd, Any, Any]]:
    """``leading(answer, meta={}, **options)``: the nsqd of the one partition of a topic, a producer, its lookup."""

    def make(answer: Answer = agree, meta: Any = None, **options: Any) -> tuple[PublishNsqd, Any, Any]:
        nsqd = publish_nsqd(answer, version=REDESIGNED)
        return nsqd, *lookup_producer(topology({0: nsqd}, **(meta or {})), **options)

    return make


# --- a test that is ``async def`` and takes ``loop`` runs on each loop -----------------------------------------------

ClientTest = Callable[[Any], Coroutine[Any, Any, None]]


@pytest.fixture(params=["gevent", "asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Callable[[ClientTest], None]:
    """What runs a test on a loop; the test gets the client's port."""
    if request.param == "gevent":
        return _on_gevent
    return partial(_on_asyncio, pytest.importorskip("uvloop").new_event_loop if request.param == "uvloop" else None)


def _on_gevent(test: ClientTest) -> None:
    with gevent.Timeout(2 * WAIT):
        run(test(GeventLoop.here()))


def _on_asyncio(new_loop: Callable[[], asyncio.AbstractEventLoop] | None, test: ClientTest) -> None:
    async def main() -> None:
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        await asyncio.wait_for(test(AsyncioLoop()), 2 * WAIT)
        assert not faults

    if new_loop is None:
        asyncio.run(main())
        return
    loop = new_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
