"""The options of the source and of the sink: parsed once, checked at load, and pickled into every task.

An option that means the same as one of Spark's Kafka connector has the same
name. Each value is checked on its own here; ``choice`` checks that the options
fit the reader.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nsq_fast._version import __version__
from nsq_fast.config import MAX_PARTITION, ConnectionConfig, LookupConfig, ProducerConfig
from nsq_fast.errors import ConfigError, NameInvalid
from nsq_fast.names import (
    DEFAULT_LOOKUPD_HTTP_PORT,
    DEFAULT_NSQD_HTTP_PORT,
    DEFAULT_NSQD_TCP_PORT,
    Address,
    check_channel,
    check_topic,
    listed,
    parse_addresses,
)
from nsq_fast.runtime import Endpoint, parse_endpoint

from .names import HEADERS, NAMES
from .spelling import ClientOptions, recognise, truth, whole_number

EARLIEST = "earliest"
LATEST = "latest"
AUTO = "auto"
REPLAYABLE = "replayable"
JOURNALLED = "journalled"
READERS = (AUTO, REPLAYABLE, JOURNALLED)
EARLIEST_NUMBER = -2
LATEST_NUMBER = -1

Positions = Literal["earliest", "latest"] | Mapping[int, int]
"""Where to begin or end: everywhere alike, or an offset for each partition; -2 is earliest there, -1 latest."""

# A batch ends with its window, so nsqd should not hold messages back to send more at once.
_CONNECTION: Mapping[str, Any] = {
    "output_buffer_size": 65536,
    "output_buffer_timeout": 25,
    "user_agent": f"nsq_fast/{__version__} spark",
}
# A task that fails is tried again and writes all its rows again: waiting longer for the servers costs less.
_PRODUCER: dict[str, Any] = {"publish_timeout": 60.0, "max_pending": 32_000}
_SOURCE_NAMES = (
    "topic",
    "channel",
    "nsqd_tcp_addresses",
    "nsqd_http_addresses",
    "lookupd_http_addresses",
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "endingTimestamp",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "failOnDataLoss",
    "includeHeaders",
    "columns",
    "reader",
    "journal",
    "consume",
    "suppressDuplicates",
)
_SINK_NAMES = (
    "topic",
    "nsqd_tcp_addresses",
    "lookupd_http_addresses",
    "traceReceipts",
    "traceLog",
    "reportPath",
)
_SOURCE_REFUSED = {"extend_support": "leave it out: whether messages carry headers is up to the topic"}
_SINK_REFUSED = dict.fromkeys(
    ("sample_rate", "msg_timeout", "desired_tag", "ext_filter", "extend_support"),
    "is for consumers; the sink publishes",
)


@dataclass(frozen=True)
class Servers:
    """Where the servers are: lookup services, or nsqds."""

    lookupd_http: tuple[Endpoint, ...] = ()
    nsqd_tcp: tuple[Address, ...] = ()
    nsqd_http: tuple[Endpoint, ...] = ()


@dataclass(frozen=True)
class SourceOptions:
    """The options of a source.

    Attributes:
        servers: where to find the topic.
        starting_offsets, starting_timestamp: where a new query begins; both None: the reader's default. Milliseconds.
        ending_offsets, ending_timestamp: where a batch ends; both None: at what is there now.
        max_offsets_per_trigger: most rows of one micro-batch; None: no limit.
        min_partitions: fewest tasks to split a batch into.
        columns: the columns of the rows, in order.
        reader: ``auto``, ``replayable`` or ``journalled``.
        journal: folder of the journal.
        consume: whether a batch read acknowledges what it has read.
        connection, lookup: for the client.
        given: the options that were set, as they are written; those of the client begin with ``nsq.``.
    """

    topic: str
    channel: str
    servers: Servers
    starting_offsets: Positions | None = None
    starting_timestamp: int | None = None
    ending_offsets: Positions | None = None
    ending_timestamp: int | None = None
    max_offsets_per_trigger: int | None = None
    min_partitions: int | None = None
    fail_on_data_loss: bool = True
    columns: tuple[str, ...] = tuple(name for name in NAMES if name != HEADERS)
    reader: str = AUTO
    journal: str | None = None
    consume: bool = False
    suppress_duplicates: bool = True
    connection: ConnectionConfig = field(default_factory=lambda: ConnectionConfig(**_CONNECTION))
    lookup: LookupConfig = field(default_factory=LookupConfig)
    given: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Read the options as Spark passes them. Raises ConfigError naming the option."""
        found = recognise(options, _SOURCE_NAMES)
        client = ClientOptions(options, ConnectionConfig, LookupConfig, refused=_SOURCE_REFUSED)
        values = _Values(found)
        return cls(
            topic=_name(values, "topic", check_topic),
            channel=_name(values, "channel", check_channel),
            servers=_servers(values, needs_http=True),
            starting_offsets=values.get("startingOffsets", _positions),
            starting_timestamp=values.number("startingTimestamp", 0),
            ending_offsets=values.get("endingOffsets", _positions),
            ending_timestamp=values.number("endingTimestamp", 0),
            max_offsets_per_trigger=values.number("maxOffsetsPerTrigger", 1),
            min_partitions=values.number("minPartitions", 1),
            fail_on_data_loss=values.flag("failOnDataLoss", True),
            columns=_columns(values),
            reader=values.get("reader", _reader) or AUTO,
            journal=values.get("journal", _not_empty),
            consume=values.flag("consume", False),
            suppress_duplicates=values.flag("suppressDuplicates", True),
            connection=_connection(client, _CONNECTION),
            lookup=client.make(LookupConfig),
            given=frozenset(found) | {f"nsq.{name}" for name in client.given},
        )


