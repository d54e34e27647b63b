"""Which nodes the cluster trusts, and until when a node may lead, in a time that is told. No clock, no I/O.

Nodes send heartbeats. One that is silent for the detection time is *lost*: others may lead what it led, and it is
trusted again when it is heard of. Each answer gives the node a *lease*, counted from when it sent the heartbeat; a node
whose lease has ended leads nothing. A lease begins no later than the silence and is shorter than the detection time. So
a node leads no more before it can be replaced, however late messages arrive, and however long it was paused; clocks may
differ in speed by as much as a lease is shorter.

The real server has heartbeats and the detection time of etcd, and finds out about a leader that was replaced when it
writes (youzan/nsq: consistence/nsqd_node_etcd.go, ETCD_TTL; nsqlookup_coordinator.go, handleNsqdNodes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from .replication import ReplicaSet

LEASE_SHARE = 0.8
"""The length of a lease, in detection times."""


class Lease:
    """Until when a node may lead, by its own clock.

    Args:
        length: of a lease, in seconds.
    """

    def __init__(self, length: float) -> None:
        self._length = length
        self.ends_at = -inf

    def renew(self, sent_at: float) -> None:
        """A heartbeat was answered that the node has sent at ``sent_at``; answers may come in any order."""
        self.ends_at = max(self.ends_at, sent_at + self._length)

    def holds(self, now: float) -> bool:
        """Whether the node may lead."""
        return now < self.ends_at


class Membership:
    """Trusts nodes, and decides who leads partitions in place of those that are lost.

    Args:
        detection: seconds of silence after which a node is lost.
        sets: gives the replicas of every partition that it is to decide about.
    """

    def __init__(self, detection: float, sets: Callable[[], Iterable[ReplicaSet]]) -> None:
        self._detection = detection
        self._sets = sets
        self._heard: dict[str, float] = {}

    @property
    def trusted(self) -> frozenset[str]:
        """The nodes that are not lost."""
        return frozenset(self._heard)

    def make_lease(self) -> Lease:
        """The lease of a node, which has not been heard of yet."""
        return Lease(self._detection * LEASE_SHARE)

    def heard(self, node: str, now: float) -> None:
        """A heartbeat has come."""
        self._heard[node] = now

    def next_loss(self, nodes: Iterable[str]) -> float | None:
        """When the first of these nodes is lost, if it stays silent; None if none of them is trusted."""
        return min((self._heard[node] + self._detection for node in nodes if node in self._heard), default=None)

    def lose(self, now: float) -> frozenset[str]:
        """Lose the nodes that have been silent for too long; which these are."""
        lost = frozenset(node for node, heard in self._heard.items() if now >= heard + self._detection)
        for node in lost:
            del self._heard[node]
        return lost

    def elect(self) -> None:
        """Decide who leads where the leader is not trusted, and take those that are not trusted out of the ISR."""
        trusted = self.trusted
        for replicas in self._sets():
            replicas.elect(trusted)
            replicas.shrink(trusted)
