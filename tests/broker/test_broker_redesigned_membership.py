"""Lost nodes, leases and elections over random schedules of trouble, in virtual time.

Nodes crash and forget what they were told, pause in the middle of anything, lose their disks for a while, and are cut
off from each other or from the coordinator; messages come late and in another order, and clocks differ in speed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsq_fast.broker.redesigned.log import Draft, PartitionLog, Record
from nsq_fast.broker.redesigned.replication import LEASE_SHARE, UNKNOWN, Membership, Replica, ReplicaFailed, ReplicaSet
from nsq_fast.errors import NotLeader, NotWritable

COORDINATOR = "coordinator"
NODES = ("a", "b", "c", "d")
DETECTION = 1.0
HEARTBEAT = DETECTION / 10
LOOK = DETECTION / 15
DRIFT = 0.05
LATEST = 0.6
"""Seconds that a message takes at most; most of them take far less."""
QUIET = 5 * DETECTION


class FailingLog(PartitionLog):
    """A log whose disk may fail."""

    is_failing = False

    def append(self, drafts: Sequence[Draft]) -> list[Record]:
        self._try()
        return super().append(drafts)

    def copy(self, other: PartitionLog) -> None:
        if self.end != other.end:
            self._try()
        super().copy(other)

    def rewrite(self) -> None:
        self._try()

    def _try(self) -> None:
        if self.is_failing:
            raise OSError("the disk is bad")


class World:
    """One partition on some nodes; everything happens at a virtual time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.speeds = {each: self.random.uniform(1 - DRIFT, 1 + DRIFT) for each in (*NODES, COORDINATOR)}
        self.begins = {each: self.random.uniform(0, 1000) for each in (*NODES, COORDINATOR)}
        self.dead: set[str] = set()
        self.paused: dict[str, list[Callable[[], None]]] = {}
        self.cut: set[frozenset[str]] = set()
        self.lives = dict.fromkeys(NODES, 0)
        self.logs: dict[str, FailingLog] = {}
        self.leaders: dict[int, str | None] = {}
        self.confirmed: list[bytes] = []
        self.written = 0
        self.set = ReplicaSet(NODES[: self.random.randint(1, 3)], self.make_log, self.decided)
        self.quorum = self.random.randint(1, len(self.set.replicas) // 2 + 1)
        self.membership = Membership(DETECTION, lambda: [self.set])
        self.leases = {node: self.membership.make_lease() for node in NODES}
        for node in NODES:
            self.after(0, self.beat, node)
            self.after(0, self.publish, node)
        self.after(0, self.look)

    def make_log(self, node: str) -> PartitionLog:
        return self.logs.setdefault(node, FailingLog(0, False))

    # --- time --------------------------------------------------------------------------------------------------------

    def clock(self, who: str) -> float:
        return self.begins[who] + self.now * self.speeds[who]

    def after(self, delay: float, do: Callable[..., None], *args: object) -> None:
        heapq.heappush(self.events, (self.now + delay, self.random.getrandbits(60), lambda: do(*args)))

    def run(self, duration: float) -> None:
        end = self.now + duration
        while self.events and self.events[0][0] <= end:
            self.now, _, do = heapq.heappop(self.events)
            do()
            self.check()
        self.now = end

    # --- the network -------------------------------------------------------------------------------------------------

    def can_talk(self, one: str, other: str) -> bool:
        is_up = not {one, other} & self.dead and not {one, other} & self.paused.keys()
        return is_up and frozenset((one, other)) not in self.cut

    def send(self, origin: str, target: str, arrive: Callable[[], None]) -> None:
        delay = self.random.choice((0.0, 0.001, 0.01, self.random.uniform(0, LATEST)))
        life = self.lives.get(target)

        def land() -> None:
            if target in self.dead or self.lives.get(target) != life or frozenset((origin, target)) in self.cut:
                return
            if target in self.paused:  # it reads that when it goes on
                self.paused[target].append(land)
            else:
                arrive()

        if self.can_talk(origin, origin) and frozenset((origin, target)) not in self.cut:
            self.after(delay, land)

    # --- nodes -------------------------------------------------------------------------------------------------------

    def beat(self, node: str) -> None:
        self.after(HEARTBEAT, self.beat, node)
        sent_at = self.clock(node)
        self.send(node, COORDINATOR, lambda: self.heard(node, sent_at))

    def answered(self, node: str, sent_at: float, assignment: object) -> None:
        if node in self.set.replicas:
            self.set.replicas[node].adopt(assignment)  # type: ignore[arg-type]
        self.leases[node].renew(sent_at)

    def leads(self, replica: Replica) -> bool:
        replica.has_lease = self.leases[replica.node].holds(self.clock(replica.node))
        return replica.has_lease and replica.assignment.leader == replica.node

    def write(self, node: str) -> bool:
        """Whether a node confirms a write; it goes on without those that cannot write, as far as it may."""
        replica = self.set.replicas.get(node)
        if replica is None or not self.can_talk(node, node):
            return False
        self.leads(replica)
        body = b"%d" % self.written
        self.written += 1
        try:
            replica.append([Draft(body)], lambda other: self.reach(node, other), self.quorum)
        except (NotLeader, NotWritable):
            return False
        except ReplicaFailed as failed:
            return self.has_left(failed.node, replica) and self.write(node)
        self.confirmed.append(body)
        # Any replica in sync may be the next to lead.
        logs = [self.logs[each] for each in self.set.assignment.isr]
        assert all(log.read(log.end - 1, 1)[0].body == body for log in logs)
        assert self.leaders[replica.assignment.epoch] == node
        return True

    def has_left(self, failed: str, leader: Replica) -> bool:
        """Whether the coordinator takes a replica out of those in sync that the leader could not write."""
        if not self.can_talk(leader.node, COORDINATOR) or leader.assignment != self.set.assignment:
            return False
        has_left = self.set.leave(failed)
        self.set.tell({leader.node})
        return has_left

    def publish(self, node: str) -> None:
        self.after(self.random.uniform(0, LOOK), self.publish, node)
        self.write(node)

    def reach(self, node: str, other: str) -> Replica | None:
        return self.set.replicas.get(other) if self.can_talk(node, other) else None

    # --- the coordinator ---------------------------------------------------------------------------------------------

    def heard(self, node: str, sent_at: float) -> None:
        self.membership.heard(node, self.clock(COORDINATOR))
        self.elect()
        assignment = self.set.assignment
        self.send(COORDINATOR, node, lambda: self.answered(node, sent_at, assignment))

    def look(self) -> None:
        self.after(LOOK, self.look)
        if COORDINATOR not in self.paused:
            self.membership.lose(self.clock(COORDINATOR))
            self.elect()
            self.catch_up()

    def elect(self) -> None:
        self.membership.elect()
        _, leader, isr = self.set.assignment
        assert (leader is None) == (not self.membership.trusted.intersection(isr))
        assert leader is None or leader in self.membership.trusted

    def catch_up(self) -> None:
        leader = self.set.assignment.leader
        if leader is None or not self.can_talk(leader, COORDINATOR):
            return
        for node in set(self.set.replicas).difference(self.set.assignment.isr):
            if self.can_talk(node, leader) and self.can_talk(node, COORDINATOR):
                self.set.catch_up(node, self.membership.trusted)

    # --- trouble -----------------------------------------------------------------------------------------------------

    def crash_or_start(self, node: str) -> None:
        self.lives[node] += 1
        self.go_on(node)
        self.dead ^= {node}
        self.leases[node] = self.membership.make_lease()
        if node in self.set.replicas:
            self.set.replicas[node].assignment = UNKNOWN

    def pause_or_go_on(self, who: str) -> None:
        if who in self.paused:
            self.go_on(who)
        else:
            self.paused[who] = []

    def go_on(self, who: str) -> None:
        for land in self.paused.pop(who, []):
            self.after(0, land)

    def cut_off(self, who: str) -> None:
        self.cut |= {frozenset((who, other)) for other in (*NODES, COORDINATOR) if other != who}

    def cut_or_mend(self, one: str, other: str) -> None:
        self.cut ^= {frozenset((one, other))}

    def mend(self) -> None:
        self.cut.clear()

    def spoil_or_repair(self, node: str) -> None:
        log = self.logs.get(node)
        if log is not None:
            log.is_failing = not log.is_failing

    def move(self, node: str) -> None:
        _, leader, isr = self.set.assignment
        if leader is not None and node in isr and all(self.can_talk(each, COORDINATOR) for each in (leader, node)):
            self.set.lead(node)
            self.set.tell((leader, node))

    def join(self, node: str) -> None:
        self.set.add(node)

    def trouble(self) -> None:
        """Something random."""
        dice, node = self.random, self.random.choice(NODES)
        happen: Callable[[], None] = dice.choice(
            (
                lambda: self.crash_or_start(node),
                lambda: self.pause_or_go_on(dice.choice((node, node, COORDINATOR))),
                lambda: self.cut_off(node),
                lambda: self.cut_or_mend(*dice.sample((*NODES, COORDINATOR), 2)),
                self.mend,
                lambda: self.spoil_or_repair(node),
                lambda: self.move(node),
                lambda: self.join(node),
            )
        )
        happen()

    def end_trouble(self) -> None:
        self.mend()
        for node in sorted(self.dead):
            self.crash_or_start(node)
        for who in sorted(self.paused):
            self.go_on(who)
        for log in self.logs.values():
            log.is_failing = False

    # --- what holds --------------------------------------------------------------------------------------------------

    def decided(self) -> None:
        epoch, leader, isr = self.set.assignment
        assert epoch not in self.leaders
        assert epoch > max(self.leaders, default=1)
        self.leaders.setdefault(1, next(iter(self.set.replicas)))
        self.leaders[epoch] = leader
        for node in isr:
            self.check_log(node)

    def check_log(self, node: str) -> None:
        """Every confirmed write is there, once, in order."""
        stored = [record.body for record in self.logs[node].read(0, self.written)]
        assert len(set(stored)) == len(stored)
        known = set(self.confirmed)
        assert [body for body in stored if body in known] == self.confirmed

    def check(self) -> None:
        """At no time two nodes take themselves for the leader."""
        assert sum(self.leads(replica) for replica in self.set.replicas.values()) <= 1


def test_random_schedules() -> None:
    confirmed, elections = [], []

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 2**32), st.lists(st.floats(0.01, 2 * DETECTION), max_size=30))
    def holds(seed: int, pauses: list[float]) -> None:
        world = World(seed)
        world.leaders.setdefault(1, next(iter(world.set.replicas)))
        for pause in (*pauses, DETECTION):
            world.run(pause)
            world.trouble()
        world.end_trouble()
        world.run(QUIET)
        _, leader, isr = world.set.assignment
        assert set(isr) == set(world.set.replicas)
        assert leader is not None
        assert world.write(leader)
        for node in isr:
            world.check_log(node)
        confirmed.append(len(world.confirmed))
        elections.append(len(world.leaders))

    holds()
    assert max(confirmed) > 10  # they are not all stuck
    assert max(elections) > 3


