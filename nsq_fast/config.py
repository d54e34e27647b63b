"""Configuration: each option declared once, with its unit, default, range and meaning.

A config is a value that does not change. It is checked when it is made, takes
strings where it came from a command line or from Spark, hides secrets in its
repr, and is changed by ``replace``. An unknown option is an error that names
the nearest known one.

Units: seconds as floats, unless the option's name or its ``unit`` says
otherwise (``requeue_delay`` and ``output_buffer_timeout`` keep gnsq's
milliseconds, because gnsq programs pass them by these names).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from ._record import Record
from .errors import ConfigError

ConfigT = TypeVar("ConfigT", bound="Config")

MAX_PARTITION = 1023
MAX_TAG_SIZE = 100
ORDER_POLICIES = ("deliver", "drop", "stop")
OF_CONSUMER, OF_CONNECTION = BACKOFF_SCOPES = ("consumer", "connection")
ONCE, EACH_START = START_POLICIES = ("once", "each_start")

PARTITION_STRATEGIES = ("round_robin", "least_loaded")
KEY_STRATEGIES = ("murmur3", "hashcode")
BODY_CODECS = ("gzip", "snappy", "lz4")
DISCOVERY_FIELDS = (
    "hostname",
    "broadcast_address",
    "version",
    "distributed_id",
    "topology_zone",
    "topology_region",
)

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_KIND_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
_UNITS = {"s": "seconds", "ms": "milliseconds", "%": "percent"}


class Option(msgspec.Struct):
    """What is declared of one option.

    Attributes:
        kind: type of the value; where ``default`` is None, None is allowed besides.
        minimum, maximum: None for no bound.
        also: values outside minimum..maximum that are allowed all the same.
        choices: the only values; () for all that are in range.
        secret: the value is kept out of repr and error messages.
        name: known once its class is made.
    """

    default: Any
    doc: str
    unit: str
    kind: type
    minimum: float | None
    maximum: float | None
    also: tuple[Any, ...]
    choices: tuple[str, ...]
    secret: bool
    name: str = ""


def option(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    also: tuple[Any, ...] = (),
    choices: tuple[str, ...] = (),
    secret: bool = False,
    kind: type | None = None,
) -> Any:
    """Declare one option; see ``Option``. ``kind`` is needed where the default is None."""
    return Option(default, doc, unit, kind or type(default), minimum, maximum, also, choices, secret)


class _Options(msgspec.StructMeta):
    """Makes config classes: what they declare becomes ``OPTIONS``, and the defaults stay."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **settings: Any) -> Any:
        declared = {key: value for key, value in namespace.items() if isinstance(value, Option)}
        for key, each in declared.items():
            each.name, namespace[key] = key, each.default
        inherited = {key: each for base in reversed(bases) for key, each in getattr(base, "OPTIONS", {}).items()}
        namespace["OPTIONS"] = inherited | declared
        return super().__new__(mcls, name, bases, namespace, **settings)


class Config(Record, frozen=True, metaclass=_Options):
    """Base of the config classes: checks and coerces every field when an instance is made."""

    OPTIONS: ClassVar[Mapping[str, Option]]
    """All options by their names, in the order in which they are declared."""

    def __post_init__(self) -> None:
        for each in self.OPTIONS.values():
            value = _coerce(each, getattr(self, each.name))
            _check(each, value)
            self._set(each.name, value)

    def _set(self, name: str, value: Any) -> None:
        """Put a value into its final form, while the instance is made."""
        msgspec.structs.force_setattr(self, name, value)

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name, each in self.OPTIONS.items() if not each.secret]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    @classmethod
    def names(cls) -> frozenset[str]:
        """The names of all options."""
        return frozenset(cls.OPTIONS)

    @classmethod
    def of(cls: type[ConfigT], options: Mapping[str, Any]) -> ConfigT:
        """Make a config from a mapping; raise ConfigError for an option that does not exist."""
        refuse_unknown(options, cls.names())
        return cls(**options)

    def replace(self: ConfigT, **changes: Any) -> ConfigT:
        """A copy with some options changed, checked like a new one."""
        refuse_unknown(changes, self.names())
        return msgspec.structs.replace(self, **changes)


