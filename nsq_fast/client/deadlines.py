"""The deadlines of messages: expiry, a warning before it, TOUCH where that is wanted, and the speed of handlers.

One timer per consumer looks at all connections and workers, a few times in each message timeout and when a deadline
is over; nothing is done per message. What touching can gain ends at the server's max_msg_timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from nsq_fast._codec import Message
from nsq_fast._dispatch import Tally
from nsq_fast.client.signals import emit
from nsq_fast.errors import NsqError
from nsq_fast.log_events import HANDLER_SLOW, MESSAGES_EXPIRED
from nsq_fast.protocol.in_flight import InFlight

from .connection import Connection
from .give_up import message_name
from .loop import Repeated

if TYPE_CHECKING:
    from .consumer import AnyConsumer
    from .loop import Loop, Supervisor
    from .subscription import Subscription
    from .workers import Pool

# Shares of the message timeout that have passed. A TOUCH at half leaves the other half for it to arrive; the warning
# comes while there is time to look; after STUCK_AT a message counts as one that nsqd will send to somebody else.
WARN_AT = 0.8
STUCK_AT = 0.85
TOUCH_AT = 0.5
# How often all workers are looked at: often enough to be near each of the shares above, seldom enough to cost nothing.
LOOKS_PER_TIMEOUT = 10
LONGEST_PAUSE = 5.0
SHORTEST_PAUSE = 0.01

UNLIMITED = 1 << 30

USABLE = 0.5
"""Share of the message timeout that messages may spend waiting, at the speed measured. The rest is for handlers that
take longer than others."""

TOLERANCE = 0.25
"""A capacity that changes by less stays as it is: each change costs RDY commands."""

LOG_PAUSE = 10.0
"""Seconds between two lines of the log about expired messages."""


class Load(Tally):
    """The work of one pool.

    Attributes:
        stuck: messages whose handlers run so long that nsqd is about to take them back, or has done so; one a worker.
        pace: seconds that a handler took for a message when that was measured last; 0.0 before there was any.
    """

    __slots__ = ("_busy_before", "_handled_before", "_last", "pace", "stuck")

    def __init__(self) -> None:
        self.stuck: list[Message] = []
        self.pace = 0.0
        self._busy_before = 0.0
        self._handled_before = 0
        self._last = UNLIMITED

    def measure(self) -> bool:
        """Take in what was handled since the last call; say whether there was anything."""
        handled = self.handled - self._handled_before
        if handled == 0:
            return False
        self.pace = (self.busy - self._busy_before) / handled
        # Differences, not totals: the handlers of now count, not those of the first hour.
        self._busy_before, self._handled_before = self.busy, self.handled
        return True

    def count_stuck(self) -> int:
        """Workers whose handlers run too long right now."""
        self.stuck = [message for message in self.stuck if not (message.has_responded() or message.is_async())]
        return len(self.stuck)

    def capacity(self, workers: int, msg_timeout: float) -> int:
        """How many messages ``workers`` can take on at once and begin with in time; 0 when all of them are stuck.

        Not fewer than there are workers free: a handler that takes nearly the whole timeout is in time if it begins
        at once.
        """
        free = max(workers, 1) - self.count_stuck()
        # With every worker stuck, any message asked for would wait behind them until nsqd takes it back.
        if free <= 0:
            return 0
        if self.pace <= 0.0:
            return UNLIMITED
        fitting = int(min(UNLIMITED, free * USABLE * msg_timeout / self.pace))
        if abs(fitting - self._last) > TOLERANCE * self._last:
            self._last = fitting
        return max(free, self._last)


class Workload:
    """All pools of a consumer, and the messages that the program holds although nsqd has taken them back.

    nsqd delivers the messages of lost connections again elsewhere, but here they still take memory and handlers: they
    count towards ``max_in_flight`` until they are answered, or until the time is over that they had.

    Args:
        is_bounded: whether what was measured bounds anything.

    Attributes:
        pools: those that there are.
        shared: the pool that serves all connections; None when each has its own.
        msg_timeout: shortest message timeout of all connections there were, in seconds.
        orphaned: messages of lost connections, when they were counted last; any thread may read it.
    """

    def __init__(self, is_bounded: bool) -> None:
        self.pools: list[Pool] = []
        self.shared: Pool | None = None
        self.msg_timeout = inf
        self.orphaned = 0
        self._ledgers: list[InFlight] = []
        self._is_bounded = is_bounded

    # Of lost connections

    def adopt(self, ledger: InFlight) -> None:
        """A connection is lost. What nobody has begun to handle must be marked as responded before."""
        if ledger.pending():
            self._ledgers.append(ledger)
            self.count_orphans()

    def count_orphans(self) -> int:
        """How many messages of lost connections the program still holds."""
        # A ledger that is empty is done with: nothing is ever added to that of a lost connection.
        counts = [len(ledger.pending()) for ledger in self._ledgers]
        self._ledgers = [ledger for ledger, count in zip(self._ledgers, counts, strict=True) if count]
        self.orphaned = sum(counts)
        return self.orphaned

    def expire_orphans(self, now: float) -> list[Message]:
        """Take out and return those whose time is over at ``now`` (monotonic)."""
        expired = [message for ledger in self._ledgers for message in ledger.expire(now)]
        self.count_orphans()
        return expired

    @property
    def next_deadline(self) -> float:
        """Before this moment ``expire_orphans`` finds nothing."""
        return min((ledger.next_deadline for ledger in self._ledgers), default=inf)

    # Of handlers

    @property
    def overdue(self) -> int:
        """Messages that the program still holds although nsqd has taken them back, or is about to."""
        return self.count_orphans() + sum(pool.load.count_stuck() for pool in self.pools if pool.load.stuck)

    def capacity_of(self, pool: Pool | None) -> int:
        """How many messages the workers of ``pool`` can begin with in time."""
        if pool is None or not self._is_bounded or not (pool.load.pace or pool.load.stuck):
            return UNLIMITED
        return pool.load.capacity(len(pool.workers), self.msg_timeout)

    @property
    def pace(self) -> float:
        """Seconds that the slowest pool takes for a message."""
        return max((pool.load.pace for pool in self.pools), default=0.0)


class Deadlines:
    """Watches the messages of one consumer.

    Args:
        subscriptions: gives the present ones.
    """

    def __init__(self, consumer: AnyConsumer, subscriptions: Callable[[], Iterable[Subscription]]) -> None:
        self._consumer = consumer
        self._subscriptions = subscriptions
        self._workload = consumer.workload
        self._auto_touch = consumer.config.auto_touch
        self._log: logging.Logger = consumer.logger
        self._warned: set[Message] = set()
        self._expired = 0
        self._unstarted = 0
        self._quiet_until = -inf
        self._looks = Repeated(f"{consumer.name} deadlines", self.look)

    def start(self, loop: Loop, supervisor: Supervisor) -> None:
        self._looks.start(loop, supervisor)

    def stop(self) -> None:
        self._looks.stop()

    def expect(self, msg_timeout: float) -> None:
        """Look often enough for messages that must be answered within ``msg_timeout`` seconds."""
        self._workload.msg_timeout = min(self._workload.msg_timeout, msg_timeout)
        self._looks.ask()

    def look(self, now: float) -> float:
        """Expire what is over, touch or warn where it is time to, and measure the speed of the handlers.

        Returns the seconds until there is something to see again.
        """
        for each in self._subscriptions():
            each.expire(now)
            if self._auto_touch:
                self._look_at_asynchronous(each.connection, now)
        self._expire_orphans(now)
        news = [self._look_at(pool, now) for pool in self._workload.pools]
        if any(news):
            self._consumer.flow.changed()
        self._warned = {message for message in self._warned if not message.has_responded()}
        deadlines = [each.next_deadline for each in self._subscriptions()]
        nearest = min([*deadlines, self._workload.next_deadline]) - monotonic()
        return max(SHORTEST_PAUSE, min(LONGEST_PAUSE, self._workload.msg_timeout / LOOKS_PER_TIMEOUT, nearest))

    # Messages that nsqd has taken back because nobody responded to them in time

    def report(self, messages: list[Message], unstarted: int) -> None:
        """``messages`` have expired, ``unstarted`` of them before a handler began with them."""
        self._count(len(messages), unstarted, monotonic())
        for message in messages:
            emit(self._consumer, "on_expired", message=message)

    def _expire_orphans(self, now: float) -> None:
        messages = self._workload.expire_orphans(now)
        if messages:  # they no longer count towards max_in_flight
            self._consumer.past.expired += len(messages)
            self.report(messages, 0)
            self._consumer.flow.changed()

    def _count(self, count: int, unstarted: int, now: float) -> None:
        self._expired += count
        self._unstarted += unstarted
        # A consumer that is too slow loses messages all day: one line for all of them fills no disk.
        if now < self._quiet_until:
            return
        self._quiet_until = now + LOG_PAUSE
        self._log.warning(
            "%d messages were not answered before their msg_timeout was over, and nsqd delivers them again;"
            " no handler had begun with %d of them",
            self._expired, self._unstarted, extra=MESSAGES_EXPIRED,
        )  # fmt: skip
        self._expired = self._unstarted = 0

    # Messages that are being handled

    def _look_at_asynchronous(self, connection: Connection, now: float) -> None:
        """Touch what no worker handles any more, and somebody will respond to."""
        for message in connection.session.ledger.pending():
            if message.is_async():
                self._check(message, connection, now)

    def _look_at(self, pool: Pool, now: float) -> bool:
        """Look at the workers of one pool; say whether there is any news of how busy they are."""
        load = pool.load
        load.stuck = [message for worker in pool.workers for message in self._stuck(worker.current, now)]
        return load.measure() or bool(load.stuck)

    def _stuck(self, current: Message | list[Message] | None, now: float) -> Iterator[Message]:
        """Look at what one worker handles now; give one message if nsqd is about to take some of it back."""
        stuck = None
        for message in [current] if isinstance(current, Message) else current or ():
            connection = message.responder
            if (
                isinstance(connection, Connection)
                and not message.has_responded()
                and self._check(message, connection, now)
            ):
                stuck = message
        if stuck is not None:
            yield stuck

    def _check(self, message: Message, connection: Connection, now: float) -> bool:
        """Touch or warn; say whether nsqd is about to take the message back."""
        if message.has_expired():
            return True
        info = connection.info
        deadline = connection.session.ledger.deadline(message)
        spent = 1 - (deadline - now) / info.msg_timeout
        # No TOUCH moves the deadline further than that: nsqio/nsq: nsqd/channel.go, TouchMessage.
        is_last_chance = deadline >= message.received_at + info.max_msg_timeout
        if self._auto_touch and spent >= TOUCH_AT and not is_last_chance and connection.is_open:
            return not self._touch(message)
        if spent >= WARN_AT and message not in self._warned:
            self._warned.add(message)
            self._log.warning(
                "message %s is still being handled %.3g s after it arrived; nsqd takes it back in %.3g s",
                message_name(message), now - message.received_at, max(0.0, deadline - now), extra=HANDLER_SLOW,
            )  # fmt: skip
        return spent >= STUCK_AT

    def _touch(self, message: Message) -> bool:
        try:
            message.touch()
        except NsqError:
            return False  # answered or lost meanwhile
        return True
