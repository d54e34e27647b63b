"""Delays that grow: those of reconnecting and of requeues.

Pure objects: the time comes in as ``now`` (seconds of any steady clock), chance
as a ``random`` callable giving [0, 1). Nothing here overflows or gives up,
however often something fails.
"""

from __future__ import annotations

from collections.abc import Callable

Random = Callable[[], float]


def grown(base: float, factor: float, steps: int, cap: float) -> float:
    """``base * factor ** steps``, at most ``cap``, for any number of steps."""
    if base <= 0.0:
        return 0.0
    try:
        return min(cap, base * factor**steps)
    except OverflowError:
        return cap


class ReconnectDelay:
    """Pauses between attempts to connect: doubling, with jitter, capped, without end.

    A connection that lasted ``good_after`` seconds was good: the next pause starts from ``base`` again.
    One that is accepted and closed at once keeps the pauses growing.
    """

    def __init__(
        self, max_delay: float, *, random: Random, base: float = 0.1, good_after: float = 5.0, factor: float = 2.0
    ) -> None:
        self._max_delay = max_delay
        self._random = random
        self._base = base
        self._factor = factor
        self._good_after = good_after
        self._failures = 0
        self._connected_at: float | None = None

    def connected(self, now: float) -> None:
        """Note that a connection was made and subscribed."""
        self._connected_at = now

    def next(self, now: float) -> float:
        """Seconds to wait after the connection was lost, or could not be made."""
        if self._connected_at is not None and now - self._connected_at >= self._good_after:
            self._failures = 0
        self._connected_at = None
        delay = grown(self._base, self._factor, self._failures, self._max_delay)
        # Not counted above the cap: the power would overflow after a night without a server.
        if delay < self._max_delay:
            self._failures += 1
        return delay * (0.5 + 0.5 * self._random())


class RequeueDelay:
    """Delay of a requeue from the attempts of its message: ``base * factor ** (attempts - 1)``, capped, with jitter.

    Args:
        fixed_ms: when given, every requeue is delayed by exactly this, in ms.
        base, cap: seconds.
        jitter: share of the delay that chance adds or takes.
    """

    def __init__(
        self, fixed_ms: int | None, *, base: float, factor: float, cap: float, jitter: float, random: Random
    ) -> None:
        self._fixed_ms = fixed_ms
        self._base = base
        self._factor = factor
        self._cap = cap
        self._jitter = jitter
        self._random = random

    def __call__(self, attempts: int) -> int:
        """The delay in milliseconds."""
        if self._fixed_ms is not None:
            return self._fixed_ms
        delay = grown(self._base, self._factor, max(attempts - 1, 0), self._cap)
        delay *= 1.0 + self._jitter * (2.0 * self._random() - 1.0)
        return int(1000 * min(delay, self._cap))
