"""How publishes are shared out between two clusters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nsq_fast.protocol.gradation import Gradation, bucket_of

KEYS = [f"key-{number}" for number in range(5000)]


@given(st.one_of(st.text(), st.binary(), st.integers()), st.floats(0, 100), st.floats(0, 100))
def test_a_key_moves_once_while_the_percentage_grows(key: str | bytes | int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert Gradation(high).takes_key(key) or not Gradation(low).takes_key(key)
    assert not Gradation(0).takes_key(key)
    assert Gradation(100).takes_key(key)


def test_keys_are_shared_out_as_the_percentage_says() -> None:
    moved = sum(Gradation(25).takes_key(key) for key in KEYS)
    assert 1100 < moved < 1400
    assert bucket_of("key") == bucket_of(b"key")


@given(st.integers(0, 100), st.integers(0, 300))
def test_of_any_hundred_in_a_row_as_many_move_as_the_percentage_says(percent: int, first: int) -> None:
    gradation = Gradation(percent)
    taken = [gradation.takes_next() for _ in range(first + 100)]
    assert sum(taken[first:]) == percent
