"""What is in small modules of gnsq's: ``backofftimer``, ``decorators``, ``states`` and ``version``."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from functools import cached_property as cached_property
from sys import float_info
from typing import Any, TypeVar

from nsq_fast.protocol.rdy import grown

__version__ = "1.0.2"
"""The version of gnsq whose interface this is."""

INIT = 0
CONNECTED = 1
DISCONNECTED = 2
RUNNING = 3
BACKOFF = 4
THROTTLED = 5
CLOSED = 6

F = TypeVar("F", bound=Callable[..., Any])


def deprecated(function: F) -> F:
    """Warn with the first line of its docstring whenever ``function`` is called."""

    @functools.wraps(function)
    def warn_and_call(*args: Any, **kwargs: Any) -> Any:
        advice = (function.__doc__ or f"{function.__name__} is deprecated").partition("\n")[0]
        warnings.warn(advice, DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    return warn_and_call  # type: ignore[return-value]


class BackoffTimer:
    """Counts failures, for an interval that doubles with each. Never overflows, however many there are.

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
