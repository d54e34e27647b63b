"""The end of a consumer, in order, so that nothing acknowledged is lost and nothing waits longer than it must."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from gevent import joinall
from gevent.event import Event

from nsq_fast.config import ConsumerConfig
from nsq_fast.errors import ConfigError, ConnectionClosed, NsqError
from nsq_fast.log_events import CLOSE_FAILED, CLOSE_TIMED_OUT, CONSUMER_FAILED, MESSAGES_REQUEUED
from nsq_fast.runtime.net.connection import CLOSE_TIMEOUT as CONNECTION_CLOSE_TIMEOUT
from nsq_fast.runtime.signals import emit
from nsq_fast.runtime.supervised import Supervisor

from .deadlines import Deadlines
from .draining import give_back_unfinished, wait_for_answers, wait_for_close_wait
from .flow import Flow
from .subscriber import Subscriber
from .worker_pools import WorkerPools

CLOSE_TIMEOUT = 30.0

# CLS sets RDY to 0 and is answered with CLOSE_WAIT; FIN and REQ are taken as before: nsqio/nsq: nsqd/client_v2.go,
# StartClose; nsqd/protocol_v2.go, CLS.
#
# 1. make no connection any more: pauses between attempts end, lookup is stopped;
# 2. CLS to every nsqd, so that it sends nothing more (this takes the place of RDY 0), and REQ 0 for what no handler
#    has begun with, also for what still arrives: other consumers get it at once;
# 3. wait for CLOSE_WAIT, behind which nothing can arrive;
# 4. let running handlers finish, and wait for the answers of messages handled asynchronously: FIN and REQ are
#    still accepted;
# 5. flush the last FINs and close the connections;
# 6. end the workers.
#
# Steps 1 and 2 happen at once, so that no handler begins after close() was called. 3 and 4 together end after the
# timeout; without drain they are left out. What is not answered then is delivered again by nsqd when it times out, or,
# with ``requeue_unfinished``, is given back with REQ 0.
# Step 5 has a share of the timeout of its own, and happens on all connections at once: a server that does not answer
# makes it last as long as it may.
CLOSING_SHARE = 0.1
SHORTEST_CLOSING = 0.5


if TYPE_CHECKING:

    class Freezable(Protocol):
        """The subscribers of a consumer; a ``Subscriptions``."""

        def __iter__(self) -> Iterator[Subscriber]:
            """Those of now."""

        def freeze(self) -> None:
            """Make no new subscriptions and forget none; does not block."""

        def stop(self) -> None:
            """Ask lookup no more, after ``freeze``."""

    class Stoppable(Protocol):
        """What reads the config source of a consumer; a ``ConfigKeeper``."""

        def stop(self) -> None:
            """Read no more. Does not block."""

    class ClosingContext(Protocol):
        """A consumer, as its end sees it; the sender of ``on_close``."""

        name: str
        logger: logging.Logger
        flow: Flow
        deadlines: Deadlines
        workers: WorkerPools
        config: ConsumerConfig

        @property
        def supervisor(self) -> Supervisor:
            """Makes its greenlets."""


class Closing:
    """Closes one consumer, once.

    Args:
        subscriptions: all that the consumer is subscribed to.
        policies: of the consumer; those that have a ``close()`` method are closed, too.
        keeper: reads its config source; None without one.

    Attributes:
        has_begun: whether the consumer is closing or closed.
        done: set when it is closed.
        failure: why it closed by itself; None when somebody asked for it.
    """

    def __init__(
        self,
        consumer: ClosingContext,
        subscriptions: Freezable,
        policies: Iterable[object],
        keeper: Stoppable | None = None,
    ) -> None:
        self.has_begun = False
        self.done = Event()
        self.failure: NsqError | None = None
        self._consumer = consumer
        self._subscriptions = subscriptions
        self._policies = policies
        self._keeper = keeper

    def begin(self, drain: bool, timeout: float | None) -> None:
        """Steps 1 and 2; the others follow in a greenlet of their own. Does not block; later calls do nothing."""
        if self.has_begun:
            return
        self.has_begun = True
        consumer = self._consumer
        if self._keeper is not None:
            self._keeper.stop()
        self._subscriptions.freeze()
        for subscriber in self._subscriptions:
            subscriber.begin_closing()
        consumer.supervisor.job(f"{consumer.name} closer", self._finish, drain, timeout).start()

    def fail(self, error: NsqError) -> None:
        """Begin to close because of ``error``, unless it is closing already. Does not block."""
        if not self.has_begun:
            self.failure = error
            self._consumer.logger.error("%s: closing: %s", self._consumer.name, error, extra=CONSUMER_FAILED)
            self.begin(drain=True, timeout=CLOSE_TIMEOUT)

    def lost(self, error: NsqError) -> None:
        """It is closed without anything done, because its thread has failed."""
        self.failure = error
        self.skip()

    def skip(self) -> None:
        """It is closed without anything to do."""
        self.has_begun = True
        self.done.set()

    def _finish(self, drain: bool, timeout: float | None) -> None:
        consumer = self._consumer
        try:
            self._subscriptions.stop()
            self._close_subscribers(drain, timeout)
        finally:
            consumer.flow.stop()
            consumer.deadlines.stop()
            consumer.workers.stop()
            for policy in self._policies:
                self._close_policy(policy)
            try:
                emit(consumer, "on_close")
            finally:  # a receiver may be ended by what is no Exception
                self.done.set()

    def _close_subscribers(self, drain: bool, timeout: float | None) -> None:
        consumer = self._consumer
        close_subscribers(
            list(self._subscriptions),
            drain,
            timeout,
            consumer.supervisor,
            consumer.logger,
            is_requeued=consumer.config.requeue_unfinished,
        )

    def _close_policy(self, policy: object) -> None:
        close = getattr(policy, "close", None)
        if close is None:
            return
        try:
            close()
        except Exception:  # a user's policy must not keep join() waiting
            self._consumer.logger.exception("closing the give-up policy failed", extra=CLOSE_FAILED)


def check_timeout(timeout: object) -> None:
    """Raise ConfigError unless ``timeout`` is a number of seconds, or None."""
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout >= 0):
        raise ConfigError(f"timeout={timeout!r}: must be a number of seconds, 0 or more, or None")


def close_subscribers(
    subscribers: Sequence[Subscriber],
    drain: bool,
    timeout: float | None,
    supervisor: Supervisor,
    log: logging.Logger,
    is_requeued: bool = False,
) -> None:
    """Steps 3 to 5, each for all connections before the next.

    Args:
        is_requeued: whether what handlers have not finished is given back.
    """
    closing_time = CONNECTION_CLOSE_TIMEOUT
    deadline = None
    if timeout is not None:
        share = min(timeout * CLOSING_SHARE, CONNECTION_CLOSE_TIMEOUT)
        deadline = monotonic() + timeout - share
        closing_time = max(share, SHORTEST_CLOSING)
    for subscriber in subscribers:
        if not subscriber.is_connected:  # it is being made, and nobody will use it
            subscriber.connection.close(ConnectionClosed(f"{subscriber.address}: the consumer is closed"))
    if drain:
        _wait(subscribers, deadline, log)
    if is_requeued:
        _requeue(subscribers, log)
    jobs = [supervisor.job("closing", each.close, closing_time) for each in subscribers]
    for job in jobs:
        job.start()
    joinall(jobs)


def _wait(subscribers: Sequence[Subscriber], deadline: float | None, log: logging.Logger) -> None:
    for subscriber in subscribers:
        if not wait_for_close_wait(subscriber.subscription, deadline):
            log.warning("%s: no CLOSE_WAIT in time", subscriber.address, extra=CLOSE_TIMED_OUT)
    for subscriber in subscribers:
        if not wait_for_answers(subscriber.subscription, deadline):
            count = subscriber.connection.in_flight
            log.warning("%s: closed with %d messages unanswered", subscriber.address, count, extra=CLOSE_TIMED_OUT)


def _requeue(subscribers: Sequence[Subscriber], log: logging.Logger) -> None:
    for subscriber in subscribers:
        subscriber.subscription.give_back_unstarted()
        if count := give_back_unfinished(subscriber.subscription):
            text = "%s: requeued %d messages that handlers have not finished"
            log.warning(text, subscriber.address, count, extra=MESSAGES_REQUEUED)
