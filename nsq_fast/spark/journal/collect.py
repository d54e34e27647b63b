"""One task: take a slot's messages from the server into the journal, segment by segment, and seal the slot.

For each segment: receive, claim its number with what has come, so that it is
stored for good, then send the FINs. A segment takes what is in flight with
several connections, whose windows are filled one after another. The server
fills that of one connection more while the segment is written, into its socket.

No FIN is sent before the segment is claimed. However the work ends, messages
that were claimed are finished, and the others are requeued if the connection
still exists; if not, the server delivers them again after its timeout.
"""

from __future__ import annotations

import contextlib
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from ssl import SSLError
from typing import Any, NamedTuple

import pyarrow as pa
from gevent import sleep

from nsq_fast._codec import MESSAGE_ID_SIZE
from nsq_fast._frame import Columns, join_columns
from nsq_fast._lazy import get_logger
from nsq_fast.columns import ColumnSubscription
from nsq_fast.errors import ConnectFailed, ConnectionLost, NsqError, ProtocolError, ServerError, counted
from nsq_fast.log_events import SPARK_CONNECTION_LOST, SPARK_MESSAGES_LATE, SPARK_READ_PARTIAL, SPARK_SLOT_EMPTY
from nsq_fast.spark.options import SourceOptions

from .files import open_storage
from .slot import (
    Head,
    SegmentLog,
    Slot,
    Stored,
    StoredColumns,
    Suspects,
    keys_of,
    rows_of,
    seal,
    uncertain,
    uncertain_elsewhere,
    unjoined,
)

logger: logging.Logger = get_logger(__name__)


MAX_SEGMENT_BYTES = 32 * 1024 * 1024
_STEP_BYTES = 1024 * 1024
"""What is waited for at once: a window of small messages is one read, and large ones do not fill the memory."""
_AHEAD = 2
"""Windows that are asked for at a time: the server goes on with the next one while we read. With more, it would give
each message to another connection in turn, which makes it dearer."""
_SOON = 0.5
"""Seconds after which a segment takes no window more."""
_CLOSE_TIMEOUT = 10.0


