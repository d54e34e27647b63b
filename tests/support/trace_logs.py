"""Logs of traces as nsqds and clients write them, with what is planted in them; and the command that reads them."""

from __future__ import annotations

import gzip
import math
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from nsq_fast.client.trace import ConsumeRecord, PublishRecord, TraceRecord

from .spark import quick_environment
from .spark_marks import LIMIT

# Trace logs with planted faults, and the same facts computed from them in plain Python, without Spark.


START = 1_790_000_000_000_000_000

MS = 1_000_000

SECOND = 1000 * MS

BAD_LINES = ("no record at all", '{"event":"publish","time":1', '{"event":"consume","topic":7}', "[1, 2]")

Lane = tuple[str, int | None, str]

Place = tuple[str, int | None, str, int]  # topic, partition, channel, internal id


class Channel(NamedTuple):
    """A channel of a topic: who consumes it, and whether its messages come with their offsets."""

    name: str
    host: str
    is_ordered: bool


class Topic(NamedTuple):
    """A topic, and where its ids begin."""

    name: str
    partitions: tuple[int | None, ...]
    channels: tuple[Channel, ...]
    first_id: int


ORDERS = Topic("orders", (0, 1, 2), (Channel("billing", "10.0.0.5", True), Channel("audit", "10.0.0.6", True)), 100)

# Ids that a signed number of 64 bits cannot hold, no partitions, several messages handled at a time.
CLICKS = Topic("clicks", (None,), (Channel("web", "10.0.0.7", False),), 2**64 - 5000)


APART = 600 * SECOND
"""From one run of several in a log to the next; their ids and offsets go on."""


class Planted(NamedTuple):
    """What is wrong with a log: each set has what a correct reader finds, and all it finds."""

    lost: set[Place]
    pending: set[Place]
    duplicates: set[Place]
    violations: set[Place]
    redelivered: dict[Place, tuple[int, int, int]]  # REQ, TIMEOUT, unknown
    slowest: Place
    skews: dict[tuple[str, str, str | None], tuple[int, int]]  # side, nsqd, host: messages, worst
    unpublished: set[Place]


def good_log(messages: int = 200, seed: int = 1, run: int = 0) -> dict[Place, list[TraceRecord]]:
    """Records of a run without a fault, by message and channel; publishes have the channel ``""``."""
    chance = random.Random(seed)
    found: dict[Place, list[TraceRecord]] = {}
    for topic in (ORDERS, CLICKS):
        for partition in topic.partitions:
            free = dict.fromkeys(topic.channels, 0)
            for number in range(messages):
                record, timestamp = _publish(topic, partition, run, number, chance)
                found[topic.name, partition, "", record.internal_id] = [record]
                for channel in topic.channels:
                    took = chance.randrange(1, 4000) * 1000
                    received = timestamp + chance.randrange(100, 20_000) * 1000
                    if channel.is_ordered:
                        received = max(received, free[channel] + 1000)
                    free[channel] = received + took
                    place = (topic.name, partition, channel.name, record.internal_id)
                    found[place] = [_consume(record, channel, timestamp, received + took, took, 1, "FIN")]
    return found


def _publish(
    topic: Topic, partition: int | None, run: int, number: int, chance: random.Random
) -> tuple[PublishRecord, int]:
    timestamp = START + run * APART + number * 20 * MS + chance.randrange(1000) * 1000 + (partition or 0)
    number += run * 1000
    record = PublishRecord(
        time=timestamp + chance.randrange(50, 900) * 1000,
        topic=topic.name,
        partition=partition,
        nsqd=f"10.1.0.{partition or 0}:4150",
        internal_id=topic.first_id + number,
        trace_id=topic.first_id + number * 7 + 1 if topic is ORDERS else 2**63 + number,
        offset=number * 230 if topic is ORDERS else None,
        size=230 if topic is ORDERS else None,
    )
    return record, timestamp


def _consume(
    publish: PublishRecord, channel: Channel, timestamp: int, time: int, took: int | None, attempts: int, outcome: Any
) -> ConsumeRecord:
    return ConsumeRecord(
        time=time,
        topic=publish.topic,
        partition=publish.partition,
        channel=channel.name,
        nsqd=publish.nsqd,
        local=f"{channel.host}:{40_000 + (publish.partition or 0)}",
        internal_id=publish.internal_id,
        trace_id=publish.trace_id,
        offset=publish.offset if channel.is_ordered else None,
        size=publish.size if channel.is_ordered else None,
        timestamp=timestamp,
        attempts=attempts,
        outcome=outcome,
        handling_time=None if took is None else took / SECOND,
    )


