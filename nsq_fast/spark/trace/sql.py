"""The tables and the figures of traces as SQL that Spark and DuckDB both run: each is computed by the same text.

Tables stand in braces, names that are keywords in double quotes. DuckDB puts nulls last where Spark puts them first:
the order of nulls is written out wherever one can be. What the two spell differently is in `Dialect`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from .schema import (
    COUNTS,
    DURATIONS,
    FAULTS,
    GROUP,
    KEY,
    MOST_CHANNELS,
    MOST_EXAMPLES,
    MOST_GROUPS,
    MOST_SOURCES,
    POINTS,
    SHARES,
    Channel,
    Figures,
    Source,
    TraceGroup,
    TraceSettings,
    bucket_of,
    columns,
    in_order,
    with_gaps,
)

ACCURACY = 10_000  # percentiles of Spark are off by at most one rank in so many; exact up to so many messages


class Dialect(NamedTuple):
    """What is not the same text for both.

    Attributes:
        struct: some columns as one value, which is compared field by field.
        percentiles: a list of percentiles of a column, nulls left out; null where there is nothing else. They are
            values that occur: the smallest that no less than so many per cent are equal to or below.
        gathered: a list of what happened to a message.
    """

    struct: Callable[[str], str]
    percentiles: Callable[[str, Iterable[float]], str]
    gathered: str


SPARK = Dialect(
    lambda names: f"struct({names})",
    lambda name, points: f"percentile_approx({name}, array({_listed(points)}), {ACCURACY})",
    "sort_array(collect_list(struct(steps.at_ns, steps.step))).step",
)
DUCKDB = Dialect(
    lambda names: f"struct_pack({', '.join(f'{name} := {name}' for name in names.split(', '))})",
    lambda name, points: f"quantile_disc({name}, [{_listed(points)}])",
    "list(steps.step)",
)

KEYS, GROUPS = ", ".join(KEY), ", ".join(GROUP)
NULLS_FIRST = ", ".join(f"{name} NULLS FIRST" for name in GROUP)
_ORDER = f"{NULLS_FIRST}, internal_id, trace_id"


def _listed(points: Iterable[float]) -> str:
    return ", ".join(map(str, points))


def _names(table: str) -> str:
    return ", ".join(f'"{name}"' for name in columns(table))


# From records to lives: what became of one message in one channel of its topic.
#
# Each publish is put into every channel that is known for its topic, and grouped with the deliveries by topic,
# partition, internal id, trace id and channel. That takes one grouping, in which a null partition equals another, and
# one shuffle.
#
# A delivery has a record of its receipt, and one of its outcome: of some one, or the other, is missing. A handler that
# hangs, or dies, leaves a receipt alone; logs of older versions have outcomes alone. An nsqd logs of a message, also
# where its clients log nothing, that it was stored, sent and finished.

_STORED = "(event = 'server' AND outcome IN ('PUB', 'PUB_CLIENT'))"
IS_PUBLISH = f"(event = 'publish' OR {_STORED})"
_IS_OF_CHANNEL = f"(event IN ('receive', 'consume') OR (event = 'server' AND NOT {_STORED}))"
_IS_LOGGED_FINISH = "(event = 'server' AND outcome IN ('FIN', 'FIN_INTERNAL'))"
_EVENT = f'{KEYS}, event, time_ns, nsqd, "offset", size, published_ns, attempts, outcome, handling_ns'

CHANNELS = f"SELECT DISTINCT topic, channel FROM {{records}} WHERE {_IS_OF_CHANNEL}"
"""The channels known for each topic: those in which something was delivered."""


def lives(dialect: Dialect, settings: TraceSettings, end_ns: int) -> str:
    """Table ``lives`` of ``{records}`` and ``{channels}``, those of `CHANNELS`, or of earlier records too.

    ``end_ns``: until when the logs tell all. What was published at least ``grace`` before that, and never finished, is
    lost. How often a message was delivered again: it was delivered as often as there are records of it, or as its
    highest number of attempts says, as deliveries whose consumer died left no record. A REQ or a TIMEOUT caused one
    redelivery, unless nothing came after it. The rest has no cause that is recorded.
    """
    # A null would be the largest in DuckDB, and the smallest in Spark.
    finish = dialect.struct("time_ns, order_attempts, order_handling_ns, order_consumer")
    return f"""
