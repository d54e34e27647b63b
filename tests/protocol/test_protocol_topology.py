"""Lookup replies of both families, their merge, and what a discovery filter leaves of it."""

from __future__ import annotations

import copy
import json
import pickle
import re
from contextlib import suppress
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nsq_fast.client.acknowledger import OrderLedger
from nsq_fast.client.start_position import parse_start
from nsq_fast.config import LookupConfig
from nsq_fast.errors import ConfigError, NameInvalid, RemoteProtocolError
from nsq_fast.names import Address
from nsq_fast.protocol.topology import (
    MAX_ERROR_TEXT,
    MAX_PARTITIONS,
    LookupAnswer,
    Meta,
    Nsqd,
    TopicChoice,
    Topology,
    error_text,
    is_complete,
    is_unknown_topic,
    keep_of,
    merge,
    only,
    parse_listlookup,
    parse_lookup,
    parse_nodes,
    unknown_topic,
    unwrap,
)

OLD_PEER = {
    "remote_address": "10.0.0.1:53210", "hostname": "one", "broadcast_address": "one.example", "tcp_port": 4150,
    "http_port": 4151, "version": "1.3.0", "topology_zone": "z", "topology_region": "r",
}  # fmt: skip
NEW_PEER = {
    "id": "10.0.0.2:40000", "remote_address": "10.0.0.2:40000", "hostname": "two", "broadcast_address": "10.0.0.2",
    "tcp_port": 14150, "http_port": 14151, "version": "0.3.7-HA.1.9.5", "distributed_id": "10.0.0.2:14250:14150:7",
}  # fmt: skip
META = {
    "partition_num": 2, "replica": 1, "extend_support": True, "ordered": True, "multi_part": False,
    "disable_channel_auto_create": False,
}  # fmt: skip
OLD_NSQD = Nsqd(
    Address("one.example", 4150), Address("one.example", 4151), "1.3.0", "one", "one.example", topology_zone="z",
    topology_region="r",
)  # fmt: skip
NEW_NSQD = Nsqd(
    Address("10.0.0.2", 14150), Address("10.0.0.2", 14151), "0.3.7-HA.1.9.5", "two", "10.0.0.2",
    "10.0.0.2:14250:14150:7",
)  # fmt: skip


def reply(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def wrapped(data: Any, status_code: int = 200, status_txt: str = "OK") -> bytes:
    return reply(status_code=status_code, status_txt=status_txt, data=data)


def nsqd(number: int, version: str = "1.3.0", **fields: str) -> Nsqd:
    return Nsqd(Address(f"10.0.0.{number}", 4150), Address(f"10.0.0.{number}", 4151), version, **fields)


# One answer


def test_an_answer_goes_through_pickle_and_copy() -> None:
    for answer in (LookupAnswer(), parse_lookup(reply(producers=[OLD_PEER], partitions={"1": NEW_PEER}))):
        for again in (pickle.loads(pickle.dumps(answer)), copy.deepcopy(answer)):
            assert (type(again), again) == (LookupAnswer, answer)


def test_an_original_reply_has_producers_and_a_redesigned_one_partitions_and_meta() -> None:
    answer = parse_lookup(reply(channels=["c"], producers=[OLD_PEER]))
    assert answer == LookupAnswer(channels=("c",), producers=(OLD_NSQD,))
    assert not answer.producers[0].is_redesigned
    data = {"channels": [], "partitions": {"0": NEW_PEER}, "producers": [NEW_PEER, OLD_PEER], "meta": META}
    answer = parse_lookup(reply(**data))
    assert answer.partitions == {0: NEW_NSQD}
    assert answer.meta == Meta(partition_num=2, replica=1, extend_support=True, ordered=True)
    assert answer.producers == (NEW_NSQD, OLD_NSQD)
    assert answer.producers[0].is_redesigned
    assert parse_lookup(wrapped(data)) == answer
    # Pseudo partitions of old nsqds are none, and a topic that the cluster does not know has no meta.
    assert parse_lookup(reply(producers=[OLD_PEER], partitions={"-11": OLD_PEER, "1": NEW_PEER})).partitions == {
        1: NEW_NSQD
    }
    assert parse_lookup(reply(producers=[], partitions={}, meta={"partition_num": 0})).meta is None


@pytest.mark.parametrize("body", [b"", b" \n", wrapped(None), reply(producers=None, channels=None)])
def test_nothing_is_a_valid_answer(body: bytes) -> None:
    assert parse_lookup(body) == LookupAnswer()


def test_which_nsq_a_lookupd_is_of_is_seen_in_each_answer() -> None:
    """Of a topic that it does not know, or of a cluster that takes no writes, too."""
    for answer in (
        parse_lookup(reply(producers=None, partitions=None, channels=None)),
        parse_lookup(reply(producers=[], partitions={}, meta={"partition_num": 0})),
        unknown_topic("Key not found"),
        unknown_topic("Topic has no channel, should init at least one for the new topic"),
    ):
        assert answer.is_redesigned
    for answer in (parse_lookup(reply(producers=[OLD_PEER])), unknown_topic("TOPIC_NOT_FOUND"), parse_lookup(b"")):
        assert not answer.is_redesigned


def test_addresses_of_peers_and_one_without_a_usable_address_is_left_out() -> None:
    for change in (
        {"tcp_port": 0}, {"tcp_port": 70000}, {"tcp_port": -1}, {"broadcast_address": ""}, {"broadcast_address": "a b"},
        {"broadcast_address": "evil\r\nhost"}, {"broadcast_address": "x" * 300},
    ):  # fmt: skip
        answer = parse_lookup(reply(producers=[{**OLD_PEER, **change}, NEW_PEER]))
        assert answer.producers == (NEW_NSQD,), change
    for text in ("::1", "[::1]"):
        peer = {**OLD_PEER, "broadcast_address": text, "http_port": 0}
        (found,) = parse_lookup(reply(producers=[peer])).producers
        assert (found.tcp, found.http) == (Address("::1", 4150), None)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>hello</html>", b"OK", b"[]", b"null", b"42", b'"text"', b"{", b"\xff\xfe", b"{}", b'{"hello": "world"}',
        b'{"x":' + b"[" * 200_000, b'{"producers": ["\xff"]}', b'{"status_code": 200, "data": {',
        reply(producers={}), reply(producers=["10.0.0.1:4150"]), reply(producers=[{**OLD_PEER, "tcp_port": "4150"}]),
        reply(producers=[{**OLD_PEER, "broadcast_address": None}]), reply(producers=[{**OLD_PEER, "version": 3}]),
        reply(producers=[], channels=[1]), reply(producers=[], channels="c"),
        reply(partitions=[NEW_PEER]), reply(partitions={"zero": NEW_PEER}), reply(partitions={"0": None}),
        reply(partitions={"99999999999999999999": NEW_PEER}),
        reply(producers=[], meta={**META, "partition_num": "2"}),
        reply(producers=[], meta={**META, "partition_num": 10**9}),
        reply(producers=[], meta={**META, "partition_num": -1}),
        reply(producers=[], meta={**META, "ordered": "yes"}),
        wrapped([]), wrapped("nothing"),
    ],
)  # fmt: skip
def test_what_no_lookupd_sends_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_lookup(body)


