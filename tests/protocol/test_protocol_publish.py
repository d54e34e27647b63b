"""One publish through its attempts, without sockets: every row of the table, and which publishes share a command."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nsq_fast import errors
from nsq_fast.protocol.publishing import (
    COUNT_BYTES,
    LENGTH_BYTES,
    PLAIN_BATCH,
    PublishState,
    RetryPolicy,
    State,
    WireForm,
    sent,
    stored,
    take_command,
)

POLICY = RetryPolicy(max_attempts=3, retry_unknown_outcome=True, base_delay=0.05, max_delay=2.0, awaits_leader=True)
CAREFUL = replace(POLICY, retry_unknown_outcome=False)
ATTEMPT = object()

LOST = errors.ConnectionLost("broke before the reply")
NEVER_SENT = errors.ConnectionLost("broke behind a fatal error")
NEVER_SENT.outcome_unknown = False
REFUSED = errors.Unauthorized("no")
BUSY = errors.PubTooMuchWaiting("later")
BAD = errors.BadMessage("too big")
NOT_LEADER = errors.NotLeader("")


def waiting() -> PublishState:
    return PublishState(b"body")


def on_wire() -> PublishState:
    publish = waiting()
    sent([publish], ATTEMPT)
    return publish


def in_doubt() -> PublishState:
    """It waits, and its first attempt may have been stored."""
    publish = on_wire()
    publish.attempt_failed(LOST, POLICY)
    return publish


def ended(make: Callable[[], PublishState]) -> PublishState:
    publish = make()
    publish.end(errors.PublishTimeout("late"))
    return publish


def answered() -> PublishState:
    publish = on_wire()
    assert stored([publish]) == [publish]
    return publish


@pytest.mark.parametrize(
    ("publish", "state"),
    [
        (waiting(), State.WAITING),
        (on_wire(), State.ON_WIRE),
        (in_doubt(), State.WAITING),
        (answered(), State.STORED),
        (ended(waiting), State.FAILED),
        (ended(in_doubt), State.UNKNOWN),
        (ended(on_wire), State.UNKNOWN),
    ],
)
def test_where_events_lead(publish: PublishState, state: State) -> None:
    assert publish.state is state


@pytest.mark.parametrize("make", [answered, lambda: ended(waiting), lambda: ended(in_doubt)])
def test_an_end_is_an_end(make: Callable[[], PublishState]) -> None:
    publish = make()
    state, error = publish.state, publish.error
    publish.end(REFUSED)
    assert stored([publish]) == []
    assert (publish.state, publish.error) == (state, error)


def test_what_ended_on_the_wire_is_not_stored_by_the_late_reply() -> None:
    late, other = on_wire(), on_wire()
    late.end(errors.PublishTimeout("late"))
    assert stored([late, other]) == [other]
    assert late.state is State.UNKNOWN


@pytest.mark.parametrize(
    ("error", "policy", "retry", "attempts", "may_be_stored"),
    [
        (LOST, POLICY, True, 1, True),
        (LOST, CAREFUL, False, 1, True),
        (NEVER_SENT, CAREFUL, True, 0, False),
        (REFUSED, POLICY, False, 1, False),
        (BUSY, CAREFUL, True, 1, False),
        (NOT_LEADER, CAREFUL, True, 1, False),
        (BAD, POLICY, False, 1, False),
    ],
)
def test_a_failed_attempt(
    error: errors.NsqError, policy: RetryPolicy, retry: bool, attempts: int, may_be_stored: bool
) -> None:
    publish = on_wire()
    assert publish.attempts == 1
    assert publish.may_retry(error, policy) is retry
    assert publish.attempt_failed(error, policy).retry is retry
    assert publish.state is State.WAITING
    assert (publish.attempts, publish.may_be_stored, publish.last_error) == (attempts, may_be_stored, error)
    assert not publish.is_alone


def test_attempts_are_limited_but_for_those_that_a_moving_leader_costs() -> None:
    publish = waiting()
    for number in range(1, 4):
        sent([publish], ATTEMPT)
        assert publish.attempt_failed(BUSY, POLICY).retry is (number < 3)
    publish = waiting()
    for _ in range(100):
        sent([publish], ATTEMPT)
        assert publish.attempt_failed(NOT_LEADER, POLICY).retry
    assert (publish.attempts, publish.misses) == (100, 100)


def ended_by(*, is_abrupt: bool = True, was_first: bool = True, outcome_unknown: bool = True) -> errors.ConnectionLost:
    error = errors.ConnectionLost("closed by the server")
    error.is_abrupt, error.was_first, error.outcome_unknown = is_abrupt, was_first, outcome_unknown
    return error


def retries(publish: PublishState, *servers: str, **error: bool) -> list[bool]:
    """Whether it is tried again after each of these servers ended the connection."""
    answers = []
    for server in servers:
        sent([publish], ATTEMPT)
        patient = replace(POLICY, max_attempts=100)
        answers.append(publish.attempt_failed(ended_by(**error), patient, server=server).retry)
    return answers


def test_what_two_servers_were_working_on_when_they_ended_is_sent_to_no_third() -> None:
    publish = waiting()
    assert retries(publish, "a", "a") == [True, True]  # the same one again
    assert publish.is_alone  # so that it takes no other with it
    assert retries(publish, "b") == [False]
    assert publish.ended_servers == ("a", "b")
    assert publish.possibly_stored


@pytest.mark.parametrize("kind", ["is_abrupt", "was_first", "outcome_unknown"])
def test_what_cannot_have_ended_the_server_is_not_suspected(kind: str) -> None:
    publish = waiting()
    assert retries(publish, "a", "b", "c", **{kind: False}) == [True] * 3
    assert publish.ended_servers == ()
    assert not publish.is_alone


def test_what_failed_because_of_another_in_its_command_is_tried_alone() -> None:
    publish = on_wire()
    assert publish.attempt_failed(BAD, CAREFUL, is_shared=True).retry
    assert publish.is_alone
    sent([publish], ATTEMPT)
    assert not publish.attempt_failed(BAD, CAREFUL).retry
    other = on_wire()
    assert not other.attempt_failed(REFUSED, POLICY, is_shared=True).retry


# What shares a command


@pytest.mark.parametrize(
    "take",
    [lambda: sent([None], ATTEMPT), lambda: stored([None]), lambda: take_command(deque([None]), 1, 1, 1)],  # type: ignore
)
def test_what_is_no_publish_is_an_error(take: Callable[[], object]) -> None:
    with pytest.raises(AttributeError, match="NoneType"):
        take()


def named(bodies: list[bytes], form: Any = None) -> deque[PublishState]:
    return deque(PublishState(body) if form is None else PublishState(body, form) for body in bodies)


def bodies(publishes: list[PublishState]) -> list[bytes]:
    return [publish.body for publish in publishes]


def test_nothing_is_taken_of_what_has_ended() -> None:
    queue = named([b"a", b"b"])
    for publish in queue:
        publish.end(REFUSED)
    assert take_command(queue, 10, 1000, 1000) == []
    assert not queue


def test_what_ended_is_left_out_of_the_middle() -> None:
    queue = named([b"a", b"b", b"c"])
    queue[1].end(REFUSED)
    assert bodies(take_command(queue, 10, 1000, 1000)) == [b"a", b"c"]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 10), st.integers(1, 200), st.integers(60, 200)
)
def test_a_queue_is_taken_in_order_and_within_the_limits(sizes: list[int], most: int, enough: int, limit: int) -> None:
    queue = named([b"%d" % number + bytes(size) for number, size in enumerate(sizes)])
    everything = bodies(list(queue))
    taken = []
    while queue:
        command = take_command(queue, most, enough, limit)
        assert 1 <= len(command) <= most
        total = COUNT_BYTES + sum(LENGTH_BYTES + len(publish.body) for publish in command)
        assert total <= limit or len(command) == 1
        assert total - LENGTH_BYTES - len(command[-1].body) < enough or len(command) == 1
        taken += bodies(command)
    assert taken == everything


def test_kinds_do_not_share_a_command_and_some_share_none() -> None:
    header = WireForm("PUB_EXT", header=b"{}")
    queue = named([b"a", b"b"]) + named([b"c", b"d"], header)
    queue += named([b"e"], replace(header, is_traced=True)) + named([b"f"], WireForm("DPUB", defer=5)) + named([b"g"])
    groups = []
    while queue:
        groups.append(bodies(take_command(queue, 10, 1000, 1000)))
    assert groups == [[b"a", b"b"], [b"c", b"d"], [b"e"], [b"f"], [b"g"]]


def test_a_batch_of_its_own_is_never_taken_apart_or_joined() -> None:
    queue = named([b"a"]) + named([[b"b", b"c"]], PLAIN_BATCH) + named([b"d"])  # type: ignore[list-item]
    assert bodies(take_command(queue, 10, 1000, 1000)) == [b"a"]
    assert bodies(take_command(queue, 10, 1, 1)) == [[b"b", b"c"]]
    assert bodies(take_command(queue, 10, 1000, 1000)) == [b"d"]
