"""The retry table: every row, the limits, and the pauses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nsq_fast import errors
from nsq_fast.protocol.publishing import RetryPolicy, Verdict, classify, decide, publish_failed, retry_delay

POLICY = RetryPolicy(max_attempts=3, retry_unknown_outcome=True, base_delay=0.05, max_delay=2.0)
CAREFUL = replace(POLICY, retry_unknown_outcome=False)

REFUSED = Verdict(retry=False)
BLAMED = Verdict(retry=False, splits=True)
MOVES = Verdict(retry=True, pause=True, refresh=True, leader=True)
ROWS = [
    (errors.BadMessage("x"), BLAMED),
    (errors.BadTopic("x"), REFUSED),
    (errors.BadBody("x"), BLAMED),
    (errors.Invalid("x"), REFUSED),
    (errors.BadPartition("x"), REFUSED),
    (errors.Unauthorized("x"), REFUSED),
    (errors.AuthFirst("x"), REFUSED),
    (errors.ExtNotSupported("x"), REFUSED),
    (errors.HeaderInvalid("x"), REFUSED),
    (errors.TraceIdInvalid("x"), REFUSED),
    (errors.ServerError("x", code="E_NEVER_SEEN"), REFUSED),
    (errors.BodyInvalid("x"), REFUSED),
    (errors.LocalProtocolError("x"), REFUSED),
    (ValueError("x"), REFUSED),
    (errors.PubTooMuchWaiting("x"), Verdict(retry=True, pause=True)),
    (errors.PubFailed("x"), Verdict(retry=True, pause=True, possibly_stored=True)),
    (errors.MpubFailed("x"), Verdict(retry=True, pause=True, possibly_stored=True)),
    (errors.NotLeader(""), Verdict(retry=True, pause=True, refresh=True, leader=True)),
    (errors.TopicNotExist(""), Verdict(retry=True, pause=True, refresh=True, leader=True)),
    (errors.NotWritable(""), Verdict(retry=True, pause=True, refresh=True, possibly_stored=True, leader=True)),
    # The server did not get the whole command, or stored nothing: another one may take it.
    (errors.BadMessage("PUB failed to read message body"), Verdict(retry=True)),
    (errors.BadMessage("PUB failed to read message body size"), Verdict(retry=True)),
    (errors.BadMessage("DPUB failed to read message body"), Verdict(retry=True)),
    (errors.BadMessage("MPUB failed to read message(17) body size"), Verdict(retry=True)),
    (errors.BadMessage("MPUB failed to read message body"), Verdict(retry=True)),
    (errors.BadMessage("failed to read message body"), Verdict(retry=True)),
    (errors.BadBody("MPUB failed to read body size"), Verdict(retry=True)),
    (errors.BadBody("MPUB failed to read message count"), Verdict(retry=True)),
    (errors.BadBody("failed to read body size"), Verdict(retry=True)),
    (errors.PubFailed("PUB failed exiting"), Verdict(retry=True, pause=True)),
    (errors.DpubFailed("DPUB failed exiting"), Verdict(retry=True, pause=True)),
    (errors.MpubFailed("MPUB failed exiting"), Verdict(retry=True, pause=True, possibly_stored=True)),
    (errors.PubFailed("exiting"), MOVES),
    (errors.MpubFailed("exiting"), MOVES),
    (errors.PubFailed("ErrType:9 ErrCode:0 : exiting"), MOVES),
    (errors.PubFailed("pub to wait channel timeout"), MOVES),
    (errors.MpubFailed("pub timeout while pop wait queue"), MOVES),
    (errors.PubFailed("topic coordinator is exiting"), Verdict(retry=True, pause=True, possibly_stored=True)),
    (errors.PubFailed("invalid message write size (1048603) maxMsgSize=1048602"), BLAMED),
    (errors.MpubFailed("ErrType:9 ErrCode:0 : invalid message write size (9) maxMsgSize=8"), BLAMED),
    (errors.AuthFailed("AUTH failed"), Verdict(retry=True, pause=True)),
    (errors.AuthFailed("x"), REFUSED),
    (errors.BadMessage("PUB message too big 2 > 1"), BLAMED),
    (errors.BadMessage("MPUB invalid message(1) body size 0"), BLAMED),
    (errors.ConnectionLost("x"), Verdict(retry=True, refresh=True, possibly_stored=True)),
    (errors.HeartbeatMissed("x"), Verdict(retry=True, refresh=True, possibly_stored=True)),
    (errors.RemoteProtocolError("x"), REFUSED),
]


@pytest.mark.parametrize(("error", "expected"), ROWS, ids=lambda value: type(value).__name__)
def test_each_error_has_its_row(error: Exception, expected: Verdict) -> None:
    assert classify(error) == expected
    assert decide(error, 1, POLICY) == expected


def test_what_the_server_never_executed_is_retried_without_using_up_an_attempt() -> None:
    for attempts in (1, 3, 50):
        for policy in (POLICY, CAREFUL):
            error = errors.ConnectionLost("x")
            error.outcome_unknown = False
            verdict = decide(error, attempts, policy)
            assert verdict.retry
            assert not verdict.possibly_stored
            assert not verdict.counts


def test_moves_of_the_leader_have_no_limit_but_time() -> None:
    patient = replace(POLICY, awaits_leader=True)
    assert decide(errors.NotLeader(""), 1000, patient, misses=999).retry
    assert decide(errors.PubFailed("exiting"), 1000, patient, misses=999).retry
    assert not decide(errors.NotLeader(""), 3, POLICY).retry  # without lookup nobody says where it went
    assert decide(errors.PubFailed("x"), 6, patient, misses=4).retry
    assert not decide(errors.PubFailed("x"), 7, patient, misses=4).retry
    assert not decide(errors.NotWritable(""), 1, replace(patient, retry_unknown_outcome=False)).retry


@pytest.mark.parametrize("error", [errors.ConnectionLost("x"), errors.PubFailed("x"), errors.NotWritable("")])
def test_an_unknown_outcome_is_retried_only_where_allowed(error: Exception) -> None:
    verdict = decide(error, 1, CAREFUL)
    assert not verdict.retry
    assert verdict.possibly_stored


@given(attempts=st.integers(1, 10_000), share=st.floats(0, 1, exclude_max=True))
def test_pauses_grow_stay_below_the_cap_and_keep_most_of_their_length(attempts: int, share: float) -> None:
    full = retry_delay(attempts, POLICY, lambda: 0.0)
    assert full == min(2.0, 0.05 * 2.0 ** min(attempts - 1, 64))
    assert 0.8 * full - 1e-9 <= retry_delay(attempts, POLICY, lambda: share) <= full


def test_a_leader_is_asked_for_each_second_at_least() -> None:
    assert retry_delay(50, POLICY, lambda: 0.0) == 2.0
    assert retry_delay(50, POLICY, lambda: 0.0, for_leader=True) == 1.0
    assert retry_delay(50, replace(POLICY, max_delay=0.3), lambda: 0.0, for_leader=True) == 0.3


def test_the_error_names_the_topic_the_attempts_and_the_cause() -> None:
    cause = errors.PubFailed("disk full")
    error = publish_failed("orders", cause, 3, True)
    assert isinstance(error, errors.PublishFailed)
    assert error.__cause__ is cause
    assert (error.attempts, error.possibly_stored) == (3, True)
    assert str(error) == (
        "publish to 'orders' failed after 3 attempts: E_PUB_FAILED disk full; it may have been stored all the same"
    )
