"""SQL that makes lives and violations of records. Each statement is that of the same name in ``lives`` and ``order``.

DuckDB puts nulls last where Spark puts them first: the order of nulls is written out wherever one can be.
"""

from __future__ import annotations

from nsq_fast.spark.trace.schema import GROUP, KEY, columns
from nsq_fast.spark.trace.settings import TraceSettings

KEYS = ", ".join(KEY)
GROUPS = ", ".join(GROUP)
NULLS_FIRST = ", ".join(f"{name} NULLS FIRST" for name in GROUP)

_STORED = "(event = 'server' AND outcome IN ('PUB', 'PUB_CLIENT'))"
_IS_PUBLISH = f"(event = 'publish' OR {_STORED})"
_IS_OF_CHANNEL = f"(event IN ('receive', 'consume') OR (event = 'server' AND NOT {_STORED}))"
_IS_LOGGED_FINISH = "(event = 'server' AND outcome IN ('FIN', 'FIN_INTERNAL'))"
# Structs are compared field by field; a null would be the largest, and is the smallest in Spark.
_FINISH = (
    "{time_ns: time_ns, attempts: coalesce(attempts, -1), handling_ns: coalesce(handling_ns, -1),"
    " consumer: coalesce(consumer, '')}"
)
_EVENT_COLUMNS = f'{KEYS}, event, time_ns, nsqd, "offset", size, published_ns, attempts, outcome, handling_ns'


def _lives(settings: TraceSettings, end_ns: int) -> str:
    return f"""
CREATE TABLE lives AS
WITH channels AS (SELECT DISTINCT topic, channel FROM records WHERE {_IS_OF_CHANNEL}),
events AS (
    SELECT {_EVENT_COLUMNS}, channels.channel, consumer
    FROM (SELECT * EXCLUDE (channel) FROM records WHERE {_IS_PUBLISH}) JOIN channels USING (topic)
    UNION ALL
    SELECT {_EVENT_COLUMNS}, channel, consumer FROM records WHERE {_IS_OF_CHANNEL}
),
groups AS (
    SELECT {KEYS}, channel,
        min(time_ns) FILTER (event = 'publish') AS stored_ns,
        min(time_ns) FILTER ({_STORED}) AS logged_ns,
        min(published_ns) AS delivered_published_ns,
        coalesce(min(nsqd) FILTER (event = 'publish'), min(nsqd)) AS nsqd,
        min("offset") AS "offset",
        min(size) AS size,
        greatest(
            count(*) FILTER (event = 'consume'),
            count(*) FILTER (event = 'receive'),
            count(*) FILTER (event = 'server' AND outcome = 'START')
        ) AS deliveries,
        greatest(
            count(*) FILTER (event = 'consume' AND outcome = 'FIN'), count(*) FILTER ({_IS_LOGGED_FINISH})
        ) AS finishes,
        count(*) FILTER (event = 'consume' AND outcome = 'REQ') AS requeues,
        count(*) FILTER (event = 'consume' AND outcome = 'TIMEOUT') AS timeouts,
        coalesce(max(attempts), 0) AS most_attempts,
        min(time_ns) FILTER (event = 'consume') AS first_answered_ns,
        min(CASE WHEN event = 'receive' THEN time_ns ELSE time_ns - handling_ns END) AS received_ns,
        coalesce(bool_or(event IN ('receive', 'consume') AND "offset" IS NOT NULL), false) AS is_ordered,
        coalesce(
            min({_FINISH}) FILTER (event = 'consume' AND outcome = 'FIN'), min({_FINISH}) FILTER ({_IS_LOGGED_FINISH})
        ) AS finish,
        max({{attempts: attempts, time_ns: time_ns, outcome: outcome}}) FILTER (event = 'consume') AS last,
        max({{attempts: attempts, time_ns: time_ns, consumer: consumer}}) FILTER (event = 'receive') AS last_receipt
    FROM events GROUP BY {KEYS}, channel
),
judged AS (
    SELECT *,
        coalesce(
            min(delivered_published_ns) OVER (PARTITION BY {KEYS}), stored_ns, logged_ns
        ) AS published_ns,
        coalesce(last.outcome, '') AS last_answer,
        requeues - (last_answer = 'REQ')::INT AS redelivered_req,
        timeouts - (last_answer = 'TIMEOUT')::INT AS redelivered_timeout,
        greatest(most_attempts, deliveries, 1) - 1 AS redelivered
    FROM groups
)
SELECT topic, partition, channel, internal_id, trace_id, nsqd, "offset", size,
    published_ns - published_ns % {settings.window_ns} AS window_ns,
    published_ns,
    stored_ns - delivered_published_ns AS acknowledged_ns,
    received_ns,
    finish.time_ns AS finished_ns,
    received_ns - delivered_published_ns AS in_queue_ns,
    nullif(finish.handling_ns, -1) AS handling_ns,
    finish.time_ns - delivered_published_ns AS latency_ns,
    deliveries, finishes, redelivered_req, redelivered_timeout,
    redelivered - redelivered_req - redelivered_timeout AS redelivered_unknown,
    last.outcome AS last_outcome,
    coalesce(nullif(finish.consumer, ''), last_receipt.consumer) AS consumer,
    CASE WHEN finishes > 0 THEN 'finished' WHEN published_ns <= {end_ns - settings.grace_ns} THEN 'lost'
        ELSE 'pending' END AS state,
    coalesce(stored_ns, logged_ns) IS NOT NULL AS is_published,
    is_ordered,
    coalesce(finish.attempts = 1 AND finish.time_ns = first_answered_ns, false) AS is_first_delivery
FROM judged"""


def _violations(settings: TraceSettings) -> str:
    is_judged = {"off": "false", "ids": "is_first_delivery", "offsets": "is_first_delivery AND is_ordered"}
    return f"""
CREATE TABLE violations AS
SELECT {", ".join(f'"{name}"' for name in columns("violations"))} FROM (
    SELECT *, max(internal_id) OVER earlier AS after_internal_id, max("offset") OVER earlier AS after_offset
    FROM lives WHERE {is_judged[settings.order]}
    WINDOW earlier AS (
        PARTITION BY {GROUPS} ORDER BY finished_ns NULLS FIRST, internal_id, "offset" NULLS FIRST
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )
) WHERE internal_id < after_internal_id OR "offset" < after_offset"""


def statements(settings: TraceSettings, end_ns: int) -> tuple[str, ...]:
    """What is to be run, one after the other. ``end_ns``: until when the logs tell all."""
    return _lives(settings, end_ns), _violations(settings)