@pytest.mark.parametrize("parse", [parse_lookup, parse_nodes])
def test_more_nsqds_than_allowed_are_refused_before_anything_is_made_of_them(parse: Any) -> None:
    body = reply(producers=[{"broadcast_address": f"h{number}", "tcp_port": 1} for number in range(11)])
    parse(body, 11)
    with pytest.raises(RemoteProtocolError, match="names 11 nsqds, more than lookupd_max_producers=10 allows"):
        parse(body, 10)


def test_more_partitions_than_there_can_be_are_refused() -> None:
    peer = {"broadcast_address": "h", "tcp_port": 1}
    body = reply(partitions={str(number): peer for number in range(MAX_PARTITIONS + 2)})
    with pytest.raises(RemoteProtocolError, match="1026 partitions"):
        parse_lookup(body, 1)


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
        *((404, body, False) for body in (b'{"message":"NOT_FOUND"}', b"404 page not found", b"", b'{"message":1}')),
        *((status, b'{"message":"TOPIC_NOT_FOUND"}', False) for status in (400, None)),
        (500, wrapped(None, 500, "INTERNAL_ERROR"), False),
    ],
)
def test_an_unknown_topic_is_told_from_other_errors(status: int | None, body: bytes, expected: bool) -> None:
    assert is_unknown_topic(status, error_text(body)) is expected


def test_the_text_of_an_error_is_short() -> None:
    assert error_text(b'{"message":"MSG_EMPTY"}') == "MSG_EMPTY"
    assert error_text(wrapped(None, 500, "BAD")) == "BAD"
    assert error_text(b" 404 page not found\n") == "404 page not found"
    assert len(error_text("é".encode() * 10_000)) == 200
    text = error_text(b'{"message":"' + b"x" * 10_000_000 + b'"}')  # of a huge one its beginning
    assert text.startswith('{"message":"xxx')
    assert len(text) == MAX_ERROR_TEXT


def test_nodes_are_every_nsqd_once() -> None:
    node = {**OLD_PEER, "topics": ["t"], "tombstones": [False]}
    assert parse_nodes(reply(producers=[node, NEW_PEER, node])) == (NEW_NSQD, OLD_NSQD)
    assert parse_nodes(wrapped({"producers": [node]})) == (OLD_NSQD,)
    assert parse_nodes(reply(producers=None)) == ()


