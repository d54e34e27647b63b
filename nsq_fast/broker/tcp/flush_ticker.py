"""When messages that a client's output buffer holds go out, although it is not full: at the ticks of a clock.

nsqio/nsq: nsqd/protocol_v2.go, messagePump, outputBufferTicker. Pure policy: the caller has the clock.
"""

from __future__ import annotations


class FlushTicker:
    """A ticker as Go's ``time.Ticker`` is one: a tick that nobody takes waits, and those after it are dropped.

    So the first message after a pause goes out at once, and those that follow it go out together with the next tick.

    Args:
        period: seconds from tick to tick; 0: there are none.
        now: when it begins.
    """

    def __init__(self, period: float, now: float) -> None:
        self._period = period
        self._next = now + period

    def take(self, now: float) -> bool:
        """Take the tick that waits; False if there is none."""
        if not self._period or now < self._next:
            return False
        self._next += self._period * (1 + (now - self._next) // self._period)
        return True

    def wait(self, now: float) -> float | None:
        """Seconds to the next tick; None if there is none."""
        return max(0.0, self._next - now) if self._period else None
