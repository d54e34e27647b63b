"""Compressed bodies on topics with extended headers, and the trace log of consumed messages."""

from __future__ import annotations

import gzip
import json
import logging

import gevent
import lz4.block
import pytest
import snappy
from gevent.event import Event
from support.partitions import PartitionNsqd, answers, push_record, topology
from support.scripted_nsqd import ScriptedNsqd, frame
from support.waiting import until

from nsq_fast._codec import Message
from nsq_fast.client.subscription import decompressed, is_compressed
from nsq_fast.client.trace import TraceLog, read_records
from nsq_fast.client.trace_records import ConsumeRecord, ReceiveRecord
from nsq_fast.errors import BodyInvalid

CONSUME = {"topic": "t", "channel": "c"}

BODY = b"hello, hello, hello"
GZIPPED = gzip.compress(BODY, mtime=0)  # no time in it: parameters must be the same in every process that runs tests
LZ4 = lz4.block.compress(BODY, store_size=False)  # as go-nsq sends it: the size is in a header
LIMIT = 1000
SIZE = len(BODY)


def header(codec, size=SIZE):
    return json.dumps({"nsq.client.compress": codec, "nsq.msg.size": str(size)}).encode()


def message(body, ext):
    return Message(1, 2, b"i" * 16, body, ext=ext, offset=40, raw_size=50, received_at=3.0)


@pytest.mark.parametrize(("codec", "body"), [("1", GZIPPED), (1, GZIPPED), ("2", snappy.compress(BODY)), ("3", LZ4)])
def test_a_body_is_decompressed_and_all_else_stays(codec, body):
    before = message(body, header(codec))
    assert is_compressed(before)
    after = decompressed(before, LIMIT)
    assert after.body == BODY
    for name in ("timestamp", "attempts", "id", "ext", "headers", "offset", "raw_size", "received_at", "responder"):
        assert getattr(after, name) == getattr(before, name), name


@pytest.mark.parametrize("ext", [None, b'{"k":"v"}', b'{"k":"nsq.client.compress"}'])
def test_a_body_that_is_not_compressed_stays(ext):
    plain = message(b"plain", ext)
    assert not is_compressed(plain) or decompressed(plain, LIMIT) is plain


@pytest.mark.parametrize(
    ("body", "ext", "complaint"),
    [
        (b"x", header("4"), "only 1"),
        (b"x", header("1", LIMIT + 1), "max_decompressed_size=1000"),
        (b"x", header("1", -5), "nsq.msg.size"),
        (b"x", b'{"nsq.client.compress":"1"}', "nsq.msg.size"),
        (b"no gzip", header("1"), "does not decompress"),
        (b"", header("1"), "cut short"),
        (GZIPPED[:-9], header("1"), "cut short"),
        (gzip.compress(b"0" * 10_000_000, mtime=0), header("1"), "has 20 bytes"),
        (gzip.compress(b"short", mtime=0), header("1"), "has 5 bytes"),
        (snappy.compress(b"0" * 1000), header("2"), "snappy body has 1000 bytes"),
        (b"\xff\xff\xff\xff\xff\x01", header("2"), "begin with its length"),
        (b"\x13", header("2"), "does not decompress"),
        (b"\xff", header("3"), "does not decompress"),
        (lz4.block.compress(b"0" * 1000, store_size=False), header("3"), "does not decompress"),
        (lz4.block.compress(b"short", store_size=False), header("3"), "has 5 bytes"),
    ],
)
def test_a_body_that_is_a_lie_is_refused(body, ext, complaint):
    with pytest.raises(BodyInvalid, match=complaint):
        decompressed(message(body, ext), LIMIT)


NSQD = PartitionNsqd


