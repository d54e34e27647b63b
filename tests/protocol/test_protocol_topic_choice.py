"""Which topics a consumer takes: names, or a pattern that the whole name matches."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nsq_fast.errors import ConfigError, NameInvalid
from nsq_fast.protocol.targets import TopicChoice


@pytest.mark.parametrize("topics", [["b", "a", "b"], ("b", "a"), iter(["b", "a"])], ids=["list", "tuple", "iterator"])
def test_several_names_each_once_and_in_their_order(topics: Any) -> None:
    choice = TopicChoice(topics)
    assert choice.names == ("b", "a")
    assert (str(choice), choice.label) == ("b,a", "b+1")


def test_a_set_has_one_order() -> None:
    assert TopicChoice({"c", "a", "b"}).names == ("a", "b", "c")


def test_a_pattern_matches_whole_names() -> None:
    choice = TopicChoice(re.compile("orders_[a-z]+"))
    assert choice.names == ()
    listed = ["orders_eu", "orders_us", "my_orders_eu", "orders_eu2", "orders_", "orders_us", "orders_no name"]
    assert choice.matching(listed) == ["orders_eu", "orders_us"]
    assert str(choice) == "orders_[a-z]+"


def test_a_name_that_no_topic_can_have_is_left_out() -> None:
    assert TopicChoice(re.compile(".*")).matching(["a", "b c", "", "x" * 65, "e#ephemeral"]) == ["a", "e#ephemeral"]


@pytest.mark.parametrize(
    ("topic", "error"),
    [
        ("a,b", NameInvalid),
        (["a", "b c"], NameInvalid),
        (["a", 1], NameInvalid),
        (b"a", NameInvalid),
        (None, NameInvalid),
        ([], ConfigError),
        (re.compile(b"a"), ConfigError),
    ],
    ids=str,
)
def test_what_chooses_nothing_is_refused(topic: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        TopicChoice(topic)
