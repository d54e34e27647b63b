"""The flow of messages into a consumer: RDY over all its connections, backoff, and what handlers can take on.

``protocol.rdy`` decides; ``Flow`` sends what it decided. It recomputes when something happened: a connection came or
went, max_in_flight or the backoff changed, a timer is due. Never per message: while some connection waits for others to
answer their messages, it is once per batch of answers.

Results of messages come from ``Subscription``: a FIN that was sent is a success, a REQ that counts is a failure, a lost
connection one of its own backoff. So a probe, the one message that is asked for after a pause, needs no mark.

A message that waits longer than its timeout is taken back by nsqd, delivered again, and its attempt is lost. So no
more messages are asked for than the workers handle in a part of the timeout, at the speed that was measured (``Load``).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from nsq_fast.config import ConsumerConfig
from nsq_fast.errors import NsqError
from nsq_fast.log_events import BACKOFF_BEGAN, BACKOFF_ENDED, MAX_IN_FLIGHT_HIGH, MAX_IN_FLIGHT_LOW
from nsq_fast.protocol import rdy
from nsq_fast.protocol.rdy import Backoff, Sharing

from .loop import Repeated

if TYPE_CHECKING:
    from .loop import Loop, Supervisor
    from .subscription import Subscription
    from .workers import Pools

OVERDUE_PAUSE = 0.5
"""Messages of lost connections, and handlers that run too long, are looked after so often, in seconds."""


def backoff_of(config: ConsumerConfig) -> Backoff:
    return Backoff(config.max_backoff_duration, random=random.random, strategy=config.backoff_strategy)


class Flow:
    """Keeps the sum of max(RDY, in flight) over its members at or below ``max_in_flight``.

    Attributes:
        max_in_flight: messages held at once; None: as many as there are members, or handlers. Call ``changed`` after
            a change.
        is_paused: whether RDY 0 was asked for.
        sharing: how ``max_in_flight`` is shared out; says whether some connection waits for what others still hold.
        backoff: of all connections. A connection may have one of its own instead.

    Args:
        pools: what handlers can take on, and what they hold although nsqd has taken it back.
    """

    def __init__(self, config: ConsumerConfig, pools: Pools, name: str, log: logging.Logger) -> None:
        self.max_in_flight: int | None = config.max_in_flight
        # With one message a connection, most of the handlers that were asked for would never run.
        self._handlers = config.handlers or 1
        self.backoff: Backoff = backoff_of(config)
        self.is_paused = False
        self._idle_timeout = config.low_ready_idle_timeout
        self.sharing: Sharing = Sharing(self._idle_timeout, random.random)
        self._pools = pools
        self._members: list[Subscription] = []
        self._expected = 0
        self._log = log
        self._has_warned_of_turns = False
        self._has_warned_of_handlers = False
        self._looks = Repeated(f"{name} flow", self.update)
        self.changed: Callable[[], None] = self._looks.ask  # recompute soon

    def start(self, loop: Loop, supervisor: Supervisor) -> None:
        self._looks.start(loop, supervisor)

    def stop(self) -> None:
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
        self.changed()

    def remove(self, member: Subscription) -> None:
        if member in self._members:
            self._members.remove(member)
            self.changed()

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
        own = [member for member in self._members if member.backoff is backoff is not self.backoff]
        return "".join(f" of {member.connection.address}" for member in own)

    @property
    def limit(self) -> int:
        """Messages that may be held at once, as things are."""
        if self.max_in_flight is None:
            return max(self._handlers, len(self._members) + self._expected)
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
        overdue = self._pools.overdue
        allowed = max(0, self.limit - overdue)
        usual = min(allowed, self._pools.capacity_of(self._pools.shared))
        limit = 0 if self.is_paused else self.backoff.limit(usual, allowed, now)
        self._warn(shares, allowed)
        held_back = [member for member in members if member.backoff is not self.backoff and member.backoff.is_on]
        for member in held_back:
            capacity = member.share.capacity
            member.share.capacity = member.backoff.limit(capacity, capacity, now)
        changes = self.sharing.changes(shares, limit, allowed, now, self._expected)
        # RDY is a ceiling, not a credit: nsqd sends while fewer are in flight (nsqio/nsq: nsqd/client_v2.go,
        # IsReadyForMessages). So a share that is taken away is free only when its messages are responded to.
        for index, count in changes:
            self._send(members[index], count, now)
        pause = self.sharing.next_look(shares, [self.backoff, *(each.backoff for each in held_back)], limit, now)
        return pause if not overdue else min(OVERDUE_PAUSE, pause or OVERDUE_PAUSE)

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
        capacity = min(self._pools.capacity_of(self._pools.shared), sum(share.capacity for share in shares))
        if 0 < capacity < allowed and self._pools.pace:
            self._has_warned_of_handlers = True
            self._log.warning(
                "handlers are too slow for max_in_flight=%d: at %.3g s a message they begin with no more than %d in"
                " time, before msg_timeout=%.3g s is over; asking for that many; set max_in_flight lower, or"
                " concurrency or msg_timeout higher",
                self.limit, self._pools.pace, capacity, self._pools.msg_timeout, extra=MAX_IN_FLIGHT_HIGH,
            )  # fmt: skip

    def _send(self, member: Subscription, count: int, now: float) -> None:
        try:
            member.connection.set_rdy(count)
        except NsqError:
            return  # it is lost; its owner will hear of it and remove it
        member.share.sent(count, now)
