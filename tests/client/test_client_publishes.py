"""One publish without sockets: through its attempts, and which publishes share a command."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nsq_fast import errors
from nsq_fast._publish_path import COUNT_BYTES, LENGTH_BYTES, Command, take_command
from nsq_fast.client.publishes import Publish
from nsq_fast.protocol.publishing import PLAIN, RetryPolicy

POLICY = RetryPolicy(max_attempts=3, retry_unknown_outcome=True, base_delay=0.05, max_delay=2.0)
CAREFUL = replace(POLICY, retry_unknown_outcome=False)

# One publish through its attempts

PATIENT = replace(POLICY, awaits_leader=True)
ATTEMPT = Command()

LOST = errors.ConnectionLost("broke before the reply")
NEVER_SENT = errors.ConnectionLost("broke behind a fatal error")
NEVER_SENT.outcome_unknown = False
REFUSED = errors.Unauthorized("no")
BUSY = errors.PubTooMuchWaiting("later")
BAD = errors.BadMessage("too big")
NOT_LEADER = errors.NotLeader("")


def publish_of(body: bytes, form: Any = PLAIN) -> Publish:
    return Publish(None, body, inf, form)


def waiting() -> Publish:
    return publish_of(b"body")


def on_wire() -> Publish:
    publish = waiting()
    publish.attempt = ATTEMPT
    return publish


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
    assert not publish.done
    assert publish.attempt is None
    assert (publish.attempts, publish.may_be_stored, publish.last_error) == (attempts, may_be_stored, error)
    assert not publish.is_alone


def test_attempts_are_limited_but_for_those_that_a_moving_leader_costs() -> None:
    publish = waiting()
    for number in range(1, 4):
        publish.attempt = ATTEMPT
        assert publish.attempt_failed(BUSY, POLICY).retry is (number < 3)
    publish = waiting()
    for _ in range(100):
        publish.attempt = ATTEMPT
        assert publish.attempt_failed(NOT_LEADER, PATIENT).retry
    assert (publish.attempts, publish.misses) == (100, 100)


def ended_by(
    *, is_abrupt: bool = True, was_first: bool = True, outcome_unknown: bool = True, waited: float = 0.0
) -> errors.ConnectionLost:
    error = errors.ConnectionLost("closed by the server")
    error.is_abrupt, error.was_first, error.outcome_unknown = is_abrupt, was_first, outcome_unknown
    error.waited = waited
    return error


def retries(publish: Publish, *servers: str, **error: Any) -> list[bool]:
    """Whether it is tried again after each of these servers ended the connection."""
    answers = []
    for server in servers:
        publish.attempt = ATTEMPT
        patient = replace(POLICY, max_attempts=100)
        answers.append(publish.attempt_failed(ended_by(**error), patient, server=server).retry)
    return answers


def test_attempts_that_a_server_ended_for_another_reason_than_the_publish_are_not_limited() -> None:
    publish = waiting()
    for _ in range(100):
        publish.attempt = ATTEMPT
        assert publish.attempt_failed(ended_by(was_first=False), POLICY, server="a").retry
        publish.attempt = ATTEMPT
        assert publish.attempt_failed(ended_by(waited=1.5), POLICY, server="a").retry
    careful = waiting()
    careful.attempt = ATTEMPT
    assert not careful.attempt_failed(ended_by(was_first=False), CAREFUL).retry  # it may be stored all the same


def test_a_server_that_ends_connection_after_connection_uses_up_one_attempt() -> None:
    publish = waiting()
    pauses = []
    for _ in range(20):
        publish.attempt = ATTEMPT
        verdict = publish.attempt_failed(ended_by(), POLICY, server="a")
        assert verdict.retry
        pauses.append(verdict.pause)
    assert pauses == [False] + [True] * 19  # it is not asked again and again at once
    assert publish.attempts - publish.misses == 1
    for number in range(2, 4):  # of other failures the limit is what it was
        publish.attempt = ATTEMPT
        assert publish.attempt_failed(LOST, POLICY, server="a").retry is (number < 3)


@pytest.mark.parametrize("kind", ["is_abrupt", "was_first", "outcome_unknown", "waited"])
def test_what_cannot_have_ended_the_server_is_not_suspected(kind: str) -> None:
    publish = waiting()
    assert retries(publish, "a", "b", "c", **{kind: 2.0 if kind == "waited" else False}) == [True] * 3
    assert publish.ended_servers == ()
    assert not publish.is_alone


# What shares a command


def named(bodies: list[bytes], form: Any = None) -> deque[Publish]:
    return deque(publish_of(body, form or PLAIN) for body in bodies)


def bodies(publishes: list[Publish]) -> list[bytes]:
    return [publish.body for publish in publishes]


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
