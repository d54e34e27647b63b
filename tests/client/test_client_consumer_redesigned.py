"""How a consumer follows partitions and learns how to subscribe, and what it does with bodies and headers, judged by
what reaches scripted nsqds.
"""

from __future__ import annotations

import gzip
import json

import gevent
import lz4.block
import pytest
import snappy
from support.partitions import PartitionNsqd, answers, lookup_of, push_record, subscription, topology
from support.scripted_nsqd import ScriptedNsqd, heard, ignore, noting
from support.waiting import WAIT, until
from support.wire import OK, frame

from nsq_fast import Consumer, Message
from nsq_fast.client.give_up import PublishTo
from nsq_fast.client.subscription import decompressed, is_compressed
from nsq_fast.client.trace import ReceiveRecord, read_records
from nsq_fast.errors import (
    BodyInvalid,
    ChannelNotRegistered,
    ConfigError,
    ExtendSubForbidden,
    ExtendSubRequired,
    OrderedSubRequired,
)
from nsq_fast.protocol.publishing import IDEMPOTENCE_HEADER
from nsq_fast.protocol.topology import Topology

pytestmark = pytest.mark.usefixtures("scripted_lookup")
CONSUME = {"topic": "t", "channel": "c", "lookupd_http_addresses": "lookup:4161", "requeue_delay": 1}
NSQD = PartitionNsqd
NOT_LEADER = frame(1, b"E_FAILED_ON_NOT_LEADER ")


def told(consumer, *answer, **meta):
    """The scripted lookup of a consumer, which has said that."""
    lookup = lookup_of(consumer)
    lookup.tell(topology(*answer, **meta))
    return lookup


def finishes(connection, sequence):
    """It pushes a message, which is finished."""
    push_record(connection, sequence)
    connection.wait_for(lambda: answers(connection, b"FIN")[-1:] == [sequence])


def test_chosen_partitions_only(nsqds, consume, caplog):
    """What is said of partitions that a topic lacks is told once."""
    first, second, old = nsqds(), nsqds(), nsqds(kind=ScriptedNsqd)
    consumer = consume(ignore, partitions=[0, 2, 7], start_position={5: "end"})
    errors = heard(consumer)
    for _ in range(3):
        lookup = told(consumer, {0: first, 1: second, 2: first}, old)
    first.subscriber(0)
    finishes(first.subscriber(2), 1)
    assert not second.connections
    assert not old.connections
    assert [*map(str, errors)] == [
        "partitions: topic t has partitions 0 to 2; nothing comes of 7 until it has more",
        "start_position: topic t has partitions 0 to 2; nothing is set for 5 until it has more",
    ]
    assert sum("nothing comes of 7" in each.getMessage() for each in caplog.records) == 1
    lookup.tell(topology(dict.fromkeys(range(8), first)))
    first.subscriber(7)
    never = consume(ignore, partitions=[3])
    told(never, {0: second})
    with pytest.raises(ConfigError, match="partitions 0 to 0"):
        never.join(WAIT)
    without = consume(ignore, partitions=[0])
    told(without, {}, old)
    with pytest.raises(ConfigError, match="has no partitions: leave partitions out"):
        without.join(WAIT)
    later = consume(ignore, partitions=[2, 4])
    told(later, {0: second}, partition_num=3)
    assert later.is_running, "partition 2 may get a leader"


def test_old_nsqds_beside_partitions(nsqds, consume):
    leader, old = nsqds(), nsqds(kind=ScriptedNsqd)
    told(consume(ignore), {0: leader}, old, ordered=True)
    connection = old.connection()
    assert subscription(connection) == (b"SUB", b"t", b"c")
    connection.push(1)
    connection.wait_for(lambda: connection.answered(b"FIN") == [1])
    assert subscription(leader.subscriber(0))[0] == b"SUB_ORDERED"


@pytest.mark.parametrize(
    ("name", "value"),
    [("desired_tag", "x"), ("ext_filter", {"type": 1, "filter_ext_key": "k", "filter_data": "v"})],
)
def test_a_filter_that_the_topic_cannot_have_is_an_error(nsqds, consume, name, value):
    nsqd = nsqds()
    consumer = consume(ignore, **{name: value})
    told(consumer, {0: nsqd})
    with pytest.raises(ConfigError, match=f"{name}=.*no extended headers"):
        consumer.join(WAIT)
    assert not any(map(subscription, nsqd.connections))
    extended = consume(ignore, **{name: value})
    told(extended, {0: nsqd}, extend_support=True)
    nsqd.subscriber(0)
    assert extended.is_running
    original = str(nsqds(kind=ScriptedNsqd).address)
    consumer = consume(ignore, nsqd_tcp_addresses=original, lookupd_http_addresses=(), **{name: value})
    with pytest.raises(ConfigError, match=f"{name}="):
        consumer.join(WAIT)


