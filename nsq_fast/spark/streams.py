"""What the streams of both readers have in common: when a micro-batch is due, how fast it goes, what it waits for."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from nsq_fast._lazy import get_logger
from nsq_fast.errors import counted
from nsq_fast.log_events import SPARK_WAIT_OVER, SPARK_WAITS

from .options import SourceOptions
from .versions import (
    DataSourceStreamReader,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

logger: logging.Logger = get_logger(__name__)

# When a micro-batch is due: at ``minOffsetsPerTrigger`` rows, or when ``maxTriggerDelay`` is over, as with Kafka.


class Limits(NamedTuple):
    """What a micro-batch may have: most rows and bytes, None for no limit; and whether it waits for the fewest rows."""

    rows: int | None = None
    bytes: int | None = None
    waits: bool = True


NO_LIMITS = Limits(waits=False)
"""Of the trigger "once", which Spark has read all there is."""


class Pace:
    """Holds small batches back."""

    def __init__(self, options: SourceOptions) -> None:
        self._least = options.min_offsets_per_trigger
        self._delay = options.max_trigger_delay
        self._began_at = time.monotonic()

    @property
    def is_needed(self) -> bool:
        return self._least is not None

    def is_due(self, rows: int) -> bool:
        """Whether a batch of all that waits, ``rows``, may begin now. When it may, the delay begins anew."""
        if self._least is not None and rows < self._least and time.monotonic() - self._began_at < self._delay:
            return False
        self._began_at = time.monotonic()
        return True


# How many bytes a second a query reads, for the metrics of its progress. Nothing here reads a clock.


WINDOW = 60.0
"""Seconds that a rate is over, at least; more where a batch took longer, or nothing came."""


class Throughput:
    """Bytes of the batches that are done. All times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._done: deque[tuple[float, int]] = deque()

    def begin(self, now: float) -> None:
        """The query begins, or goes on; without effect when it has."""
        if self._began_at is None:
            self._began_at = now

    def add(self, size: int, now: float) -> None:
        """A batch of so many bytes is done."""
        self.begin(now)
        self._done.append((now, size))
        while now - self._done[0][0] >= WINDOW:
            self._began_at, _ = self._done.popleft()

    def rate(self, now: float) -> float:
        if self._began_at is None or now <= self._began_at:
            return 0.0
        return sum(size for _, size in self._done) / (now - self._began_at)

    def now(self) -> int:
        """Bytes a second, as it is now."""
        return round(self.rate(time.monotonic()))


def heard(topics: Mapping[str, Any]) -> dict[str, Any]:
    """How long ago the servers of a query were last heard of, since its start where never; and topics that never were.

    Each has ``begun_at``, when it was first asked about, and ``answered_at``, None where nobody has known it yet.
    """
    now = time.monotonic()
    ages = [now - (each.answered_at or each.begun_at) for each in topics.values()]
    unknown = sorted(topic for topic, each in topics.items() if each.answered_at is None)
    return {"lookupAgeSeconds": round(max(ages, default=0.0), 1), **({"unknownTopics": unknown} if unknown else {})}


INTERVAL = 60.0
"""Seconds between two warnings of the same thing."""


class Reminder:
    """Warnings of what a query waits for, by key: the same text is not written fifty times a second."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._told_at: dict[str, float] = {}
        self._since: dict[str, float] = {}

    def warn(self, key: str, text: str) -> None:
        """``text`` is so now: write it, unless it was written less than `INTERVAL` seconds ago."""
        now = time.monotonic()
        since = self._since.setdefault(key, now)
        if now - self._told_at.get(key, float("-inf")) < INTERVAL:
            return
        self._told_at[key] = now
        lasting = f" (for {now - since:.0f} s now)" if now > since else ""
        self._logger.warning("%s%s", text, lasting, extra=SPARK_WAITS)

    def note(self, text: str) -> None:
        """``text`` may be so again soon, and nobody says when it is over: write it once in `INTERVAL` seconds."""
        now = time.monotonic()
        if now - self._told_at.get(text, float("-inf")) >= INTERVAL:
            self._told_at[text] = now
            self._logger.warning("%s", text, extra=SPARK_WAITS)

    def over(self, key: str) -> None:
        since = self._since.pop(key, None)
        if since is not None:
            del self._told_at[key]
            self._logger.warning("%s: over after %.0f s", key, time.monotonic() - since, extra=SPARK_WAIT_OVER)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What both readers do alike. Made in several processes, and pickled into tasks without what it has learnt."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._pace = Pace(options)
        self._throughput = Throughput()
        self._reminder = Reminder(logger)
        self._left = 0  # rows that wait and that the limit has kept out of the batch that was planned

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.options,)

    def getDefaultReadLimit(self) -> ReadLimit:
        rows = self.options.max_offsets_per_trigger
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def _tell_left(self) -> None:
        """Say what the limit has left: before 4.2 Spark ends a query with ``availableNow`` after one batch, in silence.

        Which trigger a query has it does not tell a source either, so others hear of it, too, once a minute.
        """
        key = f"topic {self.options.topic}: the limit of a batch"
        if self._left:
            self._reminder.warn(
                key,
                f"{key} leaves {counted(self._left, 'row')} for the next one. With the trigger availableNow PySpark"
                " before 4.2 runs one batch: start the query again for them, or leave maxOffsetsPerTrigger out",
            )
        else:
            self._reminder.over(key)
