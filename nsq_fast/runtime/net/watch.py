"""Notices that a peer went silent, with one timer per connection however much is received."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any

from gevent import get_hub

from nsq_fast.runtime.loop_turns import LAST

# How long a peer that looks silent gets to be heard after all: bytes may have arrived while this process was busy.
GRACE = 0.1


class SilenceWatch:
    """Calls ``on_silence()`` once, in the hub, when ``last_heard()`` is ``limit`` seconds ago.

    ``last_heard`` gives a time of ``time.monotonic()``. The timer is not restarted when something is heard;
    it looks when it fires, and sleeps for what is left.

    With ``on_overdue``, that is called before: each time when nothing was heard for ``overdue_after`` seconds.
    """

    def __init__(
        self,
        limit: float,
        last_heard: Callable[[], float],
        on_silence: Callable[[], Any],
        overdue_after: float = inf,
        on_overdue: Callable[[], Any] | None = None,
    ) -> None:
        self._limit = limit
        self._overdue_after = overdue_after
        self._on_overdue = on_overdue
        self._overdue_since: float | None = None
        self._last_heard = last_heard
        self._on_silence = on_silence
        self._timer: Any = None

    def start(self) -> None:
        """Begin to watch."""
        self._sleep(min(self._limit, self._overdue_after), False)

    def stop(self) -> None:
        """Watch no more. Idempotent."""
        if self._timer is not None:
            self._timer.stop()
            self._timer.close()
            self._timer = None

    def _sleep(self, seconds: float, is_suspected: bool) -> None:
        self.stop()
        # After a time in which the hub did not run, the loop finds timers that are due beside sockets that can be read:
        # what came is received first, and only a peer that sent nothing looks silent.
        self._timer = get_hub().loop.timer(seconds, priority=LAST)
        # The loop knows what time it was at its last turn: from there on, the timer would be early.
        self._timer.start(self._look, is_suspected, update=True)

    def _look(self, is_suspected: bool) -> None:
        heard, now = self._last_heard(), monotonic()
        left = heard + self._limit - now
        left_until_overdue = heard + self._overdue_after - now
        if self._on_overdue is not None and left_until_overdue <= 0 and heard != self._overdue_since:
            self._overdue_since = heard
            self._on_overdue()
        if left > 0:
            self._sleep(left_until_overdue if 0 < left_until_overdue < left else left, False)
        elif not is_suspected:
            self._sleep(GRACE, True)
        else:
            self.stop()
            self._on_silence()
