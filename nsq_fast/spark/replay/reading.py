"""Reading one piece of a log: all of it, in order, each record once, whatever happens meanwhile.

A piece is read on a channel of its own. SUB creates the channel, its position is
set to the start of the piece, and it goes when the connection ends. So two
attempts at one piece never take messages from each other, and nothing that a
killed attempt leaves behind matters. (Where channels must be registered, the
channel of the options is the only one. What another attempt takes from it is
missing here, and is requested again.) FIN has no meaning for Spark here; it only
makes nsqd send more.

When the connection ends or the leader changes, reading continues where it was.
When the records that arrive leave a gap, the log is asked why.
"""

from __future__ import annotations

import heapq
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from gevent import sleep

from nsq_fast._frame import Columns, join_columns
from nsq_fast._lazy import get_logger
from nsq_fast.columns import ColumnSubscription
from nsq_fast.errors import (
    ConnectionLost,
    ExtendSubForbidden,
    ExtendSubRequired,
    HttpError,
    LookupFailed,
    NsqError,
    OrderedSubRequired,
    RemoteProtocolError,
    ServerError,
)
from nsq_fast.log_events import SPARK_DATA_LOST, SPARK_READ_AGAIN
from nsq_fast.names import MAX_NAME_LENGTH
from nsq_fast.spark.arrow_rows import to_batch
from nsq_fast.spark.discovery import Nsqd
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.versions import InputPartition, plainly

from .logs import Log, TopicLogs, TopicOffsets, checked_loss

logger: logging.Logger = get_logger(__name__)


PATIENCE = 300.0
"""A task fails when it has come no further for so many seconds."""

EPHEMERAL = "#ephemeral"
MAX_HELD = 50_000
_TOKEN_BYTES = 4
_TURN = 0.05
_FIRST_WAIT = 0.3
_MAX_WAIT = 5.0
_FIRST_PAUSE = 0.05
_MAX_PAUSE = 1.0
_PASSING = (ConnectionLost, HttpError, LookupFailed, RemoteProtocolError, ServerError)
_STALE_ROUTE = (OrderedSubRequired, ExtendSubRequired, ExtendSubForbidden)


