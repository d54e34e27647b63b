"""The invariants of a soak: each kind of violation is planted once, and must be found; what is right passes."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import pytest
from chaos.clients import PUBLISH_GRACE, PUBLISH_TIMEOUT, Publishers
from chaos.invariants import (
    MAX_MORE_FDS,
    MAX_MORE_GREENLETS,
    MAX_MORE_RSS,
    PATIENCE,
    Bound,
    ConnectionSample,
    KeyOrder,
    Ledger,
    Resources,
    Stuck,
    Turns,
    decode_body,
    encode_body,
    growth,
)
from chaos.original import MENU
from chaos.redesigned import MENU as ORDERED_MENU
from chaos.schedule import CALM, plan
from hypothesis import given
from hypothesis import strategies as st

from nsq_fast.errors import BodyInvalid, NoNsqd, PublishFailed

CHANNELS = ("one", "two")


def published(count: int = 3, place: int = 0) -> Ledger:
    ledger = Ledger(CHANNELS)
    ledger.mark_stored(ledger.begin(place, count))
    return ledger


def finish(ledger: Ledger, *numbers: int, channels: tuple[str, ...] = CHANNELS) -> None:
    for channel in channels:
        for number in numbers:
            ledger.mark_finished(channel, number)


def test_a_message_answered_ok_that_one_channel_never_finished_is_lost() -> None:
    ledger = published()
    finish(ledger, 0, 1, 2, channels=("one",))
    finish(ledger, 0, 2, channels=("two",))
    assert not ledger.is_done()
    assert ledger.violations() == ["two: 1 messages answered OK were never finished: 1 (nsqd 0)"]


def test_a_message_that_came_though_its_publish_said_not_stored_is_a_ghost() -> None:
    ledger = Ledger(CHANNELS)
    first, second = ledger.begin(), ledger.begin()
    ledger.mark_refused(first)
    ledger.mark_finished("one", first[0])  # after the publish said so
    ledger.mark_finished("one", second[0])  # and before
    ledger.mark_refused(second)
    assert ledger.violations() == ["2 messages came whose publish said not stored: 0, 1"]


def test_a_killed_nsqd_takes_what_it_alone_had_and_nothing_else() -> None:
    ledger = published(2, place=0)
    ledger.mark_stored(ledger.begin(1, 2))
    finish(ledger, 0)
    ledger.mark_killed(0)
    ledger.mark_stored(ledger.begin(0, 1))  # published to it after it was started again
    assert ledger.forgiven == {"one": 1, "two": 1}
    assert ledger.lost("one") == [2, 3, 4]
    finish(ledger, 2, 3, 4)
    assert ledger.is_done()
    assert ledger.violations() == []


def raises(error: Exception) -> Callable[[], None]:
    def publish() -> None:
        raise error

    return publish


def test_the_outcome_of_a_publish_is_what_its_error_says() -> None:
    ledger = Ledger(CHANNELS)
    publishers = Publishers(ledger)
    assert publishers.record(ledger.begin(), monotonic(), lambda: b"OK")
    for error in (PublishFailed("unknown", possibly_stored=True), PublishFailed("refused"), NoNsqd("nowhere")):
        assert not publishers.record(ledger.begin(), monotonic(), raises(error))
    assert (ledger.stored, ledger.unknown, ledger.refused) == (1, 1, 2)
    assert publishers.violations == []


def test_a_publish_that_takes_too_long_is_told() -> None:
    publishers = Publishers(published())
    publishers.record((0,), monotonic() - PUBLISH_TIMEOUT - PUBLISH_GRACE - 1, lambda: b"OK")
    (told,) = publishers.violations
    assert told.startswith("a publish took ")


def test_an_error_that_a_publish_must_not_raise_is_told() -> None:
    publishers = Publishers(published())
    publishers.record((0,), monotonic(), raises(BodyInvalid("what")))
    assert publishers.violations == ["a publish raised BodyInvalid: what"]


def test_a_first_delivery_after_a_later_one_is_a_violation_of_its_key_alone() -> None:
    order = KeyOrder()
    for key, sequence in ((1, 0), (2, 0), (1, 2), (2, 1), (1, 1)):
        order.delivered(key, sequence)
    assert order.violations == ["key 1: message 1 came after 2"]


def test_handlers_side_by_side_are_seen() -> None:
    turns = Turns()
    turns.enter(0)
    turns.enter(1)
    assert turns.most == 1
    turns.enter(0)
    turns.leave(0)
    assert turns.most == 2


def connection(rdy: int = 0, in_flight: int = 0, connected: bool = True, excused: bool = False) -> ConnectionSample:
    return ConnectionSample("c", "n:1", connected, rdy, in_flight, excused)


@pytest.mark.parametrize(
    ("sample", "says"),
    [(connection(), "RDY 0, nothing in flight"), (connection(connected=False), "not connected")],
    ids=["RDY 0", "not connected"],
)
def test_a_connection_that_stays_without_messages_in_a_calm_is_stuck(sample: ConnectionSample, says: str) -> None:
    stuck = Stuck()
    stuck.sample(0.0, [sample])
    stuck.sample(50.0, [sample])  # in a storm that may be
    stuck.begin_calm(100.0)
    stuck.sample(100.0 + PATIENCE - 1, [sample])
    assert stuck.violations == []
    stuck.sample(100.0 + PATIENCE, [sample])
    stuck.sample(101.0 + PATIENCE, [sample])
    assert stuck.violations == [f"c, nsqd n:1: {says}, {PATIENCE:.0f} s into a calm"]


@pytest.mark.parametrize("well", [connection(rdy=1), connection(in_flight=1), connection(excused=True), None], ids=str)
def test_a_connection_that_works_or_may_rest_or_goes_is_not_stuck(well: ConnectionSample | None) -> None:
    stuck = Stuck()
    stuck.begin_calm(0.0)
    for now in range(0, 60, 4):
        stuck.sample(float(now), [connection()])
        stuck.sample(now + 2.0, [well] if well else [])
    assert stuck.violations == []


def test_a_bound_that_was_passed_once_is_told() -> None:
    bound = Bound("messages held", 10)
    for value in (3, 10):
        bound.sample(value)
    assert bound.violations == []
    bound.sample(11)
    bound.sample(0)
    assert bound.violations == ["messages held: 11, at most 10 allowed"]


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (Resources(10 + MAX_MORE_RSS, 5 + MAX_MORE_FDS, 7 + MAX_MORE_GREENLETS), None),
        (Resources(11 + MAX_MORE_RSS, 5, 7), "bytes of memory"),
        (Resources(10, 6 + MAX_MORE_FDS, 7), "file descriptors"),
        (Resources(10, 5, 8 + MAX_MORE_GREENLETS), "greenlets"),
    ],
    ids=["level", "memory", "descriptors", "greenlets"],
)
def test_resources_that_grow_are_told(last: Resources, says: str | None) -> None:
    found = growth(Resources(10, 5, 7), last)
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


@given(st.integers(0, 10**6), st.data())
def test_a_changed_body_gives_nothing(number: int, data: st.DataObject) -> None:
    body = bytearray(encode_body(number))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    assert decode_body(bytes(body)) is None
    assert decode_body(bytes(body[:at])) is None


# The schedule: a seed gives it whole, and it keeps its own rules

seeds = st.integers(0, 10**6)
lengths = st.floats(2 * CALM + 1, 3000)


@given(seeds, lengths, st.sampled_from([MENU, ORDERED_MENU]))
def test_a_seed_gives_the_same_faults_each_time(seed: int, seconds: float, menu: object) -> None:
    assert plan(seed, seconds, menu) == plan(seed, seconds, menu)
