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
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar

from gevent import Timeout
from gevent.socket import gethostname

from nsq_fast._codec import fin_columns, req_columns
from nsq_fast._frame import Columns, join_columns
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import ConnectionLost, LocalProtocolError, NsqError
from nsq_fast.log_events import DISCONNECTED
from nsq_fast.names import Address
from nsq_fast.protocol.dialect import Dialect
from nsq_fast.protocol.identify import ServerInfo
from nsq_fast.protocol.session import Session

from .columns.intake import ColumnIntake
from .columns.leaving import CLOSE_TIMEOUT, leave
from .columns.opening import subscribe
from .columns.stream import NO_WAIT
from .net.handshake import connecting, shake_hands
from .net.transport import Transport
from .owner_thread import OwnerThread

logger = logging.getLogger(__name__)

SubscriptionT = TypeVar("SubscriptionT", bound="ColumnSubscription")


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
        self._options: dict[str, Any] = {"partition": partition, "ordered": ordered, "advanced": advanced}
        self._thread = OwnerThread()
        self._intake = ColumnIntake(address, self.session, self.config, ordered=ordered)
        self._stream = self._intake.stream
        self.unfinished = self._intake.unfinished

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<ColumnSubscription {self.topic}/{self.channel} at {self.address} {state}>"

    @property
    def is_open(self) -> bool:
        """Whether it may be read and answered."""
        return self._stream.is_open

    @property
    def last_received_at(self) -> float:
        """``time.monotonic()`` of the last bytes; 0.0 before ``open``."""
        return self._stream.last_received_at

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
        return self._intake.held.count

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
                transport = Transport.connect(self.address, self.config)
                self._stream.begin(transport)
                self.local_address = transport.local_address
                shake_hands(transport, self.session)
                refusal = subscribe(transport, self.session, self.topic, self.channel, self._options)
            if refusal is not None:
                raise refusal
        except BaseException:
            self.abort()
            raise
        self._intake.begin()

    # Reading

    def set_rdy(self, count: int) -> None:
        """RDY: how many messages may be in flight. Raises LocalProtocolError above the server's ``max_rdy_count``."""
        self._thread.check("ColumnSubscription.set_rdy()")
        if count != self.session.rdy:
            self._stream.send(self.session.set_rdy(count))

    def fetch(self, timeout: float, at_least: int = 1) -> Columns:
        """The next messages: ``at_least`` so many, and all that came with the last of them; what there is, or
        nothing, after ``timeout`` seconds.

        Raises ConnectionLost, RemoteProtocolError, or the ServerError that ended the conversation. The connection is
        closed then.
        """
        self._thread.check("ColumnSubscription.fetch()")
        intake = self._intake
        parts, intake.early = intake.early, []
        count = sum(part.count for part in parts)
        deadline = monotonic() + timeout
        wait = max(timeout, NO_WAIT)
        # What comes need not be messages: one that is too large may come again and again, without a pause.
        while count < at_least and wait > 0:
            columns = intake.take(wait, at_least - count)
            if columns is None:
                break
            wait = deadline - monotonic()
            if columns.count:
                parts.append(columns)
                count += columns.count
        return join_columns(parts)

    # Answering

    def finish(self, ids: bytes | memoryview) -> None:
        """FIN of each of these ids (16 bytes each, side by side, as in ``Columns.ids``) in one write.

        Returns when the system has taken the bytes; ``close`` tells whether the server has.
        """
        self._thread.check("ColumnSubscription.finish()")
        self._intake.held.remove(ids)
        self._stream.send(fin_columns(ids))

    def requeue(self, ids: bytes | memoryview, delay_ms: int = 0) -> None:
        """REQ of each of these ids: to be delivered again after ``delay_ms``."""
        self._thread.check("ColumnSubscription.requeue()")
        self._intake.held.remove(ids)
        self._stream.send(req_columns(ids, delay_ms))

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
                leave(self._intake, self.session)
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the socket. What is in flight stays so until the server's timeout. Idempotent."""
        self._thread.check("ColumnSubscription.abort()")
        self._stream.close()

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
            logger.info("%s: closed after an error: %s", self.address, error, extra=DISCONNECTED)
