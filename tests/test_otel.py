"""OpenTelemetry: spans, links, metrics and context, as the SDK's exporters in memory get them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from support.embedded import EmbeddedNsqd
from support.spans import Exported, check_process, ids, links, parent
from support.waiting import WAIT, until

from nsq_fast import Consumer, Message, Producer, RequeueMessage, aio, threads
from nsq_fast.broker import BrokerProcess, NsqdServer, RedesignedCluster
from nsq_fast.errors import ConfigError
from nsq_fast.otel import MAGIC, Envelope, OpenedMessage, Telemetry

NSQD = EmbeddedNsqd


@pytest.fixture
def exported() -> Exported:
    return Exported()


# Spans


def test_a_message_is_followed_from_its_publish_to_its_handler(exported: Exported, nsqd: NsqdServer) -> None:
    telemetry, seen = exported.telemetry("envelope"), []

    def handle(consumer: Any, message: Any) -> None:
        seen.append((message.body, message.attempts, trace.get_current_span().get_span_context().span_id))

    address = str(nsqd.tcp_address)
    with (
        telemetry.instrument(Producer(address)) as producer,
        Consumer("orders", "billing", address, message_handler=telemetry.handler(handle)),
        exported.tracer.start_as_current_span("request") as request,
    ):
        assert producer.publish("orders", b"body") == b"OK"
        published, processed = exported.span("publish orders"), exported.span("process orders")
    assert parent(published) == request.get_span_context().span_id
    check_process(published, processed)
    assert seen == [(b"body", 1, ids(processed)[1])], "the body is as it was, and the span is current"
    assert (published.kind, processed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert dict(published.attributes or {}) == {
        "messaging.system": "nsq",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.message.body.size": 4,
    }
    attributes = dict(processed.attributes or {})
    assert len(str(attributes.pop("messaging.message.id"))) == 16
    assert attributes == {
        "messaging.system": "nsq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.destination.subscription.name": "billing",
        "messaging.message.body.size": 4,
        "nsq.message.attempts": 1,
    }
    metrics = exported.metrics()
    assert metrics == {
        "messaging.client.sent.messages": {"publish": 1},
        "messaging.client.consumed.messages": {"process": 1},
        "messaging.client.operation.duration": {"publish": 1},
        "messaging.process.duration": {"process": 1},
    }


def test_a_batch_is_one_span_with_links(exported: Exported, nsqd: NsqdServer) -> None:
    telemetry, seen = exported.telemetry("envelope"), []
    address = str(nsqd.tcp_address)
    with telemetry.instrument(Producer(address)) as producer:
        producer.publish("orders", b"a")
        producer.multipublish("orders", iter([b"b", b"c"]))

    def handle(consumer: Any, messages: list[Any]) -> None:
        seen.extend(message.body for message in messages)

    with Consumer("orders", "billing", address, batch_handler=telemetry.batch_handler(handle), max_in_flight=10):
        until(lambda: len(seen) == 3)
        until(lambda: exported.spans("process orders"))
    one, two = exported.spans("publish orders")
    assert (two.attributes or {})["messaging.batch.message_count"] == 2
    found = [link for span in exported.spans("process orders") for link in links(span)]
    assert sorted(found) == sorted([ids(one), ids(two), ids(two)])
    assert {parent(span) for span in exported.spans("process orders")} == {None}
    assert (
        sum((span.attributes or {})["messaging.batch.message_count"] for span in exported.spans("process orders")) == 3
    )
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
    first, second, third = exported.spans("process orders")
    assert (first.attributes or {})["nsq.requeued"] is True
    assert first.status.status_code is StatusCode.UNSET
    assert second.status.status_code is StatusCode.ERROR
    assert (second.attributes or {})["error.type"] == "ValueError"
    assert [event.name for event in second.events] == ["exception"]
    assert third.status.status_code is StatusCode.UNSET
    assert [parent(span) for span in (first, second, third)] == [None] * 3, "no context travels"


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
        assert (span.attributes or {})["error.type"] == type(caught.value).__qualname__
    assert (wrong.attributes or {})["error.type"] == "TypeError"


def test_a_publish_that_returns_at_once_ends_its_span_with_its_result(exported: Exported, nsqd: NsqdServer) -> None:
    with exported.telemetry().instrument(Producer(str(nsqd.tcp_address))) as producer:
        result = producer.publish_nowait("orders", b"x")
        assert exported.spans("publish orders") == []
        assert result.get(timeout=WAIT) == b"OK"
        assert exported.span("publish orders").status.status_code is StatusCode.UNSET
        other = producer.publish("orders", b"x", raise_error=False)
        other.get(timeout=WAIT)
        until(lambda: len(exported.spans("publish orders")) == 2)


def test_spans_are_linked_by_an_envelope_after_a_requeue_too(exported: Exported, nsqd_process: Any) -> None:
    """Publish, receive and process, on a real nsqd as on the embedded one."""
    telemetry, attempts = exported.telemetry("envelope"), []

    def handle(consumer: Any, message: Any) -> None:
        attempts.append((message.body, message.attempts))
        if message.attempts == 1:
            message.requeue(0, False)

    address = nsqd_process.address
    with telemetry.instrument(Producer(address)) as producer:
        with Consumer("orders", "billing", address, message_handler=telemetry.handler(handle)):
            producer.publish("orders", b"body")
            until(lambda: len(exported.spans("process orders")) == 2)
        with Consumer("orders", "billing", address) as consumer:
            producer.publish("orders", b"iterated")
            for message in telemetry.receive(consumer):
                with telemetry.process(consumer, message) as opened:
                    assert opened.body == b"iterated"
                    opened.finish()
                break
    assert attempts == [(b"body", 1), (b"body", 2)]
    one, two = exported.spans("publish orders")
    first, again, iterated = exported.spans("process orders")
    for published, processed in ((one, first), (one, again), (two, iterated)):
        check_process(published, processed)
    received = exported.span("receive orders")
    assert (received.kind, links(received)) == (SpanKind.CLIENT, [ids(two)])


# Every face


def test_threads_publish_and_process(exported: Exported, nsqd: NsqdServer) -> None:
    telemetry, seen = exported.telemetry("envelope"), []

    def handle(consumer: Any, message: Any) -> None:
        seen.append((threading.get_ident(), trace.get_current_span().get_span_context().span_id))

    address = str(nsqd.tcp_address)
    with (
        telemetry.instrument(threads.Producer(address)) as producer,
        threads.Consumer("orders", "billing", address, message_handler=telemetry.handler(handle)),
    ):
        with exported.tracer.start_as_current_span("request") as request:
            producer.publish("orders", b"x")
        published, processed = exported.span("publish orders"), exported.span("process orders")
        assert parent(published) == request.get_span_context().span_id
        check_process(published, processed)
        future = producer.publish_nowait("orders", b"x")
        until(future.done)  # the nsqd is in this thread: it must not block
        assert future.result() == b"OK"
        until(lambda: len(exported.spans("publish orders")) == 2)
    assert seen[0][0] != threading.get_ident()
    assert seen[0][1] == ids(processed)[1]


def test_coroutines_publish_and_process(exported: Exported) -> None:
    telemetry, seen = exported.telemetry("envelope"), []

    async def handle(consumer: Any, message: Any) -> None:
        before = trace.get_current_span().get_span_context().span_id
        await asyncio.sleep(0.01)  # sleep: other handlers run meanwhile, in contexts of their own
        seen.append((message.body, before, trace.get_current_span().get_span_context().span_id))

    async def main(address: str) -> None:
        async with (
            telemetry.instrument(aio.Producer(address)) as producer,
            aio.Consumer(
                "orders", "billing", address, message_handler=telemetry.handler(handle), concurrency=4, max_in_flight=4
            ),
        ):
            with exported.tracer.start_as_current_span("request") as request:
                await asyncio.gather(*(producer.publish("orders", b"%d" % number) for number in range(8)))
            assert await producer.publish_nowait("orders", b"8") == b"OK"
            while len(exported.spans("process orders")) < 9:
                await asyncio.sleep(0.01)  # sleep: looks again and again
            in_request = [span for span in exported.spans("publish orders") if parent(span)]
            assert {parent(span) for span in in_request} == {request.get_span_context().span_id}
            assert len(in_request) == 8

    with BrokerProcess(lookupd=False) as broker:
        asyncio.run(asyncio.wait_for(main(str(broker.nsqds[0].tcp)), WAIT))
    published = {ids(span): span for span in exported.spans("publish orders")}
    assert len(published) == 9
    for processed in exported.spans("process orders"):
        check_process(published[links(processed)[0]], processed)
    assert sorted(body for body, *_ in seen) == [b"%d" % number for number in range(9)]
    assert {before for _, before, _ in seen} == {ids(span)[1] for span in exported.spans("process orders")}
    assert all(before == after for _, before, after in seen), "each handler keeps its own span"


def test_an_async_loop_gets_spans_of_receipts(exported: Exported) -> None:
    telemetry = exported.telemetry("envelope")

    async def main(address: str) -> None:
        async with (
            telemetry.instrument(aio.Producer(address)) as producer,
            aio.Consumer("orders", "billing", address) as consumer,
        ):
            await producer.multipublish("orders", [b"x", b"y"])
            count = 0
            async for message in telemetry.receive(consumer):
                with telemetry.process(consumer, message) as opened:
                    assert opened.body in (b"x", b"y")
                count += 1
                if count == 2:
                    break

    with BrokerProcess(lookupd=False) as broker:
        asyncio.run(asyncio.wait_for(main(str(broker.nsqds[0].tcp)), WAIT))
    assert len(exported.spans("receive orders")) == len(exported.spans("process orders")) == 2


# Context


@pytest.fixture
def cluster() -> Iterator[RedesignedCluster]:
    with RedesignedCluster(kind=True) as made:
        yield made


def test_context_travels_in_extended_headers_and_the_trace_id_is_the_span_s(
    exported: Exported, cluster: RedesignedCluster
) -> None:
    telemetry, seen = exported.telemetry("headers", trace_id=True), []
    cluster.create_topic("orders", ext=True, channels=["billing"])
    lookupd = {"lookupd_http_addresses": str(cluster.lookupds[0].http_address)}

    def handle(consumer: Any, message: Any) -> None:
        seen.append((message.body, message.headers, message.trace_id))

    with (
        telemetry.instrument(Producer(**lookupd)) as producer,
        Consumer(
            "orders",
            "billing",
            **lookupd,
            message_handler=telemetry.handler(handle),
            max_in_flight=10,
            extend_support=True,
        ),
    ):
        producer.publish("orders", b"a", headers={"kind": "new"})
        until(lambda: len(seen) == 1)
        check_process(exported.span("publish orders"), exported.span("process orders"))
        producer.multipublish("orders", [b"b", b"c"], headers=[{"n": "1"}, {"n": "2"}])
        until(lambda: len(exported.spans("process orders")) == 3)
    one, two = exported.spans("publish orders")
    for processed in exported.spans("process orders")[1:]:
        check_process(two, processed)
    assert [
        (body, headers.get("kind"), headers.get("n")) for body, headers, _ in sorted(seen, key=lambda each: each[0])
    ] == [
        (b"a", "new", None),
        (b"b", None, "1"),
        (b"c", None, "2"),
    ]
    assert seen[0][2] == ids(one)[0] & (2**64 - 1)
    assert (exported.spans("process orders")[0].attributes or {})["messaging.destination.partition.id"] == "0"


def test_consumers_of_an_envelope_take_bodies_without_one(exported: Exported, nsqd: NsqdServer) -> None:
    telemetry, seen = exported.telemetry("envelope"), []
    address = str(nsqd.tcp_address)
    handler = telemetry.handler(lambda consumer, message: seen.append(message.body))
    with Producer(address) as producer, Consumer("orders", "billing", address, message_handler=handler):
        for body in (
            b"plain",
            MAGIC + b"no json\nx",
            MAGIC + b'{"traceparent":',
            MAGIC + b'{"traceparent":"nonsense"}\nx',
        ):
            producer.publish("orders", body)
        until(lambda: len(exported.spans("process orders")) == 4)
    assert seen == [b"plain", MAGIC + b"no json\nx", MAGIC + b'{"traceparent":', b"x"]
    assert {parent(span) for span in exported.spans("process orders")} == {None}


@given(st.binary(min_size=1), st.dictionaries(st.text(), st.text()))
def test_what_goes_into_an_envelope_comes_out(body: bytes, carrier: dict[str, str]) -> None:
    wrapped, _ = Envelope().wrap(body, None, carrier)
    message, found = Envelope().unwrap(Message(1, 1, b"0123456789abcdef", wrapped))
    if len(wrapped) - len(body) < 1000:
        assert (message.body, found) == (body, carrier)
        assert Envelope().unwrap(message) == (message, carrier)


@given(st.binary())
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


# Off


def test_nothing_is_there_unless_it_is_asked_for() -> None:
    code = """
import sys
import nsq_fast.aio, nsq_fast.threads
from nsq_fast import Consumer, Producer
producer = Producer("127.0.0.1:4150")
assert "publish" not in vars(producer)
print([name for name in sys.modules if name.startswith(("opentelemetry", "nsq_fast.otel"))])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT, check=True)
    assert ended.stdout.strip() == "[]"


def test_without_an_sdk_messages_go_through_as_they_are(nsqd: NsqdServer) -> None:
    telemetry, address, seen = Telemetry("envelope"), str(nsqd.tcp_address), []
    handler = telemetry.handler(lambda consumer, message: seen.append(message.body))
    with (
        telemetry.instrument(Producer(address)) as producer,
        Consumer("orders", "billing", address, message_handler=handler),
    ):
        producer.publish("orders", b"x")
        until(lambda: seen)
    assert seen == [b"x"]


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
