"""The schedule of a soak: a seed gives it whole, and it keeps its own rules."""

from __future__ import annotations

from chaos.original import MENU
from chaos.redesigned import MENU as ORDERED_MENU
from chaos.schedule import CALM, MOST_AT_ONCE, plan
from hypothesis import given
from hypothesis import strategies as st

seeds = st.integers(0, 10**6)
lengths = st.floats(2 * CALM + 1, 3000)


@given(seeds, lengths, st.sampled_from([MENU, ORDERED_MENU]))
def test_a_seed_gives_the_same_faults_each_time(seed: int, seconds: float, menu: object) -> None:
    assert plan(seed, seconds, menu) == plan(seed, seconds, menu)


def test_seeds_differ() -> None:
    assert len({plan(seed, 300, MENU) for seed in range(20)}) == 20


@given(seeds, lengths)
def test_nothing_is_wrong_in_a_calm_and_a_run_ends_with_one(seed: int, seconds: float) -> None:
    schedule = plan(seed, seconds, MENU)
    assert schedule.calms[-1][1] == seconds
    for start, end in schedule.calms:
        assert end - start >= CALM - 1e-6
        assert not [fault for fault in schedule.faults if fault.at < end and fault.until > start + 0.11]


@given(seeds, lengths)
def test_a_target_has_one_fault_at_a_time_and_a_moment_few(seed: int, seconds: float) -> None:
    faults = plan(seed, seconds, MENU).faults
    assert list(faults) == sorted(faults)
    for fault in faults:
        others = [each for each in faults if each.at <= fault.at < each.until - 0.11]
        assert len(others) <= MOST_AT_ONCE
        assert len({each.target for each in others}) == len(others)


def test_every_kind_befalls_every_target_in_an_hour() -> None:
    happened = {(fault.kind, fault.target) for fault in plan(1, 3600, MENU).faults}
    assert happened == {(kind.name, target) for kind, targets in MENU for target in targets}