def refuse_unknown(options: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise ConfigError if ``options`` has a name that is not in ``known``."""
    for name in options:
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown option {name!r}{hint}")


def split_options(options: Mapping[str, Any], *configs: type[Config]) -> Iterator[Any]:
    """Share ``options`` out among config classes, each taking the names it declares.

    Raises ConfigError for a name that none of them has.
    """
    refuse_unknown(options, frozenset().union(*(config.names() for config in configs)))
    for config in configs:
        yield config(**{name: value for name, value in options.items() if name in config.names()})


def _coerce(option: Option, value: Any) -> Any:
    kind = option.kind
    if isinstance(value, str) and kind in (bool, int, float):
        return _from_text(option, value)
    if kind is float and type(value) is int:
        return float(value)
    return value


def _from_text(option: Option, text: str) -> Any:
    name, kind = option.name, option.kind
    if kind is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise ConfigError(f"{name}={text!r}: must be {_KIND_NAMES[bool]}")
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: must be {_kind_text(option)}") from None


def _kind_text(option: Option) -> str:
    """What a value must be, and in which unit: 0.5 of an option in milliseconds was mostly meant to be seconds."""
    return _KIND_NAMES[option.kind] + (f" of {_UNITS.get(option.unit, option.unit)}" if option.unit else "")


def _check(option: Option, value: Any) -> None:
    if (value is None and option.default is None) or value in option.also:
        return
    shown = "'***'" if option.secret else repr(value)
    kind = option.kind
    if kind in _KIND_NAMES and (not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool)):
        raise ConfigError(f"{option.name}={shown}: must be {_kind_text(option)}{_or_none(option)}")
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ConfigError(f"{option.name}={shown}: must not hold lone surrogates, which UTF-8 cannot carry to a server")
    if option.choices and value not in option.choices:
        raise ConfigError(f"{option.name}={shown}: must be one of {', '.join(option.choices)}{_or_none(option)}")
    if not _in_range(option.minimum, option.maximum, value):
        raise ConfigError(
            f"{option.name}={shown}: must be {_KIND_NAMES[kind]}, {_range_text(option)}{_or_none(option)}"
        )


def _in_range(low: float | None, high: float | None, value: Any) -> bool:
    # Written so that NaN, for which every comparison is false, is refused.
    return (low is None or value >= low) and (high is None or value <= high)


def _range_text(option: Option) -> str:
    bounds = f"{option.minimum} to {option.maximum}" if option.maximum is not None else f"at least {option.minimum}"
    unit = f" {option.unit}" if option.unit else ""
    return bounds + unit + "".join(f", or {item}" for item in option.also)


def _or_none(option: Option) -> str:
    return ", or None" if option.default is None else ""


def _partitions(value: Any) -> tuple[int, ...] | None:
    """Partition numbers, from a list or a text such as ``0,2``."""
    if value is None:
        return None
    parts = value.split(",") if isinstance(value, str) else value
    try:
        numbers = sorted({int(part) if isinstance(part, str) else part for part in parts})
    except (TypeError, ValueError):
        numbers = []
    if not numbers or any(type(number) is not int or not 0 <= number <= MAX_PARTITION for number in numbers):
        raise ConfigError(f"partitions={value!r}: must be a list of partition numbers, 0 to {MAX_PARTITION}, or None")
    return tuple(numbers)


def _check_ext_filter(value: Any) -> None:
    """Raise ConfigError for a filter that a server would ignore in silence, and so deliver everything."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"ext_filter={value!r}: must be a mapping, or None")
    refuse_unknown(value, frozenset({"type", "inverse", "filter_ext_key", "filter_data", "filter_data_list"}))
    rules = [value]
    if value.get("type") == 4:
        rules = value.get("filter_data_list") or []
        if value.get("filter_ext_key") not in ("all", "any") or not isinstance(rules, (list, tuple)) or not rules:
            raise ConfigError(
                f"ext_filter={value!r}: type 4 needs filter_ext_key 'all' or 'any', and rules in filter_data_list"
            )
    elif value.get("type") not in (1, 2, 3):
        raise ConfigError(f"ext_filter={value!r}: type must be 1 (equal), 2 (regexp), 3 (glob) or 4 (list)")
    if not all(isinstance(rule, Mapping) and _is_rule(rule) for rule in rules):
        raise ConfigError(
            f"ext_filter={value!r}: each rule needs filter_ext_key and filter_data, both strings, not empty"
        )
    from .header_patterns import PatternInvalid, check_glob, check_regexp  # for this option only

    check = {2: check_regexp, 3: check_glob}.get(value["type"])
    if check is not None:
        try:
            check(value["filter_data"])
        except PatternInvalid as error:
            raise ConfigError(
                f"ext_filter={value!r}: {error}; servers ignore a filter that does not compile, and deliver everything"
            ) from error
    if not isinstance(value.get("inverse", False), bool):
        raise ConfigError(f"ext_filter={value!r}: inverse must be true or false")


def _check_discovery_filter(value: Any) -> None:
    """Raise ConfigError unless it is a mapping of fields of an nsqd to a pattern, or to several."""
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(f"discovery_filter={value!r}: must be a function, a mapping of fields to patterns, or None")
    for field, patterns in value.items():
        if field not in DISCOVERY_FIELDS:
            raise ConfigError(f"discovery_filter: lookup lists no {field!r}: use {', '.join(DISCOVERY_FIELDS)}")
        texts = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(texts, (list, tuple, set, frozenset)) or not texts or not _are_texts(texts):
            raise ConfigError(
                f"discovery_filter: {field}={patterns!r}: must be a pattern such as 'a*', or some of them"
            )


def _are_texts(values: Collection[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_rule(rule: Mapping[str, Any]) -> bool:
    key, data = rule.get("filter_ext_key"), rule.get("filter_data")
    return isinstance(key, str) and key != "" and isinstance(data, str) and data != ""


class ConnectionConfig(Config, frozen=True):
    """One connection to an nsqd: what IDENTIFY says, and how the transport behaves.

    Ranges are those that both server families accept; where they differ, the narrower one.
    """

    client_id: str | None = option(
        None, "name of this client in nsqd's stats; None: the host name up to its first dot", kind=str
    )
    hostname: str | None = option(None, "host name in nsqd's stats; None: this machine's", kind=str)
    user_agent: str | None = option(None, "None: nsq_fast and its version", kind=str)
    heartbeat_interval: float = option(30.0, "how often nsqd sends a heartbeat", unit="s", minimum=1.0, maximum=60.0)
    output_buffer_size: int = option(
        16384, "nsqd's output buffer; -1: none", unit="bytes", minimum=64, maximum=65536, also=(-1, 0)
    )
    output_buffer_timeout: int = option(
        250,
        "longest wait of a message in nsqd's output buffer, in milliseconds as gnsq has it; -1: no limit",
        unit="ms",
        minimum=25,
        maximum=1000,
        also=(-1, 0),
    )
    sample_rate: int = option(0, "percentage of messages to receive; 0: all", unit="%", minimum=0, maximum=99)
    msg_timeout: float | None = option(
        None,
        "nsqd requeues a message that was not responded to for so long; None: its default",
        unit="s",
        minimum=1.0,
        maximum=900.0,
        kind=float,
    )
    tls_v1: bool = option(False, "upgrade the connection to TLS")
    tls_options: Any = option(
        None, "an ssl.SSLContext, or a mapping: cafile, certfile, keyfile, server_hostname, verify", secret=True
    )
    snappy: bool = option(False, "compress the connection with snappy")
    deflate: bool = option(False, "compress the connection with deflate")
    deflate_level: int = option(6, "deflate level", minimum=1, maximum=9)
    auth_secret: str | bytes | None = option(None, "secret for AUTH", secret=True)
    auth_secret_file: str | None = option(
        None, "file that the secret for AUTH is read from for each connection; ends of lines behind it do not count",
        kind=str,
    )  # fmt: skip
    topology_region: str | None = option(None, "region of this client, for zone-aware servers", kind=str)
    topology_zone: str | None = option(None, "zone of this client, for zone-aware servers", kind=str)
    desired_tag: str | None = option(None, "redesigned: receive messages with this tag only", kind=str)
    extend_support: bool = option(False, "redesigned: receive extended headers; must equal the topic's setting")
    ext_filter: Mapping[str, Any] | None = option(None, "redesigned: filter on extended headers")
    connect_timeout: float = option(5.0, "limit for connect, TLS and handshake together", unit="s", minimum=0.001)
    write_timeout: float = option(
        30.0, "limit for the peer to take, or to acknowledge, bytes that are written", unit="s", minimum=0.001
    )
    max_frame_size: int = option(
        8 * 1024 * 1024,
        "largest frame that is received from nsqd; a larger message comes without its body, to the give-up policy",
        unit="bytes",
        minimum=1024,
        maximum=2**31 - 1,
    )
    local_address: str | None = option(None, "local address to connect from", kind=str)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.snappy and self.deflate:
            raise ConfigError("snappy=True with deflate=True: a connection is compressed one way at most")
        if self.tls_options and not self.tls_v1:  # who names a certificate does not want secrets sent in clear
            raise ConfigError("tls_options without tls_v1=True: nothing would be encrypted; give both, or neither")
        if self.auth_secret is not None and not isinstance(self.auth_secret, (str, bytes)):
            raise ConfigError("auth_secret='***': must be str or bytes, or None")
        if self.auth_secret is not None and not self.auth_secret:
            raise ConfigError("auth_secret: it is empty; give the secret, or None where no nsqd asks for AUTH")
        if self.auth_secret is not None and self.auth_secret_file is not None:
            raise ConfigError("auth_secret with auth_secret_file: which of the two is meant? Give one")
        if self.ext_filter is not None:
            _check_ext_filter(self.ext_filter)
        if self.desired_tag is not None and len(self.desired_tag) > MAX_TAG_SIZE:
            raise ConfigError(f"desired_tag={self.desired_tag!r}: must have {MAX_TAG_SIZE} characters at most")


class LookupConfig(Config, frozen=True):
    """Polling of the lookup services."""

    lookupd_poll_interval: float = option(60.0, "time between polls", unit="s", minimum=0.01)
    lookupd_poll_jitter: float = option(0.3, "random share added to the interval", minimum=0.0, maximum=1.0)
    lookupd_timeout: float = option(2.0, "limit for one HTTP request, in total", unit="s", minimum=0.001)
    lookupd_refresh_interval: float = option(
        0.5, "shortest time between two polls for one topic, however often one is asked for", unit="s", minimum=0.0
    )
    lookupd_max_producers: int = option(
        1000, "most nsqds that one answer may name; an answer with more is a bad one", minimum=1, maximum=1_000_000
    )
    discovery_filter: Any = option(
        None,
        "which of the nsqds that lookup names are used: a function of one, (nsqd) -> bool, or a mapping of its fields"
        " to patterns such as {'topology_zone': 'a'}; None: all",
        kind=object,
    )
    # Any, as help() evaluates annotations, and the class is imported only by who uses it; the stub has its type.
    config_source: Any = option(
        None,
        "where trace switches and nsqlookupds are read from while the client runs: a"
        " FileConfigSource, HttpConfigSource, or a ConfigSource of yours; None: nowhere",
        kind=object,
    )
    lookupd_authorization: str | None = option(None, "Authorization header for lookup services", secret=True)
    lookupd_tls_options: Mapping[str, Any] | Any = option(
        None,
        "for https: an ssl.SSLContext, or a mapping: cafile, certfile, keyfile, server_hostname, verify",
        secret=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.discovery_filter is not None and not callable(self.discovery_filter):
            _check_discovery_filter(self.discovery_filter)
        if self.config_source is not None and not callable(getattr(self.config_source, "next", None)):
            raise ConfigError(
                f"config_source={self.config_source!r}: must have a method next, as a ConfigSource, or None"
            )


def _check_strategy(strategy: Any) -> None:
    """Raise ConfigError for what is no BackoffStrategy, before the first failure shows it."""
    try:
        is_one = strategy.duration(1) >= 0 and 0 <= strategy.jitter <= 1
    except (AttributeError, TypeError):
        is_one = False
    if not is_one:
        raise ConfigError(
            f"backoff_strategy={strategy!r}: must have duration(level), which gives seconds, and jitter, 0 to 1"
        )


class ConsumerConfig(Config, frozen=True):
    """How a consumer takes messages, and what it does with those that fail."""

    max_tries: int = option(5, "attempts before a message is given up; 0: no limit", minimum=0, maximum=65535)
    max_in_flight: int | None = option(
        None,
        "messages held at once, over all connections; None: one for each connection, no fewer than handlers may run",
        minimum=0,
        maximum=1_000_000,
        kind=int,
    )
    drop_expired: bool = option(
        True,
        "do not handle a message whose msg_timeout is over, which nsqd has taken back, and ask for no more messages"
        " than handlers can begin with in time",
    )
    close_timeout: float | None = option(
        30.0,
        "limit for close(), and for the end of a with block, where close() is given no timeout; None: handlers may take"
        " for ever",
        unit="s",
        minimum=0.0,
        kind=float,
    )
    requeue_unfinished: bool = option(
        False,
        "when the timeout of close() is over, requeue at once what handlers have not finished; otherwise nsqd delivers"
        " it again after its msg_timeout",
    )
    requeue_delay: int | None = option(
        None,
        "delay of every requeue, in milliseconds as gnsq has it; None: computed from the attempts",
        unit="ms",
        minimum=0,
        kind=int,
    )
    requeue_base_delay: float = option(1.0, "computed requeue delay after the first attempt", unit="s", minimum=0.0)
    requeue_factor: float = option(2.0, "growth of the computed requeue delay an attempt", minimum=1.0)
    requeue_max_delay: float = option(900.0, "cap of the computed requeue delay", unit="s", minimum=0.0)
    requeue_jitter: float = option(
        0.1, "random share added to or taken from a computed delay", minimum=0.0, maximum=1.0
    )
    low_ready_idle_timeout: float = option(
        10.0,
        "an idle connection gives its RDY up after so long when there are more connections than max_in_flight",
        unit="s",
        minimum=0.01,
    )
    max_backoff_duration: float = option(128.0, "longest pause of backoff; 0: no backoff", unit="s", minimum=0.0)
    backoff_on_requeue: bool = option(True, "a requeue counts as a failure for backoff")
    backoff_scope: str = option(
        OF_CONSUMER,
        "consumer: failures pause all connections; connection: each failure, and each loss of a connection, pauses the"
        " connection that it came from, and no other",
        choices=BACKOFF_SCOPES,
    )
    backoff_strategy: Any = option(
        None, "how long pauses are: a BackoffStrategy; None: 1 s, doubled with each failure after a pause", kind=object
    )
    max_reconnect_delay: float = option(60.0, "longest pause between attempts to reconnect", unit="s", minimum=0.01)
    concurrency: int | None = option(
        None, "handlers that run at once; None: one a connection, in order", minimum=1, kind=int
    )
    handler_threads: int = option(
        0,
        "native threads that run handlers, for code that blocks; 0: handlers run as greenlets",
        minimum=0,
        maximum=1000,
    )
    batch_size: int = option(1000, "most messages a batch handler gets in one call", minimum=1, maximum=1_000_000)
    max_age: float = option(
        0.0,
        "a message whose timestamp from nsqd is older gets no handler, and goes to max_age_policy; 0: none is too old",
        unit="s",
        minimum=0.0,
        maximum=1e9,
    )
    histograms: bool = option(
        False, "measure samples of what handlers take, and of how old messages are then; see stats()"
    )
    auto_touch: bool = option(
        False,
        "TOUCH a message while its handler runs, and an asynchronous one until it is responded to, up to the server's"
        " max_msg_timeout",
    )
    partitions: Any = option(None, "redesigned: numbers of the partitions to consume; None: all")
    ordered: bool | None = option(
        None, "redesigned: consume in order, one message of a partition at a time; None: as lookup says", kind=bool
    )
    advanced: bool = option(False, "redesigned: messages carry their offset and raw_size also when not ordered")
    order_policy: str = option(
        "deliver", "a message that breaks the order: deliver, drop (hold it back), or stop", choices=ORDER_POLICIES
    )
    start_position_policy: str = option(
        ONCE,
        "once: start_position is set where nobody has begun; each_start: each start of each instance sets it, and what"
        " others have not handled may be skipped, or come again",
        choices=START_POLICIES,
    )
    attempts_threshold: int = option(
        10,
        "attempts from which on an ordered message counts as blocked, and others are warned of",
        minimum=1,
        maximum=4000,
    )
    skip_header: str | None = option(
        None, "redesigned: messages that have this extended header are finished, and no handler sees them", kind=str
    )
    suppress_retried: int = option(
        0,
        "redesigned: idempotence keys to remember; a message whose key another one had before is finished, and no"
        " handler sees it; 0: all are handled",
        minimum=0,
        maximum=100_000_000,
    )
    decompress: bool = option(True, "redesigned: decompress bodies that their ext headers call compressed")
    max_decompressed_size: int = option(
        16 * 1024 * 1024, "largest body that is decompressed", unit="bytes", minimum=1, maximum=2**31 - 1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("partitions", _partitions(self.partitions))
        if self.backoff_strategy is not None:
            _check_strategy(self.backoff_strategy)

    @property
    def handlers(self) -> int:
        """How many handlers run at once, over all connections; 0: one for each connection."""
        return self.concurrency or self.handler_threads


class ProducerConfig(Config, frozen=True):
    """How a producer publishes, retries and batches."""

    # Twice what a cluster of the redesigned servers takes to elect a leader.
    publish_timeout: float = option(30.0, "limit for one publish with all its attempts", unit="s", minimum=0.001)
    attempt_timeout: float | None = option(
        None,
        "limit for the reply to one attempt: then the connection gets no new publishes until it has replied, and what"
        " it owes is tried at another nsqd if there is one; None: a sixth of publish_timeout",
        unit="s",
        minimum=0.001,
        kind=float,
    )
    max_publish_attempts: int = option(
        3,
        "attempts of one publish, without those that meet a stale or unready leader, or a connection that the server"
        " ends while it works on another publish, after a second of work on this one, or not for the first time",
        minimum=1,
        maximum=1000,
    )
    partition_strategy: str = option(
        "round_robin",
        "partitions for publishes without key and partition: round_robin or least_loaded",
        choices=PARTITION_STRATEGIES,
    )
    key_strategy: Any = option(
        "murmur3",
        "key to partition: murmur3, as youzan's Go client, hashcode, as its Java client, or a function of yours:"
        " (key, number of partitions) -> partition",
        kind=object,
    )
    body_compression: str | None = option(
        None,
        "redesigned: compress bodies with gzip, snappy or lz4 on topics with extended headers, as youzan's Go client"
        " does and reads; None: bodies are not compressed",
        kind=str,
        choices=BODY_CODECS,
    )
    body_compression_min_size: int = option(
        1024, "smallest body that body_compression compresses", unit="bytes", minimum=1
    )
    retry_unknown_outcome: bool = option(
        True, "try again when the first attempt may have been stored: at least once, with duplicates"
    )
    retry_base_delay: float = option(0.05, "pause before the second attempt; doubles", unit="s", minimum=0.0)
    retry_max_delay: float = option(2.0, "longest pause between attempts", unit="s", minimum=0.0)
    coalesce: bool = option(
        True, "send publishes to a topic that are made in one turn of the hub as one MPUB, while others are pending"
    )
    linger: float = option(
        0.0, "wait so long for more publishes to send together as MPUB; 0: none", unit="s", minimum=0.0
    )
    linger_max_messages: int = option(1000, "messages that end the wait", minimum=1, maximum=1_000_000)
    linger_max_bytes: int = option(512 * 1024, "bytes that end the wait", unit="bytes", minimum=1)
    histograms: bool = option(False, "measure samples of what publishes take; see stats()")
    max_pending: int = option(100_000, "publishes that may wait for a reply; more block", minimum=1)
    connections_per_nsqd: int | None = option(
        None,
        "connections to each nsqd; None: one, and where topics have partitions one for each that is published to,"
        " 8 at most",
        minimum=1,
        maximum=64,
        kind=int,
    )
    max_backoff_duration: float = option(128.0, "longest pause between attempts to reconnect", unit="s", minimum=0.01)
    max_msg_size: int = option(1024 * 1024, "largest body that is sent", unit="bytes", minimum=1)
    max_body_size: int = option(
        5 * 1024 * 1024, "largest MPUB body that is sent; larger batches are cut", unit="bytes", minimum=16
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.key_strategy) and self.key_strategy not in KEY_STRATEGIES:
            raise ConfigError(f"key_strategy={self.key_strategy!r}: must be one of {', '.join(KEY_STRATEGIES)}")

    @property
    def attempt_limit(self) -> float:
        """``attempt_timeout``, or what None stands for. Seconds."""
        return self.publish_timeout / 6 if self.attempt_timeout is None else self.attempt_timeout
