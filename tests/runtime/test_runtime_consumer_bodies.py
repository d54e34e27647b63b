"""Bodies that are compressed, messages that are skipped or suppressed, and the trace log of what is consumed."""

from __future__ import annotations

import gzip
import json
import logging

import gevent
import lz4.block
import pytest
import snappy
from support.partitions import PartitionNsqd, answers, push_record, topology
from support.waiting import until

from nsq_fast import Message
from nsq_fast.client.give_up import PublishTo
from nsq_fast.client.subscription import decompressed, is_compressed
from nsq_fast.client.trace import ReceiveRecord, TraceLog, read_records
from nsq_fast.errors import BodyInvalid
from nsq_fast.protocol.publishing import IDEMPOTENCE_HEADER

CONSUME = {"topic": "t", "channel": "c", "requeue_delay": 1}
NSQD = PartitionNsqd

BODY = b"hello, hello, hello"
GZIPPED = gzip.compress(BODY, mtime=0)  # no time in it: parameters must be the same in every process that runs tests
LZ4 = lz4.block.compress(BODY, store_size=False)  # as go-nsq sends it: the size is in a header
LIMIT = 1000

either_order = pytest.mark.parametrize("ordered", [False, True])


def header(codec, size=None):
    size = len(BODY) if size is None else size
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


@pytest.fixture
def consumed(nsqd, consume):
    """``consumed(messages, **options)``: what a consumer handles of (body, header) pairs that come to its partition."""

    def run(messages, ordered=False, partition=0, **options):
        seen = []
        found = topology({partition: nsqd}, extend_support=True, ordered=ordered)
        consumer = consume(lambda _, message: seen.append(message.body), found=found, **options)
        connection = nsqd.subscriber(partition)
        for sequence, (body, ext) in enumerate(messages, 1):
            push_record(connection, sequence, body=body, ext=ext)
        connection.wait_for(lambda: len(answers(connection, b"FIN")) == len(messages))
        until(lambda: consumer.stats().totals.finished == len(messages))
        return seen, consumer.stats().totals

    return run


@either_order
def test_a_handler_gets_the_body_as_it_was(consumed, ordered):
    messages = [(GZIPPED, header("1")), (b"plain", b'{"k":"v"}')]
    assert consumed(messages, ordered)[0] == [BODY, b"plain"]
    assert consumed([(b"\x00", header("1"))], ordered, 1, decompress=False)[0] == [b"\x00"]


@either_order
@pytest.mark.parametrize(("decompress", "name"), [(False, "test"), (True, "t\u00e9st")])
def test_messages_with_a_header_are_skipped(consumed, ordered, decompress, name):
    has_it, also_has_it = json.dumps({name: ""}).encode(), json.dumps({"a": 1, name: "true"}).encode()
    headers = [has_it, json.dumps({"k": name}).encode(), f"{name}, but no JSON".encode(), b"", also_has_it]
    messages = [(b"%d" % number, ext) for number, ext in enumerate(headers, 1)]
    seen, totals = consumed(messages, ordered, skip_header=name, decompress=decompress)
    assert seen == [b"2", b"3", b"4"]
    assert totals.skipped == 2


@either_order
def test_no_handler_sees_a_body_that_cannot_be_read(nsqd, consume, ordered):
    """It goes to a policy as it came; without one it is never finished, as another program may read it."""
    seen, told, given_up = [], [], []
    policy = {name: lambda consumer, message: given_up.append(message.body) for name in ("give_up", "blocked_policy")}
    for partition, options in enumerate((policy, {})):
        found = topology({partition: nsqd}, extend_support=True, ordered=ordered)
        handler = lambda _, message: seen.append(message.body)  # noqa: E731
        consumer = consume(handler, found=found, attempts_threshold=5, max_tries=5, **options)
        consumer.on_exception.connect(lambda _, message, error: told.append(error), weak=False)
        connection = nsqd.subscriber(partition)
        for attempts in (1, 6, 7):
            push_record(connection, 1, body=b"bad", ext=header("1"), attempts=attempts)
        word = b"FIN" if options else b"REQ"
        connection.wait_for(lambda c=connection, word=word: len(answers(c, word)) == (2 if word == b"FIN" else 3))
        assert consumer.given_up == (2 if options else 0)
    assert isinstance(told[0], BodyInvalid)
    assert seen == []
    assert given_up == [b"bad"] * 2, "as it came"


# Copies that a second attempt at a write has published


def keyed(key):
    return json.dumps({"n": 1, IDEMPOTENCE_HEADER: key}).encode()


@either_order
def test_a_copy_is_finished_and_no_handler_sees_it(consumed, ordered):
    headers = (keyed("a"), keyed("b"), keyed("a"), b"", keyed("b"), b'{"n":1}')
    seen, totals = consumed([(b"%d" % n, ext) for n, ext in enumerate(headers, 1)], ordered, suppress_retried=100)
    assert seen == [b"1", b"2", b"4", b"6"]
    assert (totals.suppressed, totals.skipped) == (2, 0)


