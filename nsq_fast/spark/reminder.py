"""A state that lasts is told of when it begins, every minute while it lasts, and when it is over."""

from __future__ import annotations

import logging
import time

from nsq_fast.log_events import SPARK_WAIT_OVER, SPARK_WAITS

INTERVAL = 60.0
"""Seconds between two warnings of the same thing."""


class Reminder:
    """Warnings of what a query waits for, by key: the same text is not written fifty times a second."""

    def __init__(self, logger: logging.Logger, interval: float = INTERVAL) -> None:
        self._logger = logger
        self._interval = interval
        self._told_at: dict[str, float] = {}
        self._since: dict[str, float] = {}

    def warn(self, key: str, text: str) -> None:
        """``text`` is so now: write it, unless it was written less than ``interval`` seconds ago."""
        now = time.monotonic()
        since = self._since.setdefault(key, now)
        if now - self._told_at.get(key, float("-inf")) < self._interval:
            return
        self._told_at[key] = now
        lasting = f" (for {now - since:.0f} s now)" if now > since else ""
        self._logger.warning("%s%s", text, lasting, extra=SPARK_WAITS)

    def over(self, key: str) -> None:
        """It is so no more."""
        since = self._since.pop(key, None)
        if since is not None:
            del self._told_at[key]
            self._logger.warning("%s: over after %.0f s", key, time.monotonic() - since, extra=SPARK_WAIT_OVER)

    def age(self, key: str) -> float | None:
        """For how many seconds it has been so; None when it is not."""
        since = self._since.get(key)
        return None if since is None else time.monotonic() - since
