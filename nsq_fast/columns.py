"""Messages as columns in Arrow's layout, for batch programs, not for handlers: one channel of one nsqd, read as columns
and finished in bulk, and columns published by the hundred thousand.

``ColumnSubscription``: no message becomes an object, and the FINs of thousands of ids are one buffer. One greenlet does
everything, in the order in which it is called, so nothing happens between two calls: heartbeats are answered inside
``fetch``, and nsqd hangs up on whom it has not heard from for two intervals. ``close`` is a barrier: the server carries
commands out in order, so when it has confirmed the CLS every FIN before it has been judged, and ``unfinished`` holds
those that came too late.

There is no reader and no writer greenlet: who sends while the peer takes nothing has to read meanwhile, or both wait
for each other.

``ColumnProducer`` is a Producer that also takes columns. What a publish goes through is the producer's own: queues,
order, retries, deadlines, back-pressure.
"""

from __future__ import annotations

import logging
from _socket import SO_RCVLOWAT, SOL_SOCKET
from collections import deque
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from gevent import Timeout
from gevent.event import AsyncResult

from nsq_fast._client import READ_SIZE
from nsq_fast._codec import MESSAGE_ID_SIZE, Message, Records, fin_columns, req_columns
from nsq_fast._frame import ColumnReader, Columns, join_columns
from nsq_fast._lazy import get_logger
from nsq_fast.client.connection import SILENT_INTERVALS, connecting, shake_hands, with_hostname
from nsq_fast.client.gevent_loop import GeventLoop, run
from nsq_fast.client.greenlets import OwnerThread, loop_turns
from nsq_fast.client.publishes import Headers, PublishOptions
from nsq_fast.client.routing import TopicRoute
from nsq_fast.client.transport import Transport
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    BodyInvalid,
    ConfigError,
    ConnectionClosed,
    ConnectionLost,
    FinFailed,
    HeartbeatMissed,
    LocalProtocolError,
    NoNsqd,
    NsqError,
    RemoteProtocolError,
    ServerError,
)
from nsq_fast.log_events import (
    CLOSE_FAILED,
    DISCONNECTED,
    MESSAGE_UNREADABLE,
    RESPONSE_FAILED,
    SERVER_ERROR,
)
from nsq_fast.names import Address
from nsq_fast.protocol.dialect import Dialect
from nsq_fast.protocol.publishing import RowsEncoding
from nsq_fast.protocol.publishing import StoredRows as StoredRows
from nsq_fast.protocol.session import (
    AnswerFailed,
    CommandFailed,
    Heartbeat,
    MessageSkipped,
    Reply,
    ServerFailed,
    ServerInfo,
    Session,
)

from .producer import Producer

if TYPE_CHECKING:
    from typing_extensions import Self

logger: logging.Logger = get_logger(__name__)

LAST_WORDS_WAIT = 0.1
# A message above max_frame_size is given back for so long: whoever reads it next may have a higher limit.
SKIPPED_DELAY_MS = 90_000
# While a peer takes nothing, what it sent is looked for so often (s).
WRITE_TURN = 0.02
# Bytes that are wanted together are waited for so long (s), then what there is will do: a heartbeat may be among it, or
# the server has no more. An nsqd may need 5 ms and more for a window of 2,500 messages; not to wait for the whole of it
# costs a row of a table of Spark (spark-read) a seventh of Python's CPU.
GATHER_WAIT = 0.05
# A read that is hardly to wait; `fetch(0)` reads once.
NO_WAIT = 0.001
# Who waits for more than one read gathers them in the kernel: a third of the CPU for 200 KiB at once, and a tenth less
# than that for 600 KiB, 2,500 messages.
GATHERING_READ_SIZE = 1024 * 1024
# Others have their turn after so many bytes.
YIELD_BYTES = 128 * 1024
CLOSE_TIMEOUT = 5.0
# Between reading RDY and obeying it nsqd may still push a message, which comes behind CLOSE_WAIT then.
# nsqio/nsq: nsqd/protocol_v2.go, messagePump
STRAGGLER_WAIT = 0.005
# Responses set aside before they are compared: each costs the making of an object then.
COMPARE_AT = 50_000
# Lookup is asked again so often (s) while it does not say where a topic lives.
_ASK_AGAIN = 0.25
_ANY_COUNT = 2**31 - 1