def test_a_configured_nsqd_is_subscribed_to_without_lookup_and_not_twice(nsqds, consume):
    nsqd, leader = nsqds(), nsqds()
    consume(ignore, nsqd_tcp_addresses=str(nsqd.address), partitions=[0, 1], ordered=True, lookupd_http_addresses=())
    assert subscription(nsqd.subscriber(0)) == (b"SUB_ORDERED", b"t", b"c", b"0")
    nsqd.subscriber(1)
    consumer = consume(ignore, nsqd_tcp_addresses=str(leader.address))
    plain = leader.subscriber(None)
    told(consumer, {0: leader, 1: leader})
    leader.subscriber(0)
    leader.subscriber(1)
    plain.wait_for(lambda: (b"CLS",) in plain.commands and not plain.is_open)
    until(lambda: len(consumer.stats().connections) == 2)


# Leaders that move


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "late heartbeat"])
def test_a_leader_in_trouble_is_looked_up_at_once_and_another_followed(nsqds, consume, monkeypatch, is_lost):
    monkeypatch.setattr("nsq_fast.client.connection.SILENT_INTERVALS", 1000)  # the connection itself does not end
    before, after = nsqds(), nsqds()
    consumer = consume(ignore, heartbeat_interval=30.0 if is_lost else 1.0)
    others = {1: before} if is_lost else {}
    lookup = told(consumer, {0: before, **others})
    connection = before.subscriber(0)
    lookup.answer = topology({0: after, **others})
    asked = lookup.refreshed
    if is_lost:
        connection.close()
    finishes(after.subscriber(0), 3)
    assert lookup.refreshed > asked
    assert not is_lost or before.live(1), "the other partition stays where it is"
    until(lambda: len(consumer.stats().connections) == 1 + is_lost)


def test_a_leader_that_is_not_ready_is_asked_at_a_pace_of_its_own(nsqds, consume, monkeypatch):
    """However often leaders change: the pauses of lost connections would be a minute long by the tenth attempt."""
    monkeypatch.setattr("nsq_fast.client.subscriptions.LONGEST_LEADER_DELAY", 0.02)
    nsqd = nsqds()
    told(consume(ignore, max_reconnect_delay=600), {0: nsqd})
    for _ in range(12):
        connection = nsqd.subscriber(0)
        refused = len(nsqd.connections)
        nsqd.replies[b"SUB"] = NOT_LEADER
        connection.close()
        until(lambda refused=refused: len(nsqd.connections) >= refused + 10)
        nsqd.replies[b"SUB"] = OK
    nsqd.subscriber(0)


@pytest.mark.parametrize(("wanted", "asked"), [(30.0, 14_000), (1.0, 1_000)])
def test_a_leader_is_asked_for_heartbeats_that_show_in_time_when_it_hangs(nsqds, consume, wanted, asked):
    leader, old = nsqds(), nsqds(kind=ScriptedNsqd)
    told(consume(ignore, heartbeat_interval=wanted), {0: leader}, old)
    assert leader.subscriber(0).identify["heartbeat_interval"] == asked
    until(lambda: old.connections)
    old.connections[0].wait_for(lambda: old.connections[0].identify)
    assert old.connections[0].identify["heartbeat_interval"] == wanted * 1000


def test_a_partition_is_followed_from_a_live_connection_when_the_new_one_stands(nsqds, consume):
    before, after = nsqds(), nsqds(replies={b"SUB": NOT_LEADER})
    consumer = consume(ignore)
    lookup = told(consumer, {0: before})
    old = before.subscriber(0)
    lookup.tell(topology({0: after}))
    after.wait_for(lambda: len(after.connections) > 1)
    finishes(old, 1)
    after.replies[b"SUB"] = OK
    after.subscriber(0)
    old.wait_for(lambda: (b"CLS",) in old.commands and not old.is_open)
    until(lambda: [each.address for each in consumer.stats().connections] == [after.address])
    assert consumer.stats().totals.finished == 1


# How to subscribe