def changed(record: TraceRecord, **changes: Any) -> Any:
    return type(record)(**{**{name: getattr(record, name) for name in record.__struct_fields__}, **changes})


def plant(log: dict[Place, list[TraceRecord]], run: int = 0) -> Planted:
    """Put every kind of fault into a log without one, each once or twice."""

    def at(names: tuple[str, str], partition: int | None, number: int) -> Place:
        first = ORDERS.first_id if names[0] == ORDERS.name else CLICKS.first_id
        return (names[0], partition, names[1], first + run * 1000 + number)

    billing, audit, web = (ORDERS.name, "billing"), (ORDERS.name, "audit"), (CLICKS.name, "web")
    planted = Planted(set(), set(), set(), set(), {}, ("", None, "", 0), {}, set())
    for names, partition, number in ((audit, 0, 50), (web, None, 20)):
        planted.lost.add(_lose(log, at(names, partition, number)))
    given_up = at(web, None, 21)
    log[given_up] = [changed(log[given_up][0], outcome="REQ")]
    planted.lost.add(given_up)
    planted.duplicates.add(_repeat(log, at(billing, 1, 60), 2))
    planted.duplicates.add(_repeat(log, at(web, None, 61), 1))
    for place in planted.duplicates:
        planted.redelivered[place] = (0, 0, 1)
    planted.violations.add(_swap(log, at(billing, 2, 70), at(billing, 2, 71)))
    for place, outcomes in {
        at(billing, 0, 80): ["REQ", "FIN"],
        at(billing, 0, 81): ["TIMEOUT", "FIN"],
        at(billing, 0, 82): [None, "FIN"],
        at(audit, 1, 83): ["REQ", "REQ", None, "TIMEOUT", "FIN"],
        at(web, None, 84): [None, None, "REQ", "FIN"],
    }.items():
        planted.redelivered[place] = _redeliver(log, place, outcomes)
    slow = at(web, None, 90)
    record: Any = log[slow][0]
    log[slow] = [changed(record, time=record.time + 20 * SECOND, handling_time=20.0)]
    _skew(log, planted, at)
    unpublished = at(billing, 2, 95)
    del log[unpublished[0], unpublished[1], "", unpublished[3]]
    planted.unpublished.update({unpublished, at(audit, 2, 95)})
    _end_later(log, planted)
    return planted._replace(slowest=slow)


def _lose(log: dict[Place, list[TraceRecord]], place: Place) -> Place:
    del log[place]
    return place


def _repeat(log: dict[Place, list[TraceRecord]], place: Place, attempts: int) -> Place:
    """The FIN did not get through: delivered again. Attempts begin anew when the server was restarted."""
    record: Any = log[place][0]
    log[place].append(changed(record, time=record.time + 3 * SECOND, attempts=attempts, local="10.0.0.5:9"))
    return place


def _swap(log: dict[Place, list[TraceRecord]], earlier: Place, later: Place) -> Place:
    """The earlier message is finished right after the later one."""
    one, two = (log[place][0] for place in (earlier, later))
    log[earlier] = [changed(one, time=two.time + 1000)]
    return earlier


def _redeliver(log: dict[Place, list[TraceRecord]], place: Place, outcomes: list[str | None]) -> tuple[int, int, int]:
    record: Any = log[place][0]
    log[place] = [
        changed(record, time=record.time + number * 500 * MS, attempts=number + 1, outcome=outcome)
        for number, outcome in enumerate(outcomes)
        if outcome
    ]
    return (outcomes.count("REQ"), outcomes.count("TIMEOUT"), outcomes.count(None))


