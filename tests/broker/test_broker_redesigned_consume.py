"""How the redesigned dialect delivers, what it answers, and how it filters. Observed on a real cluster."""

from __future__ import annotations

import json
import struct
import sys
import time
from typing import Any

import pytest
from support.http import ask
from support.replay import DATA
from support.waiting import promptly, until
from support.wire import ERROR, Consumer, WireClient, detail, headed, identify, many, publish, sized, traced

from nsq_fast.broker import RedesignedCluster
from nsq_fast.broker.redesigned.channel import GLOB, REGEXP, FilterRequest, make_filter
from nsq_fast.broker.redesigned.log import Record
from nsq_fast.header_patterns import PatternInvalid, check_glob, check_regexp

# How the redesigned dialect delivers: one at a time in order, what comes back and when, tags, filters, positions.


def leader(cluster: RedesignedCluster, topic: str = "ord") -> Any:
    return cluster.leader_of(topic, 0)


def test_requeue_in_order(cluster: RedesignedCluster) -> None:
    publish(cluster, "ord", b"a", b"b")
    consumer = Consumer(leader(cluster), "SUB_ORDERED ord ch 0", msg_timeout=1000)
    frame = consumer.receive()
    consumer.requeue(frame)
    again = consumer.receive()
    assert (again.id, again.attempts) == (frame.id, 2)
    # With a delay it is not heard of until the message times out.
    begun = time.monotonic()
    consumer.requeue(again, 10)
    third = consumer.receive()
    assert (third.id, third.attempts) == (frame.id, 3)
    assert time.monotonic() - begun > 0.5


def test_an_ordered_subscription_makes_a_channel_ordered(cluster: RedesignedCluster) -> None:
    publish(cluster, "plain", b"a", b"b")
    ordered = Consumer(leader(cluster, "plain"), "SUB_ORDERED plain ch 0")
    frame = ordered.receive()
    assert detail(frame) == (0, 31, b"a")
    ordered.close()
    plain = Consumer(leader(cluster, "plain"), "SUB plain ch 0")
    assert plain.receive().body == b"a"
    assert plain.is_quiet()
    query = "topic=plain&channel=ch&partition=0&order=false"
    assert ask(leader(cluster, "plain").http_address, "POST", f"/channel/setorder?{query}").status == 200
    assert plain.reader.read() == b""  # a change of the mode disconnects
    plain.close()
    plain = Consumer(leader(cluster, "plain"), "SUB plain ch 0")
    assert [plain.receive().body, plain.receive().body] == [b"a", b"b"]


def test_a_disconnect_gives_messages_back_as_they_were(cluster: RedesignedCluster) -> None:
    publish(cluster, "plain", b"a", b"b", b"c")
    consumer = Consumer(leader(cluster, "plain"), "SUB plain ch 0")
    frames = [consumer.receive() for _ in range(3)]
    consumer.finish(frames[1])
    consumer.requeue(frames[0])
    assert consumer.receive().attempts == 2
    consumer.close()
    consumer = Consumer(leader(cluster, "plain"), "SUB plain ch 0")
    assert [(frame.body, frame.attempts) for frame in (consumer.receive(), consumer.receive())] == [
        (b"a", 2),
        (b"c", 1),
    ]


def test_a_delay_is_kept_where_there_is_no_order_and_too_many_requeues_are_refused(cluster: RedesignedCluster) -> None:
    publish(cluster, "plain", b"a")
    consumer = Consumer(leader(cluster, "plain"), "SUB plain ch 0")
    consumer.requeue(consumer.receive(), 150)
    assert consumer.is_quiet(0.1)
    for attempts in range(2, 101):
        frame = consumer.receive()
        assert frame.attempts == attempts
        consumer.requeue(frame)
    consumer.requeue(consumer.receive())
    assert consumer.frame().data.endswith(b"Message too much requeue")


def test_ids_may_have_any_byte(cluster: RedesignedCluster) -> None:
    client = WireClient(leader(cluster, "plain").tcp_address)
    client.command(b"PUB_TRACE plain 0\n" + sized(b"\n \r\n \r\nx" + b"body"))
    consumer = Consumer(leader(cluster, "plain"), "SUB plain ch 0")
    frame = consumer.receive()
    assert frame.id[8:] == b"\n \r\n \r\nx"
    consumer.send(b"TOUCH " + frame.id + b"\n")
    consumer.requeue(frame)
    consumer.finish(consumer.receive())
    until(lambda: cluster.partition("plain", 0).channel("ch").depth == 0)
    assert consumer.is_quiet(0.01)


