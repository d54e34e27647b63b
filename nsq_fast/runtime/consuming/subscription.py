"""One connection that is subscribed to a target: messages in, responses out, and its end.

What arrives goes to the workers; what nsqd takes back is dropped at its deadline. Once the connection is about to end
(``ask_for_the_end``), whatever no handler has begun with, or still arrives, goes back to nsqd at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from nsq_fast._codec import Message, TruncatedMessage
from nsq_fast._dispatch import InboundQueue
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import ConfigError, MessageTooLarge, NsqError
from nsq_fast.log_events import OPTION_IDLE, RESPONSE_LOST, SUBSCRIPTION_LOST
from nsq_fast.protocol.backoff import Backoff
from nsq_fast.protocol.rdy import Share
from nsq_fast.protocol.targets import Mode, Target
from nsq_fast.runtime.net.connection import Connection
from nsq_fast.runtime.signals import emit

from .announcer import Announcer
from .changes import Changes
from .failures import message_name
from .selection import Selection
from .stats import Counters

if TYPE_CHECKING:
    from .context import Context, Workers

LEADER_HEARTBEAT = 14.0
"""Longest interval, in seconds, of the heartbeats of a partition's leader. One that is late says that the leader hangs:
that is to be known before the cluster names another, 18 s after it heard of the old one at the earliest.
youzan/nsq: consistence/nsqd_node_etcd.go, ETCD_TTL and refresh."""

_OF_HEADERS = ("skip_header", "suppress_retried")


class Subscription(Announcer):
    """The owner of one Connection. Used once.

    Args:
        mode: how to subscribe.
        pool: who handles the messages.
        is_pool_shared: whether other connections' messages are handled there, too.
        counters: over all connections to the target.
        changes: told when something happened that others may wait for.
        backoff: counts the failures of these messages: of all connections, or of the target alone.
        on_doubt: called when the connection is silent, or ends although nobody wanted it to.

    Attributes:
        connection, inbound, share: of this subscription.
        mode: how it is subscribed.
        changes, backoff: as given.
        is_live: whether messages may arrive.
        is_ending: whether messages are given back that no handler has begun with.
        is_ordered: whether messages come one by one and in order.
        is_awaiting_close: whether CLS was sent and CLOSE_WAIT has not come.
    """

    def __init__(
        self,
        consumer: Context,
        target: Target,
        mode: Mode,
        pool: Workers,
        is_pool_shared: bool,
        counters: Counters,
        changes: Changes,
        backoff: Backoff,
        on_doubt: Callable[[], None],
    ) -> None:
        super().__init__(consumer, target, counters, on_doubt)
        config = consumer.connection_config.replace(extend_support=mode.extend_support)
        if target.partition is not None:
            config = config.replace(heartbeat_interval=min(config.heartbeat_interval, LEADER_HEARTBEAT))
        self.mode = mode
        self.changes = changes
        self.backoff = backoff
        self.connection = Connection(target.address, config, self)
        self.inbound = InboundQueue(self.connection, self.expire)
        self._ledger = self.connection.session.ledger
        self.share = Share()
        self.is_live = False
        self.is_ending = False
        self.is_ordered = False
        self.is_awaiting_close = False
        self._pool = pool
        self._is_pool_shared = is_pool_shared
        self._tracer = consumer.tracer
        self._trace_log = consumer.tracer.log
        self._selection = Selection(self.inbound, consumer.disposition, None, None, None, None, counters)
        self._select: Callable[[list[Message]], list[Message]] | None = None

    @property
    def held(self) -> int:
        """Messages that handlers have got and not answered."""
        return self.connection.in_flight - len(self.inbound.waiting)

    @property
    def capacity(self) -> int:
        """Messages that the workers of this target alone can begin with in time."""
        return self._consumer.workload.capacity_of(None if self._is_pool_shared else self._pool)

    # Begin

    def subscribe(self) -> None:
        """SUB as the server's dialect has it; blocks. An old nsqd beside partitions is subscribed to plainly, unless
        options ask for what it cannot do. Raises as ``Connection.subscribe``, and ConfigError for an ignored filter."""
        consumer, config = self._consumer, self._consumer.config
        is_redesigned = self.connection.session.dialect.has_partitions
        if not (is_redesigned and self.mode.extend_support):
            _refuse_filters(consumer.connection_config, self.target)
        self.is_ordered = self.mode.ordered and (is_redesigned or bool(config.ordered))
        self.connection.subscribe(
            self.target.topic,
            consumer.channel,
            partition=self.target.partition,
            ordered=self.is_ordered,
            advanced=config.advanced and is_redesigned,
        )

    def begin(self) -> None:
        """Take messages: RDY may be sent from now on."""
        consumer, config = self._consumer, self._consumer.config
        # The server has one message of an ordered partition in flight, whatever RDY says: youzan/nsq:
        # nsqd/channel.go, messagePump (waits for the confirmation of the last one).
        self.share = Share(max_rdy_count=1 if self.is_ordered else self.connection.info.max_rdy_count)
        in_order = consumer.ordered.check_of(self.target) if self.is_ordered else None
        if self.is_ordered:
            self.inbound.turn = consumer.ordered.turn(self.target)
            self.connection.hold = consumer.ordered.hold
            self.connection.answer_promptly()
        if not self.mode.extend_support:
            _tell_headerless(consumer, self.target.topic)
        decompresses = config.decompress and self.mode.extend_support
        size_limit = config.max_decompressed_size if decompresses else None
        skip_header = config.skip_header if self.mode.extend_support else None
        seen_keys = consumer.seen_keys if self.mode.extend_support else None
        self._selection = Selection(
            self.inbound, consumer.disposition, in_order, size_limit, skip_header, seen_keys, self.counters
        )
        self._select = self._selection.check()
        if not self._is_pool_shared:
            self._pool.source = self.connection
        self.is_live = True

    # Messages, in the reader greenlet or the worker that reads

    def on_messages(self, conn: Connection, messages: list[Message]) -> None:
        if self._trace_log.is_active and self._tracer.is_on(conn):
            self._tracer.received(conn, messages)
        self.counters.received += len(messages)
        ledger, now = self._ledger, conn.last_received_at
        if now >= ledger.next_deadline:
            self.expire(now)
        # More than RDY allowed at any time that matters: nsqd has taken some back, although our clock has not said so.
        if ledger.count > self.share.rdy and ledger.count > self.share.highest(now):
            self._expired(ledger.expire_excess(self.share.highest(now), now))
        if self.is_ending:
            self.inbound.waiting.extend(messages)
            self.give_back_unstarted()
            return
        if self._select is not None:
            messages = self._select(messages)
        self._pool.deliver(self.inbound, messages)

    def on_message_skipped(self, conn: Connection, message: TruncatedMessage, error: MessageTooLarge) -> None:
        """No handler sees a message without its body: it is requeued, until a give-up policy gets it."""
        disposition = self._consumer.disposition
        if self.is_ending or disposition.is_beyond(self.inbound, message):
            self.on_messages(conn, [message])
            return
        if self._tracer.is_on(conn):
            self._tracer.received(conn, (message,))
        self.counters.received += 1
        if self._selection.is_in_order(message):
            disposition.unreadable(message, error)

    @property
    def next_deadline(self) -> float:
        """When ``expire`` has something to do, at the earliest; monotonic."""
        return self._ledger.next_deadline

    def expire(self, now: float) -> None:
        """Forget the messages that nsqd has taken back by ``now``."""
        self._expired(self._ledger.expire(now))
        if self.is_ending:
            self.give_back_abandoned()

    def _expired(self, messages: list[Message]) -> None:
        if messages:
            unstarted = self.inbound.drop_expired() if self._consumer.config.drop_expired else 0
            self.counters.expired += len(messages)
            self._consumer.flow.responded(messages, self.connection.info.msg_timeout, is_expired=True)
            self._consumer.expiry.report(messages, unstarted)
            self._freed()

    # Responses

    def requeue_delay_ms(self, conn: Connection, message: Message) -> int:
        if self.is_ordered:
            return self._consumer.ordered.requeue_delay_ms(message)
        return self._consumer.disposition.requeue_delay(message.attempts)

    def on_requeue(self, conn: Connection, message: Message, delay_ms: int, backoff: bool) -> None:
        consumer = self._consumer
        emit(consumer, "on_requeue", message_id=message.id, timeout=delay_ms)
        if backoff and not self.is_ordered:  # an ordered partition waits for its own messages only
            consumer.flow.result(False, self.backoff)
        if self._tracer.is_on(conn):
            self._tracer.record(conn, (message,), "REQ")
        self._freed()

    def on_answers(self, conn: Connection, finished: Sequence[Message], requeued: int, is_sent: bool) -> None:
        if not is_sent:
            self._lost_answers(finished, requeued)
            return
        counters, consumer = self.counters, self._consumer
        counters.finished += len(finished)
        if requeued:
            counters.requeued += requeued
        if finished:
            if self.backoff.is_on:
                consumer.flow.result(True, self.backoff)
            if consumer.flow.adaptive is not None and not self.is_ordered:  # who sends one at a time has no queue here
                consumer.flow.responded(finished, conn.info.msg_timeout)
            if self._trace_log.is_active and self._tracer.is_on(conn):
                self._tracer.record(conn, finished, "FIN")
        self._freed()

    def _lost_answers(self, finished: Sequence[Message], requeued: int) -> None:
        self.counters.answers_lost += len(finished) + requeued
        self._consumer.logger.info(
            "%s: connection lost before the FIN of %d messages%s and the REQ of %d",
            self.target, len(finished), f" (first {message_name(finished[0])})" if finished else "", requeued,
            extra=RESPONSE_LOST,
        )  # fmt: skip
        self._consumer.flow.changed()
        self._freed()

    def _freed(self) -> None:
        if self._consumer.flow.sharing.is_waiting:
            self._consumer.flow.changed()
        if self.is_ending:
            self.changes.notify()

    # End

    def ask_for_the_end(self) -> None:
        """CLS, and REQ 0 for what no handler has begun with and for what still arrives."""
        self.is_ending = True
        with suppress(NsqError):  # it may be ending just now
            self.connection.start_close()
            self.is_awaiting_close = True
            self.give_back_unstarted()
            self._consumer.ordered.release(self.connection)

    def give_back_unstarted(self) -> None:
        """REQ 0 for what no handler has begun with."""
        self._consumer.disposition.give_back(self.inbound.take_unstarted())

    def give_back_abandoned(self) -> None:
        """REQ 0 for asynchronous messages that the program has dropped without an answer."""
        if self.is_live:
            self._consumer.disposition.give_back(self._ledger.unreachable())

    def on_close_wait(self, conn: Connection) -> None:
        self.is_awaiting_close = False
        self.changes.notify()

    def on_disconnect(self, conn: Connection, error: NsqError) -> None:
        was_live, self.is_live = self.is_live, False
        unstarted = self.inbound.take_unstarted()
        for message in unstarted:
            # Nobody will respond; nsqd delivers it again after its timeout: nsqio/nsq: nsqd/channel.go,
            # processInFlightQueue.
            message.mark_responded()
        if not self._is_pool_shared:
            self._pool.source = None
        self.changes.notify()
        if not was_live:
            return
        consumer = self._consumer
        consumer.workload.orphans.adopt(self._ledger)
        consumer.flow.remove(self)
        if self.is_ending:
            return
        if self.backoff is not consumer.flow.backoff:
            consumer.flow.result(False, self.backoff)
        consumer.logger.warning(
            "%s: %s; %d unstarted messages dropped", self.target, error, len(unstarted), extra=SUBSCRIPTION_LOST
        )
        emit(consumer, "on_error", error=error)
        self._on_doubt()


def _refuse_filters(config: ConnectionConfig, target: Target) -> None:
    """Raise ConfigError where a filter is set: only of messages with extended headers do servers filter any."""
    for name in ("desired_tag", "ext_filter"):
        value = getattr(config, name)
        if value:
            raise ConfigError(
                f"{name}={value!r}: topic {target.topic} has no extended headers on {target.address}, and every message"
                f" would come; create it with extend, or leave {name} out"
            )


def _tell_headerless(consumer: Context, topic: str) -> None:
    """Say once of a topic without extended headers which options have no effect on it."""
    idle = [name for name in _OF_HEADERS if getattr(consumer.config, name)]
    if idle and topic not in consumer.headerless:
        consumer.headerless.add(topic)
        consumer.logger.warning(
            "%s: has no effect on topic %s: its messages have no extended headers; the redesigned NSQ gives them to"
            " topics that are created with extend",
            ", ".join(idle), topic, extra=OPTION_IDLE,
        )  # fmt: skip
