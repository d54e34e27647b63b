"""Keeps one target of a consumer (an nsqd, or a partition of it) subscribed, through one connection after another.

What a subscriber is doing is its state; what it shall do next depends on its wish, which others set.

    state       what it does                                            leads to
    CONNECTING  makes a connection and subscribes                       LIVE, PAUSED, REFUSED
    LIVE        messages come                                           DRAINING, PAUSED
    DRAINING    ends a connection in good order, for another's sake     CONNECTING
    PAUSED      waits before the next attempt                           CONNECTING
    REFUSED     waits until lookup gives reason to try in another way   CONNECTING
    ENDED       makes no connection any more

Where nothing but KEEP is wished, each of them leads to ENDED when it is over.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from enum import Enum, auto
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from gevent import Timeout

from nsq_fast.config import OF_CONNECTION
from nsq_fast.errors import (
    ChannelNotRegistered,
    ConfigError,
    ConnectionClosed,
    ConnectionLost,
    ExtendSubForbidden,
    ExtendSubRequired,
    HttpError,
    LocalProtocolError,
    NsqError,
    OrderedSubRequired,
    ServerError,
)
from nsq_fast.log_events import SUBSCRIBED, SUBSCRIPTION_FAILED
from nsq_fast.protocol.backoff import ReconnectDelay
from nsq_fast.protocol.targets import Mode, Target
from nsq_fast.runtime.net.connection import Connection
from nsq_fast.runtime.signals import emit
from nsq_fast.runtime.supervised import FAULTS

from .changes import Changes
from .draining import wait_for_answers, wait_for_close_wait
from .flow import backoff_of
from .stats import ConnectionStats, Counters
from .subscription import Subscription

if TYPE_CHECKING:
    from .context import Context, Workers

# What trying again in the same way does not cure.
REFUSALS = (
    OrderedSubRequired,
    ExtendSubRequired,
    ExtendSubForbidden,
    ChannelNotRegistered,
    LocalProtocolError,
    ConfigError,
)
LONGEST_LEADER_DELAY = 1.0
"""Seconds between attempts while the leader of a partition is not ready. It may be at any moment, and nobody else
delivers the messages."""

# Longest wait for answers when one connection ends for the sake of another, in seconds.
DRAIN_TIMEOUT = 10.0


def is_leader_move(error: NsqError) -> bool:
    """Whether a failed attempt looks like a leader that is gone or not ready yet, and not like a refusal of its own."""
    cause = error.__cause__ or error
    if isinstance(cause, ServerError):
        return cause.stale_topology
    return isinstance(cause, (ConnectionLost, ConnectionError, HttpError, Timeout))


class State(Enum):
    """What a subscriber is doing; see the head of the module."""

    CONNECTING = auto()
    LIVE = auto()
    DRAINING = auto()
    PAUSED = auto()
    REFUSED = auto()
    ENDED = auto()


class Wish(Enum):
    """What others want of a subscriber."""

    KEEP = auto()  # stay subscribed
    LEAVE = auto()  # keep a live connection, but make no other: lookup no longer knows the target
    RETIRE = auto()  # end in good order: another connection does the work
    CLOSE = auto()  # make no connection any more: the consumer is closing, and ends the present one


if TYPE_CHECKING:

    class Owner(Protocol):
        """Who keeps a subscriber, and is told what becomes of it; a ``TopicSubscriptions``.

        Attributes:
            mode: how to subscribe.
            first_delay: shortest pause in seconds after a connection was lost.
        """

        mode: Mode
        first_delay: float

        def place(self, target: Target) -> None:
            """Set the start position of a target, the first time. Blocks."""

        def joined(self, subscriber: Subscriber) -> None:
            """A connection is subscribed."""

        def lost(self, subscriber: Subscriber) -> None:
            """A connection was lost, or could not be made."""

        def refused(self, subscriber: Subscriber) -> None:
            """A subscription cannot work as it is meant."""

        def forget(self, subscriber: Subscriber) -> None:
            """A subscriber will make no connection any more."""


class Subscriber:
    """Keeps one target subscribed until it is stopped.

    Args:
        is_led: whether lookup named the target as the leader of a partition. Then attempts do not wait longer than
            ``LONGEST_LEADER_DELAY`` for what a change of leader brings with it.

    Attributes:
        subscription: the present one, or the last.
        state: what it is doing.
        wish: what it shall do.
        refusal: why the subscription cannot work as it is meant; None unless it was refused.
        refused_in: round of lookup in which it was.
        counters: over all connections to this target.
        pool: the workers that handle its messages.
        backoff: counts the failures of its messages: its own, or that of the consumer.
    """

    def __init__(
        self, consumer: Context, owner: Owner, target: Target, pool: Workers | None, is_led: bool = False
    ) -> None:
        self.target = target
        self.address = target.address
        self.state = State.CONNECTING
        self.wish = Wish.KEEP
        self.refusal: NsqError | None = None
        self.refused_in = 0
        self.counters = Counters()
        self.pool: Workers = pool if pool is not None else consumer.workers.new(1, f"worker {target}")
        self._consumer = consumer
        self._owner = owner
        self._is_pool_shared = pool is not None
        longest = consumer.config.max_reconnect_delay
        self._is_led = is_led
        self._reconnect = ReconnectDelay(longest, random=random.random, base=min(longest, owner.first_delay))
        self._leader_delay = ReconnectDelay(min(longest, LONGEST_LEADER_DELAY), random=random.random)
        self._delay = self._reconnect
        self._last_failure = ""
        self._changes = Changes()
        # Kept over connections: one that was lost is tried with one message again.
        is_own = consumer.config.backoff_scope == OF_CONNECTION
        self.backoff = backoff_of(consumer.config) if is_own else consumer.flow.backoff
        self.subscription = self._new_subscription()

    def _new_subscription(self) -> Subscription:
        return Subscription(
            self._consumer,
            self.target,
            self._owner.mode,
            self.pool,
            self._is_pool_shared,
            self.counters,
            self._changes,
            self.backoff,
            lambda: self._owner.lost(self),
        )

    # Of the present connection, or the last one

    @property
    def connection(self) -> Connection:
        """The connection."""
        return self.subscription.connection

    @property
    def is_connected(self) -> bool:
        """Whether messages may arrive."""
        return self.subscription.is_live

    # The states

    def start(self) -> None:
        """Connect in a greenlet of its own, and again whenever the connection is lost."""
        self._consumer.supervisor.loop(f"nsq_fast subscriber {self.target}", self._run).start()

    def _run(self) -> None:
        try:
            self._pass_through_states()
        except FAULTS as fault:
            # Begin again without what is half done: the flow, the owner and the workers hear of its end.
            self.connection.close(ConnectionClosed(f"{self.target}: nsq_fast itself failed: {fault!r}"))
            raise
        self._owner.forget(self)
        if not self._is_pool_shared and self.wish is not Wish.CLOSE:
            self.pool.stop()

    def _pass_through_states(self) -> None:
        if self.wish is not Wish.KEEP:  # it has paused after a fault
            self.state = State.ENDED
            return
        self._consumer.flow.expect(1)
        try:
            self._enter(self._connect())
        finally:
            self._consumer.flow.expect(-1)
        steps: dict[State, Callable[[], State]] = {
            State.CONNECTING: self._connect,
            State.LIVE: self._live,
            State.DRAINING: self._drain,
            State.PAUSED: self._pause,
            State.REFUSED: self._wait_for_another_mode,
        }
        while self.state is not State.ENDED:
            self._enter(steps[self.state]())

    def _enter(self, state: State) -> None:
        is_done = state not in (State.LIVE, State.DRAINING) and self.wish is not Wish.KEEP
        self.state = State.ENDED if is_done else state

    def _connect(self) -> State:
        subscription = self.subscription = self._new_subscription()
        connection = subscription.connection
        try:
            self._owner.place(self.target)
            connection.connect()
            if self.wish is not Wish.CLOSE:
                subscription.subscribe()
        except NsqError as error:
            return self._failed(error)
        if self.wish is Wish.CLOSE or not connection.is_open:
            connection.close()
            return State.PAUSED
        # Only a connection that lasts makes pauses short again: one that is accepted and closed at once would be made
        # again without end.
        self._reconnect.connected(monotonic())
        self._leader_delay.connected(monotonic())
        self._delay = self._leader_delay if self._is_led else self._reconnect
        self._last_failure = ""
        subscription.begin()
        self.counters.subscriptions += 1
        consumer = self._consumer
        text, topic = "%s: subscribed to %s/%s", self.target.topic
        consumer.logger.info(text, self.target, topic, consumer.channel, extra=SUBSCRIBED)
        self._owner.joined(self)
        return State.LIVE

    def _failed(self, error: NsqError) -> State:
        """No connection could be made, or no subscription on it."""
        if self.wish is Wish.CLOSE:
            return State.ENDED
        is_final = isinstance(error, REFUSALS)
        cause = error.__cause__ or error
        is_move = self._is_led and is_leader_move(error)
        self._delay = self._leader_delay if is_move else self._reconnect
        # A change of leader may take a minute of attempts: the same again is no news.
        is_repeated = is_move and str(error) == self._last_failure
        self._last_failure = str(error)
        level = logging.ERROR if is_final else logging.INFO if is_repeated else logging.WARNING
        self._consumer.logger.log(level, "%s: %s", self.target, error, extra=SUBSCRIPTION_FAILED)
        emit(self._consumer, "on_error", error=error if is_final else cause)
        self.connection.close(error)
        if not is_final:
            self._owner.lost(self)
            return State.PAUSED
        self.refusal = error
        self._owner.refused(self)
        return State.REFUSED

    def _live(self) -> State:
        self._changes.wait_while(lambda: self.is_connected and self.wish is not Wish.CLOSE and not self._is_outdated)
        return State.DRAINING if self.is_connected and self.wish is not Wish.CLOSE else State.PAUSED

    @property
    def _is_outdated(self) -> bool:
        """Whether the connection works, but another takes its place."""
        is_other_mode = self.subscription.mode != self._owner.mode and self.connection.session.dialect.has_partitions
        return is_other_mode or self.wish is Wish.RETIRE

    def _drain(self) -> State:
        """What ``closing`` does for all connections, for this one."""
        deadline = monotonic() + DRAIN_TIMEOUT
        self.subscription.ask_for_the_end()
        wait_for_close_wait(self.subscription, deadline)
        wait_for_answers(self.subscription, deadline)
        self.connection.close()
        return State.CONNECTING

    def _pause(self) -> State:
        self._changes.wait(self._delay.next(monotonic()))
        return State.CONNECTING

    def _wait_for_another_mode(self) -> State:
        self._changes.wait_while(lambda: self.refusal is not None and self.wish is Wish.KEEP)
        return State.CONNECTING

    # Wishes

    def set_wish(self, wish: Wish) -> None:
        """Say what it shall do. CLOSE is for good, and RETIRE says more than LEAVE."""
        if self.wish in (Wish.CLOSE, wish) or (self.wish is Wish.RETIRE and wish is Wish.LEAVE):
            return
        self.wish = wish
        if wish is not Wish.KEEP:
            self._changes.notify()

    def mode_changed(self) -> None:
        """Subscribe anew in the mode of now, where that makes a difference."""
        self.refusal = None
        self._changes.notify()

    # Closing, step by step as ``closing`` says

    def begin_closing(self) -> None:
        """Make no connection any more, ask for CLOSE_WAIT, give back what is unstarted and whatever still arrives."""
        self.set_wish(Wish.CLOSE)
        if self.is_connected and self.state is not State.DRAINING:
            self.subscription.ask_for_the_end()

    def close(self, timeout: float) -> None:
        """Send what is queued and close, within ``timeout`` seconds."""
        self.subscription.give_back_unstarted()
        self.connection.close(timeout=timeout)
        if not self._is_pool_shared:
            self.pool.stop()

    def stats(self) -> ConnectionStats:
        """A snapshot."""
        is_connected = self.is_connected
        return ConnectionStats(
            address=self.address,
            is_connected=is_connected,
            rdy=self.subscription.share.rdy if is_connected else 0,
            in_flight=self.connection.in_flight if is_connected else 0,
            unstarted=len(self.subscription.inbound.waiting),
            counters=self.counters.copy(),
            partition=self.target.partition,
            topic=self.target.topic,
            backoff_level=self.backoff.level,
            backoff_left=max(0.0, self.backoff.until - monotonic()),
        )
