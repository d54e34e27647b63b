"""The tables of the trace pipeline: names, columns, types. Parquet and Delta can hold every one of them.

Ids are unsigned 64-bit numbers, which Spark has not: they are ``decimal(20,0)``, exact and ordered. Points in time
are ``_ns``, nanoseconds since the epoch (a ``timestamp`` of Spark has microseconds), durations are ``_ns`` too.
``partition`` and what depends on it is null where the server has no partitions. Each table has, last, the number of
the ``batch`` that wrote it: 0 for `write_tables`, that of the micro-batch for `stream_tables`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from glob import glob
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from nsq_fast.errors import ConfigError

ID = "decimal(20,0)"
MAX_ID = 2**64 - 1
NOTHING_TRACED = "nothing was traced: the logs hold no record of a publish or a consumer (see nsq_fast.client.trace)"
LATEST_NS = 2**62  # in the year 2116; what says it is later, is wrong

BEGIN = '{"event":'
"""How a line of our clients begins, behind what a log format puts before it."""
LONGEST = 1e9
"""Most seconds that a handler can have taken."""
PROBLEM_LENGTH = 200
"""So many characters are kept of a line without a record."""

# What a line of a trace log holds. See nsq_fast.client.trace for the meaning of each.
LINE = (
    f"event string, time bigint, topic string, partition int, channel string, nsqd string, local string,"
    f" internal_id {ID}, trace_id {ID}, offset bigint, size bigint, timestamp bigint, attempts int,"
    " outcome string, handling_time double, _malformed string"
)

KEY = ("internal_id", "trace_id", "partition", "topic")  # of a message: what its records have in common
GROUP = ("topic", "partition", "channel")  # where messages are counted, and where their order is judged

POINTS = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}  # percentiles that tables and charts have
COUNTS = (
    "messages",
    "finished",
    "pending",
    "lost",
    "duplicates",
    "violations",
    "redelivered_req",
    "redelivered_timeout",
    "redelivered_unknown",
)
DURATIONS = ("latency", "in_queue", "handling")

_LIFE = (
    "window_ns bigint",  # begin of the time window it was published in
    "published_ns bigint",  # by the server's clock; by the producer's where nobody got it
    "acknowledged_ns bigint",  # publish to the record of the producer
    "received_ns bigint",  # first recorded receipt, by the consumer's clock
    "finished_ns bigint",  # first FIN, by the consumer's clock
    "in_queue_ns bigint",  # published to received
    "handling_ns bigint",  # of the delivery that was finished first
    "latency_ns bigint",  # published to finished
    "deliveries int",  # recorded ones
    "finishes int",
    "redelivered_req int",
    "redelivered_timeout int",
    "redelivered_unknown int",
    "last_outcome string",  # FIN, REQ, TIMEOUT, of the recorded delivery with the most attempts
    "consumer string",  # the local end of the connection that finished it; else of the one that received it last
    "state string",  # finished, pending, lost
    "is_published boolean",  # there is a record of its producer
    "is_ordered boolean",  # delivered with its offset: an ordered or advanced subscription
    "is_first_delivery boolean",  # finished by its first delivery, and no record before that
)
_GROUP = ("topic string", "partition int", "channel string")
_IDS = (*_GROUP, f"internal_id {ID}", f"trace_id {ID}")
_MESSAGE = (*_IDS, "nsqd string", "offset bigint", "size bigint")
_EVENT = "event:string, at_ns:bigint, received_ns:bigint, attempts:int, outcome:string, nsqd:string, consumer:string"

TABLES: dict[str, tuple[str, ...]] = {
    # One row for each line of the logs. Where it holds no record, `event` is null and `problem` has its beginning.
    "records": (
        "event string",
        "time_ns bigint",
        *_MESSAGE,
        "published_ns bigint",
        "attempts int",
        "outcome string",
        "handling_ns bigint",
        "consumer string",
        "source string",
        "problem string",
    ),
    # One row for each message and channel of its topic.
    "lives": (*_MESSAGE, *_LIFE),
    # One row for each topic, partition, channel and window of time.
    "windows": (
        *_GROUP,
        "window_ns bigint",
        *(f"{name} bigint" for name in COUNTS),
        *(f"{what}_{point}_ns bigint" for what in DURATIONS for point in POINTS),
    ),
    "lost": (*_MESSAGE, *_LIFE),
    "duplicates": (*_MESSAGE, *_LIFE),
    # Messages finished after one that lies behind them in the partition.
    "violations": (
        *_IDS,
        "offset bigint",
        "window_ns bigint",
        "finished_ns bigint",
        f"after_internal_id {ID}",
        "after_offset bigint",
    ),
    # The messages with the longest latency, and all that is recorded of them in this channel.
    "slowest": (*_MESSAGE, *_LIFE, f"events array<struct<{_EVENT}>>"),
    # Clocks that contradict each other: messages received, or acknowledged, before they were published.
    "skews": ("side string", "nsqd string", "host string", "messages bigint", "worst_ns bigint"),
    # Messages that were finished, or delivered at all, only after `stream_tables` had decided on them.
    "late": (*_MESSAGE, *_LIFE),
    # One row for each batch: its settings, and until when its logs tell all.
    "runs": ("window_ns bigint", "grace_ns bigint", "judged_by string", "end_ns bigint"),
}


def columns(table: str) -> list[str]:
    """The names of a table's columns, without ``batch``."""
    return [column.split(" ", 1)[0] for column in TABLES[table]]


