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
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from gevent.event import Event

from nsq_fast.errors import NsqError
from nsq_fast.protocol import rdy
from nsq_fast.protocol.backoff import Backoff
from nsq_fast.runtime.net.connection import Connection
from nsq_fast.runtime.supervised import Supervisor

# A handler that goes on with a message of a lost connection is looked after so often, in seconds.
ORPHAN_PAUSE = 0.5
# Turns of a scarce RDY are looked at so often in each idle timeout.
LOOKS_PER_IDLE_TIMEOUT = 4


class Member(Protocol):
    """A subscribed connection, as the flow sees it."""

    connection: Connection
    share: rdy.Share

    @property
    def held(self) -> int:
        """Messages that handlers have got and not answered."""


class Flow:
    """Keeps the sum of max(RDY, in flight) over its members at or below ``max_in_flight``.

    Attributes:
        max_in_flight: messages held at once; ``set_max_in_flight`` changes it.
        is_paused: whether RDY 0 was asked for.
        is_waiting: whether some connection waits for a share that others still hold.
        has_members: an Event, set while there is a subscribed connection.

    Args:
        count_orphans: gives the number of messages that handlers still hold although their connection is gone.
    """

    def __init__(
        self,
        max_in_flight: int,
        idle_timeout: float,
        backoff: Backoff,
        count_orphans: Callable[[], int],
        supervisor: Supervisor,
        log: logging.Logger,
    ) -> None:
        self._supervisor = supervisor
        self.max_in_flight = max_in_flight
        self.backoff = backoff
        self.is_paused = False
        self.is_waiting = False
        self._count_orphans = count_orphans
        self._idle_timeout = idle_timeout
        self.has_members = Event()
        self._members: list[Member] = []
        self._expected = 0
        self._wake = Event()
        self._log = log
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
            self._log.warning("backoff level %d: pausing for %.3g s", self.backoff.level, self.backoff.until - now)
        else:
            self._log.info("backoff is over")
        self._wake.set()

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
        orphans = self._count_orphans()
        allowed = max(0, self.max_in_flight - orphans)
        limit = self._limit(allowed, now)
        expected = [rdy.Share() for _ in range(self._expected)] if limit >= len(shares) + self._expected else []
        wanted = rdy.targets(shares + expected, limit, now, idle_timeout=self._idle_timeout, random=random.random)[
            : len(shares)
        ]
        plan = rdy.plan(shares, wanted, allowed, now)
        self.is_waiting = plan.waiting
        for index, count in plan.changes:
            self._send(members[index], count, now)
        pause = self._next_look(shares, limit, now)
        return pause if not orphans else min(ORPHAN_PAUSE, pause or ORPHAN_PAUSE)

    def _limit(self, allowed: int, now: float) -> int:
        if self.is_paused or self.backoff.is_paused(now):
            return 0
        return min(1, allowed) if self.backoff.is_on else allowed

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
