"""What runs in production, on a redesigned cluster: the worker, the exporter and OpenTelemetry, with partitions."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import gevent
import pytest
from click.testing import CliRunner
from gevent import get_hub
from support.fleet import Fleet, channels
from support.ledger import Kind
from support.scenarios import CHANNEL, Scale, consuming, expected, ext, following, mixed, new_topic, traced
from support.spans import Exported, check_process, ids
from support.waiting import PROMPT, until
from support.worker import START, Shown, Worker, exporter

from nsq_fast import Consumer, Message, Producer
from nsq_fast.cli import main
from nsq_fast.client.trace import ConsumeRecord, PublishRecord, ReceiveRecord

PATIENCE = 180.0
"""Seconds that a real cluster may take for one thing."""

PROGRAM = """
import gevent

@subscribe("{plain}", "ch", concurrency=4, max_in_flight=20, lookupd_poll_interval=2)
def spread(consumer, message):
    note(b"spread %d %s" % (message.partition, message.body))
    gevent.sleep(0.01)  # sleep: the end finds some of them at work

@subscribe("{ordered}", "ch", max_in_flight=20, lookupd_poll_interval=2)
def ordered(consumer, message):
    note(b"ordered %d %s" % (message.partition, message.body))
"""


class Load:
    """Publishes to each partition of two topics until it is told to stop."""

    def __init__(self, fleet: Fleet, topics: dict[str, str]) -> None:
        self.published: set[str] = set()
        self._fleet, self._topics = fleet, topics
        self._numbers = itertools.count()
        self._greenlet: Any = None

    def start(self) -> None:
        self._greenlet = gevent.spawn(self._publish)

    def stop(self) -> None:
        greenlet, self._greenlet = self._greenlet, None
        greenlet.get(timeout=PATIENCE)

    def _publish(self) -> None:
        with Producer(lookupd_http_addresses=self._fleet.lookupds, publish_timeout=PATIENCE) as producer:
            while self._greenlet is not None:
                number = next(self._numbers)
                for name, topic in self._topics.items():
                    partition = number % 2
                    producer.publish(topic, b"%d" % number, partition=partition)
                    self.published.add(f"{name} {partition} {number}")
                gevent.sleep(0.002)  # sleep: a load, and not as much as there is room for


@pytest.fixture
def topics(fleet: Fleet) -> dict[str, str]:
    names = {"spread": new_topic("worker"), "ordered": new_topic("worker-ordered")}
    fleet.create_topic(names["spread"], 2, 2, channels=(CHANNEL,), multi_part=True)
    fleet.create_topic(names["ordered"], 2, 2, channels=(CHANNEL,), ordered=True)
    return names


@pytest.fixture
def worker(fleet: Fleet, topics: dict[str, str], tmp_path: Path) -> Iterator[Worker]:
    """Two processes, not yet started."""
    program = PROGRAM.format(plain=topics["spread"], ordered=topics["ordered"])
    flags = [flag for lookupd in fleet.lookupds for flag in ("--lookupd", lookupd)]
    made = Worker(tmp_path, program, "--processes", "2", *flags)
    yield made
    made.stop()


def out_of_order(worker: Worker) -> list[tuple[str, int]]:
    """Ordered messages that came first after a later one of their partition."""
    last: dict[str, int] = defaultdict(lambda: -1)
    seen, violations = set(), []
    for _, text in worker.noted():
        kind, partition, number = text.split()
        if kind == "ordered" and text not in seen:
            seen.add(text)
            if int(number) < last[partition]:
                violations.append((partition, int(number)))
            last[partition] = max(last[partition], int(number))
    return violations


@pytest.mark.slow
def test_a_worker_is_restarted_without_a_gap_and_drains_with_partitions_and_order(
    fleet: Fleet, worker: Worker, topics: dict[str, str], report: list[str]
) -> None:
    """SIGHUP under load, then SIGTERM under load, and a worker after it for what was left."""
    load, clients = Load(fleet, topics), []

    def here() -> list[dict[str, Any]]:
        return [each for topic in topics.values() for each in channels(fleet.lookupds[0], topic, CHANNEL).values()]

    def watch() -> None:
        while True:
            clients.extend(each.get("client_num", each.get("client_count")) for each in here())
            gevent.sleep(0.05)  # sleep: looks again and again

    worker.ready()
    before = set(worker.children().values())
    for topic in topics.values():
        assert worker.figure("nsq_fast_consumer_targets", topic=topic) == 4
        assert worker.figure("nsq_fast_consumer_connections", topic=topic) == 4
    watcher = gevent.spawn(watch)
    load.start()
    worker.send(signal.SIGHUP)
    until(lambda: "all processes are replaced" in worker.log(), 3 * START, 0.1, about=worker.log)
    watcher.kill()
    after = set(worker.children().values())
    assert not before & after
    assert min(clients) >= 1, "each partition has had a consumer all the time"
    until(lambda: {pid for pid, _ in worker.noted()} >= after, START, about=worker.log)
    worker.terminated()
    load.stop()
    found = until(lambda: (rows := here()) and not any(each["in_flight_count"] for each in rows) and rows)
    assert len(found) == 4
    assert not any(each["timeout_count"] for each in found), "what was not finished is requeued"
    left = load.published - worker.handled()
    worker.lines.clear()
    worker.ready()
    until(lambda: worker.handled() >= load.published, PATIENCE, 0.05, about=worker.log)
    assert worker.figure("nsq_fast_consumer_order_violations_total") == 0
    assert not out_of_order(worker)
    assert worker.handled() == load.published
    report.append(
        f"{len(load.published)} messages, {len(left)} of them left to the next worker, 0 lost,"
        f" {len(worker.noted()) - len(load.published)} twice"
    )
    worker.terminated()


def test_the_exporter_shows_each_partition_once(fleet: Fleet, report: list[str]) -> None:
    """Though it has two replicas, and both nsqlookupds name its nsqds."""
    topic, held = new_topic("exported"), []
    fleet.create_topic(topic, 2, 2, channels=(CHANNEL, "waiting"), multi_part=True)
    flags = [flag for lookupd in fleet.lookupds for flag in ("--lookupd", lookupd)]

    def handle(consumer: Any, message: Message) -> None:
        message.enable_async()
        held.append(message)

    with Producer(lookupd_http_addresses=fleet.lookupds, publish_timeout=PATIENCE) as producer:
        for partition in (0, 0, 0, 1):
            producer.publish(topic, b"x", partition=partition)

    with consuming(fleet, topic, handle, max_in_flight=10), exporter(*flags) as read:
        until(lambda: len(held) == 4, PATIENCE)
        now = until(
            lambda: (
                (now := Shown(read("/metrics")))("channel_in_flight", topic=topic, channel=CHANNEL) == 4
                and now("channel_depth", topic=topic, channel="waiting") == 4
                and now
            ),
            PATIENCE,
            0.1,
        )
        for message in held:
            message.finish()
        until(lambda: Shown(read("/metrics"))("channel_in_flight", topic=topic, channel=CHANNEL) == 0, PATIENCE, 0.1)
    assert (now("nsqd_up"), now("nsqlookupd_up")) == (3, 2)

    def by_partition(name: str, **labels: str) -> list[float | None]:
        return [now(name, topic=topic, partition=partition, **labels) for partition in ("0", "1")]

    report.append(f"in flight {by_partition('channel_in_flight', channel=CHANNEL)}")
    assert by_partition("topic_messages_total") == [3, 1]
    assert by_partition("channel_in_flight", channel=CHANNEL) == [3, 1]
    assert by_partition("channel_depth", channel="waiting") == [3, 1]
    assert by_partition("channel_clients", channel=CHANNEL) == [1, 1]
    assert now("topic_messages_total", topic=topic) == 4, "and nothing without a partition"
    assert now("topic_depth", topic=topic) is None, "nsqd says how many bytes were ever written"
    stat = ["stat", "--once", "--json", "--topic", topic, *flags]
    rows = {row["channel"]: row for row in json.loads(CliRunner().invoke(main, stat).stdout)}
    assert {channel: (row["depth"], row["messages"]) for channel, row in rows.items()} == {
        "": (0, 4), CHANNEL: (0, 4), "waiting": (4, 4)
    }  # fmt: skip


def test_spans_are_linked_by_extended_headers_after_a_requeue_too(fleet: Fleet) -> None:
    exported, topic, attempts = Exported(), new_topic("spans"), []
    telemetry = exported.telemetry("headers", trace_id=True)
    fleet.create_topic(topic, 2, 2, channels=(CHANNEL,), ext=True, multi_part=True)

    def handle(consumer: Any, message: Any) -> None:
        attempts.append((message.attempts, message.trace_id))
        assert message.headers["kind"] == "new"
        if message.attempts == 1:
            message.requeue(0, False)

    options: dict[str, Any] = {"max_in_flight": 10, "extend_support": True}
    producer = Producer(lookupd_http_addresses=fleet.lookupds, publish_timeout=PATIENCE)
    with telemetry.instrument(producer):
        with consuming(fleet, topic, telemetry.handler(handle), **options):
            for partition in (0, 1):
                producer.publish(topic, b"body", headers={"kind": "new"}, partition=partition)
            until(lambda: len(exported.spans(f"process {topic}")) == 4, PATIENCE)
        with Consumer(topic, CHANNEL, lookupd_http_addresses=fleet.lookupds, **options) as consumer:
            producer.publish(topic, b"iterated", headers={"kind": "new"})
            for message in telemetry.receive(consumer):
                with telemetry.process(consumer, message) as opened:
                    opened.finish()
                break
    published = {ids(span): span for span in exported.spans(f"publish {topic}")}
    processed = exported.spans(f"process {topic}")
    assert (len(published), len(processed)) == (3, 5)
    for span in processed:
        check_process(published[span.links[0].context.trace_id, span.links[0].context.span_id], span)
    assert sorted((span.attributes or {})["nsq.message.attempts"] for span in processed) == [1, 1, 1, 2, 2]
    assert {(span.attributes or {})["messaging.destination.partition.id"] for span in processed} == {"0", "1"}
    (received,) = exported.spans(f"receive {topic}")
    assert (received.links[0].context.trace_id, received.links[0].context.span_id) in published
    assert {trace_id for _, trace_id in attempts} < {trace_id & (2**64 - 1) for trace_id, _ in published}


# Publishing and consuming on a redesigned cluster, from end to end. What is done to it meanwhile: test_bad_days.


def test_records_of_publishing_and_consuming_join_one_to_one(fleet: Fleet, small: Scale, report: list[str]) -> None:
    ledger, records = traced(fleet, small)
    published, received, consumed = (
        Counter(records.of(kind)) for kind in (PublishRecord, ReceiveRecord, ConsumeRecord)
    )  # fmt: skip
    joined = published.keys() & consumed.keys()
    report.append(f"records: {published.total()} of publishes, {consumed.total()} of deliveries, {len(joined)} joined")
    assert published.keys() == consumed.keys()
    assert len(published) == published.total() == ledger.totals[Kind.STORED] == small.messages
    assert received == consumed
    # Real servers deliver a message twice that waited before the first ordered subscription: a record of each.
    assert consumed.total() == ledger.totals[Kind.BEGUN]
    assert {record.outcome for record in records.all if isinstance(record, ConsumeRecord)} == {"FIN"}


def test_filters_and_tags_of_an_ext_topic_let_through_what_they_should(
    fleet: Fleet, small: Scale, report: list[str]
) -> None:
    seen = ext(fleet, small)
    numbers = range(small.messages)
    report.append(", ".join(f"{name} {len(counts)}" for name, counts in seen.items()))
    assert seen == {name: Counter(number for number in numbers if expected(name, number)) for name in seen}


def test_an_original_nsqd_beside_the_partitions_is_consumed_too(
    fleet: Fleet, small: Scale, report: list[str], folder: Path
) -> None:
    ledger, sources = mixed(fleet, small, folder)
    report.append(f"{sources[None]} from the original nsqd, {sources[0]} and {sources[1]} from partitions")
    assert ledger.missing == []
    assert sources[None] >= small.messages // 2
    assert min(sources[0], sources[1]) > 0


def upgrade(url: str) -> None:
    with suppress(HTTPError), urlopen(Request(url, method="POST")):  # only the leading nsqlookupd takes it
        pass


def test_a_topic_that_has_just_got_headers_takes_them(fleet: Fleet, report: list[str]) -> None:
    """An operator upgrades a topic under a producer that has asked lookup about it a moment ago."""
    topic = new_topic("upgraded")
    fleet.create_topic(topic, 2, 1, channels=("ch",))
    seen: Counter[str] = Counter()

    def handle(_consumer: object, message: Message) -> None:
        seen[str((message.headers or {}).get("color"))] += 1

    with Producer((), fleet.lookupds, publish_timeout=120.0) as producer:
        for _ in range(2):
            producer.publish(topic, b"plain")
        for address in fleet.lookupds:
            get_hub().threadpool.apply(upgrade, (f"http://{address}/topic/meta/update?topic={topic}&upgradeext=true",))
        began = monotonic()
        producer.publish(topic, b"with headers", headers={"color": "red"})
        report.append(f"published with headers {monotonic() - began:.2f} s after the upgrade")
    with consuming(fleet, topic, handle):
        until(lambda: seen.total() == 3, 120)
    assert seen == {"None": 2, "red": 1}


def test_a_consumer_follows_a_leader_within_two_seconds(fleet: Fleet, small: Scale, report: list[str]) -> None:
    seconds = following(fleet, small)
    report.append(f"{seconds:.2f} s after lookup knows the new leader")
    assert seconds < (2.0 if fleet.is_real else PROMPT)  # embedded servers are as slow as the machine


def test_more_instances_and_restarts_leave_a_channel_where_it_is(fleet: Fleet, report: list[str]) -> None:
    """Each says where the channel begins: only the first of them is heard."""
    topic = new_topic("start")
    fleet.create_topic(topic, 1, 1, channels=("other",))
    seen: Counter[bytes] = Counter()

    def handle(_consumer: object, message: Message) -> None:
        seen[message.body] += 1

    def publish(first: int, count: int) -> None:
        with Producer((), fleet.lookupds, publish_timeout=120.0) as producer:
            producer.multipublish(topic, [b"%d" % number for number in range(first, first + count)])

    publish(0, 20)
    for turn, position in enumerate(("offset:0", "end", "end"), 1):
        with consuming(fleet, topic, handle, start_position=position):
            until(lambda turn=turn: len(seen) == 20 * turn, 120)
            until(lambda: fleet.unanswered(topic, "ch") == 0, 60)
        publish(20 * turn, 20)
    report.append(f"{len(seen)} messages in three starts")
    assert len(seen) == 60


# The programs of docs/redesigned.md run as they stand: only the address of the nsqlookupd is changed.


ROOT = Path(__file__).parents[2]
PUBLISH, CONSUME, ADMIN, TRACE = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "redesigned.md").read_text(), re.DOTALL
)
LIMIT = 30.0


def start(program: str, lookupd: str, folder: Path) -> subprocess.Popen[str]:
    program = program.replace("127.0.0.1:4161", lookupd)
    command = [sys.executable, "-u", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)


def test_the_programs_publish_consume_and_trace(embedded_fleet: Fleet, tmp_path: Path) -> None:
    lookupd = embedded_fleet.lookupds[0]
    embedded_fleet.create_topic("orders", 3, 2, channels=("billing",), ordered=True)
    consumer = start(CONSUME, lookupd, tmp_path)
    try:
        producer = start(TRACE + PUBLISH, lookupd, tmp_path)
        output, errors = producer.communicate(timeout=LIMIT)
        assert (errors, len(output.splitlines())) == ("", 1)
        assert consumer.stdout is not None
        lines = [consumer.stdout.readline() for _ in range(3)]
        outcome, errors = start(ADMIN, lookupd, tmp_path).communicate(timeout=LIMIT)
        assert (errors, outcome.count(" True ")) == ("", 3)
    finally:
        consumer.kill()
        consumer.communicate()
    assert [line.split()[-1] for line in lines] == ["b'created'", "b'paid'", "b'sent'"]
    assert " 4711 " in lines[2]
    assert len((tmp_path / "trace.jsonl").read_text().splitlines()) == 3
