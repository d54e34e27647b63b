"""BackoffTimer: an interval that doubles with each failure, multiplied by a random number."""

from __future__ import annotations

import random
from sys import float_info

from nsq_fast.protocol.backoff import grown


class BackoffTimer:
    """Counts failures. Never overflows, however many there are.

    Args:
        ratio: what the interval is multiplied with, in seconds.
        max_interval, min_interval: bounds of the interval in seconds; None: no bound.
    """

    def __init__(self, ratio: float = 1, max_interval: float | None = None, min_interval: float | None = None) -> None:
        self.c: int = 0
        self.ratio = ratio
        self.max_interval = max_interval
        self.min_interval = min_interval

    def is_reset(self) -> bool:
        return self.c == 0

    def reset(self) -> BackoffTimer:
        self.c = 0
        return self

    def success(self) -> BackoffTimer:
        self.c = max(self.c - 1, 0)
        return self

    def failure(self) -> BackoffTimer:
        self.c += 1
        return self

    def get_interval(self) -> float:
        """Seconds to wait: random * (2 ** failures - 1) * ratio, within the bounds."""
        interval = random.random() * (grown(1.0, 2.0, self.c, float_info.max) - 1) * self.ratio
        if self.max_interval is not None:
            interval = min(interval, self.max_interval)
        if self.min_interval is not None:
            interval = max(interval, self.min_interval)
        return interval
