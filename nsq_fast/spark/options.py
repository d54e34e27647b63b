"""The options of the source and of the sink: parsed once, checked at load, and pickled into every task.

An option that means the same as one of Spark's Kafka connector has the same name. Each value is checked on its own
here; ``source`` checks that the options fit the reader. It needs neither pyspark nor pyarrow.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, cast

import msgspec

from nsq_fast import __version__
from nsq_fast.client.http import Endpoint, parse_endpoint
from nsq_fast.config import MAX_PARTITION, Config, ConnectionConfig, LookupConfig, ProducerConfig
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

Parse = Callable[[str, str], Any]
"""Of an option's name and text, its value. Raises ConfigError, with the name."""

HEADERS = "headers"
JSON, MAP, ARRAY = "json", "map", "array"
HEADERS_AS: Mapping[str, str] = {
    JSON: "string",
    MAP: "map<string,string>",
    ARRAY: "array<struct<key:string,value:binary>>",
}
"""What the column of headers may be: the text of each header as it came, or its entries, as a map or as with Kafka."""
COLUMNS: Mapping[str, str] = {
    "topic": "string",
    "partition": "int",
    "message_id": "binary",
    "internal_id": "bigint",
    "trace_id": "bigint",
    "timestamp": "timestamp",
    "attempts": "int",
    "offset": "bigint",
    "size": "int",
    HEADERS: HEADERS_AS[JSON],
    "body": "binary",
    "nsqd": "string",
}
"""All columns, in their order, and their types as Spark writes them."""
NAMES = tuple(COLUMNS)
DEFAULT_COLUMNS: tuple[str, ...] = ("timestamp", "body", "topic", "attempts")
"""Those that most programs use. Each further one costs every row that crosses from Python to the JVM."""
ALL = "*"


def column_type(name: str, headers_as: str) -> str:
    return HEADERS_AS[headers_as] if name == HEADERS else COLUMNS[name]


TEXT, BINARY = "string", "binary"
WHOLE_NUMBERS = ("tinyint", "smallint", "int", "bigint")
SINK_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "body": (BINARY, TEXT),
    "topic": (TEXT,),
    "partition": WHOLE_NUMBERS,
    "key": (TEXT, BINARY, *WHOLE_NUMBERS),
    "trace_id": WHOLE_NUMBERS,
    "headers": tuple(HEADERS_AS.values()),
    "tag": (TEXT,),
    "defer_ms": WHOLE_NUMBERS,
}
"""Column of a sink -> the types that it may have, as Spark writes them."""


# Option names as Spark passes them on: in lower case, with text as values; and as the documentation writes them.
#
# Spark lower-cases the keys before Python sees them, so an option is recognised
# by its letters and digits alone, and error messages show it as the documentation
# writes it. Options that begin with ``nsq.`` are those of the client's configs,
# with the same names, ranges and messages.
#
# A secret is only accepted under a key whose value Spark's default redaction
# hides from plans, the web UI and the event log.


PREFIX = "nsq."
REDACTED = re.compile(r"(?i)secret|password|token|access[.]?key")
"""``spark.redaction.regex``, its default."""

_TLS_FIELDS = ("tls_options", "lookupd_tls_options")
_TLS_PARTS = ("cafile", "certfile", "keyfile", "server_hostname", "verify")
_KAFKA = {
    "subscribe": "topic",
    "subscribepattern": "topicPattern",
    "assign": "topic, with startingOffsets for each partition",
    "kafka.bootstrap.servers": "lookupd_http_addresses, or nsqd_tcp_addresses",
    "kafka.group.id": "channel",
    "groupidprefix": "channel",
}
_JSON_FIELDS = frozenset({"ext_filter"})


def normal(key: str) -> str:
    """A key without case and underscores: what Spark leaves of ``startingOffsets`` is found again by it."""
    return key.lower().replace("_", "")