WITH events AS (
    SELECT /*+ BROADCAST(channels) */ {_EVENT}, channels.channel, consumer
    FROM {{records}} AS records JOIN {{channels}} AS channels USING (topic) WHERE {IS_PUBLISH}
    UNION ALL
    SELECT {_EVENT}, channel, consumer FROM {{records}} AS records WHERE {_IS_OF_CHANNEL}
),
placed AS (
    SELECT /*+ REPARTITION({KEYS}) */ *, coalesce(attempts, -1) AS order_attempts,
        coalesce(handling_ns, -1) AS order_handling_ns, coalesce(consumer, '') AS order_consumer
    FROM events
),
grouped AS (
    SELECT {KEYS}, channel,
        min(time_ns) FILTER (WHERE event = 'publish') AS stored_ns,
        min(time_ns) FILTER (WHERE {_STORED}) AS logged_ns,
        min(published_ns) AS delivered_published_ns,
        coalesce(min(nsqd) FILTER (WHERE event = 'publish'), min(nsqd)) AS nsqd,
        min("offset") AS "offset",
        min(size) AS size,
        greatest(
            count(*) FILTER (WHERE event = 'consume'),
            count(*) FILTER (WHERE event = 'receive'),
            count(*) FILTER (WHERE event = 'server' AND outcome = 'START')
        ) AS deliveries,
        greatest(
            count(*) FILTER (WHERE event = 'consume' AND outcome = 'FIN'),
            count(*) FILTER (WHERE {_IS_LOGGED_FINISH})
        ) AS finishes,
        count(*) FILTER (WHERE event = 'consume' AND outcome = 'REQ') AS requeues,
        count(*) FILTER (WHERE event = 'consume' AND outcome = 'TIMEOUT') AS timeouts,
        coalesce(max(attempts), 0) AS most_attempts,
        min(time_ns) FILTER (WHERE event = 'consume') AS first_answered_ns,
        min(CASE WHEN event = 'receive' THEN time_ns ELSE time_ns - handling_ns END) AS received_ns,
        coalesce(bool_or(event IN ('receive', 'consume') AND "offset" IS NOT NULL), false) AS is_ordered,
        coalesce(
            min({finish}) FILTER (WHERE event = 'consume' AND outcome = 'FIN'),
            min({finish}) FILTER (WHERE {_IS_LOGGED_FINISH})
        ) AS finish,
        max({dialect.struct("attempts, time_ns, outcome")}) FILTER (WHERE event = 'consume') AS answer,
        max({dialect.struct("attempts, time_ns, consumer")}) FILTER (WHERE event = 'receive') AS receipt
    FROM placed GROUP BY {KEYS}, channel
),
timed AS (  -- by the server's clock, whichever channel the message came to
    SELECT *,
        coalesce(min(delivered_published_ns) OVER (PARTITION BY {KEYS}), stored_ns, logged_ns) AS published_ns,
        requeues - CASE WHEN answer.outcome = 'REQ' THEN 1 ELSE 0 END AS redelivered_req,
        timeouts - CASE WHEN answer.outcome = 'TIMEOUT' THEN 1 ELSE 0 END AS redelivered_timeout
    FROM grouped
)
SELECT topic, partition, channel, internal_id, trace_id, nsqd, "offset", size,
    published_ns - published_ns % {settings.window_ns} AS window_ns,
    published_ns,
    stored_ns - delivered_published_ns AS acknowledged_ns,
    received_ns,
    finish.time_ns AS finished_ns,
    received_ns - delivered_published_ns AS in_queue_ns,
    nullif(finish.order_handling_ns, -1) AS handling_ns,
    finish.time_ns - delivered_published_ns AS latency_ns,
    deliveries, finishes, redelivered_req, redelivered_timeout,
    greatest(most_attempts, deliveries, 1) - 1 - redelivered_req - redelivered_timeout AS redelivered_unknown,
    answer.outcome AS last_outcome,
    coalesce(nullif(finish.order_consumer, ''), receipt.consumer) AS consumer,
    CASE WHEN finishes > 0 THEN 'finished' WHEN published_ns <= {end_ns - settings.grace_ns} THEN 'lost'
        ELSE 'pending' END AS state,
    coalesce(stored_ns, logged_ns) IS NOT NULL AS is_published,
    is_ordered,
    coalesce(finish.order_attempts = 1 AND finish.time_ns = first_answered_ns, false) AS is_first_delivery
