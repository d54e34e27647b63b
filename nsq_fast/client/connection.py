"""One nsqd on any loop: a socket that the loop watches, a Session, and what waits to be written.

```
new -- open() --> connecting -- Ready --> open -- close() --> leaving --+--> ended
                      |                     |                           |
                      +--- any failure -----+-- any failure, silence ---+
```

The owner (a consumer, a producer) is called back by the loop, and must not block there. Data goes by these callbacks
alone: ``readable`` reads, feeds the Session, and hands on what that makes of it. No greenlet and no task reads, so
there is none that could be given up, or kept from reading by a handler.

What is written in one turn of the loop leaves in one send, FINs as one buffer (``_client.pyx``). Answers (FIN and REQ)
are told of once more when they are handed to the system, or dropped: only then it is known that they were, or were not,
sent.

A connection ends once, whatever ends it: pending commands are reported with ``on_failed``, then ``on_disconnect`` is
called; from the moment it begins to end, every command raises ConnectionLost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from socket import gethostname
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nsq_fast._client import LONGEST_MESSAGE, ConnectionPath, SpinReader
from nsq_fast._codec import Message, TruncatedMessage
from nsq_fast._lazy import get_logger
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    AuthFirst,
    ConfigError,
    ConnectFailed,
    ConnectionClosed,
    ConnectionLost,
    HeartbeatMissed,
    LocalProtocolError,
    MessageTooLarge,
    NsqError,
    ServerError,
    printable,
    said_at,
)
from nsq_fast.log_events import (
    CLOSE_FAILED,
    CLOSE_TIMED_OUT,
    CONNECTED,
    DISCONNECTED,
    INTERNAL_ERROR,
    RESPONSE_LOST,
)
from nsq_fast.names import Address
from nsq_fast.protocol.session import (
    AnswerFailed,
    AuthInfo,
    CommandFailed,
    Heartbeat,
    MessageSkipped,
    Ready,
    Reply,
    ServerFailed,
    ServerInfo,
    Session,
    Stage,
    UpgradeNeeded,
)

from .loop import Event
from .transport import Transport, with_secret

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nsq_fast.client.signals import MessageSignals, SignalBook
    from nsq_fast.protocol.session import SubscribeOptions

    from .loop import Loop, Timer, Watch

logger: logging.Logger = get_logger(__name__)

SILENT_INTERVALS = 2
"""Heartbeat intervals without a byte after which a server is dead. It is as patient with a silent client.

