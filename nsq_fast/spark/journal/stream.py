"""The journalled reader: as a stream (offset, plan, tasks, commit), and as a batch. What is stored: ``query``."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec
import pyarrow as pa
from gevent import sleep

from nsq_fast._lazy import get_logger
from nsq_fast.errors import (
    ConfigError,
    HttpError,
    JournalError,
    JournalStorageFailed,
    JournalTaken,
    RemoteProtocolError,
)
from nsq_fast.log_events import SPARK_JOURNAL_CLEAN_FAILED
from nsq_fast.names import is_ephemeral
from nsq_fast.spark.discovery import NO_ANSWER, TopicServers, check_topics
from nsq_fast.spark.options import ObjectStore, SourceOptions
from nsq_fast.spark.streams import StreamReader
from nsq_fast.spark.versions import (
    DataSourceReader,
    InputPartition,
    ReadLimit,
    ReadMaxRows,
    plain_errors,
    plainly,
)

from .collect import Collector, Peek
from .files import Storage, check_library, check_path, is_object_store, open_storage
from .plan import (
    STATS_INTERVAL,
    Backlogs,
    Depth,
    Offset,
    Target,
    find_source,
    plan_rows,
    plan_slots,
    source_of,
    topic_of,
)
from .query import (
    About,
    Adoption,
    QueryJournal,
    Usage,
    parse_adopted,
    positions,
)
from .slot import READ, Slot, batches

logger: logging.Logger = get_logger(__name__)


LISTING_INTERVAL = 30.0
"""How old what an object store lists may be, in seconds: Spark asks for metrics five times a second."""

PATIENCE = 3.0
"""How long one call waits for servers, in seconds: Spark asks again at once."""


class _ReadsSlots:
    """The half of a reader that runs in tasks."""

    options: SourceOptions
    journal: str = ""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a slot. A batch of none has, for Spark, one partition of its own making: it has no rows."""
        return plainly(self._read(partition)) if isinstance(partition, Slot) else iter(())

    def make_collector(self, slot: Slot) -> Collector:
        return Collector(slot)

    def _read(self, slot: Slot) -> Iterator[pa.RecordBatch]:
        """From the journal, or from the server through the journal; without one nothing is consumed."""
        if not self.journal:
            yield from Peek(slot).batches(self.options)
        else:
            try:
                segments = self.make_collector(slot).run()
            except JournalTaken:  # Spark reads a batch in two places at once where a stream is joined with itself
                segments = self.make_collector(slot).run()  # what the other has claimed: there is something now
            if slot.heir:
                with contextlib.suppress(JournalTaken):
                    open_storage(slot.heir, slot.object_store).claim(READ, [b"1"])
            yield from batches(segments, self.options, slot.topic)


