"""The stream reader: answers what Spark's driver asks about offsets, and reads batches.

Exactly once for Spark: a batch is a range of offsets in Spark's checkpoint, and
reading it gives the same rows each time. The channel of the options only
follows what Spark has committed, so that the servers keep what may be asked for
again, and show how far the query is behind.
"""

from __future__ import annotations

import time
from typing import Any

from gevent import sleep
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.pace import NO_LIMITS, Limits
from nsq_fast.spark.plain_errors import plain_errors
from nsq_fast.spark.versions import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow, default_limit

from .driver import Driver
from .piece import pieces
from .position import Identity, Position, TopicOffsets, by_topic, start_of
from .reading import ReadsPieces
from .topic import POLL_INTERVAL

START_TIMEOUT = 60.0
"""How long a query that begins waits for the servers, in seconds."""

TARGET_TIMEOUT = 300.0
"""How long one that has to reach an end waits for what is missing."""

IDLE_AFTER = 1.0
"""A query without news for so many seconds is idle."""

_TURN = 0.2


class ReplayStreamReader(ReadsPieces, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads ranges of offsets. Made in several processes and pickled into tasks, without what it has learnt."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._driver: Driver | None = None
        self._initial: Position | None = None
        self._target: TopicOffsets | None = None
        self._planned: TopicOffsets = {}
        self._last: dict[str, Any] | None = None
        self._news_at = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_driver": None, "_initial": None, "_target": None, "_planned": {}, "_last": None}

    # Offsets

    @plain_errors
    def initialOffset(self) -> dict[str, Any]:
        """Where the options let a new query begin."""
        if self._initial is None:
            self._initial = Position(self.driver.begin(START_TIMEOUT), is_initial=True, identity=self.identity)
        self._last = self._initial.to_json()
        return self._last

    def getDefaultReadLimit(self) -> ReadLimit:
        """``maxOffsetsPerTrigger``."""
        return default_limit(self.options.max_offsets_per_trigger)

    @plain_errors
    def prepareForTriggerAvailableNow(self) -> None:
        """From now on there is nothing but what is there now."""
        self._target = self.driver.ends(START_TIMEOUT)

    @plain_errors
    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        """Where the next batch ends; ``start`` itself while there is nothing, or nobody to ask.

        PySpark before 4.2 gives neither argument. There the reader goes on from where it was itself. Where its channel
        is there already it may be a restart, of which it cannot know where it was: the first batch then ends where
        the logs end, whatever the limits.
        """
        start = self._last if start is None else start
        if start is None and self.driver.is_new(START_TIMEOUT):
            start = self.initialOffset()
        if start is None:
            self._last = Position(self.driver.ends(START_TIMEOUT), identity=self.identity).to_json()
        else:
            self._last = self._latest(start, limit or self.getDefaultReadLimit())
        return self._last

    def _latest(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        position = self._position(start)
        self.driver.has_read(position.offsets)
        end = self._next_end(position.offsets, self._limits(limit))
        self._planned = end
        return start if by_topic(end) == by_topic(position.offsets) else self._behind(position, end).to_json()

    def _behind(self, position: Position, end: TopicOffsets) -> Position:
        return position._replace(identity=self.identity).until(end)

    def _limits(self, limit: ReadLimit) -> Limits:
        if isinstance(limit, ReadMaxRows):
            return Limits(limit.max_rows, self.options.max_bytes_per_trigger)
        # Spark passes over the limit that ``getDefaultReadLimit`` gives with the trigger "once", and only then.
        is_once = self.options.max_offsets_per_trigger is not None
        return NO_LIMITS if is_once else Limits(None, self.options.max_bytes_per_trigger)

    def _next_end(self, start: TopicOffsets, limits: Limits) -> TopicOffsets:
        if self._target is None:
            end = self.driver.end(start, limits, None)
            self._rest(is_idle=end == start)
            return end
        deadline = time.monotonic() + TARGET_TIMEOUT
        while not _has_reached(start, self._target):
            must_answer = time.monotonic() > deadline
            end = self.driver.end(start, limits, self._target, must_answer=must_answer)
            if end != start:
                return end
            sleep(_TURN)
        return start

    def _rest(self, *, is_idle: bool) -> None:
        """Keep a query that has been idle for a while from asking each 10 ms: there is no news sooner than that."""
        now = time.monotonic()
        if not is_idle:
            self._news_at = now
        elif now - self._news_at > IDLE_AFTER:
            sleep(POLL_INTERVAL)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Where the logs end, how many bytes of each are not in a batch yet, and Kafka's metrics of that."""
        return self.driver.report(self._planned)

    # Batches

    @plain_errors
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The pieces of a batch."""
        self._last = end
        first, last = self._position(start), self._position(end)
        found: list[InputPartition] = []
        found += pieces(start_of(first, last), last.offsets, self.driver.routes(), self.options.min_partitions)
        return found

    @plain_errors
    def commit(self, end: dict[str, Any]) -> None:
        """Spark is done with all before ``end``: the servers need not keep it for us."""
        self.driver.release(self._position(end).offsets)

    def stop(self) -> None:
        """Close connections."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    # Parts

    @property
    def driver(self) -> Driver:
        """What asks the servers, in Spark's driver. Made when it is needed."""
        if self._driver is None:
            self._driver = Driver(self.options)
        return self._driver

    @property
    def identity(self) -> Identity:
        """What the options read from."""
        return Identity(self.options.server_names, self.options.channel)

    def _position(self, found: dict[str, Any]) -> Position:
        """A position of this query. Raises ConfigError when another one has made it."""
        position = Position.from_json(found, self.options)
        position.check(self.identity, self.options)
        return position


def _has_reached(start: TopicOffsets, target: TopicOffsets) -> bool:
    return all(
        start.get(topic, {}).get(partition, 0) >= offset
        for topic, offsets in target.items()
        for partition, offset in offsets.items()
    )
