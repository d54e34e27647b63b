"""Small things that all of the package uses: names, errors, text of peers, patterns, records."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.pretty import pretty_repr

from nsq_fast import errors
from nsq_fast.client.histogram import HistogramStats
from nsq_fast.client.subscription import ConnectionStats, Counters
from nsq_fast.config import Config, ConnectionConfig, ConsumerConfig, option
from nsq_fast.errors import (
    ERROR_CODES,
    ConfigError,
    ConnectFailed,
    NameInvalid,
    ServerError,
    publish_failed_class,
    server_error,
)
from nsq_fast.header_patterns import PatternInvalid, check_glob, check_regexp
from nsq_fast.names import (
    Address,
    check_channel,
    check_resolvable,
    check_topic,
    parse_address,
    parse_addresses,
)
from nsq_fast.printable import MAX_LENGTH, counted, printable
from nsq_fast.protocol import ExponentialBackoff

# Names and addresses


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
        ("/run/nsqd.sock", ("/run/nsqd.sock", 0)),
        (" unix:/run/a@b ", ("/run/a@b", 0)),
        ("unix:///run/nsqd.sock", ("/run/nsqd.sock", 0)),
        (Address("/run/nsqd.sock", 0), ("/run/nsqd.sock", 0)),
    ],
)
def test_addresses(text, expected):
    address = parse_address(text, 4150)
    assert address == expected
    assert parse_address(str(address), 1) == expected


@pytest.mark.parametrize("text", ["h:x", "h:0", "h:65536", ":1", "", 7, None, "[::1", "h:", "unix:nsqd.sock", "/"])
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


# Error frames become exceptions whose policy is data


@pytest.mark.parametrize(
    ("data", "kind", "detail"),
    [
        (b"E_BAD_TOPIC PUB topic", errors.BadTopic, "PUB topic"),
        (b"E_FAILED_ON_NOT_LEADER ", errors.NotLeader, ""),
        (b"E_TOPIC_NOT_EXIST", errors.TopicNotExist, ""),
        (b"INVALID_TRACE_ID ", errors.TraceIdInvalid, ""),
        (b"E_BAD_PROTOCOL", errors.BadProtocol, ""),
    ],
)
def test_the_first_token_decides(data, kind, detail):
    error = server_error(data)
    assert type(error) is kind
    assert error.detail == detail
    assert str(error) == data.decode().rstrip()


@pytest.mark.parametrize("data", [b"too much client connections", b"E_NEW thing", b"", b"\xff\xfe", b" "])
def test_unknown_codes_are_plain_and_fatal(data):
    error = server_error(data)
    assert type(error) is ServerError
    assert error.fatal
    assert not error.retriable
    assert str(error) == data.decode("utf-8", "replace").rstrip()


def test_only_the_answer_errors_and_headers_are_not_fatal():
    not_fatal = {code for code, cls in ERROR_CODES.items() if not cls.fatal}
    assert not_fatal == {
        "E_FIN_FAILED",
        "E_REQ_FAILED",
        "E_TOUCH_FAILED",
        "E_EXT_NOT_SUPPORT",
        "E_INVALID_JSON_HEADER",
        "INVALID_TRACE_ID",
        "E_CREATE_TOPIC_FAILED",
    }


def test_what_makes_the_topology_stale_may_be_retried():
    stale = [cls for cls in ERROR_CODES.values() if cls.stale_topology]
    assert {cls.code for cls in stale} == {"E_TOPIC_NOT_EXIST", "E_FAILED_ON_NOT_LEADER", "E_FAILED_ON_NOT_WRITABLE"}
    assert all(cls.retriable for cls in stale)


# Text of a peer is shown on one line, without control characters, and never at full length

FORGED = "E_INVALID bad\n2026-01-01 INFO all is well\x1b[2J\u202e\u2028"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain text, ünïcode", "plain text, ünïcode"),
        ("two\nlines\r\n", r"two\nlines\r\n"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("\u202etfel", r"\u202etfel"),
        (b"bytes \xff\x00", r"bytes \xff\x00"),
        ("x" * 600, "x" * 500 + "... (100 more)"),
        (b"x" * 8_000_000, "x" * 500 + "... (7999500 more)"),
        ("", ""),
    ],
)
def test_examples(said: str | bytes, shown: str) -> None:
    assert printable(said) == shown


@given(st.one_of(st.text(), st.binary(), st.text(min_size=490, max_size=520)))
def test_whatever_is_said_is_shown_on_one_line_of_bounded_length(said: str | bytes) -> None:
    shown = printable(said)
    assert shown.isprintable()
    assert len(shown) <= 10 * MAX_LENGTH + 30


def test_a_number_stands_with_the_form_of_its_noun() -> None:
    assert [counted(number, "row") for number in (0, 1, 2, 2000)] == ["0 rows", "1 row", "2 rows", "2,000 rows"]
    assert [counted(number, "publish", "publishes") for number in (1, 2)] == ["1 publish", "2 publishes"]


def test_errors_show_what_a_server_said_safely_and_keep_it_as_it_came() -> None:
    error = server_error(FORGED.encode())
    assert str(error).isprintable()
    assert repr(error).isprintable()
    assert error.detail == FORGED.partition(" ")[2]
    refused = publish_failed_class(error)(f"publish failed: {error}")
    assert str(refused).isprintable()
    assert repr(refused).isprintable()
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.detail, str(copy)) == (error.detail, str(error))


# Patterns of header filters that are sent to servers: only such as Go compiles


@pytest.mark.parametrize(
    "pattern",
    [
        "", "v", "^v[0-9]+$", "a|b|", "(a|(?:b)c)*", "(?P<name>x)", "(?i)x", "(?i:x)", r"\d{2,3}?", "[a-]",
        r"[\w.-]+@[a-z]+\.(?:com|org)", "[[:alpha:]_]", r"\x41\.", "(a{10}){100}", "x{0}", "é", "[é-ü]", "a{2,}b??",
    ],
)  # fmt: skip
def test_a_regexp_that_go_compiles(pattern: str) -> None:
    check_regexp(pattern)


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("a(?=b)", "lookaheads"),
        ("a(?!b)", "lookaheads"),
        ("(?<=a)b", "lookbehinds"),
        ("(?#comment)", "no lookaheads"),
        ("(?P=name)", "references"),
        (r"(a)\1", "not an escape in Go"),
        (r"a\Z", "not an escape in Go"),
        (r"\u0041", "not an escape in Go"),
        ("a\\", "not an escape in Go"),
        ("*a", "repeats nothing"),
        ("a**", "repeated already"),
        ("a|+", "repeats nothing"),
        ("a{1001}", "more than 1000"),
        ("(a{100}){11}", "more than 1000"),
        ("a{3,2}", "exchanged"),
        ("a{,5}", "write"),
        ("a{b", "write"),
        ("(a", "'\\(' at 0 is not closed"),
        ("a)", "without"),
        ("[a", "'\\[' at 0 is not closed"),
        ("[", "not closed"),
        ("[c-a]", "a range that is none"),
        (r"[\d-z]", "a range that is none"),
        ("[a[b]", "in a class"),
        ("a]", "write"),
        ("[]a]", "empty"),
        ("[^]a]", "empty"),
        ("(" * 300 + ")" * 300, "nested too deep"),
    ],
)
def test_a_regexp_that_go_may_refuse(pattern: str, complaint: str) -> None:
    with pytest.raises(PatternInvalid, match=complaint):
        check_regexp(pattern)


@pytest.mark.parametrize(
    "pattern", ["", "v", "v*", "a?c", "[abc]x", "[!a-c]", "{a,b*}", r"\[", "a,b", "**", "{a,{b,c}}"]
)
def test_a_glob_that_go_compiles(pattern: str) -> None:
    check_glob(pattern)


@pytest.mark.parametrize("pattern", ["[v", "v]", "[]", "[!]", "[c-a]", "[a-cx]", "{a", "a}", "\\", "[a,b]"])
def test_a_glob_that_go_may_refuse(pattern: str) -> None:
    with pytest.raises(PatternInvalid):
        check_glob(pattern)


# Records are structs, and `dataclasses` takes them all the same

STATS = ConnectionStats(("host", 1), True, 1, 0, 0, Counters(received=3))


def test_dataclasses_replaces_fields_and_a_config_checks_them() -> None:
    assert dataclasses.replace(ExponentialBackoff(), base=2.0) == ExponentialBackoff(base=2.0)
    with pytest.raises(ConfigError, match="max_tries=-1"):
        dataclasses.replace(ConsumerConfig(), max_tries=-1)


@pytest.mark.parametrize("record", [STATS, ConsumerConfig(), ExponentialBackoff(), HistogramStats((1,), 0.5)])
def test_records_that_do_not_change_refuse_it_and_can_be_pickled(record) -> None:
    name = dataclasses.fields(record)[0].name
    with pytest.raises(AttributeError):
        setattr(record, name, getattr(record, name))
    assert pickle.loads(pickle.dumps(record)) == record


def test_secrets_stay_out_of_what_rich_prints() -> None:
    assert "hunter2" not in pretty_repr(ConnectionConfig(auth_secret="hunter2"))


def test_a_config_has_the_options_of_its_base_and_its_own() -> None:
    class More(ExtraConfig, frozen=True):
        second: int = option(2, "another", minimum=0, maximum=5)

    assert [*More.OPTIONS] == ["first", "second"]
    assert More(first="7", second="3") == More(7, 3)
    with pytest.raises(ConfigError, match="second=6"):
        More(second=6)


class ExtraConfig(Config, frozen=True):
    first: int = option(1, "one", minimum=0)
