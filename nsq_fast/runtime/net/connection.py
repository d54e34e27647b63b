"""One nsqd: a reader greenlet, one writer, the heartbeat rule, around a Session.

The owner (a consumer, a producer) is called back in the reader greenlet, or
in one that reads in its place, and must not block there. The reader is there
whenever such a greenlet does anything but read, so no handler keeps heartbeats
waiting. Everything else may be called from any greenlet of the hub that
connected.

What is written in one turn of the hub leaves in one send, FINs as one buffer:
see ``outbox``. A connection ends once, whatever ends it: pending commands are
reported with ``on_failed``, then ``on_disconnect`` is called; from the moment
it begins to end, every command raises ConnectionLost.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any

from gevent import Timeout, get_hub, getcurrent
from gevent.event import AsyncResult, Event
from gevent.socket import gethostname
from greenlet import greenlet

from nsq_fast._codec import Message
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    ConnectionClosed,
    ConnectionLost,
    HeartbeatMissed,
    LocalProtocolError,
    NsqError,
)
from nsq_fast.names import Address
from nsq_fast.printable import printable
from nsq_fast.protocol.events import AnswerFailed, CommandFailed, Heartbeat, MessageSkipped, Reply, ServerFailed
from nsq_fast.protocol.identify import AuthInfo, ServerInfo
from nsq_fast.protocol.session import Session
from nsq_fast.runtime.fork import tell_forks
from nsq_fast.runtime.supervised import Job, Supervisor

from .handshake import connecting, shake_hands
from .outbox import Outbox
from .owner import ConnectionOwner
from .responder import Responder, lost_error
from .transport import Transport
from .watch import SilenceWatch

logger = logging.getLogger(__name__)
_supervisor = Supervisor(logger)  # the owner hears of faults by on_disconnect

SILENT_INTERVALS = 2
CLOSE_TIMEOUT = 2.0


class _Waiter(AsyncResult):  # type: ignore[type-arg]  # not subscriptable when it runs
    """The token of a command whose caller waits; no owner ever sees it."""


class Connection(Responder):
    """A connection to one nsqd, made by ``connect()`` and used once.

    Attributes:
        address: the nsqd.
        local_address: our end; None before ``connect``.
        session: the protocol state.
        last_received_at, last_message_at: ``time.monotonic()`` of the last bytes and the last messages.
        closed_error: why the connection ended or is ending; None while it is open.
        auth, auth_data: the reply to AUTH, parsed and as it came; None when there was none.
        partition: the partition subscribed to, which its messages show too; None when none was named.
    """

    def __init__(self, address: Address, config: ConnectionConfig, owner: ConnectionOwner[Connection]) -> None:
        self.config = config if config.hostname is not None else config.replace(hostname=gethostname())
        session = Session(self.config, responder=self)
        outbox = Outbox(session.fin_many, config.write_timeout, self._write_failed, self._answers_left)
        super().__init__(address, session, outbox, owner)
        self.local_address: Address | None = None
        self.last_received_at = self.last_message_at = 0.0
        self.auth: AuthInfo | None = None
        self.auth_data: bytes | None = None
        self.partition: int | None = None
        self._owner = owner
        self._transport: Transport
        self._has_begun = False
        self._connecting: greenlet | None = None
        self._reader: Job | None = None
        limit = SILENT_INTERVALS * config.heartbeat_interval
        self._watch = SilenceWatch(limit, lambda: self.last_received_at, self._silent)
        self._is_graceful = False
        self._close_timeout = CLOSE_TIMEOUT
        self._ended = Event()
        tell_forks(self)

    def __repr__(self) -> str:
        return f"<Connection {self.address} {'open' if self.is_open else 'closed'}>"

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
        """Messages received and not yet finished or requeued."""
        return self.session.in_flight - len(self.finished)

    # Connecting

    def connect(self) -> None:
        """Connect, negotiate, upgrade, authenticate; start the reader. Blocks for ``connect_timeout`` at most.

        Raises ConnectFailed, with the reason as its cause, or ConfigError for unusable ``tls_options``;
        ``on_disconnect`` is not called then.
        """
        self._thread.check("Connection.connect()")
        if self._has_begun:
            raise LocalProtocolError(f"{self.address}: connect() was called already")
        self._has_begun = True
        self._thread.claim()
        self._connecting = getcurrent()
        try:
            with connecting(self.address, self.config.connect_timeout):
                self._transport = Transport.connect(self.address, self.config)
                self._handshake_or_close(self._transport)
        finally:
            self._connecting = None
        self._start()

    def _handshake_or_close(self, transport: Transport) -> None:
        self.local_address = transport.local_address
        try:
            ready = shake_hands(transport, self.session, lambda: self._owner.on_heartbeat(self))
        except BaseException:
            transport.close()
            raise
        self.auth, self.auth_data = ready.auth, ready.auth_data

    def _start(self) -> None:
        self._outbox.start(self._transport)
        self.closed_error = None
        self.last_received_at = monotonic()
        self._watch.start()
        self._reader = _supervisor.job(f"nsq_fast-reader-{self.address}", self._read_loop)
        self._reader.start()
        version = printable(self.info.version)
        logger.info("%s: connected, version %s, %s", self.address, version, self.session.dialect.name)

    def subscribe(
        self,
        topic: str,
        channel: str,
        *,
        partition: int | None = None,
        ordered: bool = False,
        advanced: bool = False,
    ) -> None:
        """Subscribe and wait for the server's OK. The options are for redesigned servers: see ``Session.sub``.

        Raises the ServerError of a refusal (the connection ends with it), ConnectionLost, or LocalProtocolError
        for what the server does not know (nothing is sent then).
        """
        self._thread.check("Connection.subscribe()")
        self._check_open()
        waiter = _Waiter()
        self._outbox.write(
            self.session.sub(topic, channel, partition=partition, ordered=ordered, advanced=advanced, token=waiter)
        )
        self.partition = partition
        waiter.wait(self.config.connect_timeout)
        if not waiter.ready():
            error = ConnectionLost(f"{self.address}: no reply to SUB within {self.config.connect_timeout} s")
            self.close(error)
            raise error
        waiter.get()

    # Commands

    def write(self, data: bytes) -> None:
        """Queue bytes; they leave at the end of this turn of the hub. Raises ConnectionLost when closed."""
        self._thread.check("Connection.write()")
        self._check_open()
        self._outbox.write(data)

    def request(self, data: bytes, command: str, token: Any) -> None:
        """Queue a command that has a reply: ``on_reply`` or ``on_failed`` gets ``token``, in the order of requests.

        Raises ConnectionLost when closed, LocalProtocolError when the server does not know ``command``; nothing
        is sent then, and the owner hears nothing of ``token``.
        A partition in ``data`` is not seen here: ask ``session.dialect.has_partitions`` before it is put in.
        """
        if self.closed_error is not None:
            self._check_open()
        self.session.expect(command, token)
        self._outbox.write(data)

    def send_if_idle(self, data: bytes) -> bool:
        """Send a command at once, if no reply is due and nothing waits to be sent; whether that was so.

        ``session.expect`` has to follow before another greenlet runs.
        """
        return self.closed_error is None and self.session.is_idle and self._outbox.send_alone(data)

    def await_reply(self) -> bytes | None:
        """Wait for the next reply in the calling greenlet, if only one is due: then the reader need not wake up.

        What it returns is for ``take_reply``, at once. None: it is all left to the reader.
        """
        if self.session.pending_count != 1 or self._outbox.is_scheduled:
            return None
        transport = self._transport
        if transport.receiver is None:
            return None
        try:
            data = transport.recv_at_once()
            return transport.recv_for_reader() if data is None else data
        except Exception as error:
            transport.cancel_recv(error)  # it is the reader that ends the connection
            return None

    def take_reply(self, data: bytes) -> None:
        """Deal with what ``await_reply`` has returned: ``on_reply`` is called, or the owner hears of what it is."""
        token = self.session.receive_ok(data)
        if token is None:
            try:
                self._received(data)
            except Exception as error:
                self._transport.cancel_recv(error)
        else:
            self.last_received_at = monotonic()
            self._owner.on_reply(self, token, b"OK")

    def set_rdy(self, count: int) -> None:
        """RDY, unless it was the last one sent or the connection is closing."""
        self._thread.check("Connection.set_rdy()")
        self._check_open()
        if count != self.session.rdy and not self.session.is_closing:
            self._outbox.write(self.session.set_rdy(count))

    def start_close(self) -> None:
        """CLS: no more messages, please. ``on_close_wait`` follows; messages may still come before it."""
        self._thread.check("Connection.start_close()")
        self._check_open()
        if not self.session.is_closing:
            self._outbox.write(self.session.cls())

    def drain_writes(self, timeout: float | None = None) -> bool:
        """Wait until everything queued was handed to the system; False if it was not within ``timeout`` seconds."""
        return self._outbox.drain(timeout)

    # Reading, in the reader greenlet or in its place

    def _read_loop(self) -> None:
        reason: NsqError = ConnectionClosed(f"{self.address}: the reader was killed")
        try:
            self._read()
        except NsqError as error:
            reason = error
        except OSError as error:
            reason = ConnectionLost(f"{self.address}: {error}")
            reason.__cause__ = error
        except Exception as error:
            reason = ConnectionLost(f"{self.address}: the owner failed: {error!r}")
            reason.__cause__ = error
            raise
        finally:
            self._end(reason)

    def _read(self) -> None:
        while True:
            if self.closed_error is not None:
                raise self.closed_error
            self._received(self._transport.recv())

    def read_for_reader(self, is_soon: bool = False) -> bool:
        """Do one read of the reader's in the calling greenlet, so that what comes needs no switch to get there.

        False if that is not possible: the reader is busy, or the connection is ending. True does not say that
        anything came: see ``stop_reading_for_reader``. Whenever the caller does anything else, the reader reads.

        Args:
            is_soon: the server was just told to send the next message.
        """
        transport = self._transport
        if self.closed_error is not None or transport.receiver is None:
            return False
        try:
            data = transport.recv_soon() if is_soon else None
            if data is None:
                data = transport.recv_for_reader()
            if data is not None:
                self._received(data)
        except Exception as error:
            transport.cancel_recv(error)
            return False
        return True

    def stop_reading_for_reader(self) -> None:
        """Make a ``read_for_reader`` that is waiting in another greenlet return."""
        self._transport.interrupt()

    def _received(self, data: bytes) -> None:
        if not data:
            raise self._outbox.error or ConnectionLost(f"{self.address}: closed by the server")
        session = self.session
        self.last_received_at = now = monotonic()
        events = session.receive(data, now)
        if session.message_count == len(events):
            if events:
                self.last_message_at = now
                self._owner.on_messages(self, events)
        else:
            self._dispatch(events)
        if session.failure is not None:
            raise session.failure

    def _dispatch(self, events: list[Any]) -> None:
        """Hand a mixed list to the owner, in order: runs of messages as lists."""
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
            elif event.token.__class__ is _Waiter:
                event.token.set(event.data)
            elif event.command == "CLS":
                self._owner.on_close_wait(self)
            else:
                on_reply(self, event.token, event.data)
        if run:
            self._hand_over(run)

    def _hand_over(self, messages: list[Message]) -> None:
        if self.closed_error is not None:
            return  # a callback has closed us: nobody could answer them any more
        self.last_message_at = self.last_received_at
        self._owner.on_messages(self, messages)

    def _handle(self, event: Any) -> None:
        kind = event.__class__
        if kind is Heartbeat:
            if self.closed_error is None:
                self._outbox.write(event.send)
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
        if token.__class__ is _Waiter:
            token.set_exception(error)
        elif token is not None:
            self._owner.on_failed(self, token, error)

    # Ending

    def close(self, error: NsqError | None = None, *, timeout: float = CLOSE_TIMEOUT) -> None:
        """Close, and wait until ``on_disconnect`` was called (not when called from a callback). Idempotent.

        Without ``error`` what is queued is flushed first, and replies that are on their way are taken,
        within ``timeout`` seconds. With ``error`` the connection is dropped at once.
        """
        self._thread.check("Connection.close()")
        if self._reader is None:
            self._cancel_connect(error or ConnectionClosed("closed by us"))
            return
        if self.closed_error is None:
            self._is_graceful = error is None
            self._close_timeout = timeout
            self._stop_reading(error or ConnectionClosed(f"{self.address}: closed by us"))
        current = getcurrent()
        if current is not self._reader and current is not get_hub():
            self._ended.wait()

    def _cancel_connect(self, error: NsqError) -> None:
        self._has_begun = True
        if self._connecting is not None and self._connecting is not getcurrent():
            get_hub().loop.run_callback(self._throw_into_connect, error)

    def _throw_into_connect(self, error: NsqError) -> None:
        if self._connecting is not None:
            self._connecting.throw(error)

    def _stop_reading(self, reason: NsqError) -> None:
        if self.closed_error is None:
            self.closed_error = reason
            if not self._is_graceful:
                self._outbox.stop()  # what is sent from now on would count as sent, and most likely be lost
            self._transport.cancel_recv(reason)

    def _write_failed(self, error: ConnectionLost, is_peer_gone: bool) -> None:
        # A server that closes after a fatal error may have sent the reason: let the reader find it, and the
        # end of the stream behind it. A peer that only takes nothing will not end the stream.
        if not is_peer_gone:
            self._stop_reading(error)

    def _silent(self) -> None:
        self._stop_reading(HeartbeatMissed(f"{self.address}: nothing received for two heartbeat intervals"))

    def _end(self, reason: NsqError) -> None:
        """The close sequence; runs once, as the last thing the reader greenlet does.

        1. refuse further commands, stop the timer;
        2. if we closed it: flush what is queued, say that nothing follows, take the replies that still come;
        3. close the socket;
        4. report every command without a reply, then the end itself.
        """
        if self._ended.is_set():
            return  # forked() ended it
        self.closed_error = reason
        self._watch.stop()
        try:
            if self._is_graceful:
                self._finish_conversation()
        finally:
            self._outbox.stop()
            self._transport.close()
            self._report(reason)

    def forked(self) -> None:
        """In the child of a fork: the connection is the parent's. Its owner hears nothing more."""
        self.closed_error = ConnectionClosed(f"{self.address}: the connection belongs to the process that forked")
        self._ended.set()
        self._watch.stop()
        self._outbox.stop()

    def _finish_conversation(self) -> None:
        # Closing with unread input makes the kernel reset the connection, and the peer may lose our last FIN
        # with it. So: half-close, and read until the peer has closed too.
        limit = Timeout(self._close_timeout)
        limit.start()
        try:
            if self._outbox.drain(None):
                self._transport.end_writing()
                while self._take_late_replies():
                    pass
        except Timeout as timeout:
            if timeout is not limit:
                raise
            logger.warning("%s: closed after %s s without the server's consent", self.address, self._close_timeout)
        except (NsqError, OSError) as error:
            logger.info("%s: while closing: %s", self.address, error)
        finally:
            limit.close()

    def _take_late_replies(self) -> bool:
        try:
            data = self._transport.recv()
        except NsqError as error:
            if error is self.closed_error:
                return True  # a wake-up that was meant for the read before
            raise
        if data:
            self._dispatch(self.session.receive(data))
        return bool(data)

    def _report(self, reason: NsqError) -> None:
        (lost,) = self.session.receive(b"")
        for command, token in lost.pending:
            self._report_pending(command, token, reason, outcome_unknown=lost.executed is None)
        logger.info("%s: disconnected: %s", self.address, reason)
        try:
            self._owner.on_disconnect(self, reason)
        finally:
            self._ended.set()

    def _report_pending(self, command: str, token: Any, reason: NsqError, *, outcome_unknown: bool) -> None:
        text = f"{self.address}: the connection ended before the reply to {command}: {reason}"
        error = lost_error(text, outcome_unknown)
        error.__cause__ = reason
        try:
            self._failed(token, error)
        except Exception:  # the others must still hear of theirs
            logger.exception("%s: on_failed", self.address)
