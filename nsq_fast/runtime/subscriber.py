"""One nsqd from a consumer's side: connect, subscribe, take messages, reconnect, and drain at the end.

A subscriber outlives its connections. Each connection has a ``Lane`` of its
own, so that nothing of a lost one is mixed up with its successor.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from gevent import Greenlet
from gevent.event import Event

from nsq_fast._codec import Message
from nsq_fast.errors import ConnectionClosed, ConnectionLost, NsqError, ServerError
from nsq_fast.names import Address
from nsq_fast.protocol.backoff import ReconnectDelay
from nsq_fast.protocol.rdy import Share

from .connection import Connection
from .dispatch import Lane, Pool
from .failures import message_name
from .signals import emit
from .stats import ConnectionStats, Counters

if TYPE_CHECKING:
    from .consumer import Consumer


class Subscriber:
    """Keeps one subscription alive until it is stopped.

    Attributes:
        connection, lane, share: of the present connection, or the last one.
        is_connected: whether messages may arrive.
        is_wanted: whether to reconnect when the connection is lost.
        counters: over all connections to this nsqd.
    """

    def __init__(self, consumer: Consumer, address: Address, pool: Pool | None) -> None:
        self.address = address
        self.is_connected = False
        self.is_wanted = True
        self.counters = Counters()
        self.share = Share()
        self._consumer = consumer
        self._pool = pool if pool is not None else consumer.new_pool(1, f"worker {address}")
        self._owns_pool = pool is None
        self._reconnect = ReconnectDelay(consumer.config.max_reconnect_delay, random=random.random)
        self._is_closing = False
        self._is_awaiting_close = False
        self._changed = Event()
        self._greenlet: Greenlet[..., Any] | None = None
        self._new_connection()

    def _new_connection(self) -> None:
        self.connection = Connection(self.address, self._consumer.connection_config, self)
        self.lane = Lane(self.connection, self._finished)

    @property
    def pool(self) -> Pool:
        """The workers that handle this nsqd's messages."""
        return self._pool

    # Connecting and reconnecting

    def start(self) -> None:
        """Connect in a greenlet of its own, and again whenever the connection is lost."""
        self._greenlet = Greenlet(self._run)
        self._greenlet.name = f"nsq_fast subscriber {self.address}"
        self._greenlet.start()

    def _run(self) -> None:
        self._consumer.flow.expect(1)
        is_connected = self._connect()
        self._consumer.flow.expect(-1)
        while True:
            if is_connected:
                self.wait_while(lambda: self.is_connected and not self._is_closing, None)
            if self._has_ended or self._pause():
                break
            is_connected = self._connect()
        self._consumer.forget(self)
        if self._owns_pool and not self._is_closing:
            self._pool.stop()

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
        consumer = self._consumer
        self._new_connection()
        try:
            self.connection.connect()
            if not self._is_closing:
                self.connection.subscribe(consumer.topic, consumer.channel)
        except NsqError as error:
            self._refused(error)
            return False
        if self._is_closing or not self.connection.is_open:
            self.connection.close()
            return False
        self._subscribed()
        return True

    def _refused(self, error: NsqError) -> None:
        if self._is_closing:
            return
        cause = error.__cause__ or error
        self._consumer.logger.warning("%s: %s", self.address, error)
        emit(self._consumer, "on_error", error=cause)
        self.connection.close(error)
        self._consumer.lost(self)

    def _subscribed(self) -> None:
        info = self.connection.info
        self._reconnect.connected(monotonic())
        self.share = Share(max_rdy_count=info.max_rdy_count)
        self.is_connected = True
        self._consumer.logger.info(
            "%s: subscribed to %s/%s", self.address, self._consumer.topic, self._consumer.channel
        )
        self._consumer.joined(self)

    def reconnect_now(self) -> None:
        """End a pause between attempts to connect."""
        if not self.is_connected:
            self._changed.set()

    def abandon(self) -> None:
        """Keep a live connection, but do not make another: lookup no longer knows this nsqd."""
        self.is_wanted = False
        self.reconnect_now()

    # What the connection tells, in its reader greenlet

    def on_messages(self, conn: Connection, messages: list[Message]) -> None:
        self.counters.received += len(messages)
        self.lane.waiting.extend(messages)
        if self._is_closing:
            self._give_back_unstarted()
        else:
            self._pool.put(self.lane, len(messages))

    def on_finish(self, conn: Connection, message: Message) -> None:
        self._answered(1)
        emit(self._consumer, "on_finish", message_id=message.id)

    def on_requeue(self, conn: Connection, message: Message, delay_ms: int, backoff: bool) -> None:
        self.counters.requeued += 1
        emit(self._consumer, "on_requeue", message_id=message.id, timeout=delay_ms)
        flow = self._consumer.flow
        if backoff:
            flow.result(False)
        self._freed()

    def on_touch(self, conn: Connection, message: Message) -> None:
        self._consumer.deadlines.touched(message)

    def requeue_delay_ms(self, conn: Connection, message: Message) -> int:
        return self._consumer.outcomes.requeue_delay(message.attempts)

    def on_answer_failed(self, conn: Connection, error: ServerError, message_id: bytes | None) -> None:
        self.counters.answers_failed += 1
        self._consumer.logger.warning("%s: answered too late: %s", self.address, error)
        emit(self._consumer, "on_error", error=error)

    def on_error(self, conn: Connection, error: ServerError) -> None:
        self._consumer.logger.error("%s: %s", self.address, error)
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
        unstarted = len(self.lane.waiting)
        self.lane.waiting.clear()
        self._changed.set()
        if not was_connected:
            return
        consumer = self._consumer
        consumer.left(self)
        if self._is_closing:
            return
        consumer.logger.warning("%s: %s; %d unstarted messages dropped", self.address, error, unstarted)
        emit(consumer, "on_error", error=error)
        consumer.lost(self)

    # Answers

    def _finished(self, connection: Connection, messages: list[Message]) -> None:
        """Send the FINs of a turn of the hub."""
        try:
            connection.finish_many(messages)
        except ConnectionLost:
            self.counters.answers_lost += len(messages)
            self._consumer.logger.info(
                "%s: connection lost before the FIN of %d messages, first %s",
                self.address, len(messages), message_name(messages[0]),
            )  # fmt: skip
            self._consumer.flow.changed()
            return
        self._answered(len(messages))

    def _answered(self, count: int) -> None:
        self.counters.finished += count
        flow = self._consumer.flow
        if flow.backoff.is_on:
            flow.result(True)
        self._freed()

    def _freed(self) -> None:
        if self._consumer.flow.is_waiting:
            self._consumer.flow.changed()
        if self._is_closing:
            self._changed.set()

    # Closing, step by step as ``closing`` says

    def begin_closing(self) -> None:
        """Make no connection any more, ask for CLOSE_WAIT, give back what is unstarted and whatever still arrives."""
        self._is_closing = True
        self._changed.set()
        if not self.is_connected:
            return
        with suppress(NsqError):  # it may be ending just now
            self.connection.start_close()
            self._is_awaiting_close = True
            self._give_back_unstarted()

    def drop_half_made(self) -> None:
        """Give up a connection that is being made."""
        if not self.is_connected:
            self.connection.close(ConnectionClosed(f"{self.address}: the consumer is closed"))

    def wait_for_close_wait(self, deadline: float | None) -> bool:
        """Wait for CLOSE_WAIT; False if it did not come in time."""
        return self.wait_while(lambda: self.is_connected and self._is_awaiting_close, deadline)

    def wait_for_answers(self, deadline: float | None) -> bool:
        """Wait until every message is answered; False if some are not in time."""
        return self.wait_while(lambda: self.is_connected and self.connection.in_flight > 0, deadline)

    def close(self) -> None:
        """Send what is queued and close."""
        self._give_back_unstarted()
        self.lane.flush()
        self.connection.close()
        if self._owns_pool:
            self._pool.stop()

    def _give_back_unstarted(self) -> None:
        unstarted = list(self.lane.waiting)
        self.lane.waiting.clear()
        self._consumer.outcomes.give_back(unstarted)

    def stats(self) -> ConnectionStats:
        """A snapshot."""
        is_connected = self.is_connected
        return ConnectionStats(
            address=self.address,
            is_connected=is_connected,
            rdy=self.share.rdy if is_connected else 0,
            in_flight=self.connection.in_flight if is_connected else 0,
            unstarted=len(self.lane.waiting),
            counters=self.counters.copy(),
        )