def recognise(
    options: Mapping[str, str], known: Iterable[Option], ignored: Iterable[str] = (), columns: Iterable[str] = ()
) -> dict[str, str]:
    """The options whose names do not begin with ``nsq.``, under the names in ``known``.

    Args:
        columns: what each row says, and people look for among the options.
    Raises ConfigError for one that is not known. Values are not shown: there may be a secret in a misspelt one.
    """
    spelt = {normal(each.name): each.name for each in known}
    skipped = {normal(name) for name in ignored}
    found: dict[str, str] = {}
    for key, value in options.items():
        if key.lower().startswith(PREFIX) or normal(key) in skipped:
            continue
        name = spelt.get(normal(key))
        if name is None:
            of_kafka = _KAFKA.get(key.lower())
            near = {**spelt, **{normal(PREFIX + each): PREFIX + each for each in ("auth_secret", "tls_v1")}}
            if of_kafka:
                hint = f", it is Kafka's; here it is {of_kafka}"
            elif column := next((each for each in columns if normal(each) == normal(key)), None):
                hint = f": each row says it, in a column {column!r} of the DataFrame"
            else:
                hint = _hint(normal(key), near)
            raise ConfigError(f"unknown option {key!r}{hint}")
        if name in found and found[name] != value:
            raise ConfigError(f"{name}: is given twice, with and without underscores")
        found[name] = value
    return found


