"""The tables of the trace pipeline: names, columns, types. Parquet and Delta can hold every one of them.

Ids are unsigned 64-bit numbers, which Spark has not: they are ``decimal(20,0)``, exact and ordered. Points in time
are ``_ns``, nanoseconds since the epoch (a ``timestamp`` of Spark has microseconds), durations are ``_ns`` too.
``partition`` and what depends on it is null where the server has no partitions. Each table has, last, the number of
the ``batch`` that wrote it: 0 for `write_tables`, that of the micro-batch for `stream_tables`.
"""

from __future__ import annotations

ID = "decimal(20,0)"
MAX_ID = 2**64 - 1
LATEST_NS = 2**62  # in the year 2116; what says it is later, is wrong

BEGIN = '{"event":'
"""How a line of our clients begins, behind what a log format puts before it."""
LONGEST = 1e9
"""Most seconds that a handler can have taken."""
PROBLEM_LENGTH = 200
"""So many characters are kept of a line without a record."""

# What a line of a trace log holds. See nsq_fast.runtime.trace_records for the meaning of each.
LINE = (
    f"event string, time bigint, topic string, partition int, channel string, nsqd string, local string,"
    f" internal_id {ID}, trace_id {ID}, offset bigint, size bigint, timestamp bigint, attempts int,"
    " outcome string, handling_time double, _malformed string"
)

KEY = ("internal_id", "trace_id", "partition", "topic")  # of a message: what its records have in common
GROUP = ("topic", "partition", "channel")  # where messages are counted, and where their order is judged

POINTS = (0.5, 0.95, 0.99, 1.0)
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
_MESSAGE = (
    "topic string",
    "partition int",
    "channel string",
    f"internal_id {ID}",
    f"trace_id {ID}",
    "nsqd string",
    "offset bigint",
    "size bigint",
)
_PERCENTILES = tuple(
    f"{what}_{point}_ns bigint"
    for what in ("latency", "in_queue", "handling")
    for point in ("p50", "p95", "p99", "max")
)
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
        "topic string",
        "partition int",
        "channel string",
        "window_ns bigint",
        "messages bigint",
        "finished bigint",
        "pending bigint",
        "lost bigint",
        "duplicates bigint",
        "violations bigint",
        "redelivered_req bigint",
        "redelivered_timeout bigint",
        "redelivered_unknown bigint",
        *_PERCENTILES,
    ),
    "lost": (*_MESSAGE, *_LIFE),
    "duplicates": (*_MESSAGE, *_LIFE),
    # Messages finished after one that lies behind them in the partition.
    "violations": (
        "topic string",
        "partition int",
        "channel string",
        f"internal_id {ID}",
        f"trace_id {ID}",
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
