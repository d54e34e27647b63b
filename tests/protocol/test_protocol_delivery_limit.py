"""A server that ignores RDY is noticed in time, and a correct one never is, whatever happens to it."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsq_fast._codec import encode_frame, encode_message
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import RemoteProtocolError
from nsq_fast.protocol.in_flight import STRAGGLERS, DeliveryLimit
from nsq_fast.protocol.session import Session

MESSAGE = encode_message(1, 1, b"0123456789abcdef", b"body")


def subscribed(now: float) -> Session:
    session = Session(ConnectionConfig(heartbeat_interval=30))
    session.connect()
    session.receive(encode_frame(0, b'{"version":"1.3.0","msg_timeout":60000}'), now)
    session.sub("t", "c")
    session.receive(encode_frame(0, b"OK"), now)
    return session


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
