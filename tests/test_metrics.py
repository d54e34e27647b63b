"""Metrics of clients, as a scraper and a real Prometheus read them; OpenTelemetry's spans, metrics and context."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.contract import FACES, Face
from support.spans import Exported, check_process, ids, links, parent
from support.waiting import WAIT, until

from nsq_fast import Consumer, Message, Producer, RequeueMessage, threads
from nsq_fast.broker import Broker, NsqdServer, RedesignedCluster
from nsq_fast.errors import ConfigError, NsqError
from nsq_fast.metrics import ClientCollector
from nsq_fast.otel import MAGIC, Envelope, OpenedMessage, Telemetry

NSQD = NsqdServer
ROOT = Path(__file__).parent.parent
Series = tuple[str, tuple[tuple[str, str], ...]]


class Scraper:
    """A registry with a collector, and what was scraped of it. No counter may go down."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = ClientCollector(self.registry)
        self._counters: dict[Series, float] = {}

    def scrape(self) -> dict[Series, float]:
        """All series of now."""
        text = generate_latest(self.registry).decode()
        found: dict[Series, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                series = sample.name, tuple(sorted(sample.labels.items()))
                assert series not in found
                found[series] = sample.value
                if family.type == "counter":
                    assert sample.value >= self._counters.get(series, 0.0), series
                    self._counters[series] = sample.value
        return found

    def consumer(self, figure: str, name: str = "billing") -> float | None:
        """One figure of a consumer, None where there is no such series."""
        return self._one(f"nsq_fast_consumer_{figure}", "consumer", name)

    def producer(self, figure: str, name: str = "web") -> float | None:
        """One figure of a producer, None where there is no such series."""
        return self._one(f"nsq_fast_producer_{figure}", "producer", name)

    def _one(self, metric: str, label: str, name: str) -> float | None:
        values = [
            value for (found, labels), value in self.scrape().items() if found == metric and (label, name) in labels
        ]
        assert len(values) <= 1
        return values[0] if values else None


class FakeProducer:
    """A client with the stats that a test says."""

    def __init__(self, stats: Callable[[], Any]) -> None:
        self.stats = stats


class FakeConsumer(FakeProducer):
    """The same, with what a consumer has."""

    topic, channel = "orders", "billing"


@pytest.fixture
def scraper() -> Scraper:
    return Scraper()


@pytest.fixture
def producer(nsqd: NsqdServer) -> Iterator[Producer]:
    with Producer(str(nsqd.tcp_address)) as sender:
        yield sender


@pytest.fixture
def subscribe(nsqd: NsqdServer) -> Iterator[Callable[..., Consumer]]:
    """A factory of started consumers, which are closed after the test."""
    made: list[Consumer] = []

    def start(handler: Any, channel: str = "billing", **options: Any) -> Consumer:
        address = str(nsqd.tcp_address)
        made.append(Consumer("orders", channel, address, message_handler=handler, max_in_flight=10, **options))
        made[-1].start(block=False)
        return made[-1]

    yield start
    for consumer in made:
        consumer.close(drain=False)


def finish(consumer: object, message: object) -> None:
    """A handler that is content with everything."""


def test_a_scrape_shows_what_clients_have_done_and_are_doing(
    scraper: Scraper, producer: Producer, subscribe: Callable[..., Consumer]
) -> None:
    def handle(consumer: object, message: Any) -> None:
        if message.body == b"bad" and message.attempts == 1:
            raise RequeueMessage
        if message.body == b"held":
            message.enable_async()
            message.touch()
            held.append(message)

    held: list[Any] = []
    consumer = subscribe(handle, requeue_delay=0, max_backoff_duration=0)
    scraper.metrics.add_consumer("billing", consumer)
    scraper.metrics.add_producer("web", producer)
    for body in (b"good", b"bad", b"held"):
        producer.publish("orders", body)
    until(lambda: scraper.consumer("messages_finished_total") == 2 and held)
    labels = (("channel", "billing"), ("consumer", "billing"), ("topic", "orders"))
    shown = scraper.scrape()
    of_consumer = {name: value for (name, series), value in shown.items() if series == labels}
    expected = {
        "messages_received_total": 4,
        "messages_finished_total": 2,
        "messages_requeued_total": 1,
        "messages_skipped_total": 0,
        "messages_suppressed_total": 0,
        "messages_expired_total": 0,
        "messages_given_up_total": 0,
        "messages_outdated_total": 0,
        "messages_touched_total": 1,
        "subscriptions_total": 1,
        "leader_moves_total": 0,
        "lookup_errors_total": 0,
        "responses_failed_total": 0,
        "responses_lost_total": 0,
        "order_violations_total": 0,
        "ordered_messages_repeated_total": 0,
        "ordered_deliveries_blocked_total": 0,
        "connections": 1,
        "targets": 1,
        "rdy": 10,
        "max_in_flight": 10,
        "messages_in_flight": 1,
        "messages_unstarted": 0,
        "messages_orphaned": 0,
        "backoff_level": 0,
        "backoff_seconds": 0,
        "running": 1,
        "paused": 0,
        "starved": 0,
    }
    assert of_consumer == {f"nsq_fast_consumer_{name}": value for name, value in expected.items()}
    of_producer = {name: value for (name, series), value in shown.items() if series == (("producer", "web"),)}
    assert of_producer == {
        "nsq_fast_producer_publishes_stored_total": 3,
        "nsq_fast_producer_publishes_refused_total": 0,
        "nsq_fast_producer_publishes_unknown_total": 0,
        "nsq_fast_producer_leader_moves_total": 0,
        "nsq_fast_producer_lookup_errors_total": 0,
        "nsq_fast_producer_pending_publishes": 0,
        "nsq_fast_producer_waiting_publishes": 0,
        "nsq_fast_producer_held_messages": 0,
        "nsq_fast_producer_connections": 1,
        "nsq_fast_producer_connections_stalled": 0,
        "nsq_fast_producer_nsqds_disconnected": 0,
        "nsq_fast_producer_partitions_without_leader": 0,
    }
    assert len(shown) == len(of_consumer) + len(of_producer), "no other labels, and no other series"
    held[0].finish()
    until(lambda: scraper.consumer("messages_in_flight") == 0)


def test_histograms_are_shown_where_they_are_measured(
    scraper: Scraper, nsqd: NsqdServer, subscribe: Callable[..., Consumer]
) -> None:
    consumer = subscribe(finish, histograms=True)
    scraper.metrics.add_consumer("billing", consumer)
    with Producer(str(nsqd.tcp_address), histograms=True) as producer:
        scraper.metrics.add_producer("web", producer)
        producer.publish("orders", b"x")
        until(lambda: scraper.consumer("handler_seconds_count") == 1)
        buckets = {
            dict(labels)["le"]: value
            for (name, labels), value in scraper.scrape().items()
            if name == "nsq_fast_consumer_message_age_seconds_bucket"
        }
        assert buckets["+Inf"] == buckets["2048.0"] == 1
        assert list(buckets.values()) == sorted(buckets.values()), "each bucket counts those below it, too"
        seconds = consumer.stats().handler_time
        assert seconds is not None
        assert scraper.consumer("handler_seconds_sum") == seconds.sum
        assert scraper.producer("publish_seconds_count") == 1


def shown_names(scraper: Scraper) -> set[str]:
    """Of all series, as a scraper sees them."""
    families = scraper.metrics.describe()
    return {family.name + ("_total" if family.type == "counter" else "") for family in families}


def test_the_page_has_each_metric_and_no_other(scraper: Scraper) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(nsq_fast_(?:consumer|producer)_\w+)` \|", page, re.MULTILINE)  # the others: of servers
    assert sorted(rows) == sorted(shown_names(scraper))


# Those of Spark are its listener's: tests/spark/test_spark_source.py.
def test_every_metric_of_the_examples_exists(scraper: Scraper) -> None:
    for name in ("alerts.yml", "dashboard.json"):
        text = (ROOT / "examples" / "prometheus" / name).read_text()
        named = {name.removesuffix("_bucket") for name in re.findall(r"\bnsq_fast_(?!spark)\w+", text)}
        assert named <= shown_names(scraper)


def test_failures_backoff_and_why_a_consumer_does_nothing_are_shown_of_each_client_by_itself(
    scraper: Scraper, nsqd: NsqdServer, producer: Producer, subscribe: Callable[..., Consumer]
) -> None:
    def fail(consumer: object, message: object) -> None:
        raise RequeueMessage

    def reasons() -> dict[str, str]:
        shown = [dict(labels) for (name, labels) in scraper.scrape() if name == "nsq_fast_consumer_stalled"]
        assert {(each["topic"], each["channel"] == each["consumer"]) for each in shown} <= {("orders", True)}
        return {each["consumer"]: each["reason"] for each in shown}

    consumers = {
        "billing": subscribe(fail, requeue_delay=0, max_tries=2, max_backoff_duration=0),
        "mail": subscribe(fail, "mail", requeue_delay=0, max_tries=0, max_backoff_duration=1000),
        "idle": subscribe(finish, "idle"),
    }
    for name, consumer in consumers.items():
        scraper.metrics.add_consumer(name, consumer)
        until(lambda name=name: scraper.consumer("connections", name) == 1)
    producer.publish("orders", b"bad")
    until(lambda: scraper.consumer("messages_given_up_total") == 1)
    assert scraper.consumer("messages_requeued_total") == 2
    until(lambda: (scraper.consumer("backoff_level", "mail") or 0) >= 1)
    until(lambda: scraper.consumer("backoff_seconds", "mail"))
    until(lambda: reasons().get("idle") == "idle")
    consumers["idle"].pause()
    until(lambda: reasons().get("idle") == "max_in_flight_zero")
    assert [scraper.consumer("paused", name) for name in consumers] == [0, 0, 1]
    with Producer(str(nsqd.tcp_address)) as second:
        scraper.metrics.add_producer("web", producer)
        scraper.metrics.add_producer("cron", second)
        until(lambda: scraper.producer("connections", "cron") == 1)
        scraper.metrics.remove(second)
        assert scraper.producer("connections", "cron") is None
        assert scraper.producer("connections") == 1


def test_counters_never_go_down_over_reconnects_and_after_close(
    scraper: Scraper, nsqd: NsqdServer, producer: Producer, subscribe: Callable[..., Consumer]
) -> None:
    consumer = subscribe(finish, max_reconnect_delay=0.1)
    scraper.metrics.add_consumer("billing", consumer)
    for total in (1, 2):
        producer.publish("orders", b"x")
        until(lambda total=total: (scraper.consumer("messages_finished_total") or 0) >= total)
        nsqd.stop()
        until(lambda: scraper.consumer("connections") == 0)
        nsqd.start()
        until(lambda: scraper.consumer("connections") == 1)
    finished = scraper.consumer("messages_finished_total") or 0
    assert finished >= 2
    consumer.close()
    assert scraper.consumer("messages_finished_total") == finished
    assert scraper.consumer("running") == 0
    assert scraper.consumer("rdy") == 0
    assert scraper.consumer("subscriptions_total") == 3, "the first one, and one for each restart"


def test_a_native_thread_scrapes_while_the_consumer_works(
    scraper: Scraper, producer: Producer, subscribe: Callable[..., Consumer]
) -> None:
    scraper.metrics.add_consumer("billing", subscribe(finish))
    scraper.metrics.add_producer("web", producer)
    with ThreadPoolExecutor(1) as thread:
        for number in range(30):
            scraping = thread.submit(scraper.scrape)
            producer.multipublish("orders", [b"x"] * 100)
            producer.publish(f"topic{number}", b"x")  # the producer knows more topics all the time
            until(scraping.done)
            assert scraping.result()
    until(lambda: scraper.consumer("messages_finished_total") == 3000)


def test_clients_of_threads_are_scraped_as_well(scraper: Scraper, nsqd: Any) -> None:
    address = str(nsqd.tcp_address)
    with (
        threads.Producer(address) as producer,
        threads.Consumer("orders", "billing", address, message_handler=finish) as consumer,
    ):
        scraper.metrics.add_consumer("billing", consumer)
        scraper.metrics.add_producer("web", producer)
        producer.publish("orders", b"x")
        until(lambda: scraper.consumer("messages_finished_total") == 1)
        assert scraper.producer("pending_publishes") == 0
    assert scraper.consumer("running") == 0


def test_a_client_that_the_program_has_dropped_is_shown_no_longer(scraper: Scraper, nsqd: NsqdServer) -> None:
    consumer = Consumer("orders", "billing", str(nsqd.tcp_address))
    scraper.metrics.add_consumer("billing", consumer)
    assert scraper.consumer("messages_received_total") == 0
    del consumer
    gc.collect()
    assert scraper.scrape() == {}
    other = Consumer("orders", "billing", str(nsqd.tcp_address))
    scraper.metrics.add_consumer("billing", other)  # the name is free again
    assert scraper.consumer("running") == 0


def test_what_cannot_be_added_is_refused(scraper: Scraper, nsqd: NsqdServer, producer: Producer) -> None:
    consumer, other = (Consumer("orders", "billing", str(nsqd.tcp_address)) for _ in range(2))
    add_consumer: Any = scraper.metrics.add_consumer
    add_producer: Any = scraper.metrics.add_producer
    add_consumer("billing", consumer)
    for add, name, client, reason in (
        (add_consumer, "billing", other, r"name='billing': .* has it"),
        (add_consumer, "again", consumer, "was added before as 'billing'"),
        *((add_consumer, name, other, "must be a string") for name in ("", None, 1)),
        *((add_consumer, "other", wrong, "is no Consumer") for wrong in (producer, Consumer, None, "orders")),
        *((add_producer, "other", wrong, "is no Producer") for wrong in (consumer, Producer, None, "orders")),
    ):
        with pytest.raises(ConfigError, match=reason):
            add(name, client)
    assert {dict(labels)["consumer"] for _, labels in scraper.scrape()} == {"billing"}
    with pytest.raises(ConfigError, match="add clients to the ClientCollector that it has"):
        ClientCollector(scraper.registry)
    empty = CollectorRegistry()
    assert ClientCollector.of(empty) is ClientCollector.of(empty)
    assert ClientCollector.of(scraper.registry) is scraper.metrics


def test_a_client_that_cannot_be_read_is_named_once_and_harms_no_other(
    scraper: Scraper, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Any:
        if is_broken:
            raise RuntimeError("no figures")
        return producer.stats()

    is_broken = [1]
    broken = FakeProducer(fail)
    scraper.metrics.add_producer("broken", broken)
    scraper.metrics.add_producer("web", producer)
    with caplog.at_level(logging.WARNING, "nsq_fast.metrics"):
        for _ in range(3):
            assert scraper.producer("pending_publishes", "broken") is None
            assert scraper.producer("pending_publishes") == 0
    (message,) = caplog.messages
    assert "no figures" in message
    is_broken.clear()
    assert scraper.producer("pending_publishes", "broken") == 0


def consumer_that_received(count: list[int]) -> FakeConsumer:
    """It says that it received as many messages as the list's one item says."""
    real = Consumer("orders", "billing", "127.0.0.1:4150")  # never started

    def stats() -> Any:
        snapshot = real.stats()
        snapshot.totals.received = count[0]
        return snapshot

    return FakeConsumer(stats)


def test_a_count_that_a_snapshot_lacks_for_a_moment_is_not_taken_back(scraper: Scraper) -> None:
    received = [5]
    client = consumer_that_received(received)
    scraper.metrics.add_consumer("billing", client)
    assert scraper.consumer("messages_received_total") == 5
    received[0] = 2
    assert scraper.consumer("messages_received_total") == 5
    received[0] = 6
    assert scraper.consumer("messages_received_total") == 6


def test_errors_of_lookup_are_counted(scraper: Scraper, closed_port: int, subscribe: Callable[..., Consumer]) -> None:
    lookupd = f"127.0.0.1:{closed_port}"
    scraper.metrics.add_consumer("billing", subscribe(finish, lookupd_http_addresses=lookupd))
    with Producer(lookupd_http_addresses=lookupd, publish_timeout=0.1) as producer:
        scraper.metrics.add_producer("web", producer)
        with pytest.raises(NsqError, match="no nsqd"):
            producer.publish("orders", b"x")
        until(lambda: scraper.consumer("lookup_errors_total"))
        until(lambda: scraper.producer("lookup_errors_total"))
        assert scraper.producer("publishes_refused_total") == 1
    assert scraper.producer("lookup_errors_total")


@pytest.mark.fork
def test_a_child_of_a_fork_shows_counts_of_its_own() -> None:
    received = [5]
    client = consumer_that_received(received)
    metrics = ClientCollector(registry := CollectorRegistry())
    metrics.add_consumer("billing", client)
    labels = {"consumer": "billing", "topic": "orders", "channel": "billing"}
    assert registry.get_sample_value("nsq_fast_consumer_messages_received_total", labels) == 5
    child = os.fork()
    if not child:
        received[0] = 1
        shown = registry.get_sample_value("nsq_fast_consumer_messages_received_total", labels)
        os._exit(0 if shown == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# OpenTelemetry: spans, links, metrics and context, as the SDK's exporters in memory get them.


@pytest.fixture
def exported() -> Exported:
    return Exported()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


# Spans


def check_attributes(exported: Exported, published: ReadableSpan, processed: ReadableSpan, count: int) -> None:
    """Of one publish, of four bytes, and its handler; and the metrics of so many."""
    assert (published.kind, processed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert attributes(published) == {
        "messaging.system": "nsq",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.message.body.size": 4,
    }
    found = attributes(processed)
    assert len(str(found.pop("messaging.message.id"))) == 16
    assert found == {
        "messaging.system": "nsq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.destination.subscription.name": "billing",
        "messaging.message.body.size": 4,
        "nsq.message.attempts": 1,
    }
    assert exported.metrics() == {
        "messaging.client.sent.messages": {"publish": count},
        "messaging.client.consumed.messages": {"process": count},
        "messaging.client.operation.duration": {"publish": count},
        "messaging.process.duration": {"process": count},
    }


def test_a_batch_is_one_span_with_links(exported: Exported, nsqd: NsqdServer) -> None:
    telemetry, seen = exported.telemetry("envelope"), []
    address = str(nsqd.tcp_address)
    with telemetry.instrument(Producer(address)) as producer:  # it takes its arguments by their names, too
        assert producer.publish(topic="orders", body=b"a", defer=None) == b"OK"
        assert producer.multipublish(topic="orders", bodies=iter([b"b", b"c"])) == b"OK"
        with pytest.raises(TypeError, match="topic"):
            producer.publish(body=b"d")  # type: ignore[call-arg]

    def handle(consumer: Any, messages: list[Any]) -> None:
        seen.extend(message.body for message in messages)

    with Consumer("orders", "billing", address, batch_handler=telemetry.batch_handler(handle), max_in_flight=10):
        until(lambda: len(seen) == 3)
        until(lambda: exported.spans("process orders"))
    one, two = exported.spans("publish orders")
    processed = exported.spans("process orders")
    assert attributes(one)["messaging.message.body.size"] == 1
    assert attributes(two)["messaging.batch.message_count"] == 2
    assert sorted(link for span in processed for link in links(span)) == sorted([ids(one), ids(two), ids(two)])
    assert {parent(span) for span in processed} == {None}
    assert sum(attributes(span)["messaging.batch.message_count"] for span in processed) == 3
    assert sorted(seen) == [b"a", b"b", b"c"]


def test_what_a_handler_raises_is_on_its_span(exported: Exported, nsqd: NsqdServer) -> None:
    telemetry = exported.telemetry()

    def handle(consumer: Any, message: Any) -> None:
        if message.attempts == 1:
            raise RequeueMessage
        if message.attempts == 2:
            raise ValueError("bad")

    address = str(nsqd.tcp_address)
    consumer = Consumer(
        "orders", "billing", address, message_handler=telemetry.handler(handle), requeue_delay=0, max_backoff_duration=0
    )
    with Producer(address) as producer, consumer:
        producer.publish("orders", b"x")
        until(lambda: len(exported.spans("process orders")) == 3)
    found = exported.spans("process orders")
    assert [span.status.status_code for span in found] == [StatusCode.UNSET, StatusCode.ERROR, StatusCode.UNSET]
    assert attributes(found[0])["nsq.requeued"] is True
    assert attributes(found[1])["error.type"] == "ValueError"
    assert [event.name for event in found[1].events] == ["exception"]
    assert [parent(span) for span in found] == [None] * 3, "no context travels"


def test_a_publish_that_fails_says_why(exported: Exported, closed_port: int) -> None:
    producer = exported.telemetry().instrument(Producer(f"127.0.0.1:{closed_port}", publish_timeout=0.05))
    with producer:
        with pytest.raises(Exception, match="nsqd") as caught:
            producer.publish("orders", b"x")
        result = producer.publish_nowait("orders", b"x")
        with pytest.raises(type(caught.value)):
            result.get(timeout=WAIT)
        with pytest.raises(TypeError):
            producer.publish("orders", "text")
    one, two, wrong = exported.spans("publish orders")
    for span in (one, two):
        assert span.status.status_code is StatusCode.ERROR
        assert attributes(span)["error.type"] == type(caught.value).__qualname__
    assert attributes(wrong)["error.type"] == "TypeInvalid"


# Every face


@pytest.mark.parametrize("face", FACES, ids=lambda face: str(face.name))
async def test_every_face_publishes_and_processes(exported: Exported, face: Face, nsqd_process: Any) -> None:
    telemetry, address, seen = exported.telemetry("envelope"), nsqd_process.address, []

    async def handle(consumer: Any, message: Any) -> None:
        before = trace.get_current_span().get_span_context().span_id
        await face.sleep(0.01)  # sleep: other handlers run meanwhile, in contexts of their own
        seen.append((message.body, before, trace.get_current_span().get_span_context().span_id))

    options = {"message_handler": handle, "concurrency": 4, "max_in_flight": 4}
    handler = telemetry.handler(face.taken(options)["message_handler"])
    async with (
        face.client("Producer", address) as producer,
        face.client("Consumer", "orders", "billing", address, **{**options, "message_handler": handler}),
    ):
        telemetry.instrument(producer)
        with exported.tracer.start_as_current_span("request") as request:
            for number in range(8):
                assert await face(producer.publish("orders", b"no %d" % number)) == b"OK"
        promise = producer.publish_nowait("orders", b"no 8")
        assert len(exported.spans("publish orders")) == 8, "its span ends with its result"
        assert await face.result(promise) == b"OK"
        await face.until(lambda: len(exported.spans("process orders")) == 9)
        parents = [parent(span) for span in exported.spans("publish orders")]
        assert parents == [*[request.get_span_context().span_id] * 8, None]
    published = {ids(span): span for span in exported.spans("publish orders")}
    for processed in exported.spans("process orders"):
        check_process(published[links(processed)[0]], processed)
    check_attributes(exported, published[links(processed)[0]], processed, 9)
    assert sorted(body for body, *_ in seen) == [b"no %d" % number for number in range(9)]
    assert {before for _, before, _ in seen} == {ids(span)[1] for span in exported.spans("process orders")}
    assert all(before == after for _, before, after in seen), "each handler keeps its own span"


@pytest.mark.parametrize("face", FACES, ids=lambda face: str(face.name))
async def test_who_iterates_gets_spans_of_receipts(exported: Exported, face: Face, nsq_broker: Broker) -> None:
    telemetry, address = exported.telemetry("envelope"), str(nsq_broker.nsqd.tcp_address)
    async with (
        face.client("Producer", address) as producer,
        face.client("Consumer", "orders", "billing", address) as consumer,
        aclosing(face.messages(telemetry.receive(consumer))) as messages,
    ):
        assert await face(telemetry.instrument(producer).multipublish("orders", [b"x", b"y"])) == b"OK"
        for _ in range(2):
            message = await anext(messages)
            with telemetry.process(consumer, message) as opened:
                assert opened.body in (b"x", b"y")
                await face(opened.finish())
    published = exported.span("publish orders")
    for processed in exported.spans("process orders"):
        check_process(published, processed)
    received = exported.spans("receive orders")
    assert [(span.kind, links(span)) for span in received] == [(SpanKind.CLIENT, [ids(published)])] * 2


# Context


def test_context_travels_in_extended_headers_and_the_trace_id_is_the_span_s(
    exported: Exported, cluster: RedesignedCluster
) -> None:
    telemetry, seen = exported.telemetry("headers", trace_id=True), []
    cluster.create_topic("orders", ext=True, channels=["billing"])
    lookupd = {"lookupd_http_addresses": str(cluster.lookupds[0].http_address)}

    def handle(consumer: Any, message: Any) -> None:
        seen.append((message.body, message.headers, message.trace_id))

    options: dict[str, Any] = {**lookupd, "max_in_flight": 10, "extend_support": True}
    with (
        telemetry.instrument(Producer(**lookupd)) as producer,
        Consumer("orders", "billing", **options, message_handler=telemetry.handler(handle)),
    ):
        producer.publish("orders", b"a", headers={"kind": "new"})
        until(lambda: len(seen) == 1)
        check_process(exported.span("publish orders"), exported.span("process orders"))
        producer.multipublish("orders", [b"b", b"c"], headers=[{"n": "1"}, {"n": "2"}])
        until(lambda: len(exported.spans("process orders")) == 3)
    one, two = exported.spans("publish orders")
    first, *others = exported.spans("process orders")
    for processed in others:
        check_process(two, processed)
    found = {body: (headers.get("kind"), headers.get("n")) for body, headers, _ in seen}
    assert found == {b"a": ("new", None), b"b": (None, "1"), b"c": (None, "2")}
    assert seen[0][2] == ids(one)[0] & (2**64 - 1)
    assert attributes(first)["messaging.destination.partition.id"] == "0"


def test_consumers_of_an_envelope_take_bodies_without_one(exported: Exported, nsqd: NsqdServer) -> None:
    telemetry, seen = exported.telemetry("envelope"), []
    address = str(nsqd.tcp_address)
    handler = telemetry.handler(lambda consumer, message: seen.append(message.body))
    kept = [b"plain", MAGIC + b"no json\nx", MAGIC + b'{"traceparent":']
    with Producer(address) as producer, Consumer("orders", "billing", address, message_handler=handler):
        for body in (*kept, MAGIC + b'{"traceparent":"nonsense"}\nx'):
            producer.publish("orders", body)
        until(lambda: len(exported.spans("process orders")) == 4)
    assert seen == [*kept, b"x"]
    assert {parent(span) for span in exported.spans("process orders")} == {None}


@given(st.binary(min_size=1), st.dictionaries(st.text(), st.text()))
def test_what_goes_into_an_envelope_comes_out(body: bytes, carrier: dict[str, str]) -> None:
    wrapped, _ = Envelope().wrap(body, None, carrier)
    message, found = Envelope().unwrap(Message(1, 1, b"0123456789abcdef", wrapped))
    if len(wrapped) - len(body) < 1000:
        assert (message.body, found) == (body, carrier)
        assert Envelope().unwrap(message) == (message, carrier)


@given(st.binary())
@example(b'{"traceparent":"\xff"}\n')
def test_no_body_is_taken_for_an_envelope_by_mistake(body: bytes) -> None:
    for text in (body, MAGIC + body):
        message = Message(1, 1, b"0123456789abcdef", text)
        opened, carrier = Envelope().unwrap(message)
        assert opened.body == text or isinstance(opened, OpenedMessage)
        assert not carrier or opened is not message


def test_to_respond_to_an_opened_message_is_to_respond_to_it(exported: Exported, nsqd: NsqdServer) -> None:
    telemetry, address = exported.telemetry("envelope"), str(nsqd.tcp_address)

    def handle(consumer: Any, message: Any) -> None:
        message.requeue(0, False) if message.attempts == 1 else message.finish()

    with (
        telemetry.instrument(Producer(address)) as producer,
        Consumer("orders", "billing", address, message_handler=telemetry.handler(handle)) as consumer,
    ):
        producer.publish("orders", b"x")
        until(lambda: consumer.stats().totals.finished == 1)
        totals = consumer.stats().totals
    assert (totals.received, totals.requeued, totals.answers_failed) == (2, 1, 0)
    first, second = exported.spans("process orders")
    for each in (first, second):  # a requeue keeps the envelope
        check_process(exported.span("publish orders"), each)


# Off


def test_without_an_sdk_messages_go_through_as_they_are(nsqd: NsqdServer) -> None:
    telemetry, address, seen = Telemetry("envelope"), str(nsqd.tcp_address), []
    handler = telemetry.handler(lambda consumer, message: seen.append(message.body))
    with telemetry.instrument(Producer(address)) as producer, Consumer("t", "c", address, message_handler=handler):
        producer.publish("t", b"x")
        until(lambda: seen == [b"x"])


def test_what_cannot_be_instrumented_is_refused(exported: Exported, nsqd: NsqdServer) -> None:
    with pytest.raises(ConfigError, match=r"context='body': must be 'headers', 'envelope' or None"):
        Telemetry("body")
    telemetry = exported.telemetry()
    producer = telemetry.instrument(Producer(str(nsqd.tcp_address)))
    for wrong, reason in (
        (producer, "instrumented before"),
        (object(), "is no Producer"),
        (Producer, "is no Producer"),
    ):
        with pytest.raises(ConfigError, match=reason):
            telemetry.instrument(wrong)

    async def handle(consumer: Any, message: Any) -> None:
        """Never runs."""

    with pytest.raises(ConfigError, match="is an async function"):
        Consumer("orders", "billing", "127.0.0.1:4150", message_handler=telemetry.handler(handle))


# A real Prometheus scrapes a program; the queries of the dashboard and the alert rules are evaluated by it.


EXAMPLES = ROOT / "examples" / "prometheus"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")


def with_prometheus(test: Any) -> Any:
    """It needs a real Prometheus."""
    missing = "prometheus and promtool are not installed: apt-get install prometheus"
    test = pytest.mark.skipif(not (PROMETHEUS and PROMTOOL), reason=missing)(test)
    return pytest.mark.slow(pytest.mark.timeout(180)(test))


# A producer and a consumer at work, until their nsqd goes; it writes where its metrics are.
SCRAPED = """
import signal
import gevent
from gevent.event import Event
from prometheus_client import start_http_server
from nsq_fast import Consumer, Producer
from nsq_fast.broker import NsqdServer
from nsq_fast.metrics import ClientCollector

nsqd = NsqdServer()
nsqd.start()
address, metrics, is_over = str(nsqd.tcp_address), ClientCollector(), Event()
consumer = Consumer("orders", "billing", address, message_handler=lambda consumer, message: None, histograms=True)
paused = Consumer("orders", "paused", address, message_handler=lambda consumer, message: None)
producer = Producer(address, histograms=True)
metrics.add_consumer("billing", consumer)
metrics.add_consumer("paused", paused)
metrics.add_producer("web", producer)
consumer.start(block=False)
paused.start(block=False)
paused.pause()
producer.start()
server, thread = start_http_server(0, "127.0.0.1")
print(server.server_port, flush=True)
gevent.signal_handler(signal.SIGUSR1, is_over.set)
while not is_over.wait(0.02):
    producer.publish("orders", b"x")
nsqd.stop()
Event().wait()
"""

SCRAPING = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 200ms}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: nsq
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@pytest.fixture(scope="module")
def program() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The program, and the port of its metrics."""
    process = subprocess.Popen([sys.executable, "-c", SCRAPED], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def ask(
    program: tuple[subprocess.Popen[str], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Any]]:
    """Ask Prometheus, which has what the program gave it a few times: ``ask("query?query=up")`` gives its data."""
    folder = tmp_path_factory.mktemp("prometheus")
    config, log = folder / "prometheus.yml", folder / "log"
    config.write_text(SCRAPING.format(port=program[1], rules=EXAMPLES / "alerts.yml"))
    command = [
        str(PROMETHEUS), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "GOMAXPROCS": "1"})
    try:
        port = until(
            lambda: re.search(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', log.read_text()), about=log.read_text
        )

        def get(path: str) -> Any:
            with urlopen(f"http://127.0.0.1:{port[1]}/api/v1/{path}", timeout=WAIT) as reply:
                return json.load(reply)["data"]

        def has_scraped() -> bool:
            with suppress(HTTPError):  # 503: it is still starting
                return bool(get(f"query?query={quote('sum_over_time(up[1m]) > 2')}")["result"])
            return False

        until(has_scraped, 2 * WAIT, 0.1, log.read_text)
        yield get
    finally:
        process.kill()
        process.wait()


def queries() -> Iterator[str]:
    dashboard = json.loads((EXAMPLES / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])


@with_prometheus
def test_each_query_of_the_dashboard_shows_something_and_times_are_plausible(ask: Callable[[str], Any]) -> None:
    found = {expr: ask(f"query?query={quote(expr)}")["result"] for expr in queries()}
    assert len(found) > 20
    values = {expr: [one["value"][1] for one in series] for expr, series in found.items()}
    assert [expr for expr, shown in values.items() if not shown or "NaN" in shown] == []
    for metric in ("consumer_handler", "consumer_message_age", "producer_publish"):
        times = quote(f"histogram_quantile(0.5, sum by (le) (nsq_fast_{metric}_seconds_bucket))")
        (median,) = ask(f"query?query={times}")["result"]
        assert 0 < float(median["value"][1]) < WAIT


@with_prometheus
def test_a_consumer_that_does_nothing_is_shown_with_its_reason_and_told_of(ask: Callable[[str], Any]) -> None:
    (panel,) = (each for each in json.loads((EXAMPLES / "dashboard.json").read_text())["panels"] if each["id"] == 9)
    shown = quote(panel["targets"][0]["expr"])

    def reasons() -> set[tuple[str, str]]:
        found = ask(f"query?query={shown}")["result"]
        return {(each["metric"]["consumer"], each["metric"]["reason"]) for each in found}

    until(lambda: ("paused", "max_in_flight_zero") in reasons(), 2 * WAIT, 0.1, reasons)

    def told() -> list[str]:
        labels = [each["labels"] for each in ask("alerts")["alerts"]]
        wanted = {"alertname": "NsqConsumerStalled", "consumer": "paused"}
        return [each["reason"] for each in labels if wanted.items() <= each.items()]

    until(lambda: told() == ["max_in_flight_zero"], 2 * WAIT, 0.1, told)


@with_prometheus
def test_the_rules_are_evaluated_and_one_sees_that_the_nsqd_is_gone(
    ask: Callable[[str], Any], program: tuple[subprocess.Popen[str], int]
) -> None:
    def rules() -> dict[str, Any]:
        return {rule["name"]: rule for group in ask("rules")["groups"] for rule in group["rules"]}

    until(lambda: all(rule["health"] == "ok" for rule in rules().values()), 2 * WAIT, 0.1)
    assert len(rules()) > 10
    program[0].send_signal(signal.SIGUSR1)
    until(lambda: rules()["NsqConsumerWithoutConnection"]["state"] in {"pending", "firing"}, 2 * WAIT, 0.1, rules)


@with_prometheus
def test_promtool_has_no_complaint(program: tuple[subprocess.Popen[str], int]) -> None:
    with urlopen(f"http://127.0.0.1:{program[1]}/metrics", timeout=WAIT) as reply:
        ours = b"".join(line for line in reply if b"nsq_fast_" in line)
    for arguments, text in ((["check", "metrics"], ours), (["check", "rules", str(EXAMPLES / "alerts.yml")], b"")):
        checked = subprocess.run([str(PROMTOOL), *arguments], input=text, capture_output=True, timeout=WAIT)
        assert checked.returncode == 0, checked.stdout + checked.stderr


OUTDATED = """
rule_files: ["{rules}"]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: nsq_fast_consumer_messages_outdated_total{{consumer="prices", topic="t", channel="c"}}
        values: 0 0 0 5x14
    alert_rule_test:
      - {{eval_time: 2m, alertname: NsqMessagesOutdated}}
      - eval_time: 5m
        alertname: NsqMessagesOutdated
        exp_alerts:
          - exp_labels: {{severity: warning, consumer: prices, topic: t, channel: c}}
            exp_annotations: {{summary: s, description: d}}
      - {{eval_time: 16m, alertname: NsqMessagesOutdated}}
"""


@with_prometheus
def test_messages_that_are_too_old_are_told_of_until_there_are_no_more(tmp_path: Path) -> None:
    rules = tmp_path / "alerts.yml"
    text = (EXAMPLES / "alerts.yml").read_text()
    found = re.search(r"NsqMessagesOutdated\n.*?summary: (.*?)\n\s*description: (.*?)\n", text, re.DOTALL)
    assert found is not None
    rules.write_text(text.replace(found[1], "s").replace(found[2], "d"))
    (tmp_path / "test.yml").write_text(OUTDATED.format(rules=rules))
    done = subprocess.run([str(PROMTOOL), "test", "rules", tmp_path / "test.yml"], capture_output=True, timeout=WAIT)
    assert done.returncode == 0, done.stdout + done.stderr
