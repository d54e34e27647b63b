"""What the client writes down and measures: records of the trace log and their ids, and histograms of times."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from struct import pack
from types import SimpleNamespace
from typing import Any

import gevent
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.contract import FACES, Face
from support.scripted_nsqd import noting
from support.waiting import until

from nsq_fast import Consumer, Producer
from nsq_fast._codec import Message, TracedReply
from nsq_fast._record import BOUNDS, Histogram, HistogramStats
from nsq_fast.broker import NsqdServer
from nsq_fast.client import trace
from nsq_fast.client.trace import (
    ConsumeRecord,
    PublishRecord,
    TraceLog,
    log_to_file,
    new_trace_id,
    read_records,
)
from nsq_fast.errors import NameInvalid
from nsq_fast.names import Address

SERVER = Address("127.0.0.1", 4150)
LOCAL = Address("::1", 50000)
RECEIPT = TracedReply(internal_id=(2 << 50) + 7, trace_id=2**64 - 1, offset=640, size=34)


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """A logger of the test's own."""
    made = logging.getLogger(f"{trace.LOGGER_NAME}.test")
    yield made
    for handler in list(made.handlers):
        made.removeHandler(handler)
        handler.close()


def message(**options: object) -> Message:
    made = Message(123, 2, pack(">QQ", RECEIPT.internal_id, RECEIPT.trace_id), b"body", offset=640, raw_size=34)
    made.responder = SimpleNamespace(partition=2)
    return made


def test_a_topic_that_cannot_be_is_refused() -> None:
    with pytest.raises(NameInvalid):
        TraceLog().enable("no topic!")


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([None, "a", "b"]))))
def test_switch_remembers_the_last_word(words: list[tuple[bool, str | None]]) -> None:
    log = TraceLog()
    expected = {"a": False, "b": False, "c": False}
    for is_on, topic in words:
        (log.enable if is_on else log.disable)(topic)
        expected.update(dict.fromkeys(expected, is_on) if topic is None else {topic: is_on})
    assert {topic: log.is_on(topic) for topic in expected} == expected
    assert log.is_active or not any(expected.values())


def test_records_come_back_from_the_file(log: logging.Logger, tmp_path: Path) -> None:
    log_to_file(tmp_path / "trace.log", log=log)
    writer = TraceLog(log, clock=lambda: 1_000)
    writer.published("t", RECEIPT, partition=2, nsqd=SERVER)
    writer.consumed("t", "c", message(), "FIN", nsqd=SERVER, local=LOCAL, handling_time=0.25)
    writer.consumed("t", "c", message(), "TIMEOUT", nsqd=SERVER, local=None)
    lines = (tmp_path / "trace.log").read_text().splitlines()
    published, consumed, timed_out = read_records(lines)
    assert published == PublishRecord(
        time=1_000, topic="t", partition=2, nsqd="127.0.0.1:4150", internal_id=(2 << 50) + 7, trace_id=2**64 - 1,
        offset=640, size=34,
    )  # fmt: skip
    assert consumed == ConsumeRecord(
        time=1_000, topic="t", partition=2, channel="c", nsqd="127.0.0.1:4150", local="[::1]:50000",
        internal_id=(2 << 50) + 7, trace_id=2**64 - 1, offset=640, size=34, timestamp=123, attempts=2,
        outcome="FIN", handling_time=0.25,
    )  # fmt: skip
    assert isinstance(timed_out, ConsumeRecord)
    assert (timed_out.outcome, timed_out.handling_time, timed_out.local) == ("TIMEOUT", None, "")
    assert json.loads(lines[0])["event"] == "publish"
    assert json.loads(lines[1])["event"] == "consume"


def test_a_record_is_written_whatever_the_level_of_the_root_logger(tmp_path: Path) -> None:
    handler = log_to_file(tmp_path / "trace.log")
    try:
        TraceLog().published("t", RECEIPT, partition=0, nsqd=SERVER)
    finally:
        trace.logger.removeHandler(handler)
        handler.close()
    assert len(list(read_records((tmp_path / "trace.log").read_bytes().splitlines()))) == 1


def test_the_file_rotates(log: logging.Logger, tmp_path: Path) -> None:
    log_to_file(tmp_path / "trace.log", 1_000, 2, log=log)
    writer = TraceLog(log)
    for _ in range(50):
        writer.published("t", RECEIPT, partition=0, nsqd=SERVER)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["trace.log", "trace.log.1", "trace.log.2"]
    assert all(path.stat().st_size <= 1_000 for path in tmp_path.iterdir())


