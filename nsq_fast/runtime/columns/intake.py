"""What the server sends to a column subscription: messages as columns, and events, which are dealt with here."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any

from nsq_fast._frame import ColumnReader, Columns
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import FinFailed, NsqError, ServerError
from nsq_fast.log_events import MESSAGE_UNREADABLE, RESPONSE_FAILED, SERVER_ERROR
from nsq_fast.names import Address
from nsq_fast.protocol.events import AnswerFailed, CommandFailed, Heartbeat, MessageSkipped, Reply, ServerFailed
from nsq_fast.protocol.session import Session
from nsq_fast.runtime.in_flight_ids import InFlightIds

from .stream import NO_WAIT, ColumnStream

logger = logging.getLogger(__name__)

LAST_WORDS_WAIT = 0.1
# A message above max_frame_size is given back for so long: whoever reads it next may have a higher limit.
SKIPPED_DELAY_MS = 90_000


class ColumnIntake:
    """Decodes, answers heartbeats, and keeps account of what is in flight. The first error closes ``stream``.

    Attributes:
        stream: the bytes.
        held: the ids in flight, those of ``early`` among them.
        early: columns that came while something was sent, not fetched yet.
        unfinished: ids whose FIN the server refused, as far as it has said so.
        has_close_wait: the server has confirmed CLS: what was sent before is judged.
    """

    def __init__(self, address: Address, session: Session, config: ConnectionConfig, *, ordered: bool) -> None:
        self.stream = ColumnStream(address, config, self._take_early, self._last_words)
        self.held = InFlightIds()
        self.early: list[Columns] = []
        self.unfinished: list[bytes] = []
        self.has_close_wait = False
        self._address = address
        self._session = session
        self._is_ordered = ordered
        self._reader: ColumnReader
        self._frame_size = 0.0  # of the last messages, on average

    def begin(self) -> None:
        """Go on where the session has stopped: after the reply to SUB."""
        self._reader = self._session.column_reader()
        self.stream.last_received_at = monotonic()

    @property
    def is_amid_frame(self) -> bool:
        """Whether the rest of a frame is on the way."""
        return self._reader.buffered > 0

    def take(self, timeout: float, wanted: int = 1) -> Columns | None:
        """The messages in the next read, possibly none; None when nothing comes for so long.

        Args:
            wanted: how many are waited for. It saves reads, and the next one may still bring fewer, or more.

        Raises ConnectionLost, RemoteProtocolError, or the ServerError that ended the conversation.
        """
        data = self.stream.read(timeout, self._size_of(wanted) if wanted > 1 else 1)
        if data is None:
            return None
        reader = self._reader
        size = len(data) + reader.buffered
        try:
            columns = reader.feed(data)
            events = self._session.interpret(columns.frames) if columns.frames else ()
        except NsqError:
            self.stream.close()
            raise
        if columns.count:
            self._frame_size = (size - reader.buffered) / columns.count
            self.held.add(columns.ids)
            self._session.check_in_flight(self.held.count, self.stream.last_received_at)
        for event in events:
            self._handle_event(event)
        if self._session.failure is not None:
            self.stream.close()
            raise self._session.failure
        return columns

    def _size_of(self, count: int) -> int:
        """The bytes to wait for when so many messages are wanted: fewer rather than more, and no more than may come."""
        may_come = min(count, self._session.rdy - self.held.count)
        return max(1, int(self._frame_size * (may_come - 1)))

    def _take_early(self) -> None:
        while (columns := self.take(NO_WAIT)) is not None:
            if columns.count:
                self.early.append(columns)

    def _last_words(self) -> NsqError | None:
        """The fatal error that the server has sent, if it has sent one."""
        try:
            while self.take(LAST_WORDS_WAIT) is not None:
                pass
        except ServerError as reason:
            return reason
        except NsqError:
            pass
        return None

    def _handle_event(self, event: Any) -> None:
        if isinstance(event, Heartbeat):
            self.stream.send(event.send)
        elif isinstance(event, Reply):  # to CLS: no other command with a reply is sent here
            self.has_close_wait = True
        elif isinstance(event, AnswerFailed):
            self._answer_failed(event)
        elif isinstance(event, MessageSkipped):
            self._message_skipped(event)
        elif isinstance(event, (CommandFailed, ServerFailed)):
            if event.fatal:
                self.stream.close()
                raise event.error
            logger.warning("%s: %s", self._address, event.error, extra=SERVER_ERROR)

    def _message_skipped(self, event: MessageSkipped) -> None:
        """Give a message above ``max_frame_size`` back, so that the rest goes on."""
        if self._is_ordered:  # the server ignores the delay, and sends nothing else before it
            self.stream.close()
            raise event.error
        logger.error(
            "%s: %s; requeued for %s s", self._address, event.error, SKIPPED_DELAY_MS // 1000, extra=MESSAGE_UNREADABLE
        )
        self.stream.send(self._session.req(event.message, SKIPPED_DELAY_MS))

    def _answer_failed(self, event: AnswerFailed) -> None:
        if not isinstance(event.error, FinFailed):
            logger.info("%s: %s", self._address, event.error, extra=RESPONSE_FAILED)
        elif event.message_id is not None:
            self.unfinished.append(event.message_id)
        else:  # which one cannot be told, so none is known to be finished
            self.stream.close()
            raise event.error
