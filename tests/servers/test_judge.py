"""The judge of the scenarios sees what it is there to see."""

from __future__ import annotations

from support.judge import REDELIVERED, REQUEUED, STORED_TWICE, Judge, body

from nsq_fast import Message


def deliver(judge: Judge, number: int, internal_id: int, connection: object = None) -> None:
    message = Message(0, 1, internal_id.to_bytes(8, "big") + bytes(8), body(7, number))
    message.responder = connection
    judge.handle(None, message)


def test_it_names_what_was_lost() -> None:
    judge = Judge()
    for number in range(3):
        judge.was_stored(7, number)
    deliver(judge, 0, 10)
    deliver(judge, 2, 12)
    assert judge.verdict().lost == 1
    assert judge.missing_examples() == [(7, 1)]


def test_a_message_after_a_later_one_is_a_violation() -> None:
    judge = Judge()
    for number in (0, 2, 1, 3):
        deliver(judge, number, number)
    assert judge.verdict().violations == [(7, 1, 2)]


def test_a_message_again_is_a_duplicate_with_a_cause() -> None:
    judge, first, second = Judge(), object(), object()
    deliver(judge, 0, 10, first)
    deliver(judge, 1, 11, first)
    deliver(judge, 0, 10, first)
    deliver(judge, 0, 10, second)
    deliver(judge, 1, 12, second)
    verdict = judge.verdict()
    assert verdict.duplicates == {REQUEUED: 1, REDELIVERED: 1, STORED_TWICE: 1}
    assert not verdict.violations
    assert (verdict.handled, verdict.distinct, verdict.unexpected) == (5, 2, 2)
