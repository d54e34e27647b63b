"""One connection of a producer to one nsqd, renewed for ever.

A Link is the place of one connection. Its greenlet connects, waits for the
end of the connection, pauses and connects again, for as long as the link
lives: pauses grow, but nothing gives up. While publishes wait for a
connection, a link pauses no longer than ``retry_max_delay``, nor than ``LONGEST_LEADER_PAUSE``.

A link whose server does not reply for too long is stalled: it takes no
publishes until it has replied to everything that it owed then.
"""

from __future__ import annotations

import logging
import random
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from gevent.event import Event

from nsq_fast.config import ConnectionConfig, ProducerConfig
from nsq_fast.errors import ConnectionClosed, ConnectionLost, NsqError, ServerError
from nsq_fast.log_events import CONNECT_FAILED, CONNECTED, CONNECTION_LOST, CONNECTION_RECOVERED, CONNECTION_STALLED
from nsq_fast.names import Address
from nsq_fast.protocol.backoff import ReconnectDelay
from nsq_fast.protocol.retry import LONGEST_LEADER_PAUSE, classify
from nsq_fast.runtime.net.connection import Connection
from nsq_fast.runtime.supervised import FAULTS, Supervisor

from .publish import Command

logger = logging.getLogger(__name__)

# A connection that lasted so long (s) was a good one: the next pause starts from the shortest again.
GOOD_AFTER = 1.0
# A reply that is due at so many looks in a row is late. Looks are counted and not seconds, so that a time in which this
# process did not run, and read nothing, does not count against the server.
LATE_AFTER_LOOKS = 8


if TYPE_CHECKING:

    class LinkHandler(Protocol):
        """What the producer does with the news of its links. Called in greenlets of the links; must not block."""

        supervisor: Supervisor

        def link_opened(self, link: Link) -> None:
            """It can take publishes from now on."""

        def link_failed(self, link: Link) -> None:
            """It could not connect; it goes on trying."""

        def link_lost(self, link: Link, error: NsqError) -> None:
            """It takes no more publishes; called once for each ``link_opened``."""

        def link_stalled(self, link: Link) -> None:
            """It has not replied for too long; it takes no publishes until it has sent all the replies that it owes."""

        def link_recovered(self, link: Link) -> None:
            """It has replied: it takes publishes again. Called once for each ``link_stalled``, or ``link_lost`` is."""

        def replied(self, conn: Connection, command: Command, data: bytes) -> None:
            """The server replied OK to a command."""

        def refused(self, conn: Connection, command: Command, error: NsqError) -> None:
            """A command failed, or its connection broke."""

        def has_waiting(self) -> bool:
            """Whether publishes wait for a connection."""

        def server_error(self, conn: Connection, error: ServerError) -> None:
            """An error frame came."""


class _NoConsumer:
    """What a connection tells of messages and subscriptions: a producer has none."""

    def on_messages(self, conn: Connection, messages: list[Any]) -> None:
        pass

    def on_message_skipped(self, conn: Connection, message: Any, error: NsqError) -> None:
        pass

    def on_heartbeat(self, conn: Connection) -> None:
        pass

    def on_close_wait(self, conn: Connection) -> None:
        pass


