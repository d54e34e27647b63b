"""The flow of messages into a consumer: RDY over all its connections, and backoff.

``protocol.rdy`` and ``protocol.backoff`` decide; this sends what they decided.
One greenlet per consumer recomputes when something happened: a connection came
or went, max_in_flight or the backoff changed, a timer is due. Never per
message: while some connection waits for others to answer their messages, it is
once per batch of answers.
"""

from __future__ import annotations

import logging
import random
from time import monotonic
from typing import Protocol

from gevent.event import Event

from nsq_fast.errors import NsqError
from nsq_fast.log_events import BACKOFF_BEGAN, BACKOFF_ENDED, MAX_IN_FLIGHT_HIGH, MAX_IN_FLIGHT_LOW
from nsq_fast.protocol import rdy
from nsq_fast.protocol.backoff import Backoff
from nsq_fast.runtime.net.connection import Connection
from nsq_fast.runtime.supervised import Supervisor

from .load import Workload

# Messages of lost connections, and handlers that run too long, are looked after so often, in seconds.
OVERDUE_PAUSE = 0.5
# Turns of a scarce RDY are looked at so often in each idle timeout.
LOOKS_PER_IDLE_TIMEOUT = 4


class Member(Protocol):
    """A subscribed connection, as the flow sees it."""

    connection: Connection
    share: rdy.Share

    @property
    def held(self) -> int:
        """Messages that handlers have got and not answered."""

    @property
    def capacity(self) -> int:
        """Messages that the workers of this connection alone can begin with in time."""


class Flow:
    """Keeps the sum of max(RDY, in flight) over its members at or below ``max_in_flight``.

    Attributes:
        max_in_flight: messages held at once; None: as many as there are members. Call ``changed`` after a change.
        is_paused: whether RDY 0 was asked for.
        is_waiting: whether some connection waits for a share that others still hold.
        has_members: an Event, set while there is a subscribed connection.

    Args:
        workload: what handlers can take on, and what they hold although nsqd has taken it back.
    """

    def __init__(
        self,
        max_in_flight: int | None,
        idle_timeout: float,
        backoff: Backoff,
        workload: Workload,
        supervisor: Supervisor,
        log: logging.Logger,
    ) -> None:
        self._supervisor = supervisor
        self.max_in_flight = max_in_flight
        self.backoff = backoff
        self.is_paused = False
        self.is_waiting = False
        self._workload = workload
        self._idle_timeout = idle_timeout
        self.has_members = Event()
        self._members: list[Member] = []
        self._expected = 0
        self._wake = Event()
        self._log = log
        self._has_warned_of_turns = False
        self._has_warned_of_handlers = False
        self._is_stopped = False

    def start(self, name: str) -> None:
        """Begin to send RDY."""
        self._supervisor.loop(name, self._run).start()

    def stop(self) -> None:
        """Send no more RDY."""
        self._is_stopped = True
        self._wake.set()

    def expect(self, count: int) -> None:
        """Keep room for ``count`` more connections (or fewer) that are being made for the first time.

        So the first to be there does not take what the others must then wait for.
        """
        self._expected += count
        self._wake.set()

    def add(self, member: Member) -> None:
        """Give a connection that has just subscribed its share."""
        member.share.turn_at = member.share.active_at = monotonic()
        self._members.append(member)
        self.has_members.set()
        self._wake.set()

    def remove(self, member: Member) -> None:
        """Share out what a connection had."""
        if member in self._members:
            self._members.remove(member)
            if not self._members:
                self.has_members.clear()
            self._wake.set()

    def changed(self) -> None:
        """Recompute soon."""
        self._wake.set()

    def result(self, success: bool) -> None:
        """Count the result of a message for backoff."""
        now = monotonic()
        if not self.backoff.record(success, now):
            return
        if self.backoff.is_on:
            self._log.warning(
                "backoff level %d: pausing for %.3g s",
                self.backoff.level,
                self.backoff.until - now,
                extra=BACKOFF_BEGAN,
            )
        else:
            self._log.info("backoff is over", extra=BACKOFF_ENDED)
        self._wake.set()

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

    # In the greenlet

    def _run(self) -> None:
        while not self._is_stopped:
            self._wake.clear()
            self._wake.wait(self.update(monotonic()))

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
        expected = [rdy.Share() for _ in range(self._expected)] if limit >= len(shares) + self._expected else []
        wanted = rdy.targets(shares + expected, limit, now, idle_timeout=self._idle_timeout, random=random.random)[
            : len(shares)
        ]
        plan = rdy.plan(shares, wanted, allowed, now)
        self.is_waiting = plan.waiting
        # RDY is a ceiling, not a credit: nsqd sends while fewer are in flight (nsqio/nsq: nsqd/client_v2.go,
        # IsReadyForMessages). So a share that is taken away is free only when its messages are responded to.
        for index, count in plan.changes:
            self._send(members[index], count, now)
        pause = self._next_look(shares, limit, now)
        return pause if not overdue else min(OVERDUE_PAUSE, pause or OVERDUE_PAUSE)

    def _limit(self, allowed: int, now: float) -> int:
        if self.is_paused or self.backoff.is_paused(now):
            return 0
        return (
            min(1, allowed) if self.backoff.is_on else min(allowed, self._workload.capacity_of(self._workload.shared))
        )

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

    def _send(self, member: Member, count: int, now: float) -> None:
        try:
            member.connection.set_rdy(count)
        except NsqError:
            return  # it is lost; its owner will hear of it and remove it
        member.share.sent(count, now)

    def _next_look(self, shares: list[rdy.Share], limit: int, now: float) -> float | None:
        moments = []
        if self.backoff.is_paused(now):
            moments.append(self.backoff.until)
        if self.is_waiting:
            moments.extend(share.settles_at for share in shares if share.settles_at > now)
        if 0 < limit < len(shares):
            moments.append(now + self._idle_timeout / LOOKS_PER_IDLE_TIMEOUT)
        return max(0.0, min(moments) - now) if moments else None