@pytest.mark.parametrize(
    ("options", "meta", "command"),
    [
        ({}, {"ordered": True}, b"SUB_ORDERED"),
        ({}, {}, b"SUB"),
        ({"ordered": True}, {}, b"SUB_ORDERED"),
        ({"ordered": False}, {"ordered": True}, b"SUB"),
        ({"advanced": True}, {}, b"SUB_ADVANCED"),
        ({"advanced": True}, {"ordered": True}, b"SUB_ORDERED"),
    ],
)
def test_the_kind_of_subscription_is_learnt_or_told(nsqds, consume, options, meta, command):
    nsqd = nsqds()
    told(consume(ignore, **options), {0: nsqd}, **meta)
    assert subscription(nsqd.subscriber(0))[0] == command


def test_extended_headers_are_learnt_and_stay(nsqds, consume):
    nsqd, seen = nsqds(), []
    consumer = consume(lambda _, message: seen.append(message.headers))
    lookup = told(consumer, {0: nsqd})
    first = nsqd.subscriber(0)
    assert "extend_support" not in first.identify
    lookup.tell(topology({0: nsqd}, extend_support=True))
    first.wait_for(lambda: (b"CLS",) in first.commands and not first.is_open)
    connection = nsqd.subscriber(0)
    assert connection.identify["extend_support"] is True
    push_record(connection, 1, ext=b'{"k":"v"}')
    push_record(connection, 2, ext=b"")
    until(lambda: seen == [{"k": "v"}, {}])
    lookup.tell(topology({0: nsqd}))
    assert len(nsqd.connections) == 2, "a lookupd may be behind"
    assert len(consumer.stats().connections) == 1


def test_extended_headers_are_forgotten_when_a_topic_made_anew_refuses_them(nsqds, consume):
    def refuse_headers(connection, command):
        has_headers = connection.identify.get("extend_support")
        connection.send(frame(1, b"E_SUB_EXTEND_FORBIDDON ") if has_headers else OK)

    nsqd = nsqds()
    consumer = consume(ignore)
    lookup = told(consumer, {0: nsqd, 1: nsqd}, extend_support=True)
    former = [nsqd.subscriber(partition) for partition in (0, 1)]
    assert all(each.identify["extend_support"] for each in former)
    nsqd.replies[b"SUB"] = refuse_headers
    lookup.tell(topology({0: nsqd, 1: nsqd}))
    for connection in former:
        connection.close()
        connection.wait_for(lambda connection=connection: not connection.is_open)
    for partition in (0, 1):
        finishes(nsqd.subscriber(partition), 2)
    assert consumer.is_running


@pytest.mark.parametrize("is_named_again", [False, True])
def test_what_lookup_names_no_more_is_not_subscribed_to_while_it_is_being_connected_to(nsqds, consume, is_named_again):
    """The SUB would make a topic again that was deleted, or the channel of one that was made anew, and that would begin
    at the end."""
    nsqd = nsqds(replies={b"IDENTIFY": b""})
    consumer = consume(ignore)
    lookup = told(consumer, {0: nsqd})
    nsqd.wait_for(lambda: any(b"IDENTIFY" in each.words() for each in nsqd.connections))
    (connection,) = nsqd.connections
    lookup.tell(Topology())
    del nsqd.replies[b"IDENTIFY"]
    nsqd.reply(connection, (b"IDENTIFY",))
    connection.wait_for(lambda: not connection.is_open)
    assert connection.words() == [b"IDENTIFY"]
    if is_named_again:
        lookup.tell(topology({0: nsqd}))
        finishes(nsqd.subscriber(0), 1)


def test_a_refused_mode_is_repaired_by_what_lookup_says(nsqds, consume):
    nsqd = nsqds(replies={b"SUB": frame(1, b"E_SUB_ORDER_IS_MUST ")})
    consumer = consume(ignore, nsqd_tcp_addresses=str(nsqd.address))
    errors = heard(consumer)
    nsqd.wait_for(lambda: lookup_of(consumer).refreshed)
    assert len(nsqd.connections) == 1, "a refusal is not repeated"
    told(consumer, {0: nsqd}, ordered=True)
    assert subscription(nsqd.subscriber(0))[0] == b"SUB_ORDERED"
    assert isinstance(errors[0], OrderedSubRequired)
    assert consumer.is_running


