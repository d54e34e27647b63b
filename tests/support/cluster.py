"""A real redesigned cluster on loopback: etcd, nsqlookupds and nsqds as child processes; and hosts of their own for it.

It needs the redesigned binaries (see ``servers``) and an etcd that still has the v2 API, on PATH. The daemons cannot
choose their own ports, so free ones are held for them.

Hosts of their own are network namespaces on a bridge, each of which can be cut off without a word: it neither answers
nor refuses, and what is sent to it is lost, as behind a switch that died. Connections stay open at both ends. Linux,
and root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from gevent import get_hub

from nsq_fast import LookupdHTTPClient, NsqdHTTPClient
from nsq_fast.client.admin import ClusterAdmin
from nsq_fast.errors import NsqError
from nsq_fast.names import Address

from .fleet import Fleet, of_nodes, taken
from .http import ask
from .servers import Daemon, RealNsqd, accepts, find_server, free_address
from .waiting import until
from .wire import WireClient

# A brand-new cluster elects leaders for new topics slowly in its first minutes, and calls itself stable later still.
READY_TIMEOUT = 900.0
POLL = 0.1
PATIENCE = 30.0
"""Seconds for the answer to a request."""

LOOPBACK = "127.0.0.1"
INTERFACE = "eth0"
_TIMEOUT = 20.0


def missing_for_cluster() -> str | None:
    """What this machine lacks to run a cluster; None when it has everything."""
    for name in ("nsqd", "nsqlookupd"):
        if find_server(name, "redesigned") is None:
            return f"no redesigned {name}"
    return None if shutil.which("etcd") else "no etcd"


@cache
def missing_for_namespaces() -> str | None:
    """What keeps this machine from having hosts of their own; None when nothing does."""
    if shutil.which("ip") is None:
        return "no ip command (iproute2)"
    try:
        Network(1).close()
    except CannotBuild as error:
        return str(error)
    return None


class CannotBuild(Exception):
    """The machine does not let us make namespaces: what it says."""


class Network:
    """``hosts`` namespaces on a bridge; ``address`` is that of this side of the bridge.

    Attributes:
        bridge: the interface of this side.
        addresses: of the hosts, in order.
    """

    def __init__(self, hosts: int) -> None:
        # The name of an interface has at most 15 characters.
        self.bridge = f"nsq{os.getpid()}"
        subnet = f"10.{200 + os.getpid() // 256 % 50}.{os.getpid() % 256}"
        self.address = f"{subnet}.1"
        self.addresses = [f"{subnet}.{number + 2}" for number in range(hosts)]
        self._hosts = [f"{self.bridge}h{number}" for number in range(hosts)]
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def command(self, host: int, command: list[str]) -> list[str]:
        """The command line that runs a command on a host; the process is the command's own."""
        return ["ip", "netns", "exec", self._hosts[host], *command]

    def cut_off(self, host: int) -> None:
        """Lose all that is sent to a host, and by it."""
        _ip("link", "set", self._port(host), "nomaster")

    def reconnect(self, host: int) -> None:
        _ip("link", "set", self._port(host), "master", self.bridge)

    def close(self) -> None:
        """Remove all of it; processes on the hosts have to have ended."""
        for host in self._hosts:
            _ip("netns", "del", host, check=False)
        _ip("link", "del", self.bridge, check=False)

    def _build(self) -> None:
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("addr", "add", f"{self.address}/24", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        for number, host in enumerate(self._hosts):
            _ip("netns", "add", host)
            port = ("link", "add", self._port(number), "type", "veth", "peer", "name", INTERFACE)
            _ip(*port, "address", _mac(number), "netns", host)
            _ip("link", "set", self._port(number), "master", self.bridge, "up")
            for interface in ("lo", INTERFACE):
                _ip("-n", host, "link", "set", interface, "up")
            _ip("-n", host, "addr", "add", f"{self.addresses[number]}/24", "dev", INTERFACE)
        self._remember_addresses()

    def _remember_addresses(self) -> None:
        """Tell every side for good where the others are: a host that is cut off does not become "unreachable"."""
        for number, address in enumerate(self.addresses):
            neighbour = ("neigh", "replace", address, "lladdr", _mac(number), "nud", "permanent", "dev")
            _ip(*neighbour, self.bridge)
            for other, host in enumerate(self._hosts):
                if other != number:
                    _ip("-n", host, *neighbour, INTERFACE)

    def _port(self, host: int) -> str:
        return f"{self.bridge}p{host}"


def _mac(host: int) -> str:
    return f"02:6e:73:71:00:{host:02x}"


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(("ip", *arguments), capture_output=True, text=True, timeout=_TIMEOUT)
    if check and done.returncode:
        raise CannotBuild(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class _Server(Daemon):
    """An nsqd or an nsqlookupd, with all that it keeps in ``folder``.

    Args:
        host: where it listens, at ``interface``.
        wrap: what a command line becomes, to run on another host.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *flags: str,
        host: str = LOOPBACK,
        interface: str = "lo",
        wrap: Callable[[list[str]], list[str]] = list,
    ) -> None:
        self.tcp_address, self.http_address, metric = (Address(host, free_address().port) for _ in range(3))
        folder.mkdir()
        command = [
            str(find_server(name, "redesigned")),
            f"-tcp-address={self.tcp_address}",
            f"-http-address={self.http_address}",
            f"-metric-address={metric}",
            f"-log-dir={folder}",
            f"-broadcast-interface={interface}",
            f"-broadcast-address={host}",
            *flags,
        ]
        if name == "nsqd":
            command += [f"-data-path={folder}", "-https-address="]
        super().__init__(wrap(command), folder / "out.log")


class _Servers:
    """Child processes that end with this."""

    def __init__(self) -> None:
        self._daemons: list[Daemon] = []

    def _run(self, daemon: Daemon, address: Address, path: str = "/info") -> None:
        """Start it; return when it answers there."""
        self._daemons.append(daemon)
        daemon.start()
        _wait_for(lambda: (daemon.check(), _answers(address, path))[1], daemon.command[0])

    def _start(self, name: str, folder: Path, *flags: str, **where: Any) -> _Server:
        server = _Server(name, folder, *flags, **where)
        self._run(server, server.http_address)
        return server

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()


class RealCluster(_Servers, Fleet):
    """A real cluster: ``count`` nsqds under ``lookupds`` nsqlookupds, with an etcd.

    With a ``network`` each nsqd is on a host of its own there; all others are on this side of it. ``no_network`` says
    why there is none; ``nsqd_flags`` are added to the command lines.
    """

    name = "real cluster"
    is_real = True
    takeover, quiet, outage = 60.0, 75.0, 20.0

    def __init__(
        self,
        path: Path,
        count: int = 3,
        lookupds: int = 2,
        network: Network | None = None,
        no_network: str = "no network of its own",
        nsqd_flags: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self._network = network
        self.cannot = {} if network else {"cut_off": no_network}
        host, interface = (network.address, network.bridge) if network else (LOOPBACK, "lo")
        self.etcd_address, peer = (Address(host, free_address().port) for _ in range(2))
        self.etcd = Daemon(etcd_command(path / "etcd", self.etcd_address, peer), path / "etcd.log")
        flags = (f"-cluster-leadership-addresses=http://{self.etcd_address}", f"-cluster-id=test-{peer.port}")
        self.nsqds: list[_Server] = []
        try:
            self._run(self.etcd, self.etcd_address, "/v2/keys")
            self._lookupds = [
                self._member("nsqlookupd", path / f"nsqlookupd{number}", *flags, host=host, interface=interface)
                for number in range(lookupds)
            ]
            self.lookupd_addresses = [each.http_address for each in self._lookupds]
            self.lookupds = [str(address) for address in self.lookupd_addresses]
            _wait_for(self.leader, "a lookupd leader")
            for number in range(count):
                own = (f"-worker-id={number + 1}", *flags, *nsqd_flags)
                self.nsqds.append(self._member("nsqd", path / f"nsqd{number}", *own, **self._place(number)))
            self.nodes = [nsqd.tcp_address for nsqd in self.nsqds]
            _wait_for(
                lambda: len(self._asked(LookupdHTTPClient.nodes, {}).get("producers") or ()) == count, "all nsqds"
            )
        except BaseException:
            self.stop()
            raise

    def _member(self, name: str, folder: Path, *flags: str, **where: Any) -> _Server:
        return self._start(name, folder, f"-rpc-port={free_address().port}", *flags, **where)

    def _place(self, node: int) -> dict[str, Any]:
        if self._network is None:
            return {}
        wrap = partial(self._network.command, node)
        return {"host": self._network.addresses[node], "interface": INTERFACE, "wrap": wrap}

    # What it is asked

    def leader(self) -> Address | None:
        """HTTP address of the lookupd that takes admin calls."""
        with suppress(NsqError), LookupdHTTPClient(*self.lookupd_addresses[0]) as lookupd:
            found = lookupd.list_lookupds().get("lookupdleader") or {}
            return Address(found["NodeIP"], int(found["HttpPort"])) if found.get("HttpPort") else None
        return None

    def _asked(self, ask: Callable[[LookupdHTTPClient], Any], otherwise: Any) -> Any:
        """What the leading nsqlookupd answers, if it does."""
        leader = self.leader() or self.lookupd_addresses[0]
        with suppress(NsqError), LookupdHTTPClient(*leader, timeout=PATIENCE) as lookupd:
            return ask(lookupd)
        return otherwise

    def partitions(self, topic: str, access: str = "w") -> dict[int, dict[str, Any]]:
        """Partition -> its leader, as lookup shows it now."""
        found = self._asked(lambda lookupd: lookupd.lookup(topic, access=access, metainfo=True), {})
        return {int(number): node for number, node in (found.get("partitions") or {}).items()}

    def leaders(self, topic: str) -> dict[int, Address]:
        return of_nodes(self.partitions(topic))

    @property
    def _admin(self) -> ClusterAdmin:
        return ClusterAdmin(self.lookupds, timeout=PATIENCE)

    def wait_stable(self) -> None:
        def is_stable() -> bool:
            with suppress(NsqError):
                return self._admin.stats().is_stable
            return False

        _wait_for(is_stable, "the cluster to be stable")

    def is_whole(self, topic: str, partitions: int) -> bool:
        return all(len(self._in_sync(topic, number)) == len(self.nodes) for number in range(partitions))

    def _in_sync(self, topic: str, partition: int) -> set[str]:
        """The ids of the nodes that have all of a partition, as its leader says; none where none leads."""
        node = self.partitions(topic).get(partition)
        if node is None:
            return set()
        with suppress(NsqError), NsqdHTTPClient(node["broadcast_address"], node["http_port"]) as nsqd:
            found = nsqd.call_json("GET", "/coordinator/stats", topic=topic, partition=partition) or {}
            rows = [row for stats in found.get("topic_coord_stats") or () for row in stats.get("isr_stats") or ()]
            return {str(row["node_id"]) for row in rows if row.get("node_id") is not None}
        return set()

    # What it is told

    def create_topic(
        self, topic: str, partitions: int = 1, replicas: int = 1, *, channels: tuple[str, ...] = ("ch",), **flags: bool
    ) -> None:
        names = {"ordered": "orderedmulti", "ext": "extend", "multi_part": "multipart"}
        query: dict[str, Any] = {names[flag]: True for flag, is_set in flags.items() if is_set}
        query |= {"topic": topic, "partition_num": partitions, "replicator": replicas}

        def is_led(access: str) -> bool:
            return len(self.partitions(topic, access)) == partitions

        _wait_for(
            lambda: self._asked(lambda lookupd: lookupd.call("POST", "/topic/create", **query), None) is not None,
            f"topic {topic}",
        )
        _wait_for(lambda: is_led("r"), f"leaders of {topic}")
        for number, node in self.partitions(topic, "r").items():
            with NsqdHTTPClient(node["broadcast_address"], node["http_port"], timeout=PATIENCE) as nsqd:
                for channel in channels:
                    create = partial(nsqd.create_channel, topic, channel, partition=number)
                    _wait_for(partial(taken, create), f"channel {channel} of {topic}-{number}")
        _wait_for(lambda: is_led("w"), f"{topic} to be writable")

    def move_leader(self, topic: str, partition: int) -> bool:
        with suppress(NsqError):
            others = self._in_sync(topic, partition) - {self._admin.leader_id(topic, partition)}
            if others:
                self._admin.move_leader(topic, partition, min(others))
                return True
        return False

    def kill(self, node: int) -> None:
        self.nsqds[node].kill()

    def terminate(self, node: int) -> None:
        _aside(self.nsqds[node].stop)

    def restart(self, node: int) -> None:
        self.nsqds[node].start()

    def freeze(self, node: int) -> None:
        self.nsqds[node].freeze()

    def thaw(self, node: int) -> None:
        self.nsqds[node].thaw()

    def cut_off(self, node: int) -> None:
        assert self._network is not None
        self._network.cut_off(node)

    def reconnect(self, node: int) -> None:
        assert self._network is not None
        self._network.reconnect(node)

    def stop_etcd(self) -> None:
        _aside(self.etcd.stop)

    def start_etcd(self) -> None:
        self.etcd.start()

    def restart_lookupd(self, number: int) -> None:
        _aside(self._lookupds[number].stop)
        self._lookupds[number].start()

    @contextmanager
    def original_nsqd(self, path: Path) -> Iterator[RealNsqd]:
        server = RealNsqd(path, *(f"-lookupd-tcp-address={each.tcp_address}" for each in self._lookupds))
        try:
            yield server
        finally:
            server.kill()


class Standalone(_Servers):
    """A real redesigned nsqd registered at an nsqlookupd, without a cluster: INTERNAL_CREATE_TOPIC makes topics."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            lookupd = self._start("nsqlookupd", path / "nsqlookupd")
            flags = (f"-lookupd-tcp-address={lookupd.tcp_address}", "-worker-id=1")
            nsqd = self._start("nsqd", path / "nsqd", *flags)
            _wait_for(partial(accepts, nsqd.tcp_address), "the TCP port of nsqd, which may open after that of HTTP")
        except BaseException:
            self.stop()
            raise
        self.tcp_address, self.http_address = nsqd.tcp_address, nsqd.http_address
        self.lookupd_address = lookupd.http_address

    def create_topic(self, topic: str, channel: str = "c") -> None:
        """Create a topic of one partition, 0, with a channel; wait until lookup names its nsqd to everybody.

        To publishers it does so for a topic with a channel only (youzan/nsq: nsqlookupd/http.go, doLookup).
        """
        client = WireClient(self.tcp_address)
        assert client.command(b"INTERNAL_CREATE_TOPIC %s 0\n" % topic.encode()) == b"OK"
        client.close()
        with NsqdHTTPClient(*self.http_address) as nsqd, LookupdHTTPClient(*self.lookupd_address) as lookupd:
            nsqd.create_channel(topic, channel, partition=0)

            def is_named(access: str) -> bool:
                with suppress(NsqError):
                    found = lookupd.lookup(topic, access=access)
                    return bool(found.get("producers") or found.get("partitions"))
                return False

            _wait_for(lambda: is_named("r") and is_named("w"), f"lookup to name an nsqd of {topic}")


def etcd_command(data: Path, client: Address, peer: Address) -> list[str]:
    """The command line of an etcd of one member, with the v2 API."""
    return [
        "etcd",
        "--enable-v2=true",
        f"--data-dir={data}",
        f"--listen-client-urls=http://{client}",
        f"--advertise-client-urls=http://{client}",
        f"--listen-peer-urls=http://{peer}",
        f"--initial-advertise-peer-urls=http://{peer}",
        f"--initial-cluster=default=http://{peer}",
    ]


def _answers(address: Address, path: str) -> bool:
    with suppress(OSError, ValueError, IndexError):
        return ask(address, "GET", path).status == 200
    return False


def _aside(work: Callable[[], object]) -> None:
    """In a thread, so that greenlets go on."""
    get_hub().threadpool.apply(work)


def _wait_for(condition: Callable[[], object], what: str) -> None:
    until(condition, READY_TIMEOUT, POLL, about=lambda: what)
