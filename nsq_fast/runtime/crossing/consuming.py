"""A Consumer in a hub thread, for programs of threads."""

from __future__ import annotations

from collections.abc import Callable

from nsq_fast.client.consumer import check_timeout
from nsq_fast.errors import NotRunning
from nsq_fast.runtime.consumer import Consumer
from nsq_fast.runtime.handler_threads import OutsideHandlers
from nsq_fast.runtime.owner_thread import get_ident
from nsq_fast.runtime.waiting import is_interrupting

from .hub_thread import HubThread


class CrossingConsumer(Consumer):
    """A Consumer that hands its messages to other threads. All of it belongs to the hub thread."""

    def live_in(self, hub_thread: HubThread, new_handlers: Callable[[], OutsideHandlers | None]) -> CrossingConsumer:
        """Say in which thread it is, and what makes the place where handlers run; None: native threads."""
        self._hub_thread = hub_thread
        self._new_outside = new_handlers
        hub_thread.close_at_exit(self)
        hub_thread.tell_end(self)
        return self

    def thread_ended(self, error: NotRunning) -> None:
        """The hub thread fails: nothing of it runs any more, and nsqd delivers again what it holds. Does not block."""
        if self._is_started and not self._is_closed:
            if self._outside is not None:
                self._outside.leave()
            self.failure = error
            self._closed()

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

    def close_at_exit(self, timeout: float) -> int:
        """Close within ``timeout`` seconds. Messages whose handlers run then are delivered again."""
        self.close(drain=True, timeout=timeout)
        return 0

    def count_unconfirmed(self) -> int:
        """A consumer publishes nothing."""
        return 0