class Link(_NoConsumer):
    """One connection to one nsqd, renewed for ever.

    Attributes:
        conn: the connection, while there is one.
        overdue: commands that it has not replied to and somebody waits for no longer.
        owed: replies that it has to send before it takes publishes again; 0 while it is not stalled.
        error: why it takes no publishes; None while it does.
        greenlet: connects; it ends some time after ``stop``.
    """

    def __init__(
        self, address: Address, connection: ConnectionConfig, config: ProducerConfig, handler: LinkHandler
    ) -> None:
        self.address = address
        self.conn: Connection | None = None
        self.overdue = 0
        self.owed = 0
        self.error: NsqError | None = None
        self.on_reply = handler.replied  # straight through: this is the path of every publish
        self._connection_config = connection
        self._handler = handler
        self._patience = min(config.retry_max_delay, LONGEST_LEADER_PAUSE)
        self._delay = ReconnectDelay(config.max_backoff_duration, random=random.random, good_after=GOOD_AFTER)
        self._has_failed = False
        self._is_blameless = False
        self._sample: Command | None = None
        self._looks = 0
        self._lost = Event()
        self._hurry = Event()
        self._stopping = Event()
        self.greenlet = handler.supervisor.loop(f"nsq_fast-link-{address}", self._connect_loop)

    def __repr__(self) -> str:
        return f"<Link {self.address} {'open' if self.conn else 'down'}>"

    @property
    def is_down(self) -> bool:
        """Whether it is not connected, and that was tried."""
        return self.conn is None and self.error is not None

    def start(self) -> None:
        """Begin to connect."""
        self.greenlet.start()

    def stop(self) -> None:
        """Connect no more, and close the connection after what was written to it is flushed. Does not wait for that."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._hurry.set()
        if self.conn is not None:
            self._handler.supervisor.job(f"nsq_fast-close-{self.address}", self.conn.close).start()
        elif self.greenlet:
            self.greenlet.kill(block=False)

    def hurry(self) -> None:
        """Publishes wait: cut a long pause short."""
        self._hurry.set()

    def _connect_loop(self) -> None:
        while not self._stopping.is_set():
            self._lost.clear()
            conn = Connection(self.address, self._connection_config, self)
            try:
                self._live(conn)
            except FAULTS as fault:
                conn.close(ConnectionClosed(f"{self.address}: nsq_fast itself failed: {fault!r}"))
                raise
            self._pause()

    def _live(self, conn: Connection) -> None:
        """Connect, and wait for the end of the connection."""
        try:
            conn.connect()
        except NsqError as error:
            self._connect_failed(error)
        else:
            self._connected(conn)
            self._lost.wait()

    def _connected(self, conn: Connection) -> None:
        self._delay.connected(monotonic())
        if self._stopping.is_set():
            conn.close()
        elif not self._lost.is_set():
            logger.info("[%s] connected", self.address, extra=CONNECTED)
            self.error = None
            self._has_failed = False
            self.overdue = self.owed = 0
            self.on_reply = self._handler.replied
            self.conn = conn
            self._handler.link_opened(self)

    def _connect_failed(self, error: NsqError) -> None:
        self.error = error
        level = logging.DEBUG if self._has_failed else logging.WARNING
        self._has_failed = True
        logger.log(level, "[%s] cannot connect, will keep trying: %s", self.address, error, extra=CONNECT_FAILED)
        self._handler.link_failed(self)

    def _pause(self) -> None:
        if self._is_blameless:
            self._is_blameless = False
            return
        delay = self._delay.next(monotonic())
        patience = min(delay, self._patience)
        self._hurry.clear()
        self._stopping.wait(patience)
        if delay > patience and not self._handler.has_waiting() and not self._stopping.is_set():
            self._hurry.wait(delay - patience)

    def drop(self, conn: Connection, error: NsqError) -> None:
        """Offer the connection to publishes no more. What it still owes is reported by ``on_failed``."""
        if self.conn is conn:
            self.conn = None
            self.owed = 0
            self.error = error
            self._handler.link_lost(self, error)

    # Late replies

    def is_late(self) -> bool:
        """Whether a reply was due at each of the last ``LATE_AFTER_LOOKS`` calls. Call it at even intervals."""
        conn = self.conn
        if conn is None or self.owed:
            return False
        if self._sample is None or self._sample.conn is not conn:  # the reply has come
            tokens = conn.session.tokens()
            self._sample = tokens[-1] if tokens else None
            self._looks = 0
            return False
        self._looks += 1
        return self._looks >= LATE_AFTER_LOOKS

    def stall(self, limit: float) -> None:
        """Take no publishes until all replies that are due now have come; ``limit`` seconds were too long for one."""
        assert self.conn is not None
        self.owed = self.conn.session.pending_count
        self.on_reply = self._late_reply
        self._sample = None
        self.error = ConnectionLost(f"{self.address}: connected, but has not replied for {limit:.3g} s")
        logger.warning(
            "[%s] has not replied for %.3g s, gets no publishes until it does",
            self.address,
            limit,
            extra=CONNECTION_STALLED,
        )
        self._handler.link_stalled(self)

    def _late_reply(self, conn: Connection, command: Command, data: bytes) -> None:
        self._handler.replied(conn, command, data)
        self._has_replied(conn)

    def _has_replied(self, conn: Connection) -> None:
        if conn is self.conn and self.owed:
            self.owed -= 1
            if not self.owed:
                logger.info("[%s] replies again", self.address, extra=CONNECTION_RECOVERED)
                self.on_reply = self._handler.replied
                self.error = None
                self._handler.link_recovered(self)

    # What the connection tells its owner

    def on_failed(self, conn: Connection, command: Command, error: NsqError) -> None:
        if isinstance(error, ServerError):
            self._handler.server_error(conn, error)
            if conn.session.dialect.is_fatal(error, command.name):
                # The server closes now. If what we sent was to blame, there is nothing to wait for.
                self._is_blameless = not classify(error).retry
                self.drop(conn, error)
        else:
            self.drop(conn, error)
        self._handler.refused(conn, command, error)
        self._has_replied(conn)

    def on_error(self, conn: Connection, error: ServerError) -> None:
        self._handler.server_error(conn, error)

    def on_disconnect(self, conn: Connection, error: NsqError) -> None:
        if self.conn is conn and not self._stopping.is_set():
            logger.warning("[%s] connection lost: %s", self.address, error, extra=CONNECTION_LOST)
        self.drop(conn, error)
        self._lost.set()

    def on_answer_failed(self, conn: Connection, error: ServerError, message_id: bytes | None) -> None:
        self._handler.server_error(conn, error)