@pytest.mark.parametrize(
    ("code", "error", "option", "has_lookup"),
    [
        (b"E_SUB_ORDER_IS_MUST ", OrderedSubRequired, "ordered=True", True),
        (b"E_SUB_EXTEND_NEED ", ExtendSubRequired, "extend_support=True", False),
        (b"E_SUB_EXTEND_FORBIDDON ", ExtendSubForbidden, "extend_support=False", True),
        (b"E_SUB_CHANNEL_NOT_REGISTERED ", ChannelNotRegistered, "channel/create", False),
    ],
)
def test_a_mode_that_is_wrong_everywhere_ends_the_consumer(nsqds, consume, code, error, option, has_lookup):
    nsqd = nsqds(replies={b"SUB": frame(1, code)})
    if has_lookup:
        consumer = consume(ignore, ordered=False)
        told(consumer, {0: nsqd, 1: nsqd})
    else:
        consumer = consume(ignore, nsqd_tcp_addresses=str(nsqd.address), lookupd_http_addresses=())
    with pytest.raises(error, match=option):
        consumer.join(WAIT)
    assert len(nsqd.connections) <= 2, "one for each subscription"
    assert not consumer.is_running
    with pytest.raises(error, match=option):
        Consumer("t", "c", str(nsqd.address), message_handler=ignore).start()
    with pytest.raises(error, match=option):
        list(Consumer("t", "c", str(nsqd.address)))


def test_one_refusal_among_others_is_told_and_ends_nothing(nsqds, consume):
    good, bad = nsqds(), nsqds(replies={b"SUB": frame(1, b"E_SUB_EXTEND_NEED ")})
    consumer = consume(ignore)
    errors = heard(consumer)
    told(consumer, {0: good, 1: bad})
    connection = good.subscriber(0)
    until(lambda: errors)
    assert isinstance(errors[0], ExtendSubRequired)
    told(consumer, {0: good, 1: bad})
    finishes(connection, 1)
    assert len(bad.connections) == 1
    assert consumer.is_running


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("start_position", ["end"]),
        ("partitions", [[], "0,x", [1024]]),
        ("ordered", ["perhaps"]),
        ("blocked_policy", ["skip"]),
        ("trace", ["yes"]),
    ],
)
def test_a_wrong_option_is_named(option, values):
    for value in values:
        with pytest.raises(ConfigError, match=option):
            Consumer("t", "c", "localhost:1", **{option: value})


# Bodies that are compressed, messages that are skipped or suppressed, and the trace log of what is consumed


GO_BODY = b"hello, hello, hello, " * 10
GO_COMPRESSED = {
    "1": "1f8b08000000000000ffca48cdc9c9d751184614200000ffff4bc0699cd2000000",
    "2": "d2011868656c6c6f2c20fe0700fe0700fe07001d07",
    "3": "7f68656c6c6f2c200700a200b600010700d0656c6c6f2c2068656c6c6f2c20",
}
"""What youzan's Go client (fc140f84) makes of that body, by the number of the codec."""

BODY = b"hello, hello, hello"
GZIPPED = gzip.compress(BODY, mtime=0)  # no time in it: parameters must be the same in every process that runs tests
LIMIT = 1000

either_order = pytest.mark.parametrize("ordered", [False, True])


def header(codec, size=None):
    size = len(BODY) if size is None else size
    return json.dumps({"nsq.client.compress": codec, "nsq.msg.size": str(size)}).encode()


def message(body, ext):
    return Message(1, 2, b"i" * 16, body, ext=ext, offset=40, raw_size=50, received_at=3.0)


@pytest.mark.parametrize("codec", [*GO_COMPRESSED, 1])
def test_a_body_is_decompressed_and_all_else_stays(codec):
    before = message(bytes.fromhex(GO_COMPRESSED[str(codec)]), header(codec, len(GO_BODY)))
    assert is_compressed(before)
    after = decompressed(before, LIMIT)
    assert after.body == GO_BODY
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
        consumer = consume(noting(seen), found=found, **options)
        connection = nsqd.subscriber(partition)
        for sequence, (body, ext) in enumerate(messages, 1):
            push_record(connection, sequence, body=body, ext=ext)
        connection.wait_for(lambda: len(answers(connection, b"FIN")) == len(messages))
        until(lambda: consumer.stats().totals.finished == len(messages))
        return seen, consumer.stats().totals

    return run