def test_without_the_option_and_beyond_the_window_copies_are_handled(consumed):
    messages = [(key.encode(), keyed(key)) for key in "aabba"]
    assert consumed(messages, partition=0, suppress_retried=0)[0] == [b"a", b"a", b"b", b"b", b"a"]
    assert consumed(messages, partition=1, suppress_retried=1)[0] == [b"a", b"b", b"a"]
    no_keys = [(b"%d" % number, keyed(key)) for number, key in enumerate([None, 7, ["a"], {"a": 1}, True])]
    assert len(consumed(no_keys * 2, partition=2, suppress_retried=100)[0]) == 10


@either_order
def test_a_message_that_is_delivered_again_is_no_copy_of_itself(nsqd, consume, ordered):
    """Its handler failed, or its time was over: nobody has handled it yet."""
    seen = []

    def handle(consumer, message):
        seen.append(message.attempts)
        if message.attempts == 1:
            raise ValueError("once")

    consume(handle, found=topology({0: nsqd}, extend_support=True, ordered=ordered), suppress_retried=100)
    connection = nsqd.subscriber(0)
    push_record(connection, 1, ext=keyed("a"))
    connection.wait_for(lambda: answers(connection, b"REQ") == [1])
    push_record(connection, 1, attempts=2, ext=keyed("a"))
    connection.wait_for(lambda: answers(connection, b"FIN") == [1])
    assert seen == [1, 2]


def test_a_message_that_is_put_to_the_end_of_its_topic_is_no_copy_of_itself(nsqd, consume):
    class Published:
        """Stands for a producer."""

        def publish(self, topic, body, **place):
            published.append(place["headers"])

    published = []

    give_up = PublishTo(producer=Published())
    consume(lambda _, m: None, found=topology({0: nsqd}, extend_support=True), give_up=give_up, max_tries=1)
    connection = nsqd.subscriber(0)
    push_record(connection, 1, attempts=2, ext=keyed("a"))
    connection.wait_for(lambda: answers(connection, b"FIN") == [1])
    assert published == [{"n": 1}]


@pytest.mark.parametrize("has_headers", [False, True])
@pytest.mark.parametrize("option", [{"suppress_retried": 10}, {"skip_header": "test"}])
def test_a_topic_whose_messages_have_no_headers_is_told_of_once(nsqd, consume, option, has_headers, caplog):
    consume(lambda _, m: None, found=topology({0: nsqd, 1: nsqd}, extend_support=has_headers), **option)
    for partition in (0, 1):
        connection = nsqd.subscriber(partition)
        push_record(connection, 1, ext=b"" if has_headers else None)
        connection.wait_for(lambda connection=connection: answers(connection, b"FIN") == [1])
    told = [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "option_idle"]
    assert len(told) == (0 if has_headers else 1), told
    assert all(each.startswith(f"{next(iter(option))}: has no effect on topic t") for each in told)


# The trace log


class Kept(logging.Handler):
    """Keeps the records of messages that came, and of what became of them."""

    def __init__(self):
        super().__init__()
        self.outcomes = []
        self.receipts = []

    def emit(self, record):
        (self.receipts if isinstance(record.msg, ReceiveRecord) else self.outcomes).append(record.msg)


@pytest.fixture
def kept():
    handler = Kept()
    log = logging.getLogger("test.trace")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def answer_in_many_ways(consumer, message):
    if message.body == b"fail":
        raise ValueError("no")
    if message.body == b"finish":
        message.finish()
    if message.body == b"slow":
        gevent.sleep(1.2)  # sleep: longer than the timeout of the message


@either_order
def test_every_answer_is_recorded_while_it_is_on(consume, kept, ordered):
    trace = TraceLog(logging.getLogger("test.trace"))
    nsqd = PartitionNsqd({"msg_timeout": 1000})
    try:
        consumer = consume(answer_in_many_ways, found=topology({2: nsqd}, ordered=ordered), trace=trace, advanced=True)
        connection = nsqd.subscriber(2)
        push_record(connection, 1)
        connection.wait_for(lambda: answers(connection, b"FIN") == [1])
        trace.enable("t")
        for sequence, body in ((2, b"plain"), (3, b"finish"), (4, b"fail"), (5, b"slow")):
            push_record(connection, sequence, body=body, attempts=3)
            until(lambda sequence=sequence: len(kept.receipts) == sequence - 1)  # when it arrives
            connection.wait_for(lambda sequence=sequence: len(kept.outcomes) == sequence - 1)
        trace.disable()
        push_record(connection, 6)
        connection.wait_for(lambda: 6 in answers(connection, b"FIN"))
        local = str(consumer.subscribers[0].connection.local_address)
    finally:
        nsqd.stop()
    expected = [(80, "FIN"), (120, "FIN"), (160, "REQ"), (200, "TIMEOUT")]
    assert [(each.offset, each.outcome) for each in kept.outcomes] == expected
    assert len(kept.receipts) == 4
    for first in (kept.outcomes[0], kept.receipts[0]):
        assert (first.topic, first.channel, first.partition, first.attempts, first.timestamp) == ("t", "c", 2, 3, 1)
        assert (first.internal_id, first.nsqd, first.local) == ((2 << 50) + 2, str(nsqd.address), local)
        assert list(read_records([str(first)])) == [first]
    assert (kept.outcomes[0].trace_id, kept.outcomes[0].size) == (0, 40)
    assert 0 < kept.outcomes[0].handling_time < 1.2 <= kept.outcomes[3].handling_time