@dataclass(frozen=True)
class SinkOptions:
    """The options of a sink.

    Attributes:
        topic: of every row, as with Kafka, whatever a column ``topic`` says; None: the column says it.
        trace_receipts: whether every row is traced, and not only those with a trace id.
        trace_log: folder for the trace logs of the tasks, on the machines where they run; every row is traced then.
        report_path: folder, on the driver, for a report of each write.
        given: as in ``SourceOptions``.
    """

    servers: Servers
    topic: str | None = None
    trace_receipts: bool = False
    trace_log: str | None = None
    report_path: str | None = None
    connection: ConnectionConfig = field(default_factory=ConnectionConfig)
    lookup: LookupConfig = field(default_factory=LookupConfig)
    producer: ProducerConfig = field(default_factory=lambda: ProducerConfig(**_PRODUCER))
    given: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Read the options as Spark passes them. Raises ConfigError naming the option."""
        found = recognise(options, _SINK_NAMES, ignored=("checkpointLocation",))
        client = ClientOptions(options, ConnectionConfig, LookupConfig, ProducerConfig, refused=_SINK_REFUSED)
        values = _Values(found)
        return cls(
            servers=_servers(values, needs_http=False),
            topic=_name(values, "topic", check_topic) if "topic" in found else None,
            trace_receipts=values.flag("traceReceipts", False),
            trace_log=values.get("traceLog", _not_empty),
            report_path=values.get("reportPath", _not_empty),
            connection=_connection(client, {"user_agent": _CONNECTION["user_agent"]}),
            lookup=client.make(LookupConfig),
            producer=client.make(ProducerConfig, **_PRODUCER),
            given=frozenset(found) | {f"nsq.{name}" for name in client.given},
        )

    @property
    def traces_all(self) -> bool:
        """Whether rows without a trace id get one."""
        return self.trace_receipts or self.trace_log is not None


class _Values:
    """Options by name, parsed when they are asked for."""

    def __init__(self, found: Mapping[str, str]) -> None:
        self.found = found

    def get(self, name: str, parse: Callable[[str, str], Any]) -> Any:
        return parse(name, self.found[name]) if name in self.found else None

    def number(self, name: str, minimum: int) -> int | None:
        return whole_number(name, self.found[name], minimum) if name in self.found else None

    def flag(self, name: str, default: bool) -> bool:
        return truth(name, self.found[name]) if name in self.found else default


def _connection(client: ClientOptions, defaults: Mapping[str, Any]) -> ConnectionConfig:
    connection: ConnectionConfig = client.make(ConnectionConfig, **defaults)
    if connection.tls_options and not connection.tls_v1:  # who names a certificate expects TLS
        raise ConfigError(f"nsq.tls_{next(iter(connection.tls_options))}: has no effect without nsq.tls_v1=true")
    return connection


def _not_empty(name: str, value: str) -> str:
    if not value.strip():
        raise ConfigError(f"{name}: must not be empty")
    return value.strip()


def _name(values: _Values, option: str, check: Callable[[str], str]) -> str:
    if option not in values.found:
        raise ConfigError(f"{option}: is required")
    try:
        return check(values.found[option])
    except NameInvalid as error:
        raise ConfigError(f"{option}={values.found[option]!r}: {error}") from None


def _reader(name: str, value: str) -> str:
    if value.lower() not in READERS:
        raise ConfigError(f"{name}={value!r}: must be {', '.join(READERS[:-1])} or {READERS[-1]}")
    return value.lower()


def _columns(values: _Values) -> tuple[str, ...]:
    with_headers = values.flag("includeHeaders", False)
    if "columns" not in values.found:
        return tuple(name for name in NAMES if with_headers or name != HEADERS)
    text = values.found["columns"]
    columns = tuple(part.strip().lower() for part in text.split(","))
    unknown = [name for name in columns if name not in NAMES]
    if unknown or len(set(columns)) < len(columns):
        raise ConfigError(f"columns={text!r}: must be some of {', '.join(NAMES)}, each once")
    if "includeHeaders" in values.found and with_headers != (HEADERS in columns):
        raise ConfigError(f"includeHeaders={str(with_headers).lower()}: columns={text!r} says otherwise")
    return columns


def _positions(name: str, value: str) -> Positions:
    if value.strip().lower() == EARLIEST:
        return "earliest"
    if value.strip().lower() == LATEST:
        return "latest"
    try:
        given = json.loads(value)
        positions = {int(partition): offset for partition, offset in given.items()}
    except (ValueError, AttributeError):
        positions = {}
    if not positions or not all(_is_position(*each) for each in positions.items()):
        raise ConfigError(
            f'{name}={value!r}: must be earliest, latest, or JSON as {{"0": 1234, "1": -1}}: an offset for each'
            f" partition, {EARLIEST_NUMBER} for earliest, {LATEST_NUMBER} for latest"
        )
    return positions


def _is_position(partition: int, offset: Any) -> bool:
    return 0 <= partition <= MAX_PARTITION and type(offset) is int and offset >= EARLIEST_NUMBER


def _servers(values: _Values, *, needs_http: bool) -> Servers:
    servers = Servers(
        lookupd_http=values.get("lookupd_http_addresses", _endpoints(DEFAULT_LOOKUPD_HTTP_PORT)) or (),
        nsqd_tcp=values.get("nsqd_tcp_addresses", _addresses) or (),
        nsqd_http=values.get("nsqd_http_addresses", _endpoints(DEFAULT_NSQD_HTTP_PORT)) or (),
    )
    if bool(servers.lookupd_http) == bool(servers.nsqd_tcp):
        given = "both are given" if servers.nsqd_tcp else "neither is given"
        raise ConfigError(f"lookupd_http_addresses or nsqd_tcp_addresses: one of them is required, {given}")
    if needs_http and len(servers.nsqd_http) != len(servers.nsqd_tcp):
        raise ConfigError(
            "nsqd_http_addresses: must name the HTTP ports of the nsqds in nsqd_tcp_addresses, in the same order;"
            f" there are {len(servers.nsqd_http)} for {len(servers.nsqd_tcp)}"
        )
    return servers


def _addresses(name: str, value: str) -> tuple[Address, ...]:
    _refuse_user(name, value)
    try:
        found = tuple(parse_addresses(value, DEFAULT_NSQD_TCP_PORT, name))
    except ConfigError as error:
        raise ConfigError(f"{name}={value!r}: {error}") from None
    return found or _none_named(name, value)


def _endpoints(default_port: int) -> Callable[[str, str], tuple[Endpoint, ...]]:
    def parse(name: str, value: str) -> tuple[Endpoint, ...]:
        _refuse_user(name, value)
        try:
            found = tuple(dict.fromkeys(parse_endpoint(each, default_port) for each in listed(value, name)))
        except ConfigError as error:
            raise ConfigError(f"{name}={value!r}: {error}") from None
        return found or _none_named(name, value)

    return parse


def _refuse_user(name: str, value: str) -> None:
    if "@" in value:  # not shown: there may be a password in it
        raise ConfigError(f"{name}: must hold no user name or password; there is nsq.lookupd_authorization_secret")


def _none_named(name: str, value: str) -> Any:
    raise ConfigError(f"{name}={value!r}: names no server")
