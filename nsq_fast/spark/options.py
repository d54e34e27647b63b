"""The options of the source and of the sink: parsed once, checked at load, and pickled into every task.

An option that means the same as one of Spark's Kafka connector has the same
name. Each value is checked on its own here; ``choice`` checks that the options
fit the reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nsq_fast._version import __version__
from nsq_fast.config import ConnectionConfig, LookupConfig, ProducerConfig
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

from .names import HEADERS, HEADERS_AS, JSON, NAMES
from .positions import LATEST, ByPartition, ByTopic, Positions, parse_positions, parse_times
from .spelling import ClientOptions, milliseconds, recognise, truth, whole_number

AUTO = "auto"
REPLAYABLE = "replayable"
JOURNALLED = "journalled"
READERS = (AUTO, REPLAYABLE, JOURNALLED)
ERROR = "error"
STRATEGIES = (LATEST, ERROR)
"""What becomes of a partition that has nothing published at or after a starting time."""

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
    "topicPattern",
    "channel",
    "nsqd_tcp_addresses",
    "nsqd_http_addresses",
    "lookupd_http_addresses",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "failOnDataLoss",
    "includeHeaders",
    "headersAs",
    "columns",
    "pushFilters",
    "reader",
    "journal",
    "journalEndpoint",
    "journalRegion",
    "consume",
    "suppressDuplicates",
)
_SINK_NAMES = (
    "topic",
    "nsqd_tcp_addresses",
    "lookupd_http_addresses",
    "columns",
    "traceReceipts",
    "traceLog",
    "reportPath",
    "idempotenceKey",
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
class ObjectStore:
    """Where the object store of a journal is; None: where boto3's own settings say. Credentials are boto3's alone."""

    endpoint: str | None = None
    region: str | None = None


@dataclass(frozen=True)
class SourceOptions:
    """The options of a source.

    Attributes:
        topic: its name; of several, or of a pattern, what the option says.
        topics: their names; empty when there is a pattern.
        topic_pattern: a regular expression that the whole name of a topic has to match; None: the topics are named.
        servers: where to find the topic.
        starting_offsets, starting_timestamp, starting_times: where a new query begins; all None: the reader's default.
            Times are in milliseconds.
        starting_strategy: of a partition with nothing so late: begin at its end (``latest``), or fail (``error``).
        ending_offsets, ending_timestamp, ending_times: where a batch ends; all None: at what is there now.
        max_offsets_per_trigger, max_bytes_per_trigger: most rows and bytes of one micro-batch; None: no limit.
        min_offsets_per_trigger: rows that a micro-batch waits for, until it is ``max_trigger_delay`` seconds old.
        min_partitions: fewest tasks to split a batch into.
        columns: the columns of the rows, in order.
        headers_as: what the column of headers is, ``json`` or ``map``.
        push_filters: whether a batch reads only where rows can be that Spark filters for.
        reader: ``auto``, ``replayable`` or ``journalled``.
        journal: folder of the journal, or s3://bucket/prefix.
        object_store: of a journal that lies in one.
        consume: whether a batch read acknowledges what it has read.
        connection, lookup: for the client.
        given: the options that were set, as they are written; those of the client begin with ``nsq.``.
    """

    topic: str
    channel: str
    servers: Servers
    topics: tuple[str, ...] = ()
    topic_pattern: str | None = None
    starting_offsets: Positions | None = None
    starting_timestamp: int | None = None
    starting_times: ByPartition | ByTopic | None = None
    starting_strategy: str = LATEST
    ending_offsets: Positions | None = None
    ending_timestamp: int | None = None
    ending_times: ByPartition | ByTopic | None = None
    max_offsets_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay: float = 900.0
    min_partitions: int | None = None
    fail_on_data_loss: bool = True
    columns: tuple[str, ...] = tuple(name for name in NAMES if name != HEADERS)
    headers_as: str = JSON
    push_filters: bool = False
    reader: str = AUTO
    journal: str | None = None
    object_store: ObjectStore = field(default_factory=ObjectStore)
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
        topics, pattern = _topics(values)
        return cls(
            topic=",".join(topics) if pattern is None else pattern,
            channel=_name(values, "channel", check_channel),
            servers=_servers(values, needs_http=True),
            topics=topics,
            topic_pattern=pattern,
            starting_offsets=values.get("startingOffsets", parse_positions),
            starting_timestamp=values.number("startingTimestamp", 0),
            starting_times=values.get("startingOffsetsByTimestamp", parse_times),
            starting_strategy=values.get("startingOffsetsByTimestampStrategy", _strategy) or LATEST,
            ending_offsets=values.get("endingOffsets", parse_positions),
            ending_timestamp=values.number("endingTimestamp", 0),
            ending_times=values.get("endingOffsetsByTimestamp", parse_times),
            max_offsets_per_trigger=values.number("maxOffsetsPerTrigger", 1),
            max_bytes_per_trigger=values.number("maxBytesPerTrigger", 1),
            min_offsets_per_trigger=values.number("minOffsetsPerTrigger", 1),
            max_trigger_delay=(values.get("maxTriggerDelay", milliseconds) or 900_000) / 1000,
            min_partitions=values.number("minPartitions", 1),
            fail_on_data_loss=values.flag("failOnDataLoss", True),
            columns=_columns(values),
            headers_as=values.get("headersAs", _headers_as) or JSON,
            push_filters=values.flag("pushFilters", False),
            reader=values.get("reader", _reader) or AUTO,
            journal=values.get("journal", _not_empty),
            object_store=ObjectStore(
                endpoint=values.get("journalEndpoint", _url), region=values.get("journalRegion", _not_empty)
            ),
            consume=values.flag("consume", False),
            suppress_duplicates=values.flag("suppressDuplicates", True),
            connection=_connection(client, _CONNECTION),
            lookup=client.make(LookupConfig),
            given=frozenset(found) | {f"nsq.{name}" for name in client.given},
        )

    @property
    def reads_several(self) -> bool:
        """Whether there may be more topics than one."""
        return self.topic_pattern is not None or len(self.topics) > 1

    @property
    def server_names(self) -> tuple[str, ...]:
        """The servers that are asked, as ``host:port``."""
        servers = self.servers
        return tuple(str(each.address) for each in servers.lookupd_http) or tuple(map(str, servers.nsqd_tcp))

    def names_topic(self, topic: str) -> bool:
        """Whether the options ask for it."""
        if self.topic_pattern is not None:
            return re.fullmatch(self.topic_pattern, topic) is not None
        return topic in self.topics

    def for_topic(self, topic: str) -> SourceOptions:
        """The same options, of this topic alone."""
        return self if self.topics == (topic,) else replace(self, topic=topic, topics=(topic,), topic_pattern=None)


@dataclass(frozen=True)
class SinkOptions:
    """The options of a sink.

    Attributes:
        topic: of every row, as with Kafka, whatever a column ``topic`` says; None: the column says it.
        columns: of a table that CREATE TABLE makes; empty: the body, and the topic without the option for it.
        trace_receipts: whether every row is traced, and not only those with a trace id.
        trace_log: folder for the trace logs of the tasks, on the machines where they run; every row is traced then.
        report_path: folder, on the driver, for a report of each write.
        idempotence_key: whether each message gets a header by which consumers know it when it is published again.
        given: as in ``SourceOptions``.
    """

    servers: Servers
    topic: str | None = None
    columns: tuple[str, ...] = ()
    trace_receipts: bool = False
    trace_log: str | None = None
    report_path: str | None = None
    idempotence_key: bool = False
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
            columns=values.get("columns", _column_names) or (),
            trace_receipts=values.flag("traceReceipts", False),
            trace_log=values.get("traceLog", _not_empty),
            report_path=values.get("reportPath", _not_empty),
            idempotence_key=values.flag("idempotenceKey", False),
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


def _url(name: str, value: str) -> str:
    if "@" in value:  # not shown: there may be a secret in it
        raise ConfigError(f"{name}: must hold no credentials; boto3 finds them in its environment")
    if not value.startswith(("http://", "https://")):
        raise ConfigError(f"{name}={value!r}: must begin with https:// or http://")
    return value


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
    with_headers = values.flag("includeHeaders", "headersAs" in values.found)
    if "headersAs" in values.found and not with_headers:
        raise ConfigError("headersAs: includeHeaders=false says that there is no such column")
    if "columns" not in values.found:
        return tuple(name for name in NAMES if with_headers or name != HEADERS)
    text = values.found["columns"]
    columns = _column_names("columns", text)
    unknown = [name for name in columns if name not in NAMES]
    if unknown or len(set(columns)) < len(columns):
        raise ConfigError(f"columns={text!r}: must be some of {', '.join(NAMES)}, each once")
    if "includeHeaders" in values.found and with_headers != (HEADERS in columns):
        raise ConfigError(f"includeHeaders={str(with_headers).lower()}: columns={text!r} says otherwise")
    if "headersAs" in values.found and HEADERS not in columns:
        raise ConfigError(f"headersAs: has no effect, as columns={text!r} has no {HEADERS}")
    return columns


def _headers_as(name: str, value: str) -> str:
    if value.lower() not in HEADERS_AS:
        raise ConfigError(f"{name}={value!r}: must be {' or '.join(HEADERS_AS)}")
    return value.lower()


def _column_names(name: str, value: str) -> tuple[str, ...]:
    return tuple(part.strip().lower() for part in value.split(","))


def _topics(values: _Values) -> tuple[tuple[str, ...], str | None]:
    """The topics, or a pattern."""
    pattern = values.get("topicPattern", _not_empty)
    if pattern is not None:
        if "topic" in values.found:
            raise ConfigError("topic and topicPattern: only one of them may be given")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"topicPattern={pattern!r}: no regular expression: {error}") from None
        return (), pattern
    if "topic" not in values.found:
        raise ConfigError("topic: is required, or topicPattern")
    given = values.found["topic"]
    try:
        return tuple(
            dict.fromkeys(check_topic(each.strip() if "," in given else each) for each in given.split(","))
        ), None
    except NameInvalid as error:
        raise ConfigError(f"topic={given!r}: {error}") from None


def _strategy(name: str, value: str) -> str:
    if value.lower() not in STRATEGIES:
        raise ConfigError(f"{name}={value!r}: must be {' or '.join(STRATEGIES)}")
    return value.lower()


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
