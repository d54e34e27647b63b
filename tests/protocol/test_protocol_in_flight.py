"""The ledger of messages in flight: what expires, when, and that it keeps nothing that was answered."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nsq_fast._codec import Message, encode_frame, encode_message
from nsq_fast.config import ConnectionConfig
from nsq_fast.protocol.events import ServerInfo
from nsq_fast.protocol.in_flight import SLACK, InFlight
from nsq_fast.protocol.session import Session

TIMEOUT, MAX_TIMEOUT = 60.0, 900.0


def make(number: int, now: float) -> Message:
    return Message(1, 1, b"%016x" % number, b"", received_at=now)


def batch(ledger: InFlight, count: int, now: float) -> list[Message]:
    messages = [make(number, now) for number in range(count)]
    ledger.received(list(messages))
    return messages


def answer(ledger: InFlight, *messages: Message) -> None:
    for message in messages:
        message.mark_responded()
    ledger.answered(messages)


def test_what_is_not_answered_expires_at_its_deadline_and_what_is_answered_does_not() -> None:
    ledger = InFlight()
    first, second, third = batch(ledger, 3, 100.0)
    answer(ledger, second)
    assert ledger.next_deadline == 160.0
    assert ledger.expire(159.9) == []
    assert ledger.count == 2
    assert ledger.expire(160.0) == [first, third]
    assert (ledger.count, ledger.next_deadline) == (0, inf)
    assert [each.has_expired() for each in (first, second, third)] == [True, False, True]


def test_finish_makes_one_buffer_and_takes_the_messages_off_what_is_in_flight() -> None:
    ledger = InFlight()
    first, second, third = batch(ledger, 3, 0.0)
    assert ledger.received([make(9, 0.0)]) == 4
    assert ledger.finish((third, first)) == b"FIN %b\nFIN %b\n" % (third.id, first.id)
    assert ledger.count == 2
    assert [message.has_responded() for message in (first, second, third)] == [True, False, True]
    assert [message.id for message in ledger.pending()] == [second.id, b"%016x" % 9]


def test_a_finish_that_cannot_be_written_changes_nothing() -> None:
    ledger = InFlight()
    (message,) = batch(ledger, 1, 0.0)
    with pytest.raises(TypeError, match="messages must be a Message or bytes"):
        ledger.finish([message, None])  # type: ignore[list-item]
    assert (ledger.count, message.has_responded(), ledger.pending()) == (1, False, [message])


def test_touch_moves_the_deadline_up_to_the_longest_time_allowed() -> None:
    ledger = InFlight()
    ledger.identified(ServerInfo(msg_timeout_ms=1000, max_msg_timeout_ms=2500))
    message, other = batch(ledger, 2, 10.0)
    ledger.touched(message, 10.9)
    assert ledger.expire(11.0) == [other]
    assert ledger.next_deadline == pytest.approx(11.9)
    ledger.touched(message, 11.8)
    assert ledger.deadline(message) == 12.5, "no later than 2.5 s after it came"
    assert ledger.expire(12.4) == []
    assert ledger.count == 1
    assert ledger.expire(12.5) == [message]
    ledger.touched(message, 12.6)
    assert ledger.next_deadline == inf, "an expired message stays expired"


def test_a_message_that_stands_for_another_expires_in_its_place() -> None:
    ledger = InFlight()
    (came,) = batch(ledger, 1, 0.0)
    came.mark_responded()
    readable = make(0, 0.0)
    ledger.follow(readable)
    assert ledger.count == 1
    assert ledger.expire(60.0) == [readable]
    assert ledger.count == 0


def test_abandoned_messages_are_those_that_nobody_holds() -> None:
    ledger = InFlight()
    kept = batch(ledger, 3, 0.0)[1:]
    assert [message.id for message in ledger.unreachable()] == [b"%016x" % 0]
    assert len(kept) == 2


def test_the_ledger_keeps_no_answered_messages() -> None:
    ledger = InFlight()
    pending = batch(ledger, 5, 0.0)
    for now in range(1000):
        answer(ledger, *batch(ledger, 10, float(now)))
    assert len(ledger.pending()) == len(pending) == ledger.count
    answer(ledger, *batch(ledger, 10, 1000.0))
    assert len(ledger) <= 2 * (5 + 10) + SLACK


def test_a_session_expires_its_messages() -> None:
    session = Session(ConnectionConfig())
    session.connect()
    session.receive(encode_frame(0, b'{"version":"1.3.0","msg_timeout":2000}'))
    session.sub("t", "c")
    session.receive(encode_frame(0, b"OK"))
    data = b"".join(encode_message(1, 1, b"%016x" % number, b"") for number in range(3))
    messages = session.receive(data + encode_frame(0, b"_heartbeat_"), 50.0)[:3]
    assert session.ledger.next_deadline == 52.0
    session.touch(messages[0], 51.0)
    session.fin(messages[1])
    assert messages[1].has_responded()
    assert session.expire(52.0) == [messages[2]]
    assert session.in_flight == 1
    session.fin(messages[2])
    assert session.in_flight == 1
    session.req(messages[0], 0)
    assert session.in_flight == 0


class Ledger(RuleBasedStateMachine):
    """Against a ledger that looks at every message each time."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = InFlight()
        self.now = 0.0
        self.deadlines: dict[Message, float] = {}
        self.gone: list[Message] = []

    @rule(count=st.integers(1, 40))
    def receive(self, count: int) -> None:
        self.deadlines |= dict.fromkeys(batch(self.ledger, count, self.now), self.now + TIMEOUT)

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.deadlines:
            some = data.draw(st.lists(st.sampled_from(list(self.deadlines)), unique=True))
            answer(self.ledger, *some)
            for message in some:
                del self.deadlines[message]

    @rule(data=st.data())
    def answer_late(self, data: st.DataObject) -> None:
        if self.gone:
            answer(self.ledger, self.gone.pop(data.draw(st.integers(0, len(self.gone) - 1))))

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        if self.deadlines:
            for message in data.draw(st.lists(st.sampled_from(list(self.deadlines)), unique=True)):
                self.ledger.touched(message, self.now)
                self.deadlines[message] = min(self.now + TIMEOUT, message.received_at + MAX_TIMEOUT)

    @rule(seconds=st.floats(0.0, 70.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = {message for message, deadline in self.deadlines.items() if deadline <= self.now}
        expired = self.ledger.expire(self.now)
        assert set(expired) == due
        for message in due:
            del self.deadlines[message]
        self.gone += expired

    @invariant()
    def counts_what_is_in_flight(self) -> None:
        assert self.ledger.count == len(self.deadlines)
        assert self.ledger.next_deadline <= min(self.deadlines.values(), default=inf)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40)
