"""Start nsqd and nsqlookupd from a folder of server binaries on free ports; stop them and delete what they stored."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from gevent import sleep

from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.client.admin import LookupdHTTPClient, LookupPoller, NsqdHTTPClient
from nsq_fast.columns import ColumnSubscription
from nsq_fast.config import ConnectionConfig, LookupConfig
from nsq_fast.errors import ConfigError, NsqError
from nsq_fast.names import Address
from nsq_fast.producer import Producer

from .results import Settings

START_TIMEOUT = 10.0
_POLL = 0.01
_LISTENING = re.compile(r"(TCP|HTTP): listening on \S+?:(\d+)$", re.MULTILINE)
_FLAGS = ("-mem-queue-size=10000000", "-max-rdy-count=100000", "-https-address=127.0.0.1:0")


class Started(NamedTuple):
    """A running server, and what it calls itself."""

    pid: int
    version: str
    tcp: Address
    http: Address


@contextmanager
def _run(binary: Path, host: str, *flags: str) -> Iterator[Started]:
    """Run a server on free ports of ``host``, with a folder of its own. Raises ConfigError without a binary, NsqError
    when it ends."""
    if not os.access(binary, os.X_OK):
        raise ConfigError(f"{binary} is not there, or not executable")
    with tempfile.TemporaryDirectory(prefix="nsq-fast-bench-") as folder:
        log = Path(folder) / "log"
        if binary.name == "nsqd":
            flags = (f"-data-path={folder}", *_FLAGS, *flags)
        command = [str(binary), f"-tcp-address={host}:0", f"-http-address={host}:0", *flags]
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
        try:
            ports = _wait_for_ports(process, binary.name, log)
            tcp, http = (Address("127.0.0.1", ports[face]) for face in ("TCP", "HTTP"))
            yield Started(process.pid, _version(binary), tcp, http)
        finally:
            process.kill()
            process.wait()


def _wait_for_ports(process: subprocess.Popen[bytes], name: str, log: Path) -> dict[str, int]:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        ports = {face: int(port) for face, port in _LISTENING.findall(log.read_text())}
        if len(ports) == 2:
            return ports
        time.sleep(_POLL)
    raise NsqError(f"{name} did not start:\n{log.read_text()[-2000:]}")


def _version(binary: Path) -> str:
    done = subprocess.run([str(binary), "-version"], capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip().split(" (")[0]


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 with its key, by the openssl program. Raises NsqError where that fails."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    try:
        done = subprocess.run([*new, "-keyout", key, "-out", cert], capture_output=True, text=True, check=False)
    except OSError as error:
        raise NsqError(f"a certificate is made with the openssl program: {error}") from error
    if done.returncode:
        raise NsqError(f"openssl made no certificate:\n{done.stderr[-1000:]}")
    return cert, key


CHANNEL = "bench"
BATCH_BYTES = 1 << 20
_TIMEOUT = 30.0
_LIST_POLL = 0.02


def create_channel(nsqd: Address, topic: str, options: Mapping[str, Any]) -> None:
    """Make the channel by subscribing once, so that it gets what is published from now on. Raises NsqError.

    Args:
        options: of a client, here and below.
    """
    config = ConnectionConfig(**{name: value for name, value in options.items() if name in ConnectionConfig.names()})
    subscription = ColumnSubscription(nsqd, topic, CHANNEL, config)
    subscription.open()
    subscription.close()


def fill_topic(nsqds: Sequence[Address], topic: str, count: int, size: int, options: Mapping[str, Any]) -> None:
    """Share ``count`` bodies of ``size`` bytes out over nsqds. Raises NsqError."""
    for number, nsqd in enumerate(nsqds):
        create_channel(nsqd, topic, options)
        with Producer([nsqd], **options) as producer:
            _fill(producer, topic, _share(count, number, len(nsqds)), size)


def fill_partitions(
    lookupds: Sequence[str], topic: str, partitions: int, count: int, size: int, options: Mapping[str, Any]
) -> None:
    """Share ``count`` bodies out over the partitions of a topic. Raises NsqError."""
    with Producer(lookupd_http_addresses=lookupds, **options) as producer:
        for partition in range(partitions):
            _fill(producer, topic, _share(count, partition, partitions), size, partition=partition)


def _fill(producer: Producer, topic: str, count: int, size: int, **place: Any) -> None:
    most = max(1, min(1000, BATCH_BYTES // (size + 4)))
    for many in [most] * (count // most) + ([count % most] if count % most else []):
        producer.multipublish(topic, [b"x" * size] * many, timeout=_TIMEOUT, **place)


def wait_until_listed(lookupd: str, topic: str) -> None:
    """Wait until a lookup finds the topic: an nsqd registers it a moment later. Raises NsqError."""
    with LookupdHTTPClient.from_url(lookupd) as client:
        deadline = monotonic() + _TIMEOUT
        while topic not in client.topics()["topics"]:
            if monotonic() > deadline:
                raise NsqError(f"{lookupd} does not list {topic} after {_TIMEOUT:.0f} s: has nsqd reached it?")
            sleep(_LIST_POLL)


def _share(count: int, number: int, places: int) -> int:
    return count * (number + 1) // places - count * number // places


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
    with ExitStack() as stack:
        files, trust = _certificate(settings, stack)
        flags: dict[str, Any] = dict(zip(("tls_cert", "tls_key"), files, strict=False))
        host, is_start = _listen_host(settings), settings.kind == "start"
        options: dict[str, Any] = {"max_rdy_count": _MAX_RDY, "mem_queue_size": 10_000_000, "tcp_address": f"{host}:0"}
        broker = stack.enter_context(BrokerProcess(lookupd=is_start, **options, **flags))
        lookupds = (f"http://{broker.lookupd.http}",) if is_start else ()
        addresses = _many(broker.nsqd.tcp, settings.connections)
        yield Server("embedded nsqd", addresses, (broker.nsqd.http,), lookupds, pids=(broker.pid,), **trust)


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


def _certificate(settings: Settings, stack: ExitStack) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The files of a certificate and its key, where the scenario is over TLS; and what a Server says of them."""
    if not settings.tls:
        return (), {}
    cert, key = map(str, certificate(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
    trust = {"cafile": cert, "client_options": {"tls_v1": True, "tls_options": {"cafile": cert}}}
    return (cert, key), trust


def from_folder(folder: Path) -> Source:
    """A source that starts the nsqd binary of a folder, and nsqlookupd where a lookup is what is measured."""

    @contextmanager
    def source(settings: Settings) -> Iterator[Server]:
        if settings.needs_cluster:
            raise ConfigError("partitions need a cluster: the embedded one, or yours with --lookupd")
        with ExitStack() as stack:
            files, trust = _certificate(settings, stack)
            flags = [f"-{name}={file}" for name, file in zip(("tls-cert", "tls-key"), files, strict=False)]
            lookupds: tuple[str, ...] = ()
            if settings.kind == "start":
                lookupd = stack.enter_context(_run(folder / "nsqlookupd", "127.0.0.1"))
                flags += [f"-lookupd-tcp-address={lookupd.tcp}", "-broadcast-address=127.0.0.1"]
                lookupds = (f"http://{lookupd.http}",)
            nsqd = stack.enter_context(_run(folder / "nsqd", _listen_host(settings), *flags))
            addresses = _many(nsqd.tcp, settings.connections)
            yield Server(nsqd.version, addresses, (nsqd.http,), lookupds, pids=(nsqd.pid,), **trust)

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