def test_a_silent_client_is_dropped_after_three_intervals(cluster: RedesignedCluster) -> None:
    begun = time.monotonic()
    client = WireClient(leader(cluster, "plain").tcp_address, heartbeat_interval=1000)
    received = client.reader.read()
    assert received.count(b"_heartbeat_") in (2, 3)
    assert time.monotonic() - begun > 2.9


# What the redesigned dialect answers: codes, texts, which of them end the connection. Observed on a real cluster.


SUB = b"SUB plain ch 0\n"

ID = b"\0" * 7 + b"c" + b"\0" * 8

NEXT = b"PUB plain 0\n" + sized(b"next")

FATAL = {
    "publish without topic": (b"PUB\n", "E_INVALID"),
    "illegal topic": (b"PUB b@d 0\n" + sized(b"x"), "E_TOPIC_NOT_EXIST"),
    "no such partition": (b"PUB plain 9\n" + sized(b"x"), "E_TOPIC_NOT_EXIST"),
    "negative partition": (b"PUB plain -2\n" + sized(b"x"), "E_TOPIC_NOT_EXIST"),
    "huge partition": (b"PUB plain 99999999999999999999\n" + sized(b"x"), "E_BAD_PARTITION"),
    "body too big": (b"MPUB plain 0\n\x40\0\0\0", "E_BAD_BODY"),
    "no messages": (b"MPUB plain 0\n" + many(), "E_BAD_BODY"),
    "empty message": (b"MPUB plain 0\n" + many(b"a", b""), "E_BAD_MESSAGE"),
    "trace id only": (b"PUB_TRACE plain 0\n" + sized(traced(7, b"")), "E_BAD_BODY"),
    "trace ids only": (b"MPUB_TRACE plain 0\n" + many(traced(7, b"")), "E_BAD_MESSAGE"),
    "header length only": (b"PUB_EXT plain 0\n" + sized(b"\0\0"), "E_BAD_BODY"),
    "header beyond body": (b"PUB_EXT plain 0\n" + sized(b"\0\x20abc"), "E_BAD_BODY"),
    "illegal topic to subscribe": (b"SUB b@d c\n", "E_BAD_TOPIC"),
    "illegal channel": (b"SUB plain c@\n", "E_BAD_CHANNEL"),
    "no topic to subscribe": (b"SUB nix ch\n", "E_TOPIC_NOT_EXIST"),
    "unknown position": (b"SUB_ADVANCED plain ch 0 foo:1\n", "E_INVALID"),
    "unknown special": (b"SUB_ADVANCED plain ch 0 special:2\n", "E_INVALID"),
    "too many colons": (b"SUB_ADVANCED plain ch 0 a:b:c\n", "E_INVALID"),
    "ordered topic": (b"SUB_ADVANCED ord ch 0\n", "E_SUB_ORDER_IS_MUST"),
    "ext support for a plain topic": (identify(extend_support=True) + SUB, "E_SUB_EXTEND_FORBIDDON"),
    "sampling in order": (identify(sample_rate=50) + b"SUB_ORDERED plain ch 0\n", "E_INVALID"),
    "subscribed twice": (SUB + SUB, "E_INVALID"),
    "finish without subscription": (b"FIN " + ID + b"\n", "E_INVALID"),
    "id zero": (SUB + b"FIN " + bytes(16) + b"\n", "E_INVALID"),
    "negative id": (SUB + b"FIN " + b"\xff" * 16 + b"\n", "E_INVALID"),
    "negative delay": (SUB + b"REQ " + ID + b" -1\n", "E_INVALID"),
    "carriage return after a delay": (SUB + b"REQ " + ID + b" 100\r\n", "E_INVALID"),
    "too many ready": (SUB + b"RDY 2501\n", "E_INVALID"),
    "closed twice": (SUB + b"CLS\nCLS\n", "E_INVALID"),
    "create illegal topic": (b"INTERNAL_CREATE_TOPIC z@ 0\n", "E_BAD_TOPIC"),
    "create negative partition": (b"INTERNAL_CREATE_TOPIC z -1\n", "E_BAD_PARTITION"),
    "create odd ext": (b"INTERNAL_CREATE_TOPIC z 0 q\n", "E_BAD_EXT"),
    "slow buffer": (identify(output_buffer_timeout=2000), "E_BAD_BODY"),
}

