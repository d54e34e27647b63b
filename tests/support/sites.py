"""A small redesigned cluster, embedded or real, under one face: for tests of what is different in the two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsq_fast.broker import RedesignedCluster
from nsq_fast.names import Address

from . import cluster
from .http import ask
from .redesigned import sized
from .sequences import ACCEPT
from .waiting import until
from .wire import WireClient

PATIENCE = 900.0
"""Seconds that a real cluster may take for one thing."""


class Site:
    """A cluster with one nsqlookupd.

    Attributes:
        is_ours: whether it is the embedded one.
        lookupd: the HTTP address of its nsqlookupd.
        nodes: its nsqds, each with ``tcp_address`` and ``http_address``.
    """

    is_ours: bool
    cluster: Any
    lookupd: Address

    @property
    def nodes(self) -> list[Any]:
        return list(self.cluster.nsqds)

    def create_topic(self, topic: str, partitions: int = 1, replicas: int = 1, **flags: bool) -> None:
        """Create a topic (flags: ``ordered``) with the channel ``ch``; return when it takes publishes."""
        self.cluster.create_topic(topic, partitions, replicas, channels=("ch",), **flags)

    def kill(self, node: Any) -> None:
        """End an nsqd as SIGKILL does."""

    def end(self, node: Any) -> None:
        """End an nsqd as SIGTERM does."""

    def start(self, node: Any) -> None:
        """Start an nsqd that has ended."""

    def stop(self) -> None:
        """Kill everything."""
        self.cluster.stop()


class OurSite(Site):
    """The embedded cluster."""

    is_ours = True

    def __init__(self, nodes: int, **options: Any) -> None:
        self.cluster = RedesignedCluster(nodes, 1, **{"readiness": 0.0, **options})
        self.cluster.start()
        self.lookupd = self.cluster.lookupds[0].http_address

    def kill(self, node: Any) -> None:
        self.cluster.kill_node(node)

    end = kill

    def start(self, node: Any) -> None:
        self.cluster.restart_node(node)


class RealSite(Site):
    """A real cluster in a folder of its own."""

    is_ours = False

    def __init__(self, path: Path, nodes: int, **flags: tuple[str, ...]) -> None:
        path.mkdir()
        self._path = path
        self.cluster = cluster.RedesignedCluster(path, nodes, 1, **flags)
        self.lookupd = self.cluster.lookupd_addresses[0]

    def log(self) -> str:
        """What its nsqlookupd has written."""
        return (self._path / "nsqlookupd0" / "nsqlookupd.INFO").read_text(errors="replace")

    def kill(self, node: Any) -> None:
        node.kill()

    def end(self, node: Any) -> None:
        node.stop()

    def start(self, node: Any) -> None:
        node.start()


def led(site: Site, topic: str, access: str = "r") -> dict[int, Any]:
    """Partition -> the nsqd that leads it, as lookup shows it to consumers, or to publishers ("w")."""
    answer = ask(site.lookupd, "GET", f"/lookup?topic={topic}&access={access}", Accept=ACCEPT)
    ports = {node.tcp_address.port: node for node in site.nodes}
    found = answer.json.get("partitions") or {} if answer.status == 200 else {}
    return {int(number): ports[node["tcp_port"]] for number, node in found.items()}


def in_sync(site: Site, topic: str) -> set[Any]:
    """The nsqds that have all of partition 0, as its leader says; none while nobody leads."""
    leader = led(site, topic).get(0)
    if leader is None:
        return set()
    answer = ask(leader.http_address, "GET", f"/coordinator/stats?topic={topic}&partition=0")
    rows = [row for topic_row in answer.json["topic_coord_stats"] or () for row in topic_row["isr_stats"] or ()]
    ids = {row["node_id"] for row in rows}
    return {node for node in site.nodes if any(f":{node.tcp_address.port}:" in id for id in ids)}


def figures(node: Any, topic: str) -> dict[str, Any]:
    """What an nsqd says of partition 0."""
    answer = ask(node.http_address, "GET", f"/stats?format=json&topic={topic}", Accept=ACCEPT)
    [row] = answer.json["topics"]
    return dict(row)


def publish(node: Any, topic: str, *bodies: bytes) -> None:
    """Publish to partition 0; each is confirmed."""
    client = WireClient(node.tcp_address)
    for body in bodies:
        assert client.command(f"PUB {topic} 0\n".encode() + sized(body)) == b"OK"
    client.close()


def eventually(probe: Callable[[], Any]) -> Any:
    """What ``probe`` returns, when it is true: a real cluster may need minutes."""
    return until(probe, PATIENCE, every=0.05)
