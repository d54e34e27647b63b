"""Topic and channel names, and addresses."""

import pytest

from nsq_fast.errors import ConfigError, NameInvalid
from nsq_fast.names import Address, check_channel, check_topic, is_ephemeral, parse_address, parse_addresses


@pytest.mark.parametrize("name", ["a", "a" * 64, "A.b_c-9", "x#ephemeral", "a" * 54 + "#ephemeral"])
def test_legal_names(name):
    assert check_topic(name) == name
    assert check_channel(name) == name


@pytest.mark.parametrize(
    "name", ["", "a" * 65, "a b", "a\n", "a#tmp", "#ephemeral", "a" * 55 + "#ephemeral", "ü", b"a", None]
)
def test_illegal_names_are_refused_with_their_kind(name):
    with pytest.raises(NameInvalid, match="topic name"):
        check_topic(name)
    with pytest.raises(NameInvalid, match="channel name"):
        check_channel(name)


def test_ephemeral():
    assert is_ephemeral("c#ephemeral")
    assert not is_ephemeral("c")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h", ("h", 4150)),
        ("h:1", ("h", 1)),
        (" h:1 ", ("h", 1)),
        ("[::1]:5", ("::1", 5)),
        ("[::1]", ("::1", 4150)),
        ("fe80::1", ("fe80::1", 4150)),
        (("h", "7"), ("h", 7)),
        (Address("h", 7), ("h", 7)),
    ],
)
def test_addresses(text, expected):
    address = parse_address(text, 4150)
    assert address == expected
    assert parse_address(str(address), 1) == expected


@pytest.mark.parametrize("text", ["h:x", "h:0", "h:65536", ":1", "", 7, None, "[::1", "h:"])
def test_bad_addresses_name_themselves(text):
    with pytest.raises(ConfigError, match=r"address|port"):
        parse_address(text, 4150)


def test_several_addresses_without_repeats():
    assert parse_addresses("a:1,b, a:1", 2) == [("a", 1), ("b", 2)]
    assert parse_addresses({"a:1"}, 2) == [("a", 1)]
    with pytest.raises(TypeError, match="addresses must be"):
        parse_addresses(None, 2)
