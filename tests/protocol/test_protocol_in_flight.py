"""The ledger of messages in flight: what expires, when, and that it keeps nothing that was answered. A server that
ignores RDY is noticed in time, and a correct one never is, whatever happens to it."""

from __future__ import annotations

from collections import deque
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nsq_fast._codec import Message, encode_frame, encode_message
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import RemoteProtocolError
from nsq_fast.protocol.events import ServerInfo
from nsq_fast.protocol.in_flight import SLACK, STRAGGLERS, DeliveryLimit, InFlight
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


def subscribed(now: float, msg_timeout: int = 60_000) -> Session:
    session = Session(ConnectionConfig(heartbeat_interval=30))
    session.connect()
    session.receive(encode_frame(0, b'{"version":"1.3.0","msg_timeout":%d}' % msg_timeout), now)
    session.sub("t", "c")
    session.receive(encode_frame(0, b"OK"), now)
    return session


def test_a_session_expires_its_messages() -> None:
    session = subscribed(40.0, msg_timeout=2000)
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


# A server that ignores RDY

MESSAGE = encode_message(1, 1, b"0123456789abcdef", b"body")


@pytest.mark.parametrize("rdy", [0, 1, 200, 2500])
def test_a_server_that_ignores_rdy_is_found_out_within_ten_times_rdy(rdy: int) -> None:
    session = subscribed(1000.0)
    session.set_rdy(rdy)
    received = 0
    while session.failure is None:
        received += len(session.receive(MESSAGE * 10, 1000.5))
        assert received <= STRAGGLERS + 10 * rdy + 10
    with pytest.raises(RemoteProtocolError, match=r"the server ignores RDY.*highest RDY"):
        session.receive(MESSAGE, 1000.5)


def test_the_messages_before_the_verdict_are_not_lost() -> None:
    session = subscribed(1000.0)
    assert len(session.receive(MESSAGE * 100, 1000.1)) == 100
    assert isinstance(session.failure, RemoteProtocolError)


def test_whoever_answers_may_receive_without_end() -> None:
    session = subscribed(1000.0)
    session.set_rdy(100)
    for _ in range(1000):
        session.fin_many(session.receive(MESSAGE * 100, 1000.1))
    assert session.failure is None


def test_without_a_clock_nobody_is_blamed() -> None:
    session = subscribed(0.0)
    session.set_rdy(1)
    session.receive(MESSAGE * 1000)
    assert session.failure is None


def test_a_lower_rdy_leaves_room_for_what_the_higher_one_brought() -> None:
    session = subscribed(1000.0)
    session.set_rdy(500)
    session.set_rdy(0)
    session.receive(MESSAGE * 500, 1000.1)
    assert session.failure is None


def test_columns_are_counted_too() -> None:
    session = subscribed(1000.0)
    session.set_rdy(1)
    session.check_in_flight(50, 1000.1)
    assert session.failure is None
    session.check_in_flight(1000, 1000.1)
    assert "ignores RDY" in str(session.failure)


class CorrectServer:
    """What a correct server may do at worst: it sends at once whatever RDY allows, and its messages travel for long."""

    def __init__(self, msg_timeout: float, travel_time: float) -> None:
        self.now = 1000.0
        self.rdy = 0
        self.sent = 0
        self._msg_timeout = msg_timeout
        self._travel_time = travel_time
        self._in_flight: deque[tuple[float, int]] = deque()  # when each was sent, and its number
        self._travelling: deque[tuple[float, int]] = deque()
        self._answers: deque[tuple[float, list[int]]] = deque()

    def step(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        while self._answers and self._answers[0][0] <= self.now:
            answered = set(self._answers.popleft()[1])
            self._in_flight = deque(each for each in self._in_flight if each[1] not in answered)
        while self._in_flight and self._in_flight[0][0] + self._msg_timeout <= self.now:
            self._in_flight.popleft()
        while len(self._in_flight) < self.rdy:
            self.sent += 1
            self._in_flight.append((self.now, self.sent))
            self._travelling.append((self.now, self.sent))

    def empty(self) -> None:
        """What an administrator may do: the channel forgets what is in flight."""
        self._in_flight.clear()

    def arrived(self, everything: bool) -> list[int]:
        """What the client reads now: what it must have read by now, or everything that was sent."""
        due = self.now - self._travel_time
        found = []
        while self._travelling and (everything or self._travelling[0][0] <= due):
            found.append(self._travelling.popleft()[1])
        return found

    def answer(self, numbers: list[int], delay: float) -> None:
        """The client answers; the server hears of it later."""
        self._answers.append((self.now + delay, numbers))


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    msg_timeout=st.sampled_from([0.1, 1.0, 7.0, 60.0]),
    mute_time=st.sampled_from([2.0, 60.0]),
    answers=st.sampled_from([0.0, 0.5, 1.0]),
    resets=st.booleans(),
)
def test_no_correct_server_is_blamed(
    seed: int, msg_timeout: float, mute_time: float, answers: float, resets: bool
) -> None:
    random = Random(seed)
    server, limit = CorrectServer(msg_timeout, mute_time), DeliveryLimit(msg_timeout, mute_time, 1000.0)
    held: list[int] = []
    for _ in range(300):
        if random.random() < 0.1:
            server.rdy = random.choice([0, 1, 5, 40])
            limit.rdy_sent(server.rdy)
        if resets and random.random() < 0.005:
            server.empty()
        server.step(random.choice([0.0, 0.01, msg_timeout / 3, msg_timeout, mute_time / 2]))
        held += server.arrived(random.random() < 0.3)
        assert not limit.is_exceeded(len(held), server.now)
        count = int(len(held) * answers * random.random())
        answered, held = held[:count], held[count:]
        server.answer(answered, random.choice([0.0, 0.5]))
