"""The connections of a producer: to each nsqd a few, always connected or trying to be.

A Link is the place of one connection. Its greenlet connects, waits for the
end of the connection, pauses and connects again, for as long as the link
lives: pauses grow, but nothing gives up. While publishes wait for a
connection, a link pauses no longer than ``retry_max_delay``.

The pool knows which links are open; what is sent over them, and what happens
to publishes whose link breaks, is for the ``LinkHandler`` to say.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterator
from time import monotonic
from typing import Any, Protocol

from gevent import joinall
from gevent.event import Event

from nsq_fast.config import ConnectionConfig, ProducerConfig
from nsq_fast.errors import ConnectionClosed, ConnectionLost, NsqError, ServerError
from nsq_fast.names import Address
from nsq_fast.protocol.backoff import ReconnectDelay
from nsq_fast.protocol.retry import classify
from nsq_fast.runtime.net.connection import Connection
from nsq_fast.runtime.supervised import FAULTS, Supervisor

logger = logging.getLogger(__name__)

# A connection that lasted so long (s) was a good one: the next pause starts from the shortest again.
GOOD_AFTER = 1.0
# A reply that is due at so many looks in a row is late. Looks are counted and not seconds, so that a time in which this
# process did not run, and read nothing, does not count against the server.
LATE_AFTER_LOOKS = 8


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
        """It has not answered for too long; it takes no publishes until it has answered all that it owes."""

    def link_recovered(self, link: Link) -> None:
        """It has answered: it takes publishes again. Called once for each ``link_stalled``, or ``link_lost`` is."""

    def replied(self, conn: Connection, token: Any, data: bytes) -> None:
        """A publish was answered OK."""

    def refused(self, conn: Connection, token: Any, error: NsqError) -> None:
        """A publish failed, or its connection broke."""

    def has_waiting(self) -> bool:
        """Whether publishes wait for a connection."""

    def server_error(self, conn: Connection, error: ServerError) -> None:
        """An error frame came."""


class Link:
    """One connection to one nsqd, renewed for ever.

    Attributes:
        conn: the connection, while there is one.
        overdue: publishes that timed out on it and whose replies are still owed.
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
        self._patience = config.retry_max_delay
        self._delay = ReconnectDelay(config.max_backoff_duration, random=random.random, good_after=GOOD_AFTER)
        self._has_failed = False
        self._is_blameless = False
        self._sample: tuple[Any, int] = (None, 0)
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
            logger.info("[%s] connected", self.address)
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
        logger.log(level, "[%s] cannot connect, will keep trying: %s", self.address, error)
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
        token, attempts = self._sample
        if token is None or token.conn is not conn or token.attempts != attempts:  # it was answered
            token = conn.session.last_token
            self._sample = (token, 0 if token is None else token.attempts)
            self._looks = 0
            return False
        self._looks += 1
        return self._looks >= LATE_AFTER_LOOKS

    def stall(self, limit: float) -> None:
        """Take no publishes until all replies that are due now have come; ``limit`` seconds were too long for one."""
        assert self.conn is not None
        self.owed = self.conn.session.pending_count
        self.on_reply = self._late_reply
        self._sample = (None, 0)
        self.error = ConnectionLost(f"{self.address}: connected, but has not answered for {limit:.3g} s")
        logger.warning("[%s] has not answered for %.3g s, gets no publishes until it does", self.address, limit)
        self._handler.link_stalled(self)

    def _late_reply(self, conn: Connection, token: Any, data: bytes) -> None:
        self._handler.replied(conn, token, data)
        self._has_answered(conn)

    def _has_answered(self, conn: Connection) -> None:
        if conn is self.conn and self.owed:
            self.owed -= 1
            if not self.owed:
                logger.info("[%s] answers again", self.address)
                self.on_reply = self._handler.replied
                self.error = None
                self._handler.link_recovered(self)

    # What the connection tells its owner

    def on_failed(self, conn: Connection, token: Any, error: NsqError) -> None:
        if isinstance(error, ServerError):
            self._handler.server_error(conn, error)
            if conn.session.dialect.is_fatal(error, token.command):
                # The server closes now. If what we sent was to blame, there is nothing to wait for.
                self._is_blameless = not classify(error).retry
                self.drop(conn, error)
        else:
            self.drop(conn, error)
        self._handler.refused(conn, token, error)
        self._has_answered(conn)

    def on_error(self, conn: Connection, error: ServerError) -> None:
        self._handler.server_error(conn, error)

    def on_disconnect(self, conn: Connection, error: NsqError) -> None:
        if self.conn is conn and not self._stopping.is_set():
            logger.warning("[%s] connection lost: %s", self.address, error)
        self.drop(conn, error)
        self._lost.set()

    def on_messages(self, conn: Connection, messages: list[Any]) -> None:
        """A producer never subscribes."""

    def on_answer_failed(self, conn: Connection, error: ServerError, message_id: bytes | None) -> None:
        self._handler.server_error(conn, error)

    def on_heartbeat(self, conn: Connection) -> None:
        pass

    def on_message_skipped(self, conn: Connection, message: Any, error: NsqError) -> None:
        pass

    def on_close_wait(self, conn: Connection) -> None:
        pass