class PieceReader:
    """Reads one piece, once. ``patience`` as PATIENCE."""

    def __init__(self, options: SourceOptions, piece: Piece, patience: float = PATIENCE) -> None:
        self.options: SourceOptions = options.for_topic(piece.topic)
        self.piece = piece
        self._logs = TopicLogs(self.options)
        self._route = piece.route
        self._assembly = Assembly(piece.start, piece.end)
        self._batches = Batches(self.options, piece.partition)
        self._patience = patience
        self._came_on_at = time.monotonic()
        self._pause = _FIRST_PAUSE
        self._wait = _FIRST_WAIT
        self._ask_at = self._came_on_at + _FIRST_WAIT
        self._asked_about = -1

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The records of the piece, in order.

        Raises DataLost, the ServerError of a refusal that will not pass, or what has kept it from coming on.
        """
        try:
            while not self._assembly.is_complete:
                yield from self._read_while_it_works()
            yield from self._batches.take()
        finally:
            self._logs.close()

    def _read_while_it_works(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._read_on()
        except _PASSING as error:
            yield from self._batches.take()
            self._recover_from(error)

    def _read_on(self) -> Iterator[pa.RecordBatch]:
        """Read over one connection, for as long as it works."""
        route = self._route = self._route or Route.of(self._logs.log(self.piece.partition))
        channel = self.options.channel if route.has_fixed_channels else own_channel(self.options.channel)
        subscription = self.subscribe(route, channel)
        try:
            self._begin(route, subscription)
            while not self._assembly.is_complete:
                columns = subscription.fetch(_TURN)
                # Kept before anything may fail: what the assembly has handed on does not come again.
                has_come_on = self._keep(self._assembly.add(columns), route)
                if columns.count:
                    subscription.finish(columns.ids)
                if not has_come_on:
                    self._check_gap(route, channel, has_come=columns.count > 0)
                if self._batches.is_full or not columns.count:
                    yield from self._handed_on()
        finally:
            subscription.abort()

    def _handed_on(self) -> Iterator[pa.RecordBatch]:
        """The records that are ready. The time that Spark takes for them does not count as ours."""
        for batch in self._batches.take():
            yield batch
            self._has_come_on()

    def _begin(self, route: Route, subscription: ColumnSubscription) -> None:
        self._wait_for_rest()
        try:
            self.set_position(route, subscription.channel, self._assembly.expected)
        except HttpError as error:
            if error.status is not None:
                self._ask_why(route, subscription.channel, again=False)
            raise
        subscription.set_rdy(1 if route.is_ordered else subscription.info.max_rdy_count)

    # What tests of failures override

    def subscribe(self, route: Route, channel: str) -> ColumnSubscription:
        subscription = ColumnSubscription(
            route.nsqd.tcp,
            self.options.topic,
            channel,
            self.options.connection.replace(extend_support=route.is_ext),
            partition=self.piece.partition,
            ordered=route.is_ordered,
            advanced=not route.is_ordered,
        )
        subscription.open()
        return subscription

    def set_position(self, route: Route, channel: str, offset: int) -> None:
        self._logs.set_position(route.nsqd, self.piece.partition, channel, offset)

    # When it does not go on

    def _check_gap(self, route: Route, channel: str, *, has_come: bool) -> None:
        """Ask why at once when something else came; when it takes long, ask again, and for the records again."""
        now = time.monotonic()
        if now >= self._ask_at:
            self._wait = min(2 * self._wait, _MAX_WAIT)
            self._ask_at = now + self._wait
            self._ask_why(route, channel, again=True)
            self._check_patience()
        elif has_come and self._asked_about != self._assembly.expected:
            self._asked_about = self._assembly.expected
            self._ask_why(route, channel, again=False)

    def _ask_why(self, route: Route, channel: str, *, again: bool) -> None:
        partition, expected = self.piece.partition, self._assembly.expected
        log = self._logs.log(partition)
        if Route.of(log) != route:
            raise ConnectionLost(f"partition {partition} is led by {log.nsqd} now, or to be read in another way")
        if log.start > expected:
            self._lose(log.start, f"the log begins at {log.start}: retention has overtaken the query")
            return
        record = self._logs.record_at(log, partition, expected)
        if record is None:
            self._mind_end(log)
        elif record.offset == expected:
            if again:
                self._send_again(route, channel)
        elif expected == self.piece.start:
            self._skip_to(record.offset)  # the range was cut within a record, which belongs to the one before
        else:
            self._lose(record.offset, f"the log goes on at {record.offset}: it is not the one that it was")

    def _mind_end(self, log: Log) -> None:
        """No record begins where we are. It may be about to; but not where the last one lies across."""
        if log.end < self.piece.end:
            if time.monotonic() - self._came_on_at > self._patience / 2:
                self._lose(self.piece.end, f"the log ends at {log.end}: a part of it was lost, or never kept for good")
            return
        last = self._logs.record_number(log, self.piece.partition, log.messages)
        if last is not None and last.offset < self._assembly.expected:
            self._skip_to(self.piece.end)

    def _send_again(self, route: Route, channel: str) -> None:
        logger.info(
            "%s: partition %d again from %d on",
            route.nsqd,
            self.piece.partition,
            self._assembly.expected,
            extra=SPARK_READ_AGAIN,
        )
        if self._assembly.held_rows > MAX_HELD:
            self._assembly.forget_held()
        self.set_position(route, channel, self._assembly.expected)

    def _lose(self, offset: int, reason: str) -> None:
        lost = (self._assembly.expected, min(offset, self.piece.end))
        logger.warning("%s", checked_loss(self.options, self.piece.partition, lost, reason), extra=SPARK_DATA_LOST)
        self._skip_to(offset)

    def _skip_to(self, offset: int) -> None:
        assert self._route is not None
        self._keep(self._assembly.skip_to(offset), self._route)
        self._has_come_on()

    def _recover_from(self, error: NsqError) -> None:
        """Wait a moment, then look who leads. Raises what will not pass, or has not for too long."""
        refusal = error if isinstance(error, ServerError) else error.__cause__
        if isinstance(refusal, ServerError) and not (refusal.stale_topology or isinstance(refusal, _STALE_ROUTE)):
            raise error
        self._check_patience(error)
        logger.info(
            "partition %d at %d: %s", self.piece.partition, self._assembly.expected, error, extra=SPARK_READ_AGAIN
        )
        sleep(self._pause * random.uniform(0.5, 1.0))
        self._pause = min(2 * self._pause, _MAX_PAUSE)
        self._route = None
        self._logs.forget_leaders()

    def _check_patience(self, error: NsqError | None = None) -> None:
        if time.monotonic() - self._came_on_at > self._patience:
            raise error or LookupFailed(
                f"topic {self.options.topic!r}, partition {self.piece.partition}: nothing came from offset"
                f" {self._assembly.expected} on for {self._patience:.0f} s"
            )

    def _keep(self, runs: list[Run], route: Route) -> bool:
        self._batches.add(runs, str(route.nsqd))
        if runs:
            self._has_come_on()
        return bool(runs)

    def _has_come_on(self) -> None:
        self._came_on_at = time.monotonic()
        self._pause = _FIRST_PAUSE
        self._wait_for_rest()

    def _wait_for_rest(self) -> None:
        self._wait = _FIRST_WAIT
        self._ask_at = time.monotonic() + self._wait


class ReadsPieces:
    """The half of a reader that runs in tasks."""

    options: SourceOptions

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one piece. A batch of none has, for Spark, one partition of its own making: it has no rows."""
        return plainly(self.make_piece_reader(partition).batches()) if isinstance(partition, Piece) else iter(())

    def make_piece_reader(self, piece: Piece) -> PieceReader:
        """What reads a piece, in a task. To be overridden by tests of failures."""
        return PieceReader(self.options, piece)