class ColumnSubscription:
    """A subscription to one channel at one nsqd, opened by ``open()`` and used once. The first error closes it.

    Args:
        partition: of a redesigned server; None leaves the choice to it.
        ordered: redesigned: one message at a time, in order, with offset and size.
        advanced: redesigned: messages carry offset and size.

    Attributes:
        address: the nsqd.
        local_address: our end; None before ``open``.
        session: the protocol state.
        unfinished: ids whose FIN the server refused, as far as it has said so; all of them after ``close``.
        last_received_at: ``time.monotonic()`` of the last bytes; 0.0 before ``open``.
    """

    _reader: ColumnReader

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
        self.config: ConnectionConfig = with_hostname(config)
        self.partition = partition
        self.local_address: Address | None = None
        self.session: Session = Session(self.config)
        self.unfinished: list[bytes] = []
        self.last_received_at: float = 0.0
        self._options: dict[str, Any] = {"partition": partition, "ordered": ordered, "advanced": advanced}
        self._thread = OwnerThread()
        self._held = InFlightIds()  # those of ``_early`` among them
        self._early: list[Columns] = []  # what came while something was sent, not fetched yet
        self._has_close_wait = False  # the server has confirmed CLS: what was sent before is judged
        self._frame_size = 0.0  # of the last messages, on average
        self._transport: Transport | None = None  # from ``open`` to the end
        self._unsent: deque[memoryview] = deque()
        self._is_sending = False
        self._low_water = 1
        self._until_turn = YIELD_BYTES

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
        try:
            with connecting(self.address, self.config.connect_timeout, self.session) as deadline:
                refusal = run(self._begin(deadline))
            if refusal is not None:
                raise refusal
        except BaseException:
            self.abort()
            raise
        self._reader = self.session.column_reader()
        self.last_received_at = monotonic()

    async def _begin(self, deadline: float) -> NsqError | None:
        """Why the subscription was refused, or None."""
        transport = self._transport = Transport(GeventLoop.here(), self.address, self.config)
        await transport.connect(deadline)
        self.local_address = transport.local_address
        await shake_hands(transport, self.session, deadline)
        return await self._subscribe(transport, deadline)

    async def _subscribe(self, transport: Transport, deadline: float) -> NsqError | None:
        """Subscribe and wait for the reply; return why it was refused, by the server or by the session."""
        session = self.session
        try:
            await transport.send_all(session.sub(self.topic, self.channel, **self._options), deadline)
        except LocalProtocolError as error:
            return error
        while session.pending_count:
            data = await transport.recv(deadline)
            for event in session.receive(data):
                if isinstance(event, Message):
                    raise RemoteProtocolError("a message before RDY")
                if event.send:
                    await transport.send_all(event.send, deadline)
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
            columns = self._take(wait, at_least - count)
            if columns is None:
                break
            wait = deadline - monotonic()
            if columns.count:
                parts.append(columns)
                count += columns.count
        return join_columns(parts)

    def _take(self, timeout: float, wanted: int = 1) -> Columns | None:
        """The messages in the next read, possibly none; None when nothing comes for so long.

        Args:
            wanted: how many are waited for. It saves reads, and the next one may still bring fewer, or more.

        Raises ConnectionLost, RemoteProtocolError, or the ServerError that ended the conversation.
        """
        data = self._read(timeout, self._size_of(wanted) if wanted > 1 else 1)
        if data is None:
            return None
        reader = self._reader
        size = len(data) + reader.buffered
        try:
            columns = reader.feed(data)
            events = self.session.interpret(columns.frames) if columns.frames else ()
        except NsqError:
            self._close()
            raise
        if columns.count:
            self._frame_size = (size - reader.buffered) / columns.count
            self._held.add(columns.ids)
            self.session.check_in_flight(self._held.count, self.last_received_at)
        for event in events:
            self._handle_event(event)
        if self.session.failure is not None:
            self._close()
            raise self.session.failure
        return columns

    def _size_of(self, count: int) -> int:
        """The bytes to wait for when so many messages are wanted: fewer rather than more, and no more than may come."""
        may_come = min(count, self.session.rdy - self._held.count)
        return max(1, int(self._frame_size * (may_come - 1)))

    def _handle_event(self, event: Any) -> None:
        if isinstance(event, Heartbeat):
            self._send(event.send)
        elif isinstance(event, Reply):  # to CLS: no other command with a reply is sent here
            self._has_close_wait = True
        elif isinstance(event, AnswerFailed):
            self._answer_failed(event)
        elif isinstance(event, MessageSkipped):
            self._message_skipped(event)
        elif isinstance(event, (CommandFailed, ServerFailed)):
            if event.fatal:
                self._close()
                raise event.error
            logger.warning("%s: %s", self.address, event.error, extra=SERVER_ERROR)

    def _message_skipped(self, event: MessageSkipped) -> None:
        """Give a message above ``max_frame_size`` back, so that the rest goes on."""
        if self._options["ordered"]:  # the server ignores the delay, and sends nothing else before it
            self._close()
            raise event.error
        logger.error(
            "%s: %s; requeued for %s s", self.address, event.error, SKIPPED_DELAY_MS // 1000, extra=MESSAGE_UNREADABLE
        )
        self._send(self.session.req(event.message, SKIPPED_DELAY_MS))

    def _answer_failed(self, event: AnswerFailed) -> None:
        if not isinstance(event.error, FinFailed):
            logger.info("%s: %s", self.address, event.error, extra=RESPONSE_FAILED)
        elif event.message_id is not None:
            self.unfinished.append(event.message_id)
        else:  # which one cannot be told, so none is known to be finished
            self._close()
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

    # Ending

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Finish the conversation: what was not answered is given back at once, every FIN has been judged.

        Without effect when it is closed. Raises ConnectionLost or a ServerError when it could not be done, within
        ``timeout`` seconds: ``unfinished`` may lack some then.
        """
        self._thread.check("ColumnSubscription.close()")
        if not self.is_open:
            return
        late = ConnectionLost(f"{self.address}: no CLOSE_WAIT within {timeout} s")
        try:
            with Timeout(timeout, late):
                self._leave()
        finally:
            self.abort()

    def _leave(self) -> None:
        """End the conversation. The caller limits the time.

        1. RDY 0 and CLS: no more messages;
        2. read up to CLOSE_WAIT: the server carries commands out in order, so it has judged every FIN before;
        3. read what it had begun to send;
        4. REQ what is held;
        5. end the stream, and read up to the server's end: closing with unread input makes the kernel reset the
           connection, and the server may lose our last command.
        """
        may_get_more = self._held.count < self.session.rdy
        self._send(self.session.set_rdy(0) + self.session.cls())
        while not self._has_close_wait:
            self._take(CLOSE_TIMEOUT)
        if may_get_more:
            self._take(STRAGGLER_WAIT)
        while self._reader.buffered:  # the rest of a frame is on the way
            self._take(CLOSE_TIMEOUT)
        held = self._held.take()
        if held:
            self._send(req_columns(held, 0))
        transport, deadline = self._opened(), monotonic() + CLOSE_TIMEOUT
        try:
            transport.end_writing()
            while run(transport.recv(deadline)):
                pass
        except (NsqError, OSError) as error:  # OpenSSL at the other end calls this end of a TLS stream an error
            logger.info("%s: while closing: %s", self.address, error, extra=CLOSE_FAILED)

    def abort(self) -> None:
        """Close the socket. What is in flight stays so until the server's timeout. Idempotent."""
        self._thread.check("ColumnSubscription.abort()")
        self._close()

    def __enter__(self) -> Self:
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
            logger.info("%s: closed after an error: %s", self.address, error, extra=DISCONNECTED)

    # Bytes

    def _opened(self) -> Transport:
        if self._transport is None:
            raise ConnectionClosed(f"{self.address}: the subscription is not open")
        return self._transport

    def _close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _fail(self, reason: object) -> ConnectionLost:
        """Close, and return the error to raise."""
        self._close()
        return reason if isinstance(reason, ConnectionLost) else ConnectionLost(f"{self.address}: {reason}")

    def _read(self, timeout: float, size: int) -> bytes | None:
        """What the peer sent; None when that is nothing for so long. Raises ConnectionLost, also at the end.

        Args:
            size: bytes that are worth a read; fewer are read when they have not come within ``GATHER_WAIT``.
        """
        transport = self._opened()
        data: bytes | None = None
        if self._until_turn <= 0:
            self._until_turn = YIELD_BYTES
            loop_turns().give_way()
        most = READ_SIZE if size == 1 else GATHERING_READ_SIZE
        if size > 1 and timeout > GATHER_WAIT and not transport.layers:  # compressed, they would be fewer
            data = self._recv(transport, GATHER_WAIT, min(size, most), most)
            timeout -= GATHER_WAIT
        if data is None:
            data = self._recv(transport, timeout, 1, most)
        if data is None:
            if monotonic() - self.last_received_at > SILENT_INTERVALS * self.config.heartbeat_interval:
                self._close()
                raise HeartbeatMissed(f"{self.address}: nothing received for two heartbeat intervals")
            return None
        if not data:
            raise self._fail("closed by the server")
        self.last_received_at = monotonic()
        self._until_turn -= len(data)
        return data

    def _recv(self, transport: Transport, timeout: float, low_water: int, most: int) -> bytes | None:
        """Wait for so many bytes, or the end of the stream, and read what there is; None after ``timeout`` seconds."""
        deadline = monotonic() + timeout
        try:
            if low_water != self._low_water:
                self._low_water = low_water
                with suppress(OSError):  # where the system does not know of it, and the kernel has no room for more
                    transport.sock.setsockopt(SOL_SOCKET, SO_RCVLOWAT, low_water)
            if low_water > 1:
                run(transport.wait_readable(deadline))
            elif timeout > 0:
                return run(transport.recv(deadline, most))
            return transport.recv_now(most)
        except TimeoutError as error:
            if error.errno is not None:  # the system's, of the other end
                raise self._fail(error) from error
            return None
        except (NsqError, OSError) as error:
            raise self._fail(error) from error

    def _send(self, data: bytes) -> None:
        """Send, or leave it to the call that is sending already: it reads meanwhile, and may find a heartbeat."""
        transport = self._opened()
        if not data:  # of no ids, say: a socket would take no byte of it for ever
            return
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
                unsent = transport.send_encoded(self._unsent[0])
            except OSError as error:
                # A server that closes after a fatal error has sent the reason before.
                raise self._last_words() or self._fail(error) from error
            before = self._unsent.popleft()
            if unsent is not None:
                self._unsent.appendleft(unsent)
            if unsent is None or len(unsent) < len(before):
                last_at = monotonic()
            elif monotonic() - last_at > self.config.write_timeout:
                raise self._fail(f"the peer took no byte for {self.config.write_timeout} s")
            else:
                self._wait_writable(transport)

    def _wait_writable(self, transport: Transport) -> None:
        """A peer that takes nothing may be waiting for us to take something: take what there is."""
        try:
            run(transport.wait_writable(monotonic() + WRITE_TURN))
        except TimeoutError:
            while (columns := self._take(NO_WAIT)) is not None:
                if columns.count:
                    self._early.append(columns)

    def _last_words(self) -> NsqError | None:
        """The fatal error that the server has sent, if it has sent one."""
        try:
            while self._take(LAST_WORDS_WAIT) is not None:
                pass
        except ServerError as reason:
            return reason
        except NsqError:
            pass
        return None


