"""Backoff, reconnect and requeue delays under a clock and a chance that the test holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsq_fast.protocol.delays import ReconnectDelay, RequeueDelay
from nsq_fast.protocol.rdy import MOST_LEVELS, Backoff, ExponentialBackoff

chance = st.floats(0.0, 1.0, exclude_max=True)


def no_chance() -> float:
    return 0.0


def requeue_delay(**options):
    options = {"base": 1.0, "factor": 2.0, "cap": 900.0, "jitter": 0.0, "random": no_chance} | options
    return RequeueDelay(options.pop("fixed_ms", None), **options)


def test_a_failure_pauses_and_a_success_after_the_pause_ends_it():
    backoff = Backoff(128.0, random=no_chance)
    assert backoff.record(False, 0.0)
    assert backoff.is_paused(0.9)
    assert not backoff.is_paused(1.0)
    assert backoff.is_on
    assert backoff.record(True, 1.0)
    assert not backoff.is_on


def test_one_result_counts_in_a_window():
    backoff = Backoff(128.0, random=no_chance)
    backoff.record(False, 0.0)
    for _ in range(1000):
        assert not backoff.record(False, 0.5)
        assert not backoff.record(True, 0.5)
    assert backoff.level == 1


def test_recovery_from_a_long_failure_takes_a_part_of_its_last_pause():
    backoff = Backoff(128.0, random=no_chance)
    now = 0.0
    while backoff.level < 6:
        backoff.record(False, now)
        now = backoff.until
    well_at = now  # the end of a pause of 32 s: a probe, and all that follow, succeed
    while backoff.is_on:
        backoff.record(True, now)
        now = max(now, backoff.until)
    assert now - well_at == 5.0


def test_recovery_takes_no_more_steps_than_there_are_levels():
    backoff = Backoff(8.0, random=no_chance)
    now = 0.0
    for _ in range(5000):
        backoff.record(False, now)
        now = backoff.until
    successes = 0
    while backoff.is_on:
        backoff.record(True, now)
        now = backoff.until
        successes += 1
    assert successes == 3  # of four levels: a success halves the level


class Steps:
    """A strategy of a program: pauses of its own, no jitter."""

    jitter = 0.0

    def __init__(self, *pauses):
        self._pauses = pauses

    def duration(self, level):
        return self._pauses[min(level, len(self._pauses)) - 1]


def pauses_of(backoff, count):
    now, pauses = 0.0, []
    for _ in range(count):
        backoff.record(False, now)
        pauses.append(backoff.until - now)
        now = backoff.until
    return pauses


def test_a_strategy_of_ones_own_says_how_long_pauses_are():
    backoff = Backoff(8.0, random=no_chance, strategy=Steps(0.5, 3.0, 100.0))
    assert pauses_of(backoff, 4) == [0.5, 3.0, 8.0, 8.0]
    assert backoff.level == 3


def test_pauses_that_never_grow_do_not_make_recovery_endless():
    backoff = Backoff(8.0, random=no_chance, strategy=Steps(1.0))
    assert pauses_of(backoff, 1000) == [1.0] * 1000
    assert backoff.level == MOST_LEVELS


@given(chance, st.integers(1, 20))
def test_full_jitter_gives_any_pause_up_to_the_exponential_one(luck, level):
    backoff = Backoff(128.0, random=lambda: luck, strategy=ExponentialBackoff(jitter=1.0))
    backoff.level = level
    backoff.pause(0.0)
    longest = min(128.0, 2.0 ** (level - 1))
    assert 0.0 < backoff.until <= longest
    assert backoff.until == pytest.approx(longest * (1.0 - luck))


def test_zero_turns_backoff_off():
    backoff = Backoff(0.0, random=no_chance)
    assert not backoff.record(False, 0.0)
    assert not backoff.is_on


@given(st.floats(0.01, 1000.0), st.lists(st.tuples(st.booleans(), st.floats(0.0, 300.0)), max_size=60), chance)
def test_no_pause_is_longer_than_the_longest(longest, results, luck):
    backoff = Backoff(longest, random=lambda: luck)
    now = 0.0
    for success, gap in results:
        now += gap
        backoff.record(success, now)
        assert backoff.until <= now + longest
        assert backoff.level >= 0
        assert backoff.is_on or not backoff.is_paused(now)


@given(chance)
def test_reconnecting_never_ends_and_stays_below_the_cap(luck):
    reconnect = ReconnectDelay(60.0, random=lambda: luck)
    delays = [reconnect.next(0.0) for _ in range(3000)]
    assert all(0.0 < delay <= 60.0 for delay in delays)
    assert delays[-1] >= 30.0
    assert delays[0] <= 0.1


def test_a_connection_that_lasted_resets_the_pauses():
    reconnect = ReconnectDelay(60.0, random=no_chance)
    first = reconnect.next(0.0)
    for _ in range(8):
        grown = reconnect.next(0.0)
    reconnect.connected(100.0)
    assert reconnect.next(100.1) > grown  # accepted and closed at once: not good
    reconnect.connected(200.0)
    assert reconnect.next(300.0) == first


def test_a_requeue_waits_longer_with_each_attempt():
    assert [requeue_delay()(attempts) for attempts in (1, 2, 3, 4)] == [1000, 2000, 4000, 8000]


def test_a_fixed_requeue_delay_is_exact():
    assert requeue_delay(fixed_ms=0)(7) == 0
    assert requeue_delay(fixed_ms=1500, jitter=1.0)(7) == 1500


@pytest.mark.parametrize("attempts", [1, 10, 65535])
def test_a_requeue_delay_is_capped(attempts):
    assert requeue_delay(base=10.0, cap=3.0)(attempts) == 3000


@given(st.integers(0, 65535), st.floats(0, 1e6), st.floats(1, 1e6), st.floats(0, 3600), st.floats(0, 1), chance)
def test_any_requeue_delay_is_a_whole_number_in_range(attempts, base, factor, cap, jitter, luck):
    delay = requeue_delay(base=base, factor=factor, cap=cap, jitter=jitter, random=lambda: luck)(attempts)
    assert isinstance(delay, int)
    assert 0 <= delay <= cap * 1000