def own_channel(channel: str) -> str:
    """A name that no other channel has; it begins with that of ``channel``."""
    token = secrets.token_hex(_TOKEN_BYTES)
    room = MAX_NAME_LENGTH - len(EPHEMERAL) - len(token) - 1
    return f"{channel.removesuffix(EPHEMERAL)[:room]}.{token}{EPHEMERAL}"


# A piece of work for one task: a range of one partition's log, and how a batch is cut into pieces.


@dataclass(frozen=True)
class Route:
    """How a partition was to be read when the batch was planned; a task that finds it out of date asks for itself."""

    nsqd: Nsqd
    is_ordered: bool
    is_ext: bool
    has_fixed_channels: bool

    @classmethod
    def of(cls, log: Log) -> Route:
        return cls(log.nsqd, log.is_ordered, log.is_ext, log.has_fixed_channels)


class Piece(InputPartition):
    """The records of a partition that begin from offset ``start`` up to ``end``. ``route``: None when unknown."""

    def __init__(self, topic: str, partition: int, start: int, end: int, route: Route | None) -> None:
        super().__init__(f"{topic}-{partition}:{start}-{end}")
        self.topic = topic
        self.partition = partition
        self.start = start
        self.end = end
        self.route = route


Routes = Mapping[str, Mapping[int, Route]]
"""Topic -> partition -> route."""