nsqio/nsq: nsqd/protocol_v2.go, IOLoop."""

OVERDUE_INTERVALS = 1.25
"""A heartbeat may be late by this much before anybody is told: servers send it by a timer of their own."""

GRACE = 0.1
"""Seconds that a peer that looks silent gets to be heard after all: bytes may have come while this process was busy."""

TELL_AFTER = 1.0
"""Seconds after which the log says what the close of a client waits for."""

CLOSE_TIMEOUT = 2.0

ConnectionT = TypeVar("ConnectionT", contravariant=True)


class ConnectionOwner(Protocol[ConnectionT]):
    """Callbacks of a connection, made by the loop. None of them may block.

    An owner may also have ``on_finish(conn, message)``, ``on_requeue(conn, message, delay_ms, backoff)`` and
    ``on_touch(conn, message)``, called when a program queues the command;
    ``on_answers(conn, finished, requeued, is_sent)``, called when the FINs of the messages ``finished`` and so many
    REQs were handed to the system, or were lost with the connection; ``requeue_delay_ms(conn, message) -> int``,
    asked when a message is requeued without a delay (0 when the owner does not have it); and
    ``on_heartbeat_overdue(conn)``, called when a heartbeat is late, well before the connection ends of that.
    """

    def on_reply(self, conn: ConnectionT, token: Any, data: bytes) -> None: ...

    def on_failed(self, conn: ConnectionT, token: Any, error: NsqError) -> None: ...

    def on_answer_failed(self, conn: ConnectionT, error: ServerError, message_id: bytes | None) -> None: ...

    def on_error(self, conn: ConnectionT, error: ServerError) -> None: ...

    def on_disconnect(self, conn: ConnectionT, error: NsqError) -> None: ...

    # Who subscribes to nothing leaves these out

    def on_messages(self, conn: ConnectionT, messages: list[Message]) -> None:
        return None

    def on_message_skipped(self, conn: ConnectionT, message: TruncatedMessage, error: MessageTooLarge) -> None:
        return None

    def on_heartbeat(self, conn: ConnectionT) -> None:
        return None

    def on_close_wait(self, conn: ConnectionT) -> None:
        return None


class Queued:
    """What an answer to a message returns: it is queued, here or in the thread of the connection. To await it is no
    wait."""

    __slots__ = ()

    def __await__(self) -> Iterator[Any]:
        return iter(())


QUEUED = Queued()


class Connection(ConnectionPath):
    """A connection to one nsqd, made by ``open()`` and used once. It is the responder of its messages.

    Attributes:
        address: the nsqd.
        local_address: our end; None before it is connected.
        session: the protocol state.
        closed_error: why the connection ended or is ending; None while it is open.
        auth, auth_data: the reply to AUTH, parsed and as it came; None when there was none.
        topic, partition: what is subscribed to, which its messages show too; None before, or when none was named.
        hold: called with the connection, a message and its delay in ms in place of a REQ that has a delay, where
            the server would ignore it; to call ``requeue(message, 0)`` later.
    """

    reads_on = False
    """Whether who has answered promptly reads the next message, which comes after the answer, by ``read_soon``."""

    def __init__(
        self, address: Address, config: ConnectionConfig, owner: ConnectionOwner[Connection], loop: Loop
    ) -> None:
        self.config: ConnectionConfig = with_hostname(config)
        self.loop = loop
        self.address = address
        self.session: Session = Session(self.config, responder=self)
        self.closed_error: NsqError | None = ConnectionClosed(f"{address}: not connected yet")
        self.local_address: Address | None = None
        self.auth: AuthInfo | None = None
        self.auth_data: bytes | None = None
        self.topic: str | None = None
        self.partition: int | None = None
        self.hold: Callable[[Any, Message, int], None] | None = None
        self._owner = owner
        self._at_end = loop.at_end_of_turn
        self.reads_all: bool = loop.reads_all
        self._thread = loop.owner()
        self._transport = Transport(loop, address, self.config)
        self._signals: SignalBook | None = None
        self._get_ident = loop.get_ident
        self._on_finish: Callable[..., Any] | None = getattr(owner, "on_finish", None)
        self._on_requeue: Callable[..., Any] | None = getattr(owner, "on_requeue", None)
        self._on_answers: Callable[..., Any] | None = getattr(owner, "on_answers", None)
        self._on_touch: Callable[..., Any] | None = getattr(owner, "on_touch", None)
        self._on_overdue: Callable[..., Any] | None = getattr(owner, "on_heartbeat_overdue", None)
        self._delay_of: Callable[..., int] | None = getattr(owner, "requeue_delay_ms", None)
        self._has_begun = self._is_connected = self._is_leaving = self._is_ended = False
        self._subscribing: Any = None  # the token of SUB, whose caller waits
        self._reader: Watch | None = None
        self._writer: Watch | None = None
        self._silence: Timer | None = None
        self._limit: Timer | None = None  # of taking bytes, or of leaving
        self._progress_at = 0.0
        self._overdue_since = 0.0
        self._has_ended = Event(loop)
        loop.tell_forks(self)

    def __repr__(self) -> str:
        return f"<Connection {self.address} {'open' if self.is_open else 'closed'}>"

    @property
    def owner(self) -> Any:
        """Who is called back."""
        return self._owner

    @property
    def is_open(self) -> bool:
        """Whether commands may be given."""
        return self.closed_error is None

    @property
    def info(self) -> ServerInfo:
        """What the server said about itself."""
        return self.session.info

    @property
    def rdy(self) -> int:
        """The RDY last sent."""
        return self.session.rdy

    @property
    def in_flight(self) -> int:
        """Messages received, not yet finished or requeued, and not expired."""
        return max(0, self.session.in_flight - len(self.finished))

    @property
    def is_blocked(self) -> bool:
        """Whether the system has not taken all that was sent: the peer is slow to read."""
        return self._unsent is not None

    def is_unheard(self) -> bool:
        """Whether the network is at fault where nothing comes: see ``Transport.is_unheard``."""
        transport: Transport = self._transport
        return transport.is_unheard()

    def read_replies_soon(self) -> None:
        """A caller that waits for the only reply that is due may read it before the loop does: see ``SpinReader``.

        Not through layers: what they hold is no question of microseconds.
        """
        if not self._transport.layers:
            self._spin = SpinReader(self._transport.sock)

    # Opening

    async def open(self) -> None:
        """Connect, negotiate, upgrade, authenticate; takes ``connect_timeout`` at most.

        Raises ConnectFailed, with the reason as its cause, or ConfigError for unusable ``tls_options``;
        ``on_disconnect`` is not called then.
        """
        self._thread.check("Connection.connect()")
        if self._has_begun:
            raise LocalProtocolError(f"{self.address}: connect() was called already")
        self._has_begun = True
        self._thread.claim()
        transport: Transport = self._transport
        try:
            with connecting(self.address, self.config.connect_timeout, self.session) as deadline:
                await transport.connect(deadline)
                self.local_address = transport.local_address
                ready = await shake_hands(transport, self.session, deadline, lambda: self._owner.on_heartbeat(self))
        except BaseException:
            self._is_ended = True
            transport.close()
            raise
        self.auth, self.auth_data = ready.auth, ready.auth_data
        self._is_connected = True
        self.closed_error = None
        self.last_received_at: float = monotonic()
        self._reader, self._writer = transport.deliver_to(self.readable, self._writable)
        self._watch_silence(False)
        version = printable(self.info.version)
        logger.info("%s: connected, version %s, %s", self.address, version, self.session.dialect.name, extra=CONNECTED)
        if transport.layers:
            self._read_on_later()  # they may hold what the loop sees no more

    async def subscribe(self, topic: str, channel: str, **options: Unpack[SubscribeOptions]) -> None:
        """Subscribe and wait for the server's OK.

        The options are for redesigned servers: ``partition``, ``ordered`` and ``advanced``, see ``Session.sub``.

        Raises the ServerError of a refusal (the connection ends with it), ConnectionLost, or LocalProtocolError
        for what the server does not know (nothing is sent then).
        """
        self._thread.check("Connection.subscribe()")
        self._check_takes_commands()
        waiter = self._subscribing = self.loop.waiter()
        self.put_bytes(self.session.sub(topic, channel, token=waiter, **options))
        self.topic, self.partition = topic, options.get("partition")
        try:
            await self.loop.wait(waiter, self.config.connect_timeout)
        except TimeoutError as late:
            if isinstance(late, NsqError):
                raise
            error = ConnectionLost(f"{self.address}: no reply to SUB within {self.config.connect_timeout} s")
            self.close(error)
            raise error from None

    # What the server sends, other than OKs and messages alone: ``readable`` hands those on by itself

    def _dispatch(self, events: list[Any]) -> None:
        """Hand a mixed list to the owner, in order: runs of messages as lists."""
        rest = iter(events)
        try:
            self._dispatch_all(rest)
        except BaseException:
            for event in rest:  # whose command is out of the session: nobody else would tell of it
                if event.__class__ is Reply or event.__class__ is CommandFailed:
                    self._dispatch_late(event)
            raise

    def _dispatch_late(self, event: Any) -> None:
        try:
            self._dispatch_all(iter((event,)))
        except Exception as error:
            if error is not getattr(event, "error", None):  # else it was told: the connection ends already
                logger.exception("%s: %s", self.address, event.command, extra=INTERNAL_ERROR)

    def _dispatch_all(self, events: Iterator[Any]) -> None:
        run: list[Message] = []
        on_reply = self._owner.on_reply
        for event in events:
            kind = event.__class__
            if kind is Message:
                run.append(event)
                continue
            if run:
                self._hand_over(run)
                run = []
            if kind is not Reply:
                self._handle(event)
            elif event.command == "CLS":
                self._owner.on_close_wait(self)
            elif event.token is self._subscribing is not None:
                event.token.set(event.data)
            else:
                on_reply(self, event.token, event.data)
        if run:
            self._hand_over(run)

    def _hand_over(self, messages: list[Message]) -> None:
        if self.closed_error is not None:
            return  # a callback has closed us: nobody could answer them any more
        self.last_message_at: float = self.last_received_at
        self._owner.on_messages(self, messages)

    def _handle(self, event: Any) -> None:
        kind = event.__class__
        if kind is Heartbeat:
            if self.closed_error is None:
                self.put_bytes(event.send)
            self._owner.on_heartbeat(self)
        elif kind is MessageSkipped:
            if self.closed_error is None:
                self._owner.on_message_skipped(self, event.message, event.error)
        elif kind is AnswerFailed:
            self._owner.on_answer_failed(self, event.error, event.message_id)
        elif kind is CommandFailed:
            self._failed(event.token, event.error)
            if event.fatal:
                raise event.error
        elif kind is ServerFailed:
            self._owner.on_error(self, event.error)
            if event.fatal:
                raise event.error

    def _failed(self, token: Any, error: NsqError) -> None:
        if token is None:
            return
        if token is self._subscribing:
            if not token.ready():
                token.set_exception(error)
        else:
            self._owner.on_failed(self, token, error)

    def _read_failed(self, error: Exception) -> None:
        """Reading has ended, or what was read cannot be dealt with."""
        if self._is_leaving:
            # The end of the stream is what was waited for.
            if not (isinstance(error, ConnectionLost) and error.is_abrupt) or self.write_error is not None:
                logger.info("%s: while closing: %s", self.address, error, extra=CLOSE_FAILED)
            assert self.closed_error is not None
            self._end(self.closed_error)
            return
        if isinstance(error, NsqError):
            reason: NsqError = error
        elif isinstance(error, OSError):
            reason = ConnectionLost(f"{self.address}: {error}")
            reason.is_abrupt = isinstance(error, ConnectionError)  # a reset; not a network that was lost
            reason.__cause__ = error
        else:
            reason = ConnectionLost(f"{self.address}: the owner failed: {error!r}")
            reason.__cause__ = error
            self.loop.report(f"what {self.address} sent", error, "the connection ends")
        if self.closed_error is None:
            self.closed_error = reason
        self._end(self.closed_error)

    def _read_on_later(self) -> None:
        self.reads_later: bool = True
        self.loop.call_later(0, self._read_on)

    def _read_on(self) -> None:
        self.reads_later = False
        if not self._is_ended:
            self.readable()

    # Silence: one timer for a connection, however much is received

    def _watch_silence(self, is_suspected: bool) -> None:
        interval = self.config.heartbeat_interval
        now, heard = monotonic(), self.last_received_at
        left = heard + SILENT_INTERVALS * interval - now
        left_until_overdue = heard + OVERDUE_INTERVALS * interval - now
        if self._on_overdue is not None and left_until_overdue <= 0 and heard != self._overdue_since:
            self._overdue_since = heard
            self._on_overdue(self)
        if left > 0:
            is_first = self._on_overdue is not None and 0 < left_until_overdue < left
            self._silence = self.loop.call_later(left_until_overdue if is_first else left, self._watch_silence, False)
        elif not is_suspected:
            self._silence = self.loop.call_later(GRACE, self._watch_silence, True)
        else:
            self._stop(HeartbeatMissed(f"{self.address}: nothing received for two heartbeat intervals"))

    # Commands

    def write(self, data: bytes) -> None:
        """Queue bytes; they leave at the end of this turn of the loop. Raises ConnectionLost when closed."""
        self._thread.check("Connection.write()")
        self._check_open()
        self.put_bytes(data)

    def set_rdy(self, count: int) -> None:
        """RDY, unless it was the last one sent or the connection is closing."""
        self._thread.check("Connection.set_rdy()")
        self._check_open()
        if count != self.session.rdy and not self.session.is_closing:
            self.put_bytes(self.session.set_rdy(count))

    def start_close(self) -> None:
        """CLS: no more messages, please. ``on_close_wait`` follows; messages may still come before it."""
        self._thread.check("Connection.start_close()")
        self._check_takes_commands()
        if not self.session.is_closing:
            self.put_first(self.session.cls())  # behind a REQ the same message would come once more, to no end

    def _check_open(self) -> None:
        if self.closed_error is not None:
            raise lost_error(f"{self.address}: the connection is closed: {self.closed_error}", outcome_unknown=False)

    def _check_takes_commands(self) -> None:
        self._check_open()
        if self.session.stage is Stage.OVER or self.session.failure is not None:
            # It was read together with replies, each of which may have the next command sent before it is dealt with.
            raise lost_error(f"{self.address}: what was read ends the connection", outcome_unknown=False)

    # Answers to messages. A FIN that follows from the return of a handler is not given here: workers put the message
    # into ``finished``, or hand it to ``put_finished``. The owner and the signals of single messages hear of an answer
    # when a program queues it; the owner hears once more when the system has it, or when it is lost.

    def finish(self, message: Message) -> Queued:
        """FIN, together with the others of this turn of the loop."""
        if self._get_ident() != self._thread.ident and self._is_handed_over(self.finish, message):
            return QUEUED
        if self.closed_error is not None:
            self._refuse(message)
        self.put_finished(message)
        if self._on_finish is not None:
            self._on_finish(self, message)
        if self._signals is not None:
            self._signals.finished((message,))
        return QUEUED

    def requeue(self, message: Message, time_ms: int | None = None, backoff: bool = True) -> Queued:
        """REQ. Without ``time_ms`` the owner's ``requeue_delay_ms`` decides. A delay may be left to ``hold``."""
        if time_ms is not None:
            # In the thread of the caller: the hub's could tell nobody.
            check_delay("time_ms", time_ms, "; the message is not answered")
        if self._get_ident() != self._thread.ident and self._is_handed_over(self.requeue, message, time_ms, backoff):
            return QUEUED
        if self.closed_error is not None:
            self._refuse(message)
        if time_ms is None:
            time_ms = 0 if self._delay_of is None else self._delay_of(self, message)
        if time_ms and self.hold is not None:
            self.hold(self, message, time_ms)
            return QUEUED
        self.put_requeue(self.session.req(message, time_ms))
        if self._on_requeue is not None:
            self._on_requeue(self, message, time_ms, backoff)
        if self._signals is not None:
            self._signals.requeued(message, time_ms, backoff)
        return QUEUED

    def touch(self, message: Message) -> Queued:
        """TOUCH: more time for a message."""
        if self._get_ident() != self._thread.ident and self._is_handed_over(self.touch, message):
            return QUEUED
        self._check_open()
        self.put_bytes(self.session.touch(message, monotonic()))
        if self._on_touch is not None:
            self._on_touch(self, message)
        if self._signals is not None:
            self._signals.touched(message)
        return QUEUED

    def answer_promptly(self) -> None:
        """Send answers at once from now on, not gathered at the end of the loop's turn."""
        self.is_prompt = True
        if self.reads_on and not self._transport.layers:
            self._message_spin = SpinReader(self._transport.sock, longest=LONGEST_MESSAGE)

    def signals_of(self, message: Message) -> MessageSignals:
        """``on_finish``, ``on_requeue`` and ``on_touch`` of one message, kept until it is answered."""
        if self._signals is None:  # few programs ask
            from nsq_fast.client.signals import SignalBook

            self._signals = SignalBook()
        return self._signals.of(message)

    def _answers_left(self, finished: list[Message], requeued: int, is_sent: bool) -> None:
        """These answers were handed to the system, or were dropped with the connection."""
        if finished and self._signals is not None:
            self._signals.finished(finished)
        if self._on_answers is not None:
            self._on_answers(self, finished, requeued, is_sent)

    def _refuse(self, message: Message) -> None:
        message.mark_expired()  # the program is done with it, and nsqd has taken it back
        self._check_open()

    def _is_handed_over(self, answer: Callable[..., object], message: Message, *arguments: Any) -> bool:
        """In another thread, where that is allowed: have the connection's thread send an answer. Else raises
        WrongThread. False where there is nobody to answer: the caller raises that."""
        if not self._thread.takes_calls:
            self._thread.check(f"Message.{answer.__name__}()")
            return False
        if self.closed_error is not None:
            return False
        self._thread.hand_over(self._answer_for_thread, answer, message, *arguments)
        return True

    def _answer_for_thread(self, answer: Callable[..., object], message: Message, *arguments: Any) -> None:
        try:
            answer(message, *arguments)
        except NsqError as error:  # whoever asked for it has gone on meanwhile
            logger.info(
                "%s: the answer of a handler's thread was not sent: %s", self.address, error, extra=RESPONSE_LOST
            )

    # What the system did not take at once

    def _write_later(self, unsent: memoryview) -> None:
        self._unsent = unsent
        self._progress_at = monotonic()
        assert self._writer is not None
        self._writer.resume()
        if self._limit is None:
            self._limit = self.loop.call_later(self.config.write_timeout, self._check_progress)

    def _writable(self) -> None:
        transport: Transport = self._transport
        unsent = self._unsent
        try:
            while unsent is not None:
                left = transport.send_encoded(unsent)
                if left is None or len(left) < len(unsent):
                    self._progress_at = monotonic()
                if left is not None:
                    self._unsent = left
                    return
                self.tell_sent()
                data = self.gather()
                unsent = None if data is None else memoryview(transport.encode(data))
        except Exception as error:
            self._write_failed(error)
            return
        self._unsent = None
        if self._writer is not None:
            self._writer.pause()
        if self._is_leaving:
            self._say_goodbye()

    def _check_progress(self) -> None:
        self._limit = None
        if self._unsent is None or self._is_leaving:
            return
        left = self._progress_at + self.config.write_timeout - monotonic()
        if left > 0:
            self._limit = self.loop.call_later(left, self._check_progress)
        else:
            self._write_failed(TimeoutError(f"the peer took no byte for {self.config.write_timeout} s"))

    def _write_failed(self, cause: Exception) -> None:
        if self.write_error is not None or self._is_stopped:
            return
        if not isinstance(cause, (OSError, NsqError)):
            self.loop.report(f"sending to {self.address}", cause, "the connection ends")
        self.write_error: ConnectionLost = ConnectionLost(f"{self.address}: cannot write: {cause}")
        self.write_error.__cause__ = cause
        self._drop_unsent()
        # A server that closes after a fatal error may have sent the reason: let the reader find it, and the
        # end of the stream behind it. A peer that only takes nothing will not end the stream.
        if not isinstance(cause, ConnectionError):
            self._stop(self.write_error)
        if self._is_leaving:
            logger.info("%s: while closing: %s", self.address, cause, extra=CLOSE_FAILED)
            self.loop.call_soon(self._end, self.closed_error)

    def _drop_unsent(self) -> None:
        """Nothing of what waits is sent any more."""
        lost = (self._sending or []) + self.finished
        requeued = self._sending_requeued + self._requeued
        self.finished.clear()
        self._sending, self._sending_requeued, self._requeued = None, 0, 0
        self._parts = []
        self._size = 0
        self._unsent = None
        if self._writer is not None:
            self._writer.pause()
        if lost or requeued:
            self._answers_left(lost, requeued, False)

    # Ending

    def close(self, error: NsqError | None = None, *, timeout: float = CLOSE_TIMEOUT) -> None:
        """Begin to end; ``closed`` waits for it. Idempotent.

        Without ``error`` what is queued is sent first, and replies that are on their way are taken, within
        ``timeout`` seconds. With ``error`` the connection is dropped at once.
        """
        self._thread.check("Connection.close()")
        if not self._is_connected:
            if self._has_begun:
                self._transport.abort(error or ConnectionClosed("closed by us"))
            self._has_begun = True
        elif self.closed_error is not None:
            return
        elif error is not None:
            self._stop(error)
        else:
            # Closing with unread input makes the kernel reset the connection, and the peer may lose our last FIN
            # with it. So: half-close, and read until the peer has closed too.
            self.flush()
            self.closed_error = ConnectionClosed(f"{self.address}: closed by us")
            self._is_leaving = True
            self._cancel_timers()
            self._limit = self.loop.call_later(timeout, self._leaving_takes_too_long, timeout)
            if self.write_error is not None:
                self.loop.call_soon(self._end, self.closed_error)
            elif self._unsent is None:
                self._say_goodbye()

    async def closed(self) -> None:
        """Wait until ``on_disconnect`` was called; not where that could never come about, as in a callback of it."""
        if self._is_connected and not self._is_ended and self.loop.may_wait():
            await self._has_ended.wait()

    def _say_goodbye(self) -> None:
        try:
            self._transport.end_writing()
        except OSError as error:
            logger.info("%s: while closing: %s", self.address, error, extra=CLOSE_FAILED)
            self.loop.call_soon(self._end, self.closed_error)

    def _leaving_takes_too_long(self, timeout: float) -> None:
        self._limit = None
        logger.warning(
            "%s: closed after %s s without the server's consent", self.address, timeout, extra=CLOSE_TIMED_OUT
        )
        assert self.closed_error is not None
        self._end(self.closed_error)

    def _stop(self, reason: NsqError) -> None:
        """End at once, but not before the caller, who may be in the middle of something, has gone on."""
        if self.closed_error is None:
            self.closed_error = reason
            self._is_stopped = True  # what is sent from now on would count as sent, and most likely be lost
            self._drop_unsent()
            if self._reader is not None:
                self._reader.pause()
            self.loop.call_soon(self._end, reason)

    def _end(self, reason: NsqError) -> None:
        """What was pending is reported, then the end itself; runs once."""
        if self._is_ended:
            return
        self._is_ended = True
        self._spin = self._message_spin = None
        self.closed_error = reason
        self._cancel_timers()
        self._is_stopped = True
        try:
            self._drop_unsent()
        finally:
            self._transport.close()
            self._reader = self._writer = None
            self._report(reason)

    def _cancel_timers(self) -> None:
        for timer in (self._silence, self._limit):
            if timer is not None:
                timer.cancel()
        self._silence = self._limit = None

    def _report(self, reason: NsqError) -> None:
        lost: Any = self.session.receive(b"")[0]
        for number, (command, token) in enumerate(lost.pending):
            text = f"{self.address}: the connection ended before the reply to {command}: {reason}"
            error = lost_error(text, outcome_unknown=lost.executed is None)
            is_behind = isinstance(reason, ServerError)  # it waited behind an MPUB_EXT that was refused
            error.is_abrupt = is_behind or (isinstance(reason, ConnectionLost) and reason.is_abrupt)
            error.was_first = number == 0 and not is_behind
            error.__cause__ = reason
            try:
                self._failed(token, error)
            except Exception:  # the others must still hear of theirs
                logger.exception("%s: on_failed", self.address, extra=INTERNAL_ERROR)
        try:  # whatever a log handler of the program raises: who waits for the end must not wait for ever
            logger.info("%s: disconnected: %s", self.address, said_at(self.address, reason), extra=DISCONNECTED)
        finally:
            self._tell_end(reason)

    def _tell_end(self, reason: NsqError) -> None:
        try:
            self._owner.on_disconnect(self, reason)
        except Exception as fault:
            self.loop.report(f"on_disconnect of {self.address}", fault, "the connection has ended")
        finally:
            self._has_ended.set()

    def drop(self, reason: NsqError) -> None:
        """End now, for a loop that ends: what is queued is sent as far as the system takes it at once."""
        if self._is_connected and not self._is_ended:
            self.flush()
            self._end(reason)
        elif not self._is_connected:
            self._has_begun = True
            self._transport.close()

    def let_go(self, messages: Iterable[Message]) -> None:
        """The loop is closed: nothing can be waited for. Requeue these messages, and send what is queued, as far as the
        system takes that at once. Its owner hears nothing more."""
        try:
            if self._is_connected and not self._is_ended and self._unsent is None:
                if self.session.is_subscribed and not self.session.is_closing:
                    self._parts.append(self.session.cls())  # or others would be sent in place of these
                for message in messages:
                    self._parts.append(self.session.req(message, 0))
                    self._requeued += 1
                data = self.gather()
                if data is not None and self._transport.send_now(data) is None:
                    self.tell_sent()
        except (OSError, NsqError) as error:
            logger.info("%s: while closing: %s", self.address, error, extra=CLOSE_FAILED)
        self.forked()
        self._transport.forked()

    def forked(self) -> None:
        """In the child of a fork: the connection is the parent's. Its owner hears nothing more."""
        self.closed_error = ConnectionClosed(f"{self.address}: the connection belongs to the process that forked")
        self._is_ended = self._is_stopped = True
        self._spin = self._message_spin = None
        self._cancel_timers()
        self._reader = self._writer = None


