"""One face over the embedded redesigned cluster and the real one (``cluster``), so that a scenario runs on both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nsq_fast.broker import ClusterProcess, NsqdOptions, NsqdServer
from nsq_fast.client.admin import LookupdHTTPClient, NsqdHTTPClient
from nsq_fast.errors import NsqError
from nsq_fast.names import Address


class Fleet:
    """A redesigned cluster: the embedded one, or a real one, which does the same. What one cannot do is in ``cannot``,
    and does nothing there.

    Attributes:
        name: for reports.
        is_real: whether its servers are real ones, and slow.
        lookupds: HTTP addresses of the nsqlookupds; ``nodes``: TCP addresses of the nsqds. A node is its place there.
        cannot: what cannot be done to it, by the name of a method, and why.
        takeover: s in which another nsqd leads what a silent one led.
        quiet: s of a silence that is longer than the heartbeats of consumers allow.
        outage: s that etcd is away, and that too few replicas are alive.
    """

    name: str
    is_real: bool
    lookupds: list[str]
    nodes: list[Address]
    cannot: dict[str, str]
    takeover: float
    quiet: float
    outage: float

    def wait_stable(self) -> None:
        """Return when leaders can be moved."""

    def freeze(self, node: int) -> None:
        """SIGSTOP."""

    def thaw(self, node: int) -> None:
        """End ``freeze``."""

    def stop_etcd(self) -> None:
        """SIGTERM."""

    def start_etcd(self) -> None:
        """Start it again."""

    def restart_lookupd(self, number: int) -> None:
        """SIGTERM, and start it again."""

    def leaders(self, topic: str) -> dict[int, Address]:
        """Partition -> TCP address of its leader, as lookup for writing shows it now."""
        return leaders(self.lookupds[0], topic)

    def kill_leader(self, topic: str, partition: int) -> int:
        node = self.nodes.index(self.leaders(topic)[partition])
        self.kill(node)
        return node

    def unanswered(self, topic: str, channel: str) -> int:
        """Messages that the leaders still hold for a channel: waiting, in flight or deferred."""
        return unanswered(self.lookupds[0], topic, channel)


class EmbeddedFleet(Fleet):
    """The embedded cluster, in a process of its own."""

    name = "embedded cluster"
    is_real = False
    takeover, quiet, outage = 20.0, 1.0, 1.0

    def __init__(self, cluster: ClusterProcess) -> None:
        self._cluster = cluster
        self.cannot = {
            "freeze": "the embedded nsqds are one process",
            "stop_etcd": "the embedded cluster has no etcd",
            "restart_lookupd": "the embedded nsqlookupds are one process",
        }
        self.lookupds = [str(lookupd.http) for lookupd in cluster.lookupds]
        self.nodes = [Address(*nsqd.tcp) for nsqd in cluster.nsqds]

    def create_topic(
        self, topic: str, partitions: int, replicas: int, *, channels: tuple[str, ...] = ("ch",), **flags: bool
    ) -> None:
        """Create a topic (flags: ``ordered``, ``ext``, ``multi_part``); return when it takes publishes."""
        self._cluster.create_topic(topic, partitions, replicas, channels=channels, **flags)

    def is_whole(self, topic: str, partitions: int) -> bool:
        """Whether every replica of a topic with one on each nsqd is in sync."""
        return taken(self._cluster.wait_stable)

    def move_leader(self, topic: str, partition: int) -> bool:
        """Let another replica lead; False while the cluster refuses."""
        return taken(lambda: self._cluster.move_leader(topic, partition))

    def kill(self, node: int) -> None:
        self._cluster.kill_node(node)

    terminate = kill

    def restart(self, node: int) -> None:
        self._cluster.restart_node(node)

    def cut_off(self, node: int) -> None:
        """Lose all that is sent to an nsqd, and by it."""
        self._cluster.isolate_node(node)
        self._cluster.set_faults(f"nsqd{node}.tcp", drop_replies=True)

    def reconnect(self, node: int) -> None:
        self._cluster.set_faults(f"nsqd{node}.tcp", drop_replies=False)
        self._cluster.heal_node(node)

    @contextmanager
    def original_nsqd(self, path: Path) -> Iterator[NsqdServer]:
        """One that is registered at the cluster; its ``tcp_address``."""
        registered_at = tuple(str(lookupd.tcp) for lookupd in self._cluster.lookupds)
        with NsqdServer(NsqdOptions(lookupd_tcp_addresses=registered_at)) as server:
            yield server


def leaders(lookupd: str, topic: str, access: str = "w") -> dict[int, Address]:
    """Partition -> leader, as an nsqlookupd shows it for an access: "w", to publish, or "r", to consume."""
    return of_nodes(_partitions(lookupd, topic, access=access))


def channels(lookupd: str, topic: str, channel: str) -> dict[int, dict[str, Any]]:
    """Partition -> what its leader says of a channel; without those where it does not exist yet."""
    found = {}
    for number, node in _partitions(lookupd, topic).items():
        with NsqdHTTPClient(node["broadcast_address"], node["http_port"]) as nsqd:
            rows = nsqd.stats(topic=topic).get("topics") or []
        for row in rows:
            if str(row.get("topic_partition", number)) == number:
                named = [each for each in row.get("channels") or [] if each["channel_name"] == channel]
                found.update({int(number): each for each in named})
    return found


def unanswered(lookupd: str, topic: str, channel: str) -> int:
    """What the leaders of a topic still hold for a channel."""
    held = ("depth", "in_flight_count", "deferred_count")
    return sum(int(each[name]) for each in channels(lookupd, topic, channel).values() for name in held)


def _partitions(lookupd: str, topic: str, **query: str) -> dict[str, Any]:
    with LookupdHTTPClient.from_url(lookupd) as client:
        found: dict[str, Any] = client.lookup(topic, metainfo=True, **query).get("partitions") or {}
    return found


def of_nodes(partitions: dict[Any, dict[str, Any]]) -> dict[int, Address]:
    return {int(number): Address(node["broadcast_address"], node["tcp_port"]) for number, node in partitions.items()}


def taken(order: Callable[[], object]) -> bool:
    """Whether the cluster does it now."""
    with suppress(NsqError):
        order()
        return True
    return False