def pieces(
    starts: TopicOffsets,
    ends: TopicOffsets,
    routes: Routes,
    minimum: int | None,
    cuts: Callable[[str, int, int, int], list[int]] = lambda topic, partition, begin, end: [],
) -> list[Piece]:
    """The pieces of a batch: one for each partition that has something, or more to make ``minimum`` of them.

    A cut may fall within a record: that belongs to the piece in which it begins.

    Args:
        cuts: offsets at which a topic's partition is cut in any case, between two offsets.
    """
    ranges = [
        (topic, partition, first, stop)
        for topic in sorted(ends)
        for partition, end in sorted(ends[topic].items())
        if end > (begin := starts.get(topic, {}).get(partition, 0))
        for first, stop in pairwise([begin, *cuts(topic, partition, begin, end), end])
    ]
    total = sum(stop - first for _, _, first, stop in ranges)
    least = minimum if minimum is not None and minimum > len(ranges) else 0
    found: list[Piece] = []
    for topic, partition, first, stop in ranges:
        count = max(1, -(-least * (stop - first) // total))
        bounds = [first + (stop - first) * number // count for number in range(count + 1)]
        route = routes.get(topic, {}).get(partition)
        found += [Piece(topic, partition, begin, end, route) for begin, end in pairwise(bounds) if end > begin]
    return found


# Puts a range of a partition's log together from the records that arrive.
#
# A record carries its offset and its size, and the next record begins where it
# ends. So it is known for certain whether the range is complete, whatever arrived
# twice, too early, or not at all. What is handed on is in order and without a gap
# from the start of the range to its end. A record belongs to the range in which
# it begins.


class Run(NamedTuple):
    """Rows ``first`` up to ``stop`` of some columns: contiguous, in order."""

    columns: Columns
    first: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.first

    @property
    def is_whole(self) -> bool:
        return self.first == 0 and self.stop == self.columns.count


class _Held(NamedTuple):
    """A run that waits. ``offsets`` and ``ends`` are those of all rows of its columns."""

    offset: int
    tie: int
    run: Run
    offsets: Any
    ends: Any


class Assembly:
    """The range from ``start`` up to ``end``.

    Attributes:
        expected: the offset at which the next record has to begin.
        end: the first offset that no longer belongs to the range.
    """

    def __init__(self, start: int, end: int) -> None:
        self.expected: int = start
        self.end = end
        self._held: list[_Held] = []
        self._ties = 0

    @property
    def is_complete(self) -> bool:
        return self.expected >= self.end

    @property
    def held_rows(self) -> int:
        """How many records wait for those before them."""
        return sum(held.run.rows for held in self._held)

    def forget_held(self) -> None:
        """Drop the records that wait; they have to be delivered again."""
        self._held.clear()

    def add(self, columns: Columns) -> list[Run]:
        """Take what arrived; what is ready now, in order. Columns must have offsets and sizes."""
        if columns.count:
            self._split(columns)
        return self._ready()

    def skip_to(self, offset: int) -> list[Run]:
        """Continue at ``offset``: there is nothing before it. Returns what is ready now."""
        self.expected = max(self.expected, offset)
        return self._ready()

    def _split(self, columns: Columns) -> None:
        offsets = np.frombuffer(columns.offsets, np.uint64)
        ends = offsets + np.frombuffer(columns.sizes, np.uint32)
        breaks: Any = np.flatnonzero(offsets[1:] != ends[:-1]) + 1
        for first, stop in pairwise([0, *breaks.tolist(), columns.count]):
            offset = int(offsets[first])
            if offset < self.end and int(ends[stop - 1]) > self.expected:
                self._ties += 1
                heapq.heappush(self._held, _Held(offset, self._ties, Run(columns, first, stop), offsets, ends))

    def _ready(self) -> list[Run]:
        ready: list[Run] = []
        while self._held and not self.is_complete and self._held[0].offset <= self.expected:
            held = heapq.heappop(self._held)
            columns, first, stop = held.run
            first += int(np.searchsorted(held.offsets[first:stop], self.expected))
            if first == stop:
                continue  # nothing new
            offset = int(held.offsets[first])
            if offset != self.expected:  # the one that is wanted is not among them
                heapq.heappush(self._held, held._replace(offset=offset, run=Run(columns, first, stop)))
                continue
            stop = first + int(np.searchsorted(held.offsets[first:stop], self.end))
            self.expected = int(held.ends[stop - 1])
            ready.append(Run(columns, first, stop))
        if self.is_complete:
            self._held.clear()
        return ready


# Runs of records, gathered into Arrow batches that are large enough to be cheap for Spark.


MAX_ROWS = 10_000
MAX_BYTES = 8 * 1024 * 1024


class Batches:
    """Takes runs in order, gives batches in order. ``is_full``: it should be emptied."""

    def __init__(self, options: SourceOptions, partition: int) -> None:
        self._options = options
        self._partition = partition
        self._runs: list[tuple[Run, str]] = []
        self._rows = self._bytes = 0

    @property
    def is_full(self) -> bool:
        return self._rows >= MAX_ROWS or self._bytes >= MAX_BYTES

    def add(self, runs: Iterable[Run], nsqd: str) -> None:
        for run in runs:
            self._runs.append((run, nsqd))
            self._rows += run.rows
            self._bytes += len(run.columns.body)

    def take(self) -> Iterator[pa.RecordBatch]:
        runs, self._runs = self._runs, []
        self._rows = self._bytes = 0
        for (is_whole, nsqd), group in groupby(runs, lambda each: (each[0].is_whole, each[1])):
            parts = [run for run, _ in group]
            if is_whole:
                columns = join_columns([run.columns for run in parts])
                yield self._batch(Run(columns, 0, columns.count), nsqd)
            else:
                yield from (self._batch(run, nsqd) for run in parts)

    def _batch(self, run: Run, nsqd: str) -> pa.RecordBatch:
        return to_batch(
            run.columns,
            self._options.columns,
            self._options.headers_as,
            topic=self._options.topic,
            partition=self._partition,
            nsqd=nsqd,
            is_redesigned=True,
            first=run.first,
            count=run.rows,
        )