NOT_FATAL = {
    "trace id is a number": (b"PUB_EXT plain 0\n" + sized(headed({"##trace_id": 5}, b"x")), "INVALID_TRACE_ID"),
    "trace id is too long": (
        b"PUB_EXT plain 0\n" + sized(headed({"##trace_id": "1" * 5000}, b"x")),
        "INVALID_TRACE_ID",
    ),
    "last header of several": (
        b"MPUB_EXT plain 0\n" + many(headed(b"", b"y"), headed({"a": "b"}, b"x")),
        "E_EXT_NOT_SUPPORT",
    ),
    "create topic": (b"INTERNAL_CREATE_TOPIC zz 0\n", "E_CREATE_TOPIC_FAILED"),
}


def replies(cluster: RedesignedCluster, sent: bytes) -> list[str]:
    """The codes of the errors until the end of the connection, or until an OK behind them, which ends the list."""
    client = WireClient(leader(cluster, "ord" if b" ord " in sent else "plain").tcp_address)
    client.send(sent)
    codes: list[str] = []
    while True:
        try:
            frame = client.frame()
        except (struct.error, ConnectionError):
            return codes
        if frame.type == ERROR:
            codes.append(frame.data.split(b" ")[0].decode())
        elif codes and frame.data == b"OK":
            return [*codes, "OK"]


def test_errors_that_are_fatal_and_those_that_are_not(cluster: RedesignedCluster) -> None:
    for name, (sent, error) in FATAL.items():
        assert replies(cluster, sent + NEXT) == [error], name
    for name, (sent, error) in NOT_FATAL.items():
        assert replies(cluster, sent + NEXT) == [error, "OK"], name


def test_a_long_line_ends_the_connection_without_a_word(cluster: RedesignedCluster) -> None:
    assert replies(cluster, b"x" * 5000 + b"\n" + NEXT) == []


def test_a_partition_counts_only_as_the_third_of_three_words(cluster: RedesignedCluster) -> None:
    client = WireClient(leader(cluster, "plain").tcp_address)
    for line in (b"PUB plain 7 0\n", b"PUB plain 9 \n", b"PUB plain -1\n", b"PUB plain\n"):
        assert client.command(line + sized(b"x")) == b"OK"


def test_a_start_position_hides_the_partition(cluster: RedesignedCluster) -> None:
    cluster.create_topic("two", 2, 1, multi_part=True)
    node = cluster.leader_of("two", 1)
    if cluster.leader_of("two", 0) is not node:
        cluster.move_leader("two", 0, node)
    consumer = Consumer(node, "SUB_ADVANCED two ch 1 special:-1")
    publish(cluster, "two", b"in 0", partition=0)
    publish(cluster, "two", b"in 1", partition=1)
    assert consumer.receive().data.endswith(b"in 0")
    assert consumer.is_quiet()


def test_a_replica_refuses(cluster: RedesignedCluster) -> None:
    partition = cluster.partition("plain", 0)
    replica = cluster.node(next(node for node in partition.replicas if node != partition.leader))
    client = WireClient(replica.tcp_address)
    assert client.command(b"PUB plain 0\n" + sized(b"x")) == b"E_FAILED_ON_NOT_LEADER "
    assert client.command(b"MPUB_TRACE plain 0\n" + many(traced(1, b"x"))) == b"E_FAILED_ON_NOT_LEADER "
    assert client.command(b"PUB plain\n" + sized(b"x")) == b"E_TOPIC_NOT_EXIST "
    assert client.reader.read() == b""


def told(cluster: RedesignedCluster, topic: str, partition: int, *messages: bytes) -> tuple[Any, ...]:
    """What is answered to a publish of messages with trace ids, of several to MPUB_TRACE."""
    client = WireClient(cluster.leader_of(topic, partition).tcp_address)
    command = b"MPUB_TRACE %b %d\n" if messages[1:] else b"PUB_TRACE %b %d\n"
    sent = many(*messages) if messages[1:] else sized(messages[0])
    return struct.unpack(">2sQQQI", client.command(command % (topic.encode(), partition) + sent))


def test_traces_tell_where_a_message_is(cluster: RedesignedCluster) -> None:
    assert told(cluster, "plain", 0, traced(77, b"hello")) == (b"OK", 2, 77, 0, 35)
    assert told(cluster, "plain", 0, traced(2**64 - 1, b"x")) == (b"OK", 3, 2**64 - 1, 35, 31)
    # Several: the first id, no trace id, the first offset, the size of all.
    assert told(cluster, "plain", 0, traced(1, b"ab"), traced(2, b"c")) == (b"OK", 4, 0, 66, 63)
    assert told(cluster, "plain", 0, traced(0, b"y")) == (b"OK", 6, 0, 129, 31)
    assert told(cluster, "ord", 2, traced(1, b"x"))[1] == (2 << 50) + 2  # ids have the partition in them