class JournalStreamReader(_ReadsSlots, StreamReader):
    """Micro-batches of a channel, kept in a journal from their FIN until Spark has committed them."""

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self.journal: str = check_location(options)
        # What the driver's reader holds while the query runs; one in a task has nothing of it.
        self.backlog: Backlogs = Backlogs(options, creates=False)  # not before the checkpoint is known to fit
        self._run = uuid.uuid4().hex
        self._initial: Offset | None = None
        self._target: Target | None = None
        self._last: Offset | None = None
        self._checked: Offset | None = None
        self._adoption = Adoption(options)
        self._opened = 0
        self._knows_topics = False
        self._counted: int | None = None
        self._used: Usage | None = None
        self._used_at = float("-inf")

    # What Spark calls on the driver

    @plain_errors
    def initialOffset(self) -> dict[str, Any]:
        """Name and make the journal of a new query. Spark asks twice, and must hear the same."""
        if self._initial is None:
            offset = self._last or Offset(uuid.uuid4().hex)
            self._journal(offset).create(About.of(self.options))
            self._initial = self._last = offset
        return self._initial.encode()

    @plain_errors
    def prepareForTriggerAvailableNow(self) -> None:
        """Note what there is: all of it is read, and not more."""
        self._target = Target(self.backlog.fresh())

    @plain_errors
    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        """The offset behind the next batch; ``start`` when there is nothing to read, or no server answers.

        PySpark before 4.2 gives neither argument. There the journal holds where the query was.
        """
        if start is not None:
            return self._latest(start, limit or self.getDefaultReadLimit())
        offset = self._last or self._kept()
        found = Offset.decode(self._latest(offset.encode(), limit or self.getDefaultReadLimit()))
        if found != offset:
            self._journal(found).keep_position(msgspec.json.encode(found.encode()))
            self._tell_left()
        self._last = found
        return found.encode()

    def _kept(self) -> Offset:
        """Where the last query with this journal was; at the beginning of a new one when there was none."""
        found = positions(self._storage(), About.of(self.options))
        if len(found) > 1:
            raise ConfigError(
                f"journal={self.journal!r}: {len(found)} queries have used it, and this PySpark does not say which of"
                " them goes on; give each checkpoint a journal of its own, or use PySpark 4.2 or newer"
            )
        return Offset.decode(msgspec.json.decode(found[0])) if found else Offset.decode(self.initialOffset())

    def _latest(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        offset = Offset.decode(start)
        if self._checked != offset:  # once: Spark asks again and again, and a request has its price
            journal = self._journal(offset)
            journal.renew(About.of(self.options))
            if self._checked is None:
                # Spark asks for the initial offset, too, when it runs the first batch again: it says which query it is
                # with that batch only, and the folders beside this one are looked at when its own is known.
                self._adoption.begin(journal, offset.batch, is_new=self._initial is not None)
                self.backlog.create_channels()
            self._adoption.look_back(journal, offset)
            self._checked = offset
        must_know = offset.batch == 0 and self.options.fail_on_missing_topic and not self._knows_topics
        if must_know and not self._check_topics():
            return start
        if self._adoption.is_due(offset.batch):
            return self._adoption.plan(self._journal(offset), offset).encode()
        self._account(offset)
        available = ready(self._depths())
        if self._target is not None:
            available = self._target.bound(available)
        elif not self._pace.is_due(sum(available.values())):
            available = {}
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        slots = plan_batch(self.options, available, rows)
        self._left = sum(available.values()) - sum(slots.values())
        if slots:
            return offset.following(slots).encode()
        if self._target is None:
            sleep(STATS_INTERVAL)  # Spark asks again in 10 ms, and there is no news before
        return start

    def _check_topics(self) -> bool:
        """Of a new query: fail for a topic that nobody knows. Whether somebody has said so."""
        try:
            check_topics(self.options, PATIENCE)
        except (HttpError, RemoteProtocolError, OSError):
            self._depths()  # says that nobody answers
            return False
        self._knows_topics = True
        return True

    def reportLatestOffset(self) -> dict[str, Any] | None:
        depths = self._depths()
        return {
            "backlog": {source: depth.total for source, depth in sorted(depths.items())},
            "ready": {source: depth.ready for source, depth in sorted(depths.items())},
            "metrics": {
                **self.backlog.metrics(),
                **self._usage(),
                "bytesPerSecond": self._throughput.now(),
            },
        }

    def _usage(self) -> dict[str, Any]:
        """The room that the journal takes, and how long its oldest batch waits for Spark to commit it."""
        if self._last is None:
            return {}
        now, interval = time.monotonic(), LISTING_INTERVAL if is_object_store(self.journal) else 0.0
        if self._used is None or now - self._used_at >= interval:
            try:
                self._used, self._used_at = self._journal(self._last).usage(), now
            except JournalStorageFailed:  # whoever needs the journal will say so
                return {}
        return {"journalBytes": self._used.size, "journalAgeSeconds": round(self._used.age or 0.0, 1)}

    def _account(self, offset: Offset) -> None:
        """The batch before this offset is done: what the journal holds of it was read, by this run or one before."""
        if self._counted == offset.batch:
            return
        self.backlog.forget()  # what it took would be planned once more, and the next batch wait for it in vain
        if self._counted is None:
            self._throughput.begin(time.monotonic())
        else:
            self._throughput.add(self._journal(offset).size(offset.batch), time.monotonic())
        if self._target is not None and offset.slots:
            self._target.subtract(self._taken(offset))
        self._counted = offset.batch

    def _taken(self, offset: Offset) -> dict[str, int]:
        """What the batch has taken from each source in this run. What it found in the journal does not count."""
        seals = self._journal(offset).seals(offset.batch)
        taken: dict[str, int] = {}
        for number, name, _ in offset.numbered():
            fresh = seals[number].fresh.get(self._run, 0) if number in seals else 0
            taken[source_of(name)] = taken.get(source_of(name), 0) + fresh
        return taken

    @plain_errors
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a batch: a new one, or one that is run again. Only ``end`` counts."""
        offset = Offset.decode(end)
        if start == end:
            return []
        self._last = offset
        journal = self._journal(offset)
        unnamed = journal.renew(About.of(self.options)).unnamed
        journal.open_batch(offset.batch)
        self._opened = offset.batch
        if self.options.reads_several:
            journal.keep_slots(offset.batch, list(offset.slots))
        return make_slots(self.options, journal, offset, self.backlog, self._run, unnamed)

    @plain_errors
    def commit(self, end: dict[str, Any]) -> None:
        offset = Offset.decode(end)
        self._account(offset)
        try:
            journal = self._journal(offset)
            self._adoption.commit(journal, offset.batch)  # first, as an orphan that stays is adopted once more
            is_first = journal.commit(offset.batch)
        except (OSError, JournalStorageFailed) as error:  # costs space until the next commit
            logger.warning(
                "journal %s: batch %s not deleted: %s",
                offset.journal,
                offset.batch,
                error,
                extra=SPARK_JOURNAL_CLEAN_FAILED,
            )
            return
        is_opened, self._opened = 0 < offset.batch == self._opened, 0  # 0: where the query begins, which nobody opens
        if is_opened and not is_first:
            raise JournalError(
                f"journal={self.journal!r}: another query has begun with it, the same topic and the same channel, and"
                f" has adopted batch {offset.batch} of this one: its rows come twice. Stop one of the two; each needs a"
                " journal and a channel of its own"
            )

    def stop(self) -> None:
        self.backlog.close()

    # Parts

    def _journal(self, offset: Offset) -> QueryJournal:
        return QueryJournal(self._storage(), offset.journal)

    def _storage(self) -> Storage:
        return open_storage(self.journal, self.options.object_store)

    def _depths(self) -> Mapping[str, Depth]:
        return self.backlog.depths(PATIENCE)


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


# The journalled reader as a batch: the messages in a channel now, either taken out of it or read and put back.


FOLDER = "batch"
"""The journal of a batch read, below the option ``journal``."""


class JournalBatchReader(_ReadsSlots, DataSourceReader):
    """A channel's messages as a table.

    With ``consume`` the journal is the identity of the read: the first action on
    it takes the messages out of the channel, every later one, of whatever
    program, gives the same rows again, until the journal is deleted.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.journal: str = check_location(options) if options.consume else ""
        for topic in options.topics:
            if is_ephemeral(topic):
                raise ConfigError(f"{topic}: an ephemeral topic keeps nothing to be read later")

    @plain_errors
    def partitions(self) -> Sequence[InputPartition]:
        backlog = Backlogs(self.options, is_peek=not self.journal)
        try:
            return self._consume(backlog) if self.journal else self._peek(backlog)
        finally:
            backlog.close()

    def _peek(self, backlog: Backlogs) -> list[Slot]:
        # One task for each source, whatever the options say: a second task would read what the first has put back.
        rows = plan_rows(ready(backlog.all_depths()), None)
        backlog.check_channel()
        return make_slots(
            self.options,
            QueryJournal(open_storage("", self.options.object_store), ""),
            Offset("", 0, rows),
            backlog,
            "",
            self.options.topic,
        )

    def _consume(self, backlog: Backlogs) -> list[Slot]:
        journal = QueryJournal(open_storage(self.journal, self.options.object_store), FOLDER)
        journal.create(About.of(self.options))
        plan = journal.plan() or self._keep_plan(journal, backlog)
        offset = Offset.decode(msgspec.json.decode(plan))
        journal.open_batch(offset.batch)
        return make_slots(self.options, journal, offset, backlog, "", journal.renew(About.of(self.options)).unnamed)

    def _keep_plan(self, journal: QueryJournal, backlog: Backlogs) -> bytes:
        slots = plan_batch(self.options, ready(backlog.all_depths()), None)
        with contextlib.suppress(JournalTaken):  # by the same read in another process
            journal.claim_plan(msgspec.json.encode(Offset(FOLDER, 1, slots).encode()))
        return cast(bytes, journal.plan())


# From an offset to the tasks of its batch: which server each slot reads from now. For the driver.


def plan_batch(options: SourceOptions, depths: Mapping[str, int], limit: int | None) -> dict[str, int]:
    return plan_slots(plan_rows(depths, limit), options.min_partitions, options.max_records_per_partition)


def ready(depths: Mapping[str, Depth]) -> dict[str, int]:
    return {source: depth.ready for source, depth in depths.items()}


def make_slots(
    options: SourceOptions, journal: QueryJournal, offset: Offset, backlogs: Backlogs, run: str, unnamed: str
) -> list[Slot]:
    """The tasks of a batch. A slot whose partition nobody leads has no address. ``unnamed``: see `About`."""
    slot = partial(
        Slot,
        channel=options.channel,
        connection=options.connection,
        object_store=options.object_store,
        suspects=journal.suspects.storage.path if options.suppress_duplicates else None,
        max_delay=options.max_slot_delay,
        run=run,
    )
    if adopted := list(filter(None, map(parse_adopted, offset.slots))):  # such a batch has no others
        # They lie in other folders, and ask no server: what their files hold is all of them.
        places = [journal.beside(each.id).open_batch(each.batch) for each in adopted]
        heir = journal.batch(offset.batch).path
        return [
            slot(place.path, each.slot, name, 0, each.topic, address=None, heir=heir)
            for place, name, each in zip(places, offset.slots, adopted, strict=True)
        ]
    topics = {topic_of(name) or unnamed for name in offset.slots}
    servers = dict.fromkeys(topics, TopicServers())
    if len(journal.seals(offset.batch)) < len(offset.slots):
        for topic in topics:
            with contextlib.suppress(*NO_ANSWER):  # what is in the journal needs no server
                servers[topic] = backlogs.servers(topic)
    slots = []
    for number, name, rows in offset.numbered():
        topic = topic_of(name) or unnamed
        found = servers[topic]
        partition, address = find_source(source_of(name), found)
        slots.append(
            slot(
                journal.batch(offset.batch).path,
                number,
                name,
                rows,
                topic,
                address=address,
                partition=partition,
                is_redesigned=found.is_redesigned,
                connection=options.connection.replace(extend_support=found.has_ext),
            )
        )
    return slots