FROM timed"""


# Whether messages of a partition were finished in the order in which they lie in it.
#
# Judged, within topic, partition and channel, are messages that were finished by their first delivery, in the order of
# their FINs. One of them violates the order when its internal id is below, or its offset before, that of any finished
# earlier. What is delivered again may come late without breaking a promise, so it is neither judged nor compared with.

_FINISH = f'{GROUPS}, internal_id, trace_id, "offset", window_ns, finished_ns'


def judged(settings: TraceSettings) -> str:
    """The finishes of ``{lives}`` that the order is judged by."""
    which = {"off": "false", "ids": "is_first_delivery", "offsets": "is_first_delivery AND is_ordered"}
    return f"SELECT {_FINISH} FROM {{lives}} WHERE {which[settings.order]}"


VIOLATIONS = f"""
WITH compared AS (
    SELECT *, max(internal_id) OVER earlier AS after_internal_id, max("offset") OVER earlier AS after_offset
    FROM {{finishes}}
    WINDOW earlier AS (
        PARTITION BY {GROUPS} ORDER BY finished_ns NULLS FIRST, internal_id, "offset" NULLS FIRST
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )
)
SELECT {_names("violations")} FROM compared WHERE internal_id < after_internal_id OR "offset" < after_offset"""


def carried(until_ns: int) -> str:
    """What is kept of ``{finishes}`` to judge later ones: those from ``until_ns`` on, one for the rest of a group."""
    return f"""
SELECT {_FINISH} FROM {{finishes}} WHERE finished_ns >= {until_ns}
UNION ALL
SELECT {GROUPS}, max(internal_id), NULL, max("offset"), NULL, max(finished_ns)
FROM {{finishes}} WHERE finished_ns < {until_ns} GROUP BY {GROUPS}"""


# What is computed of lives, violations and records.

LOST = "SELECT * FROM {lives} WHERE state = 'lost'"
DUPLICATES = "SELECT * FROM {lives} WHERE finishes > 1"


def statistics(dialect: Dialect, *more: str) -> str:
    """Counts, and lists of `POINTS` of durations, of ``{lives}`` and ``{violations}`` by `GROUP` and ``more``."""
    names = ", ".join((*GROUP, *more))
    counted = ", ".join(COUNTS[-3:])
    durations = ", ".join(f"{each}_ns" for each in DURATIONS)
    states = ", ".join(f"count(*) FILTER (WHERE state = '{each}') AS {each}" for each in COUNTS[1:4])
    return f"""
SELECT {names}, count(state) AS messages, {states}, count(*) FILTER (WHERE finishes > 1) AS duplicates,
    sum(violation) AS violations, {", ".join(f"sum({name}) AS {name}" for name in COUNTS[-3:])},
    {", ".join(f"{dialect.percentiles(f'{each}_ns', POINTS.values())} AS {each}" for each in DURATIONS)}
FROM (
    SELECT {names}, state, finishes, {counted}, {durations}, 0 AS violation FROM {{lives}}
    UNION ALL
    SELECT {names}, {", ".join(["NULL"] * (2 + len(COUNTS[-3:]) + len(DURATIONS)))}, 1 FROM {{violations}}
) AS counted GROUP BY {names}"""


_STEP = "event, at_ns, received_ns, attempts, outcome, nsqd, consumer"


def slowest(dialect: Dialect, count: int) -> str:
    """Those of ``{lives}`` with the longest latency, with what is recorded of them in ``{records}``."""
    key = (*KEY, "channel")
    names = (f'top."{each}"' if each in key else f'any_value(top."{each}") AS "{each}"' for each in columns("lives"))
    same = " AND ".join(f"steps.{name} IS NOT DISTINCT FROM top.{name}" for name in KEY)
    return f"""
