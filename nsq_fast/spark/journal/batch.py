"""The journalled reader as a batch: the messages in a channel now, either taken out of it or read and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from nsq_fast.errors import ConfigError, JournalTaken
from nsq_fast.names import is_ephemeral
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.plain_errors import plain_errors, plainly

from .backlogs import Backlogs
from .collect import Collector
from .location import open_storage
from .peek import Peek
from .plan import Offset, plan_rows
from .planner import about, make_slots, plan_batch, ready
from .query import QueryJournal
from .rows import batches
from .slot import Slot
from .stream import check_location

FOLDER = "batch"
"""The journal of a batch read, below the option ``journal``."""


class JournalBatchReader(DataSourceReader):
    """A channel's messages as a table.

    With ``consume`` the journal is the identity of the read: the first action on
    it takes the messages out of the channel, every later one, of whatever
    program, gives the same rows again, until the journal is deleted.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.journal = check_location(options) if options.consume else None
        for topic in options.topics:
            if is_ephemeral(topic):
                raise ConfigError(f"{topic}: an ephemeral topic keeps nothing to be read later")

    @plain_errors
    def partitions(self) -> Sequence[InputPartition]:
        """The tasks."""
        backlog = Backlogs(self.options)
        try:
            return self._consume(backlog) if self.journal is not None else self._peek(backlog)
        finally:
            backlog.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a slot. A batch of none has, for Spark, one partition of its own making: it has no rows."""
        return plainly(self._read(partition)) if isinstance(partition, Slot) else iter(())

    def make_collector(self, slot: Slot) -> Collector:
        """Who works on a slot."""
        return Collector(slot)

    def _read(self, slot: Slot) -> Iterator[pa.RecordBatch]:
        if self.journal is None:
            yield from Peek(slot).batches(self.options)
        else:
            yield from batches(self.make_collector(slot).run(), self.options, slot.topic)

    def _peek(self, backlog: Backlogs) -> list[Slot]:
        # One task for each source, whatever minPartitions says: a second task would read what the first has put back.
        rows = plan_rows(ready(backlog.all_depths()), None)
        return make_slots(
            self.options,
            QueryJournal(open_storage("", self.options.object_store), ""),
            Offset("", 0, rows),
            backlog,
            "",
        )

    def _consume(self, backlog: Backlogs) -> list[Slot]:
        journal = QueryJournal(open_storage(cast(str, self.journal), self.options.object_store), FOLDER)
        journal.create(about(self.options))
        plan = journal.plan() or self._keep_plan(journal, backlog)
        offset = Offset.decode(msgspec.json.decode(plan))
        journal.open_batch(offset.batch)
        return make_slots(self.options, journal, offset, backlog, "")

    def _keep_plan(self, journal: QueryJournal, backlog: Backlogs) -> bytes:
        slots = plan_batch(self.options, ready(backlog.all_depths()), None)
        with contextlib.suppress(JournalTaken):  # by the same read in another process
            journal.claim_plan(_encode(Offset(FOLDER, 1, slots).encode()))
        return cast(bytes, journal.plan())


def _encode(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value)