def test_reader_of_a_path_says_what_it_wants() -> None:
    with pytest.raises(TypeError, match="open"):
        list(read_records("trace.jsonl"))


def test_reader_skips_what_a_format_puts_before_the_record() -> None:
    line = str(PublishRecord(time=1, topic="t", partition=0, nsqd="n", internal_id=1, trace_id=2, offset=3, size=4))
    assert len(list(read_records(["\n", f"2026-01-01 INFO nsq_fast.trace: {line}\n", line.encode(), b""]))) == 2


DEEP = pytest.param('{"event":"publish","x":' + "[" * 100_000, id="deep")


@pytest.mark.parametrize(
    "line", ["nonsense", "{}", '{"event":"publish"}', '{"event":"other"}', '{"event":"pub', b"{\xff}", DEEP]
)
def test_reader_names_the_line_that_is_none(line: str | bytes) -> None:
    with pytest.raises(ValueError, match="line 2"):
        list(read_records([b"", line]))


def test_new_trace_ids_are_positive_and_differ_also_when_a_counter_is_used_up() -> None:
    count = (1 << 20) + 1000  # bits of a counter, behind a prefix that chance makes
    ids = {new_trace_id() for _ in range(count)}
    assert len(ids) == count
    assert all(1 <= trace_id < 2**63 for trace_id in ids)


def test_a_forked_process_has_ids_of_its_own() -> None:
    new_trace_id()
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.write(write_end, b"%d" % new_trace_id())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = int(os.read(read_end, 100))
    os.close(read_end)
    os.close(write_end)
    assert theirs >> 20 != new_trace_id() >> 20


NSQD = NsqdServer
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


@pytest.mark.parametrize("kind", KINDS)
def test_handlers_are_timed_wherever_they_run(kind: str, nsqd: NsqdServer) -> None:
    address = str(nsqd.tcp_address)
    with Producer(address) as producer:
        producer.publish("orders", b"x")
    published = time.monotonic()
    consumer = Consumer("orders", "billing", address, histograms=True, **KINDS[kind])
    waited = time.monotonic() - published
    with consumer:
        until(lambda: consumer.stats().handler_time.count)
        times, ages = consumer.stats().handler_time, consumer.stats().message_age
    assert times.sum >= LEAST * times.count
    assert times.quantile(0.0) >= LEAST
    assert ages.sum >= waited - 0.01
    assert ages.count == times.count


@pytest.mark.parametrize("face", FACES, ids=lambda face: str(face.name))
async def test_handlers_of_every_face_are_timed_to_their_end_and_publishes(face: Face, nsqd_process: Any) -> None:
    async def handle(consumer: object, message: object) -> None:
        await face.sleep(PAUSE)  # sleep: its length is what is measured

    where = {"nsqd_tcp_addresses": nsqd_process.address, "histograms": True}
    async with (
        face.client("Producer", **where) as producer,
        face.client("Consumer", "orders", "billing", **where, message_handler=handle) as consumer,
    ):
        await face(producer.publish("orders", b"x"))
        await face.until(lambda: consumer.stats().handler_time.count)
        assert consumer.stats().handler_time.quantile(0.0) >= LEAST
        assert producer.stats()["latency"].count == 1


def test_one_message_of_a_batch_is_a_sample_and_none_is_handled_twice(nsqd: NsqdServer) -> None:
    address, seen = str(nsqd.tcp_address), []
    with Producer(address) as producer:
        bodies = [b"%d" % number for number in range(1000)]
        producer.multipublish("orders", bodies)
    consumer = Consumer(
        "orders", "billing", address, message_handler=noting(seen),
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
def test_a_publish_is_timed_from_its_call_whatever_its_timeout(options: dict[str, float], publish_nsqd: Any) -> None:
    def late(peer: Any, command: object) -> None:
        gevent.sleep(PAUSE)  # sleep: its length is what is measured
        peer.ok()

    with Producer(str(publish_nsqd(late).address), histograms=True, attempt_timeout=20.0) as producer:
        began = time.monotonic()
        producer.publish("orders", b"x", **options)
        taken = time.monotonic() - began
        latency = producer.stats()["latency"]
    assert latency.count == 1
    assert LEAST <= latency.sum <= taken + 0.01
