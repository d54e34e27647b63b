"""One channel of one nsqd, read as columns and finished in bulk: for batch programs, not for handlers.

No message becomes an object: bytes are decoded into Arrow's layout, and the
FINs of thousands of ids are one buffer. One greenlet does everything, in the
order in which it is called, so nothing happens between two calls: heartbeats
are answered inside ``fetch``, and nsqd hangs up on whom it has not heard from
for two intervals.

``close`` is a barrier: the server carries commands out in order, so when it
has confirmed the CLS every FIN before it has been judged, and ``unfinished``
holds those that came too late.
"""

from __future__ import annotations

import logging
from collections import deque
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar

from gevent import Timeout
from gevent.socket import gethostname

from nsq_fast._codec import Message, fin_columns, req_columns
from nsq_fast._frame import ColumnReader, Columns, join_columns
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    ConnectionClosed,
    ConnectionLost,
    FinFailed,
    HeartbeatMissed,
    LocalProtocolError,
    NsqError,
    RemoteProtocolError,
    ServerError,
)
from nsq_fast.names import Address
from nsq_fast.protocol.dialect import Dialect
from nsq_fast.protocol.events import AnswerFailed, CommandFailed, Heartbeat, MessageSkipped, Reply, ServerFailed
from nsq_fast.protocol.identify import ServerInfo
from nsq_fast.protocol.session import Session

from .in_flight_ids import InFlightIds
from .net.handshake import connecting, shake_hands
from .net.transport import Transport
from .owner_thread import OwnerThread

logger = logging.getLogger(__name__)

SubscriptionT = TypeVar("SubscriptionT", bound="ColumnSubscription")

CLOSE_TIMEOUT = 5.0
SILENT_INTERVALS = 2
# A peer that takes nothing may be waiting for us to take something: so often what it sent is looked for.
WRITE_TURN = 0.02
# Between reading RDY and obeying it nsqd may still push a message, which comes behind CLOSE_WAIT then.
STRAGGLER_WAIT = 0.005
LAST_WORDS_WAIT = 0.1
# A message above max_frame_size is given back for so long: whoever reads it next may have a higher limit.
SKIPPED_DELAY_MS = 90_000
NO_WAIT = 0.001