WITH top AS (SELECT * FROM {{lives}} WHERE latency_ns IS NOT NULL ORDER BY latency_ns DESC, {_ORDER} LIMIT {count}),
steps AS (
    SELECT {KEYS}, channel, at_ns, {dialect.struct(_STEP)} AS step FROM (
        SELECT *, time_ns AS at_ns, time_ns - handling_ns AS received_ns FROM {{records}} WHERE event IS NOT NULL
    ) AS named
)
SELECT /*+ BROADCAST(top) */ {", ".join(names)}, {dialect.gathered} AS events
FROM steps JOIN top ON {same} AND (steps.channel IS NULL OR steps.channel = top.channel)
GROUP BY {", ".join(f"top.{name}" for name in key)}"""


def skews(settings: TraceSettings) -> str:
    """Where clocks contradict each other: of a consumer's host and an nsqd, or of an nsqd and its producers."""
    tolerance = settings.skew_tolerance_ns
    return f"""
SELECT side, nsqd, host, count(*) AS messages, max(early_ns) AS worst_ns FROM (
    SELECT 'consumer' AS side, nsqd, regexp_replace(consumer, ':[0-9]+$', '') AS host,
        published_ns - (time_ns - handling_ns) AS early_ns
    FROM {{records}} WHERE event = 'consume'
) AS consumers WHERE early_ns > {tolerance} GROUP BY side, nsqd, host
UNION ALL
SELECT 'producer', nsqd, NULL, count(DISTINCT ({KEYS})), max(-acknowledged_ns)
FROM {{lives}} WHERE -acknowledged_ns > {tolerance} GROUP BY nsqd"""


# The figures of a report, taken from the tables: as many rows as a page can show, never more.


class Engine(Protocol):
    """What runs queries: Spark on tables that were written, DuckDB on those that it has made."""

    @property
    def dialect(self) -> Dialect: ...

    def rows(self, query: str) -> list[dict[str, Any]]:
        """The rows of a query of the tables in braces, by the names of its columns."""


def figures(engine: Engine, run: Mapping[str, Any]) -> Figures:
    """What a report shows. ``run`` is the row of table ``runs``."""
    (counted,) = engine.rows(
        "SELECT count(*) FILTER (WHERE event = 'publish') AS publishes, min(time_ns) AS begin_ns,"
        " max(time_ns) AS end_ns, count(*) AS lines, count(problem) AS problems FROM {records}"
    )
    groups = statistics(engine.dialect)
    sums = ", ".join(f"sum({name}) AS {name}" for name in COUNTS)
    (totals,) = engine.rows(f"SELECT count(*) AS many, {sums} FROM ({groups}) AS lanes")
    worst = engine.rows(
        f"SELECT * FROM ({groups}) AS lanes"
        f" ORDER BY {' + '.join(FAULTS)} DESC, messages DESC, {NULLS_FIRST} LIMIT {MOST_GROUPS}"
    )
    unconsumed = engine.rows(
        "SELECT topic, count(*) AS many FROM {records} WHERE event IS NOT NULL GROUP BY topic"
        f" HAVING count(channel) = 0 ORDER BY many DESC, topic LIMIT {MOST_GROUPS}"
    )
    slowest = engine.rows(
        f"SELECT {_names('slowest')} FROM {{slowest}} ORDER BY latency_ns DESC, {_ORDER} LIMIT {MOST_EXAMPLES}"
    )
    return Figures(
        lines=counted["lines"],
        problems=counted["problems"],
        records=counted["lines"] - counted["problems"],
        publishes=counted["publishes"],
        begin_ns=counted["begin_ns"] or 0,
        end_ns=counted["end_ns"] or 0,
        window_ns=run["window_ns"],
        grace_ns=run["grace_ns"],
        judged_by=run["judged_by"],
        unconsumed={row["topic"]: row["many"] for row in unconsumed},
        unpublished=_count(engine, "{lives} WHERE NOT is_published"),
        late=_count(engine, "{late}"),
        totals={name: int(totals[name] or 0) for name in COUNTS},
        group_count=totals["many"],
        groups=in_order(map(_group, worst)),
        channels=_channels(engine, run["window_ns"]),
        slowest=[{**_plain(row), "events": _in_order_of_time(row["events"])} for row in slowest],
        examples={kind: _examples(engine, kind) for kind in FAULTS},
        skews=engine.rows(
            "SELECT side, nsqd, host, CAST(sum(messages) AS bigint) AS messages, max(worst_ns) AS worst_ns FROM {skews}"
            f" GROUP BY side, nsqd, host ORDER BY worst_ns DESC, side, nsqd, host NULLS FIRST LIMIT {MOST_EXAMPLES}"
        ),
        sources=_sources(engine),
    )


