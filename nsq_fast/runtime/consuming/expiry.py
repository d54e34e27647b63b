"""Messages that nsqd has taken back because nobody responded to them in time: the log and the signal tell of them."""

from __future__ import annotations

import logging
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from nsq_fast._codec import Message
from nsq_fast.log_events import MESSAGES_EXPIRED
from nsq_fast.runtime.signals import emit

from .flow import Flow
from .stats import Counters

LOG_PAUSE = 10.0
"""Seconds between two lines of the log about expired messages."""


if TYPE_CHECKING:

    class ExpiryContext(Protocol):
        """A consumer, the sender of ``on_expired``."""

        flow: Flow
        past: Counters
        logger: logging.Logger


class Expiry:
    """Reports the expired messages of one consumer: each to the signal, a line of the log for many of them."""

    def __init__(self, consumer: ExpiryContext) -> None:
        self._consumer = consumer
        self._count = 0
        self._unstarted = 0
        self._quiet_until = -inf

    def report(self, messages: list[Message], unstarted: int) -> None:
        """``messages`` have expired, ``unstarted`` of them before a handler began with them."""
        self._log(len(messages), unstarted, monotonic())
        for message in messages:
            emit(self._consumer, "on_expired", message=message)

    def report_orphans(self, messages: list[Message]) -> None:
        """``messages`` of lost connections have expired; they no longer count towards ``max_in_flight``."""
        self._consumer.past.expired += len(messages)
        self.report(messages, 0)
        self._consumer.flow.changed()

    def _log(self, count: int, unstarted: int, now: float) -> None:
        self._count += count
        self._unstarted += unstarted
        # A consumer that is too slow loses messages all day: one line for all of them fills no disk.
        if now < self._quiet_until:
            return
        self._quiet_until = now + LOG_PAUSE
        self._consumer.logger.warning(
            "%d messages were not answered before their msg_timeout was over, and nsqd delivers them again;"
            " no handler had begun with %d of them",
            self._count, self._unstarted, extra=MESSAGES_EXPIRED,
        )  # fmt: skip
        self._count = self._unstarted = 0
