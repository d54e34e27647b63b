"""The parts of the replayable reader that ask nobody: putting a range together, positions, shares, cuts, times."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsq_fast._codec import encode_message
from nsq_fast._frame import ColumnReader, Columns
from nsq_fast.client.http import Endpoint
from nsq_fast.errors import ConfigError
from nsq_fast.names import Address
from nsq_fast.spark.discovery import Nsqd
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.replay.logs import Log, Record, first_at
from nsq_fast.spark.replay.position import Identity, Position, start_of
from nsq_fast.spark.replay.reading import Assembly, Route, Run, own_channel, pieces
from nsq_fast.spark.replay.stream import share_out

NSQD = Nsqd(Address("h", 1), Endpoint("http", Address("h", 2)))
SIZES = [35, 31, 40, 31, 33, 50, 31, 36, 42, 31]
OFFSETS = [sum(SIZES[:n]) for n in range(len(SIZES))]
END = sum(SIZES)


def columns(rows: Iterable[int]) -> Columns:
    """Records of the log above, by their places."""
    frames = [encode_message(n, 1, b"%016d" % n, b"x", offset=OFFSETS[n], raw_size=SIZES[n]) for n in rows]
    return ColumnReader(detail=True).feed(b"".join(frames))


def rows_of(runs: Iterable[Run]) -> list[int]:
    """The places of the records in runs."""
    return [int(run.columns.ids[16 * n : 16 * n + 16]) for run in runs for n in range(run.first, run.stop)]


def assembled(assembly: Assembly, *chunks: Iterable[int]) -> list[int]:
    return [row for chunk in chunks for row in rows_of(assembly.add(columns(chunk)))]


# --- a range put together


def test_a_record_belongs_to_the_range_in_which_it_begins() -> None:
    cut = OFFSETS[5] + 1
    first, second = Assembly(0, cut), Assembly(cut, END)
    assert assembled(first, range(10)) == [0, 1, 2, 3, 4, 5]
    assert first.is_complete
    assert assembled(second, range(10)) == []  # only the log can tell that nothing is missing
    assert rows_of(second.skip_to(OFFSETS[6])) == [6, 7, 8, 9]


def test_what_came_too_early_waits() -> None:
    assembly = Assembly(0, END)
    assert assembled(assembly, [7, 8, 9], [3]) == []
    assert assembly.held_rows == 4
    assert assembled(assembly, [0, 1, 2], [3, 4, 5, 6]) == list(range(10))


def test_what_was_let_go_has_to_come_again() -> None:
    assembly = Assembly(0, END)
    assembled(assembly, range(5, 10))
    assembly.forget_held()
    assert assembled(assembly, range(5)) == list(range(5))
    assert not assembly.is_complete


def test_records_that_do_not_lie_on_the_others_are_no_continuation() -> None:
    assembly = Assembly(OFFSETS[3] + 5, END)
    assert assembled(assembly, [3, 4]) == []
    assert assembly.expected == OFFSETS[3] + 5


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), max_size=30))
def test_whatever_comes_each_record_is_handed_on_once_and_in_order(chunks: list[list[int]]) -> None:
    assembly = Assembly(OFFSETS[1], OFFSETS[9])
    got = assembled(assembly, *chunks)
    assert got == list(range(1, 1 + len(got)))
    got += assembled(assembly, range(10))
    assert got == list(range(1, 9))
    assert assembly.is_complete


# --- positions

OPTIONS = SourceOptions.parse({"topic": "t", "channel": "c", "lookupd_http_addresses": "a:4161,b:4161"})
IDENTITY = Identity(OPTIONS.server_names, "c")


def at(*offsets: int, **more: Any) -> Position:
    """A position in the topic of these options."""
    return Position({"t": dict(enumerate(offsets))}, **more)


def test_a_position_is_an_object_by_topic_and_partition() -> None:
    position = Position({"u": {10: 7, 2: 5}, "t": {0: 1}}, identity=IDENTITY)
    assert json.dumps(position.to_json()) == (
        '{"channel": "c", "servers": ["a:4161", "b:4161"], "offsets": {"t": {"0": 1}, "u": {"2": 5, "10": 7}}}'
    )
    assert Position.from_json(position.to_json(), OPTIONS) == position


def test_the_first_batch_begins_where_its_end_says() -> None:
    first, found_again = at(5, 6, is_initial=True), at(50, 60, is_initial=True)
    end = Position.from_json(first.until({"t": {0: 9, 1: 6}}).to_json(), OPTIONS)
    assert start_of(found_again, end) == {"t": {0: 5, 1: 6}}
    assert start_of(end, end.until({"t": {0: 12, 1: 8}})) == end.offsets
    assert end.until({"t": {0: 12, 1: 8}}) == at(12, 8)


def test_an_empty_batch_ends_where_it_begins() -> None:
    for position in (at(5), at(5, is_initial=True), at(5, begin={"t": {0: 1}})):
        assert position.until({"t": {0: 5}}) is position
    initial = at(5, is_initial=True)
    assert start_of(at(7, is_initial=True), initial) == {"t": {0: 5}}
    assert start_of(initial, initial.until({"t": {0: 8}})) == {"t": {0: 5}}


@pytest.mark.parametrize(
    "found",
    [
        {"j": "x", "slots": {}},
        {"0": "x"},
        {"0": 1, "begin": [1]},
        {"0": None},
        {"offsets": [1]},
        {"offsets": {"t": 5}},
        {"offsets": {}, "channel": "c"},
    ],
)
def test_an_offset_of_something_else_is_refused(found: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="checkpointLocation"):
        Position.from_json(found, OPTIONS)


def test_an_offset_of_an_older_version_is_read_and_completed() -> None:
    old = Position.from_json({"0": 9, "1": 6, "begin": {"0": 5, "1": 6}}, OPTIONS)
    assert old == at(9, 6, begin={"t": {0: 5, 1: 6}})
    old.check(IDENTITY, OPTIONS)
    assert old._replace(identity=IDENTITY).until({"t": {0: 10, 1: 6}}).to_json() == {
        "channel": "c",
        "servers": ["a:4161", "b:4161"],
        "offsets": {"t": {"0": 10, "1": 6}},
    }
    several = SourceOptions.parse({"topic": "t,u", "channel": "c", "lookupd_http_addresses": "a"})
    with pytest.raises(ConfigError, match="once with that topic alone"):
        Position.from_json({"0": 9}, several)


@pytest.mark.parametrize(
    ("position", "match"),
    [
        (Position({"other": {0: 5}}, identity=IDENTITY), "made with the topic 'other', which the options do not name"),
        (at(5, identity=Identity(IDENTITY.servers, "d")), "made with channel='d', and the option is channel='c'"),
        (at(5, identity=Identity(("x:4161",), "c")), "made with the servers x:4161, and the options name a:4161, b"),
    ],
)
def test_the_position_of_another_query_is_refused(position: Position, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        position.check(IDENTITY, OPTIONS)


def test_a_server_more_or_less_is_the_same_cluster() -> None:
    at(5, identity=Identity(("b:4161", "x:4161"), "c")).check(IDENTITY, OPTIONS)


def test_topics_by_pattern_are_those_of_a_checkpoint() -> None:
    pattern = SourceOptions.parse({"topicPattern": "t|u.*", "channel": "c", "lookupd_http_addresses": "a"})
    Position({"t": {0: 5}, "unity": {0: 5}}).check(IDENTITY, pattern)
    with pytest.raises(ConfigError, match="made with the topic 'tt'"):
        Position({"tt": {0: 5}}).check(IDENTITY, pattern)


# --- how far a batch goes


def log(messages: int, start: int = 0) -> Log:
    return Log(start, 10 * messages, messages, NSQD, False, False, False, {})


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 10**6), min_size=1), st.integers(1, 10**6))
def test_shares_are_fair_and_use_the_limit_up(rows: dict[int, int], limit: int) -> None:
    shares = share_out(rows, limit)
    assert sum(shares.values()) == min(limit, sum(rows.values()))
    assert all(0 <= shares[partition] <= rows[partition] for partition in rows)
    for partition, count in rows.items():
        assert shares[partition] >= limit * count // max(sum(rows.values()), limit)


# --- pieces


def ranges(starts: dict[int, int], ends: dict[int, int], minimum: int | None) -> list[tuple[int, int, int]]:
    found = pieces({"t": starts}, {"t": ends}, {}, minimum)
    assert {piece.topic for piece in found} <= {"t"}
    return [(piece.partition, piece.start, piece.end) for piece in found]


def test_a_partition_with_something_is_a_piece() -> None:
    assert ranges({0: 5, 1: 7}, {0: 9, 1: 7, 2: 3}, None) == [(0, 5, 9), (2, 0, 3)]
    assert ranges({0: 5}, {0: 5}, None) == []
    assert ranges({0: 5}, {0: 4}, 3) == []


def test_a_route_goes_with_its_piece() -> None:
    route = Route.of(log(1))
    found = pieces({}, {"t": {0: 1, 1: 1}, "u": {1: 1}}, {"t": {1: route}}, None)
    assert [(piece.topic, piece.route) for piece in found] == [("t", None), ("t", route), ("u", None)]


@given(st.integers(1, 20), st.dictionaries(st.integers(0, 5), st.integers(1, 10**6), min_size=1))
def test_pieces_are_at_least_so_many_and_make_up_the_whole(minimum: int, ends: dict[int, int]) -> None:
    found = ranges({}, ends, minimum)
    if min(ends.values()) >= minimum:
        assert len(found) >= minimum
    for partition, end in ends.items():
        own = [(start, stop) for number, start, stop in found if number == partition]
        assert [start for start, _ in own] == [0, *(stop for _, stop in own[:-1])]
        assert own[-1][1] == end


# --- times


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(-1, 52), st.integers(0, 5))
def test_the_first_record_at_a_time_is_found(times: list[int], wanted: int, forgotten: int) -> None:
    times.sort()
    records = [Record(10 * n, n + 1, at) for n, at in enumerate(times)][min(forgotten, len(times) - 1) :]
    by_number = {record.number: record for record in records}
    found = first_at(by_number.get, records[0], log(len(times)), wanted)
    assert found == next((record for record in records if record.timestamp >= wanted), None)


# --- channels


def test_a_channel_of_a_reader_has_a_name_of_its_own() -> None:
    assert own_channel("spark").startswith("spark.")
    assert own_channel("spark") != own_channel("spark")
    for name in ("c" * 64, "c#ephemeral"):
        own = own_channel(name)
        assert len(own) <= 64
        assert own.endswith("#ephemeral")
        assert own.count("#") == 1