@pytest.mark.parametrize("ordered", [False, True])
def test_a_handler_gets_the_body_as_it_was(nsqd, consume, ordered):
    seen = []
    found = topology({0: nsqd}, extend_support=True, ordered=ordered)
    consume(lambda _, message: seen.append((message.body, message.headers.get("k"))), found=found)
    connection = nsqd.subscriber(0)
    push_record(connection, 1, body=GZIPPED, ext=header("1"))
    push_record(connection, 2, body=b"plain", ext=b'{"k":"v"}')
    connection.wait_for(lambda: answers(connection, b"FIN") == [1, 2])
    assert seen == [(BODY, None), (b"plain", "v")]


def test_decompression_can_be_switched_off(nsqd, consume):
    seen = []
    consume(lambda _, m: seen.append(m.body), found=topology({0: nsqd}, extend_support=True), decompress=False)
    push_record(nsqd.subscriber(0), 1, body=b"\x00", ext=header("1"))
    until(lambda: seen == [b"\x00"])


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("decompress", "name"), [(False, "test"), (True, "t\u00e9st")])
def test_messages_with_a_header_are_skipped(nsqd, consume, ordered, decompress, name):
    seen = []
    consumer = consume(
        lambda _, message: seen.append(message.body),
        found=topology({0: nsqd}, extend_support=True, ordered=ordered), skip_header=name, decompress=decompress,
    )  # fmt: skip
    connection = nsqd.subscriber(0)
    has_it, also_has_it = json.dumps({name: ""}).encode(), json.dumps({"a": 1, name: "true"}).encode()
    headers = [has_it, json.dumps({"k": name}).encode(), f"{name}, but no JSON".encode(), b"", also_has_it]
    for sequence, ext in enumerate(headers, 1):
        push_record(connection, sequence, body=b"%d" % sequence, ext=ext)
    connection.wait_for(lambda: sorted(answers(connection, b"FIN")) == [1, 2, 3, 4, 5])
    assert seen == [b"2", b"3", b"4"]
    until(lambda: consumer.stats().totals.finished == 5)
    assert consumer.stats().totals.skipped == 2


@pytest.mark.parametrize("ordered", [False, True])
def test_no_handler_sees_a_body_that_cannot_be_read(nsqd, consume, ordered):
    seen, told, given_up = [], [], []

    def policy(consumer, message):
        given_up.append(message.body)

    consumer = consume(
        lambda _, message: seen.append(message.body),
        found=topology({0: nsqd}, extend_support=True, ordered=ordered),
        requeue_delay=10,
        give_up=policy,
        blocked_policy=policy,
        attempts_threshold=5,
    )
    consumer.on_exception.connect(lambda _, message, error: told.append(error), weak=False)
    connection = nsqd.subscriber(0)
    push_record(connection, 1, body=b"bad", ext=header("1"))
    connection.wait_for(lambda: answers(connection, b"REQ") == [1])
    assert isinstance(told[0], BodyInvalid)
    push_record(connection, 1, body=b"bad", ext=header("1"), attempts=6)
    connection.wait_for(lambda: answers(connection, b"FIN") == [1])
    assert seen == []
    assert given_up == [b"bad"], "as it came"


@pytest.mark.parametrize("ordered", [False, True])
def test_without_a_policy_it_is_never_finished(nsqd, consume, ordered):
    """Another version of the program, with another limit or codec, may read it."""
    consumer = consume(
        lambda _, message: None, found=topology({0: nsqd}, extend_support=True, ordered=ordered),
        requeue_delay=10, attempts_threshold=5, max_tries=5,
    )  # fmt: skip
    connection = nsqd.subscriber(0)
    for attempts in (5, 6, 7):
        push_record(connection, 1, body=b"bad", ext=header("3"), attempts=attempts)
        connection.wait_for(lambda attempts=attempts: len(answers(connection, b"REQ")) == attempts - 4)
    assert answers(connection, b"FIN") == []
    assert consumer.given_up == 0


# The trace log


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records: list[ConsumeRecord] = []
        self.receipts: list[ReceiveRecord] = []

    def emit(self, record):
        (self.receipts if isinstance(record.msg, ReceiveRecord) else self.records).append(record.msg)


@pytest.fixture
def kept():
    handler = Kept()
    log = logging.getLogger("test.trace")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


