"""One task: take a slot's messages from the server into the journal, segment by segment, and seal the slot.

For each segment: receive what RDY allows, claim its number with it, so that it
is stored for good, then send the FINs. A thread does the writing. When more than
one segment is to come, two connections take turns: one receives while the
messages of the other are written. Where the disk is much slower than the
server, there are more.

No FIN is sent before the segment is claimed. However the work ends, messages
that were claimed are finished, and the others are requeued if the connection
still exists; if not, the server delivers them again after its timeout.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

from nsq_fast._codec import MESSAGE_ID_SIZE
from nsq_fast._frame import Columns, join_columns
from nsq_fast.errors import ConnectFailed, ConnectionLost, NsqError, ServerError
from nsq_fast.log_events import SPARK_CONNECTION_LOST, SPARK_MESSAGES_LATE, SPARK_SLOT_EMPTY
from nsq_fast.runtime import ColumnSubscription

from .chain import Chain, seal, uncertain
from .claims import Claims
from .connection import JournalConnection, Work
from .connections import Connections, is_passing
from .disk_wait import DiskWait
from .location import open_storage
from .quota import Quota
from .screen import Screen
from .segment import Head, Stored
from .slot import Slot
from .storage import Storage
from .suspects import Suspects
from .writer import Writer

logger = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 32 * 1024 * 1024
_STEP = 512
_FIRST_CONNECTIONS = 2
_CLOSE_TIMEOUT = 10.0


class Collector:
    """The work on one slot. Used once.

    Args:
        storage: the place of the batch, when it is not the one that the slot names.

    ``open_connection``, ``claim``, ``finish`` and ``seal`` are its steps, each of which may be derived.

    Attributes:
        connections: most connections. There are two, and more while the task has waited for the disk most of its time:
            an nsqd that serves four spends a quarter more CPU on a message than one that serves two.
        group: most windows that one segment holds, should the disk be slow.
    """

    connections = 4
    group = 4

    def __init__(self, slot: Slot, storage: Storage | None = None) -> None:
        self.slot = slot
        self.chain = Chain(storage or open_storage(slot.path, slot.object_store), slot.number)
        self.suspects = Suspects(open_storage(slot.suspects, slot.object_store)) if slot.suspects is not None else None
        self._screen = Screen(self.suspects)
        self._quota = Quota(slot.rows)
        self._claims = Claims(self.chain, slot.head(), self.claim, self.suspects)
        self._disk_wait = DiskWait()
        self._seen: set[bytes] = set()
        self._connections = Connections(self.open_connection, self._quota, self.connections)

    def run(self) -> list[Stored]:
        """The segments of the slot: those of an earlier attempt, or new ones. The slot is sealed when this returns.

        Raises JournalTaken or JournalClosed when another attempt was faster; this one must fail then.
        """
        found = self.chain.settle(lambda segments: self._claims.suspect(uncertain(segments)))
        if found is None:
            self._collect()
            found = self._claims.segments
        return found

    # The steps

    def open_connection(self) -> JournalConnection:
        """A connection, subscribed. Raises ConnectFailed, or the server's refusal."""
        assert self.slot.address is not None
        subscription = ColumnSubscription(
            self.slot.address,
            self.slot.topic,
            self.slot.channel,
            self.slot.connection,
            partition=self.slot.partition,
            advanced=self.slot.is_redesigned,
        )
        subscription.open()
        return JournalConnection(subscription)

    def claim(self, index: int, head: Head, columns: Any) -> Stored:
        """Write a segment. Called in a thread, one at a time."""
        return self.chain.claim(index, head, columns)

    def finish(self, connection: JournalConnection, ids: bytes) -> None:
        """FIN what a claimed segment holds."""
        connection.subscription.finish(ids)

    def seal(self, index: int, head: Head) -> None:
        """End the slot. Every FIN has been judged before."""
        self.chain.claim(index, head)

    # The work

    def _collect(self) -> None:
        with Writer(self._claims.keep, self.group, MAX_SEGMENT_BYTES) as writer:
            try:
                self._fill(writer)
            except BaseException:
                self._leave_in_order()
                raise
        segments = self._claims.segments
        self.seal(len(segments), seal(segments, self.slot.run, self._seen))

    def _fill(self, writer: Writer) -> None:
        if self.slot.rows and self._connect():
            while working := self._connections.working():
                for connection in working:
                    self._turn(connection, writer)
                if self._disk_wait.is_long:
                    self._connections.open_more(len(self._connections) + 1)
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
        self._connections.open_more(_FIRST_CONNECTIONS)
        return True

    def _stay_empty(self, reason: object) -> None:
        logger.warning("slot %s stays empty: %s", self.slot.name, reason, extra=SPARK_SLOT_EMPTY)

    def _turn(self, connection: JournalConnection, writer: Writer) -> None:
        try:
            self._settle(connection)
            columns = self._gather(connection)
        except (ConnectionLost, ServerError) as error:
            self._lose(connection, error)
            return
        if columns.count:
            self._write(connection, columns, writer)

    def _gather(self, connection: JournalConnection) -> Columns:
        """What was granted, or as much of it as comes."""
        parts: list[Columns] = []
        size = 0
        until = connection.deadline
        while connection.outstanding and size < MAX_SEGMENT_BYTES:
            columns = connection.subscription.fetch(
                self._quota.patience(
                    self.slot.connection.output_buffer_timeout, has_some=bool(parts or self._claims.segments)
                ),
                min(connection.outstanding, _STEP),
            )
            connection.took(columns)
            if not columns.count or time.monotonic() > until:
                self._quota.is_over = True
                connection.give_up()
            parts.append(columns)
            size += len(columns.body)
            for other in self._connections:
                if other is not connection and other.work and _is_done(other.work):
                    self._settle_other(other)
        return join_columns(parts)

    def _settle_other(self, connection: JournalConnection) -> None:
        try:
            self._settle(connection)
        except (ConnectionLost, ServerError) as error:
            self._lose(connection, error)

    def _settle(self, connection: JournalConnection) -> None:
        """The writing is done: finish its messages, after asking for more, which their FINs make room for."""
        work = connection.work
        if work is None:
            return
        number = None if work.result is None else self._disk_wait.result(work.result)
        connection.work = None
        if number is not None:
            connection.claimed(work, number)
        elif work.result is not None:
            self._refuse(connection, work)
            return
        self._quota.grant(connection)
        self.finish(connection, work.ids)
        connection.dropped.update(work.dropped)

    def _refuse(self, connection: JournalConnection, work: Work) -> None:
        """It is too late to keep these messages: the server gives them to another consumer, or has done so."""
        logger.warning(
            "slot %s: %s messages came too late to be kept",
            self.slot.name,
            len(work.ids) // MESSAGE_ID_SIZE,
            extra=SPARK_MESSAGES_LATE,
        )
        self._quota.is_over = True
        self._quota.grant(connection)
        connection.subscription.requeue(work.ids)

    def _write(self, connection: JournalConnection, columns: Columns, writer: Writer) -> None:
        self._claims.sure(connection.sure())
        kept, dropped = self._screen.drop_known(columns, self._claims.unfinished)
        result = writer.write(kept, connection.deadline) if kept.count else None
        connection.begin(columns.ids, dropped, result)

    # The end

    def _lose(self, connection: JournalConnection, error: NsqError) -> None:
        """The connection is lost: keep what it has claimed, let the server deliver the rest again, and seal the slot.

        Raises errors that a retry would meet again.
        """
        if not is_passing(error):
            raise error
        logger.warning("slot %s: connection lost: %s", self.slot.name, error, extra=SPARK_CONNECTION_LOST)
        work, connection.work = connection.work, None
        connection.give_up()
        connection.subscription.abort()
        if work is not None and work.result is not None and (number := work.result.result()) is not None:
            connection.claimed(work, number)
        self._claims.suspect(self._claims.segments[each.number] for each in connection.unsure)

    def _close(self, connection: JournalConnection) -> None:
        if not connection.subscription.is_open:
            return
        try:
            connection.subscription.close(_CLOSE_TIMEOUT)
        except (ConnectionLost, ServerError) as error:
            self._lose(connection, error)
            return
        late = set(connection.subscription.unfinished)
        self._seen.update(key for key in connection.dropped if key[:MESSAGE_ID_SIZE] not in late)
        self._claims.suspect_late(late)

    def _leave_in_order(self) -> None:
        """After a failure: finish what is claimed, requeue what is not."""
        for connection in self._connections:
            with contextlib.suppress(Exception):
                self._finish_claimed(connection)
            with contextlib.suppress(Exception):
                connection.subscription.close(timeout=1.0)

    def _finish_claimed(self, connection: JournalConnection) -> None:
        work = connection.work
        if work is not None and work.result is not None and work.result.result() is not None:
            connection.subscription.set_rdy(0)
            self.finish(connection, work.ids)


def _is_done(work: Work) -> bool:
    return work.result is None or work.result.done()