class InFlightIds:
    """The ids received and not answered. Ids come and go side by side, 16 bytes each.

    Attributes:
        count: how many there are. An id that is answered twice counts twice.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self._received: deque[bytes] = deque()
        self._at = 0  # where the first of them goes on
        self._aside: list[bytes] = []
        self._aside_size = 0

    def add(self, ids: bytes) -> None:
        """These were received."""
        self._received.append(ids)
        self.count += len(ids) // MESSAGE_ID_SIZE

    def remove(self, ids: bytes | memoryview) -> None:
        """These are answered. Raises ConfigError when they are not whole ids."""
        if len(ids) % MESSAGE_ID_SIZE:
            raise ConfigError(f"ids must have a length that is a multiple of {MESSAGE_ID_SIZE}, not {len(ids)}")
        self.count = max(0, self.count - len(ids) // MESSAGE_ID_SIZE)
        if not self.count:
            self._forget()
            return
        rest = self._remove_front(memoryview(ids))
        if rest:
            self._aside.append(bytes(rest))
            self._aside_size += len(rest)
            if self._aside_size > COMPARE_AT * MESSAGE_ID_SIZE:
                self._compare()

    def take(self) -> bytes:
        """All of them, in the order in which they came; none is held any more."""
        self._compare()
        held = b"".join(self._received)
        self._forget()
        return held

    def _remove_front(self, ids: memoryview) -> memoryview:
        """Remove what are the first ids received; return the others."""
        received = self._received
        while ids and received:
            first = received[0]
            size = min(len(first) - self._at, len(ids))
            if memoryview(first)[self._at : self._at + size] != ids[:size]:
                break
            ids = ids[size:]
            self._at += size
            if self._at == len(first):
                received.popleft()
                self._at = 0
        return ids

    def _compare(self) -> None:
        """Take those set aside out of those received."""
        aside = {each for ids in self._aside for each in _split(ids)}
        received = b"".join(self._received)[self._at :]
        held = [each for each in _split(received) if each not in aside] if aside else [received]
        self._forget()
        if held:
            self._received.append(b"".join(held))
            self.count = len(self._received[0]) // MESSAGE_ID_SIZE

    def _forget(self) -> None:
        self._received.clear()
        self._aside.clear()
        self.count = self._at = self._aside_size = 0


def _split(ids: bytes) -> list[bytes]:
    return [ids[at : at + MESSAGE_ID_SIZE] for at in range(0, len(ids), MESSAGE_ID_SIZE)]


class TopicLayout(NamedTuple):
    """What is known of a topic before anything is published to it.

    Attributes:
        is_partitioned: whether its servers have partitions.
        partition_num: how many the topic has, available or not; 0: it has none, or, without lookup, nobody says.
        is_ext: whether messages may have headers; None: nobody says.
    """

    is_partitioned: bool
    partition_num: int
    is_ext: bool | None


class ColumnProducer(Producer):
    """Publishes columns; otherwise a Producer.

    The order that a Producer promises for one partition holds for ``publish_rows`` with ``partition`` too.
    """

    def layout(self, topic: str, timeout: float | None = None) -> TopicLayout:
        """Wait until it is known what servers take a topic, and each of them is connected or could not be.

        So rows that take turns find all of them. Without lookup one nsqd that is connected stands for all.
        Args:
            timeout: seconds; None: the option ``publish_timeout``.
        Raises NameInvalid; NoNsqd when that does not become known in time, or lookup says that there is no such topic
        and none of the servers would create it.
        """
        deadline = self._deadline(timeout)
        route = self._route(topic)
        sender = self._sender
        route.absence = None  # lookup is asked again
        while (found := self._known(route)) is None:
            if route.absence is not None:
                raise NoNsqd(route.absence)
            left = deadline - monotonic()
            if left <= 0:
                text = f"no nsqd is known to take topic {topic!r}"
                raise sender.nowhere(NoNsqd, text, topic)
            sender.pool.hurry()
            sender.routing.refresh(topic)
            sender.news.clear()
            run(sender.news.wait(min(left, _ASK_AGAIN)))
        return found

    def _known(self, route: TopicRoute) -> TopicLayout | None:
        addresses = set(self.nsqd_addresses) if route.addresses is None else route.addresses
        if not self._sender.pool.are_tried(addresses):
            return None
        if route.has_lookup:
            is_known = route.is_partitioned or route.is_plain
            return TopicLayout(route.is_partitioned, route.partition_num, route.is_ext) if is_known else None
        for link in self._sender.pool.open:
            if link.conn is not None:
                return TopicLayout(link.conn.session.dialect.has_partitions, 0, None)
        return None

    def header(self, topic: str, headers: Headers, tag: str | None, trace_id: int | None) -> bytes:
        """The JSON of an ext header, as ``Records`` takes it. Raises ConfigError, BodyInvalid, TypeError."""
        return self._composer.message_encoding(self._route(topic), trace_id, headers, tag, is_batch=True).header

    def publish_rows(
        self,
        topic: str,
        records: Records,
        rows: bytes | None = None,
        start: int = 0,
        stop: int | None = None,
        *,
        partition: int | None = None,
        timeout: float | None = None,
        is_trace_optional: bool = False,
    ) -> AsyncResult[StoredRows]:
        """Publish rows with one command, which the server stores as a whole or not at all.

        Blocks while there is no room below ``max_pending``, not for the reply. The rows must make a command that the
        server takes: see ``Records.find_misfit`` and ``Records.cut``.

        Args:
            records: the messages, with trace ids or headers where they have any. Its buffers must not change.
            rows, start, stop: which of them, see ``Records``.
            partition: its number. Those to one partition are stored in the order of the calls; None: in turn.
            timeout: seconds for all of it, retries included; None: the option ``publish_timeout``.
            is_trace_optional: servers that cannot trace take the rows without their trace ids.

        The result, or the error: as those of ``publish``; ConfigError for rows that there are not.
        """
        route = self._route(topic)
        deadline = self._deadline(timeout)
        end = (records.count if rows is None else len(rows) // 4) if stop is None else stop
        try:
            parts = records.cut(_ANY_COUNT, self.config.max_body_size, rows, start, end)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"rows, start, stop: {error}") from error
        if len(parts) != 1:
            raise BodyInvalid(f"rows[{start}:{end}]: empty, or above max_body_size={self.config.max_body_size}")
        encoding = RowsEncoding(records, rows, start, end, is_optional=is_trace_optional)
        publish = self._bound(route, b"", encoding, deadline, PublishOptions(partition=partition), end - start)
        result: AsyncResult[StoredRows] = AsyncResult()
        publish.promised = result
        run(self._enter(publish, True))
        return result
