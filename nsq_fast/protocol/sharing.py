"""When a consumer sends which RDY: `rdy` over a consumer's life, with backoff. Pure.

Whoever owns the connections calls ``changes`` when something happened or the time that ``next_look`` named is there:
a connection came or went, max_in_flight or the backoff changed; and, while ``is_waiting``, messages were responded to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from . import rdy
from .backoff import Backoff

LOOKS = 4
"""Turns of a scarce RDY are looked at so often in each idle timeout, at least."""


def limit_in_backoff(usual: int, allowed: int, backoff: Backoff, now: float) -> int:
    """Messages to ask for: ``usual``; none while the backoff has a pause, then one if ``allowed`` has room: a probe."""
    if backoff.is_paused(now):
        return 0
    return min(1, allowed) if backoff.is_on else usual


class Sharing:
    """Shares max_in_flight out over the connections of one consumer.

    Args:
        idle_timeout: seconds without a message after which a connection passes a scarce RDY on.
        random: gives numbers in [0, 1).
        probes: a connection without any message passes a scarce RDY on after this part of the idle timeout.

    Attributes:
        is_waiting: whether some connection waits for a share that others still hold.
    """

    def __init__(self, idle_timeout: float, random: Callable[[], float], probes: int = rdy.PROBES) -> None:
        self._idle_timeout = idle_timeout
        self._random = random
        self._probes = probes
        self.is_waiting = False

    def changes(
        self, shares: Sequence[rdy.Share], limit: int, allowed: int, now: float, expected: int = 0
    ) -> list[tuple[int, int]]:
        """The RDYs to send now, as (index of the connection, RDY); whoever sends one notes it with ``Share.sent``.

        Args:
            limit: messages to ask for, over all connections.
            allowed: messages that may be held, over all connections; not below ``limit``.
            expected: connections that are being made, for which room is kept.
        """
        absent = [rdy.Share() for _ in range(expected)] if limit >= len(shares) + expected else []
        wanted = rdy.targets(
            [*shares, *absent], limit, now, idle_timeout=self._idle_timeout, random=self._random, probes=self._probes
        )
        plan = rdy.plan(shares, wanted[: len(shares)], allowed, now)
        self.is_waiting = plan.waiting
        return plan.changes

    def next_look(
        self, shares: Sequence[rdy.Share], backoffs: Iterable[Backoff], limit: int, now: float
    ) -> float | None:
        """Seconds until ``changes`` is to be called again although nothing happened; None for never."""
        moments = [backoff.until for backoff in backoffs if backoff.is_paused(now)]
        if self.is_waiting:
            moments.extend(share.settles_at for share in shares if share.settles_at > now)
        if 0 < limit < len(shares):
            moments.append(now + max(rdy.SETTLE / LOOKS, self._idle_timeout / max(LOOKS, self._probes)))
        return max(0.0, min(moments) - now) if moments else None
