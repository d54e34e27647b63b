"""The stream reader: answers what Spark's driver asks about offsets, and reads batches.

Exactly once for Spark: a batch is a range of offsets in Spark's checkpoint, and
reading it gives the same rows each time. The channel of the options only
follows what Spark has committed, so that the servers keep what may be asked for
again, and show how far the query is behind.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from gevent import sleep
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from nsq_fast.errors import ConfigError, DataLost, NsqError
from nsq_fast.spark.options import SourceOptions

from .driver import POLL_INTERVAL, Driver
from .piece import pieces
from .position import Offsets, Position, keyed_by_text, start_of
from .reading import ReadsPieces

logger = logging.getLogger(__name__)

START_TIMEOUT = 60.0
"""How long a query that begins waits for the servers, in seconds."""

TARGET_TIMEOUT = 300.0
"""How long one that has to reach an end waits for what is missing."""

IDLE_AFTER = 1.0
"""A query without news for so many seconds is idle."""

_TURN = 0.2
_BACKLOG = "backlogBytes"


class ReplayStreamReader(ReadsPieces, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads ranges of offsets. Made in several processes and pickled into tasks, without what it has learnt."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._driver: Driver | None = None
        self._initial: Position | None = None
        self._target: Offsets | None = None
        self._planned: Offsets = {}
        self._news_at = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_driver": None, "_initial": None, "_target": None, "_planned": {}}

    # Offsets

    def initialOffset(self) -> dict[str, Any]:
        """Where the options let a new query begin."""
        if self._initial is None:
            self._initial = Position(self.driver.begin(START_TIMEOUT), is_initial=True)
        return self._initial.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """``maxOffsetsPerTrigger``."""
        limit = self.options.max_offsets_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        """From now on there is nothing but what is there now."""
        self._target = self.driver.ends(START_TIMEOUT)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the next batch ends; ``start`` itself while there is nothing, or nobody to ask."""
        position = Position.from_json(start)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end = self._next_end(position.offsets, most)
        self._planned = end
        return position.until(end).to_json()

    def _next_end(self, start: Offsets, most: int | None) -> Offsets:
        if self._target is None:
            end = self._try_end(start, most, give_up=False)
            self._rest(is_idle=end == start)
            return end
        deadline = time.monotonic() + TARGET_TIMEOUT
        while not _has_reached(start, self._target):
            end = self._try_end(start, most, give_up=time.monotonic() > deadline)
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

    def _try_end(self, start: Offsets, most: int | None, *, give_up: bool) -> Offsets:
        """``start`` when servers cannot be asked, for a reason that may pass."""
        try:
            return self.driver.end(start, most, self._target)
        except (ConfigError, DataLost):
            raise
        except NsqError as error:
            if give_up:
                raise
            logger.warning("topic %s: no news: %s", self.options.topic, error)
            return start

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Where the logs end, and how many bytes of each are not in a batch yet."""
        ends = self.driver.known_ends()
        if not ends:
            return None
        backlog = {partition: max(0, end - self._planned.get(partition, end)) for partition, end in ends.items()}
        return {**keyed_by_text(ends), _BACKLOG: keyed_by_text(backlog)}

    # Batches

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The pieces of a batch."""
        first, last = Position.from_json(start), Position.from_json(end)
        found: list[InputPartition] = []
        found += pieces(start_of(first, last), last.offsets, self.driver.routes(), self.options.min_partitions)
        return found

    def commit(self, end: dict[str, Any]) -> None:
        """Spark is done with all before ``end``: the servers need not keep it for us."""
        self.driver.release(Position.from_json(end).offsets)

    def stop(self) -> None:
        """Close connections."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    @property
    def driver(self) -> Driver:
        """What asks the servers, in Spark's driver. Made when it is needed."""
        if self._driver is None:
            self._driver = Driver(self.options)
        return self._driver


def _has_reached(start: Offsets, target: Offsets) -> bool:
    return all(start.get(partition, 0) >= offset for partition, offset in target.items())
