"""One face over the embedded redesigned cluster and the real one, so that a scenario runs on both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from gevent import get_hub

from nsq_fast.broker import ClusterProcess, NsqdOptions, NsqdServer
from nsq_fast.client.admin import LookupdHTTPClient, NsqdHTTPClient
from nsq_fast.errors import NsqError
from nsq_fast.names import Address

from .cluster import RedesignedCluster
from .servers import RealNsqd
from .waiting import until

T = TypeVar("T")


class Fleet(Protocol):
    """A redesigned cluster.

    Attributes:
        name: for reports.
        is_real: whether its servers are real ones, and slow.
        lookupds: HTTP addresses of the nsqlookupds.
    """

    name: str
    is_real: bool
    lookupds: list[str]

    def create_topic(
        self, topic: str, partitions: int, replicas: int, *, channels: tuple[str, ...], **flags: bool
    ) -> None:
        """Create a topic (flags: ``ordered``, ``ext``) with its channels; return when it takes publishes."""

    def wait_stable(self) -> None:
        """Return when leaders can be moved."""

    def move_leader(self, topic: str, partition: int) -> bool:
        """Let another replica lead; False while the cluster refuses."""

    def kill_leader(self, topic: str, partition: int) -> int:
        """SIGKILL the nsqd that leads a partition; its number."""

    def restart(self, node: int) -> None:
        """Start a killed nsqd again, as it was."""

    def leaders(self, topic: str) -> dict[int, Address]:
        """Partition -> TCP address of its leader, as lookup for writing shows it now."""

    def unanswered(self, topic: str, channel: str) -> int:
        """Messages that the leaders still hold for a channel: waiting, in flight or deferred."""

    def original_nsqd(self, path: Path) -> Any:
        """A context manager: an nsqd of the original, registered at the cluster; its ``tcp_address``."""


class EmbeddedFleet:
    """The embedded cluster, in a process of its own."""

    name = "embedded cluster"
    is_real = False

    def __init__(self, cluster: ClusterProcess) -> None:
        self._cluster = cluster
        self.lookupds = [str(lookupd.http) for lookupd in cluster.lookupds]

    def create_topic(
        self, topic: str, partitions: int, replicas: int, *, channels: tuple[str, ...] = ("ch",), **flags: bool
    ) -> None:
        self._cluster.create_topic(topic, partitions, replicas, channels=channels, **flags)

    def wait_stable(self) -> None:
        """It always is."""

    def move_leader(self, topic: str, partition: int) -> bool:
        try:
            self._cluster.move_leader(topic, partition)
        except NsqError:
            return False
        return True

    def kill_leader(self, topic: str, partition: int) -> int:
        addresses = [nsqd.tcp for nsqd in self._cluster.nsqds]
        node = addresses.index(self.leaders(topic)[partition])
        self._cluster.kill_node(node)
        return node

    def restart(self, node: int) -> None:
        self._cluster.restart_node(node)

    def leaders(self, topic: str) -> dict[int, Address]:
        return leaders(self.lookupds[0], topic)

    def unanswered(self, topic: str, channel: str) -> int:
        return unanswered(self.lookupds[0], topic, channel)

    @contextmanager
    def original_nsqd(self, path: Path) -> Iterator[NsqdServer]:
        registered_at = tuple(str(lookupd.tcp) for lookupd in self._cluster.lookupds)
        server = NsqdServer(NsqdOptions(lookupd_tcp_addresses=registered_at))
        server.start()
        try:
            yield server
        finally:
            server.stop()


class RealFleet:
    """The real cluster. What blocks runs in a thread, so that clients go on meanwhile."""

    name = "real cluster"
    is_real = True

    def __init__(self, cluster: RedesignedCluster) -> None:
        self._cluster = cluster
        self.lookupds = [str(address) for address in cluster.lookupd_addresses]

    def create_topic(
        self, topic: str, partitions: int, replicas: int, *, channels: tuple[str, ...] = ("ch",), **flags: bool
    ) -> None:
        _aside(lambda: self._cluster.create_topic(topic, partitions, replicas, channels=channels, **flags))

    def wait_stable(self) -> None:
        _aside(self._cluster.wait_stable)

    def move_leader(self, topic: str, partition: int) -> bool:
        return _aside(lambda: self._cluster.move_leader(topic, partition))

    def kill_leader(self, topic: str, partition: int) -> int:
        nsqd = _aside(lambda: self._cluster.leader_of(topic, partition))
        nsqd.kill()
        return self._cluster.nsqds.index(nsqd)

    def restart(self, node: int) -> None:
        self._cluster.nsqds[node].start()

    def leaders(self, topic: str) -> dict[int, Address]:
        return _aside(
            lambda: {
                number: Address(node["broadcast_address"], node["tcp_port"])
                for number, node in self._cluster.partitions(topic).items()
            }
        )

    def unanswered(self, topic: str, channel: str) -> int:
        return unanswered(self.lookupds[0], topic, channel)

    @contextmanager
    def original_nsqd(self, path: Path) -> Iterator[RealNsqd]:
        flags = [f"-lookupd-tcp-address={address}" for address in self._cluster.lookupd_tcp_addresses]
        server = RealNsqd(path, *flags)
        try:
            yield server
        finally:
            server.kill()


def leaders(lookupd: str, topic: str, access: str = "w") -> dict[int, Address]:
    """Partition -> leader, as an nsqlookupd shows it for an access: "w", to publish, or "r", to consume."""
    with LookupdHTTPClient.from_url(lookupd) as client:
        partitions = client.lookup(topic, access=access, metainfo=True).get("partitions") or {}
    return {int(number): Address(node["broadcast_address"], node["tcp_port"]) for number, node in partitions.items()}


def channels(lookupd: str, topic: str, channel: str) -> dict[int, dict[str, Any]]:
    """Partition -> what its leader says of a channel; without those where it does not exist yet."""
    with LookupdHTTPClient.from_url(lookupd) as client:
        partitions = client.lookup(topic, metainfo=True).get("partitions") or {}
    found = {}
    for number, node in partitions.items():
        with NsqdHTTPClient(node["broadcast_address"], node["http_port"]) as nsqd:
            rows = nsqd.stats(topic=topic).get("topics") or []
        for row in rows:
            if str(row.get("topic_partition", number)) == number:
                named = [each for each in row.get("channels") or [] if each["channel_name"] == channel]
                found.update({int(number): each for each in named})
    return found


def unanswered(lookupd: str, topic: str, channel: str) -> int:
    """What the leaders of a topic still hold for a channel."""
    return sum(map(_held, channels(lookupd, topic, channel).values()))


def _held(channel: dict[str, Any]) -> int:
    return int(channel["depth"] + channel["in_flight_count"] + channel["deferred_count"])


def until_moved(fleet: Fleet, topic: str, partition: int, timeout: float) -> float:
    """Move a leader, as soon as the cluster lets us; the seconds that it took."""
    began = time.monotonic()
    until(lambda: fleet.move_leader(topic, partition), timeout, every=0.5 if fleet.is_real else 0.02)
    return time.monotonic() - began


def _aside(work: Callable[[], T]) -> T:
    result: T = get_hub().threadpool.apply(work)
    return result
