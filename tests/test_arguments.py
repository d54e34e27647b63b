"""Every public entry point refuses a wrong argument at once, with an error that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from nsq_fast import Consumer, LookupdHTTPClient, NsqdHTTPClient, Producer
from nsq_fast.broker import Broker, LookupdOptions, NsqdOptions
from nsq_fast.client.admin import LookupPoller
from nsq_fast.client.give_up import PublishTo, WriteToFolder
from nsq_fast.config import Config, ConnectionConfig, ConsumerConfig, LookupConfig, Option, ProducerConfig
from nsq_fast.errors import PublishFailed

NAN = float("nan")
Use = Callable[[], object]


def ignore(*_: object) -> None: ...


def consumer(**arguments: Any) -> Consumer:
    return Consumer(**{"topic": "t", "channel": "c", "nsqd_tcp_addresses": "127.0.0.1", **arguments})


def producer(**arguments: Any) -> Producer:
    return Producer(**{"nsqd_tcp_addresses": "127.0.0.1", **arguments})


ADDRESSES = [None, 5, b"h:1", [None], [5], ["h:x"], "h:0", "h:70000", ":1", [("h", "x")], [("h", 1, 2)]]
NAMES: dict[str, list[Any]] = {"nsqd_tcp_addresses": [None, 5, b"h:1"], "lookupd_http_addresses": [None, 5, b"h:1"]}
TLS: list[Any] = [5, "cert.pem", {"ca": "x"}, {"cafile": "/does/not/exist"}, {"certfile": "/does/not/exist"}]
# maker -> the configs whose options it takes; name of another argument, or of an option -> more wrong values
OPTIONS: dict[Callable[..., object], tuple[type[Config], ...]] = {
    consumer: (ConnectionConfig, LookupConfig, ConsumerConfig),
    producer: (ConnectionConfig, LookupConfig, ProducerConfig),
    Broker: (NsqdOptions,),
}
OTHERS: dict[Callable[..., object], dict[str, list[Any]]] = {
    consumer: {
        **NAMES,
        "nsqd_tcp_addresses": [None, 5, b"h:1", []],
        "topic": [None, 5, b"t", "", "a b", "t" * 65, "t#", "t#ephemeral#ephemeral", "ü"],
        "channel": [None, 5, b"c", "", "a/b", "c" * 65],
        "name": [5, b"x"],
        "message_handler": ["handler", 5],
        "batch_handler": ["handler", 5],
        "give_up": ["log", 5],
        "tls_options": TLS,
        "auth_secret": [5, ["x"]],
        "output_buffer_timeout": [0.25],  # it is in milliseconds
        "requeue_delay": [0.5],
    },
    producer: {**NAMES, "tls_options": TLS},
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
        "statsd_address": ["h:x"],
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


@pytest.mark.parametrize("argument", ["nsqd_tcp_addresses", "lookupd_http_addresses"])
@pytest.mark.parametrize("make", [consumer, producer], ids=["consumer", "producer"])
@pytest.mark.parametrize("value", ADDRESSES, ids=repr)
def test_a_wrong_address_is_refused_before_anything_starts(make: Any, argument: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        make(**{argument: value})


@pytest.mark.parametrize("value", [-1, "x", NAN])
def test_close_of_a_consumer(value: Any) -> None:
    with pytest.raises(ValueError, match="timeout"):
        consumer(message_handler=ignore).close(timeout=value)


class Unstartable:
    def __iter__(self) -> Iterator[bytes]:
        raise AssertionError("asked for messages although another argument is wrong")


PUBLISH: list[tuple[str, Callable[[Producer], object]]] = [
    ("topic", lambda p: p.publish(None, b"x")),  # type: ignore[call-overload]
    ("topic", lambda p: p.publish("a b", b"x")),
    ("topic", lambda p: p.publish_nowait("", b"x")),
    ("topic", lambda p: p.multipublish(b"t", Unstartable())),  # type: ignore[call-overload]
    ("body", lambda p: p.publish("t", None)),  # type: ignore[call-overload]
    ("body must be bytes, bytearray or memoryview, not str; encode it first", lambda p: p.publish("t", "x")),  # type: ignore[call-overload]
    ("body", lambda p: p.publish("t", b"")),
    ("body", lambda p: p.publish_nowait("t", ["x"])),  # type: ignore[arg-type]
    ("defer", lambda p: p.publish("t", b"x", defer=-1)),
    ("defer", lambda p: p.publish("t", b"x", defer=1.5)),  # type: ignore[call-overload]
    ("defer", lambda p: p.publish_nowait("t", b"x", defer="1")),  # type: ignore[arg-type]
    ("timeout", lambda p: p.publish("t", b"x", timeout=0)),
    ("timeout", lambda p: p.publish_nowait("t", b"x", timeout=NAN)),
    ("timeout", lambda p: p.multipublish("t", [b"x"], timeout="1")),  # type: ignore[call-overload]
    ("timeout", lambda p: p.close(timeout=-1)),
    ("bodies", lambda p: p.multipublish("t", None)),  # type: ignore[call-overload]
    *(
        ("bodies must be an iterable", lambda p, bodies=bodies: p.multipublish("t", bodies))
        for bodies in (b"x", "x", 5)
    ),
    ("bodies", lambda p: p.multipublish("t", [])),
    (r"bodies\[1\]", lambda p: p.multipublish("t", [b"x", None])),  # type: ignore[list-item]
    (r"bodies\[0\]", lambda p: p.multipublish("t", iter([b""]))),
]


@pytest.mark.parametrize(("name", "use"), PUBLISH)
def test_a_wrong_argument_of_a_publish_is_named(name: str, use: Callable[[Producer], object]) -> None:
    sender = Producer("127.0.0.1:1")
    sender.start()
    try:
        with pytest.raises((ValueError, TypeError), match=name):
            use(sender)
        assert sender.is_running
        assert sender.stats()["held"] == 0
    finally:
        with suppress(PublishFailed):
            sender.close(timeout=0.01)


NSQD = NsqdHTTPClient("127.0.0.1", 1)
LOOKUPD = LookupdHTTPClient("127.0.0.1", 1)
OF_TOPIC = {NSQD: "create_topic delete_topic empty_topic pause_topic unpause_topic",
            LOOKUPD: "lookup channels create_topic delete_topic"}  # fmt: skip
OF_CHANNEL = {NSQD: "create_channel delete_channel empty_channel pause_channel unpause_channel",
              LOOKUPD: "create_channel delete_channel"}  # fmt: skip


@pytest.mark.parametrize("value", [None, 5, b"t", "", "a b"])
def test_a_wrong_name_of_an_admin_client_is_named(value: Any) -> None:
    for methods, arguments, what in ((OF_TOPIC, (), "topic"), (OF_CHANNEL, ("t",), "channel")):
        for client, names in methods.items():
            for name in names.split():
                with pytest.raises(ValueError, match=what):
                    getattr(client, name)(*arguments, value)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("messages", lambda: NSQD.multipublish("t", 5)),  # type: ignore[arg-type]
        ("messages", lambda: NSQD.multipublish("t", b"x")),  # type: ignore[arg-type]
        ("defer", lambda: NSQD.publish("t", b"x", -1)),
        ("address", lambda: LOOKUPD.tombstone_topic("t", 5)),  # type: ignore[arg-type]
        ("host", lambda: NsqdHTTPClient(5, 1)),  # type: ignore[arg-type]
        ("port", lambda: LookupdHTTPClient("h", "x")),  # type: ignore[arg-type]
        ("timeout", lambda: NsqdHTTPClient("h", 1, timeout=0)),
        ("lookupd address", lambda: LookupPoller(None)),  # type: ignore[arg-type]
        ("access", lambda: LookupPoller("h", access="x")),  # type: ignore[arg-type]
        ("config", lambda: LookupPoller("h", {"lookupd_timeout": 1})),  # type: ignore[arg-type]
        ("listener", lambda: LookupPoller("h", listener="x")),  # type: ignore[arg-type]
        ("topic", lambda: LookupPoller("h").add_topic("a b")),
        ("topic", lambda: PublishTo("a b")),
        ("tcp_address", lambda: LookupdOptions(tcp_address="x")),
        ("inactive_producer_timeout", lambda: LookupdOptions(inactive_producer_timeout=0)),
        ("folder", lambda: WriteToFolder(5)),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_elsewhere_is_named(name: str, use: Use) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        use()