def with_hostname(config: ConnectionConfig) -> ConnectionConfig:
    """The same; where it names no host, with that of the system."""
    return config if config.hostname is not None else config.replace(hostname=gethostname())


_AWAITED = {
    Stage.IDENTIFYING: ": no reply to IDENTIFY",
    Stage.UPGRADING: ": the handshake of TLS has not ended",
    Stage.CONFIRMING: ": no reply after the upgrade to TLS or compression",
    Stage.AUTHENTICATING: ": no reply to AUTH, for which nsqd asks its auth server",
}


@contextmanager
def connecting(address: Address, seconds: float, session: Session) -> Iterator[float]:
    """Give the deadline of what is done inside, and make every reason why it failed the cause of a ConnectFailed.

    Whatever a peer sends, or a resolver makes of a host name, is one more failed connection for the caller. ConfigError
    goes through as it is: trying again would not help.
    """
    try:
        yield monotonic() + seconds
    except ConfigError:
        raise
    except TimeoutError as error:
        if error.errno is not None:  # the system's, of the other end
            raise ConnectFailed(f"{address}: cannot connect: {error}") from error
        raise ConnectFailed(f"{address}: not connected within {seconds} s{_AWAITED.get(session.stage, '')}") from error
    except (NsqError, OSError) as error:
        raise ConnectFailed(f"{address}: cannot connect: {error}") from error
    except Exception as error:  # UnicodeError, RecursionError...
        raise ConnectFailed(f"{address}: cannot connect: {printable(repr(error))}") from error


