"""The replicas of one partition, which nodes are trusted, and when a write is confirmed. No clock, no I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Sequence
from math import inf
from typing import NamedTuple

from nsq_fast.broker.redesigned.log import Draft, PartitionLog, Record
from nsq_fast.errors import NotLeader, NotWritable

# --- the replicas of one partition -----------------------------------------------------------------------------------
# Who leads, who is in sync, and when a write is confirmed. No clock, no I/O.
# Decisions are made by a ``ReplicaSet``, each under an epoch of its own; each node has a ``Replica``, which knows the
# last decision that it was told of, and may be told late. What is safe does not depend on when it is told:
# - A write is confirmed when every replica of the in-sync set (ISR) that the leader knows has it, and none of them
#   knows of a later epoch. So a leader that has been replaced, and does not know it, confirms nothing.
# - Only a replica of the ISR becomes leader; so what was confirmed is in the log of every later leader.
# - A replica joins the ISR in one step with its leader's knowing of it.
# A leader without a lease (``Lease``) refuses writes, also where it is the only one in sync.
# youzan/nsq: consistence/nsqd_coordinator_cluster_write.go, doSyncOpToCluster; nsqlookup_coordinator.go,
# handleTopicLeaderElection.


class Assignment(NamedTuple):
    """A decision: under ``epoch`` the partition has this leader, or none, and these replicas are in sync."""

    epoch: int
    leader: str | None
    isr: tuple[str, ...]


UNKNOWN = Assignment(0, None, ())


class StaleEpoch(Exception):
    """A replica knows of a later decision than the leader that asks it."""


class ReplicaFailed(Exception):
    """A replica in sync cannot write; the OSError is the cause.

    Attributes:
        node: where it stands.
    """

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self.node = node


class Replica:
    """What one node has of a partition.

    Attributes:
        node: its id.
        log: its records.
        assignment: the last decision that it was told of.
        has_lease: whether its node may lead what it knows to lead.
    """

    def __init__(self, node: str, log: PartitionLog) -> None:
        self.node = node
        self.log = log
        self.assignment = UNKNOWN
        self.has_lease = True

    def adopt(self, assignment: Assignment) -> None:
        """Know of a decision; nothing happens when it knows of a later one."""
        if assignment.epoch > self.assignment.epoch:
            self.assignment = assignment

    def follow(self, leader: Replica) -> None:
        """Have the records that a leader has, and no others; StaleEpoch if it is not the leader any more."""
        if self.assignment.epoch > leader.assignment.epoch:
            raise StaleEpoch
        self.log.copy(leader.log)

    def append(self, drafts: Sequence[Draft], reach: Callable[[str], Replica | None], quorum: int) -> list[Record]:
        """Store messages as the leader, on every replica in sync; the records, which are confirmed.

        Args:
            reach: the replica of another node; None when it cannot be reached.
            quorum: how many replicas must be in sync.

        Raises NotLeader when it is not the leader, or not any more; NotWritable when too few replicas are in sync,
        or one of them cannot be reached; ReplicaFailed when another one cannot write; NotWritable, with an OSError as
        the cause, when this one cannot. After each, some replicas may have the messages, and keep them if one of these
        is the next leader.
        """
        assignment = self.assignment
        if assignment.leader != self.node or not self.has_lease:
            raise NotLeader
        if len(assignment.isr) < quorum:
            raise NotWritable
        try:
            records = self.log.append(drafts)
            if len(assignment.isr) > 1:
                self._share(self.log.end - len(records), assignment.isr, reach)
        except StaleEpoch:
            raise NotLeader from None
        except OSError as error:
            raise NotWritable from error
        return records

    def _share(self, begin: int, isr: Iterable[str], reach: Callable[[str], Replica | None]) -> None:
        """Have the others store the records from ``begin`` on; drop these where that fails."""
        try:
            for node in isr:
                if node != self.node:
                    other = reach(node)
                    if other is None:
                        raise NotWritable
                    try:
                        other.follow(self)
                    except OSError as error:
                        raise ReplicaFailed(node) from error
        except Exception:
            self.log.truncate(begin)
            raise


class ReplicaSet:
    """The replicas of a partition, and the last decision about them.

    Args:
        nodes: where they stand; the first is to lead.
        make_log: makes the log of a node; it is empty, unless the node has one from before.
        on_decided: called after each decision.

    Attributes:
        replicas: by node, also those that are not in sync.
        assignment: the last decision.
    """

    def __init__(
        self,
        nodes: Iterable[str],
        make_log: Callable[[str], PartitionLog],
        on_decided: Callable[[], None] = lambda: None,
    ) -> None:
        self._make_log = make_log
        self._on_decided = on_decided
        self.replicas = {node: Replica(node, make_log(node)) for node in nodes}
        self._failed: set[str] = set()
        isr = tuple(self.replicas)
        self.assignment = Assignment(1, isr[0], isr)
        self.tell(isr)

    def restore(self, last: Assignment) -> None:
        """Decide anew after all nodes have ended, by the last decision and the logs that are there.

        The longest log of the ISR leads: it has every confirmed write. A shorter one lacks a write that was on its way
        at the end, or was damaged: it catches up.
        """
        isr = [node for node in last.isr if node in self.replicas]
        self.assignment = Assignment(last.epoch, None, tuple(isr))
        if isr:
            end = max(self.replicas[node].log.end for node in isr)
            whole = [node for node in isr if self.replicas[node].log.end == end]
            self._decide(last.leader if last.leader in whole else whole[0], tuple(whole))

    def tell(self, nodes: Iterable[str]) -> None:
        """Tell the replicas of nodes what has been decided."""
        for node in nodes:
            if node in self.replicas:
                self.replicas[node].adopt(self.assignment)

    def elect(self, reachable: Container[str]) -> None:
        """Decide who leads, if the leader cannot be reached: the first in sync that can be, or nobody."""
        _, leader, isr = self.assignment
        if leader is None or leader not in reachable:
            found = next((node for node in isr if node in reachable), None)
            if found != leader:
                self._decide(found, isr)

    def shrink(self, reachable: Container[str]) -> None:
        """Take those that cannot be reached out of the ISR, if there is a leader."""
        _, leader, isr = self.assignment
        kept = tuple(node for node in isr if node in reachable)
        if leader in kept and kept != isr:
            self._decide(leader, kept)

    def leave(self, node: str) -> bool:
        """Take a replica out of the ISR that cannot write; False when it has to stay.

        It stays where half of the replicas or fewer are in sync; so does the leader (youzan/nsq: consistence/
        nsqlookup_coordinator.go, handleLeaveFromISR).
        """
        _, leader, isr = self.assignment
        if node == leader or node not in isr or len(isr) <= len(self.replicas) // 2:
            return False
        self._failed.add(node)
        self._decide(leader, tuple(each for each in isr if each != node))
        return True

    def catch_up(self, node: str, reachable: Container[str]) -> bool:
        """Let a replica have what the leader has, and be in sync; False when that cannot be now.

        The leader knows of it at once: else it would confirm writes that the new one does not have. One that could not
        write has to write all that it has: it may lack nothing, and be as unable as before.
        """
        _, leader, isr = self.assignment
        if leader is None or leader not in reachable or node not in reachable:
            return False
        chief, replica = self.replicas[leader], self.replicas[node]
        chief.adopt(self.assignment)
        replica.adopt(self.assignment)
        try:
            if node in self._failed:
                replica.log.rewrite()
            replica.follow(chief)
        except OSError:
            return False
        self._failed.discard(node)
        if node not in isr:
            self._decide(leader, (*isr, node))
            self.tell((leader, node))
        return True

    def lead(self, node: str) -> None:
        """Let another replica in sync lead."""
        assert node in self.assignment.isr
        self._decide(node, self.assignment.isr)

    def add(self, node: str) -> None:
        """Have a replica on one more node, which is not in sync yet."""
        if node not in self.replicas:
            self.replicas[node] = Replica(node, self._make_log(node))

    def drop(self, node: str) -> None:
        """Have no replica on a node that does not lead."""
        _, leader, isr = self.assignment
        assert node != leader
        if node in isr:
            self._decide(leader, tuple(each for each in isr if each != node))
        self._failed.discard(node)
        replica = self.replicas.pop(node, None)
        if replica is not None:
            # A file that cannot be removed is in nobody's way: the replica catches up with the leader if it is back.
            with contextlib.suppress(OSError):
                replica.log.delete()

    def _decide(self, leader: str | None, isr: tuple[str, ...]) -> None:
        self.assignment = Assignment(self.assignment.epoch + 1, leader, isr)
        self._on_decided()


# --- which nodes the cluster trusts, and until when a node may lead, in a time that is told. No clock, ---------------
# Nodes send heartbeats. One that is silent for the detection time is *lost*: others may lead what it led, and it is
# trusted again when it is heard of. Each answer gives the node a *lease*, counted from when it sent the heartbeat; a
# node whose lease has ended leads nothing. A lease begins no later than the silence and is shorter than the detection
# time. So a node leads no more before it can be replaced, however late messages arrive, and however long it was
# paused; clocks may differ in speed by as much as a lease is shorter.
# The real server has heartbeats and the detection time of etcd, and finds out about a leader that was replaced when
# it writes (youzan/nsq: consistence/nsqd_node_etcd.go, ETCD_TTL; nsqlookup_coordinator.go, handleNsqdNodes).


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