@pytest.mark.parametrize("port", ["none", "9" * 5000, "99999", "-1", "1e3", "٣٣"])
def test_listlookup_gives_the_http_addresses_that_can_be_used(port: str) -> None:
    node = {"ID": "127.0.0.1:33162:33160:nsqlookup", "NodeIP": "127.0.0.1", "TcpPort": "33160", "HttpPort": "33161"}
    body = reply(lookupdnodes=[node, {**node, "HttpPort": port}, {**node, "NodeIP": ""}], lookupdleader=node)
    assert parse_listlookup(body) == (Address("127.0.0.1", 33161),)
    assert parse_listlookup(b"") == parse_listlookup(wrapped(None)) == ()


def described(number: int, connection: int) -> dict[str, Any]:
    """An nsqd as an original lookupd names it, which adds the address of its own connection."""
    return {**OLD_PEER, "remote_address": f"10.0.0.1:{connection}", "broadcast_address": f"10.0.0.{number}"}


def test_neither_the_order_nor_the_connections_of_a_lookupd_make_another_answer() -> None:
    numbers = list(range(1, 30))
    first = parse_lookup(reply(producers=[described(each, 50001) for each in numbers]))
    second = parse_lookup(reply(producers=[described(each, 50002) for each in reversed(numbers)]))
    assert first == second
    assert [nsqd.tcp for nsqd in first.producers] == sorted(nsqd.tcp for nsqd in first.producers)
    # The very same objects: what is compared at each poll of each topic is one pointer an nsqd.
    assert all(one is other for one, other in zip(first.producers, second.producers, strict=True))
    long = {**described(1, 50001), "hostname": "h" * 2000}  # too long to be remembered
    assert parse_lookup(reply(producers=[long])).producers[0].hostname == "h" * 2000


# All answers


def test_answers_are_united_and_the_majority_names_the_leader() -> None:
    first = LookupAnswer(("b",), (nsqd(2), nsqd(1)))
    merged = merge([first, LookupAnswer(("a", "b"), (nsqd(1), nsqd(3))), LookupAnswer()])
    assert merged == Topology(producers=(nsqd(1), nsqd(2), nsqd(3)), channels=("a", "b"))
    with pytest.raises(AttributeError):
        merged.producers = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        merged.partitions[1] = nsqd(2)  # type: ignore[index]
    assert merge([]).is_empty
    one, two = nsqd(1, "0.3.7-HA.1"), nsqd(2, "0.3.7-HA.1")
    stale, fresh = (LookupAnswer(partitions={0: leader}, meta=Meta(1, 1)) for leader in (one, two))
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


def test_what_lookupds_say_counts_only_while_none_names_an_nsqd() -> None:
    unknown, bare = LookupAnswer(problem="Key not found"), LookupAnswer(problem="Topic has no channel, add one")
    assert merge([unknown, unknown, LookupAnswer()]).problem == "Key not found"
    assert merge([unknown]).is_unknown
    assert not merge([LookupAnswer()]).is_unknown  # it says nothing: perhaps an nsqd is only not registered yet
    both = merge([bare, unknown])
    assert (both.problem, both.is_unknown) == ("Key not found; Topic has no channel, add one", False)
    named = merge([unknown, LookupAnswer(producers=(nsqd(1),))])
    assert (named.problem, named.is_unknown) == ("", False)


def test_mixed_fleets_have_old_nsqds_beside_the_partitions() -> None:
    leader, idle, old = nsqd(1, "0.3.7-HA.1"), nsqd(2, "0.3.7-HA.1"), nsqd(3)
    topology = Topology(producers=(leader, idle, old), partitions={0: leader}, meta=Meta(2, 1))
    assert topology.unpartitioned == (old,)
    assert topology.nsqds == (leader, idle, old)
    assert not topology.is_complete
    assert Topology(producers=(old,)).unpartitioned == (old,)
    assert Topology(producers=(old,)).is_complete


# What a discovery filter leaves

A, B = nsqd(1, "", topology_zone="a", hostname="dc1-n1"), nsqd(2, "", topology_zone="b", hostname="dc2-n1")


@pytest.mark.parametrize(
    ("option", "kept"),
    [
        (None, [A, B]),
        ({"topology_zone": "a"}, [A]),
        ({"topology_zone": ["a", "b"]}, [A, B]),
        ({"hostname": "dc?-*"}, [A, B]),
        ({"hostname": "dc1-*", "topology_zone": "b"}, []),
        ({"version": "1*"}, []),
        (lambda each: each.tcp.host.endswith("2"), [B]),
    ],
    ids=["none", "one", "several", "pattern", "all-must-match", "absent-field", "function"],
)
def test_a_filter_keeps_the_nsqds_that_match(option: Any, kept: list[Nsqd]) -> None:
    keep = keep_of(LookupConfig(discovery_filter=option).discovery_filter)
    topology = Topology(producers=(A, B))
    found = topology if keep is None else only(topology, keep)
    assert list(found.producers) == kept
    assert list(found.excluded) == [each for each in (A, B) if each not in kept]