async def shake_hands(
    transport: Transport, session: Session, deadline: float, on_heartbeat: Callable[[], None] | None = None
) -> Ready:
    """Take a new session to the point where commands are allowed. The caller closes ``transport``.

    Raises what the server, the session or the transport raises, AuthFirst when a secret is missing.
    """
    session.config = with_secret(session.config)
    await transport.send_all(session.connect(), deadline)
    ready: Ready | None = None
    while ready is None:
        data = await transport.recv(deadline)
        event: Any
        for event in session.receive(data, monotonic()):
            if event.send:
                await transport.send_all(event.send, deadline)
            if isinstance(event, UpgradeNeeded):
                await transport.upgrade(event.kind, event.leftover, deadline)
                session.upgraded()
            elif isinstance(event, (CommandFailed, ServerFailed)):
                raise event.error
            elif isinstance(event, Ready):
                ready = event
            elif isinstance(event, Heartbeat) and on_heartbeat is not None:
                on_heartbeat()
        if not data:
            raise ConnectionLost("closed by the server during the handshake")
        if session.failure is not None:
            raise session.failure
    # The server would say so at the next command only. nsqio/nsq: nsqd/protocol_v2.go, CheckAuth
    if session.info.auth_required and ready.auth is None:
        raise AuthFirst("the server demands AUTH, and auth_secret is not set")
    return ready


def lost_error(text: str, outcome_unknown: bool) -> ConnectionLost:
    """A ConnectionLost of which it is known whether the command may have been carried out."""
    error = ConnectionLost(text)
    error.outcome_unknown = outcome_unknown
    return error


LONGEST_DELAY = 2**63 - 1
"""Milliseconds: what nsqd reads, an int64. Above its ``-max-req-timeout`` it takes that for a requeue, and refuses a
publish."""


def check_delay(name: str, value: Any, note: str = "") -> None:
    """Raise ConfigError unless it is a delay of a message, in milliseconds."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LONGEST_DELAY:
        raise ConfigError(
            f"{name}={value!r}: must be a whole number of milliseconds, 0 to {LONGEST_DELAY}, or None{note}"
        )
