"""What is done to a cluster, fault by fault. Each fault ends what it began, and says what happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, monotonic_ns

from gevent import sleep
from support.fleet import Fleet
from support.waiting import until

from nsq_fast.names import Address

from .programs import Consumers
from .watch import Watch

HEALTHY_TIMEOUT = 240.0
SHORT_SILENCE = 3.0
FAST_RESTART = 0.3


@dataclass
class Site:
    """Where faults happen."""

    fleet: Fleet
    watch: Watch
    consumers: Consumers
    topic: str

    def busiest(self) -> int:
        """The nsqd that leads most partitions."""
        leading = Counter(self.watch.leaders().values())
        return max(range(len(self.fleet.nodes)), key=lambda node: leading[self.fleet.nodes[node]])

    def until_others_lead(self, node: int) -> str:
        """Wait until lookup names others for what a node led; what became of it."""
        address, began = self.fleet.nodes[node], monotonic()
        led = [partition for partition, leader in self.watch.leaders().items() if leader == address]
        try:
            until(
                lambda: all(self._leader(each) not in (None, address) for each in led), self.fleet.takeover, every=0.1
            )
        except AssertionError:
            others = sum(self._leader(each) not in (None, address) for each in led)
            return f"others led {others} of its {len(led)} partitions after {self.fleet.takeover:.0f} s"
        return f"others led its {len(led)} partitions after {monotonic() - began:.1f} s"

    def until_healthy(self) -> float:
        """Wait until all partitions take publishes and have all their replicas; the seconds that it took."""
        began, since = monotonic(), monotonic_ns()
        until(lambda: self.watch.is_taking_publishes(since), HEALTHY_TIMEOUT, every=0.1)
        partitions = len(self.watch.accepted)
        until(lambda: self.fleet.is_whole(self.topic, partitions), HEALTHY_TIMEOUT, every=0.5)
        return monotonic() - began

    def _leader(self, partition: int) -> Address | None:
        return self.watch.leaders().get(partition)


Fault = Callable[[Site], str]
NAMES: dict[Fault, str] = {}
"""Every fault, in the order of a round."""

NEEDS: dict[Fault, str] = {}
"""What of a fleet, which may not have it (``Fleet.cannot``)."""


def named(name: str, needs: str = "") -> Callable[[Fault], Fault]:
    def note(fault: Fault) -> Fault:
        NAMES[fault] = name
        if needs:
            NEEDS[fault] = needs
        return fault

    return note


@named("leaders moved")
def move_leaders(site: Site) -> str:
    """Have the cluster move the leader of two partitions."""
    moved = []
    for partition in sorted(site.watch.leaders())[:2]:
        began = monotonic()
        before = site.watch.leaders().get(partition)
        until(lambda partition=partition: site.fleet.move_leader(site.topic, partition), HEALTHY_TIMEOUT, every=0.5)
        with suppress(AssertionError):
            until(
                lambda partition=partition, before=before: site.watch.leaders().get(partition) not in (None, before),
                site.fleet.takeover,
            )
        moved.append(f"partition {partition} in {monotonic() - began:.1f} s")
    return ", ".join(moved)


@named("leader killed (SIGKILL)")
def kill_a_leader(site: Site) -> str:
    """SIGKILL an nsqd; start it again when others lead."""
    node = site.busiest()
    site.fleet.kill(node)
    happened = site.until_others_lead(node)
    site.fleet.restart(node)
    return f"nsqd {node}: {happened}"


@named("rolling restart (SIGTERM)")
def rolling_restart(site: Site) -> str:
    """SIGTERM each nsqd in turn, and start it again at once; the next when the cluster is healthy."""
    times = []
    for node in range(len(site.fleet.nodes)):
        site.fleet.terminate(node)
        site.fleet.restart(node)
        times.append(f"{site.until_healthy():.0f} s")
    return f"healthy again after {', '.join(times)}"


@named("leader silent, shortly (SIGSTOP)", needs="freeze")
def silence_a_leader(site: Site) -> str:
    """SIGSTOP an nsqd for less time than heartbeats allow."""
    node = site.busiest()
    site.fleet.freeze(node)
    sleep(SHORT_SILENCE)  # sleep: how long it is silent
    site.fleet.thaw(node)
    return f"nsqd {node} for {SHORT_SILENCE:.0f} s"


@named("leader silent for long (SIGSTOP)", needs="freeze")
def freeze_a_leader(site: Site) -> str:
    """SIGSTOP an nsqd until others lead, and for longer than heartbeats allow."""
    node, began = site.busiest(), monotonic()
    site.fleet.freeze(node)
    try:
        happened = site.until_others_lead(node)
        sleep(max(0.0, site.fleet.quiet - (monotonic() - began)))  # sleep: how long it is silent
    finally:
        site.fleet.thaw(node)
    return f"nsqd {node} for {monotonic() - began:.0f} s: {happened}"


@named("leader cut off (packets lost)", needs="cut_off")
def cut_off_a_leader(site: Site) -> str:
    """Lose all packets of an nsqd until others lead."""
    node = site.busiest()
    site.fleet.cut_off(node)
    try:
        happened = site.until_others_lead(node)
        sleep(SHORT_SILENCE)  # sleep: others lead, and it still thinks that it does
    finally:
        site.fleet.reconnect(node)
    return f"nsqd {node}: {happened}"


@named("fast restart (SIGKILL)")
def restart_fast(site: Site) -> str:
    """SIGKILL an nsqd and start it again within a second: the cluster may not notice, and it stays the leader."""
    node, began = site.busiest(), monotonic()
    before = site.watch.leaders()
    site.fleet.kill(node)
    sleep(FAST_RESTART)  # sleep: how long it is gone
    site.fleet.restart(node)
    taken = monotonic() - began
    site.until_healthy()
    kept = sum(site.watch.leaders().get(partition) == leader for partition, leader in before.items())
    return f"nsqd {node} gone for {taken:.1f} s; {kept} of {len(before)} leaders as before"


@named("too few replicas")
def too_few_replicas(site: Site) -> str:
    """SIGKILL all nsqds but one; start them again after a while."""
    kept = site.busiest()
    killed = [node for node in range(len(site.fleet.nodes)) if node != kept]
    for node in killed:
        site.fleet.kill(node)
    sleep(site.fleet.outage)  # sleep: how long they are away
    for node in killed:
        site.fleet.restart(node)
    return f"{len(killed)} of {len(site.fleet.nodes)} nsqds away for {site.fleet.outage:.0f} s"


@named("etcd away", needs="stop_etcd")
def etcd_away(site: Site) -> str:
    """Stop etcd for a while."""
    site.fleet.stop_etcd()
    try:
        sleep(site.fleet.outage)  # sleep: how long it is away
    finally:
        site.fleet.start_etcd()
    return f"{site.fleet.outage:.0f} s"


@named("nsqlookupds restarted", needs="restart_lookupd")
def restart_lookupds(site: Site) -> str:
    """Restart each nsqlookupd in turn."""
    for number in range(len(site.fleet.lookupds)):
        site.fleet.restart_lookupd(number)
        sleep(SHORT_SILENCE)  # sleep: the one that was restarted finds the others
    return f"{len(site.fleet.lookupds)} in turn"


@named("consumer killed (SIGKILL)")
def kill_a_consumer(site: Site) -> str:
    """SIGKILL a consumer; start another."""
    site.consumers.kill_one()
    sleep(SHORT_SILENCE)  # sleep: how long there is one less
    site.consumers.start_one()
    return "another started"


ROUND: Sequence[Fault] = tuple(NAMES)
"""Every fault once."""

LEADERS: Sequence[Fault] = (
    move_leaders,
    kill_a_consumer,
    kill_a_leader,
    restart_fast,
    cut_off_a_leader,
    rolling_restart,
    freeze_a_leader,
)
"""Those that change leaders, or lose what a server has not written."""
