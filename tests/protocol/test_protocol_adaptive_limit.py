"""The limit that follows how long messages take: on handlers that the test makes, in a time that the test holds."""

from __future__ import annotations

import heapq

from hypothesis import given, settings
from hypothesis import strategies as st

from nsq_fast.protocol.adaptive_limit import SETTLE, TARGET, UNLIMITED, AdaptiveLimit

TIMEOUT = 60.0
TARGET_TIME = TARGET * TIMEOUT


class Handlers:
    """Handlers with a backlog that never ends: each takes ``seconds``, and the rest of what is in flight waits."""

    def __init__(self, workers: int, most: int) -> None:
        self.policy = AdaptiveLimit()
        self.now = 100.0
        self.most = most
        self.slowest = 0.0
        self._busy = [self.now] * workers
        self._in_flight: list[tuple[float, float]] = []

    @property
    def asked(self) -> int:
        return min(self.most, self.policy.limit)

    def run(self, messages: int, seconds: float) -> None:
        """Respond to so many messages; ``slowest`` is what the slowest of them took."""
        self.slowest = 0.0
        for _ in range(messages):
            while len(self._in_flight) < self.asked:
                ends = max(self.now, heapq.heappop(self._busy)) + seconds
                heapq.heappush(self._busy, ends)
                heapq.heappush(self._in_flight, (ends, self.now))
            self.now, received_at = heapq.heappop(self._in_flight)
            self.slowest = max(self.slowest, self.now - received_at)
            self.policy.responded([received_at], self.now, TIMEOUT, self.most)
            assert self.policy.limit >= 1


def test_quick_handlers_are_not_limited() -> None:
    handlers = Handlers(workers=4, most=2500)
    handlers.run(20_000, seconds=0.001)
    assert handlers.policy.limit == UNLIMITED


def test_slow_handlers_get_what_they_respond_to_in_time() -> None:
    handlers = Handlers(workers=4, most=2500)
    handlers.run(5000, seconds=1.0)
    assert handlers.asked <= 4 * TARGET_TIME
    handlers.run(1000, seconds=1.0)
    assert handlers.slowest <= TARGET_TIME
    assert handlers.asked >= 4  # all of them have something to do


def test_handlers_that_get_quick_again_get_all_again() -> None:
    handlers = Handlers(workers=4, most=500)
    handlers.run(2000, seconds=2.0)
    assert handlers.asked < 100
    handlers.run(20_000, seconds=0.001)
    assert handlers.policy.limit == UNLIMITED


def test_a_handler_slower_than_the_target_leaves_one() -> None:
    handlers = Handlers(workers=1, most=100)
    handlers.run(50, seconds=2 * TARGET_TIME)
    assert handlers.asked == 1


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(1, 16),
    most=st.integers(1, 2000),
    paces=st.lists(st.floats(0.0001, 3.0), min_size=1, max_size=4),
)
def test_whatever_the_pace_what_comes_settles_within_the_target(workers: int, most: int, paces: list[float]) -> None:
    handlers = Handlers(workers, most)
    for pace in paces:
        handlers.run(4 * most + 500, pace)
        handlers.run(200, pace)
        assert handlers.slowest <= TARGET_TIME + pace
        assert 1 <= handlers.asked <= most


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3000),
    st.lists(st.tuples(st.lists(st.floats(0, 100), max_size=5), st.floats(0, 5)), max_size=50),
)
def test_the_limit_stays_between_one_and_what_is_wanted(most: int, rounds: list[tuple[list[float], float]]) -> None:
    policy, now = AdaptiveLimit(), 1000.0
    for ages, pause in rounds:
        now += pause
        before = policy.limit
        changed = policy.responded([now - age for age in ages], now, TIMEOUT, most)
        assert changed is (policy.limit != before)
        assert policy.limit >= 1
        assert policy.limit < most or policy.limit == UNLIMITED


def test_the_limit_becomes_what_can_be_responded_to_in_time_at_once() -> None:
    policy = AdaptiveLimit()
    for second in range(1, 16):  # 4 a second, of many that came at 100
        assert not policy.responded([100.0] * 4, 100.0 + second, TIMEOUT, 2500)
    assert policy.responded([100.0] * 4, 116.0, TIMEOUT, 2500)
    assert policy.limit == 48  # 4 a second, for 0.8 of 15 s
    # These were asked for under the limit before, or were on their way: they say nothing of the present one.
    assert not policy.responded([100.0] * 50 + [116.0 + SETTLE / 2], 190.0, TIMEOUT, 2500)
    assert policy.limit == 48


def test_one_slow_message_among_many_quick_ones_changes_nothing() -> None:
    policy = AdaptiveLimit()
    for tenth in range(1, 300):
        assert not policy.responded([99.9 + tenth / 10] * 50, 100.0 + tenth / 10, TIMEOUT, 100)
    assert not policy.responded([100.0], 130.0, TIMEOUT, 100)
    assert policy.limit == UNLIMITED


def test_messages_that_expire_all_at_once_are_no_sign_of_speed() -> None:
    policy = AdaptiveLimit()
    assert policy.responded([100.0] * 1000, 160.0, TIMEOUT, 1000, is_expired=True)
    assert policy.limit == 1


def lowered_to_ten() -> AdaptiveLimit:
    policy = AdaptiveLimit()
    policy.responded([100.0] * 21, 124.0, TIMEOUT, 1000)
    assert policy.limit == 10
    return policy


def test_more_is_asked_for_after_a_round_with_room_and_not_before() -> None:
    policy = lowered_to_ten()
    assert not policy.responded([130.0] * 9, 131.0, TIMEOUT, 1000)
    assert policy.responded([130.0], 131.0, TIMEOUT, 1000)
    assert policy.limit == 12


def test_between_room_and_target_the_limit_stays() -> None:
    policy = lowered_to_ten()
    for start in range(130, 600, 20):
        assert not policy.responded([float(start)] * 10, start + 0.75 * TARGET_TIME, TIMEOUT, 1000)
    assert policy.limit == 10
