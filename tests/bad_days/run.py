"""Publishes and consumes while a cluster has its faults, one after the other; then says what was so."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any

from gevent import sleep
from support.fleet import Fleet
from support.ledger import Kind, Ledger, Row, is_refused_by_cluster, merged, read
from support.scenarios import new_topic
from support.waiting import until

from nsq_fast.client.admin import LookupdHTTPClient, NsqdHTTPClient
from nsq_fast.errors import HttpError, NsqError
from nsq_fast.protocol.publishing import murmur3_partition

from .faults import NAMES, NEEDS, Fault, Site, kill_a_leader, restart_fast, too_few_replicas
from .programs import Consumers, Job, Publisher, key_name
from .watch import READ, WRITE, Change, Watch, Windows, measure, percentile

logger = logging.getLogger(__name__)

CHANNEL, PROBE_CHANNEL = "ch", "probe"
ACCESS = {"publish": WRITE, "consume": READ}
KILLS = {NAMES[fault] for fault in (restart_fast, kill_a_leader, too_few_replicas)}
UNWRITTEN = 15.0
"""Seconds before a kill in which what was answered OK may not have been written: up to 7, where 35 processes want two
processors."""

SLACK = 2.0
"""Seconds in which a client may find out that it can go on."""

GRACE = 5.0
"""Seconds that a leader has to be there for a client that did not come to be late."""

SLOWEST = 3


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
    ordered: bool = True
    consumers: int = 2
    size: int = 100
    patience: float = 120.0
    publish_timeout: float = 120.0

    def __post_init__(self) -> None:
        used = {murmur3_partition(key_name(key), self.partitions) for key in range(self.keys)}
        if len(used) < self.partitions:  # nobody would publish there, whoever leads it
            raise ValueError(f"{self.keys} keys leave some of {self.partitions} partitions without one; take more")


@dataclass(frozen=True)
class Event:
    """One fault. Times are of ``time.monotonic_ns``."""

    name: str
    began: int
    ended: int
    happened: str
    healthy_after: float


PROMISED = ("lost", "lost_unexplained", "failed", "disordered", "too_early", "split_keys")
"""Counts of what must not be."""

MEANINGS = {
    "stored": "publishes answered OK",
    "failed": "publishes that failed although the cluster took them",
    "refused": "publishes that the cluster refused for all their time",
    "handled": "times that a handler got a message",
    "distinct": "messages handled",
    "lost": "lost by the client: answered OK, on the servers, and not handled",
    "lost_by_servers": "lost by servers: answered OK, gone after a kill",
    "lost_unexplained": "gone from servers without such a reason",
    "disordered": "out of order by key",
    "too_early": "begun before the one before it was finished",
    "split_keys": "keys in more than one partition",
    "rollbacks": "on_order_violation: a partition went back",
    "leader_changes": "changes of leaders",
}


@dataclass(frozen=True)
class Findings:
    """What was counted in one run.

    Attributes:
        counts: see MEANINGS.
        events: the faults, in their order; ``skipped`` those that could not be had, with the reason.
        duplicates: by their causes; ``errors``: texts of the errors of publishes, with their numbers.
        windows: how long publishers and consumers took to follow a leader.
    """

    cluster: str
    seconds: float
    counts: dict[str, int]
    events: Sequence[Event]
    skipped: dict[str, str]
    duplicates: dict[str, int]
    errors: dict[str, int]
    windows: dict[str, Windows]

    @property
    def is_proved(self) -> bool:
        return not any(map(self.counts.get, PROMISED)) and not any(each.never for each in self.windows.values())

    def as_json(self) -> dict[str, Any]:
        windows = {
            name: {"passed_over": each.passed_over, "never": len(each.never)}
            | {since: _figures([getattr(window, since) for window in each.all]) for since in ("named", "ready")}
            for name, each in self.windows.items()
        }
        events = [vars(event) for event in self.events]
        return {**vars(self), "events": events, "windows": windows, "is_proved": self.is_proved}

    def __str__(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        proved = "What is promised was so." if self.is_proved else "WHAT IS PROMISED WAS NOT SO."
        yield f"# Bad days of {self.cluster}: {len(self.events)} faults in {self.seconds:,.0f} s. {proved}\n"
        yield from (f"- {meaning}: {self.counts[name]:,}" for name, meaning in MEANINGS.items())
        yield from (f"- again: {cause}: {count:,}" for cause, count in self.duplicates.items())
        yield from (f"- error: {count:,} x {text}" for text, count in self.errors.items())
        yield from (f"- not done: {name}: {reason}" for name, reason in self.skipped.items())
        for name, each in self.as_json()["windows"].items():
            yield f"- to the first {name} at a new leader: {each}"
        yield "\n## What happened\n"
        for event in self.events:
            yield f"- {event.name}: {event.happened}; healthy again {event.healthy_after:.0f} s later"
        for name, windows in self.windows.items():
            for window in sorted(windows.all, key=lambda window: -window.ready)[:SLOWEST]:
                yield f"- {name}, {window.ready:.2f} s after the leader was ready: {self._place(window.change)}"
            yield from (f"- {name}: none came to the leader of {self._place(change)}" for change in windows.never)

    def _place(self, change: Change) -> str:
        named = min(change.named.values())
        begun = [event.name for event in self.events if event.began <= named]
        return f"partition {change.partition}, {begun[-1] if begun else 'before any fault'}"


def prove(fleet: Fleet, plan: Plan, folder: Path, name: str) -> Findings:
    """Run all of it on a cluster; ``folder`` gets what the clients keep and log."""
    topic, began = new_topic("bad-days"), monotonic()
    kind = {"ordered" if plan.ordered else "multi_part": True}
    fleet.create_topic(topic, plan.partitions, len(fleet.nodes), channels=(CHANNEL, PROBE_CHANNEL), **kind)
    job = Job(fleet.lookupds, topic, CHANNEL, [str(node) for node in fleet.nodes], folder)
    watch = Watch(fleet.lookupds, topic, plan.partitions, PROBE_CHANNEL)
    consumers = Consumers(job, plan.consumers, max_tries=0)
    publisher = Publisher(
        job, keys=plan.keys, rate=plan.rate, size=plan.size, publish_timeout=plan.publish_timeout
    )  # fmt: skip
    try:
        until(lambda: publisher.rows > plan.keys, plan.patience)
        events = list(_cause(Site(fleet, watch, consumers, topic), plan.faults))
        errors = publisher.finish(plan.messages)
        watch.close()
        _settle(fleet, topic, consumers, plan.patience)
    finally:
        watch.close()
        publisher.kill()
        consumers.close()
    stored = [row for row in read(publisher.log) if row.kind == Kind.STORED]
    consumed = [client.log for client in consumers.all if client.log.exists()]
    ledger = Ledger(merged(map(read, [publisher.log, *consumed])))
    homes = {row.key: row.partition for row in stored}
    refused = sum(is_refused_by_cluster(row, watch.accepted[homes[row.key]], SLACK) for row in ledger.failed)
    windows = {
        what: measure(watch.changes, rows, fleet.nodes, ACCESS[what], GRACE, watch.accepted)
        for what, rows in (("publish", stored), ("consume", merged(map(read, consumed))))
    }
    counts = {
        "stored": ledger.totals[Kind.STORED],
        "failed": len(ledger.failed) - refused,
        "refused": refused,
        "handled": ledger.totals[Kind.BEGUN],
        "distinct": ledger.distinct,
        **_losses(fleet, topic, ledger, stored, events),
        "disordered": len(ledger.disordered) if plan.ordered else 0,
        "too_early": len(ledger.too_early) if plan.ordered else 0,
        "split_keys": ledger.split_keys,
        "rollbacks": ledger.totals[Kind.ROLLBACK],
        "leader_changes": len(watch.changes),
    }
    skipped = {NAMES[fault]: fleet.cannot[NEEDS[fault]] for fault in plan.faults if NEEDS.get(fault) in fleet.cannot}
    duplicates = dict(ledger.duplicates)
    return Findings(name, monotonic() - began, counts, events, skipped, duplicates, errors, windows)


def _cause(site: Site, faults: Iterable[Fault]) -> Iterator[Event]:
    for fault in faults:
        if NEEDS.get(fault) in site.fleet.cannot:
            continue
        site.until_healthy()
        began = monotonic_ns()
        happened = fault(site)
        event = Event(NAMES[fault], began, monotonic_ns(), happened, site.until_healthy())
        logger.info("%s: %s; healthy after %.0f s", event.name, happened, event.healthy_after)
        yield event


def _settle(fleet: Fleet, topic: str, consumers: Consumers, patience: float) -> None:
    """Wait until the servers hold nothing any more for the channel, or nothing comes any more."""
    kept, since = -1, monotonic()
    while monotonic() - since < patience and fleet.unanswered(topic, CHANNEL):
        if consumers.kept != kept:
            kept, since = consumers.kept, monotonic()
        sleep(0.5)  # sleep: looks again and again


def _losses(fleet: Fleet, topic: str, ledger: Ledger, stored: Iterable[Row], events: Iterable[Event]) -> dict[str, int]:
    """How many were lost by the client, by servers that were killed, and for no reason that is known."""
    missing = set(ledger.missing)
    rows = [row for row in stored if (row.key, row.number) in missing]
    not_there = gone(fleet.lookupds[0], topic, rows)
    kills = [event for event in events if event.name in KILLS]
    explained = sum(_is_unwritten(row, kills) for row in not_there)
    return {
        "lost": len(rows) - len(not_there),
        "lost_by_servers": explained,
        "lost_unexplained": len(not_there) - explained,
    }


def _is_unwritten(row: Row, kills: Iterable[Event]) -> bool:
    """Whether a server was killed soon after it had answered OK."""
    return any(kill.began - UNWRITTEN * 1e9 < row.at < kill.ended for kill in kills)


def gone(lookupd: str, topic: str, stored: Iterable[Row]) -> list[Row]:
    """Those messages that the leaders of a topic do not have any more; ``stored``: publishes answered OK.

    Each is looked for by its id; another message may have that by now, so its trace id has to be the one that it was
    published with.
    """
    with LookupdHTTPClient.from_url(lookupd) as client:
        leaders = client.lookup(topic, metainfo=True)["partitions"]
    clients = {
        int(number): NsqdHTTPClient(node["broadcast_address"], node["http_port"]) for number, node in leaders.items()
    }
    try:
        return [row for row in stored if not _has(clients[row.partition], topic, row)]
    finally:
        for each in clients.values():
            each.close()


def _has(nsqd: NsqdHTTPClient, topic: str, row: Row) -> bool:
    query = {"topic": topic, "partition": row.partition, "search_mode": "id", "search_pos": row.internal_id}
    try:
        found = nsqd.call_json("GET", "/message/get", **query)
    except HttpError:
        return False
    except NsqError as error:
        raise AssertionError(f"{nsqd} does not say whether it has {row}") from error
    return int(found["trace_id"]) == row.key << 40 | row.number


def _figures(values: Sequence[float]) -> dict[str, float]:
    found = {"p50": percentile(values, 50), "p99": percentile(values, 99), "most": max(values, default=0.0)}
    return {"n": len(values), **{name: round(value, 3) for name, value in found.items()}}
