"""Small things that all of the package uses: names, errors, options, text of peers, patterns, records; and that every
public entry point refuses a wrong argument at once, with an error that names it.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.pretty import pretty_repr

from nsq_fast import Consumer, LookupdHTTPClient, NsqdHTTPClient, Producer, errors
from nsq_fast._record import HistogramStats
from nsq_fast.broker import Broker, LookupdOptions, NsqdOptions
from nsq_fast.client.admin import LookupPoller
from nsq_fast.client.give_up import PublishTo, WriteToFolder
from nsq_fast.client.subscription import ConnectionStats, Counters
from nsq_fast.config import (
    Config,
    ConnectionConfig,
    ConsumerConfig,
    LookupConfig,
    Option,
    ProducerConfig,
    option,
    split_options,
)
from nsq_fast.errors import (
    MAX_LENGTH,
    ConfigError,
    ConnectFailed,
    NameInvalid,
    NsqError,
    NSQRequeueMessage,
    RequeueMessage,
    ServerError,
    counted,
    printable,
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


NO_HOST = "neither a host name nor an IP address"
BAD_ADDRESSES: dict[Any, str] = {
    **dict.fromkeys(["h:x", "h:0", "h:65536", "[::1", "h:", ":1", "", 7, None, "unix:nsqd.sock", "/"], "address|port"),
    **dict.fromkeys([("h", "x"), ("h", 1, 2), b"h:1"], "address|port"),
    **dict.fromkeys(["http://127.0.0.1:4150", "tcp://nsqd"], "without a scheme"),
    **dict.fromkeys(["nsqd/path:4150", "ns qd:4150", "127.0.0.1:4150:4151", ("[::1]", 4150)], NO_HOST),
    (b"nsqd", 4150): "must be a string",
}


@pytest.mark.parametrize(("text", "reason"), BAD_ADDRESSES.items(), ids=repr)
def test_what_is_no_address_is_refused_with_the_reason(text, reason):
    for parse, argument in ((parse_address, text), (parse_addresses, [text])):
        with pytest.raises((ConfigError, TypeError), match=reason) as caught:
            parse(argument, 4150)
        assert reason == "address|port" or repr(text) in str(caught.value)


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


def test_several_addresses_without_repeats_and_one_pair_is_one_address():
    assert parse_addresses("a:1,b, a:1", 2) == [("a", 1), ("b", 2)]
    assert parse_addresses({"a:1"}, 2) == [("a", 1)]
    pair = Address("127.0.0.1", 46081)
    assert parse_addresses(pair, 4150) == [pair]
    assert parse_addresses([pair, ("127.0.0.1", 2)], 4150) == [pair, ("127.0.0.1", 2)]
    with pytest.raises(TypeError, match="addresses must be"):
        parse_addresses(None, 2)


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
def test_text_of_a_peer_is_shown_like_this(said: str | bytes, shown: str) -> None:
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
    again = pickle.loads(pickle.dumps(error))
    assert (again.detail, str(again)) == (error.detail, str(error))


@pytest.mark.parametrize("error", [RequeueMessage(1.5, backoff=False), RequeueMessage(), NSQRequeueMessage(True)])
def test_what_a_handler_raises_comes_back_from_a_process_pool(error: RequeueMessage) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert (again.delay, again.backoff, str(again)) == (error.delay, error.backoff, str(error))


@pytest.mark.parametrize("delay", [-0.001, -1, float("nan"), float("-inf"), timedelta(seconds=-1)])
def test_a_delay_that_is_none_is_refused_where_it_is_given(delay: Any) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        RequeueMessage(delay)


# Patterns of header filters that are sent to servers: only such as Go compiles


# (what Go's own libraries say of a corpus of them: tests/broker/test_broker_redesigned_consume.py)


def test_patterns_that_go_compiles() -> None:
    for pattern in (
        "", "v", "^v[0-9]+$", "a|b|", "(a|(?:b)c)*", "(?P<name>x)", "(?i)x", "(?i:x)", r"\d{2,3}?", "[a-]",
        r"[\w.-]+@[a-z]+\.(?:com|org)", "[[:alpha:]_]", r"\x41\.", "(a{10}){100}", "x{0}", "é", "[é-ü]", "a{2,}b??",
    ):  # fmt: skip
        check_regexp(pattern)
    for pattern in ("", "v", "v*", "a?c", "[abc]x", "[!a-c]", "{a,b*}", r"\[", "a,b", "**", "{a,{b,c}}"):
        check_glob(pattern)


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("a(?!b)", "lookaheads"),
        ("(?<=a)b", "lookbehinds"),
        ("(?P=name)", "references"),
        (r"(a)\1", "not an escape in Go"),
        ("a|+", "repeats nothing"),
        ("a**", "repeated already"),
        ("(a{100}){11}", "more than 1000"),
        ("a{3,2}", "exchanged"),
        ("a{,5}", "write"),
        ("(a", "'\\(' at 0 is not closed"),
        ("a)", "without"),
        ("[a", "'\\[' at 0 is not closed"),
        (r"[\d-z]", "a range that is none"),
        ("[a[b]", "in a class"),
        ("[^]a]", "empty"),
        ("a]", "write"),
        ("(" * 300 + ")" * 300, "nested too deep"),
    ],
)
def test_a_regexp_that_go_may_refuse_is_refused_with_the_reason(pattern: str, complaint: str) -> None:
    with pytest.raises(PatternInvalid, match=complaint):
        check_regexp(pattern)


@pytest.mark.parametrize("pattern", ["[v", "v]", "[!]", "[c-a]", "[a-cx]", "{a", "a}", "\\", "[a,b]"])
def test_a_glob_that_go_may_refuse(pattern: str) -> None:
    with pytest.raises(PatternInvalid):
        check_glob(pattern)


# Records are structs, and `dataclasses` takes them all the same

STATS = ConnectionStats(("host", 1), True, 1, 0, 0, Counters(received=3))


def test_fields_are_replaced_and_a_config_checks_them() -> None:
    assert dataclasses.replace(ExponentialBackoff(), base=2.0) == ExponentialBackoff(base=2.0)
    config = ConsumerConfig()
    assert config.replace(max_in_flight=7).max_in_flight == 7
    for replace in (dataclasses.replace, ConsumerConfig.replace):
        with pytest.raises(ConfigError, match="max_tries=-1"):
            replace(config, max_tries=-1)
    with pytest.raises(ConfigError, match="max_in_flght"):
        config.replace(max_in_flght=1)


@pytest.mark.parametrize("record", [STATS, ConsumerConfig(), ExponentialBackoff(), HistogramStats((1,), 0.5)])
def test_records_that_do_not_change_refuse_it_and_can_be_pickled(record) -> None:
    name = dataclasses.fields(record)[0].name
    with pytest.raises(AttributeError):
        setattr(record, name, getattr(record, name))
    assert pickle.loads(pickle.dumps(record)) == record


def test_a_config_has_the_options_of_its_base_and_its_own() -> None:
    class More(ExtraConfig, frozen=True):
        second: int = option(2, "another", minimum=0, maximum=5)

    assert [*More.OPTIONS] == ["first", "second"]
    assert More(first="7", second="3") == More(7, 3)
    with pytest.raises(ConfigError, match="second=6"):
        More(second=6)


class ExtraConfig(Config, frozen=True):
    first: int = option(1, "one", minimum=0)


# Options are checked when a config is made; nothing wrong gets further.


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"heartbeat_interval": 0.5}, "heartbeat_interval=0.5: must be a number, 1.0 to 60.0 s"),
        ({"heartbeat_interval": float("nan")}, "heartbeat_interval=nan: must be a number"),
        ({"output_buffer_size": 63}, "64 to 65536 bytes, or -1, or 0"),
        ({"output_buffer_timeout": 5000}, "25 to 1000 ms"),
        ({"deflate_level": 10}, "deflate_level=10: must be a whole number, 1 to 9"),
        ({"sample_rate": 100}, "0 to 99 %"),
        ({"msg_timeout": 0.1}, "1.0 to 900.0 s, or None"),
        ({"snappy": 1}, "snappy=1: must be true or false"),
        ({"deflate_level": True}, "deflate_level=True: must be a whole number"),
        ({"client_id": 7}, "client_id=7: must be a string, or None"),
        ({"ext_filter": [1]}, "ext_filter"),
        ({"snappy": True, "deflate": True}, "snappy=True with deflate=True"),
        ({"hostname": "box\ud800"}, "hostname='box\\ud800': must not hold lone surrogates"),
        ({"auth_secret": "\ud800"}, "auth_secret='***': must not hold lone surrogates"),
        ({"snapy": True}, "unknown option 'snapy'; did you mean 'snappy'?"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, complaint):
    with pytest.raises(ConfigError) as caught:
        ConnectionConfig.of(options)
    assert complaint in str(caught.value)
    assert isinstance(caught.value, NsqError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("config", [ConnectionConfig, ConsumerConfig, ProducerConfig, LookupConfig])
def test_what_is_not_in_seconds_says_so_in_its_text_and_in_its_error(config):
    words = {"ms": "milliseconds", "%": "percent", "bytes": "bytes"}
    for name, each in config.OPTIONS.items():
        if each.unit in ("", "s"):
            continue
        word = words[each.unit]
        assert each.unit == "bytes" or word in each.doc, name
        for wrong in (0.5, "soon"):
            with pytest.raises(ConfigError, match=word):
                config(**{name: wrong})


def test_strings_are_read_as_the_option_wants_them():
    config = ConnectionConfig(heartbeat_interval="2.5", snappy="yes", output_buffer_size="-1", msg_timeout="60")
    assert (config.heartbeat_interval, config.snappy, config.output_buffer_size) == (2.5, True, -1)
    assert config.msg_timeout == 60.0


def test_secrets_stay_out_of_repr_and_errors():
    config = ConnectionConfig(auth_secret="hunter2")
    assert "hunter2" not in repr(config) + pretty_repr(config)


def test_options_are_shared_out_by_name():
    consumer, connection = split_options({"max_tries": 9, "snappy": True}, ConsumerConfig, ConnectionConfig)
    assert consumer.max_tries == 9
    assert connection.snappy
    with pytest.raises(ConfigError, match="unknown option 'linger'"):
        list(split_options({"linger": 1.0}, ConsumerConfig, ConnectionConfig))


RULE = {"filter_ext_key": "k", "filter_data": "v"}


@pytest.mark.parametrize(
    "value",
    [
        {"type": 1, **RULE},
        {"type": 2, "inverse": True, **RULE},
        {"type": 3, **RULE},
        {"type": 4, "filter_ext_key": "any", "filter_data_list": [RULE, RULE]},
    ],
)
def test_the_four_kinds_of_ext_filters(value):
    assert ConnectionConfig(ext_filter=value).ext_filter == value


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"type": 5, **RULE},
        {"type": 1, "filter_ext_key": "k"},
        {"type": 1, "filter_ext_key": "", "filter_data": "v"},
        {"type": 1, "filter_ext_key": "k", "filter_data": 7},
        {"type": 2, "filter_ext_key": "k", "filter_data": "a(?!b)"},
        {"type": 3, "filter_ext_key": "k", "filter_data": "[v"},
        {"type": 1, "inverse": "yes", **RULE},
        {"type": 1, "filter": "x", **RULE},
        {"type": 4, "filter_ext_key": "some", "filter_data_list": [RULE]},
        {"type": 4, "filter_ext_key": "all", "filter_data_list": []},
        {"type": 4, "filter_ext_key": "all", "filter_data_list": ["k"]},
    ],
)
def test_an_ext_filter_that_servers_would_ignore_is_refused(value):
    with pytest.raises(ConfigError):
        ConnectionConfig(ext_filter=value)


# Every public entry point refuses a wrong argument at once, with an error that names it.


NAN = float("nan")
Use = Callable[[], object]


def consumer(**arguments: Any) -> Consumer:
    return Consumer(**{"topic": "t", "channel": "c", "nsqd_tcp_addresses": "127.0.0.1", **arguments})


def producer(**arguments: Any) -> Producer:
    return Producer(**{"nsqd_tcp_addresses": "127.0.0.1", **arguments})


WRONG_SERVERS: list[Any] = [None, 5, b"h:1", [5], ["h:x"]]
NAMES_OF_SERVERS = {"nsqd_tcp_addresses": WRONG_SERVERS, "lookupd_http_addresses": WRONG_SERVERS}
TLS: list[Any] = [5, "cert.pem", {"ca": "x"}, {"cafile": "/does/not/exist"}, {"certfile": "/does/not/exist"}]
# maker -> the configs whose options it takes; name of another argument, or of an option -> more wrong values
OPTIONS: dict[Callable[..., object], tuple[type[Config], ...]] = {
    consumer: (ConnectionConfig, LookupConfig, ConsumerConfig),
    producer: (ConnectionConfig, LookupConfig, ProducerConfig),
    Broker: (NsqdOptions,),
}
OTHERS: dict[Callable[..., object], dict[str, list[Any]]] = {
    consumer: {
        **NAMES_OF_SERVERS,
        "nsqd_tcp_addresses": [*WRONG_SERVERS, []],
        "topic": [None, 5, "a b"],
        "channel": [None, 5, "a/b"],
        "name": [5, b"x"],
        "message_handler": ["handler", 5],
        "batch_handler": ["handler", 5],
        "give_up": ["log", 5],
        "tls_options": TLS,
        "auth_secret": [5, ["x"]],
        "output_buffer_timeout": [0.25],  # it is in milliseconds
        "requeue_delay": [0.5],
    },
    producer: {**NAMES_OF_SERVERS, "tls_options": TLS},
    Broker: {
        "nsqds": [-1, 1.5, "2", None],
        "lookupd_options": [5, "x"],
        "addresses": [5, "x"],
        "tcp_address": ["host", "host:", "host:x", "h:65536"],
        "http_address": ["host", "h:-1"],
        "https_address": ["host"],
        "lookupd_tcp_addresses": ["h:1", 5, (5,), ("",), ["h:x"], ("h:0",)],
        "auth_http_addresses": ["h:1", 5, ("",)],
        "auth_http_request_method": ["put"],
        "statsd_address": ["h:x", "h", "/h"],
        "tls_cert": ["cert.pem"],
        "tls_key": ["key.pem"],
        "tls_client_auth_policy": ["maybe"],
        "tls_required": ["yes"],
    },
}


def wrong_values(option: Option) -> Iterator[Any]:
    """What an option refuses, as it is declared."""
    values: dict[type, list[Any]] = {str: [5, b"x"], bool: [1, "maybe"], int: ["x", 1.5, True], float: ["x", NAN, True]}
    yield from values.get(option.kind, ())
    yield from ["no such choice"] if option.choices else []
    bounds = [(option.minimum, -1), (option.maximum, 1)]
    yield from (bound + step for bound, step in bounds if bound is not None and bound + step not in option.also)
    if option.default is not None and option.kind in values:
        yield None


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        pytest.param(make, name, values, id=f"{make.__name__}-{name}")
        for make, configs in OPTIONS.items()
        for name, values in [
            *((name, [*wrong_values(each)]) for config in configs for name, each in config.OPTIONS.items()),
            *OTHERS[make].items(),
        ]
        if values
    ],
)
def test_a_wrong_argument_of_a_constructor_is_named(make: Callable[..., object], name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises((ValueError, TypeError), match=name):
            make(**{name: value})


@pytest.mark.parametrize("make", [consumer, producer, Broker, NsqdOptions, LookupdOptions])
def test_an_unknown_option_is_named(make: Callable[..., object]) -> None:
    with pytest.raises((ValueError, TypeError), match="no_such_option"):
        make(no_such_option=1)


NSQD = NsqdHTTPClient("127.0.0.1", 1)
LOOKUPD = LookupdHTTPClient("127.0.0.1", 1)
OF_TOPIC = {NSQD: "create_topic delete_topic empty_topic pause_topic unpause_topic",
            LOOKUPD: "lookup channels create_topic delete_topic"}  # fmt: skip
OF_CHANNEL = {NSQD: "create_channel delete_channel empty_channel pause_channel unpause_channel",
              LOOKUPD: "create_channel delete_channel"}  # fmt: skip


def test_a_wrong_name_of_an_admin_client_is_named() -> None:
    for methods, arguments, what in ((OF_TOPIC, (), "topic"), (OF_CHANNEL, ("t",), "channel")):
        for client, names in methods.items():
            for name in names.split():
                for value in (None, "a b"):
                    with pytest.raises(ValueError, match=what):
                        getattr(client, name)(*arguments, value)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("address", lambda: LOOKUPD.tombstone_topic("t", 5)),  # type: ignore[arg-type]
        ("access", lambda: LookupPoller("h", access="x")),  # type: ignore[arg-type]
        ("config", lambda: LookupPoller("h", {"lookupd_timeout": 1})),  # type: ignore[arg-type]
        ("Authorization", lambda: LookupPoller("h", LookupConfig(lookupd_authorization="a\r\nb"))),
        ("listener", lambda: LookupPoller("h", listener="x")),  # type: ignore[arg-type]
        ("topic", lambda: LookupPoller("h").add_topic("a b")),
        ("topic", lambda: PublishTo("a b")),
        ("tcp_address", lambda: LookupdOptions(tcp_address="x")),
        ("inactive_producer_timeout", lambda: LookupdOptions(inactive_producer_timeout=0)),
        ("folder", lambda: WriteToFolder(5)),  # type: ignore[arg-type]
        ("folder", lambda: WriteToFolder("/dev/null/given-up")),
    ],
)
def test_a_wrong_argument_elsewhere_is_named(name: str, use: Use) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        use()