class Pool:
    """The links to all nsqds that a producer uses.

    Attributes:
        open: the links that take publishes now: connected, and not stalled. The list object stays the same.
    """

    def __init__(self, connection: ConnectionConfig, config: ProducerConfig, handler: LinkHandler) -> None:
        self.open: list[Link] = []
        self._links: dict[Address, list[Link]] = {}
        self._connection_config = connection
        self._config = config
        self._handler = handler

    def __iter__(self) -> Iterator[Link]:
        for links in list(self._links.values()):
            yield from links

    def add(self, addresses: Collection[Address]) -> None:
        """Have links to these nsqds."""
        for address in addresses:
            if address not in self._links:
                links = [
                    Link(address, self._connection_config, self._config, self._handler)
                    for _ in range(self._config.connections_per_nsqd)
                ]
                self._links[address] = links
                for link in links:
                    link.start()

    def retain(self, addresses: Collection[Address]) -> None:
        """Close the idle links to all other nsqds; the busy ones stay until they are asked about again."""
        for address in [known for known in self._links if known not in addresses]:
            if not any(link.conn is not None and link.conn.session.pending_count for link in self._links[address]):
                for link in self._links.pop(address):
                    link.stop()

    def hurry(self) -> None:
        """Publishes wait for a connection."""
        for link in self:
            link.hurry()

    def link_of(self, conn: Connection) -> Link | None:
        """The link whose connection this is now."""
        return next((link for link in self if link.conn is conn), None)

    def are_down(self, addresses: Collection[Address]) -> bool:
        """Whether none of these nsqds takes publishes, as far as has been tried."""
        links = [link for address in addresses for link in self._links.get(address, ())]
        return all(link.error is not None for link in links)

    def are_tried(self, addresses: Collection[Address]) -> bool:
        """Whether each of these nsqds is connected, or could not be."""
        links = [link for address in addresses for link in self._links.get(address, ())]
        return all(link.conn is not None or link.error is not None for link in links)

    def errors(self) -> list[tuple[Address, NsqError]]:
        """Why nsqds take no publishes: the last error of each of those."""
        return [(link.address, link.error) for link in self if link.error is not None]

    @property
    def connected(self) -> list[Link]:
        """The links with a connection, the stalled ones among them."""
        return [link for link in self if link.conn is not None]

    def close(self, timeout: float | None) -> None:
        """Close every connection after flushing what was written to it."""
        links = list(self)
        for link in links:
            link.stop()
        self._links.clear()
        joinall([link.greenlet for link in links], timeout)