def ddl(table: str) -> str:
    """A table's schema as Spark writes it, ``batch`` included."""
    return ", ".join((*TABLES[table], "batch int"))


Order = Literal["offsets", "ids", "off"]
SECOND = 1_000_000_000


@dataclasses.dataclass(frozen=True)
class TraceSettings:
    """Settings of the tables. Times are seconds.

    Attributes:
        window: length of the time windows that messages are counted in, by when they were published.
        grace: from when on a message that no delivery finished is lost; until then it is pending.
        slowest: how many of the slowest messages to keep.
        order: where the order is judged: ``offsets``, in subscriptions whose messages come with their offset (ordered
            and advanced ones); ``ids``, everywhere, by internal id; ``off``, nowhere.
        skew_tolerance: clocks that contradict each other by no more than this agree.
        lateness: in a stream, how much later than the latest record seen one may still come. A message is decided
            ``grace + lateness`` after the end of its window.
    """

    window: float = 10.0
    grace: float = 60.0
    slowest: int = 20
    order: Order = "offsets"
    skew_tolerance: float = 0.001
    lateness: float = 10.0

    def __post_init__(self) -> None:
        for name, least in (("window", 0.001), ("grace", 0), ("slowest", 0), ("skew_tolerance", 0), ("lateness", 0)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be {least} or more")
        if self.order not in get_args(Order):
            raise ConfigError(f"order={self.order!r}: must be one of {', '.join(get_args(Order))}")

    @property
    def window_ns(self) -> int:
        return round(self.window * SECOND)

    @property
    def grace_ns(self) -> int:
        return round(self.grace * SECOND)

    @property
    def lateness_ns(self) -> int:
        return round(self.lateness * SECOND)

    @property
    def skew_tolerance_ns(self) -> int:
        return round(self.skew_tolerance * SECOND)


# What a report shows, whoever has computed it.


MOST_GROUPS = 200
MOST_CHANNELS = 12  # that get charts
MOST_POINTS = 120  # on the axis of time
MOST_EXAMPLES = 20
MOST_SOURCES = 30
SHARES = (1, 5, 10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 90, 92.5, 95, 97, 98, 99, 99.5, 99.7, 99.9, 99.97, 100)
FAULTS = ("lost", "duplicates", "violations")


class TraceGroup(msgspec.Struct, frozen=True):
    """A channel in a partition of a topic: counts and durations (nanoseconds) by name, as in table ``windows``."""

    topic: str
    partition: int | None
    channel: str
    counts: dict[str, int]
    durations: dict[str, int | None]


class Channel(msgspec.Struct, frozen=True):
    """What is drawn of a channel of a topic.

    Attributes:
        curves: by kind of duration, a percentile in nanoseconds for each of `SHARES`.
        times: begin of a bucket of time, and `POINTS` of the latency of what was published in it.
    """

    topic: str
    channel: str
    messages: int
    curves: dict[str, list[int]]
    times: list[tuple[int, list[int] | None]]


class Source(msgspec.Struct, frozen=True):
    """A file of lines, and a line of it that holds no record."""

    name: str
    lines: int
    problems: int
    example: str | None


class Figures(msgspec.Struct, frozen=True):
    """All that a report shows.

    Attributes:
        lines, problems, records, publishes: over all sources.
        unconsumed: publishes to topics of which no delivery was recorded.
        unpublished: messages that were delivered, with no record of their producer.
        totals: over all groups; ``groups`` are those with faults first, no more than `MOST_GROUPS`.
        examples: by kind of fault, the first few.
    """

    lines: int
    problems: int
    records: int
    publishes: int
    begin_ns: int
    end_ns: int
    window_ns: int
    grace_ns: int
    judged_by: str
    unconsumed: dict[str, int]
    unpublished: int
    late: int
    totals: dict[str, int]
    group_count: int
    groups: list[TraceGroup]
    channels: list[Channel]
    slowest: list[dict[str, Any]]
    examples: dict[str, list[dict[str, Any]]]
    skews: list[dict[str, Any]]
    sources: list[Source]

    @property
    def lanes(self) -> list[TraceGroup]:
        """The former name of ``groups``, for one version."""
        warnings.warn("Figures.lanes is now Figures.groups", DeprecationWarning, stacklevel=2)
        return self.groups


def in_order(groups: Iterable[TraceGroup]) -> list[TraceGroup]:
    """Groups as a report lists them."""
    return sorted(
        groups, key=lambda group: (group.topic, group.channel, -1 if group.partition is None else group.partition)
    )


def bucket_of(first_ns: int, last_ns: int, window_ns: int) -> int:
    """So many windows that the axis has no more points than it can show."""
    windows = (last_ns - first_ns) // window_ns + 1
    return window_ns * -(-windows // MOST_POINTS)


def with_gaps(rows: Sequence[tuple[int, list[int]]], bucket_ns: int) -> list[tuple[int, list[int] | None]]:
    """A series with a None where nothing was published: a gap in the line."""
    series: list[tuple[int, list[int] | None]] = []
    for begin, values in rows:
        if series and begin - series[-1][0] > bucket_ns:
            series.append((series[-1][0] + bucket_ns, None))
        series.append((begin, values))
    return series


# Which files the paths of trace logs name.


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_url(path: str) -> bool:
    """Whether a path is no file of this machine."""
    return _URL.match(path) is not None


def expand(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The files that paths on this machine name, each once; URLs as they are. Raises ConfigError for one with none."""
    found: dict[str, None] = {}
    for path in paths:
        name = os.fspath(path)
        found.update(dict.fromkeys([name] if is_url(name) else _files(name)))
    if not found:
        raise ConfigError("no trace log: give at least one path")
    return list(found)


def _files(name: str) -> list[str]:
    is_there = bool(name) and Path(name).exists()
    matches = [Path(name)] if is_there else [Path(match) for match in sorted(glob(name, recursive=True))]
    files = [file for match in matches for file in ([match] if match.is_file() else sorted(match.rglob("*")))]
    if hidden := [file for file in files if file.is_file() and file.name.startswith(("_", ".")) and file in matches]:
        raise ConfigError(f"{hidden[0]}: Spark does not read files whose name begins with _ or a dot; rename it")
    found = [str(file.resolve()) for file in files if file.is_file() and not file.name.startswith(("_", "."))]
    if not found:
        raise ConfigError(f"no trace log: {name or repr(name)} names no file")
    return found


# What the [TRACE] lines of a redesigned nsqd look like (youzan/nsq: nsqd/tracer.go).


MARK = "[TRACE] topic "
PARTITION_SHIFT = 50  # of an internal id
STORED = (
    r"\[TRACE\] topic (\S+)-(\d+) trace id (\d+): message (\d+)(\( ?\d+\) put \S+| put success from client \S+)"
    r" at offset: (\d+),.* at time (\d+)"
)
DELIVERED = (
    r"\[TRACE\] topic (\S+) channel (\S+) trace id (\d+): message (\d+) \(ts: (\d+), offset: (\d+), pri:-?\d+\)"
    r" consume state (\S+) from client (\S*)\(\d+\) at time: (\d+) cost: -?\d+, attempt: (\d+)"
)
