"""How long publishes take until they are confirmed: measured for samples of them, where ``histograms`` asks for it."""

from __future__ import annotations

from time import monotonic

from nsq_fast.runtime.histogram import Histogram

from .publish import Publish

EVERY = 0.01
"""Seconds between two samples."""


class PublishTiming:
    """What was sampled: at most one publish in ``EVERY`` seconds.

    Args:
        timeout: of publishes that have none of their own, in seconds.

    Attributes:
        latency: seconds from the call of a publish to the confirmation that an nsqd has it, retries included.
    """

    def __init__(self, timeout: float) -> None:
        self.latency = Histogram()
        self._timeout = timeout
        self._next = 0.0

    def stored(self, publish: Publish) -> None:
        """An nsqd has confirmed a publish."""
        now = monotonic()
        if now >= self._next:
            self._next = now + EVERY
            # When it began follows from its deadline: nothing more is kept for each publish.
            began = publish.deadline - (self._timeout if publish.timeout is None else publish.timeout)
            self.latency.observe(now - began)