class Collector:
    """The work on one slot. Used once.

    ``open_connection``, ``claim``, ``finish`` and ``seal`` are its steps, each of which may be derived.

    Attributes:
        connections: most connections: those of a segment, and one for what comes while it is written.
        windows: of how many connections a segment may hold what has come.
    """

    connections = 5
    windows = 4

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.segment_log: SegmentLog = SegmentLog(open_storage(slot.path, slot.object_store), slot.number)
        self.suspects: Suspects | None = (
            Suspects(open_storage(slot.suspects, slot.object_store)) if slot.suspects is not None else None
        )
        self._claimed = ClaimedSegments(self.segment_log, slot.head(), self.claim, self.suspects)
        self._seen: set[bytes] = set()
        self._connections = Connections(self.open_connection, slot.rows, self.connections)

    def run(self) -> list[Stored]:
        """The segments of the slot: those of an earlier attempt, or new ones. The slot is sealed when this returns.

        Raises JournalTaken or JournalClosed when another attempt was faster; this one acknowledges nothing more then.
        """
        found = self.segment_log.settle(lambda segments: self._claimed.suspect(uncertain(segments)))
        if found is None:
            self._collect()
            found = self._claimed.segments
        return found

    # The steps

    def open_connection(self) -> JournalConnection:
        """A connection, subscribed. Raises ConnectFailed, or the server's refusal."""
        subscription = _subscription(self.slot)
        subscription.open()
        return JournalConnection(subscription)

    def claim(self, index: int, head: Head, columns: Any) -> Stored:
        """Write a segment."""
        return self.segment_log.claim(index, head, columns)

    def finish(self, connection: JournalConnection, ids: bytes) -> None:
        connection.subscription.finish(ids)

    def seal(self, index: int, head: Head) -> None:
        """End the slot. Every FIN has been judged before."""
        self.segment_log.claim(index, head)

    # The work

    def _collect(self) -> None:
        try:
            self._fill()
        except BaseException:
            self._leave_in_order()
            raise
        segments = self._claimed.segments
        self.seal(len(segments), seal(segments, self.slot.run, self._seen))

    def _fill(self) -> None:
        if self.slot.rows and self._connect():
            _keep_heap()
            self._ask()
            while self._connections.working():
                self._keep(self._receive())
                self._ask()
        for connection in self._connections:
            self._close(connection)

    def _connect(self) -> bool:
        """Whether there is somebody to ask for messages."""
        if self.slot.address is None:
            self._stay_empty("nobody leads the partition now")
            return False
        try:
            self._connections.open_first()
        except (ConnectFailed, ServerError) as error:
            if not is_passing(error):
                raise
            self._stay_empty(error)
            return False
        return True

    def _stay_empty(self, reason: object) -> None:
        logger.warning("slot %s stays empty: %s", self.slot.name, reason, extra=SPARK_SLOT_EMPTY)

    def _ask(self) -> None:
        """Ask for the next windows, if there are to be more."""
        while (connection := self._connections.next_to_ask()) is not None:
            with self._or_lost(connection):
                self._connections.grant(connection)

    def _receive(self) -> dict[JournalConnection, Columns]:
        """What one segment is to hold: window after window, as long as they are full, and another is on its way."""
        found: dict[JournalConnection, Columns] = {}
        room = MAX_SEGMENT_BYTES
        soon = time.monotonic() + _SOON
        deadline = float("inf")
        while (coming := [each for each in self._connections.working() if each not in found]) and room > 0:
            is_enough = len(found) == self.windows or time.monotonic() > soon
            if found and (is_enough or (len(coming) == 1 and not self._connections.is_last)):
                break
            connection = coming[0]
            deadline = min(deadline, connection.gather_deadline)
            with self._or_lost(connection):
                columns = self._gather(connection, room, deadline, has_some=bool(found))
                room -= len(columns.body)
                if columns.count:
                    found[connection] = columns
            if connection.is_silent:
                found.update(self._look(coming[1:]))
            if connection.outstanding:
                break
            self._ask()
        return found

    def _look(self, others: list[JournalConnection]) -> dict[JournalConnection, Columns]:
        """What there is on these, after nothing came on another one: that one alone may be held up.

        By the network, or as its socket was full.
        """
        found: dict[JournalConnection, Columns] = {}
        for connection in others:
            with self._or_lost(connection):
                columns = self._take(connection, self._patience(has_some=True))
                if columns.count:
                    found[connection] = columns
        if not found:
            self._connections.is_over = True
        return found

    def _gather(self, connection: JournalConnection, room: int, deadline: float, *, has_some: bool) -> Columns:
        """What was granted, or as much of it as comes, or fits.

        Args:
            deadline: until when to wait for it at most.
            has_some: whether the segment has messages already.
        """
        parts: list[Columns] = []
        # Messages that trickle in would keep the slot, and with it the batch, for as long as others publish.
        until = min(time.monotonic() + self.slot.max_delay, deadline)
        while connection.outstanding and room > 0:
            columns = self._take(connection, self._patience(has_some=has_some or bool(parts or self._claimed.segments)))
            parts.append(columns)
            room -= len(columns.body)
            if is_late := time.monotonic() > until:
                self._connections.is_over = True
            if is_late or connection.is_silent:
                if self._connections.is_over:
                    connection.give_up()
                break
        return join_columns(parts)

    def _patience(self, *, has_some: bool) -> float:
        return self._connections.patience(self.slot.connection.output_buffer_timeout, has_some=has_some)

    def _take(self, connection: JournalConnection, timeout: float) -> Columns:
        columns = connection.subscription.fetch(timeout, min(connection.outstanding, connection.step))
        connection.took(columns)
        return columns

    def _keep(self, found: dict[JournalConnection, Columns]) -> None:
        """Write it as one segment, and finish its messages."""
        for connection in [each for each in found if time.monotonic() > each.deadline]:
            with self._or_lost(connection):
                self._refuse(connection, found.pop(connection).ids)
        if not found:
            return
        for connection in found:
            self._claimed.sure(connection.sure())
        kept, met = self._claimed.drop_known([*found.values()])
        number = None
        if kept.count:
            number = self._claimed.keep(kept, len(found))
        for connection, columns in found.items():
            connection.claimed(number, columns.ids)
        for connection, columns in found.items():
            with self._or_lost(connection):
                self._connections.limit(connection)
                self.finish(connection, connection.take_unfinished())
                if met:
                    connection.dropped.update(met.intersection(keys_of(columns)))

    def _refuse(self, connection: JournalConnection, ids: bytes) -> None:
        """It is too late to keep these messages: the server gives them to another consumer, or has done so."""
        logger.warning(
            "slot %s: %s came too late to be kept",
            self.slot.name,
            counted(len(ids) // MESSAGE_ID_SIZE, "message"),
            extra=SPARK_MESSAGES_LATE,
        )
        self._connections.is_over = True
        self._connections.limit(connection)
        connection.subscription.requeue(ids)

    # The end

    @contextlib.contextmanager
    def _or_lost(self, connection: JournalConnection) -> Iterator[None]:
        """What the block does with the connection may end it: then as `_lose`."""
        try:
            yield
        except (ConnectionLost, ServerError) as error:
            self._lose(connection, error)

    def _lose(self, connection: JournalConnection, error: NsqError) -> None:
        """The connection is lost: keep what it has claimed, let the server deliver the rest again, and seal the slot.

        Raises errors that a retry would meet again.
        """
        if not is_passing(error):
            raise error
        logger.warning("slot %s: connection lost: %s", self.slot.name, error, extra=SPARK_CONNECTION_LOST)
        connection.give_up()
        connection.subscription.abort()
        self._claimed.suspect(self._claimed.segments[each.number] for each in connection.unsure)

    def _close(self, connection: JournalConnection) -> None:
        if not connection.subscription.is_open:
            return
        with self._or_lost(connection):
            connection.subscription.close(_CLOSE_TIMEOUT)
            late = set(connection.subscription.unfinished)
            self._seen.update(key for key in connection.dropped if key[:MESSAGE_ID_SIZE] not in late)
            self._claimed.suspect_late(late)

    def _leave_in_order(self) -> None:
        """After a failure: finish what is claimed, requeue what is not."""
        for connection in self._connections:
            with contextlib.suppress(Exception):
                if ids := connection.take_unfinished():
                    connection.subscription.set_rdy(0)
                    self.finish(connection, ids)
            with contextlib.suppress(Exception):
                connection.subscription.close(timeout=1.0)


_HEAP = 8 * 1024 * 1024


@lru_cache(maxsize=1)
def _keep_heap() -> None:
    """Once in a process: have glibc keep what a segment takes for the next one, rather than give it back to the system.

    It keeps twice as much as the largest block that it has given back, and this is one that nobody touches. To take
    memory anew, page by page, cost as much as all the rest of a segment (nsq-fast bench: spark-read).
    """
    bytes(_HEAP)


def _subscription(slot: Slot) -> ColumnSubscription:
    """The channel that the slot is to read, not opened yet."""
    assert slot.address is not None
    where = slot.address, slot.topic, slot.channel, slot.connection
    return ColumnSubscription(*where, partition=slot.partition, advanced=slot.is_redesigned)


# One connection that fills one segment after another, and knows which of its FINs the server has processed.
#
# It never asks for more messages than were granted: RDY is the number of messages
# here that are unfinished plus those still to come, and before the FINs of the
# first it is lowered to the others. So nothing is left over at the end, unless
# another consumer takes messages of the channel.
#
# What the server sends shows which FINs it has processed: it sends the n-th
# message only when all messages before it but RDY are finished, and it processes
# FINs in their order. A message may also have left by the server's timeout, so
# one that was here for long is never taken for finished.


STALE = 0.8
"""After this part of the server's message timeout, messages are left to run into it rather than kept."""

SURE = 0.5
"""Within this part of it, none can have run into it."""


def step_of(columns: Columns) -> int:
    """How many messages of their size to wait for at once."""
    return max(1, _STEP_BYTES * columns.count // (len(columns.body) + 1))


class Claimed(NamedTuple):
    """A segment of this connection: its number, how many messages had arrived with its last, since when they could."""

    number: int
    arrived: int
    granted_at: float


class Grant(NamedTuple):
    """From when on so many messages in all were asked for."""

    total: int
    at: float


class JournalConnection:
    """A subscription with its accounts.

    Attributes:
        outstanding: messages asked for that have not arrived.
        unsure: segments of which it is not certain that the server has taken every FIN.
        dropped: the keys of messages that were finished and not kept.
        step: how many messages to wait for at once, by the size of those that came.
        is_silent: whether nothing had come when it was last read.
    """

    def __init__(self, subscription: ColumnSubscription) -> None:
        self.subscription = subscription
        self.outstanding: int = 0
        self.unsure: list[Claimed] = []
        self.dropped: set[bytes] = set()
        self.step: int = 1
        self.is_silent: bool = False
        self._arrived = 0
        self._largest_rdy = 0
        self._unfinished = b""
        self._grants = deque([Grant(0, time.monotonic())])  # from that on which messages came of that are in no segment

    @property
    def message_timeout(self) -> float:
        return self.subscription.info.msg_timeout

    @property
    def is_idle(self) -> bool:
        """Whether it has no messages, and is to get none."""
        return self.subscription.is_open and not self.outstanding and not self.subscription.in_flight

    def grant(self, rows: int) -> None:
        """Ask for so many more messages, and for those that have not come of what was asked for before."""
        self.outstanding += rows
        self._largest_rdy = max(self._largest_rdy, self.outstanding)
        self._grants.append(Grant(self._grants[-1].total + rows, time.monotonic()))
        while len(self._grants) > 1 and self._grants[0].total <= self._arrived:
            self._grants.popleft()
        self.subscription.set_rdy(self.outstanding)

    def give_up(self) -> None:
        """Ask for no more messages, and none of those that were granted."""
        self.outstanding = 0

    def took(self, columns: Columns) -> None:
        self.is_silent = not columns.count
        if columns.count:
            self.step = step_of(columns)
        self._arrived += columns.count
        self.outstanding = max(0, self.outstanding - columns.count)

    def claimed(self, number: int | None, ids: bytes) -> None:
        """All that came is in this segment, or is in the journal already, and is finished next."""
        if number is not None:
            self.unsure.append(Claimed(number, self._arrived, self._grants[0].at))
        self._unfinished = ids

    def take_unfinished(self) -> bytes:
        """The ids of what was claimed and is not finished yet. For once."""
        ids, self._unfinished = self._unfinished, b""
        return ids

    def sure(self) -> list[int]:
        """The segments that are now known to be finished and were not before."""
        now = time.monotonic()
        known = [
            each
            for each in self.unsure
            if each.arrived <= self._arrived - self._largest_rdy and now - each.granted_at < SURE * self.message_timeout
        ]
        self.unsure = [each for each in self.unsure if each not in known]
        return [each.number for each in known]

    @property
    def gather_deadline(self) -> float:
        """Until when to wait for more, so that there is time to write what has arrived."""
        return self._grants[0].at + SURE * self.message_timeout

    @property
    def deadline(self) -> float:
        """Until when what has arrived may be kept."""
        return self._grants[0].at + STALE * self.message_timeout


CONNECT_PATIENCE = 10.0
"""Seconds for which an unreachable server is retried; then the slot stays empty."""
_CONNECT_PAUSE = 0.2

MAX_WINDOW = 10_000
"""Most messages in flight on a connection, and so in a segment, where the server's max_rdy_count allows more."""

_FIRST_WAIT = 1.0
_IDLE_WAIT = 0.2
_LAST_WAIT = 0.05


class Connections:
    """In the order in which they were asked for messages, those that are lost among them; and what they are granted.

    Args:
        open_one: opens a connection. Raises ConnectFailed, or the server's refusal.
        rows: of the slot, shared out among them.
        most: of them there may be.

    Attributes:
        is_over: whether nothing more is asked for, as the server has no more, or the disk is too slow.
    """

    def __init__(self, open_one: Callable[[], JournalConnection], rows: int, most: int) -> None:
        self.is_over = False
        self._open_one = open_one
        self._left = rows
        self._most = most
        self._opened: list[JournalConnection] = []

    def __iter__(self) -> Iterator[JournalConnection]:
        return iter(self._opened)

    def __len__(self) -> int:
        return len(self._opened)

    @property
    def is_last(self) -> bool:
        """Whether what is outstanding is all that is asked for."""
        return self.is_over or not self._left

    def working(self) -> list[JournalConnection]:
        """Those from which messages are to come."""
        return [each for each in self._opened if each.outstanding]

    def open_first(self) -> None:
        """Open one. Raises ConnectFailed after `CONNECT_PATIENCE`, or the server's refusal."""
        until = time.monotonic() + CONNECT_PATIENCE
        while True:
            try:
                self._opened.append(self._open_one())
                return
            except (ConnectFailed, ServerError) as error:
                if time.monotonic() > until or not is_passing(error):
                    raise
            sleep(_CONNECT_PAUSE)

    def next_to_ask(self) -> JournalConnection | None:
        """One that is idle, or new, while fewer than `_AHEAD` windows are on their way and there are rows left."""
        if self.is_last or len(self.working()) >= _AHEAD:
            return None
        for connection in self._opened:
            if connection.is_idle:
                return connection
        return self._open_another()

    def _open_another(self) -> JournalConnection | None:
        """One is enough, and a server that has refused one is not asked again."""
        if len(self._opened) >= self._most:
            return None
        try:
            self._opened.append(self._open_one())
        except (ConnectFailed, ServerError):
            self._most = len(self._opened)
            return None
        return self._opened[-1]

    def grant(self, connection: JournalConnection) -> None:
        """Let an idle connection ask for as many messages as it may hold."""
        rows = min(connection.subscription.info.max_rdy_count, MAX_WINDOW, self._left)
        self._left -= rows
        self._opened.remove(connection)
        self._opened.append(connection)
        connection.grant(rows)

    def limit(self, connection: JournalConnection) -> None:
        """Let it get no more than it was granted, whatever its FINs make room for; nothing when it is over."""
        if self.is_over:
            connection.give_up()
        connection.grant(0)

    def patience(self, output_buffer_timeout: int, *, has_some: bool) -> float:
        """Seconds to wait for messages.

        Args:
            output_buffer_timeout: for how many ms the server may hold them; -1: until its buffer is full, or RDY is
                reached, which is as many as were asked for.
            has_some: whether some have come.
        """
        if self.is_over:
            return _LAST_WAIT
        return max(output_buffer_timeout, 0) / 1000 + (_IDLE_WAIT if has_some else _FIRST_WAIT)


def is_passing(error: BaseException) -> bool:
    """Whether the server is merely not there now, or leads no more, as opposed to settings that are wrong."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ServerError):
            return cause.retriable
        if isinstance(cause, (ProtocolError, ValueError, SSLError)):
            return False
        cause = cause.__cause__
    return True


# What an attempt has claimed so far, which of it the server may deliver again, and what comes again of this or others.


Claim = Callable[[int, Head, Any], Stored]
"""Writes a segment: its number, its head, its columns."""


class ClaimedSegments:
    """The segments of one attempt at a slot.

    Args:
        head: what the heads of all segments have in common.
        suspects: where messages that may come again are written down; None: they pass.

    Attributes:
        segments: those that were claimed, by number.
    """

    def __init__(self, segment_log: SegmentLog, head: Head, claim: Claim, suspects: Suspects | None) -> None:
        self.segments: list[Stored] = []
        self._segment_log = segment_log
        self._head = head
        self._claim = claim
        self._suspects = suspects
        self._known = suspects.load() if suspects is not None else set()
        self._unsure: dict[int, int] = {}  # how many connections may have to send FINs of a segment again

    def keep(self, columns: Any, connections: int) -> int:
        """Write what several connections have gathered as one segment, and return its number."""
        number = len(self.segments)
        head = self._head.of(columns.count, tuple(self._open()))
        self.segments.append(self._claim(number, head, columns))
        self._unsure[number] = connections
        return number

    def sure(self, numbers: Iterable[int]) -> None:
        """Of these segments the server has taken every FIN of one connection."""
        for number in numbers:
            self._unsure[number] -= 1
            if not self._unsure[number]:
                del self._unsure[number]

    def drop_known(self, parts: list[Columns]) -> tuple[StoredColumns, frozenset[bytes]]:
        """The messages that are new, as columns to be written, and the keys of those that the journal holds already.

        Costs nothing while there are no suspects.
        """
        columns = unjoined(parts)
        if self._suspects is None:
            return columns, frozenset()
        known = self._known
        if _has_redelivered(columns):
            self._known = self._suspects.load()  # there may be more by now
            known = self._known.union(message_keys(self._unfinished()))
        if not known:
            return columns, frozenset()
        keys = keys_of(columns)
        met = known.intersection(keys)
        if not met:
            return columns, frozenset()
        return take(join_columns(parts), [row for row, key in enumerate(keys) if key not in met]), frozenset(met)

    def _unfinished(self) -> list[Stored]:
        """Segments claimed in this batch that may be delivered again.

        They are those of this slot, and of slots whose attempt may have died.
        """
        ours = [self.segments[number] for number in self._open()]
        with contextlib.suppress(FileNotFoundError):  # too late for this attempt, as its next claim will tell
            return ours + uncertain_elsewhere(self._segment_log.storage, self._segment_log.slot)
        return ours

    def suspect(self, segments: Iterable[Stored]) -> None:
        """The messages of these may come again."""
        if self._suspects is not None:
            self._suspects.add(message_keys(segments))

    def suspect_late(self, ids: set[bytes]) -> None:
        """The FINs of messages with these ids came too late."""
        if ids and self._suspects is not None:
            self._suspects.add(key for key in message_keys(self.segments) if key[:MESSAGE_ID_SIZE] in ids)

    def _open(self) -> list[int]:
        """The segments whose FINs the server may not have taken."""
        return sorted(self._unsure)


def message_keys(segments: Iterable[Stored]) -> Iterable[bytes]:
    return (key for segment in segments for key in segment.message_keys())


_WIDTHS = {
    "timestamps": 8, "attempts": 2, "ids": MESSAGE_ID_SIZE, "internal_ids": 8, "trace_ids": 8, "offsets": 8, "sizes": 4,
    "ext_versions": 1,
}  # fmt: skip
_FIRST_ATTEMPT = array("H", [1]).tobytes()


def _has_redelivered(columns: Any) -> bool:
    return bool(bytes(columns.attempts) != _FIRST_ATTEMPT * columns.count)


def take(columns: Any, rows: list[int]) -> StoredColumns:
    found: dict[str, Any] = {}
    for name, width in _WIDTHS.items():
        column = getattr(columns, name)
        found[name] = None if column is None else _fixed(bytes(column), width, rows)
    found["body_offsets"], found["body"] = _variable(columns.body_offsets, columns.body, rows)
    if columns.ext is not None:
        found["ext_offsets"], found["ext"] = _variable(columns.ext_offsets, columns.ext, rows)
    return StoredColumns(count=len(rows), **found)


def _fixed(column: bytes, width: int, rows: list[int]) -> bytes:
    return b"".join([column[width * row : width * row + width] for row in rows])


def _variable(offsets: Any, data: Any, rows: list[int]) -> tuple[bytes, bytes]:
    starts, view = array("i", bytes(offsets)), memoryview(data)
    pieces = [view[starts[row] : starts[row + 1]] for row in rows]
    ends = array("i", [0])
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    return ends.tobytes(), b"".join(pieces)


# Reads the messages of a channel and requeues them.
#
# A connection may hold only so many, so they are taken window by window and
# requeued at once. nsqd puts them at the end of its queue, so the windows go
# through the queue once; an id that comes a second time is left out.


_WAIT = 1.0
_ROUNDS = 4


class Peek:
    """A slot of a batch read that consumes nothing."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self._seen: set[bytes] = set()
        self._is_over = False
        self._step = 1

    def batches(self, options: SourceOptions) -> Iterator[pa.RecordBatch]:
        for columns in self._windows():
            yield rows_of(columns, self.slot.head(), options, self.slot.topic)

    def _windows(self) -> Iterator[Any]:
        slot = self.slot
        if slot.address is None or not slot.rows:
            return
        with _subscription(slot) as subscription:
            taken = 0
            while not self._is_over and len(self._seen) < slot.rows and taken <= _ROUNDS * slot.rows:
                columns = self._take(subscription)
                taken += columns.count
                yield self._new(columns)
            if not self._is_over and len(self._seen) < slot.rows:
                logger.warning(
                    "slot %s: saw %s of %s",
                    slot.name,
                    len(self._seen),
                    counted(slot.rows, "message"),
                    extra=SPARK_READ_PARTIAL,
                )

    def _take(self, subscription: ColumnSubscription) -> Columns:
        """A window, requeued at once: Spark's work on its rows has no time limit.

        Of large messages it is as much as a segment holds, and the rest, which is on its way, comes with the next one.
        """
        left = min(self.slot.rows, subscription.info.max_rdy_count, MAX_WINDOW)
        subscription.set_rdy(left)
        parts: list[Columns] = []
        size = 0
        while left > 0 and size < MAX_SEGMENT_BYTES and not self._is_over:
            wanted = min(left, self._step)
            columns = subscription.fetch(_WAIT, wanted)
            self._is_over = columns.count < wanted
            self._step = step_of(columns)
            left -= columns.count
            size += len(columns.body)
            parts.append(columns)
        subscription.set_rdy(0)
        whole = join_columns(parts)
        if whole.count:
            subscription.requeue(whole.ids)
        return whole

    def _new(self, columns: Columns) -> Any:
        size = MESSAGE_ID_SIZE
        ids = [columns.ids[at : at + size] for at in range(0, size * columns.count, size)]
        unknown = set(ids)
        if len(unknown) == len(ids) <= self.slot.rows - len(self._seen) and self._seen.isdisjoint(unknown):
            self._seen |= unknown
            return columns
        rows = []
        for row, id in enumerate(ids):
            if id not in self._seen and len(self._seen) < self.slot.rows:
                self._seen.add(id)
                rows.append(row)
        return take(columns, rows)