def _skew(log: dict[Place, list[TraceRecord]], planted: Planted, at: Callable[..., Place]) -> None:
    """The clock of a consumer's host, and that of a producer, are behind that of their nsqd."""
    early = []
    for number in range(100, 110):
        place = at((CLICKS.name, "web"), None, number)
        record: Any = log[place][0]
        moved = record.timestamp - number * MS // 10 + round(record.handling_time * SECOND)
        log[place] = [changed(record, time=moved, local="10.0.0.9:40000")]
        early.append(number * MS // 10)
    planted.skews["consumer", "10.1.0.0:4150", "10.0.0.9"] = (len(early), max(early))
    place = at((ORDERS.name, ""), 1, 120)
    publish: Any = log[place][0]
    delivery: Any = log[place[0], 1, "billing", place[3]][0]
    log[place] = [changed(publish, time=delivery.timestamp - 5 * MS)]
    planted.skews["producer", publish.nsqd, None] = (1, 5 * MS)


def _end_later(log: dict[Place, list[TraceRecord]], planted: Planted) -> None:
    """A last message, an hour later, which nobody has finished yet: all before it should be finished by then."""
    last: Any = log[max(place for place in log if place[:3] == (ORDERS.name, 0, ""))][0]
    publish = changed(last, time=last.time + 3600 * SECOND, internal_id=last.internal_id + 500, offset=10**6)
    log[publish.topic, publish.partition, "", publish.internal_id] = [publish]
    planted.pending.update(
        (publish.topic, publish.partition, each.name, publish.internal_id) for each in ORDERS.channels
    )


def records_of(log: dict[Place, list[TraceRecord]]) -> list[TraceRecord]:
    return sorted((record for records in log.values() for record in records), key=lambda record: record.time)


def write_logs(records: Iterable[TraceRecord], folder: Path) -> list[Path]:
    """As hosts would leave them: a plain file, one with a prefix to each line and a rotated part, one compressed."""
    publishes = [str(record) for record in records if isinstance(record, PublishRecord)]
    consumes = [record for record in records if isinstance(record, ConsumeRecord)]
    prefixed = [
        f"2026-09-21 10:13:20,100 INFO nsq_fast.trace: {record}" for record in consumes if record.channel == "billing"
    ]
    others = [str(record) for record in consumes if record.channel != "billing"]
    half = len(prefixed) // 2
    files = {
        "producer.log": [*publishes[:10], BAD_LINES[0], "", "   ", *publishes[10:]],
        "billing.log.1": [*prefixed[:half], BAD_LINES[1]],
        "billing.log": prefixed[half:],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    with gzip.open(folder / "others.log.gz", "wt") as file:
        file.write("\n".join([*others, *BAD_LINES[2:]]) + "\n")
    return [folder / name for name in (*files, "others.log.gz")]


class Figures(NamedTuple):
    """Of one group: counts, and nearest-rank percentiles of the latency in nanoseconds."""

    messages: int
    finished: int
    lost: int
    pending: int
    duplicates: int
    violations: int
    redelivered_req: int
    redelivered_timeout: int
    redelivered_unknown: int
    p50: int
    p95: int
    p99: int
    longest: int


def finishes_of(records: Iterable[TraceRecord]) -> dict[Lane, list[ConsumeRecord]]:
    """The first FIN of each message that has one, by channel."""
    found: dict[Lane, dict[int, ConsumeRecord]] = defaultdict(dict)
    for record in sorted(records, key=lambda record: record.time):
        if isinstance(record, ConsumeRecord) and record.outcome == "FIN":
            found[record.topic, record.partition, record.channel].setdefault(record.internal_id, record)
    return {lane: list(finishes.values()) for lane, finishes in found.items()}


def latency(finish: ConsumeRecord) -> int:
    return finish.time - finish.timestamp


def figures_of(records: list[TraceRecord], planted: Planted) -> dict[Lane, Figures]:
    """What is wrong is what was planted, and nothing else."""
    ids: dict[tuple[str, int | None], set[int]] = defaultdict(set)
    for record in records:
        ids[record.topic, record.partition].add(record.internal_id)
    figures = {}
    for lane, finishes in finishes_of(records).items():
        faults = (planted.lost, planted.pending, planted.duplicates, planted.violations)
        causes = [found for place, found in planted.redelivered.items() if place[:3] == lane]
        latencies = sorted(map(latency, finishes))
        figures[lane] = Figures(
            len(ids[lane[:2]]),
            len(finishes),
            *(sum(place[:3] == lane for place in places) for places in faults),
            *map(sum, zip((0, 0, 0), *causes, strict=True)),
            *(nearest_rank(latencies, percent) for percent in (50, 95, 99, 100)),
        )
    return figures


def nearest_rank(ordered: list[int], percent: float) -> int:
    """The smallest value that so many per cent are no greater than."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


# `nsq-fast` in a process of its own, with a Spark that starts quickly.


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the command printed, and its status; ``environment`` goes before the one of the tests."""
    command = [sys.executable, "-m", "nsq_fast", *map(str, arguments)]
    env = {**os.environ, **quick_environment(), "SPARK_LOCAL_IP": "127.0.0.1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, env=env)
