"""Topic and channel names, and addresses."""

import pytest

from nsq_fast.errors import ConfigError, ConnectFailed, NameInvalid
from nsq_fast.names import (
    Address,
    check_channel,
    check_resolvable,
    check_topic,
    is_ephemeral,
    parse_address,
    parse_addresses,
)


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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("http://127.0.0.1:4150", "without a scheme"),
        ("tcp://nsqd", "without a scheme"),
        ("nsqd/path:4150", "neither a host name nor an IP address"),
        ("ns qd:4150", "neither a host name nor an IP address"),
        ("127.0.0.1:4150:4151", "Exactly 8 parts"),
        (("[::1]", 4150), "neither a host name nor an IP address"),
        ((b"nsqd", 4150), "must be a string"),
    ],
)
def test_what_is_no_host_is_refused_with_the_reason(text, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        parse_address(text, 4150)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["user:secret@nsqd:4150", "http://user:secret@nsqd", "tcp://user:secret@nsqd:x"])
def test_a_password_in_an_address_is_refused_and_not_shown(text):
    with pytest.raises(ConfigError, match="user name or password") as caught:
        parse_address(text, 4150)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("host", ["a..b", ".a", "a..", "x" * 64, "x" * 64 + ".example", "\udcff"])
def test_a_host_that_cannot_be_encoded_cannot_be_connected_to(host):
    with pytest.raises(ConnectFailed, match="is no host name"):
        check_resolvable(host)


@pytest.mark.parametrize(
    "host", ["nsqd", "a.b.", "127.0.0.1", "::1", "fe80::1%eth0", "bücher.example", "with_underscore"]
)
def test_other_hosts_may_be_asked_for(host):
    check_resolvable(host)
    assert parse_address(f"[{host}]" if ":" in host else host, 1).host == host


def test_several_addresses_without_repeats():
    assert parse_addresses("a:1,b, a:1", 2) == [("a", 1), ("b", 2)]
    assert parse_addresses({"a:1"}, 2) == [("a", 1)]
    with pytest.raises(TypeError, match="addresses must be"):
        parse_addresses(None, 2)


def test_one_pair_is_one_address() -> None:
    pair = Address("127.0.0.1", 46081)
    assert parse_addresses(pair, 4150, "nsqd_tcp_addresses") == [pair]
    assert parse_addresses([pair, ("127.0.0.1", 2)], 4150, "nsqd_tcp_addresses") == [pair, ("127.0.0.1", 2)]
