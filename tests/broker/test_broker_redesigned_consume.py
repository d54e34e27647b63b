"""How the redesigned dialect delivers: one at a time in order, what comes back and when, tags, filters, positions."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.http import ask
from support.redesigned import Consumer, detail, headed, publish, sized
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import RedesignedCluster

ORDERED = "SUB_ORDERED ord ch 0"
EXT = {"extend_support": True}


def leader(cluster: RedesignedCluster, topic: str = "ord") -> Any:
    return cluster.leader_of(topic, 0)


def publish_ext(cluster: RedesignedCluster, *messages: tuple[dict[str, Any], bytes]) -> None:
    client = WireClient(leader(cluster, "ext").tcp_address)
    for header, body in messages:
        command = b"PUB_EXT ext 0\n" + sized(headed(header, body)) if header else b"PUB ext 0\n" + sized(body)
        assert client.command(command) == b"OK"
    client.close()


def bodies(consumer: Consumer, count: int) -> list[bytes]:
    """The last letter of so many messages, each finished."""
    received = []
    for _ in range(count):
        frame = consumer.receive()
        consumer.finish(frame)
        received.append(frame.data[-1:])
    return received


# --- ordered ---------------------------------------------------------------------------------------------------------


def test_one_message_at_a_time_over_all_clients(cluster: RedesignedCluster) -> None:
    publish(cluster, "ord", b"a", b"b", b"c")
    first, second = (Consumer(leader(cluster), ORDERED) for _ in range(2))
    frame = first.receive()
    assert detail(frame) == (0, 31, b"a")
    assert second.is_quiet()
    assert first.is_quiet(0.01)
    second.send(b"RDY 0\n")
    first.finish(frame)
    assert detail(first.receive()) == (31, 31, b"b")
    first.close()
    second.close()


def test_requeue_in_order(cluster: RedesignedCluster) -> None:
    publish(cluster, "ord", b"a", b"b")
    consumer = Consumer(leader(cluster), ORDERED, msg_timeout=1000)
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
    consumer.close()


def test_the_next_client_gets_what_a_lost_one_had(cluster: RedesignedCluster) -> None:
    publish(cluster, "ord", b"a", b"b")
    first = Consumer(leader(cluster), ORDERED)
    frame = first.receive()
    second = Consumer(leader(cluster), ORDERED)
    first.close()
    again = second.receive()
    assert (again.id, again.attempts) == (frame.id, 1)
    second.close()


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
    plain.close()


# --- not ordered -----------------------------------------------------------------------------------------------------


def test_a_new_channel_begins_at_the_end(cluster: RedesignedCluster) -> None:
    publish(cluster, "plain", b"before")
    consumer = Consumer(leader(cluster, "plain"), "SUB plain new 0")
    publish(cluster, "plain", b"after")
    assert consumer.receive().body == b"after"
    consumer.close()


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
    consumer.close()


def test_a_delay_is_kept_where_there_is_no_order(cluster: RedesignedCluster) -> None:
    publish(cluster, "plain", b"a")
    consumer = Consumer(leader(cluster, "plain"), "SUB plain ch 0")
    frame = consumer.receive()
    consumer.requeue(frame, 150)
    assert consumer.is_quiet(0.1)
    assert consumer.receive().attempts == 2
    consumer.close()


def test_too_many_requeues_are_refused(cluster: RedesignedCluster) -> None:
    publish(cluster, "plain", b"a")
    consumer = Consumer(leader(cluster, "plain"), "SUB plain ch 0")
    for _ in range(100):
        consumer.requeue(consumer.receive())
    frame = consumer.receive()
    consumer.requeue(frame)
    assert consumer.frame().data.endswith(b"Message too much requeue")
    consumer.close()


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
    consumer.close()
    client.close()


def test_a_silent_client_is_dropped_after_three_intervals(cluster: RedesignedCluster) -> None:
    begun = time.monotonic()
    client = WireClient(leader(cluster, "plain").tcp_address, heartbeat_interval=1000)
    received = client.reader.read()
    assert received.count(b"_heartbeat_") in (2, 3)
    assert time.monotonic() - begun > 2.9
    client.close()


# --- ext: layouts, tags, filters -------------------------------------------------------------------------------------


def test_layouts_of_an_ext_topic(cluster: RedesignedCluster) -> None:
    publish_ext(cluster, ({"k": "v"}, b"EB"), ({}, b"plain"))
    plain = Consumer(leader(cluster, "ext"), "SUB ext ch 0", rdy=2, **EXT)
    assert [plain.receive().data[26:] for _ in range(2)] == [b'\x04\x00\x0a{"k": "v"}EB', b"\x00plain"]
    plain.close()
    detailed = Consumer(leader(cluster, "ext"), "SUB_ADVANCED ext ch 0", rdy=2, **EXT)
    assert detailed.receive().data[26:].startswith(b'\x04\x00\x0a{"k": "v"}' + bytes(8))
    assert detailed.receive().data[26:] == b"\x00" + (45).to_bytes(8, "big") + (36).to_bytes(4, "big") + b"plain"
    detailed.close()


def test_an_ext_topic_needs_support(cluster: RedesignedCluster) -> None:
    client = WireClient(leader(cluster, "ext").tcp_address)
    assert client.command(b"SUB ext ch 0\n").startswith(b"E_SUB_EXTEND_NEED ")
    client.close()


def test_tags(cluster: RedesignedCluster) -> None:
    tagged = Consumer(leader(cluster, "ext"), "SUB ext ch 0", desired_tag="red", **EXT)
    untagged = Consumer(leader(cluster, "ext"), "SUB ext ch 0", **EXT)
    tag = "##client_dispatch_tag"
    publish_ext(cluster, ({tag: "red"}, b"1"), ({}, b"2"), ({tag: "blue"}, b"3"), ({tag: "red"}, b"4"))
    assert bodies(tagged, 2) == [b"1", b"4"]
    assert bodies(untagged, 2) == [b"2", b"3"]
    assert tagged.is_quiet(0.01)
    tagged.close()
    channel = cluster.partition("ext", 0).channel("ch")
    until(lambda: len(channel.clients) == 1)
    publish_ext(cluster, ({tag: "red"}, b"5"))
    assert bodies(untagged, 1) == [b"5"]
    untagged.close()


FILTERS = {
    "exact": ({"type": 1, "filter_ext_key": "k", "filter_data": "ab"}, b"1"),
    "regexp": ({"type": 2, "filter_ext_key": "k", "filter_data": "^a.$"}, b"15"),
    "glob": ({"type": 3, "filter_ext_key": "k", "filter_data": "{a,x}[!b]"}, b"5"),
    "nested": ({"type": 1, "filter_ext_key": "o.k", "filter_data": "in"}, b"4"),
    "all": (
        {
            "type": 4,
            "filter_ext_key": "all",
            "filter_data_list": [
                {"filter_ext_key": "k", "filter_data": "ab"},
                {"filter_ext_key": "l", "filter_data": "m"},
            ],
        },
        b"1",
    ),
    "any": (
        {
            "type": 4,
            "filter_ext_key": "any",
            "filter_data_list": [
                {"filter_ext_key": "k", "filter_data": "ac"},
                {"filter_ext_key": "l", "filter_data": "m"},
            ],
        },
        b"15",
    ),
    "inverse": ({"type": 1, "inverse": True, "filter_ext_key": "k", "filter_data": "ab"}, b"2345"),
    "invalid": ({"type": 2, "filter_ext_key": "k", "filter_data": "("}, b"12345"),
    "unknown": ({"type": 9, "filter_ext_key": "k", "filter_data": "x"}, b"12345"),
}


@pytest.mark.parametrize(("ext_filter", "passed"), FILTERS.values(), ids=FILTERS)
def test_filters(cluster: RedesignedCluster, ext_filter: dict[str, Any], passed: bytes) -> None:
    consumer = Consumer(leader(cluster, "ext"), "SUB ext ch 0", ext_filter=ext_filter, **EXT)
    publish_ext(
        cluster,
        ({"k": "ab", "l": "m"}, b"1"),
        ({}, b"2"),
        ({"k": 7}, b"3"),
        ({"o": {"k": "in"}}, b"4"),
        ({"k": "ac"}, b"5"),
    )
    assert b"".join(bodies(consumer, len(passed))) == passed
    # What was kept out is done for the whole channel.
    until(lambda: cluster.partition("ext", 0).channel("ch").depth == 0)
    consumer.close()


# --- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "first"),
    [("virtual_queue:0", b"a"), ("virtual_queue:40", b"c"), ("msgcount:2", b"b"), ("timestamp:5", b"a")],
)
def test_positions(cluster: RedesignedCluster, position: str, first: bytes) -> None:
    publish(cluster, "plain", b"a", b"b", b"c")
    consumer = Consumer(leader(cluster, "plain"), f"SUB_ADVANCED plain new 0 {position}")
    assert detail(consumer.receive())[2] == first
    consumer.close()


def test_only_the_first_client_sets_the_position(cluster: RedesignedCluster) -> None:
    publish(cluster, "plain", b"a")
    first = Consumer(leader(cluster, "plain"), "SUB plain new 0")
    second = Consumer(leader(cluster, "plain"), "SUB_ADVANCED plain new 0 virtual_queue:0")
    assert second.is_quiet(0.02)
    first.close()
    second.close()


def test_a_position_is_set_over_http(cluster: RedesignedCluster) -> None:
    publish(cluster, "plain", b"a", b"b")
    address = leader(cluster, "plain").http_address
    consumer = Consumer(leader(cluster, "plain"), "SUB plain ch 0")
    assert bodies(consumer, 2) == [b"a", b"b"]
    query = "/channel/setoffset?topic=plain&channel=ch&partition=0"
    assert ask(address, "POST", query, b"virtual_queue:31").status == 200
    assert bodies(consumer, 1) == [b"b"]
    assert ask(address, "POST", query, b"foo:1").json == {"message": "invalid consume offset:foo:1"}
    assert ask(address, "POST", query, b"special:3").json == {"message": "not supported offset type"}
    assert ask(address, "POST", query).json == {"message": "MSG_EMPTY"}
    consumer.close()
