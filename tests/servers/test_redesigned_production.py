"""What runs in production, on a redesigned cluster: the worker, the exporter and OpenTelemetry, with partitions."""

from __future__ import annotations

import itertools
import json
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
from click.testing import CliRunner
from support.exporter import Shown, exporter
from support.fleet import Fleet, channels
from support.scenarios import CHANNEL, consuming, new_topic
from support.spans import Exported, check_process, ids
from support.waiting import until
from support.worker import START, Worker

from nsq_fast import Consumer, Message, Producer
from nsq_fast.cli import main

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
    """A topic with two partitions, and an ordered one."""
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
    worker.send(signal.SIGTERM)
    assert worker.ended() == 0, worker.log()
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
    worker.send(signal.SIGTERM)
    assert worker.ended() == 0, worker.log()


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
