"""Publishes and consumes while a cluster has its faults, one after the other; then says what was so."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, monotonic_ns

from gevent import sleep

from nsq_fast.protocol.partitioner import murmur3_partition
from support.fleet import unanswered
from support.scenarios import new_topic
from support.waiting import until

from .audit import gone
from .check import Check, Counts, is_refused_by_cluster
from .clients import Consumers, Job, Publisher
from .faults import NAMES, Cluster, Fault, Site, kill_a_leader, restart_fast, too_few_replicas
from .records import Kind, Row, key_name, merged, read
from .report import Event, Findings
from .watch import Watch
from .windows import ACCESS, Firsts, measure

logger = logging.getLogger(__name__)

CHANNEL, PROBE_CHANNEL = "ch", "probe"
KILLS = {NAMES[fault] for fault in (restart_fast, kill_a_leader, too_few_replicas)}
UNWRITTEN = 5.0
"""Seconds before a kill in which what was answered OK may not have been written."""

SLACK = 2.0
"""Seconds in which a client may find out that it can go on."""

GRACE = 5.0
"""Seconds that a leader has to be there for a client that did not come to be late."""


@dataclass(frozen=True)
class Plan:
    """How much, and what is to happen.

    Attributes:
        messages: at least so many are published.
        rate: of them a second, while there are faults.
        patience: s without a message after which none is waited for any more.
    """

    messages: int
    faults: Sequence[Fault]
    keys: int = 60
    partitions: int = 12
    rate: float = 1200.0
    consumers: int = 2
    size: int = 100
    patience: float = 120.0
    publish_timeout: float = 120.0

    def __post_init__(self) -> None:
        used = {murmur3_partition(key_name(key), self.partitions) for key in range(self.keys)}
        if len(used) < self.partitions:  # nobody would publish there, whoever leads it
            raise ValueError(f"{self.keys} keys leave some of {self.partitions} partitions without one; take more")


def prove(cluster: Cluster, plan: Plan, folder: Path, name: str) -> Findings:
    """Run all of it on a cluster; ``folder`` gets what the clients keep and log."""
    topic, began = new_topic("bad-days"), monotonic()
    cluster.create_topic(topic, plan.partitions, (CHANNEL, PROBE_CHANNEL))
    job = Job(cluster.lookupds, topic, CHANNEL, [str(node) for node in cluster.nodes], folder)
    watch = Watch(cluster.lookupds, topic, plan.partitions, PROBE_CHANNEL)
    consumers = Consumers(job, plan.consumers, max_tries=0)
    publisher = Publisher(
        job,
        keys=plan.keys,
        rate=plan.rate,
        size=plan.size,
        publish_timeout=plan.publish_timeout,
    )
    try:
        until(lambda: publisher.rows > plan.keys, plan.patience)
        events = _cause(Site(cluster, watch, consumers, topic), plan.faults)
        errors = publisher.finish(plan.messages)
        watch.close()
        _settle(cluster.lookupds[0], topic, consumers, plan.patience)
    finally:
        watch.close()
        publisher.kill()
        consumers.close()
    skipped = {NAMES[fault]: cluster.missing[NAMES[fault]] for fault in plan.faults if NAMES[fault] in cluster.missing}
    stored = list(read(publisher.log))
    consumed = [client.log for client in consumers.all if client.log.exists()]
    counts = _counts([publisher.log, *consumed])
    lost, by_servers, unexplained = _losses(cluster, topic, counts, stored, events)
    homes = {row.key: row.partition for row in stored}
    refused = sum(is_refused_by_cluster(row, watch.accepted[homes[row.key]], SLACK) for row in counts.failed)
    windows = {
        what: measure(watch.changes, Firsts(rows, kind), cluster.nodes, ACCESS[what], GRACE, watch.accepted)
        for what, kind, rows in (
            ("publish", Kind.STORED, stored),
            ("consume", Kind.BEGUN, merged(map(read, consumed))),
        )
    }
    return Findings(
        cluster=name,
        seconds=monotonic() - began,
        keys=plan.keys,
        partitions=plan.partitions,
        events=events,
        skipped=skipped,
        stored=counts.stored,
        handled=counts.handled,
        distinct=counts.distinct,
        lost=lost,
        lost_by_servers=by_servers,
        lost_unexplained=unexplained,
        failed=len(counts.failed) - refused,
        refused=refused,
        disordered=len(counts.disordered),
        too_early=len(counts.too_early),
        split_keys=counts.split_keys,
        rollbacks=counts.rollbacks,
        duplicates=counts.duplicates,
        errors=errors,
        leader_changes=len(watch.changes),
        windows=windows,
    )


def _cause(site: Site, faults: Iterable[Fault]) -> list[Event]:
    events = []
    for fault in faults:
        name = NAMES[fault]
        if name in site.cluster.missing:
            continue
        site.until_healthy()
        began = monotonic_ns()
        happened = fault(site)
        ended = monotonic_ns()
        events.append(Event(name, began, ended, happened, site.until_healthy()))
        logger.info("%s: %s; healthy after %.0f s", name, happened, events[-1].healthy_after)
    return events


def _settle(lookupd: str, topic: str, consumers: Consumers, patience: float) -> None:
    """Wait until the servers hold nothing any more for the channel, or nothing comes any more."""
    kept, since = -1, monotonic()
    while monotonic() - since < patience and unanswered(lookupd, topic, CHANNEL):
        if consumers.kept != kept:
            kept, since = consumers.kept, monotonic()
        sleep(0.5)  # sleep: looks again and again


def _counts(logs: Iterable[Path]) -> Counts:
    check = Check()
    check.take_all(merged(map(read, logs)))
    return check.counts()


def _losses(
    cluster: Cluster, topic: str, counts: Counts, stored: Iterable[Row], events: Iterable[Event]
) -> tuple[int, int, int]:
    """How many were lost by the client, by servers that were killed, and for no reason that is known."""
    missing = set(counts.missing)
    rows = [row for row in stored if (row.key, row.number) in missing]
    not_there = gone(cluster.lookupds[0], topic, rows)
    kills = [event for event in events if event.name in KILLS]
    explained = sum(_is_unwritten(row, kills) for row in not_there)
    return len(rows) - len(not_there), explained, len(not_there) - explained


def _is_unwritten(row: Row, kills: Iterable[Event]) -> bool:
    """Whether a server was killed soon after it had answered OK."""
    return any(kill.began - UNWRITTEN * 1e9 < row.at < kill.ended for kill in kills)
