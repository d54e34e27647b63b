"""One nsqd or partition from a consumer's side: connect, subscribe, take messages, reconnect, drain at the end.

A subscriber outlives its connections. Each connection has a ``InboundQueue`` of its
own, so that nothing of a lost one is mixed up with its successor.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from gevent.event import Event

from nsq_fast._codec import Message, TruncatedMessage
from nsq_fast.errors import (
    ChannelNotRegistered,
    ConfigError,
    ConnectionClosed,
    ExtendSubForbidden,
    ExtendSubRequired,
    LocalProtocolError,
    MessageTooLarge,
    NsqError,
    OrderedSubRequired,
    ServerError,
)
from nsq_fast.protocol.backoff import ReconnectDelay
from nsq_fast.protocol.rdy import Share
from nsq_fast.protocol.targets import Target
from nsq_fast.runtime.net.connection import Connection
from nsq_fast.runtime.signals import emit
from nsq_fast.runtime.supervised import FAULTS

from .bodies import decompressed, is_compressed
from .dispatch import InboundQueue, Pool
from .failures import message_name
from .stats import ConnectionStats, Counters

if TYPE_CHECKING:
    from nsq_fast.runtime.consumer import Consumer

    from .subscriptions import Subscriptions

# What trying again in the same way does not cure.
REFUSALS = (
    OrderedSubRequired,
    ExtendSubRequired,
    ExtendSubForbidden,
    ChannelNotRegistered,
    LocalProtocolError,
    ConfigError,
)
# Longest wait for answers when one connection ends for the sake of another, in seconds.
DRAIN_TIMEOUT = 10.0


class Subscriber:
    """Keeps one subscription alive until it is stopped.

    Attributes:
        connection, inbound, share: of the present connection, or the last one.
        is_connected: whether messages may arrive.
        is_wanted: whether to reconnect when the connection is lost.
        is_ordered: whether messages come one by one and in order.
        refusal: why the subscription cannot work as it is meant; None unless it was refused.
        refused_in: round of lookup in which it was.
        counters: over all connections to this target.
    """

    def __init__(self, consumer: Consumer, owner: Subscriptions, target: Target, pool: Pool | None) -> None:
        self.target = target
        self.address = target.address
        self.is_connected = False
        self.is_wanted = True
        self.is_ordered = False
        self.refusal: NsqError | None = None
        self.refused_in = 0
        self.counters = Counters()
        self.share = Share()
        self._consumer = consumer
        self._owner = owner
        self._mode = owner.mode
        self._in_order: Callable[[list[Message]], list[Message]]
        self._select: Callable[[list[Message]], list[Message]] | None = None
        self._pool = pool if pool is not None else consumer.new_pool(1, f"worker {target}")
        self._owns_pool = pool is None
        self._reconnect = ReconnectDelay(consumer.config.max_reconnect_delay, random=random.random)
        self._is_closing = False
        self._is_retired = False
        self._is_draining = False
        self._is_awaiting_close = False
        self._changed = Event()
        self._new_connection()

    def _new_connection(self) -> None:
        config = self._consumer.connection_config
        if self._mode.extend_support != config.extend_support:
            config = config.replace(extend_support=self._mode.extend_support)
        self.connection = Connection(self.address, config, self)
        self.inbound = InboundQueue(self.connection, self.expire)

    @property
    def pool(self) -> Pool:
        """The workers that handle this target's messages."""
        return self._pool

    @property
    def held(self) -> int:
        """Messages that handlers have got and not answered."""
        return self.connection.in_flight - len(self.inbound.waiting)

    @property
    def capacity(self) -> int:
        """Messages that the workers of this target alone can begin with in time."""
        return self._consumer.workload.capacity_of(self._pool if self._owns_pool else None)

    # Connecting and reconnecting

    def start(self) -> None:
        """Connect in a greenlet of its own, and again whenever the connection is lost."""
        self._consumer.supervisor.loop(f"nsq_fast subscriber {self.target}", self._run).start()

    def _run(self) -> None:
        try:
            self._keep_subscribed()
        except FAULTS as fault:
            # Begin again without what is half done: the flow, the owner and the workers hear of its end.
            self.connection.close(ConnectionClosed(f"{self.target}: nsq_fast itself failed: {fault!r}"))
            raise
        self._owner.forget(self)
        if self._owns_pool and not self._is_closing:
            self._pool.stop()

    def _keep_subscribed(self) -> None:
        if self._has_ended:
            return  # while it paused after a fault
        self._consumer.flow.expect(1)
        try:
            is_connected = self._connect()
        finally:
            self._consumer.flow.expect(-1)
        while True:
            is_renewed = self._live() if is_connected else self._wait_for_another_mode()
            if self._has_ended or (not is_renewed and self._pause()):
                break
            is_connected = self._connect()

    def _live(self) -> bool:
        """Wait for the end of the connection, or end it; say whether another shall be made at once."""
        self.wait_while(lambda: self.is_connected and not self._is_closing and not self._is_outdated, None)
        if not self.is_connected or self._is_closing:
            return False
        self._drain()
        return self.is_wanted

    @property
    def _is_outdated(self) -> bool:
        """Whether the connection works, but another takes its place."""
        is_other_mode = self._mode != self._owner.mode and self.connection.session.dialect.has_partitions
        return is_other_mode or (self._is_retired and not self.is_wanted)

    def _wait_for_another_mode(self) -> bool:
        """After a refusal wait until there is reason to try again; False when there was no refusal."""
        if self.refusal is None:
            return False
        self.wait_while(lambda: self.refusal is not None and not self._has_ended, None)
        return True

    @property
    def _has_ended(self) -> bool:
        return self._is_closing or not self.is_wanted

    def _pause(self) -> bool:
        """Wait before the next attempt to connect; say whether there shall be none."""
        self._changed.clear()
        self._changed.wait(self._reconnect.next(monotonic()))
        return self._has_ended

    def wait_while(self, condition: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until ``condition`` no longer holds; False if it still does at ``deadline`` (monotonic)."""
        while condition():
            timeout = None if deadline is None else deadline - monotonic()
            if timeout is not None and timeout <= 0.0:
                return False
            self._changed.clear()
            self._changed.wait(timeout)
        return True

    def _connect(self) -> bool:
        self._mode = self._owner.mode
        self._new_connection()
        try:
            self._owner.place(self.target)
            self.connection.connect()
            if not self._is_closing:
                self._subscribe()
        except NsqError as error:
            self._refused(error)
            return False
        if self._is_closing or not self.connection.is_open:
            self.connection.close()
            return False
        self._subscribed()
        return True

    def _subscribe(self) -> None:
        """SUB as the server's dialect has it. An old nsqd beside partitions is subscribed to plainly, unless options
        ask for what it cannot do."""
        consumer, config = self._consumer, self._consumer.config
        is_redesigned = self.connection.session.dialect.has_partitions
        self.is_ordered = self._mode.ordered and (is_redesigned or bool(config.ordered))
        self.connection.subscribe(
            consumer.topic,
            consumer.channel,
            partition=self.target.partition,
            ordered=self.is_ordered,
            advanced=config.advanced and is_redesigned,
        )

    def _refused(self, error: NsqError) -> None:
        if self._is_closing:
            return
        is_final = isinstance(error, REFUSALS)
        cause = error.__cause__ or error
        self._consumer.logger.log(logging.ERROR if is_final else logging.WARNING, "%s: %s", self.target, error)
        emit(self._consumer, "on_error", error=error if is_final else cause)
        self.connection.close(error)
        if not is_final:
            self._owner.lost(self)
            return
        self.refusal = error
        self._owner.refused(self)

    def _subscribed(self) -> None:
        info, consumer = self.connection.info, self._consumer
        self._reconnect.connected(monotonic())
        self.share = Share(max_rdy_count=1 if self.is_ordered else info.max_rdy_count)
        self._select = None
        self._in_order = consumer.ordered.check_of(self.target)
        if self.is_ordered:
            self.inbound.turn = consumer.ordered.turn(self.target)
            self.connection.hold = consumer.ordered.hold
            self.connection.answer_promptly()
        if consumer.config.decompress and self._mode.extend_support:
            self._select = self._readable_in_order
        elif self.is_ordered:
            self._select = self._in_order
        if self._owns_pool:
            self._pool.source = self.connection
        self.is_connected = True
        consumer.logger.info("%s: subscribed to %s/%s", self.target, consumer.topic, consumer.channel)
        self._owner.joined(self)

    def reconnect_now(self) -> None:
        """End a pause between attempts to connect."""
        if not self.is_connected:
            self._changed.set()

    def abandon(self) -> None:
        """Keep a live connection, but do not make another: lookup no longer knows this target."""
        self.is_wanted = False
        self.reconnect_now()

    def retire(self) -> None:
        """End in good order: another connection does the work now."""
        self.is_wanted = False
        self._is_retired = True
        self._changed.set()

    def mode_changed(self) -> None:
        """Subscribe anew in the mode of now, where that makes a difference."""
        self.refusal = None
        self._changed.set()

    def _drain(self) -> None:
        """End the present connection: what ``closing`` does for all, for one."""
        self._is_draining = True
        deadline = monotonic() + DRAIN_TIMEOUT
        self._ask_for_the_end()
        self.wait_for_close_wait(deadline)
        self.wait_for_answers(deadline)
        self.connection.close()
        self._is_draining = False

    # What the connection tells, in its reader greenlet or the worker that reads

    def on_messages(self, conn: Connection, messages: list[Message]) -> None:
        self.counters.received += len(messages)
        ledger = self.inbound.ledger
        if conn.last_received_at >= ledger.next_deadline:
            self.expire(conn.last_received_at)
        if ledger.count > self.share.rdy and ledger.count > self.share.highest(conn.last_received_at):
            self._expired(ledger.expire_excess(self.share.highest(conn.last_received_at), conn.last_received_at))
        if self._is_closing or self._is_draining:
            self.inbound.waiting.extend(messages)
            self._give_back_unstarted()
            return
        if self._select is not None:
            messages = self._select(messages)
        inbound, pool = self.inbound, self._pool
        inbound.waiting.extend(messages)
        if pool.idle or not inbound.is_queued:
            pool.put(inbound, len(messages))

    def on_message_skipped(self, conn: Connection, message: TruncatedMessage, error: MessageTooLarge) -> None:
        """No handler sees a message without its body: it is requeued, until a give-up policy gets it."""
        disposition = self._consumer.disposition
        if self._is_ending or disposition.is_beyond(self.inbound, message):
            self.on_messages(conn, [message])
            return
        self.counters.received += 1
        if not self.is_ordered or self._in_order([message]):
            disposition.unreadable(message, error)

    @property
    def _is_ending(self) -> bool:
        return self._is_closing or self._is_draining

    def _readable_in_order(self, messages: list[Message]) -> list[Message]:
        """Those that a handler may get: bodies decompressed, the order of ordered partitions verified."""
        if self.is_ordered:
            messages = self._in_order(messages)
        return [each for each in map(self._readable, messages) if each is not None]

    def _readable(self, message: Message) -> Message | None:
        if not is_compressed(message):
            return message
        disposition = self._consumer.disposition
        try:
            return self._in_place_of(message, decompressed(message, self._consumer.config.max_decompressed_size))
        except NsqError as error:
            if disposition.is_beyond(self.inbound, message):
                return message  # for the give-up policy, as it came
            disposition.unreadable(message, error)
            return None

    def _in_place_of(self, message: Message, readable: Message) -> Message:
        """The message that a handler gets, which is in flight now instead of the one that came."""
        if readable is not message:
            message.mark_responded()
            self.inbound.ledger.follow(readable)
        return readable

    # Deadlines

    @property
    def next_deadline(self) -> float:
        """When ``expire`` has something to do, at the earliest; monotonic."""
        return self.inbound.ledger.next_deadline

    def expire(self, now: float) -> None:
        """Forget the messages that nsqd has taken back by now."""
        self._expired(self.inbound.ledger.expire(now))
        if self._is_ending:
            self._give_back_abandoned()

    def _expired(self, messages: list[Message]) -> None:
        if messages:
            unstarted = self.inbound.drop_expired() if self._consumer.config.drop_expired else 0
            self.counters.expired += len(messages)
            self._consumer.note_expired(messages, unstarted)
            self._freed()

    def on_finish(self, conn: Connection, message: Message) -> None:
        emit(self._consumer, "on_finish", message_id=message.id)

    def on_requeue(self, conn: Connection, message: Message, delay_ms: int, backoff: bool) -> None:
        emit(self._consumer, "on_requeue", message_id=message.id, timeout=delay_ms)
        if backoff and not self.is_ordered:  # an ordered partition waits for its own messages only
            self._consumer.flow.result(False)
        if self._consumer.tracer.is_on(conn):
            self._consumer.tracer.record(conn, (message,), "REQ")
        self._freed()

    def requeue_delay_ms(self, conn: Connection, message: Message) -> int:
        if self.is_ordered:
            return self._consumer.ordered.requeue_delay_ms(message)
        return self._consumer.disposition.requeue_delay(message.attempts)

    def on_answer_failed(self, conn: Connection, error: ServerError, message_id: bytes | None) -> None:
        self.counters.answers_failed += 1
        self._consumer.logger.warning("%s: answered too late: %s", self.target, error)
        emit(self._consumer, "on_error", error=error)

    def on_error(self, conn: Connection, error: ServerError) -> None:
        self._consumer.logger.error("%s: %s", self.target, error)
        emit(self._consumer, "on_error", error=error)

    def on_reply(self, conn: Connection, token: Any, data: bytes) -> None:
        emit(self._consumer, "on_response", response=data)

    def on_failed(self, conn: Connection, token: Any, error: NsqError) -> None:
        emit(self._consumer, "on_error", error=error)

    def on_heartbeat(self, conn: Connection) -> None:
        emit(self._consumer, "on_response", response=b"_heartbeat_")

    def on_close_wait(self, conn: Connection) -> None:
        self._is_awaiting_close = False
        self._changed.set()

    def on_disconnect(self, conn: Connection, error: NsqError) -> None:
        was_connected, self.is_connected = self.is_connected, False
        unstarted = self.inbound.take_unstarted()
        for message in unstarted:
            message.mark_responded()  # nobody will answer it
        if self._owns_pool:
            self._pool.source = None
        self._changed.set()
        if not was_connected:
            return
        consumer = self._consumer
        consumer.workload.orphans.adopt(self.inbound.ledger)
        consumer.flow.remove(self)
        if self._is_ending:
            return
        consumer.logger.warning("%s: %s; %d unstarted messages dropped", self.target, error, len(unstarted))
        emit(consumer, "on_error", error=error)
        self._owner.lost(self)

    # Answers

    def on_answers(self, conn: Connection, finished: Sequence[Message], requeued: int, is_sent: bool) -> None:
        if not is_sent:
            self._lost_answers(finished, requeued)
            return
        counters, consumer = self.counters, self._consumer
        counters.finished += len(finished)
        counters.requeued += requeued
        if finished:
            if consumer.flow.backoff.is_on:
                consumer.flow.result(True)
            if consumer.tracer.is_on(conn):
                consumer.tracer.record(conn, finished, "FIN")
        self._freed()

    def _lost_answers(self, finished: Sequence[Message], requeued: int) -> None:
        self.counters.answers_lost += len(finished) + requeued
        self._consumer.logger.info(
            "%s: connection lost before the FIN of %d messages%s and the REQ of %d",
            self.target, len(finished), f" (first {message_name(finished[0])})" if finished else "", requeued,
        )  # fmt: skip
        self._consumer.flow.changed()
        self._freed()

    def _freed(self) -> None:
        if self._consumer.flow.is_waiting:
            self._consumer.flow.changed()
        if self._is_ending:
            self._changed.set()

    # Closing, step by step as ``closing`` says

    def begin_closing(self) -> None:
        """Make no connection any more, ask for CLOSE_WAIT, give back what is unstarted and whatever still arrives."""
        self._is_closing = True
        self._changed.set()
        if self.is_connected and not self._is_draining:
            self._ask_for_the_end()

    def _ask_for_the_end(self) -> None:
        with suppress(NsqError):  # it may be ending just now
            self.connection.start_close()
            self._is_awaiting_close = True
            self._give_back_unstarted()
            self._consumer.ordered.release(self.connection)

    def drop_half_made(self) -> None:
        """Give up a connection that is being made."""
        if not self.is_connected:
            self.connection.close(ConnectionClosed(f"{self.address}: the consumer is closed"))

    def wait_for_close_wait(self, deadline: float | None) -> bool:
        """Wait for CLOSE_WAIT; False if it did not come in time."""
        return self.wait_while(lambda: self.is_connected and self._is_awaiting_close, deadline)

    def wait_for_answers(self, deadline: float | None) -> bool:
        """Wait until every message is answered or expired; False if some are not in time."""
        self._give_back_abandoned()
        return self.wait_while(lambda: self.is_connected and self.connection.in_flight > 0, deadline)

    def close(self, timeout: float) -> None:
        """Send what is queued and close, within ``timeout`` seconds."""
        self._give_back_unstarted()
        self.connection.close(timeout=timeout)
        if self._owns_pool:
            self._pool.stop()

    def _give_back_unstarted(self) -> None:
        self._consumer.disposition.give_back(self.inbound.take_unstarted())

    def _give_back_abandoned(self) -> None:
        """REQ 0 for asynchronous messages that the program has dropped without an answer."""
        if self.is_connected:
            self._consumer.disposition.give_back(self.inbound.ledger.unreachable())

    def stats(self) -> ConnectionStats:
        """A snapshot."""
        is_connected = self.is_connected
        return ConnectionStats(
            address=self.address,
            is_connected=is_connected,
            rdy=self.share.rdy if is_connected else 0,
            in_flight=self.connection.in_flight if is_connected else 0,
            unstarted=len(self.inbound.waiting),
            counters=self.counters.copy(),
            partition=self.target.partition,
        )
