"""The flow of messages into a consumer: RDY over all its connections, backoff, and what handlers can take on.

``protocol.rdy`` and ``protocol.backoff`` decide; ``Flow`` sends what they decided. It recomputes when something
happened: a connection came or went, max_in_flight or the backoff changed, a timer is due. Never per message: while some
connection waits for others to answer their messages, it is once per batch of answers.

A message that waits longer than its timeout is taken back by nsqd, delivered again, and its attempt is lost. So no
more messages are asked for than the workers handle in a part of the timeout, at the speed that was measured (``Load``).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from nsq_fast._codec import Message
from nsq_fast._dispatch import Tally
from nsq_fast.config import ConsumerConfig
from nsq_fast.errors import NsqError
from nsq_fast.log_events import BACKOFF_BEGAN, BACKOFF_ENDED, MAX_IN_FLIGHT_HIGH, MAX_IN_FLIGHT_LOW
from nsq_fast.protocol import rdy
from nsq_fast.protocol.backoff import Backoff
from nsq_fast.protocol.in_flight import InFlight
from nsq_fast.protocol.rdy import Sharing, limit_in_backoff

from .loop import Repeated

if TYPE_CHECKING:
    from .loop import Loop, Supervisor
    from .subscription import Subscription
    from .workers import Pool

OVERDUE_PAUSE = 0.5
"""Messages of lost connections, and handlers that run too long, are looked after so often, in seconds."""

UNLIMITED = 1 << 30

USABLE = 0.5
"""Share of the message timeout that messages may spend waiting, at the speed measured. The rest is for handlers that
take longer than others."""

TOLERANCE = 0.25
"""A capacity that changes by less stays as it is: each change costs RDY commands."""


def backoff_of(config: ConsumerConfig) -> Backoff:
    """A backoff as the options want it."""
    return Backoff(config.max_backoff_duration, random=random.random, strategy=config.backoff_strategy)


class Flow:
    """Keeps the sum of max(RDY, in flight) over its members at or below ``max_in_flight``.

    Attributes:
        max_in_flight: messages held at once; None: as many as there are members. Call ``changed`` after a change.
        is_paused: whether RDY 0 was asked for.
        sharing: how ``max_in_flight`` is shared out; says whether some connection waits for what others still hold.
        backoff: of all connections. A connection may have one of its own instead.
        has_members: whether there is a subscribed connection.
        members_changed: called when one has come or gone; None: nobody asks.

    Args:
        workload: what handlers can take on, and what they hold although nsqd has taken it back.
    """

    def __init__(self, config: ConsumerConfig, workload: Workload, name: str, log: logging.Logger) -> None:
        self.max_in_flight = config.max_in_flight
        self.backoff = backoff_of(config)
        self.is_paused = False
        self._idle_timeout = config.low_ready_idle_timeout
        self.sharing = Sharing(self._idle_timeout, random.random)
        self._workload = workload
        self.members_changed: Callable[[], object] | None = None
        self._members: list[Subscription] = []
        self._expected = 0
        self._log = log
        self._has_warned_of_turns = False
        self._has_warned_of_handlers = False
        self._looks = Repeated(f"{name} flow", self.update)
        self.changed: Callable[[], None] = self._looks.ask  # recompute soon

    def start(self, loop: Loop, supervisor: Supervisor) -> None:
        """Begin to send RDY."""
        self._looks.start(loop, supervisor)

    def stop(self) -> None:
        """Send no more RDY."""
        self._looks.stop()

    def expect(self, count: int) -> None:
        """Keep room for ``count`` more connections (or fewer) that are being made for the first time.

        So the first to be there does not take what the others must then wait for.
        """
        self._expected += count
        self.changed()

    def add(self, member: Subscription) -> None:
        """Give a connection that has just subscribed its share."""
        member.share.turn_at = member.share.active_at = monotonic()
        self._members.append(member)
        self._tell_members()

    def remove(self, member: Subscription) -> None:
        """Share out what a connection had."""
        if member in self._members:
            self._members.remove(member)
            self._tell_members()

    def _tell_members(self) -> None:
        self.changed()
        if self.members_changed is not None:
            self.members_changed()

    @property
    def has_members(self) -> bool:
        """Whether there is a subscribed connection."""
        return bool(self._members)

    def result(self, success: bool, backoff: Backoff) -> None:
        """Count the result of a message for a backoff: that of all connections, or of one."""
        now = monotonic()
        if not backoff.record(success, now):
            return
        if backoff.is_on:
            text = "backoff level %d: pausing%s for %.3g s"
            self._log.warning(text, backoff.level, self._name_of(backoff), backoff.until - now, extra=BACKOFF_BEGAN)
        else:
            self._log.info("backoff%s is over", self._name_of(backoff), extra=BACKOFF_ENDED)
        self.changed()

    def _name_of(self, backoff: Backoff) -> str:
        """Which connection a backoff is of; empty for that of all."""
        return "".join(f" of {member.connection.address}" for member in self._members if member.backoff is backoff)

    @property
    def limit(self) -> int:
        """Messages that may be held at once, as things are."""
        if self.max_in_flight is None:
            return max(1, len(self._members) + self._expected)
        return self.max_in_flight

    @property
    def is_starved(self) -> bool:
        """Whether handlers hold (almost) as many messages of any connection as it may get.

        Messages that are here and wait for a handler do not count: there is more to be had without answering any.
        """
        return any(rdy.is_starved(member.held, member.share.rdy) for member in self._members)

    def update(self, now: float) -> float | None:
        """Send the RDYs that may be sent now; return the seconds until this must be called again, None for never."""
        members = list(self._members)
        shares = [member.share for member in members]
        for member in members:
            member.share.in_flight = member.connection.in_flight
            member.share.active_at = max(member.share.active_at, member.connection.last_message_at)
            member.share.capacity = member.capacity
        overdue = self._workload.overdue
        allowed = max(0, self.limit - overdue)
        limit = self._limit(allowed, now)
        self._warn(shares, allowed)
        held_back = [member for member in members if member.backoff is not self.backoff and member.backoff.is_on]
        for member in held_back:  # nothing while it is paused, then one message to see whether things are better
            member.share.capacity = 0 if member.backoff.is_paused(now) else min(1, member.share.capacity)
        changes = self.sharing.changes(shares, limit, allowed, now, self._expected)
        # RDY is a ceiling, not a credit: nsqd sends while fewer are in flight (nsqio/nsq: nsqd/client_v2.go,
        # IsReadyForMessages). So a share that is taken away is free only when its messages are responded to.
        for index, count in changes:
            self._send(members[index], count, now)
        backoffs = [self.backoff, *(member.backoff for member in held_back)]
        pause = self.sharing.next_look(shares, backoffs, limit, now)
        return pause if not overdue else min(OVERDUE_PAUSE, pause or OVERDUE_PAUSE)

    def _limit(self, allowed: int, now: float) -> int:
        if self.is_paused:
            return 0
        usual = min(allowed, self._workload.capacity_of(self._workload.shared))
        return limit_in_backoff(usual, allowed, self.backoff, now)

    def _warn(self, shares: list[rdy.Share], allowed: int) -> None:
        """Say once each what keeps messages from coming as the options have it."""
        connections = len(shares) + self._expected
        if self.max_in_flight and self.max_in_flight < connections and not self._has_warned_of_turns:
            self._has_warned_of_turns = True
            self._log.warning(
                "max_in_flight=%d is less than the number of connections, %d: they take turns, and messages of the"
                " others wait for up to %.3g s; leave max_in_flight out, or set it to %d at least",
                self.max_in_flight, connections, rdy.HOLD_FACTOR * self._idle_timeout, connections,
                extra=MAX_IN_FLIGHT_LOW,
            )  # fmt: skip
        if self._has_warned_of_handlers:
            return
        capacity = min(self._workload.capacity_of(self._workload.shared), sum(share.capacity for share in shares))
        if 0 < capacity < allowed:
            self._has_warned_of_handlers = True
            self._log.warning(
                "handlers are too slow for max_in_flight=%d: at %.3g s a message they begin with no more than %d in"
                " time, before msg_timeout=%.3g s is over; asking for that many; set max_in_flight lower, or"
                " concurrency or msg_timeout higher",
                self.limit, self._workload.pace, capacity, self._workload.msg_timeout, extra=MAX_IN_FLIGHT_HIGH,
            )  # fmt: skip

    def _send(self, member: Subscription, count: int, now: float) -> None:
        try:
            member.connection.set_rdy(count)
        except NsqError:
            return  # it is lost; its owner will hear of it and remove it
        member.share.sent(count, now)


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