@either_order
@pytest.mark.parametrize(("decompress", "name"), [(False, "test"), (True, "t\u00e9st")])
def test_messages_with_a_header_are_skipped(consumed, ordered, decompress, name):
    has_it, also_has_it = json.dumps({name: ""}).encode(), json.dumps({"a": 1, name: "true"}).encode()
    headers = [has_it, json.dumps({"k": name}).encode(), f"{name}, but no JSON".encode(), b"", also_has_it]
    messages = [(b"%d" % number, ext) for number, ext in enumerate(headers, 1)]
    seen, totals = consumed(messages, ordered, skip_header=name, decompress=decompress)
    assert seen == [b"2", b"3", b"4"]
    assert totals.skipped == 2
    if not decompress:  # then a handler gets the body as it came
        assert consumed([(b"\x00", header("1"))], partition=1, decompress=False)[0] == [b"\x00"]


@either_order
def test_no_handler_sees_a_body_that_cannot_be_read(nsqd, consume, ordered):
    """It goes to a policy as it came; without one it is never finished, as another program may read it."""
    seen, told, given_up = [], [], []
    policy = {name: noting(given_up) for name in ("give_up", "blocked_policy")}
    for partition, options in enumerate((policy, {})):
        found = topology({partition: nsqd}, extend_support=True, ordered=ordered)
        consumer = consume(noting(seen), found=found, attempts_threshold=5, max_tries=5, **options)
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
    consume(ignore, found=topology({0: nsqd}, extend_support=True), give_up=give_up, max_tries=1)
    connection = nsqd.subscriber(0)
    push_record(connection, 1, attempts=2, ext=keyed("a"))
    connection.wait_for(lambda: answers(connection, b"FIN") == [1])
    assert published == [{"n": 1}]


@pytest.mark.parametrize(
    ("option", "has_headers"),
    [({"suppress_retried": 10}, False), ({"skip_header": "test"}, False), ({"skip_header": "test"}, True)],
)
def test_a_topic_whose_messages_have_no_headers_is_told_of_once(nsqd, consume, option, has_headers, caplog):
    consume(ignore, found=topology({0: nsqd, 1: nsqd}, extend_support=has_headers), **option)
    for partition in (0, 1):
        connection = nsqd.subscriber(partition)
        push_record(connection, 1, ext=b"" if has_headers else None)
        connection.wait_for(lambda connection=connection: answers(connection, b"FIN") == [1])
    told = [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "option_idle"]
    assert len(told) == (0 if has_headers else 1), told
    assert all(each.startswith(f"{next(iter(option))}: has no effect on topic t") for each in told)


# The trace log


def answer_in_many_ways(consumer, message):
    if message.body == b"fail":
        raise ValueError("no")
    if message.body == b"finish":
        message.finish()
    if message.body == b"slow":
        gevent.sleep(1.2)  # sleep: longer than the timeout of the message


@either_order
def test_every_answer_is_recorded_while_it_is_on(nsqds, consume, new_trace, ordered):
    def kept(is_receipt):
        return [each for each in list(records) if isinstance(each, ReceiveRecord) is is_receipt]

    trace, records = new_trace()
    nsqd = nsqds({"msg_timeout": 1000})
    consumer = consume(answer_in_many_ways, found=topology({2: nsqd}, ordered=ordered), trace=trace, advanced=True)
    connection = nsqd.subscriber(2)
    push_record(connection, 1)
    connection.wait_for(lambda: answers(connection, b"FIN") == [1])
    trace.enable("t")
    for sequence, body in ((2, b"plain"), (3, b"finish"), (4, b"fail"), (5, b"slow")):
        push_record(connection, sequence, body=body, attempts=3)
        until(lambda sequence=sequence: len(kept(True)) == sequence - 1)  # when it arrives
        connection.wait_for(lambda sequence=sequence: len(kept(False)) == sequence - 1)
    trace.disable()
    push_record(connection, 6)
    connection.wait_for(lambda: 6 in answers(connection, b"FIN"))
    local = str(consumer.subscribers[0].connection.local_address)
    outcomes, receipts = kept(False), kept(True)
    expected = [(80, "FIN"), (120, "FIN"), (160, "REQ"), (200, "TIMEOUT")]
    assert [(each.offset, each.outcome) for each in outcomes] == expected
    assert len(receipts) == 4
    for first in (outcomes[0], receipts[0]):
        assert (first.topic, first.channel, first.partition, first.attempts, first.timestamp) == ("t", "c", 2, 3, 1)
        assert (first.internal_id, first.nsqd, first.local) == ((2 << 50) + 2, str(nsqd.address), local)
        assert list(read_records([str(first)])) == [first]
    assert (outcomes[0].trace_id, outcomes[0].size) == (0, 40)
    assert 0 < outcomes[0].handling_time < 1.2 <= outcomes[3].handling_time
