"""A real redesigned cluster on loopback: etcd, nsqlookupds and nsqds as child processes; and hosts of their own for it.

It needs the redesigned binaries (see ``servers``) and an etcd that still has the v2 API, on PATH. The daemons cannot
choose their own ports, so free ones are held for them.

Hosts of their own are network namespaces on a bridge, each of which can be cut off without a word: it neither answers
nor refuses, and what is sent to it is lost, as behind a switch that died. Connections stay open at both ends. Linux,
and root.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from nsq_fast.names import Address

from .servers import Daemon, accepts, find_server, free_address
from .wire import WireClient

# A brand-new cluster elects leaders for new topics slowly in its first minutes, and calls itself stable later still.
READY_TIMEOUT = 900.0
POLL = 0.1

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


class Nsqd(Daemon):
    """One nsqd of the cluster."""

    def __init__(self, command: list[str], log: Path, tcp_address: Address, http_address: Address) -> None:
        super().__init__(command, log)
        self.tcp_address = tcp_address
        self.http_address = http_address


class RedesignedCluster:
    """``nsqds`` nsqds under ``lookupds`` nsqlookupds; every topic is made by ``create_topic``.

    With a ``network`` each nsqd is on a host of its own there; all others are on this side of it.
    ``nsqd_flags`` and ``lookupd_flags`` are added to the command lines.
    """

    def __init__(
        self,
        path: Path,
        nsqds: int = 3,
        lookupds: int = 2,
        network: Network | None = None,
        nsqd_flags: tuple[str, ...] = (),
        lookupd_flags: tuple[str, ...] = (),
    ) -> None:
        self._path = path
        self._nsqd_flags, self._lookupd_flags = nsqd_flags, lookupd_flags
        self._network = network
        self._host = network.address if network else LOOPBACK
        etcd_port, peer_port = _free_ports(2)
        self.cluster_id = f"test-{etcd_port}"
        self.etcd_address = Address(self._host, etcd_port)
        self._flags = [
            f"-cluster-leadership-addresses=http://{self.etcd_address}",
            f"-cluster-id={self.cluster_id}",
        ]
        self.lookupd_addresses: list[Address] = []
        self.lookupd_tcp_addresses: list[Address] = []
        self.lookupds: list[Daemon] = []
        self.nsqds: list[Nsqd] = []
        self.etcd = Daemon(etcd_command(path / "etcd", etcd_port, peer_port, self._host), path / "etcd.log")
        self._daemons: list[Daemon] = []
        try:
            self._run(self.etcd)
            _wait_for(lambda: _get(f"http://{self.etcd_address}/v2/keys") is not None, "etcd")
            for number in range(lookupds):
                self._start_lookupd(number)
            _wait_for(lambda: self.leader() is not None, "a lookupd leader")
            for number in range(nsqds):
                self._start_nsqd(number)
            _wait_for(lambda: len(self._lookup("/nodes").get("producers") or []) == nsqds, "every nsqd registered")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()

    @property
    def is_stable(self) -> bool:
        """Whether the cluster would move a leader."""
        return bool(self._lookup("/cluster/stats").get("stable"))

    def wait_stable(self) -> None:
        _wait_for(lambda: self.is_stable, "the cluster to be stable")

    def leader(self) -> Address | None:
        """HTTP address of the lookupd that takes admin calls."""
        listed = _get(f"http://{self.lookupd_addresses[0]}/listlookup")
        leader = (listed or {}).get("lookupdleader") or {}
        return Address(leader["NodeIP"], int(leader["HttpPort"])) if leader.get("HttpPort") else None

    def create_topic(
        self, topic: str, partitions: int = 1, replicas: int = 1, *, channels: tuple[str, ...] = ("ch",), **flags: bool
    ) -> None:
        """Create a topic (flags: ordered, ext, multi_part) with its channels; wait until all of it can be written."""
        query = f"topic={topic}&partition_num={partitions}&replicator={replicas}"
        query += "&orderedmulti=true" if flags.get("ordered") else ""
        query += "&extend=true" if flags.get("ext") else ""
        query += "&multipart=true" if flags.get("multi_part") else ""
        _wait_for(lambda: self._admin(f"/topic/create?{query}"), f"topic {topic}")
        _wait_for(lambda: len(self.partitions(topic, "r")) == partitions, f"leaders of {topic}")
        for partition, node in self.partitions(topic, "r").items():
            for channel in channels:
                url = f"http://{node['broadcast_address']}:{node['http_port']}/channel/create"
                query = f"?topic={topic}&partition={partition}&channel={channel}"
                _wait_for(partial(_post, url + query), f"channel {channel} of {topic}-{partition}")
        _wait_for(lambda: len(self.partitions(topic, "w")) == partitions, f"{topic} to be writable")

    def partitions(self, topic: str, access: str = "w") -> dict[int, dict[str, Any]]:
        """Partition -> its leader, as lookup shows it now."""
        found = self._lookup(f"/lookup?topic={topic}&access={access}&metainfo=true")
        return {int(key): node for key, node in ((found or {}).get("partitions") or {}).items()}

    def move_leader(self, topic: str, partition: int) -> bool:
        """Ask for another leader; False while the cluster refuses (unstable, or no other replica)."""
        node = self.partitions(topic)[partition]
        target = self._replica_other_than(topic, partition, node["distributed_id"])
        query = f"topic={topic}&partition={partition}&move_leader=true"
        query += f"&move_from={node['distributed_id']}&move_to={target}"
        return target is not None and self._admin(f"/topic/partition/move?{query}")

    def leader_of(self, topic: str, partition: int) -> Nsqd:
        node = self.partitions(topic)[partition]
        address = Address(node["broadcast_address"], node["tcp_port"])
        return next(nsqd for nsqd in self.nsqds if nsqd.tcp_address == address)

    def in_sync(self, topic: str, partition: int) -> set[str]:
        """The ids of the nodes that have all of a partition, as its leader says; none where none leads."""
        node = self.partitions(topic).get(partition)
        return _replicas(node, topic, partition) if node else set()

    def _replica_other_than(self, topic: str, partition: int, leader: str) -> str | None:
        for node in self._lookup("/nodes")["producers"]:
            others = _replicas(node, topic, partition) - {leader}
            if others:
                return min(others)
        return None

    def _admin(self, route: str) -> bool:
        leader = self.leader()
        return leader is not None and _post(f"http://{leader}{route}")

    def _lookup(self, route: str) -> Any:
        return _get(f"http://{self.leader() or self.lookupd_addresses[0]}{route}") or {}

    def _start_lookupd(self, number: int) -> None:
        interface = self._network.bridge if self._network else "lo"
        command, log, tcp, http = self._command("nsqlookupd", number, self._host, interface)
        lookupd = Daemon([*command, *self._lookupd_flags], log)
        self._run(lookupd)
        self.lookupds.append(lookupd)
        self.lookupd_addresses.append(http)
        self.lookupd_tcp_addresses.append(tcp)
        _wait_for(lambda: _get(f"http://{http}/info") is not None, f"nsqlookupd {number}")

    def _start_nsqd(self, number: int) -> None:
        host, interface = (self._network.addresses[number], INTERFACE) if self._network else (LOOPBACK, "lo")
        data = self._path / f"data{number}"
        data.mkdir()
        command, log, tcp, http = self._command("nsqd", number, host, interface)
        command += [f"-data-path={data}", f"-worker-id={number + 1}", "-https-address=", *self._nsqd_flags]
        nsqd = Nsqd(self._network.command(number, command) if self._network else command, log, tcp, http)
        self._run(nsqd)
        self.nsqds.append(nsqd)
        _wait_for(lambda: _get(f"http://{http}/info") is not None, f"nsqd {number}")

    def _command(self, name: str, number: int, host: str, interface: str) -> tuple[list[str], Path, Address, Address]:
        """The command line of a server, its log, and its TCP and HTTP address."""
        tcp, http, rpc, metric = _free_ports(4)
        log = self._path / f"{name}{number}"
        log.mkdir()
        command = [
            str(find_server(name, "redesigned")),
            f"-tcp-address={host}:{tcp}",
            f"-http-address={host}:{http}",
            f"-metric-address={host}:{metric}",
            f"-rpc-port={rpc}",
            f"-log-dir={log}",
            f"-broadcast-interface={interface}",
            f"-broadcast-address={host}",
            *self._flags,
        ]
        return command, log / "out.log", Address(host, tcp), Address(host, http)

    def _run(self, daemon: Daemon) -> None:
        self._daemons.append(daemon)
        daemon.start()


class Standalone:
    """A real redesigned nsqd registered at an nsqlookupd, without a cluster: INTERNAL_CREATE_TOPIC makes topics."""

    def __init__(self, path: Path) -> None:
        lookupd_tcp, lookupd_http, lookupd_metric, tcp, http, metric = (
            Address(LOOPBACK, port) for port in _free_ports(6)
        )
        self.tcp_address, self.http_address, self.lookupd_address = tcp, http, lookupd_http
        common = ["-broadcast-interface=lo", f"-broadcast-address={LOOPBACK}", f"-log-dir={path}"]
        lookupd = [f"-tcp-address={lookupd_tcp}", f"-http-address={lookupd_http}", f"-metric-address={lookupd_metric}"]
        nsqd = [f"-tcp-address={tcp}", f"-http-address={http}", f"-metric-address={metric}", f"-data-path={path}"]
        nsqd += [f"-lookupd-tcp-address={lookupd_tcp}", "-worker-id=1", "-https-address="]
        self._daemons: list[Daemon] = []
        try:
            for name, flags, face in (("nsqlookupd", lookupd, lookupd_http), ("nsqd", nsqd, http)):
                command = [str(find_server(name, "redesigned")), *common, *flags]
                daemon = Daemon(command, path / f"{name}.out")
                self._daemons.append(daemon)
                daemon.start()
                _wait_for(partial(_answer, daemon, f"http://{face}/info"), name)
            _wait_for(partial(accepts, tcp), "the TCP port of nsqd, which may open after that of HTTP")
        except BaseException:
            self.stop()
            raise

    def create_topic(self, topic: str, channel: str = "c") -> None:
        """Create a topic of one partition, 0, with a channel; wait until lookup names its nsqd to everybody.

        To publishers it does so for a topic with a channel only (youzan/nsq: nsqlookupd/http.go, doLookup).
        """
        client = WireClient(self.tcp_address)
        assert client.command(b"INTERNAL_CREATE_TOPIC %s 0\n" % topic.encode()) == b"OK"
        client.close()
        _post(f"http://{self.http_address}/channel/create?topic={topic}&partition=0&channel={channel}")
        for access in "rw":
            lookup = f"http://{self.lookupd_address}/lookup?topic={topic}&access={access}"
            _wait_for(partial(_named, lookup), f"lookup to name an nsqd of {topic}, access={access}")

    def stop(self) -> None:
        for daemon in self._daemons:
            daemon.kill()


def etcd_command(data: Path, port: int, peer_port: int, host: str = LOOPBACK) -> list[str]:
    """The command line of an etcd of one member, with the v2 API."""
    client, peer = f"http://{host}:{port}", f"http://{host}:{peer_port}"
    return [
        "etcd",
        "--enable-v2=true",
        f"--data-dir={data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
    ]


def _replicas(node: dict[str, Any], topic: str, partition: int) -> set[str]:
    """The ids of the replicas in sync, as a node says; none unless it leads the partition."""
    query = f"topic={topic}&partition={partition}"
    found = _get(f"http://{node['broadcast_address']}:{node['http_port']}/coordinator/stats?{query}") or {}
    replicas = [each for stats in found.get("topic_coord_stats") or [] for each in stats.get("isr_stats") or []]
    return {str(replica["node_id"]) for replica in replicas if replica.get("node_id") is not None}


def _free_ports(count: int) -> list[int]:
    return [free_address().port for _ in range(count)]


def _get(url: str) -> Any:
    request = urllib.request.Request(url, headers={"Accept": "application/vnd.nsq; version=1.0"})
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return json.loads(reply.read() or b"{}")
    except (OSError, ValueError):
        return None


def _named(url: str) -> Any:
    answer = _get(url) or {}
    return answer.get("producers") or answer.get("partitions")


def _answer(daemon: Daemon, url: str) -> Any:
    daemon.check()
    return _get(url)


def _post(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


def _wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {READY_TIMEOUT:.0f} s for {what}")
        time.sleep(POLL)  # sleep: looks again and again
