"""A Consumer in a hub thread, whose handlers run elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from nsq_fast.errors import NotRunning
from nsq_fast.runtime.consumer import Consumer
from nsq_fast.runtime.consuming.closing import check_timeout
from nsq_fast.runtime.consuming.outside_handlers import OutsideHandlers
from nsq_fast.runtime.owner_thread import get_ident
from nsq_fast.runtime.signals import emit
from nsq_fast.runtime.waiting import is_interrupting

from .hub_thread import HubThread

ABANDON_TIMEOUT = 1.0
"""Seconds for responses to leave when the place where handlers ran is gone."""

NewHandlers = Callable[["CrossingConsumer"], OutsideHandlers | None]


class CrossingConsumer(Consumer):
    """A Consumer that hands its messages to another thread. All of it belongs to the hub thread."""

    def live_in(self, hub_thread: HubThread, new_handlers: NewHandlers) -> CrossingConsumer:
        """Say in which thread it is, and what makes the place where handlers run; None: native threads."""
        self._hub_thread = hub_thread
        self.workers.new_outside = lambda: new_handlers(self)
        hub_thread.close_at_exit(self)
        hub_thread.tell_end(self)
        return self

    def thread_ended(self, error: NotRunning) -> None:
        """The hub thread fails: nothing of it runs any more, and nsqd delivers again what it holds. Does not block."""
        if self._is_started and not self._closing.done.is_set():
            self.workers.leave()
            self._closing.lost(error)
            emit(self, "on_close")

    def close_from_outside(self, drain: bool, timeout: float | None) -> None:
        """``close``, in any thread; where that must not wait, it only begins to."""
        check_timeout(timeout)
        thread = self._hub_thread
        if self._thread.is_served_here or is_interrupting() or get_ident() == thread.ident:
            self.begin_closing_from_outside(drain, timeout)
        else:
            thread.call(self.close, drain, timeout)

    def begin_closing_from_outside(self, drain: bool, timeout: float | None) -> None:
        """Begin to ``close``, in any thread."""
        check_timeout(timeout)
        self._hub_thread.submit(self._hub_thread.start_job, self.close, drain, timeout)

    def close_in_background(self) -> None:
        """Begin to close. Does not block."""
        self._hub_thread.start_job(self.close)

    def abandon_handlers(self) -> None:
        """Where handlers ran, nothing runs any more: requeue what they had begun with, and close. Does not block."""
        if self.workers.outside is not None:
            self.workers.outside.abandon()
        self._hub_thread.start_job(self.close, True, ABANDON_TIMEOUT)

    @property
    def failure(self) -> Exception | None:
        """What closed it, if that was an error."""
        return self._closing.failure

    def close_at_exit(self, timeout: float) -> int:
        """Close within ``timeout`` seconds. Messages whose handlers run then are delivered again."""
        self.close(drain=True, timeout=timeout)
        return 0

    def count_unconfirmed(self) -> int:
        """A consumer publishes nothing."""
        return 0
