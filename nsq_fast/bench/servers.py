"""The servers of a run: the embedded broker, a real nsqd started here, or servers that run already.

Each scenario gets a fresh server, the same one for all its clients. Several connections to one nsqd go to several
addresses of the loopback network (127.0.0.1, 127.0.0.2, ...), since a client connects to an address once.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.config import LookupConfig
from nsq_fast.errors import ConfigError, NsqError
from nsq_fast.names import Address
from nsq_fast.runtime import LookupdHTTPClient, LookupPoller, NsqdHTTPClient

from . import binaries
from .fill import CHANNEL
from .settings import Settings

_MAX_RDY = 100_000
_TICKS = os.sysconf("SC_CLK_TCK")
_CLUSTER_NODES = 2

CreateTopic: TypeAlias = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Server:
    """Where the clients of a scenario go.

    Attributes:
        nsqds: TCP addresses; lookupds: HTTP addresses, given to clients where a topic has partitions, or a lookup is
            what is measured.
        http: HTTP addresses of the nsqds, to delete topics; pids: processes whose CPU is the server's.
        cafile: what verifies the servers' certificates, for clients of other projects; "" without TLS.
        client_options: options of our clients for TLS and AUTH.
        create_topic: makes a topic that has partitions; None where topics come with their first use.
    """

    name: str
    nsqds: tuple[Address, ...]
    http: tuple[Address, ...] = ()
    lookupds: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    cafile: str = ""
    client_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    create_topic: CreateTopic | None = None

    def cpu_seconds(self) -> float | None:
        """User and system time of the server's processes so far; None where they are not ours to see."""
        if not self.pids:
            return None
        return sum(_cpu_seconds(pid) for pid in self.pids)

    def delete(self, topic: str) -> None:
        """Delete a topic where that can be done."""
        for address in self.http:
            with suppress(NsqError), NsqdHTTPClient(address.host, address.port) as client:
                client.delete_topic(topic)


Source: TypeAlias = Callable[[Settings], AbstractContextManager[Server]]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _listen_host(settings: Settings) -> str:
    return "127.0.0.1" if settings.connections == 1 else "0.0.0.0"


def _many(address: Address, connections: int) -> tuple[Address, ...]:
    numbers = range(1, connections + 1)
    return tuple(Address(f"127.0.{number // 250}.{number % 250 or 250}", address.port) for number in numbers)


@contextmanager
def embedded(settings: Settings) -> Iterator[Server]:
    """The embedded broker in a process of its own; a cluster of two nodes for what has partitions."""
    if settings.needs_cluster:
        yield from _cluster(settings)
        return
    with _tls(settings) as files:
        flags: dict[str, Any] = {"tls_cert": str(files[0]), "tls_key": str(files[1])} if files else {}
        host = _listen_host(settings)
        options: dict[str, Any] = {"max_rdy_count": _MAX_RDY, "mem_queue_size": 10_000_000, "tcp_address": f"{host}:0"}
        with BrokerProcess(lookupd=settings.kind == "start", **options, **flags) as broker:
            nsqd = broker.nsqd
            yield Server(
                "embedded nsqd",
                _many(nsqd.tcp, settings.connections),
                (nsqd.http,),
                (f"http://{broker.lookupd.http}",) if settings.kind == "start" else (),
                pids=(broker.pid,),
                **_trust(files),
            )


def _cluster(settings: Settings) -> Iterator[Server]:
    with ClusterProcess(_CLUSTER_NODES, 1, max_rdy_count=_MAX_RDY) as cluster:

        def create(topic: str) -> None:
            cluster.create_topic(topic, settings.partitions, channels=[CHANNEL], ordered=True)

        yield Server(
            "embedded cluster",
            tuple(nsqd.tcp for nsqd in cluster.nsqds),
            lookupds=tuple(f"http://{lookupd.http}" for lookupd in cluster.lookupds),
            pids=(cluster.pid,),
            create_topic=create,
        )


@contextmanager
def _tls(settings: Settings) -> Iterator[tuple[Path, Path] | None]:
    with ExitStack() as stack:
        if not settings.tls:
            yield None
            return
        yield binaries.certificate(Path(stack.enter_context(tempfile.TemporaryDirectory())))


def _trust(files: tuple[Path, Path] | None) -> dict[str, Any]:
    """What a Server says of the certificate made by ``_tls``."""
    if files is None:
        return {}
    cafile = str(files[0])
    return {"cafile": cafile, "client_options": {"tls_v1": True, "tls_options": {"cafile": cafile}}}


@contextmanager
def _lookupd(folder: Path, settings: Settings) -> Iterator[binaries.Started | None]:
    with ExitStack() as stack:
        is_needed = settings.kind == "start"
        yield stack.enter_context(binaries.nsqlookupd(folder)) if is_needed else None


def from_folder(folder: Path) -> Source:
    """A source that starts the nsqd binary of a folder."""

    @contextmanager
    def source(settings: Settings) -> Iterator[Server]:
        if settings.needs_cluster:
            raise ConfigError("partitions need a cluster: the embedded one, or yours with --lookupd")
        with _tls(settings) as files, _lookupd(folder, settings) as lookupd:
            flags = [f"-tls-cert={files[0]}", f"-tls-key={files[1]}"] if files else []
            if lookupd:
                flags += [f"-lookupd-tcp-address={lookupd.tcp}", "-broadcast-address=127.0.0.1"]
            with binaries.nsqd(folder, _listen_host(settings), *flags) as started:
                yield Server(
                    started.version,
                    _many(started.tcp, settings.connections),
                    (started.http,),
                    (f"http://{lookupd.http}",) if lookupd else (),
                    pids=(started.pid,),
                    **_trust(files),
                )

    return source


def given_nsqds(nsqds: Sequence[Address], options: Mapping[str, Any]) -> Source:
    """A source of nsqds that run already; topics stay there. ``options``: those of a client for TLS and AUTH."""

    @contextmanager
    def source(settings: Settings) -> Iterator[Server]:
        if settings.needs_cluster:
            raise ConfigError("partitions need a lookup service: --lookupd")
        yield Server(f"nsqd {', '.join(map(str, nsqds))}", tuple(nsqds), client_options=options)

    return source


def given_lookupds(lookupds: Sequence[str], options: Mapping[str, Any]) -> Source:
    """A source of the nsqds that lookup services know. ``options``: those of a client for TLS and AUTH."""
    tls_options = options.get("lookupd_tls_options")

    @contextmanager
    def source(settings: Settings) -> Iterator[Server]:
        poller = LookupPoller(lookupds, LookupConfig(lookupd_tls_options=tls_options))
        try:
            nodes = list(poller.nodes())
        finally:
            poller.stop()
        yield Server(
            f"nsqds of {', '.join(lookupds)}",
            tuple(node.tcp for node in nodes),
            tuple(node.http for node in nodes if node.http),
            lookupds=tuple(lookupds) if settings.needs_cluster else (),
            client_options=options,
            create_topic=_creator(lookupds[0], tls_options, settings) if settings.needs_cluster else None,
        )

    return source


def _creator(lookupd: str, tls_options: Mapping[str, Any] | None, settings: Settings) -> CreateTopic:
    def create(topic: str) -> None:
        with LookupdHTTPClient.from_url(lookupd, tls_options=tls_options) as client:
            client.create_topic(topic, partition_num=settings.partitions, replicator=1, orderedmulti=True)

    return create