def _count(engine: Engine, what: str) -> int:
    found: int = engine.rows(f"SELECT count(*) AS many FROM {what}")[0]["many"]
    return found


def _sources(engine: Engine) -> list[Source]:
    rows = engine.rows(
        "SELECT source, count(*) AS lines, count(problem) AS problems FROM {records} GROUP BY source"
        f" ORDER BY problems DESC, lines DESC, source LIMIT {MOST_SOURCES}"
    )
    bad = engine.rows("SELECT source, min(problem) AS example FROM {records} WHERE problem IS NOT NULL GROUP BY source")
    examples = {row["source"]: row["example"] for row in bad}
    return [Source(row["source"], row["lines"], row["problems"], examples.get(row["source"])) for row in rows]


def _group(row: Mapping[str, Any]) -> TraceGroup:
    names = [name for name in columns("windows") if name.endswith("_ns") and name != "window_ns"]
    values = [value for each in DURATIONS for value in row[each] or [None] * len(POINTS)]
    counts = {name: int(row[name] or 0) for name in COUNTS}
    durations = dict(zip(names, values, strict=True))
    return TraceGroup(row["topic"], row["partition"], row["channel"], counts, durations)


def _channels(engine: Engine, window_ns: int) -> list[Channel]:
    shares = [share / 100 for share in SHARES]
    curves = ", ".join(f"{engine.dialect.percentiles(f'{each}_ns', shares)} AS {each}" for each in DURATIONS)
    largest = f"FROM {{lives}} GROUP BY topic, channel ORDER BY count(*) DESC, topic, channel LIMIT {MOST_CHANNELS}"
    rows = engine.rows(
        "SELECT topic, channel, count(*) AS messages, min(window_ns) AS opened, max(window_ns) AS closed,"
        f" {curves} {largest}"
    )
    if not rows:
        return []
    bucket_ns = bucket_of(min(row["opened"] for row in rows), max(row["closed"] for row in rows), window_ns)
    series: dict[tuple[str, str], list[tuple[int, list[int]]]] = {}
    for row in engine.rows(
        f"SELECT topic, channel, published_ns - published_ns % {bucket_ns} AS since,"
        f" {engine.dialect.percentiles('latency_ns', POINTS.values())} AS points FROM {{lives}}"
        f" WHERE (topic, channel) IN (SELECT topic, channel {largest})"
        f" GROUP BY topic, channel, published_ns - published_ns % {bucket_ns} ORDER BY since"
    ):
        series.setdefault((row["topic"], row["channel"]), []).append((row["since"], row["points"]))
    return [
        Channel(
            row["topic"],
            row["channel"],
            row["messages"],
            {each: row[each] for each in DURATIONS if row[each]},
            with_gaps(series[row["topic"], row["channel"]], bucket_ns),
        )
        for row in sorted(rows, key=lambda row: (row["topic"], row["channel"]))
    ]


def _examples(engine: Engine, kind: str) -> list[dict[str, Any]]:
    order = f"window_ns NULLS FIRST, {_ORDER}"
    rows = engine.rows(f"SELECT {_names(kind)} FROM {{{kind}}} ORDER BY {order} LIMIT {MOST_EXAMPLES}")
    return [_plain(row) for row in rows]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """With ids as whole numbers."""
    ids = {name for name in row if name.endswith(KEY[:2])}
    return {name: int(value) if name in ids and value is not None else value for name, value in row.items()}


def _in_order_of_time(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As Spark sorts structs: null is the smallest."""
    return sorted(events, key=lambda each: [(value is not None, value) for value in (each["at_ns"], *each.values())])
