"""From records to lives: what became of one message in one channel of its topic.

Each publish is put into every channel that is known for its topic, and grouped with the deliveries by topic,
partition, internal id, trace id and channel. That takes one grouping, in which a null partition equals another, and
one shuffle.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from .schema import KEY, columns
from .settings import TraceSettings

_OUTCOMES = ("FIN", "REQ", "TIMEOUT")
_OF_DELIVERIES = ("receive", "consume")
"""A delivery has a record of its receipt, and one of its outcome: of some one, or the other, is missing. A handler that
hangs, or dies, leaves a receipt alone; logs of older versions have outcomes alone."""
_STORED, _SENT, _FINISHED = ("PUB", "PUB_CLIENT"), ("START",), ("FIN", "FIN_INTERNAL")
"""What an nsqd logs of a message, also where its clients log nothing: that it was stored, sent and finished."""


def channels_of(records: DataFrame) -> DataFrame:
    """The channels known for each topic: those in which something was delivered. Columns topic, channel."""
    return records.where(_is_of_channel()).select("topic", "channel").distinct()


def lives_of(records: DataFrame, channels: DataFrame, settings: TraceSettings, end_ns: int) -> DataFrame:
    """Table ``lives`` without ``batch``.

    Args:
        channels: what `channels_of` gave, of these records or of earlier ones too.
        end_ns: until when the logs tell all. What was published at least ``grace`` before that, and never finished,
            is lost.
    """
    groups = _events(records, channels).repartition(*KEY).groupBy(*KEY, "channel").agg(*_aggregates())
    server_clock = F.min("delivered_published_ns").over(Window.partitionBy(*KEY))  # whichever channel it came to
    deadline = F.lit(end_ns - settings.grace_ns)
    lives = groups.withColumns(
        {
            "published_ns": F.coalesce(server_clock, "stored_ns", "logged_ns"),
            "received_ns": F.col("first_received_ns"),
            "finished_ns": F.col("finish.time_ns"),
            "handling_ns": F.col("finish.handling_ns"),
            "consumer": F.coalesce("finish.consumer", "last_receipt.consumer"),
            "last_outcome": F.col("last.outcome"),
            "is_published": F.coalesce("stored_ns", "logged_ns").isNotNull(),
            "is_first_delivery": _is_first_delivery(),
            **_redeliveries(),
        }
    )
    lives = lives.withColumns(
        {
            "window_ns": F.col("published_ns") - F.pmod("published_ns", F.lit(settings.window_ns)),
            "acknowledged_ns": F.col("stored_ns") - F.col("delivered_published_ns"),
            "in_queue_ns": F.col("received_ns") - F.col("delivered_published_ns"),
            "latency_ns": F.col("finished_ns") - F.col("delivered_published_ns"),
            "state": F.when(F.col("finishes") > 0, "finished")
            .when(F.col("published_ns") <= deadline, "lost")
            .otherwise("pending"),
        }
    )
    return lives.select(*columns("lives"))


def is_publish() -> Column:
    """Whether a record is of a publish, by the producer's log or the server's: it is of every channel."""
    return (F.col("event") == "publish") | _is_logged(*_STORED)


def _is_logged(*states: str) -> Column:
    """Whether a record is of an nsqd that logs one of these states."""
    return (F.col("event") == "server") & F.col("outcome").isin(*states)


def _is_of_channel() -> Column:
    return F.col("event").isin(*_OF_DELIVERIES) | ((F.col("event") == "server") & ~_is_logged(*_STORED))


def _events(records: DataFrame, channels: DataFrame) -> DataFrame:
    """Deliveries, and publishes once for each channel."""
    names = (*KEY, "event", "time_ns", "nsqd", "offset", "size", "published_ns", "attempts", "outcome", "handling_ns")
    publishes = records.where(is_publish()).drop("channel").join(F.broadcast(channels), "topic")
    deliveries = records.where(_is_of_channel())
    return publishes.select(*names, "channel", "consumer").unionByName(deliveries.select(*names, "channel", "consumer"))


def _aggregates() -> list[Column]:
    is_publish = F.col("event") == "publish"
    is_outcome, is_receipt = F.col("event") == "consume", F.col("event") == "receive"
    received = F.when(is_receipt, F.col("time_ns")).otherwise(F.col("time_ns") - F.col("handling_ns"))
    by_outcome = {name: F.count_if(is_outcome & (F.col("outcome") == name)).cast("int") for name in _OUTCOMES}
    is_sent, is_logged_finish = _is_logged(*_SENT), _is_logged(*_FINISHED)
    finish = F.struct("time_ns", "attempts", "handling_ns", "consumer")
    first_finish = F.min(F.when(is_outcome & (F.col("outcome") == "FIN"), finish))
    return [
        F.min(F.when(is_publish, F.col("time_ns"))).alias("stored_ns"),
        F.min(F.when(_is_logged(*_STORED), F.col("time_ns"))).alias("logged_ns"),
        F.min("published_ns").alias("delivered_published_ns"),
        F.coalesce(F.min(F.when(is_publish, F.col("nsqd"))), F.min("nsqd")).alias("nsqd"),
        F.min("offset").alias("offset"),
        F.min("size").alias("size"),
        F.greatest(F.count_if(is_outcome), F.count_if(is_receipt), F.count_if(is_sent)).cast("int").alias("deliveries"),
        F.greatest(by_outcome["FIN"], F.count_if(is_logged_finish).cast("int")).alias("finishes"),
        by_outcome["REQ"].alias("requeues"),
        by_outcome["TIMEOUT"].alias("timeouts"),
        F.coalesce(F.max("attempts"), F.lit(0)).alias("most_attempts"),
        F.min(F.when(is_outcome, F.col("time_ns"))).alias("first_answered_ns"),
        F.min(received).alias("first_received_ns"),
        F.coalesce(F.bool_or((is_outcome | is_receipt) & F.col("offset").isNotNull()), F.lit(False)).alias(
            "is_ordered"
        ),
        F.coalesce(first_finish, F.min(F.when(is_logged_finish, finish))).alias("finish"),
        F.max(F.when(is_outcome, F.struct("attempts", "time_ns", "outcome"))).alias("last"),
        F.max(F.when(is_receipt, F.struct("attempts", "time_ns", "consumer"))).alias("last_receipt"),
    ]


def _is_first_delivery() -> Column:
    finish_is_first = (F.col("finish.attempts") == 1) & (F.col("finish.time_ns") == F.col("first_answered_ns"))
    return F.coalesce(finish_is_first, F.lit(False))


def _redeliveries() -> dict[str, Column]:
    """How often it was delivered again, by cause.

    It was delivered as often as there are records of it, or as its highest number of attempts says: deliveries whose
    consumer died, or lost its connection, left no record. A REQ or a TIMEOUT caused one redelivery, unless nothing came
    after it. The rest has no cause that is recorded.
    """
    last = F.coalesce(F.col("last.outcome"), F.lit(""))
    requeued = F.col("requeues") - (last == "REQ").cast("int")
    timed_out = F.col("timeouts") - (last == "TIMEOUT").cast("int")
    again = F.greatest("most_attempts", "deliveries", F.lit(1)) - 1
    return {
        "redelivered_req": requeued.cast("int"),
        "redelivered_timeout": timed_out.cast("int"),
        "redelivered_unknown": (again - requeued - timed_out).cast("int"),
    }
