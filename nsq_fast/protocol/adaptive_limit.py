"""How many messages to ask for, so that each is responded to well within its timeout. Pure: times in, a limit out.

What is in flight waits for handlers, and for whatever they wait for. Nobody can tell from outside how long that takes,
but each response says how long it took. When that was too long, the limit becomes what can be responded to in time, by
the rate of the responses; when all of a round were quick, it grows. Only messages that came under the present limit
count: the others say how it was before.
"""

from __future__ import annotations

from collections.abc import Sequence

TARGET = 0.25
"""Share of the message timeout within which messages are to be responded to; the rest is for what takes longer."""

USED = 0.8
"""Share of that time which a lowered limit fills: right at its end each little delay would lower the limit again."""

ROOM = 0.5
"""Share of that time up to which there is room for more; between the two the limit stays."""

GROWTH = 4
"""The limit grows by this part of itself, after as many quick responses as it allows."""

SETTLE = 0.25
"""Seconds after a change in which messages may still arrive that were asked for before."""

UNLIMITED = 1 << 30


class AdaptiveLimit:
    """A limit that follows how long messages take.

    Attributes:
        limit: how many to ask for; UNLIMITED as long as nothing was slow, or when all that is wanted is allowed again.
    """

    def __init__(self) -> None:
        self.limit = UNLIMITED
        self._since = 0.0
        self._slowest = 0.0
        self._count = 0
        self._responses = _RecentCount()

    def responded(
        self, received_at: Sequence[float], now: float, msg_timeout: float, most: int, *, is_expired: bool = False
    ) -> bool:
        """Take in that messages which were received at these times were responded to at ``now``, or expired.

        Args:
            most: how many are wanted; the limit changes within 1 and this.

        Returns whether the limit is another one now.
        """
        target = TARGET * msg_timeout
        self._responses.add(0 if is_expired else len(received_at), now, target)
        counted = [received for received in received_at if received >= self._since]
        if not counted:
            return False
        took = now - min(counted)
        if took > target:
            # At this rate so many are responded to in time. One slow message among many quick ones changes nothing.
            fitting = int(USED * target * self._responses.rate(now, took))
            return fitting < min(self.limit, most) and self._set(max(1, fitting), now, most)
        if self.limit >= UNLIMITED:
            return False
        self._slowest = max(self._slowest, took)
        self._count += len(counted)
        if self._count < self.limit:
            return False
        has_room, self._slowest, self._count = self._slowest <= ROOM * target, 0.0, 0
        return has_room and self._set(self.limit + max(1, self.limit // GROWTH), now, most)

    def _set(self, limit: int, now: float, most: int) -> bool:
        before, self.limit = self.limit, limit if limit < most else UNLIMITED
        if self.limit == before:
            return False
        self._since = now + SETTLE
        self._slowest, self._count = 0.0, 0
        return True


class _RecentCount:
    """Counts what happens, in this period and in the one before."""

    def __init__(self) -> None:
        self._began_before = self._began = float("-inf")
        self._before = self._now = 0

    def add(self, count: int, now: float, period: float) -> None:
        if now - self._began >= period:
            is_next = now - self._began < 2 * period
            self._before, self._began_before = (self._now, self._began) if is_next else (0, now)
            self._now, self._began = 0, now
        self._now += count

    def rate(self, now: float, least: float) -> float:
        """How many happen in a second, by what was counted over ``least`` seconds or longer."""
        return (self._before + self._now) / max(now - self._began_before, least)