def test_a_filter_that_cannot_be_used_is_refused() -> None:
    for option, said in (
        ({}, "must be a function, a mapping"),
        ("zone=a", "must be a function, a mapping"),
        ({"zone": "a"}, "lookup lists no 'zone': use hostname, "),
        ({"hostname": [1]}, r"hostname=\[1\]: must be a pattern"),
    ):
        with pytest.raises(ConfigError, match=said):
            LookupConfig(discovery_filter=option)  # type: ignore[arg-type]


def test_partitions_that_are_left_out_are_not_taken_for_leaderless_ones() -> None:
    topology = Topology(partitions=MappingProxyType({0: A, 1: B}), meta=Meta(partition_num=2))
    found = only(topology, lambda each: each is A)
    assert dict(found.partitions) == {0: A}
    assert found.excluded_partitions == (1,)
    assert found.is_complete
    assert is_complete(found, [0, 1])
    leaderless = only(replace(topology, partitions=MappingProxyType({1: B})), lambda each: each is A)
    assert not leaderless.is_complete
    found = only(Topology(producers=(A, B)), lambda each: False)
    assert found.is_empty
    assert not found.is_unknown
    assert "none of the 2 nsqds" in found.problem
    assert "10.0.0.1:4150 (hostname dc1-n1, zone a)" in found.problem


# Which topics a consumer takes, where channels begin, and the order of partitions: all pure.


places = st.tuples(st.sampled_from("pq"), st.integers(0, 2**64 - 1) | st.integers(3, 6), st.integers(0, 2**64 - 1))


@given(st.lists(places))
def test_violations_are_the_steps_behind_the_highest_so_far_of_the_partition(positions):
    ledger, last, violations = OrderLedger(), {}, 0
    for partition, *place in positions:
        id, offset = last.get(partition, (0, 0))
        is_behind = place[0] < id or place[1] < offset
        violations += is_behind
        assert ledger.check(partition, tuple(place)) == ((id, offset) if is_behind else None)
        if not is_behind:
            last[partition] = place[0], place[1]
    assert ledger.violations == violations


MOMENT = datetime(2024, 1, 1, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("value", "wire"),
    [
        ("end", "special:-1"),
        ("special:-1", "special:-1"),
        ("timestamp:1700000000", "timestamp:1700000000"),
        (MOMENT, f"timestamp:{int(MOMENT.timestamp())}"),
        ("offset:040", "virtual_queue:40"),
        ("virtual_queue:7", "virtual_queue:7"),
        ("count:3", "msgcount:3"),
    ],
)
def test_start_positions_in_the_words_of_the_server(value, wire):
    assert parse_start(value).of(3) == wire
    by_partition = parse_start({3: value})
    assert by_partition.of(3) == wire
    assert by_partition.of(4) is None


@pytest.mark.parametrize(
    "value",
    [
        *("", "beginning", "offset:-1", "offset:x", "timestamp:", f"count:{2**63}", "timestamp:1700000000000"),
        *(5, {}, {"0": "end"}, {1024: "end"}, {0: "x"}),
    ],
)
def test_wrong_start_positions_are_refused(value):
    with pytest.raises(ConfigError, match="start_position="):
        parse_start(value)


def test_several_names_each_once_and_in_their_order() -> None:
    for topics in (["b", "a", "b"], ("b", "a"), iter(["b", "a"])):
        choice = TopicChoice(topics)
        assert (choice.names, str(choice), choice.label) == (("b", "a"), "b,a", "b+1")
    assert TopicChoice({"c", "a", "b"}).names == ("a", "b", "c"), "a set has one order"


def test_a_pattern_matches_whole_names() -> None:
    choice = TopicChoice(re.compile("orders_[a-z]+"))
    assert choice.names == ()
    listed = ["orders_eu", "orders_us", "my_orders_eu", "orders_eu2", "orders_", "orders_us", "orders_no name"]
    assert choice.matching(listed) == ["orders_eu", "orders_us"]
    assert str(choice) == "orders_[a-z]+"


def test_a_name_that_no_topic_can_have_is_left_out() -> None:
    assert TopicChoice(re.compile(".*")).matching(["a", "b c", "", "x" * 65, "e#ephemeral"]) == ["a", "e#ephemeral"]


def test_what_chooses_nothing_is_refused() -> None:
    wrong: list[Any] = ["a,b", ["a", "b c"], ["a", 1], b"a", None]
    for topic in wrong:
        with pytest.raises(NameInvalid):
            TopicChoice(topic)
    for topic in ([], re.compile(b"a")):
        with pytest.raises(ConfigError):
            TopicChoice(topic)
