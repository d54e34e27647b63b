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
from typing import TYPE_CHECKING, Any

from gevent import Timeout, get_hub, getcurrent
from gevent.event import Event
from gevent.socket import gethostname
from greenlet import greenlet

from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    ConnectionClosed,
    ConnectionLost,
    HeartbeatMissed,
    LocalProtocolError,
    NsqError,
)
from nsq_fast.log_events import CLOSE_FAILED, CLOSE_TIMED_OUT, CONNECTED, DISCONNECTED, INTERNAL_ERROR
from nsq_fast.names import Address
from nsq_fast.printable import printable
from nsq_fast.protocol.identify import AuthInfo
from nsq_fast.protocol.session import Session
from nsq_fast.runtime.fork import tell_forks
from nsq_fast.runtime.supervised import Job, Supervisor

from .handshake import connecting, shake_hands
from .incoming import Incoming, Waiter
from .outbox import Outbox
from .responder import lost_error
from .transport import Transport
from .watch import SilenceWatch

if TYPE_CHECKING:
    from .owner import ConnectionOwner

logger = logging.getLogger(__name__)
_supervisor = Supervisor(logger)  # the owner hears of faults by on_disconnect

# A server is as patient with a silent client. nsqio/nsq: nsqd/protocol_v2.go, IOLoop
SILENT_INTERVALS = 2
# A heartbeat may be late by this much before anybody is told: servers send it by a timer of their own.
OVERDUE_INTERVALS = 1.25
CLOSE_TIMEOUT = 2.0


class Connection(Incoming):
    """A connection to one nsqd, made by ``connect()`` and used once.

    Attributes:
        address: the nsqd.
        local_address: our end; None before ``connect``.
        session: the protocol state.
        closed_error: why the connection ended or is ending; None while it is open.
        auth, auth_data: the reply to AUTH, parsed and as it came; None when there was none.
        topic, partition: what is subscribed to, which its messages show too; None before, or when none was named.
    """

    def __init__(self, address: Address, config: ConnectionConfig, owner: ConnectionOwner[Connection]) -> None:
        self.config = config if config.hostname is not None else config.replace(hostname=gethostname())
        session = Session(self.config, responder=self)
        outbox = Outbox(session.fin_many, config.write_timeout, self._write_failed, self._answers_left)
        super().__init__(address, session, outbox, owner)
        self.local_address: Address | None = None
        self.auth: AuthInfo | None = None
        self.auth_data: bytes | None = None
        self.topic: str | None = None
        self.partition: int | None = None
        self._has_begun = False
        self._connecting: greenlet | None = None
        self._reader: Job | None = None
        limit = SILENT_INTERVALS * config.heartbeat_interval
        overdue_after = OVERDUE_INTERVALS * config.heartbeat_interval
        on_overdue = getattr(owner, "on_heartbeat_overdue", None)
        self._watch = SilenceWatch(
            limit,
            lambda: self.last_received_at,
            self._silent,
            overdue_after,
            None if on_overdue is None else lambda: on_overdue(self),
        )
        self._is_graceful = False
        self._close_timeout = CLOSE_TIMEOUT
        self._ended = Event()
        tell_forks(self)

    def __repr__(self) -> str:
        return f"<Connection {self.address} {'open' if self.is_open else 'closed'}>"

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
        logger.info("%s: connected, version %s, %s", self.address, version, self.session.dialect.name, extra=CONNECTED)

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
        waiter = Waiter()
        self._outbox.write(
            self.session.sub(topic, channel, partition=partition, ordered=ordered, advanced=advanced, token=waiter)
        )
        self.topic, self.partition = topic, partition
        waiter.wait(self.config.connect_timeout)
        if not waiter.ready():
            error = ConnectionLost(f"{self.address}: no reply to SUB within {self.config.connect_timeout} s")
            self.close(error)
            raise error
        waiter.get()

    # The reader greenlet

    def _read_loop(self) -> None:
        reason: NsqError = ConnectionClosed(f"{self.address}: the reader was killed")
        try:
            self._read()
        except NsqError as error:
            reason = error
        except OSError as error:
            reason = ConnectionLost(f"{self.address}: {error}")
            reason.is_abrupt = isinstance(error, ConnectionError)  # a reset; not a network that was lost
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
            self.received(self._transport.recv())

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
            logger.warning(
                "%s: closed after %s s without the server's consent",
                self.address,
                self._close_timeout,
                extra=CLOSE_TIMED_OUT,
            )
        except (NsqError, OSError) as error:
            logger.info("%s: while closing: %s", self.address, error, extra=CLOSE_FAILED)
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
        for number, (command, token) in enumerate(lost.pending):
            text = f"{self.address}: the connection ended before the reply to {command}: {reason}"
            error = lost_error(text, outcome_unknown=lost.executed is None)
            error.is_abrupt = isinstance(reason, ConnectionLost) and reason.is_abrupt
            error.was_first = number == 0
            error.__cause__ = reason
            self._report_pending(token, error)
        logger.info("%s: disconnected: %s", self.address, reason, extra=DISCONNECTED)
        try:
            self._owner.on_disconnect(self, reason)
        finally:
            self._ended.set()

    def _report_pending(self, token: Any, error: ConnectionLost) -> None:
        try:
            self._failed(token, error)
        except Exception:  # the others must still hear of theirs
            logger.exception("%s: on_failed", self.address, extra=INTERNAL_ERROR)