def test_a_node_that_is_silent_for_the_detection_time_is_lost() -> None:
    replicas = ReplicaSet(("a", "b"), lambda node: PartitionLog(0, False))
    membership = Membership(2.0, lambda: [replicas])
    membership.heard("a", 10.0)
    membership.heard("b", 11.0)
    assert membership.lose(11.9) == frozenset()
    assert membership.next_loss(("a", "b", "unknown")) == 12.0
    assert membership.lose(12.0) == {"a"}
    membership.elect()
    assert replicas.assignment[1:] == ("b", ("b",))
    assert membership.next_loss(("a",)) is None
    membership.heard("a", 12.5)
    assert membership.trusted == {"a", "b"}
    membership.elect()
    assert replicas.assignment[1:] == ("b", ("b",))  # it has to catch up first


def test_a_node_that_was_heard_again_is_not_lost_for_an_earlier_silence() -> None:
    membership = Membership(2.0, list)
    membership.heard("a", 10.0)
    membership.heard("a", 11.0)
    assert membership.lose(12.5) == frozenset()


def test_a_lease_is_counted_from_when_the_heartbeat_was_sent_and_ends_before_the_node_is_lost() -> None:
    membership = Membership(2.0, list)
    lease = membership.make_lease()
    assert not lease.holds(10.0)
    lease.renew(10.0)
    membership.heard("a", 10.0)
    assert lease.holds(11.5)
    assert not lease.holds(10.0 + 2.0 * LEASE_SHARE)
    assert membership.lose(10.0 + 2.0 * LEASE_SHARE) == frozenset()
    lease.renew(9.0)  # the answer to an earlier heartbeat, which comes late
    assert lease.holds(11.5)


def test_a_leader_without_a_lease_refuses_writes_though_it_is_the_only_one_in_sync() -> None:
    replicas = ReplicaSet(("a",), lambda node: PartitionLog(0, False))
    leader = replicas.replicas["a"]
    leader.has_lease = False
    with pytest.raises(NotLeader):
        leader.append([Draft(b"x")], replicas.replicas.get, 1)
    leader.has_lease = True
    assert leader.append([Draft(b"x")], replicas.replicas.get, 1)
