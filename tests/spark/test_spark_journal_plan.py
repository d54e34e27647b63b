"""Offsets and plans: what a batch is made of, and never worked out a second time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsq_fast.errors import ConfigError
from nsq_fast.names import Address
from nsq_fast.spark.journal.collect import Quota
from nsq_fast.spark.journal.plan import (
    Depth,
    Offset,
    Target,
    parse_source,
    plan_rows,
    plan_slots,
    source_of,
)

SOURCES = st.dictionaries(st.sampled_from(["h:1", "h:2", "p0", "p1", "p2"]), st.integers(0, 10_000))


def test_an_offset_is_what_spark_keeps_of_it():
    offset = Offset("abc", 3, {"h:2": 5, "h:1": 7})
    assert offset.encode() == {"j": "abc", "batch": 3, "slots": {"h:1": 7, "h:2": 5}}
    assert Offset.decode(json.loads(json.dumps(offset.encode()))) == offset


def test_slots_are_numbered_alike_whatever_order_spark_gives_them_in():
    one, other = Offset("j", 1, {"h:2": 5, "h:1": 7}), Offset("j", 1, {"h:1": 7, "h:2": 5})
    assert one.numbered() == other.numbered() == [(0, "h:1", 7), (1, "h:2", 5)]


@pytest.mark.parametrize(
    "offset", [{}, {"0": 123}, {"j": "a", "batch": "x", "slots": {}}, {"j": "a", "batch": 1, "slots": 3}]
)
def test_an_offset_of_another_reader_is_refused(offset):
    with pytest.raises(ConfigError, match="no offset of the journalled reader"):
        Offset.decode(offset)


@pytest.mark.parametrize(
    ("slot", "source"),
    [("127.0.0.1:4150", Address("127.0.0.1", 4150)), ("[::1]:4150#2", Address("::1", 4150)), ("p12#1", 12), ("p0", 0)],
)
def test_a_slot_names_its_source(slot, source):
    assert parse_source(source_of(slot)) == source


@pytest.mark.parametrize(
    ("available", "limit", "planned"),
    [
        ({"a": 10, "b": 0}, None, {"a": 10}),
        ({"a": 10, "b": 20}, 100, {"a": 10, "b": 20}),
        ({"a": 100, "b": 100}, 10, {"a": 5, "b": 5}),
        ({"a": 2, "b": 100}, 10, {"a": 2, "b": 8}),
        ({"a": 100, "b": 100, "c": 100}, 10, {"a": 4, "b": 3, "c": 3}),
        ({"a": 100, "b": 100, "c": 100}, 1, {"a": 1}),
        ({}, 10, {}),
    ],
)
def test_rows_are_shared_out(available, limit, planned):
    assert plan_rows(available, limit) == planned or sum(plan_rows(available, limit).values()) == sum(planned.values())


@given(SOURCES, st.integers(1, 20_000))
def test_a_plan_uses_the_limit_and_nothing_beyond_it_or_what_there_is(available, limit):
    planned = plan_rows(available, limit)
    assert sum(planned.values()) == min(limit, sum(available.values()))
    assert all(0 < rows <= available[source] for source, rows in planned.items())


@given(SOURCES, st.integers(1, 30), st.none() | st.integers(100, 20_000))
def test_slots_have_all_rows_and_are_as_many_and_as_small_as_asked_for(available, least, most_rows):
    rows = plan_rows(available, None)
    slots = plan_slots(rows, least, most_rows)
    assert most_rows is None or max(slots.values(), default=0) <= most_rows
    assert {source: sum(n for slot, n in slots.items() if source_of(slot) == source) for source in rows} == rows
    assert len(slots) >= min(least, sum(min(n, -(-least // len(rows))) for n in rows.values())) if rows else not slots
    assert all(slots.values())


def test_a_target_is_all_that_was_there_and_is_reached_once():
    target = Target({"h:1": Depth(5, 2, 1), "h:2": Depth()})
    assert target.bound({"h:1": 100, "h:2": 9, "h:3": 9}) == {"h:1": 8, "h:2": 0, "h:3": 0}
    target.subtract({"h:1": 6})
    assert target.bound({"h:1": 100}) == {"h:1": 2}
    target.subtract({"h:1": 6, "h:3": 1})
    assert target.bound({"h:1": 100}) == {"h:1": 0}


@pytest.mark.parametrize("has_some", [False, True])
def test_a_server_that_has_no_time_limit_for_its_buffer_takes_nothing_from_the_patience(has_some: bool) -> None:
    quota = Quota(10)
    assert quota.patience(-1, has_some=has_some) == quota.patience(0, has_some=has_some)
    assert quota.patience(250, has_some=has_some) == 0.25 + quota.patience(0, has_some=has_some)
