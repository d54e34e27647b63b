"""Which topics a consumer takes, their targets, where channels begin, and the order of partitions: all pure."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsq_fast.client.ordered import OrderLedger
from nsq_fast.client.start_position import parse_start
from nsq_fast.errors import ConfigError, NameInvalid
from nsq_fast.names import Address
from nsq_fast.protocol.targets import Mode, Target, TopicChoice, impossible, is_complete, targets
from nsq_fast.protocol.topology import Meta, Nsqd, Topology

HA = "0.3.7-HA.1.13.0"
A, B, OLD = (Nsqd(Address(name, 4150), Address(name, 4151), version) for name, version in
             (("a", HA), ("b", HA), ("old", "1.3.0")))  # fmt: skip


def test_what_goes_backwards_is_found_and_what_comes_again_is_counted():
    ledger = OrderLedger()
    found = [ledger.check("p", each) for each in [(1, 0), (2, 40), (2, 40), (5, 90), (2, 40), (6, 100)]]
    assert found == [None, None, None, None, (5, 90), None]
    assert (ledger.repeated, ledger.violations) == (1, 1)


@pytest.mark.parametrize("seen", [(4, 200), (6, 99), (4, 99)])
def test_neither_the_id_nor_the_offset_may_go_backwards(seen):
    ledger = OrderLedger()
    ledger.check("p", (5, 100))
    assert ledger.check("p", seen) == (5, 100)
    assert ledger.check("p", seen) == (5, 100), "what lies behind does not move the ledger"


def test_partitions_have_nothing_to_do_with_each_other():
    ledger = OrderLedger()
    assert ledger.check("p", (5, 100)) is None
    assert ledger.check("q", (1, 0)) is None


def test_after_a_rewind_the_order_begins_there():
    ledger = OrderLedger()
    ledger.check("p", (5, 100))
    ledger.check("p", (2, 40))
    ledger.rewind("p", (2, 40))
    assert ledger.check("p", (3, 60)) is None
    assert ledger.violations == 1


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))))
def test_violations_are_the_steps_behind_the_highest_so_far(positions):
    ledger, last, violations = OrderLedger(), None, 0
    for each in positions:
        behind = last is not None and (each[0] < last[0] or each[1] < last[1])
        violations += behind
        assert (ledger.check("p", each) is not None) == behind
        last = last if behind else each
    assert ledger.violations == violations


def topology(partitions, *producers, meta=None):
    return Topology(tuple(producers), MappingProxyType(partitions), meta)


def test_one_target_for_each_partition_and_each_old_nsqd():
    found = targets(topology({0: A, 1: B, 2: A}, A, B, OLD))
    assert set(found) == {Target(A.tcp, 0), Target(B.tcp, 1), Target(A.tcp, 2), Target(OLD.tcp)}
    assert found[Target(B.tcp, 1)] is B
    assert set(targets(topology({}, OLD))) == {Target(OLD.tcp)}


def test_chosen_partitions_only():
    assert set(targets(topology({0: A, 1: B, 2: A}, A, B, OLD), (1, 7))) == {Target(B.tcp, 1)}


def test_complete_is_what_was_chosen():
    meta = Meta(partition_num=3)
    partial = topology({0: A, 1: B}, A, B, meta=meta)
    assert not is_complete(partial)
    assert is_complete(partial, (0, 1))
    assert not is_complete(partial, (0, 2))
    assert is_complete(topology({}, OLD))


def test_partitions_that_can_never_be():
    meta = Meta(partition_num=3)
    assert "0 to 2" in impossible(topology({0: A}, A, meta=meta), (3, 4))
    assert impossible(topology({0: A}, A, meta=meta), (2, 4)) is None, "it may get a leader"
    assert "no partitions" in impossible(topology({}, OLD), (0,))
    assert impossible(topology({}), (0,)) is None, "nothing is known yet"
    assert impossible(topology({0: A}, A, meta=meta), None) is None


def test_the_mode_is_learnt():
    mode = Mode().learn(Meta(partition_num=1, ordered=True, extend_support=True), None)
    assert mode == Mode(ordered=True, extend_support=True)
    assert mode.learn(None, None) == mode
    assert mode.learn(Meta(partition_num=1), None) == Mode(ordered=False, extend_support=True), "headers stay"
    assert Mode(True).learn(Meta(partition_num=1), True).ordered
    assert not Mode().learn(Meta(partition_num=1, ordered=True), False).ordered


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
    "value", ["", "beginning", "offset:-1", "offset:x", "timestamp:", 5, {}, {"0": "end"}, {0: "x"}, f"count:{2**63}"]
)
def test_wrong_start_positions_are_refused(value):
    with pytest.raises(ConfigError, match="start_position="):
        parse_start(value)


@pytest.mark.parametrize("topics", [["b", "a", "b"], ("b", "a"), iter(["b", "a"])], ids=["list", "tuple", "iterator"])
def test_several_names_each_once_and_in_their_order(topics: Any) -> None:
    choice = TopicChoice(topics)
    assert choice.names == ("b", "a")
    assert (str(choice), choice.label) == ("b,a", "b+1")


def test_a_set_has_one_order() -> None:
    assert TopicChoice({"c", "a", "b"}).names == ("a", "b", "c")


def test_a_pattern_matches_whole_names() -> None:
    choice = TopicChoice(re.compile("orders_[a-z]+"))
    assert choice.names == ()
    listed = ["orders_eu", "orders_us", "my_orders_eu", "orders_eu2", "orders_", "orders_us", "orders_no name"]
    assert choice.matching(listed) == ["orders_eu", "orders_us"]
    assert str(choice) == "orders_[a-z]+"


def test_a_name_that_no_topic_can_have_is_left_out() -> None:
    assert TopicChoice(re.compile(".*")).matching(["a", "b c", "", "x" * 65, "e#ephemeral"]) == ["a", "e#ephemeral"]


@pytest.mark.parametrize(
    ("topic", "error"),
    [
        ("a,b", NameInvalid),
        (["a", "b c"], NameInvalid),
        (["a", 1], NameInvalid),
        (b"a", NameInvalid),
        (None, NameInvalid),
        ([], ConfigError),
        (re.compile(b"a"), ConfigError),
    ],
    ids=str,
)
def test_what_chooses_nothing_is_refused(topic: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        TopicChoice(topic)