class ColumnSubscription:
    """A subscription to one channel at one nsqd, opened by ``open()`` and used once.

    Args:
        partition: of a redesigned server; None leaves the choice to it.
        ordered: redesigned: one message at a time, in order, with offset and size.
        advanced: redesigned: messages carry offset and size.

    Attributes:
        address: the nsqd.
        local_address: our end; None before ``open``.
        session: the protocol state.
        unfinished: ids whose FIN the server refused, as far as it has said so; all of them after ``close``.
        last_received_at: ``time.monotonic()`` of the last bytes.
    """

    def __init__(
        self,
        address: Address,
        topic: str,
        channel: str,
        config: ConnectionConfig,
        *,
        partition: int | None = None,
        ordered: bool = False,
        advanced: bool = False,
    ) -> None:
        self.address = address
        self.topic = topic
        self.channel = channel
        self.config = config if config.hostname is not None else config.replace(hostname=gethostname())
        self.partition = partition
        self.local_address: Address | None = None
        self.session = Session(self.config)
        self.unfinished: list[bytes] = []
        self.last_received_at = 0.0
        self._options: dict[str, Any] = {"partition": partition, "ordered": ordered, "advanced": advanced}
        self._transport: Transport | None = None
        self._thread = OwnerThread()
        self._reader: ColumnReader
        self._held = InFlightIds()
        self._early: list[Columns] = []
        self._has_close_wait = False
        self._unsent: deque[memoryview] = deque()
        self._is_sending = False

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<ColumnSubscription {self.topic}/{self.channel} at {self.address} {state}>"

    @property
    def is_open(self) -> bool:
        """Whether it may be read and answered."""
        return self._transport is not None

    @property
    def info(self) -> ServerInfo:
        """What the server said about itself."""
        return self.session.info

    @property
    def dialect(self) -> Dialect:
        """The server's family."""
        return self.session.dialect

    @property
    def rdy(self) -> int:
        """The RDY last sent."""
        return self.session.rdy

    @property
    def in_flight(self) -> int:
        """Messages received, those not yet fetched included, and not yet finished or requeued."""
        return self._held.count

    # Opening

    def open(self) -> None:
        """Connect, negotiate, subscribe. Blocks for ``connect_timeout`` at most.

        Raises ConnectFailed with the reason as its cause, the ServerError of a refused SUB, ConfigError for unusable
        ``tls_options``, or LocalProtocolError for what the server's dialect does not have.
        """
        self._thread.check("ColumnSubscription.open()")
        if self.local_address is not None:
            raise LocalProtocolError(f"{self.address}: open() was called already")
        self._thread.claim()
        refusal: NsqError | None = None
        try:
            with connecting(self.address, self.config.connect_timeout):
                self._transport = transport = Transport.connect(self.address, self.config)
                self.local_address = transport.local_address
                shake_hands(transport, self.session)
                refusal = self._subscribe(transport)
            if refusal is not None:
                raise refusal
        except BaseException:
            self.abort()
            raise
        self._reader = self.session.column_reader()
        self.last_received_at = monotonic()

    def _subscribe(self, transport: Transport) -> NsqError | None:
        try:
            transport.send_all(self.session.sub(self.topic, self.channel, **self._options))
        except LocalProtocolError as error:
            return error
        while self.session.pending_count:
            data = transport.recv()
            for event in self.session.receive(data):
                if isinstance(event, Message):
                    raise RemoteProtocolError("a message before RDY")
                if event.send:
                    transport.send_all(event.send)
                if isinstance(event, (CommandFailed, ServerFailed)):
                    return event.error
            if not data:
                raise ConnectionLost("closed by the server before its reply to SUB")
        return None

    # Reading

    def set_rdy(self, count: int) -> None:
        """RDY: how many messages may be in flight. Raises LocalProtocolError above the server's ``max_rdy_count``."""
        self._thread.check("ColumnSubscription.set_rdy()")
        if count != self.session.rdy:
            self._send(self.session.set_rdy(count))

    def fetch(self, timeout: float, at_least: int = 1) -> Columns:
        """The next messages: ``at_least`` so many, and all that came with the last of them; what there is, or
        nothing, after ``timeout`` seconds.

        Raises ConnectionLost, RemoteProtocolError, or the ServerError that ended the conversation. The connection is
        closed then.
        """
        self._thread.check("ColumnSubscription.fetch()")
        parts, self._early = self._early, []
        count = sum(part.count for part in parts)
        deadline = monotonic() + timeout
        wait = max(timeout, NO_WAIT)
        # What comes need not be messages: one that is too large may come again and again, without a pause.
        while count < at_least and wait > 0:
            data = self._read(wait)
            if data is None:
                break
            wait = deadline - monotonic()
            columns = self._take(data)
            if columns.count:
                parts.append(columns)
                count += columns.count
        return join_columns(parts)

    def _read(self, timeout: float) -> bytes | None:
        """What the server sent, ``b""`` at its end; None when that is nothing for so long."""
        transport = self._opened()
        limit = Timeout(timeout)
        limit.start()
        try:
            return transport.recv()
        except Timeout as expired:
            if expired is not limit:
                raise
        except (NsqError, OSError) as error:
            raise self._lost(error) from error
        finally:
            limit.close()
        if monotonic() - self.last_received_at > SILENT_INTERVALS * self.config.heartbeat_interval:
            self.abort()
            raise HeartbeatMissed(f"{self.address}: nothing received for two heartbeat intervals")
        return None

    def _take(self, data: bytes) -> Columns:
        if not data:
            raise self._lost("closed by the server")
        self.last_received_at = monotonic()
        try:
            columns = self._reader.feed(data)
            events = self.session.interpret(columns.frames) if columns.frames else ()
        except NsqError:
            self.abort()
            raise
        if columns.count:
            self._held.add(columns.ids)
            self.session.check_in_flight(self._held.count, self.last_received_at)
        for event in events:
            self._handle_event(event)
        if self.session.failure is not None:
            self.abort()
            raise self.session.failure
        return columns

    def _handle_event(self, event: Any) -> None:
        if isinstance(event, Heartbeat):
            self._send(event.send)
        elif isinstance(event, Reply):
            self._has_close_wait = True
        elif isinstance(event, AnswerFailed):
            self._answer_failed(event)
        elif isinstance(event, MessageSkipped):
            self._message_skipped(event)
        elif isinstance(event, (CommandFailed, ServerFailed)):
            if event.fatal:
                self.abort()
                raise event.error
            logger.warning("%s: %s", self.address, event.error)

    def _message_skipped(self, event: MessageSkipped) -> None:
        """Give a message above ``max_frame_size`` back, so that the rest goes on."""
        if self._options["ordered"]:  # the server ignores the delay, and sends nothing else before it
            self.abort()
            raise event.error
        logger.error("%s: %s; requeued for %s s", self.address, event.error, SKIPPED_DELAY_MS // 1000)
        self._send(self.session.req(event.message, SKIPPED_DELAY_MS))

    def _answer_failed(self, event: AnswerFailed) -> None:
        if not isinstance(event.error, FinFailed):
            logger.info("%s: %s", self.address, event.error)
        elif event.message_id is not None:
            self.unfinished.append(event.message_id)
        else:  # which one cannot be told, so none is known to be finished
            self.abort()
            raise event.error

    # Answering

    def finish(self, ids: bytes | memoryview) -> None:
        """FIN of each of these ids (16 bytes each, side by side, as in ``Columns.ids``) in one write.

        Returns when the system has taken the bytes; ``close`` tells whether the server has.
        """
        self._thread.check("ColumnSubscription.finish()")
        self._held.remove(ids)
        self._send(fin_columns(ids))

    def requeue(self, ids: bytes | memoryview, delay_ms: int = 0) -> None:
        """REQ of each of these ids: to be delivered again after ``delay_ms``."""
        self._thread.check("ColumnSubscription.requeue()")
        self._held.remove(ids)
        self._send(req_columns(ids, delay_ms))

    def _send(self, data: bytes) -> None:
        """Send, or leave it to the call that is sending already: it reads meanwhile, and may find a heartbeat."""
        transport = self._opened()
        self._unsent.append(memoryview(transport.encode(data)))
        if self._is_sending:
            return
        self._is_sending = True
        try:
            self._send_all(transport)
        finally:
            self._is_sending = False

    def _send_all(self, transport: Transport) -> None:
        last_at = monotonic()
        while self._unsent:
            try:
                sent = transport.try_send(self._unsent[0])
            except OSError as error:
                raise self._send_failed(error) from error
            if sent:
                rest = self._unsent.popleft()[sent:]
                if rest:
                    self._unsent.appendleft(rest)
                last_at = monotonic()
            elif monotonic() - last_at > self.config.write_timeout:
                raise self._lost(f"the peer took no byte for {self.config.write_timeout} s")
            else:
                self._wait_writable(transport)

    def _wait_writable(self, transport: Transport) -> None:
        try:
            transport.wait_writable(WRITE_TURN)
        except TimeoutError:
            self._take_early()

    def _take_early(self) -> None:
        while (data := self._read(NO_WAIT)) is not None:
            columns = self._take(data)
            if columns.count:
                self._early.append(columns)

    def _send_failed(self, error: OSError) -> NsqError:
        """Why: a server that closes after a fatal error has sent the reason before."""
        try:
            while self.is_open:
                self._take(self._read(LAST_WORDS_WAIT) or b"")
        except ServerError as reason:
            return reason
        except NsqError:
            pass
        return self._lost(error)

    # Ending

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Finish the conversation: what was not answered is given back at once, every FIN has been judged.

        RDY 0 and CLS, read up to CLOSE_WAIT, REQ what is held, end the stream, read up to the server's end. Without
        effect when it is closed. Raises ConnectionLost or a ServerError when it could not be done, within ``timeout``
        seconds: ``unfinished`` may lack some then.
        """
        self._thread.check("ColumnSubscription.close()")
        if not self.is_open:
            return
        late = ConnectionLost(f"{self.address}: no CLOSE_WAIT within {timeout} s")
        try:
            with Timeout(timeout, late):
                self._leave()
                self._end_stream()
        finally:
            self.abort()

    def _leave(self) -> None:
        may_get_more = self.in_flight < self.rdy
        self._send(self.session.set_rdy(0) + self.session.cls())
        while not self._has_close_wait:
            self._take_until(CLOSE_TIMEOUT)
        if may_get_more:
            self._take_until(STRAGGLER_WAIT)
        while self._reader.buffered:  # of a message that the server has sent: the rest of it is on the way
            self._take_until(CLOSE_TIMEOUT)
        held = self._held.take()
        if held:
            self._send(req_columns(held, 0))

    def _take_until(self, timeout: float) -> None:
        data = self._read(timeout)
        if data is not None:
            self._take(data)

    def _end_stream(self) -> None:
        # Closing with unread input makes the kernel reset the connection, and the server may lose our last REQ.
        transport = self._opened()
        try:
            transport.end_writing()
            while transport.recv():
                pass
        except OSError as error:
            logger.info("%s: while closing: %s", self.address, error)

    def abort(self) -> None:
        """Close the socket. What is in flight stays so until the server's timeout. Idempotent."""
        self._thread.check("ColumnSubscription.abort()")
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def __enter__(self: SubscriptionT) -> SubscriptionT:
        self._thread.check("ColumnSubscription.open()")
        if not self.is_open:
            self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:  # what the failed block held is for the next who tries
            self.close(timeout=1.0)
        except (NsqError, OSError) as error:
            logger.info("%s: closed after an error: %s", self.address, error)

    def _opened(self) -> Transport:
        if self._transport is None:
            raise ConnectionClosed(f"{self.address}: the subscription is not open")
        return self._transport

    def _lost(self, reason: object) -> ConnectionLost:
        self.abort()
        return reason if isinstance(reason, ConnectionLost) else ConnectionLost(f"{self.address}: {reason}")
