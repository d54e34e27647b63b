"""Replicas: what was confirmed is in the log of every later leader, and no epoch has two leaders, whatever happens."""

from __future__ import annotations

import random

import pytest

from nsq_fast.broker.redesigned.log import Draft, PartitionLog
from nsq_fast.broker.redesigned.replication import Replica, ReplicaSet
from nsq_fast.errors import NotLeader, NotWritable

NODES = ("a", "b", "c", "d")
COORDINATOR = "coordinator"
STEPS = 60


def bodies(log: PartitionLog) -> list[bytes]:
    return [record.body for record in log.read(0, log.end)]


class Schedule:
    """Crashes, cut links and late news in a random order; time is their order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.set = ReplicaSet(NODES[: self.random.randint(1, 3)], lambda node: PartitionLog(0, False))
        self.quorum = self.random.randint(1, 2)
        self.alive = set(NODES)
        self.cut: set[frozenset[str]] = set()
        self.confirmed: list[bytes] = []
        self.written = 0
        self.confirmed_by: dict[int, str] = {}

    def run(self) -> None:
        actions = [self.write] * 8 + [self.crash_or_start] * 2 + [self.cut_or_mend] * 3 + [self.mend] * 2
        actions += [self.elect] * 3 + [self.shrink] * 2 + [self.tell] * 3 + [self.catch_up] * 4 + [self.move_leader]
        for _ in range(STEPS):
            self.random.choice(actions)()
            self.check()

    def can_talk(self, node: str, other: str) -> bool:
        return {node, other} - {COORDINATOR} <= self.alive and frozenset((node, other)) not in self.cut

    @property
    def reachable(self) -> set[str]:
        return {node for node in NODES if self.can_talk(COORDINATOR, node)}

    # --- what happens ---

    def node(self) -> str:
        return self.random.choice(NODES)

    def crash_or_start(self) -> None:
        self.alive ^= {self.node()}

    def cut_or_mend(self) -> None:
        one, other = self.random.sample((*NODES, COORDINATOR, COORDINATOR), 2)
        if one != other:
            self.cut ^= {frozenset((one, other))}

    def mend(self) -> None:
        self.cut.clear()
        self.alive = set(NODES)

    def write(self) -> None:
        for node in self.random.sample(NODES, len(NODES)):
            if node in self.set.replicas and node in self.alive:
                self.write_to(self.set.replicas[node])

    def write_to(self, replica: Replica) -> None:
        drafts = [Draft(b"%d" % (self.written + n)) for n in range(self.random.randint(1, 2))]
        self.written += len(drafts)
        try:
            records = replica.append(drafts, lambda other: self.reach(replica.node, other), self.quorum)
        except (NotLeader, NotWritable):
            return
        self.confirmed += [record.body for record in records]
        assert self.confirmed_by.setdefault(replica.assignment.epoch, replica.node) == replica.node

    def reach(self, node: str, other: str) -> Replica | None:
        return self.set.replicas.get(other) if self.can_talk(node, other) else None

    # --- what the coordinator decides, when it likes to ---

    def elect(self) -> None:
        self.set.elect(self.reachable)

    def shrink(self) -> None:
        self.set.shrink(self.reachable)

    def tell(self) -> None:
        self.set.tell({node for node in self.reachable if self.random.random() < 0.6})

    def catch_up(self) -> None:
        node = self.node()
        self.set.add(node)
        leader = self.set.assignment.leader
        if leader is not None and (node == leader or self.can_talk(leader, node)):
            self.set.catch_up(node, self.reachable)

    def move_leader(self) -> None:
        node, leader = self.node(), self.set.assignment.leader
        if node in self.set.assignment.isr and {leader, node} <= self.reachable:
            self.set.lead(node)

    # --- what holds ---

    def check(self) -> None:
        leader = self.set.assignment.leader
        for node in (leader,) if leader is not None else self.set.assignment.isr:
            stored = bodies(self.set.replicas[node].log)
            positions = [stored.index(body) for body in self.confirmed]
            assert positions == sorted(positions)
            assert len(set(stored)) == len(stored)
        leaders: dict[int, str] = {}
        for replica in self.set.replicas.values():
            epoch, believed, _ = replica.assignment
            if believed == replica.node:
                assert leaders.setdefault(epoch, believed) == believed


@pytest.mark.parametrize("group", range(10))
def test_random_schedules(group: int) -> None:
    confirmed = []
    for seed in range(group * 100, (group + 1) * 100):
        schedule = Schedule(seed)
        try:
            schedule.run()
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"Schedule({seed}) breaks what is promised") from error
        confirmed.append(len(schedule.confirmed))
    assert sum(confirmed) > 500  # they are not all stuck


def make(*names: str) -> ReplicaSet:
    return ReplicaSet(names, lambda node: PartitionLog(0, False))


def test_a_leader_that_was_replaced_and_does_not_know_it_confirms_nothing() -> None:
    replicas = make("a", "b", "c")
    former = replicas.replicas["a"]
    replicas.elect({"b", "c"})
    replicas.tell({"b", "c"})
    assert replicas.assignment.leader == "b"
    with pytest.raises(NotLeader):
        former.append([Draft(b"x")], replicas.replicas.get, 2)
    assert bodies(former.log) == []


def test_a_write_waits_for_all_in_sync() -> None:
    replicas = make("a", "b", "c")
    leader = replicas.replicas["a"]
    with pytest.raises(NotWritable):
        leader.append([Draft(b"x")], lambda node: None if node == "c" else replicas.replicas[node], 2)
    replicas.shrink({"a", "b"})
    with pytest.raises(NotWritable):  # it has not been told yet
        leader.append([Draft(b"x")], lambda node: None if node == "c" else replicas.replicas[node], 2)
    replicas.tell({"a"})
    leader.append([Draft(b"y")], replicas.replicas.get, 2)
    assert [bodies(replica.log) for replica in replicas.replicas.values()] == [[b"y"], [b"y"], []]


def test_too_few_in_sync_are_not_written_to() -> None:
    replicas = make("a", "b")
    replicas.shrink({"a"})
    replicas.tell({"a"})
    with pytest.raises(NotWritable):
        replicas.replicas["a"].append([Draft(b"x")], replicas.replicas.get, 2)


def test_a_replica_that_is_not_in_sync_never_leads() -> None:
    replicas = make("a", "b")
    replicas.shrink({"a"})
    replicas.elect({"b"})
    assert replicas.assignment.leader is None
    replicas.elect({"a", "b"})
    assert replicas.assignment.leader == "a"
    assert replicas.catch_up("b", {"a", "b"})
    assert set(replicas.assignment.isr) == {"a", "b"}


def test_what_others_have_not_confirmed_is_dropped_by_the_one_that_comes_back() -> None:
    replicas = make("a", "b")
    replicas.replicas["a"].append([Draft(b"1")], replicas.replicas.get, 1)
    replicas.replicas["a"].log.append([Draft(b"only here")])
    replicas.elect({"b"})
    replicas.shrink({"b"})
    replicas.tell({"b"})
    replicas.replicas["b"].append([Draft(b"2"), Draft(b"3")], replicas.replicas.get, 1)
    assert replicas.catch_up("a", {"a", "b"})
    logs = [replica.log for replica in replicas.replicas.values()]
    assert [bodies(log) for log in logs] == [[b"1", b"2", b"3"]] * 2
    assert logs[0].end_offset == logs[1].end_offset
