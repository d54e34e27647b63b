"""Delays that grow: consumer-wide backoff, reconnecting, and the delay of a requeue.

Pure objects: the time comes in as ``now`` (seconds of any steady clock), chance
as a ``random`` callable giving [0, 1). Nothing here overflows or gives up,
however often something fails.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Protocol

from nsq_fast._record import Record

Random = Callable[[], float]


def grown(base: float, factor: float, steps: int, cap: float) -> float:
    """``base * factor ** steps``, at most ``cap``, for any number of steps."""
    if base <= 0.0:
        return 0.0
    try:
        return min(cap, base * factor**steps)
    except OverflowError:
        return cap


class BackoffStrategy(Protocol):
    """How long the pauses of backoff are. Without state and without a clock: levels in, seconds out."""

    @property
    def jitter(self) -> float:
        """The share of each pause that chance may take away: 0.0 for none, 1.0 for all of it."""

    def duration(self, level: int) -> float:
        """The longest pause at ``level`` in seconds: 1 after the first failure, one more after each that follows."""


class ExponentialBackoff(Record, frozen=True):
    """Pauses that grow by ``factor`` with each level, from ``base`` seconds on; a BackoffStrategy.

    With ``jitter=1.0`` a pause is any time up to that: consumers that failed together do not come back together.
    """

    base: float = 1.0
    factor: float = 2.0
    jitter: float = 0.1

    def duration(self, level: int) -> float:
        """The longest pause at ``level`` in seconds."""
        return grown(self.base, self.factor, level - 1, inf)


MOST_LEVELS = 32
"""A strategy whose pauses do not grow to the longest ends here: recovery takes no more successes than levels."""


class Backoff:
    """Backoff of a consumer as the NSQ guide says: pause, probe with one message, recover or pause longer.

    Each pause is a window; results that arrive within it are not counted, so
    one result moves the level once per window. The pause doubles with each
    level up to ``max_duration`` seconds, or does what ``strategy`` says; 0 turns backoff off.
    A failure raises the level by one, a success halves it.
    """

    def __init__(
        self,
        max_duration: float,
        *,
        random: Random,
        base: float = 1.0,
        jitter: float = 0.1,
        strategy: BackoffStrategy | None = None,
    ) -> None:
        self._max_duration = max_duration
        self._strategy = strategy or ExponentialBackoff(base, 2.0, jitter)
        self._random = random
        self.level: int = 0
        self.until: float = 0.0

    @property
    def is_on(self) -> bool:
        """Whether failures are being recovered from: paused, or probing."""
        return self.level > 0

    def is_paused(self, now: float) -> bool:
        """Whether nothing may be asked for yet. When on and not paused, one message at a time may."""
        return self.level > 0 and now < self.until

    def record(self, success: bool, now: float) -> bool:
        """Count the result of a message; say whether it changed anything."""
        if now < self.until or self._max_duration <= 0.0 or (success and self.level == 0):
            return False
        if success:
            self.level = self.level_after_success(self.level)
        elif self.level == 0 or (self.level < MOST_LEVELS and self._duration(self.level) < self._max_duration):
            self.level += 1  # bounded by the cap, so that recovery takes no more steps than the cap has levels
        if self.level:
            self.pause(now)
        else:
            self.until = 0.0
        return True

    @staticmethod
    def level_after_success(level: int) -> int:
        """The next level. Halved, not one less: the pauses of all levels together are as long as the failure was."""
        return level // 2

    def pause(self, now: float) -> None:
        """Begin a pause of the length that the present level asks for."""
        self.until = now + self._with_jitter(self._duration(self.level))

    def probe(self) -> None:
        """End the pause, and let one message show whether things are better."""
        # The level stays: only the result of the message may lower it.
        self.until = 0.0

    def reset(self) -> None:
        """Forget all failures."""
        self.level = 0
        self.until = 0.0

    def _duration(self, level: int) -> float:
        return min(max(0.0, self._strategy.duration(level)), self._max_duration)

    def _with_jitter(self, duration: float) -> float:
        return duration * (1.0 - self._strategy.jitter * self._random())


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