def _hint(key: str, spelt: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(key, spelt, n=1)
    return f"; did you mean {spelt[near[0]]!r}?" if near else ""


class _Spelling(NamedTuple):
    """An option of the client as it is written for Spark, without the prefix.

    Attributes:
        field: the one of a config that it sets; with ``part``, that entry of it.
        instead: what to write, where Spark would show the value of this one.
    """

    name: str
    field: str
    part: str = ""
    instead: str = ""


@lru_cache
def _spellings(kinds: tuple[type[Config], ...]) -> Mapping[str, _Spelling]:
    return {normal(each.name): each for kind in kinds for each in _spellings_of(kind)}


def _spellings_of(kind: type[Config]) -> Iterator[_Spelling]:
    for name, option in kind.OPTIONS.items():
        instead = ""
        if name in _TLS_FIELDS:
            parts = [_Spelling(name.removesuffix("options") + part, name, part) for part in _TLS_PARTS]
            instead = f"write {', '.join(PREFIX + each.name for each in parts)}"
            yield from parts
        elif option.secret and not REDACTED.search(name):
            instead = f"write {PREFIX}{name}_secret, whose value it hides"
            yield _Spelling(f"{name}_secret", name)
        yield _Spelling(name, name, instead=instead)


class ClientOptions:
    """The options that begin with ``nsq.``, shared out among the configs that know them.

    Args:
        options: all that Spark gives; the others are passed over.
        kinds: the configs that may be asked for.
        refused: option -> why it has no place here.

    Attributes:
        given: the names of those that were given.
    """

    def __init__(self, options: Mapping[str, str], *kinds: type[Config], refused: Mapping[str, str]) -> None:
        spelt = _spellings(kinds)
        self._values: dict[str, Any] = {}
        for key, value in options.items():
            if not key.lower().startswith(PREFIX):
                continue
            bare = normal(key[len(PREFIX) :])
            if bare not in spelt:
                written = {each: PREFIX + spelling.name for each, spelling in spelt.items()}
                raise ConfigError(f"unknown option {key!r}{_hint(bare, written)}")
            self._add(spelt[bare], value, refused)
        self.given: frozenset[str] = frozenset(PREFIX + name for name in self._values)

    def make(self, kind: type[Config], **defaults: Any) -> Any:
        """A config of ``kind``. Raises ConfigError, with the option as it is written for Spark."""
        values = {name: value for name, value in self._values.items() if name in kind.OPTIONS}
        try:
            return kind(**{**defaults, **values})
        except ConfigError as error:
            raise ConfigError(f"{PREFIX}{error}") from None

    def _add(self, spelling: _Spelling, value: str, refused: Mapping[str, str]) -> None:
        name, field, part, instead = spelling
        if name in refused:
            raise ConfigError(f"{PREFIX}{name}: {refused[name]}")
        if instead:
            raise ConfigError(f"{PREFIX}{name}: Spark would show its value in plans and logs; {instead}")
        if part:
            self._values.setdefault(field, {})[part] = truth(PREFIX + name, value) if part == "verify" else value
        else:
            self._values[field] = _from_json(name, value) if field in _JSON_FIELDS else value


def _from_json(name: str, value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        raise ConfigError(f"{PREFIX}{name}={value!r}: must be JSON") from None


# What the text of an option means.


def truth(name: str, value: str) -> bool:
    """``true`` or ``false``, as Spark writes them. Raises ConfigError."""
    if value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise ConfigError(f"{name}={value!r}: must be true or false")


def _at_least(minimum: int) -> Parse:
    def parse(name: str, value: str) -> int:
        with contextlib.suppress(ValueError):
            if int(value) >= minimum:
                return int(value)
        raise ConfigError(f"{name}={value!r}: must be a whole number, at least {minimum}")

    return parse


_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def _seconds(name: str, value: str) -> float:
    """Of a duration as Spark writes it: ``15m``, ``30s``, or milliseconds."""
    found = re.fullmatch(r"(\d+)\s*(ms|s|m|h|d)?", value.strip().lower())
    if found is None or not int(found[1]):
        raise ConfigError(f"{name}={value!r}: must be a duration as 15m, 30s or 500ms")
    return int(found[1]) * _UNITS[found[2] or "ms"] / 1000


def _choice(allowed: Sequence[str]) -> Parse:
    def parse(name: str, value: str) -> str:
        if value.lower() not in allowed:
            raise ConfigError(f"{name}={value!r}: must be {', '.join(allowed[:-1])} or {allowed[-1]}")
        return value.lower()

    return parse


def _not_empty(name: str, value: str) -> str:
    if not value.strip():
        raise ConfigError(f"{name}: must not be empty")
    return value.strip()


def _pattern(name: str, value: str) -> str:
    pattern = _not_empty(name, value)
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{name}={pattern!r}: no regular expression: {error}") from None
    return pattern


def _name(check: Callable[[str], Any]) -> Parse:
    """``check`` raises NameInvalid."""

    def parse(name: str, value: str) -> Any:
        try:
            return check(value)
        except NameInvalid as error:
            raise ConfigError(f"{name}={value!r}: {error}") from None

    return parse


def _check_topics(value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(check_topic(each.strip() if "," in value else each) for each in value.split(",")))


def _url(name: str, value: str) -> str:
    if "@" in value:  # not shown: there may be a secret in it
        raise ConfigError(f"{name}: must hold no credentials; boto3 finds them in its environment")
    if not value.startswith(("http://", "https://")):
        raise ConfigError(f"{name}={value!r}: must begin with https:// or http://")
    return value


def _places(parse_all: Callable[[str, str], Iterable[Any]]) -> Parse:
    """Servers with commas between them. ``parse_all``: of the text and the name; it raises ConfigError."""

    def parse(name: str, value: str) -> tuple[Any, ...]:
        if "@" in value:  # not shown: there may be a password in it
            raise ConfigError(f"{name}: must hold no user name or password; there is nsq.lookupd_authorization_secret")
        try:
            found = tuple(parse_all(value, name))
        except ConfigError as error:
            raise ConfigError(f"{name}={value!r}: {error}") from None
        if not found:
            raise ConfigError(f"{name}={value!r}: names no server")
        return found

    return parse


def _endpoints(port: int) -> Parse:
    return _places(lambda value, name: dict.fromkeys(parse_endpoint(each, port) for each in listed(value, name)))


_addresses = _places(lambda value, _: parse_addresses(value, DEFAULT_NSQD_TCP_PORT))


def _column_names(name: str, value: str) -> tuple[str, ...]:
    return tuple(part.strip().lower() for part in value.split(","))


def _source_columns(name: str, value: str) -> tuple[str, ...]:
    columns = _column_names(name, value)
    if columns != (ALL,) and (set(columns) - set(NAMES) or len(set(columns)) < len(columns)):
        raise ConfigError(f"{name}={value!r}: must be {ALL} or some of {', '.join(NAMES)}, each once")
    return columns


# Where to begin and where to end, as the options say it: everywhere alike, by partition, or by topic and partition.
#
# The JSON is that of Spark's Kafka connector: ``{"orders": {"0": 1234, "1": -2}}``.
# Where one topic is read its name may be left out: ``{"0": 1234, "1": -2}``.


EARLIEST = "earliest"
LATEST = "latest"
EARLIEST_NUMBER = -2
LATEST_NUMBER = -1

BEGINS = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
ENDS = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
"""Options that say where reading begins and ends: one of each at most."""

ByPartition = Mapping[int, int]
ByTopic = Mapping[str, ByPartition]
Positions = Literal["earliest", "latest"] | ByPartition | ByTopic
"""-2 is earliest there, -1 latest."""


_Partition = Annotated[int, msgspec.Meta(ge=0, le=MAX_PARTITION)]
_Offset = Annotated[int, msgspec.Meta(ge=EARLIEST_NUMBER)]
_Time = Annotated[int, msgspec.Meta(ge=0)]
_OFFSETS = dict[_Partition, _Offset], dict[str, dict[_Partition, _Offset]]
_TIMES = dict[_Partition, _Time], dict[str, dict[_Partition, _Time]]


def parse_positions(name: str, value: str) -> Positions:
    """``earliest``, ``latest``, or offsets. Raises ConfigError."""
    if value.strip().lower() == EARLIEST:
        return "earliest"
    if value.strip().lower() == LATEST:
        return "latest"
    found = _parsed(value, _OFFSETS)
    if found is None:
        raise ConfigError(
            f'{name}={value!r}: must be earliest, latest, or JSON as {{"0": 1234, "1": -1}}, with several topics as'
            f' {{"orders": {{"0": 1234}}}}: an offset for each partition, {EARLIEST_NUMBER} for earliest,'
            f" {LATEST_NUMBER} for latest"
        )
    return found


def parse_times(name: str, value: str) -> ByPartition | ByTopic:
    """Milliseconds since the epoch for each partition. Raises ConfigError."""
    found = _parsed(value, _TIMES)
    if found is None:
        raise ConfigError(
            f'{name}={value!r}: must be JSON as {{"orders": {{"0": 1700000000000}}}}: for each partition milliseconds'
            " since the epoch"
        )
    return found


def of_topic(name: str, positions: ByPartition | ByTopic, topic: str) -> ByPartition:
    """Those of one topic. Raises ConfigError when it is not named."""
    if not is_by_topic(positions):
        return cast(ByPartition, positions)
    found = cast(ByTopic, positions).get(topic)
    if found is None:
        raise ConfigError(f"{name}: names the topics {', '.join(map(str, sorted(positions)))}, and not {topic!r}")
    return found


def is_by_topic(positions: Any) -> bool:
    return isinstance(positions, Mapping) and any(isinstance(each, Mapping) for each in positions.values())


def _parsed(value: str, kinds: Sequence[Any]) -> ByPartition | ByTopic | None:
    """None for what is neither."""
    for kind in kinds:
        with contextlib.suppress(msgspec.MsgspecError):
            found: ByPartition | ByTopic = msgspec.json.decode(value, type=kind)
            return found if found and {} not in found.values() else None
    return None


AUTO = "auto"
REPLAYABLE = "replayable"
JOURNALLED = "journalled"
READERS = (AUTO, REPLAYABLE, JOURNALLED)
ADOPT, REFUSE, WARN = ORPHANS = ("adopt", "refuse", "warn")
"""What becomes of rows that a query with another checkpoint has acknowledged and not committed."""
ERROR = "error"
STRATEGIES = (LATEST, ERROR)
"""What becomes of a partition that has nothing published at or after a starting time."""
BATCHES, STREAMS = "spark.read", "spark.readStream"


class Only(NamedTuple):
    """The one reader that can honour an option, and why the other one cannot; "" where both can."""

    reader: str = ""
    refusal: str = ""


_BOTH = Only()
_MOVED = Only(REPLAYABLE, "a channel begins and ends where it stands, and cannot be moved")
_KEPT = Only(JOURNALLED, "it reads again from the servers, and keeps no journal")


class Option(NamedTuple):
    """One option. docs/spark.md has a row for each, made from what stands here (`table`).

    Attributes:
        text: what it does, for the docs.
        parse: its value, of its name and its text. Raises ConfigError.
        default: how the docs show it.
        readers: which of them can honour it.
        only: `BATCHES` or `STREAMS` where it is for one of them.
        field: of `SourceOptions` or `SinkOptions`; "" where several options make one field together.
    """

    name: str
    text: str
    parse: Parse
    default: str = ""
    readers: Only = _BOTH
    only: str = ""
    field: str = ""


def _option(
    name: str,
    text: str,
    parse: Parse,
    value: Any = None,
    default: str | None = None,
    *,
    readers: Only = _BOTH,
    only: str = "",
) -> Any:
    """A field with the option that it is.

    Args:
        value: of the field where the option is not given; MISSING: it is required.
        default: how the docs show that, where they do not show the value itself.
    """
    if default is None:
        default = "" if value is None else f"`{str(value).lower()}`"
    return field(default=value, metadata={"options": (Option(name, text, parse, default, readers, only),)})


def _joint(make: Any, *options: Option) -> Any:
    """A field that several options make together. ``make``: its value without them; MISSING: one is required."""
    return field(default_factory=make, metadata={"options": options})


def options_of(kind: Any) -> tuple[Option, ...]:
    """The options of `SourceOptions` or `SinkOptions`, but for those of the client."""
    found: list[Option] = []
    for one in fields(kind):
        options = one.metadata.get("options", ())
        found += [each._replace(field=one.name) for each in options] if len(options) == 1 else options
    return tuple(found)


def table(options: Iterable[Option]) -> str:
    return "\n".join(f"| `{each.name}` | {each.default} | {_said(each)} |".replace("|  |", "| |") for each in options)


def _said(option: Option) -> str:
    kinds = [option.readers.reader, {BATCHES: "for a batch", STREAMS: "for a stream"}.get(option.only, "")]
    told = ", ".join(filter(None, kinds))
    return f"{told}: {option.text}" if told else option.text


# A batch ends with its window, so nsqd should not hold messages back to send more at once.
_CONNECTION: Mapping[str, Any] = {
    "output_buffer_size": 65536,
    "output_buffer_timeout": 25,
    "user_agent": f"nsq_fast/{__version__} spark",
}
# A task that fails is tried again and writes all its rows again: waiting longer for the servers costs less.
_PRODUCER: dict[str, Any] = {"publish_timeout": 60.0, "max_pending": 32_000}
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
    """The options of a source. Each field stands beside its option, which says what it is.

    Attributes:
        topic: its name; of several, or of a pattern, what the option says.
        topics: their names; empty when there is a pattern.
        topic_pattern: a regular expression that the whole name of a topic has to match; None: the topics are named.
        starting_offsets, starting_timestamp, starting_times: all None: the reader's default.
        ending_offsets, ending_timestamp, ending_times: all None: at what is there now.
        object_store: of a journal that lies in one.
        connection, lookup: for the client.
        given: the options that were set, as they are written; those of the client begin with ``nsq.``.
    """

    topic: str = _joint(
        MISSING,
        Option(
            "topic",
            "a topic, or several with commas. A query may be given more of them, in any order, or a pattern that"
            " matches them: what is added is read from its beginning; what its checkpoint has and the options leave out"
            " is refused",
            _name(_check_topics),
            "required, or `topicPattern`",
        ),
        Option(
            "topicPattern",
            "a regular expression (Python's) that the whole name of a topic matches; topics that appear are read, too",
            _pattern,
        ),
    )
    channel: str = _option("channel", "its name", _name(check_channel), MISSING, "required")
    servers: Servers = _joint(
        MISSING,
        Option(
            "lookupd_http_addresses",
            "where to find the topic: `host:port`, several with commas",
            _endpoints(DEFAULT_LOOKUPD_HTTP_PORT),
        ),
        Option("nsqd_tcp_addresses", "the nsqds themselves in place of lookup", _addresses),
        Option(
            "nsqd_http_addresses",
            "their HTTP ports, in the same order; required with `nsqd_tcp_addresses`",
            _endpoints(DEFAULT_NSQD_HTTP_PORT),
        ),
    )
    topics: tuple[str, ...] = ()
    topic_pattern: str | None = None
    reader: str = _option(
        "reader",
        "`replayable`, `journalled`; `auto`: the second when `journal` or `consume` is given; else the first for a"
        " topic of a redesigned cluster, the second for any other. Then it fails while no server answers, or none"
        " knows the topic: set the reader to begin without them",
        _choice(READERS),
        AUTO,
    )
    starting_offsets: Positions | None = _option(
        "startingOffsets",
        '`earliest`, `latest` or `{"orders": {"0": 1234, "1": -2}}` (-2 earliest, -1 latest), of one topic `{"0":'
        " 1234}` too; for a new query only",
        parse_positions,
        default="where the channel stands; a batch: `earliest`",
        readers=_MOVED,
    )
    starting_timestamp: int | None = _option(
        "startingTimestamp", "milliseconds since the epoch", _at_least(0), readers=_MOVED
    )
    starting_times: ByPartition | ByTopic | None = _option(
        "startingOffsetsByTimestamp",
        'the same for each partition: `{"orders": {"0": 1700000000000}}`',
        parse_times,
        readers=_MOVED,
    )
    starting_strategy: str = _option(
        "startingOffsetsByTimestampStrategy",
        "of a partition with nothing at or after that time: `latest` begins at its end (a batch of none is empty),"
        " `error` fails",
        _choice(STRATEGIES),
        LATEST,
        readers=_MOVED,
    )
    ending_offsets: Positions | None = _option(
        "endingOffsets",
        "as `startingOffsets`, where it ends",
        parse_positions,
        default="the end",
        readers=_MOVED,
        only=BATCHES,
    )
    ending_timestamp: int | None = _option(
        "endingTimestamp", "as `startingTimestamp`", _at_least(0), default="the end", readers=_MOVED, only=BATCHES
    )
    ending_times: ByPartition | ByTopic | None = _option(
        "endingOffsetsByTimestamp",
        "as `startingOffsetsByTimestamp`",
        parse_times,
        default="the end",
        readers=_MOVED,
        only=BATCHES,
    )
    max_offsets_per_trigger: int | None = _option(
        "maxOffsetsPerTrigger", "most messages of a micro-batch", _at_least(1), default="none", only=STREAMS
    )
    max_bytes_per_trigger: int | None = _option(
        "maxBytesPerTrigger",
        "most bytes of the log in a micro-batch",
        _at_least(1),
        default="none",
        readers=Only(REPLAYABLE, "nsqd does not tell the sizes of messages before it delivers them"),
        only=STREAMS,
    )
    min_offsets_per_trigger: int | None = _option(
        "minOffsetsPerTrigger", "messages that a micro-batch waits for", _at_least(1), default="none", only=STREAMS
    )
    max_trigger_delay: float = _option(
        "maxTriggerDelay",
        "how long it waits for them at most: `15m`, `30s`, `500ms`",
        _seconds,
        900.0,
        "`15m`",
        only=STREAMS,
    )
    max_slot_delay: float = _option(
        "maxSlotDelay",
        "how long a task waits for the messages that its server may send at once (2,500 by default) before it ends"
        " with those that came: where other consumers take what was planned for it, a trickle of new ones does not"
        " keep it",
        _seconds,
        2.0,
        "`2s`",
        readers=Only(JOURNALLED, "it reads to the end of its range"),
    )
    min_partitions: int | None = _option("minPartitions", "fewest tasks to read a batch with", _at_least(1))
    max_records_per_partition: int | None = _option(
        "maxRecordsPerPartition",
        "most messages that a task reads: more of them make more tasks. Replayable: nsqd is asked once for each cut",
        _at_least(1),
        default="none",
    )
    fail_on_data_loss: bool = _option(
        "failOnDataLoss",
        "whether a query fails when what it was to read is gone; else it goes on with a warning",
        truth,
        True,
    )
    fail_on_missing_topic: bool = _option(
        "failOnMissingTopic",
        "whether a query that begins fails when no server knows a topic that it names (after 5 s in which it may"
        " appear); else it goes on without, and a stream reads it when it is there",
        truth,
        True,
    )
    columns: tuple[str, ...] = _joint(
        lambda: DEFAULT_COLUMNS,
        Option("includeHeaders", "whether there is a column `headers`, too", truth, "`false`"),
        Option(
            "columns",
            "the columns, in this order; `*`: all, with `headers` if there is to be such a column",
            _source_columns,
            f"`{','.join(DEFAULT_COLUMNS)}`",
        ),
    )
    headers_as: str = _option(
        "headersAs",
        "`json`: the column `headers` is a string; `map`: it is a map; `array`: it is what Kafka's connector gives."
        " Setting it adds the column",
        _choice(tuple(HEADERS_AS)),
        JSON,
    )
    push_filters: bool = _option(
        "pushFilters",
        "from PySpark 4.1 on, whether only the parts of the logs are read that the query filters for, see below",
        truth,
        False,
        readers=Only(REPLAYABLE, "a channel has no offsets to begin and end at"),
        only=BATCHES,
    )
    journal: str | None = _option(
        "journal",
        "the folder of the journal, shared by the driver and all executors, or `s3://bucket/prefix`; required for"
        " streams",
        _not_empty,
        readers=_KEPT,
    )
    object_store: ObjectStore = _joint(
        ObjectStore,
        Option("journalEndpoint", "the URL of the object store that has the journal", _url, "boto3's settings", _KEPT),
        Option("journalRegion", "its region", _not_empty, "boto3's settings", _KEPT),
    )
    orphans: str = _option(
        "orphans",
        "what a query that begins does with rows that one with another checkpoint has acknowledged and not committed:"
        " `adopt` reads them as its first batch, `refuse` fails, `warn` says so and leaves them; [see"
        " below](#a-new-checkpoint)",
        _choice(ORPHANS),
        ADOPT,
        readers=_KEPT,
        only=STREAMS,
    )
    suppress_duplicates: bool = _option(
        "suppressDuplicates",
        "whether messages that were journalled already are left out when they come again",
        truth,
        True,
        readers=Only(JOURNALLED, "offsets tell duplicates apart, there are none"),
    )
    consume: bool = _option(
        "consume",
        "whether it acknowledges what it has read",
        truth,
        False,
        readers=Only(JOURNALLED, "its channel follows what was read anyhow"),
        only=BATCHES,
    )
    connection: ConnectionConfig = field(default_factory=lambda: ConnectionConfig(**_CONNECTION))
    lookup: LookupConfig = field(default_factory=LookupConfig)
    given: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Read the options as Spark passes them. Raises ConfigError naming the option."""
        values = _values(options, SOURCE)
        client = ClientOptions(options, ConnectionConfig, LookupConfig, refused=_SOURCE_REFUSED)
        topics, pattern = values.get("topic", ()), values.get("topicPattern")
        if topics and pattern:
            raise ConfigError("topic and topicPattern: only one of them may be given")
        if not topics and not pattern:
            raise ConfigError("topic: is required, or topicPattern")
        if "channel" not in values:
            raise ConfigError("channel: is required")
        return cls(
            topic=pattern or ",".join(topics),
            servers=_servers(values, needs_http=True),
            topics=topics,
            topic_pattern=pattern,
            columns=_columns(values),
            object_store=ObjectStore(values.get("journalEndpoint"), values.get("journalRegion")),
            connection=client.make(ConnectionConfig, **_CONNECTION),
            lookup=client.make(LookupConfig),
            given=client.given.union(values),
            **_fields(values, SOURCE),
        )

    @property
    def reads_several(self) -> bool:
        """Whether there may be more topics than one."""
        return self.topic_pattern is not None or len(self.topics) > 1

    @property
    def server_names(self) -> tuple[str, ...]:
        servers = self.servers
        return tuple(str(each.address) for each in servers.lookupd_http) or tuple(map(str, servers.nsqd_tcp))

    def names_topic(self, topic: str) -> bool:
        if self.topic_pattern is not None:
            return re.fullmatch(self.topic_pattern, topic) is not None
        return topic in self.topics

    def for_topic(self, topic: str) -> SourceOptions:
        return self if self.topics == (topic,) else replace(self, topic=topic, topics=(topic,), topic_pattern=None)


@dataclass(frozen=True)
class SinkOptions:
    """The options of a sink.

    Attributes:
        topic: None: a column says it.
        columns: of a table that CREATE TABLE makes; empty: the body, and the topic without the option for it.
        given: as in ``SourceOptions``.
    """

    topic: str | None = _option("topic", "of all rows; without it they need a column `topic`", _name(check_topic))
    servers: Servers = _joint(
        Servers,
        Option("lookupd_http_addresses", "where to publish", _endpoints(DEFAULT_LOOKUPD_HTTP_PORT), "one is required"),
        Option("nsqd_tcp_addresses", "the same", _addresses, "one is required"),
    )
    columns: tuple[str, ...] = _option(
        "columns",
        "the columns of a table of SQL, see below",
        _column_names,
        (),
        "`body`, and `topic` without that option",
    )
    trace_receipts: bool = _option(
        "traceReceipts", "whether every row is traced, and not only those with a `trace_id`", truth, False
    )
    trace_log: str | None = _option(
        "traceLog", "folder, on the executors, for the trace logs of the tasks; every row is traced then", _not_empty
    )
    report_path: str | None = _option(
        "reportPath", "folder, on the driver, that gets a report of each write", _not_empty
    )
    idempotence_key: bool = _option(
        "idempotenceKey",
        "redesigned, for topics with extended headers: each message has a key by which consumers know its copies, [see"
        " below](#copies-of-a-retry)",
        truth,
        False,
    )
    connection: ConnectionConfig = field(default_factory=ConnectionConfig)
    lookup: LookupConfig = field(default_factory=LookupConfig)
    producer: ProducerConfig = field(default_factory=lambda: ProducerConfig(**_PRODUCER))
    given: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Read the options as Spark passes them. Raises ConfigError naming the option."""
        values = _values(options, SINK, ignored=("checkpointLocation",), columns=SINK_COLUMNS)
        client = ClientOptions(options, ConnectionConfig, LookupConfig, ProducerConfig, refused=_SINK_REFUSED)
        return cls(
            servers=_servers(values, needs_http=False),
            connection=client.make(ConnectionConfig, user_agent=_CONNECTION["user_agent"]),
            lookup=client.make(LookupConfig),
            producer=client.make(ProducerConfig, **_PRODUCER),
            given=client.given.union(values),
            **_fields(values, SINK),
        )

    @property
    def traces_all(self) -> bool:
        """Whether rows without a trace id get one."""
        return self.trace_receipts or self.trace_log is not None


SOURCE, SINK = options_of(SourceOptions), options_of(SinkOptions)


def _values(options: Mapping[str, str], known: Iterable[Option], **other: Iterable[str]) -> dict[str, Any]:
    """Of each option that is given, but for those of the client: its value; ``other``: as in ``recognise``."""
    given = recognise(options, known, **other)
    return {each.name: each.parse(each.name, given[each.name]) for each in known if each.name in given}


def _fields(values: Mapping[str, Any], known: Iterable[Option]) -> dict[str, Any]:
    """Of the options that are a field each: its value."""
    return {each.field: values[each.name] for each in known if each.field and each.name in values}


def as_texts(options: Mapping[str, Any]) -> dict[str, str]:
    """The arguments of a function as Spark would pass options on."""
    return {name.lower(): str(it).lower() if isinstance(it, bool) else str(it) for name, it in options.items()}


def _columns(values: Mapping[str, Any]) -> tuple[str, ...]:
    with_headers = values.get("includeHeaders", "headersAs" in values)
    if "headersAs" in values and not with_headers:
        raise ConfigError("headersAs: includeHeaders=false says that there is no such column")
    columns: tuple[str, ...] = values.get("columns", (*DEFAULT_COLUMNS, HEADERS) if with_headers else DEFAULT_COLUMNS)
    if columns == (ALL,):
        columns = tuple(name for name in NAMES if with_headers or name != HEADERS)
    said = f"columns={','.join(columns)!r}"
    if "includeHeaders" in values and with_headers != (HEADERS in columns):
        raise ConfigError(f"includeHeaders={str(with_headers).lower()}: {said} says otherwise")
    if "headersAs" in values and HEADERS not in columns:
        raise ConfigError(f"headersAs: has no effect, as {said} has no {HEADERS}")
    return columns


def _servers(values: Mapping[str, Any], *, needs_http: bool) -> Servers:
    names = ("lookupd_http_addresses", "nsqd_tcp_addresses", "nsqd_http_addresses")
    servers = Servers(*(values.get(name, ()) for name in names))
    if bool(servers.lookupd_http) == bool(servers.nsqd_tcp):
        given = "both are given" if servers.nsqd_tcp else "neither is given"
        raise ConfigError(f"lookupd_http_addresses or nsqd_tcp_addresses: one of them is required, {given}")
    if needs_http and len(servers.nsqd_http) != len(servers.nsqd_tcp):
        raise ConfigError(
            "nsqd_http_addresses: must name the HTTP ports of the nsqds in nsqd_tcp_addresses, in the same order;"
            f" there are {len(servers.nsqd_http)} for {len(servers.nsqd_tcp)}"
        )
    return servers