@pytest.fixture
def trace(kept):
    return TraceLog(logging.getLogger("test.trace"))


def answer_in_many_ways(consumer, message):
    if message.body == b"fail":
        raise ValueError("no")
    if message.body == b"finish":
        message.finish()
    if message.body == b"slow":
        gevent.sleep(1.2)  # sleep: longer than the timeout of the message


@pytest.mark.parametrize("ordered", [False, True])
def test_every_answer_is_recorded_while_it_is_on(consume, kept, trace, ordered):
    nsqd = PartitionNsqd({"msg_timeout": 1000})
    try:
        consumer = consume(
            answer_in_many_ways, found=topology({2: nsqd}, ordered=ordered), trace=trace, advanced=True, requeue_delay=1
        )
        connection = nsqd.subscriber(2)
        push_record(connection, 1)
        connection.wait_for(lambda: answers(connection, b"FIN") == [1])
        trace.enable("t")
        for sequence, body in ((2, b"plain"), (3, b"finish"), (4, b"fail"), (5, b"slow")):
            push_record(connection, sequence, body=body, attempts=3)
            connection.wait_for(lambda sequence=sequence: len(kept.records) == sequence - 1)
        trace.disable()
        push_record(connection, 6)
        connection.wait_for(lambda: 6 in answers(connection, b"FIN"))
        local = str(consumer.subscribers[0].connection.local_address)
    finally:
        nsqd.stop()
    assert [(each.offset, each.outcome) for each in kept.records] == [
        (80, "FIN"), (120, "FIN"), (160, "REQ"), (200, "TIMEOUT"),
    ]  # fmt: skip
    first = kept.records[0]
    assert (first.topic, first.channel, first.partition, first.attempts, first.timestamp) == ("t", "c", 2, 3, 1)
    assert (first.internal_id, first.trace_id, first.size) == ((2 << 50) + 2, 0, 40)
    assert (first.nsqd, first.local) == (str(nsqd.address), local)
    assert 0 < first.handling_time < 1.2 <= kept.records[3].handling_time


@pytest.mark.parametrize("ordered", [False, True])
def test_a_delivery_is_recorded_when_it_arrives(nsqd, consume, kept, trace, ordered):
    """Whatever becomes of it: a handler that hangs leaves this record alone."""
    release = Event()
    trace.enable("t")
    consumer = consume(lambda _, message: release.wait(), found=topology({0: nsqd}, ordered=ordered), trace=trace)
    connection = nsqd.subscriber(0)
    push_record(connection, 1, attempts=2)
    until(lambda: kept.receipts)
    (receipt,) = kept.receipts
    assert (receipt.topic, receipt.channel, receipt.partition, receipt.attempts, receipt.timestamp) == (
        "t",
        "c",
        0,
        2,
        1,
    )
    local = str(consumer.subscribers[0].connection.local_address)
    assert (receipt.internal_id, receipt.nsqd, receipt.local) == (1, str(nsqd.address), local)
    assert kept.records == []
    assert list(read_records([str(receipt)])) == [receipt]
    release.set()
    until(lambda: [each.outcome for each in kept.records] == ["FIN"])
    assert len(kept.receipts) == 1


def test_messages_of_original_servers_are_not_recorded(consume, kept, trace):
    nsqd = ScriptedNsqd()
    try:
        trace.enable()
        consume(lambda _, message: None, found=topology({}, nsqd), trace=trace)
        connection = nsqd.connection()
        connection.push(1)
        connection.wait_for(lambda: connection.answered(b"FIN") == [1])
        assert kept.records == kept.receipts == []
    finally:
        nsqd.stop()


def test_an_answer_that_failed_is_a_timeout_for_the_counters(nsqd, consume):
    consumer = consume(lambda _, message: None, found=topology({0: nsqd}))
    connection = nsqd.subscriber(0)
    connection.send(frame(1, b"E_FIN_FAILED FIN [0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0] failed not in flight"))
    until(lambda: consumer.stats().totals.answers_failed == 1)
