"""The window of idempotence keys: copies are told, the first message of a key never is one, memory has a bound."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsq_fast.protocol.publishing import SeenKeys


def test_another_message_with_the_key_is_a_copy_and_the_first_is_none_however_often_it_comes() -> None:
    seen = SeenKeys(10)
    assert [seen.is_copy("t", "k", each) for each in (b"1", b"2", b"1", b"3", b"2")] == [False, True, False, True, True]


def test_topics_have_keys_of_their_own() -> None:
    seen = SeenKeys(10)
    assert not seen.is_copy("t", "k", b"1")
    assert not seen.is_copy("u", "k", b"2")
    assert seen.is_copy("t", "k", b"2")


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from([b"1", b"2", b"3"]))), st.integers(1, 4))
def test_it_remembers_the_keys_that_came_last(messages: list[tuple[str, bytes]], limit: int) -> None:
    seen, model = SeenKeys(limit), OrderedDict[str, bytes]()
    for key, message_id in messages:
        first = model.setdefault(key, message_id)
        assert seen.is_copy("t", key, message_id) == (first != message_id)
        if len(model) > limit:
            model.popitem(last=False)
        assert len(seen) == len(model) <= limit


@pytest.mark.parametrize("limit", [1, 1000])
def test_a_long_run_keeps_no_more_than_the_limit(limit: int) -> None:
    seen = SeenKeys(limit)
    for number in range(20_000):
        assert not seen.is_copy("t", f"{number}", b"%d" % number)
        assert seen.is_copy("t", f"{number}", b"another")
    assert len(seen) == limit
