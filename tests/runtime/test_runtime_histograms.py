"""Times of handlers, ages of messages and latencies of publishes: samples, in buckets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import gevent
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.embedded import EmbeddedNsqd
from support.scripted_nsqd import ScriptedNsqd, frame
from support.waiting import until

from nsq_fast import Consumer, Producer, aio, threads
from nsq_fast.broker import BrokerProcess, NsqdServer
from nsq_fast.client.histogram import BOUNDS, Histogram, HistogramStats

NSQD = EmbeddedNsqd
PAUSE = 0.05
LEAST = PAUSE / 2  # of what a pause takes: a timer counts from the time that its loop has seen last


def observed(values: list[float]) -> HistogramStats:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    return histogram.stats()


@given(st.lists(st.one_of(st.floats(-1, 5000), st.sampled_from(BOUNDS))))
def test_each_value_is_in_one_bucket_and_below_its_bound(values: list[float]) -> None:
    stats = observed(values)
    values = [max(value, 0.0) for value in values]
    assert stats.count == len(values)
    assert stats.sum == pytest.approx(sum(values))
    for number, bound in enumerate(BOUNDS):
        assert sum(stats.counts[: number + 1]) == sum(value <= bound for value in values)


@given(st.lists(st.floats(0, 4000), min_size=1), st.floats(0, 1))
def test_so_many_lie_below_a_quantile(values: list[float], share: float) -> None:
    bound = observed(values).quantile(share)
    assert bound is not None
    assert sum(value <= bound for value in values) >= share * len(values)
    assert bound >= min(values)


def test_a_quantile_that_is_none() -> None:
    assert observed([]).quantile(0.5) is None
    with pytest.raises(ValueError, match=r"share=1.5: must be between 0 and 1"):
        observed([]).quantile(1.5)
    with pytest.raises(ValueError, match="different bounds"):
        observed([]) + HistogramStats((1, 0), 0.0, (1.0,))


def wait(consumer: object, message: object) -> None:
    gevent.sleep(PAUSE)  # sleep: its length is what is measured


def block(consumer: object, message: object) -> None:
    time.sleep(PAUSE)  # sleep: its length is what is measured


async def await_(consumer: object, message: object) -> None:
    await asyncio.sleep(PAUSE)  # sleep: its length is what is measured


def fail(consumer: object, message: object) -> None:
    wait(consumer, message)
    raise ValueError("bad")


KINDS: dict[str, dict[str, Any]] = {
    "a connection": {"message_handler": wait},
    "concurrent": {"message_handler": wait, "concurrency": 3},
    "batches": {"batch_handler": wait},
    "handler threads": {"message_handler": block, "handler_threads": 2},
    "batches on threads": {"batch_handler": block, "handler_threads": 2},
    "failing": {"message_handler": fail, "requeue_delay": 0, "max_backoff_duration": 0},
}


def check_times(stats: Callable[[], Any], waited: float) -> None:
    """The figures of a consumer whose one message waited so long for it."""
    until(lambda: stats().handler_time.count)
    times, ages = stats().handler_time, stats().message_age
    assert times.sum >= LEAST * times.count
    assert times.quantile(0.0) >= LEAST
    assert ages.sum >= waited - 0.01
    assert ages.count == times.count


@pytest.mark.parametrize("kind", KINDS)
def test_handlers_are_timed_wherever_they_run(kind: str, nsqd: NsqdServer) -> None:
    address = str(nsqd.tcp_address)
    with Producer(address) as producer:
        producer.publish("orders", b"x")
    published = time.monotonic()
    consumer = Consumer("orders", "billing", address, histograms=True, **KINDS[kind])
    waited = time.monotonic() - published
    with consumer:
        check_times(consumer.stats, waited)


def test_handlers_of_other_threads_are_timed(nsqd: NsqdServer) -> None:
    address = str(nsqd.tcp_address)
    with (
        threads.Producer(address, histograms=True) as producer,
        threads.Consumer("orders", "billing", address, message_handler=block, histograms=True) as consumer,
    ):
        producer.publish("orders", b"x")
        check_times(consumer.stats, 0.0)
        assert producer.stats()["latency"].count == 1


def test_coroutines_are_timed_to_their_end() -> None:
    async def main(address: str) -> None:
        async with (
            aio.Producer(address, histograms=True) as producer,
            aio.Consumer("orders", "billing", address, message_handler=await_, histograms=True) as consumer,
        ):
            await producer.publish("orders", b"x")
            stats = consumer.stats()
            while not stats.handler_time.count:
                await asyncio.sleep(0.01)  # sleep: looks again and again
                stats = consumer.stats()
            assert stats.handler_time.sum >= LEAST
            assert producer.stats()["latency"].count == 1

    with BrokerProcess(lookupd=False) as broker:
        asyncio.run(asyncio.wait_for(main(str(broker.nsqds[0].tcp)), 30))


def test_one_message_of_a_batch_is_a_sample_and_none_is_handled_twice(nsqd: NsqdServer) -> None:
    address, seen = str(nsqd.tcp_address), []
    with Producer(address) as producer:
        bodies = [b"%d" % number for number in range(1000)]
        producer.multipublish("orders", bodies)
    consumer = Consumer(
        "orders", "billing", address, message_handler=lambda consumer, message: seen.append(message.body),
        max_in_flight=1000, histograms=True,
    )  # fmt: skip
    with consumer:
        until(lambda: consumer.stats().totals.finished == 1000)
        times = consumer.stats().handler_time
    assert seen == bodies
    assert times is not None
    assert 1 <= times.count < 1000


def test_nothing_is_measured_unless_it_is_asked_for(nsqd: NsqdServer) -> None:
    address = str(nsqd.tcp_address)
    with Producer(address) as producer, Consumer("orders", "billing", address, message_handler=wait) as consumer:
        producer.publish("orders", b"x")
        assert producer.stats()["latency"] is None
        assert (consumer.stats().handler_time, consumer.stats().message_age) == (None, None)


@pytest.mark.parametrize("options", [{}, {"timeout": 25.0}], ids=["default", "of its own"])
def test_a_publish_is_timed_from_its_call_whatever_its_timeout(options: dict[str, float]) -> None:
    def late(connection: Any, command: object) -> None:
        gevent.sleep(PAUSE)  # sleep: its length is what is measured
        connection.send(frame(0, b"OK"))

    server = ScriptedNsqd(replies={b"PUB": late})
    try:
        with Producer(str(server.address), histograms=True, attempt_timeout=20.0) as producer:
            began = time.monotonic()
            producer.publish("orders", b"x", **options)
            taken = time.monotonic() - began
            latency = producer.stats()["latency"]
            assert latency.count == 1
            assert LEAST <= latency.sum <= taken + 0.01
    finally:
        server.stop()