def test_sizes_of_an_ext_topic(cluster: RedesignedCluster) -> None:
    client = WireClient(cluster.leader_of("ext", 0).tcp_address)
    assert client.command(b"PUB ext 0\n" + sized(b"plainbody")) == b"OK"
    header = b'{"##trace_id":"77","k":"v"}'
    reply = client.command(b"PUB_EXT ext 0\n" + sized(headed(header, b"EB")))
    assert struct.unpack(">2sQQQI", reply) == (b"OK", 3, 77, 40, 62)
    assert client.command(b"MPUB_EXT ext 0\n" + many(headed(header, b"a"), headed(b"", b"b"))) == b"OK"
    assert client.command(b"PUB_EXT ext 0\n" + sized(headed(b"123", b"odd"))) == b"OK"


def test_identify_clamps_and_confirms(cluster: RedesignedCluster) -> None:
    client = WireClient(leader(cluster).tcp_address)
    fields = {"output_buffer_size": 1 << 24, "output_buffer_timeout": 5, "desired_tag": "abc"}
    reply = client.command(identify(feature_negotiation=True, **fields))
    assert b'"output_buffer_size":65536,"output_buffer_timeout":10,"desired_tag":"abc"}' in reply


# Filters are read as Go reads them: a corpus of patterns with the texts that Go's own libraries say they match.


HEAD, *ROWS = map(json.loads, (DATA / "go_patterns.jsonl").read_text().splitlines())

TEXTS: list[str] = HEAD["texts"]


def matched(kind: int, pattern: str) -> list[str] | None:
    """The texts that a filter lets through; None when it is ignored, as no pattern."""
    matches = make_filter(FilterRequest(kind, filter_ext_key="k", filter_data=pattern))
    if matches is None:
        return None
    return [text for text in TEXTS if matches(record(text))]


def record(text: str) -> Record:
    return Record(1, bytes(16), 0, 0, 0, b"\x04" + headed({"k": text}, b""), b"")


def test_patterns_match_what_they_match_in_go() -> None:
    kinds = {"regexp": REGEXP, "glob": GLOB}
    for kind, pattern, wanted in ROWS:
        # An empty pattern is none: the filter is ignored.
        assert matched(kinds[kind], pattern) == (wanted if pattern else None), (kind, pattern)


def test_a_text_that_is_no_unicode_is_searched() -> None:
    matches = make_filter(FilterRequest(REGEXP, filter_ext_key="k", filter_data="^a.b$"))
    assert matches is not None
    bad = Record(1, bytes(16), 0, 0, 0, b"\x04" + headed(b'{"k":"a\xffb"}', b""), b"")
    assert matches(bad)


def test_no_glob_keeps_a_server_busy() -> None:
    # It does keep the real one busy: with gobwas/glob this takes longer than anybody waits.
    with promptly():
        assert matched(GLOB, "*a" * 40 + "b") == []
        matches = make_filter(FilterRequest(GLOB, filter_ext_key="k", filter_data="*a" * 40 + "b"))
        assert matches is not None
        assert not matches(record("a" * 100))
        assert matches(record("a" * 100 + "b"))


def test_a_server_without_the_package_refuses_a_filter_that_needs_it(
    cluster: RedesignedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    client = WireClient(cluster.nsqds[0].tcp_address)
    exact = {"type": 1, "filter_ext_key": "k", "filter_data": "v"}
    assert client.command(identify(extend_support=True, ext_filter=exact, heartbeat_interval=5000)) == b"OK"
    client.close()
    for kind in (REGEXP, GLOB):
        client = WireClient(cluster.nsqds[0].tcp_address)
        asked = {"type": kind, "filter_ext_key": "k", "filter_data": "v"}
        answer = client.command(identify(extend_support=True, ext_filter=asked))
        assert b"pip install 'nsq-fast[filters]'" in answer
        client.close()


def is_let_through(kind: str, pattern: str) -> bool:
    try:
        (check_regexp if kind == "regexp" else check_glob)(pattern)
    except PatternInvalid:
        return False
    return True


def test_consumers_let_no_pattern_through_that_go_refuses() -> None:
    # An empty filter is refused elsewhere: it is no pattern.
    let_through = [
        (kind, pattern, wanted) for kind, pattern, wanted in ROWS if pattern and is_let_through(kind, pattern)
    ]
    assert len(let_through) > 50
    assert [row for row in let_through if row[2] is None] == []
