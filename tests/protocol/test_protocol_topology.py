"""Lookup replies of both families, and their merge."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsq_fast.errors import RemoteProtocolError
from nsq_fast.names import Address
from nsq_fast.protocol.topology import (
    MAX_ERROR_TEXT,
    MAX_PARTITIONS,
    LookupAnswer,
    Meta,
    Nsqd,
    Topology,
    error_text,
    is_unknown_topic,
    merge,
    parse_listlookup,
    parse_lookup,
    parse_nodes,
    unwrap,
)

OLD_PEER = {
    "remote_address": "10.0.0.1:53210",
    "hostname": "one",
    "broadcast_address": "one.example",
    "tcp_port": 4150,
    "http_port": 4151,
    "version": "1.3.0",
    "topology_zone": "z",
}
NEW_PEER = {
    "id": "10.0.0.2:40000",
    "remote_address": "10.0.0.2:40000",
    "hostname": "two",
    "broadcast_address": "10.0.0.2",
    "tcp_port": 14150,
    "http_port": 14151,
    "version": "0.3.7-HA.1.9.5",
    "distributed_id": "10.0.0.2:14250:14150:7",
}
META = {
    "partition_num": 2,
    "replica": 1,
    "extend_support": True,
    "ordered": True,
    "multi_part": False,
    "disable_channel_auto_create": False,
}
OLD_NSQD = Nsqd(
    Address("one.example", 4150), Address("one.example", 4151), "1.3.0", "one", "one.example", topology_zone="z"
)
NEW_NSQD = Nsqd(
    Address("10.0.0.2", 14150),
    Address("10.0.0.2", 14151),
    "0.3.7-HA.1.9.5",
    "two",
    "10.0.0.2",
    "10.0.0.2:14250:14150:7",
)


def reply(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def wrapped(data: Any, status_code: int = 200, status_txt: str = "OK") -> bytes:
    return json.dumps({"status_code": status_code, "status_txt": status_txt, "data": data}).encode()


def nsqd(number: int, version: str = "1.3.0") -> Nsqd:
    return Nsqd(Address(f"10.0.0.{number}", 4150), Address(f"10.0.0.{number}", 4151), version)


def test_an_original_reply_has_producers_only() -> None:
    answer = parse_lookup(reply(channels=["c"], producers=[OLD_PEER]))
    assert answer == LookupAnswer(channels=("c",), producers=(OLD_NSQD,))
    assert answer.meta is None
    assert not answer.producers[0].is_redesigned


def test_a_redesigned_reply_has_partitions_and_meta() -> None:
    data = {"channels": [], "partitions": {"0": NEW_PEER}, "producers": [NEW_PEER, OLD_PEER], "meta": META}
    answer = parse_lookup(json.dumps(data).encode())
    assert answer.partitions == {0: NEW_NSQD}
    assert answer.meta == Meta(partition_num=2, replica=1, extend_support=True, ordered=True)
    assert answer.producers == (NEW_NSQD, OLD_NSQD)
    assert answer.producers[0].is_redesigned
    assert parse_lookup(wrapped(data)) == answer


@pytest.mark.parametrize("body", [b"", b" \n", wrapped(None), reply(producers=None, partitions=None, channels=None)])
def test_nothing_is_a_valid_answer(body: bytes) -> None:
    assert parse_lookup(body) == LookupAnswer()


def test_an_unknown_topic_of_a_cluster_has_no_meta() -> None:
    assert parse_lookup(reply(producers=[], partitions={}, meta={"partition_num": 0})).meta is None


def test_an_ipv6_broadcast_address_may_have_brackets() -> None:
    for text in ("::1", "[::1]"):
        peer = {**OLD_PEER, "broadcast_address": text}
        assert parse_lookup(reply(producers=[peer])).producers[0].tcp == Address("::1", 4150)


@pytest.mark.parametrize(
    "change",
    [
        {"tcp_port": 0},
        {"tcp_port": 70000},
        {"tcp_port": -1},
        {"broadcast_address": ""},
        {"broadcast_address": "a b"},
        {"broadcast_address": "evil\r\nhost"},
        {"broadcast_address": "x" * 300},
    ],
)
def test_a_peer_without_a_usable_address_is_left_out(change: dict[str, Any]) -> None:
    answer = parse_lookup(reply(producers=[{**OLD_PEER, **change}, NEW_PEER]))
    assert answer.producers == (NEW_NSQD,)


def test_an_nsqd_without_http_is_a_peer_all_the_same() -> None:
    assert parse_lookup(reply(producers=[{**OLD_PEER, "http_port": 0}])).producers[0].http is None


def test_pseudo_partitions_of_old_nsqds_are_no_partitions() -> None:
    answer = parse_lookup(reply(producers=[OLD_PEER], partitions={"-11": OLD_PEER, "1": NEW_PEER}))
    assert answer.partitions == {1: NEW_NSQD}


@pytest.mark.parametrize(
    "body",
    [
        b"<html>hello</html>",
        b"OK",
        b"[]",
        b"null",
        b"42",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b"{}",
        b'{"hello": "world"}',
        b'{"x":' + b"[" * 200_000,
        b'{"producers": ["\xff"]}',
        reply(producers={}),
        reply(producers=["10.0.0.1:4150"]),
        reply(producers=[{**OLD_PEER, "tcp_port": "4150"}]),
        reply(producers=[{**OLD_PEER, "broadcast_address": None}]),
        reply(producers=[{**OLD_PEER, "version": 3}]),
        reply(producers=[], channels=[1]),
        reply(producers=[], channels="c"),
        reply(partitions=[NEW_PEER]),
        reply(partitions={"zero": NEW_PEER}),
        reply(partitions={"99999999999999999999": NEW_PEER}),
        reply(partitions={"0": None}),
        reply(producers=[], meta={**META, "partition_num": "2"}),
        reply(producers=[], meta={**META, "partition_num": 10**9}),
        reply(producers=[], meta={**META, "partition_num": -1}),
        reply(producers=[], meta={**META, "ordered": "yes"}),
        wrapped([]),
        wrapped("nothing"),
        b'{"status_code": 200, "data": {',
    ],
)
def test_what_no_lookupd_sends_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_lookup(body)


def parse_every_way(body: bytes) -> None:
    for parse in (parse_lookup, parse_nodes, parse_listlookup, unwrap):
        with suppress(RemoteProtocolError):
            parse(body)
    assert isinstance(error_text(body), str)


@given(st.binary() | st.text().map(str.encode))
def test_garbage_gives_a_result_or_one_error(body: bytes) -> None:
    parse_every_way(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
lies = st.fixed_dictionaries(
    {},
    optional={
        "status_code": json_values,
        "data": json_values,
        "channels": json_values,
        "producers": json_values | st.lists(st.fixed_dictionaries({"tcp_port": json_values})),
        "partitions": json_values | st.dictionaries(st.text(), json_values),
        "meta": json_values,
        "lookupdnodes": json_values | st.lists(st.fixed_dictionaries({"NodeIP": st.text(), "HttpPort": st.text()})),
    },
)


@given(lies)
def test_json_of_the_wrong_shape_gives_a_result_or_one_error(value: dict[str, Any]) -> None:
    parse_every_way(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, b'{"message":"TOPIC_NOT_FOUND"}', True),
        (404, b'{"message":"Key not found"}', True),
        (404, b'{"message":"Topic has no channel, should init at least one for the new topic"}', True),
        (500, wrapped(None, 500, "TOPIC_NOT_FOUND"), True),
        (404, b'{"message":"NOT_FOUND"}', False),
        (404, b"404 page not found", False),
        (500, wrapped(None, 500, "INTERNAL_ERROR"), False),
        (400, b'{"message":"TOPIC_NOT_FOUND"}', False),
        (404, b"", False),
        (404, b'{"message":1}', False),
    ],
)
def test_an_unknown_topic_is_told_from_other_errors(status: int, body: bytes, expected: bool) -> None:
    assert is_unknown_topic(status, error_text(body)) is expected


def test_the_text_of_an_error_is_short() -> None:
    assert error_text(b'{"message":"MSG_EMPTY"}') == "MSG_EMPTY"
    assert error_text(wrapped(None, 500, "BAD")) == "BAD"
    assert error_text(b" 404 page not found\n") == "404 page not found"
    assert len(error_text("é".encode() * 10_000)) == 200
    assert not is_unknown_topic(None, "TOPIC_NOT_FOUND")


def test_nodes_are_every_nsqd_once() -> None:
    node = {**OLD_PEER, "topics": ["t"], "tombstones": [False]}
    assert parse_nodes(reply(producers=[node, NEW_PEER, node])) == (NEW_NSQD, OLD_NSQD)
    assert parse_nodes(wrapped({"producers": [node]})) == (OLD_NSQD,)
    assert parse_nodes(reply(producers=None)) == ()


def test_listlookup_gives_http_addresses() -> None:
    node = {"ID": "127.0.0.1:33162:33160:nsqlookup", "NodeIP": "127.0.0.1", "TcpPort": "33160", "HttpPort": "33161"}
    body = reply(lookupdnodes=[node, {**node, "HttpPort": "none"}, {**node, "NodeIP": ""}], lookupdleader=node)
    assert parse_listlookup(body) == (Address("127.0.0.1", 33161),)
    assert parse_listlookup(b"") == parse_listlookup(wrapped(None)) == ()


def test_answers_are_united() -> None:
    merged = merge(
        [
            LookupAnswer(("b",), (nsqd(2), nsqd(1))),
            LookupAnswer(("a", "b"), (nsqd(1), nsqd(3))),
            LookupAnswer(),
        ]
    )
    assert merged == Topology(producers=(nsqd(1), nsqd(2), nsqd(3)), channels=("a", "b"))
    assert merge([]).is_empty


def test_the_majority_names_the_leader() -> None:
    one, two = nsqd(1, "0.3.7-HA.1"), nsqd(2, "0.3.7-HA.1")
    stale = LookupAnswer(partitions={0: one}, meta=Meta(1, 1))
    fresh = LookupAnswer(partitions={0: two}, meta=Meta(1, 1))
    assert merge([stale, fresh, fresh]).partitions == {0: two}
    assert merge([fresh, stale, stale]).partitions == {0: one}


nsqds = st.builds(nsqd, st.integers(1, 4), st.sampled_from(["1.3.0", "1.2.1", "0.3.7-HA.1.9.5"])) | st.builds(
    Nsqd, st.just(Address("10.0.0.1", 4150))
)
metas = st.none() | st.builds(Meta, st.integers(1, 3), st.integers(1, 2), st.booleans(), st.booleans())
answers = st.builds(
    LookupAnswer,
    channels=st.lists(st.sampled_from("abc"), max_size=3).map(tuple),
    producers=st.lists(nsqds, max_size=4).map(tuple),
    partitions=st.dictionaries(st.integers(0, 2), nsqds, max_size=3),
    meta=metas,
)


@given(st.lists(answers, max_size=5).flatmap(lambda each: st.tuples(st.just(each), st.permutations(each))))
def test_the_order_of_answers_does_not_matter(both: tuple[list[LookupAnswer], list[LookupAnswer]]) -> None:
    given_order, other_order = both
    assert merge(given_order) == merge(other_order)
    assert list(merge(given_order).partitions) == list(merge(other_order).partitions)


@given(st.lists(answers, min_size=1, max_size=5))
def test_nothing_is_invented_and_nothing_is_lost(given_answers: list[LookupAnswer]) -> None:
    merged = merge(given_answers)
    told = {each.tcp for answer in given_answers for each in answer.producers}
    assert {each.tcp for each in merged.producers} == told
    assert len(merged.producers) == len(told)
    assert set(merged.partitions) == {number for answer in given_answers for number in answer.partitions}
    for number, leader in merged.partitions.items():
        assert leader in [answer.partitions.get(number) for answer in given_answers]
    assert merge([*given_answers, *given_answers]) == merged


def test_mixed_fleets_have_old_nsqds_beside_the_partitions() -> None:
    leader, idle, old = nsqd(1, "0.3.7-HA.1"), nsqd(2, "0.3.7-HA.1"), nsqd(3)
    topology = Topology(producers=(leader, idle, old), partitions={0: leader}, meta=Meta(2, 1))
    assert topology.unpartitioned == (old,)
    assert topology.nsqds == (leader, idle, old)
    assert not topology.is_complete
    assert Topology(producers=(old,)).unpartitioned == (old,)
    assert Topology(producers=(old,)).is_complete


def test_a_topology_cannot_be_changed() -> None:
    topology = merge([LookupAnswer(partitions={0: nsqd(1)})])
    with pytest.raises(TypeError):
        topology.partitions[1] = nsqd(2)  # type: ignore[index]
    with pytest.raises(AttributeError):
        topology.producers = ()  # type: ignore[misc]


@pytest.mark.parametrize("parse", [parse_lookup, parse_nodes])
def test_more_nsqds_than_allowed_are_refused_before_anything_is_made_of_them(parse: Any) -> None:
    peers = [{"broadcast_address": f"h{number}", "tcp_port": 1} for number in range(11)]
    body = reply(producers=peers)
    parse(body, 11)
    with pytest.raises(RemoteProtocolError, match="names 11 nsqds, more than lookupd_max_producers=10 allows"):
        parse(body, 10)


def test_more_partitions_than_there_can_be_are_refused() -> None:
    peer = {"broadcast_address": "h", "tcp_port": 1}
    body = reply(partitions={str(number): peer for number in range(MAX_PARTITIONS + 2)})
    with pytest.raises(RemoteProtocolError, match="1026 partitions"):
        parse_lookup(body, 1)


@pytest.mark.parametrize("port", ["9" * 5000, "99999", "-1", "1e3", "٣٣"])
def test_a_port_that_is_none_leaves_its_lookupd_out(port: str) -> None:
    nodes = [{"NodeIP": "10.0.0.1", "HttpPort": port}, {"NodeIP": "10.0.0.2", "HttpPort": "4161"}]
    assert parse_listlookup(reply(lookupdnodes=nodes)) == (Address("10.0.0.2", 4161),)


def test_the_text_of_a_huge_error_is_its_beginning() -> None:
    text = error_text(b'{"message":"' + b"x" * 10_000_000 + b'"}')
    assert text.startswith('{"message":"xxx')
    assert len(text) == MAX_ERROR_TEXT


def test_what_lookupds_say_counts_only_while_none_names_an_nsqd() -> None:
    unknown, bare = LookupAnswer(problem="Key not found"), LookupAnswer(problem="Topic has no channel, add one")
    assert merge([unknown, unknown, LookupAnswer()]).problem == "Key not found"
    assert merge([unknown]).is_unknown
    assert not merge([LookupAnswer()]).is_unknown  # it says nothing: perhaps an nsqd is only not registered yet
    both = merge([bare, unknown])
    assert both.problem == "Key not found; Topic has no channel, add one"
    assert not both.is_unknown
    named = merge([unknown, LookupAnswer(producers=(nsqd(1),))])
    assert named.problem == ""
    assert not named.is_unknown


def described(number: int, connection: int) -> dict[str, Any]:
    """An nsqd as an original lookupd names it, which adds the address of its own connection."""
    return {
        "remote_address": f"10.0.0.1:{connection}",
        "broadcast_address": f"10.0.0.{number}",
        "hostname": f"host{number}",
        "tcp_port": 4150,
        "http_port": 4151,
        "version": "1.3.0",
    }


def test_neither_the_order_nor_the_connections_of_a_lookupd_make_another_answer() -> None:
    numbers = list(range(1, 30))
    bodies = []
    for connection in (50001, 50002):
        bodies.append(json.dumps({"channels": [], "producers": [described(each, connection) for each in numbers]}))
        numbers.reverse()
    first, second = (parse_lookup(body.encode()) for body in bodies)
    assert first == second
    assert [nsqd.tcp for nsqd in first.producers] == sorted(nsqd.tcp for nsqd in first.producers)
    # The very same objects: what is compared at each poll of each topic is one pointer an nsqd.
    assert all(one is other for one, other in zip(first.producers, second.producers, strict=True))


def test_a_description_of_an_nsqd_that_is_too_long_to_be_remembered_is_read_as_well() -> None:
    long = {**described(1, 50001), "hostname": "h" * 2000}
    assert parse_lookup(json.dumps({"producers": [long]}).encode()).producers[0].hostname == "h" * 2000
