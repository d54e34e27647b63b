"""The journalled reader as a stream: an offset, a plan, tasks, a commit; see ``query`` for what is stored."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import pyarrow as pa
from gevent import sleep
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from nsq_fast.errors import ConfigError, JournalStorageFailed
from nsq_fast.log_events import SPARK_JOURNAL_CLEAN_FAILED
from nsq_fast.names import is_ephemeral
from nsq_fast.spark.options import ObjectStore, SourceOptions
from nsq_fast.spark.pace import Pace
from nsq_fast.spark.plain_errors import plain_errors, plainly
from nsq_fast.spark.throughput import Throughput
from nsq_fast.spark.versions import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow, default_limit

from .backlog import STATS_INTERVAL
from .backlogs import Backlogs
from .chain import encode_json
from .collect import Collector
from .location import check_library, check_path, is_object_store, open_storage
from .plan import Depth, Offset, Target, source_of
from .planner import about, make_slots, plan_batch, ready
from .query import QueryJournal, Usage, positions
from .rows import batches
from .slot import Slot

logger = logging.getLogger(__name__)

LISTING_INTERVAL = 30.0
"""How old what an object store lists may be, in seconds: Spark asks for metrics five times a second."""

PATIENCE = 3.0
"""How long one call waits for servers, in seconds: Spark asks again at once."""


class _Driver:
    """What the driver's reader holds while the query runs; a reader in a task has none."""

    def __init__(self, options: SourceOptions) -> None:
        self.backlog = Backlogs(options)
        self.pace = Pace(options)
        self.run = uuid.uuid4().hex
        self.initial: Offset | None = None
        self.target: Target | None = None
        self.subtracted = 0
        self.last: Offset | None = None
        self.checked: Offset | None = None
        self._throughput = Throughput()
        self._counted: int | None = None
        self._usage: Usage | None = None
        self._used_at = float("-inf")

    def count(self, journal: QueryJournal, offset: Offset) -> None:
        """The batch before this offset is done: what the journal holds of it was read."""
        now = time.monotonic()
        if self._counted is None:
            self._throughput.begin(now)
        elif self._counted != offset.batch:
            self._throughput.add(journal.size(offset.batch), now)
        self._counted = offset.batch

    def usage(self, journal: QueryJournal, interval: float) -> Usage:
        """The room that the journal takes, as of the last ``interval`` seconds."""
        now = time.monotonic()
        if self._usage is None or now - self._used_at >= interval:
            self._usage, self._used_at = journal.usage(), now
        return self._usage

    def rate(self) -> int:
        """Bytes a second."""
        return round(self._throughput.rate(time.monotonic()))


class JournalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Micro-batches of a channel, kept in a journal from their FIN until Spark has committed them."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.journal = check_location(options)
        self._driver: _Driver | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_driver": None}

    @property
    def driver(self) -> _Driver:
        """The state of the driver, made when it is first needed."""
        if self._driver is None:
            self._driver = _Driver(self.options)
        return self._driver

    # What Spark calls on the driver

    @plain_errors
    def initialOffset(self) -> dict[str, Any]:
        """Name and make the journal of a new query. Spark asks twice, and must hear the same."""
        if self.driver.initial is None:
            offset = self.driver.last or Offset(uuid.uuid4().hex)
            self._journal(offset).create(about(self.options))
            self.driver.initial = self.driver.last = offset
        return self.driver.initial.encode()

    def getDefaultReadLimit(self) -> ReadLimit:
        """``maxOffsetsPerTrigger``."""
        return default_limit(self.options.max_offsets_per_trigger)

    @plain_errors
    def prepareForTriggerAvailableNow(self) -> None:
        """Note what there is: all of it is read, and not more."""
        self.driver.target = Target(self.driver.backlog.fresh())

    @plain_errors
    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        """The offset behind the next batch; ``start`` when there is nothing to read, or no server answers.

        PySpark before 4.2 gives neither argument. There the journal holds where the query was.
        """
        if start is not None:
            return self._latest(start, limit or self.getDefaultReadLimit())
        offset = self.driver.last or self._kept()
        found = Offset.decode(self._latest(offset.encode(), limit or self.getDefaultReadLimit()))
        if found != offset:
            self._journal(found).keep_position(encode_json(found.encode()))
        self.driver.last = found
        return found.encode()

    def _kept(self) -> Offset:
        """Where the last query with this journal was; at the beginning of a new one when there was none."""
        found = positions(open_storage(self.journal, self.options.object_store), about(self.options))
        if len(found) > 1:
            raise ConfigError(
                f"journal={self.journal!r}: {len(found)} queries have used it, and this PySpark does not say which of"
                " them goes on; give each checkpoint a journal of its own, or use PySpark 4.2 or newer"
            )
        return Offset.decode(msgspec.json.decode(found[0])) if found else Offset.decode(self.initialOffset())

    def _latest(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        offset = Offset.decode(start)
        if self.driver.checked != offset:  # once: Spark asks again and again, and a request has its price
            self._journal(offset).check(about(self.options))
            self.driver.checked = offset
        self._subtract(offset)
        self.driver.count(self._journal(offset), offset)
        available = ready(self._depths())
        if self.driver.target is not None:
            available = self.driver.target.bound(available)
        elif not self.driver.pace.is_due(sum(available.values())):
            available = {}
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        slots = plan_batch(self.options, available, rows)
        if slots:
            return offset.following(slots).encode()
        if self.driver.target is None:
            sleep(STATS_INTERVAL)  # Spark asks again in 10 ms, and there is no news before
        return start

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The backlog of each source, for the progress of the query."""
        depths = self._depths()
        return {
            "backlog": {source: depth.total for source, depth in sorted(depths.items())},
            "ready": {source: depth.ready for source, depth in sorted(depths.items())},
            "metrics": {**self.driver.backlog.metrics(), **self._usage(), "bytesPerSecond": self.driver.rate()},
        }

    def _usage(self) -> dict[str, Any]:
        """The room that the journal takes, and how long its oldest batch waits for Spark to commit it."""
        if self.driver.last is None:
            return {}
        try:
            usage = self.driver.usage(
                self._journal(self.driver.last), LISTING_INTERVAL if is_object_store(self.journal) else 0.0
            )
        except JournalStorageFailed:  # whoever needs the journal will say so
            return {}
        age = 0.0 if usage.oldest is None else max(time.time() - usage.oldest, 0.0)  # clocks of two machines may differ
        return {"journalBytes": usage.size, "journalAgeSeconds": round(age, 1)}

    @plain_errors
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a batch: a new one, or one that is run again. Only ``end`` counts."""
        offset = Offset.decode(end)
        if start == end:
            return []
        self.driver.last = offset
        journal = self._journal(offset)
        journal.check(about(self.options))
        journal.open_batch(offset.batch)
        return make_slots(self.options, journal, offset, self.driver.backlog, self.driver.run)

    @plain_errors
    def commit(self, end: dict[str, Any]) -> None:
        """Delete what Spark will not ask for again."""
        offset = Offset.decode(end)
        self._subtract(offset)
        self.driver.count(self._journal(offset), offset)
        try:
            self._journal(offset).commit(offset.batch)
        except (OSError, JournalStorageFailed) as error:  # costs space until the next commit
            logger.warning(
                "journal %s: batch %s not deleted: %s",
                offset.journal,
                offset.batch,
                error,
                extra=SPARK_JOURNAL_CLEAN_FAILED,
            )

    def stop(self) -> None:
        """Close connections."""
        if self._driver is not None:
            self._driver.backlog.close()

    # What Spark calls in a task

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a slot: from the journal, or from the server through the journal."""
        return plainly(self._read(cast(Slot, partition)))

    def make_collector(self, slot: Slot) -> Collector:
        """Who works on a slot."""
        return Collector(slot)

    # Parts

    def _read(self, slot: Slot) -> Iterator[pa.RecordBatch]:
        yield from batches(self.make_collector(slot).run(), self.options, slot.topic)

    def _journal(self, offset: Offset) -> QueryJournal:
        return QueryJournal(open_storage(self.journal, self.options.object_store), offset.journal)

    def _depths(self) -> Mapping[str, Depth]:
        return self.driver.backlog.depths(PATIENCE)

    def _subtract(self, offset: Offset) -> None:
        """What the batch has taken from the servers in this run is off the target; what it found in the journal not."""
        if self.driver.target is None or self.driver.subtracted == offset.batch:
            return
        self.driver.subtracted = offset.batch
        seals = self._journal(offset).seals(offset.batch)
        taken: dict[str, int] = {}
        for number, name, _ in offset.numbered():
            source = source_of(name)
            fresh = seals[number].fresh.get(self.driver.run, 0) if number in seals else 0
            taken[source] = taken.get(source, 0) + fresh
        self.driver.target.subtract(taken)


def check_location(options: SourceOptions) -> str:
    """Where the journals of queries lie. Raises ConfigError for options that no journal can go with."""
    if options.journal is None:
        raise ConfigError("journal: is required")
    for name in (*options.topics, options.channel):
        if is_ephemeral(name):
            raise ConfigError(
                f"{name}: vanishes whenever nobody is connected to it, as between two batches, with all its messages"
            )
    path = check_path(options.journal)
    if not is_object_store(path) and options.object_store != ObjectStore():
        raise ConfigError("journalEndpoint, journalRegion: are for a journal in an object store, s3://bucket/prefix")
    check_library(path)
    return path
