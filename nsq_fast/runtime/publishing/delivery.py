"""Commands on the wire: what is sent, what comes back, and what that means for the publishes in them.

A command is written to an open link. Its reply ends its publishes; a failure
goes, for each of them, through the table in ``protocol.retry``; a deadline ends
a publish wherever it is. A command whose publishes ended while its reply was
still owed stays with its connection, in its place, and the late reply is taken
silently; until then its messages keep their share of ``max_pending``.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable

import msgspec
from gevent.event import Event

from nsq_fast._codec import traced_reply
from nsq_fast.config import ConnectionConfig, LookupConfig, ProducerConfig
from nsq_fast.errors import ConfigError, ConnectionClosed, ConnectionLost, NoNsqd, NsqError, ServerError
from nsq_fast.names import Address
from nsq_fast.protocol.dialect import Dialect
from nsq_fast.protocol.publish import sent, stored
from nsq_fast.protocol.retry import RetryPolicy, publish_failed, retry_delay
from nsq_fast.protocol.wire_form import OK, PLAIN, Receipt, batch_command
from nsq_fast.runtime.net.connection import Connection
from nsq_fast.runtime.signals import emit, is_heard
from nsq_fast.runtime.supervised import Supervisor
from nsq_fast.runtime.trace import TraceLog, split_receipt

from .latency import PublishTiming
from .linger import Linger
from .link import LATE_AFTER_LOOKS, Link
from .outcomes import Outcomes
from .pending import Pending
from .pending_limit import PendingLimit
from .pool import Pool
from .publish import Command, Publish, Wakeups
from .reasons import final_error, timeout_error, why_nowhere
from .routes import Routes
from .seeking import Seeker
from .timers import TimerQueue

logger = logging.getLogger(__name__)


class Delivery:
    """Sends for the destinations, and hears of their links.

    Args:
        producer: in whose name signals are sent.
        own: the delivery to the producer's own cluster, where this one is to another: they have one pending limit.

    Attributes:
        pending: publishes that somebody waits for.
        pending_limit: the share of ``max_pending`` that is taken.
        news: set whenever a link opens, or lookup says where a topic lives.
        outcomes: how many publishes have ended, and how.
        timing: what publishes take; None while nobody asked for it.
        most, enough, limit: of one command, see ``protocol.publish.take_command``.
    """

    def __init__(
        self,
        producer: object,
        nsqds: Iterable[Address],
        lookupds: list[str],
        config: ProducerConfig,
        connection: ConnectionConfig,
        lookup: LookupConfig,
        trace: TraceLog,
        own: Delivery | None = None,
    ) -> None:
        self._producer = producer
        self._signals = producer.__dict__
        self._trace = trace
        self._policy = RetryPolicy(
            max_attempts=config.max_publish_attempts,
            retry_unknown_outcome=config.retry_unknown_outcome,
            base_delay=config.retry_base_delay,
            max_delay=config.retry_max_delay,
            awaits_leader=bool(lookupds),
        )
        self._attempt_limit = config.attempt_limit
        self.supervisor = Supervisor(logger, lambda error: emit(producer, "on_error", error=error))
        self.news = Event()
        self.wakeups: Wakeups = Wakeups() if own is None else own.wakeups
        self.pending = Pending(
            self.supervisor, self._time_out, config.attempt_limit / LATE_AFTER_LOOKS, self._look_at_links
        )
        self.pending_limit: PendingLimit = PendingLimit(config.max_pending) if own is None else own.pending_limit
        self.timers = TimerQueue(self.supervisor)
        self.pool = Pool(connection, config, self)
        self.routes = Routes(self.pool, nsqds, lookupds, lookup, config, self, self.news.set)
        self.linger = Linger(config, self.supervisor)
        self.lingers = config.linger > 0
        self.outcomes: Outcomes = Outcomes() if own is None else own.outcomes
        timing = PublishTiming(config.publish_timeout) if config.histograms else None
        self.timing: PublishTiming | None = timing if own is None else own.timing
        self.most = config.linger_max_messages if config.linger or config.coalesce else 1
        self.enough = min(config.linger_max_bytes, config.max_body_size)
        self.limit = config.max_body_size
        # What the destinations and links call goes straight to whom it concerns.
        self.hold = self.linger.hold
        self.release_hold = self.linger.release
        self.later = self.timers.add
        refresh = self.routes.refresh if lookupds else None
        self.seek = Seeker(self._policy, self.timers.add, self.pool.hurry, refresh).seek
        self.link_failed = self.routes.link_failed
        self.has_waiting = self.routes.has_waiting

    # Sending

    def send(self, command: Command, link: Link) -> None:
        """Write a command; its end is reported to its destination, possibly before this returns."""
        conn = command.conn = link.conn
        assert conn is not None
        publishes = command.publishes
        dialect = conn.session.dialect
        first = publishes[0]
        try:
            if command.partition is not None and not dialect.has_partitions:
                raise ConfigError(_no_partitions(command.partition, dialect))
            is_one = len(publishes) == 1
            if is_one:
                command.name, data = first.form.command(
                    command.destination.topic, first.body, command.partition, dialect
                )
            else:
                command.name, data = _encode_many(command, dialect)
            if command.name not in dialect.commands:
                dialect.require(command.name)
        except ConfigError as error:
            self.refused(conn, command, error)
            return
        # A caller that waits is about to read the reply itself: what the server waits for leaves at once.
        is_direct = is_one and (first.is_prompt or (first.promised is None and not self.wakeups.is_waking))
        if is_direct and conn.send_if_idle(data):
            conn.session.expect(command.name, command)
            first.attempt = command  # as ``sent`` has it, of one
            return
        sent(publishes, command)
        try:
            conn.request(data, command.name, command)
        except NsqError as error:
            if isinstance(error, ConnectionLost):
                link.drop(conn, error)
            self.refused(conn, command, error)

    # What comes back

    def replied(self, conn: Connection, command: Command, data: bytes) -> None:
        """The server replied OK to a command."""
        if command.conn is not conn:
            self._replied_after_all(command, data)
            return
        command.conn = None
        if data != OK:
            self._take_receipts(command, data, conn.address)
        if command.is_overdue:
            self.pool.has_replied_late(conn)
        publishes = command.publishes
        command.publishes = []
        pending_limit = self.pending_limit
        pending_limit.used -= publishes[0].weight if len(publishes) == 1 else len(publishes)
        if pending_limit.queue:
            pending_limit.give(0)
        partition = command.partition
        pending = self.pending
        waiting = []
        ended = stored(publishes)
        self.outcomes.stored += len(ended)
        if self.timing is not None and ended:
            self.timing.stored(ended[0])
        for publish in ended:
            pending.publishes.discard(publish)
            if partition is not None and publish.form is not PLAIN:
                publish.partition = partition
            if publish.waiter is not None:
                waiting.append(publish)
            elif publish.promised is not None or publish.group is not None:
                publish.wake(self.wakeups)
        if waiting:  # not the caller that has read this reply itself: it waits no longer
            self.wakeups.add_many(waiting)
        if pending.none_left is not None:
            pending.removed()
        command.destination.stored()
        if "on_response" in self._signals:
            emit(self._producer, "on_response", response=data)

    def _replied_after_all(self, command: Command, data: bytes) -> None:
        """A link that had stalled replies to a command whose publishes were tried elsewhere."""
        if data == OK:
            for publish in command.publishes:
                if not publish.done:
                    self.pool.owe(publish.attempt)
                    self.finish(publish, None)

    def _take_receipts(self, command: Command, data: bytes, nsqd: Address) -> None:
        """Give each publish what the server said of its records, and write that down."""
        publishes, topic = command.publishes, command.destination.topic
        traces = [publish.form.traces(publish.body) for publish in publishes]
        split = split_receipt(traced_reply(data), [pair for pairs in traces for pair in pairs])
        for publish, pairs in zip(publishes, traces, strict=True):
            receipts = [Receipt(*next(split), command.partition, nsqd) for _ in pairs]
            publish.receipts = publish.form.kept(receipts)
            if self._trace.is_on(topic):
                for receipt in publish.receipts:
                    self._trace.published(topic, receipt[:4], partition=receipt.partition, nsqd=receipt.nsqd)

    def refused(self, conn: Connection, command: Command, error: NsqError) -> None:
        """A command failed: each of its publishes is tried again, or fails."""
        if command.conn is not conn:
            return
        command.conn = None
        if command.is_overdue:
            self.pool.has_replied_late(conn)
        again: list[Publish] = []
        delay = 0.0
        is_stale = needs_lookup = False
        command.publishes = [part for publish in command.publishes for part in publish.split(self.pending)]
        for publish in command.publishes:
            if publish.done:
                publish.attempt = None
                self.pending_limit.give(publish.weight)
                continue
            is_shared = len(command.publishes) > 1
            verdict = publish.attempt_failed(error, self._policy, is_shared=is_shared, server=conn.address)
            is_stale |= verdict.leader
            needs_lookup |= verdict.refresh
            if verdict.retry:
                again.append(publish)
                if verdict.pause:
                    number = max(publish.attempts, 1)
                    pause = retry_delay(number, self._policy, random.random, for_leader=verdict.leader)
                    delay = max(delay, pause)
            else:
                self.finish(publish, final_error(publish, error))
        if needs_lookup:
            self.routes.refresh(command.destination.topic)
        command.destination.failed(command, again, delay, is_stale=is_stale)

    # The end of a publish

    def finish(self, publish: Publish, error: BaseException | None) -> None:
        """End a publish, well when ``error`` is None. It gives its room back now, or when its command is over."""
        if publish.attempt is None:
            self.pending_limit.give(publish.weight)
        if not publish.done:
            self.outcomes.ended(error)
        publish.end(error)
        if error is not None and publish.group is None and isinstance(publish.body, list):
            publish.end_batch()
        self.pending.publishes.discard(publish)
        self.pending.removed()
        publish.wake(self.wakeups)

    def give_up(self, command: Command, error: NsqError) -> None:
        """Wait no longer for the reply to a command: its publishes are tried again, or fail, with ``error``."""
        if command.conn is not None:
            self.refused(command.conn, command, error)

    def _time_out(self, publish: Publish) -> None:
        self.pool.owe(publish.attempt)
        self.routes.refresh(publish.topic)  # what did not reply may lead no longer
        for part in publish.split(self.pending):
            self.finish(part, timeout_error(part, self.pool, self.routes))

    def abandon(self, publish: Publish) -> None:
        """Its caller was interrupted. What was not sent yet will not be."""
        if not publish.done and publish.attempt is None:
            interrupted = ConnectionClosed("interrupted")
            self.finish(publish, publish_failed(publish.topic, interrupted, publish.attempts, publish.possibly_stored))

    def why_nowhere(self, publish: Publish) -> NoNsqd | None:
        """Why a publish cannot be sent now, if it is for want of a connection to an nsqd that takes it."""
        return why_nowhere(publish, self.pool, self.routes)

    def drain(self, timeout: float | None) -> None:
        """Wait until nothing is pending; after ``timeout`` seconds fail what is."""
        if self.pending.wait_for_none(timeout):
            return
        closed = ConnectionClosed("the producer was closed")
        for publish in list(self.pending.publishes):
            if not publish.done:
                for part in publish.split(self.pending):
                    self.finish(part, publish_failed(part.topic, closed, part.attempts, part.may_be_stored))

    def close(self, timeout: float | None) -> None:
        """Close the connections. Nothing may be pending."""
        self.routes.stop()
        self.pending.stop()
        self.timers.stop()
        self.pool.close(timeout)

    # Links that owe replies

    def _look_at_links(self) -> None:
        for link in [link for link in self.pool.open if link.is_late()]:
            link.stall(self._attempt_limit)

    def _relieve(self, links: Iterable[Link]) -> None:
        """Try what stalled links owe at other ones, where there are any and the publishes may be tried again."""
        for link in links:
            conn, error = link.conn, link.error
            if conn is None or error is None or not link.owed:
                continue
            for command in conn.session.tokens():
                if command.conn is not conn:
                    continue
                live = [publish for publish in command.publishes if not publish.done]
                if not command.destination.can_move():
                    self.routes.refresh(command.destination.topic)
                elif live and all(publish.may_retry(error, self._policy) for publish in live):
                    self.refused(conn, command, error)

    # News of the links

    def link_opened(self, link: Link) -> None:
        self.pool.open.append(link)
        self.news.set()
        conn = link.conn
        if conn is not None and conn.auth_data is not None and is_heard(self._producer, "on_auth"):
            emit(self._producer, "on_auth", conn=conn, response=msgspec.json.decode(conn.auth_data))
        self.link_recovered(link)

    def link_recovered(self, link: Link) -> None:
        if link not in self.pool.open:
            self.pool.open.append(link)
        self.routes.links_changed()
        self._relieve(self.pool)

    def link_lost(self, link: Link, error: NsqError) -> None:
        if link in self.pool.open:
            self.pool.open.remove(link)
            self.routes.links_changed()

    def link_stalled(self, link: Link) -> None:
        self.pool.open.remove(link)
        self.routes.links_changed()
        self.routes.link_failed(link)
        self._relieve([link])

    def server_error(self, conn: Connection, error: ServerError) -> None:
        emit(self._producer, "on_error", error=error)


def _encode_many(command: Command, dialect: Dialect) -> tuple[str, bytes]:
    publishes = command.publishes
    # They are WireForms: publishes of other forms share no command.
    forms = (publish.form for publish in publishes)
    bodies = [publish.body for publish in publishes]
    return batch_command(command.destination.topic, bodies, forms, publishes[0].form, command.partition, dialect)


def _no_partitions(partition: int, dialect: Dialect) -> str:
    return f"partition={partition}: {dialect.name} servers have no partitions; leave it out"
