"""The clusters that have bad days: a real one, on hosts of its own where the machine has such, and the embedded one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from gevent import get_hub

from nsq_fast.broker import ClusterProcess
from nsq_fast.errors import NsqError
from nsq_fast.names import Address
from support.cluster import RedesignedCluster
from support.namespaces import Network

from .faults import NAMES, cut_off_a_leader, etcd_away, freeze_a_leader, restart_lookupds, silence_a_leader

T = TypeVar("T")


class RealCluster:
    """See ``faults.Cluster``. What blocks runs in a thread, so that the watch goes on meanwhile.

    Args:
        no_network: why its servers are not on hosts of their own; None when they are.
    """

    takeover = 60.0
    quiet = 75.0
    outage = 20.0

    def __init__(self, cluster: RedesignedCluster, network: Network | None, no_network: str | None) -> None:
        self._cluster, self._network = cluster, network
        self.nodes = [nsqd.tcp_address for nsqd in cluster.nsqds]
        self.lookupds = [str(address) for address in cluster.lookupd_addresses]
        self.missing = {} if network else {NAMES[cut_off_a_leader]: no_network or "no network of its own"}

    def create_topic(self, topic: str, partitions: int, channels: tuple[str, ...]) -> None:
        """Create an ordered topic with a replica on each nsqd; return when it takes publishes."""
        _aside(lambda: self._cluster.create_topic(topic, partitions, len(self.nodes), channels=channels, ordered=True))

    def is_whole(self, topic: str, partitions: int) -> bool:
        return _aside(
            lambda: all(len(self._cluster.in_sync(topic, each)) == len(self.nodes) for each in range(partitions))
        )

    def move_leader(self, topic: str, partition: int) -> bool:
        return _aside(lambda: self._cluster.move_leader(topic, partition))

    def kill(self, node: int) -> None:
        self._cluster.nsqds[node].kill()

    def terminate(self, node: int) -> None:
        _aside(self._cluster.nsqds[node].terminate)

    def start(self, node: int) -> None:
        self._cluster.nsqds[node].start()

    def freeze(self, node: int) -> None:
        self._cluster.nsqds[node].freeze()

    def thaw(self, node: int) -> None:
        self._cluster.nsqds[node].thaw()

    def cut_off(self, node: int) -> None:
        assert self._network is not None
        self._network.cut_off(node)

    def reconnect(self, node: int) -> None:
        assert self._network is not None
        self._network.reconnect(node)

    def stop_etcd(self) -> None:
        _aside(self._cluster.etcd.terminate)

    def start_etcd(self) -> None:
        self._cluster.etcd.start()

    def restart_lookupd(self, number: int) -> None:
        _aside(self._cluster.lookupds[number].terminate)
        self._cluster.lookupds[number].start()


class EmbeddedCluster:
    """See ``faults.Cluster``. The nsqds are in one process: none can be stopped alone."""

    takeover = 20.0
    quiet = 1.0
    outage = 1.0

    def __init__(self, cluster: ClusterProcess) -> None:
        self._cluster = cluster
        self.nodes = [Address(*nsqd.tcp) for nsqd in cluster.nsqds]
        self.lookupds = [str(lookupd.http) for lookupd in cluster.lookupds]
        alone = "the embedded nsqds are one process"
        self.missing = {
            NAMES[silence_a_leader]: alone,
            NAMES[freeze_a_leader]: alone,
            NAMES[etcd_away]: "the embedded cluster has no etcd",
            NAMES[restart_lookupds]: "the embedded nsqlookupds are one process",
        }

    def create_topic(self, topic: str, partitions: int, channels: tuple[str, ...]) -> None:
        """As that of a real cluster."""
        self._cluster.create_topic(topic, partitions, len(self.nodes), channels=channels, ordered=True)

    def is_whole(self, topic: str, partitions: int) -> bool:
        with suppress(NsqError):
            self._cluster.wait_stable()
            return True
        return False

    def move_leader(self, topic: str, partition: int) -> bool:
        with suppress(NsqError):
            self._cluster.move_leader(topic, partition)
            return True
        return False

    def kill(self, node: int) -> None:
        self._cluster.kill_node(node)

    terminate = kill

    def start(self, node: int) -> None:
        self._cluster.restart_node(node)

    def cut_off(self, node: int) -> None:
        self._cluster.isolate_node(node)
        self._cluster.set_faults(f"nsqd{node}.tcp", drop_replies=True)

    def reconnect(self, node: int) -> None:
        self._cluster.set_faults(f"nsqd{node}.tcp", drop_replies=False)
        self._cluster.heal_node(node)

    def freeze(self, node: int) -> None:
        raise NotImplementedError

    def thaw(self, node: int) -> None:
        raise NotImplementedError

    def stop_etcd(self) -> None:
        raise NotImplementedError

    def start_etcd(self) -> None:
        raise NotImplementedError

    def restart_lookupd(self, number: int) -> None:
        raise NotImplementedError


def _aside(work: Callable[[], T]) -> T:
    result: T = get_hub().threadpool.apply(work)
    return result
