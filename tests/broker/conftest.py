"""The same test on the embedded nsqds and, where there are such, on the real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trustme
from gevent.ssl import PROTOCOL_TLS_CLIENT, SSLContext
from support.wire import WireClient

from nsq_fast.broker import LookupdOptions, LookupdServer, NsqdOptions, NsqdServer, RedesignedCluster
from nsq_fast.broker.options import SINGULAR


@pytest.fixture(autouse=True)
def no_client_is_left() -> Iterator[None]:
    yield
    for client in list(WireClient.OPEN):
        client.close()


def flags(options: dict[str, Any]) -> list[str]:
    """Options of the embedded nsqd as flags of the real one."""
    return [
        f"-{SINGULAR.get(name, name).replace('_', '-')}={_text(value)}"
        for name, value in options.items()
        if name != "preserve_order"  # of ours alone
    ]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{round(value * 1000)}ms" if isinstance(value, float) else str(value)


@pytest.fixture(params=["embedded", "original"])
def start_nsqd(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    running: list[NsqdServer] = []

    def start(*, https: bool = False, **options: Any) -> Any:
        if request.param == "original":
            return request.getfixturevalue("real_nsqd")(*flags(options), https=https)
        if https:
            options["https_address"] = "127.0.0.1:0"
        server = NsqdServer(NsqdOptions(**options))
        server.start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.kill()


@pytest.fixture(params=["embedded", "original"])
def make_lookupd(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A factory of nsqlookupds that takes the original's options in seconds."""
    started: list[LookupdServer] = []

    def make(**options: float) -> Any:
        if request.param == "original":
            return request.getfixturevalue("real_lookupd")(*flags(options))
        server = LookupdServer(LookupdOptions(**options))
        server.start()
        started.append(server)
        return server

    yield make
    for server in started:
        server.stop()


@pytest.fixture
def lookupd(make_lookupd: Any) -> Any:
    return make_lookupd()


@pytest.fixture
def address(start_nsqd: Callable[..., Any]) -> Any:
    return start_nsqd().tcp_address


@pytest.fixture
def tls(tls_files: dict[str, str]) -> dict[str, str]:
    """Options of an nsqd with a certificate."""
    return {"tls_cert": tls_files["cert"], "tls_key": tls_files["key"]}


@pytest.fixture
def context(authority: trustme.CA) -> SSLContext:
    """Of a client that trusts it."""
    context = SSLContext(PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    return context


@pytest.fixture
def embedded() -> Iterator[Callable[..., NsqdServer]]:
    running: list[NsqdServer] = []

    def start(**options: Any) -> NsqdServer:
        running.append(NsqdServer(NsqdOptions(**options)))
        running[-1].start()
        return running[-1]

    yield start
    for server in running:
        server.kill()


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[RedesignedCluster]:
    """Three nodes with the topics ``plain``, ``ord`` (three partitions, ordered, two replicas) and ``ext``.

    The parameter is ``takeover_delay``, for tests that look at the time before.
    """
    options = {"takeover_delay": getattr(request, "param", 0.05), "queue_scan_interval": 0.02, "kind": True}
    with RedesignedCluster(move_step=0.01, **options) as cluster:
        cluster.create_topic("plain", 1, 2, channels=["ch"])
        cluster.create_topic("ord", 3, 2, ordered=True, channels=["ch"])
        cluster.create_topic("ext", 1, 1, ext=True, channels=["ch"])
        yield cluster


@pytest.fixture(params=["embedded", "real"])
def node(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An nsqd with the topics ``t`` and ``ext``, each with one partition."""
    if request.param == "real":
        server = request.getfixturevalue("standalone_nsqd")
        server.create_topic("t")
        client = WireClient(server.tcp_address)
        assert client.command(b"INTERNAL_CREATE_TOPIC ext 0 true\n") == b"OK"
        client.close()
        yield server
    else:
        with RedesignedCluster(nodes=1, lookupds=1) as cluster:
            cluster.create_topic("t", channels=["c"])
            cluster.create_topic("ext", ext=True)
            yield cluster.nsqds[0]
