"""The window of idempotence keys: copies are told, the first message of a key never is one, memory has a bound."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from nsq_fast.protocol.publishing import SeenKeys


def test_another_message_with_the_key_is_a_copy_and_the_first_is_none_however_often_it_comes() -> None:
    seen = SeenKeys(10)
    assert [seen.is_copy("t", "k", each) for each in (b"1", b"2", b"1", b"3", b"2")] == [False, True, False, True, True]


@given(
    st.lists(st.tuples(st.sampled_from("tu"), st.sampled_from("abcde"), st.sampled_from([b"1", b"2", b"3"]))),
    st.integers(1, 4),
)
def test_it_remembers_the_keys_that_came_last(messages: list[tuple[str, str, bytes]], limit: int) -> None:
    """Of each topic by itself, and no more of them than the limit."""
    seen, model = SeenKeys(limit), OrderedDict[tuple[str, str], bytes]()
    for topic, key, message_id in messages:
        first = model.setdefault((topic, key), message_id)
        assert seen.is_copy(topic, key, message_id) == (first != message_id)
        if len(model) > limit:
            model.popitem(last=False)
        assert len(seen) == len(model) <= limit
