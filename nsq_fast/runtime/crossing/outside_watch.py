"""A warning about a thread that does not take what it is given, while that lasts: a blocked event loop, mostly."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable

from nsq_fast.log_events import OUTSIDE_BLOCKED
from nsq_fast.runtime.consuming.watchdog import MAX_FRAMES, QUIET, WARN_AFTER, watchdog
from nsq_fast.runtime.owner_thread import get_ident


class OutsideWatch:
    """Looks at one thread. Made in that; ``look`` is called in the thread of the watchdog.

    Args:
        log: gets the warnings.
        what: does not run, in words.
        waiting_since: says since when it has not taken something (monotonic); 0.0 when there is nothing.
    """

    def __init__(self, log: logging.Logger, what: str, waiting_since: Callable[[], float]) -> None:
        self._log = log
        self._what = what
        self._waiting_since = waiting_since
        self._ident = get_ident()
        self._warned = 0.0
        self._quiet_until = 0.0

    def start(self) -> None:
        """Begin to look."""
        watchdog.add(self)

    def stop(self) -> None:
        """Look no more. Idempotent."""
        watchdog.remove(self)

    def look(self, now: float, warned: object) -> None:
        """Warn once if the thread has not run for too long."""
        since = self._waiting_since()
        if not since or now - since < WARN_AFTER or since == self._warned or now < self._quiet_until:
            return
        self._warned, self._quiet_until = since, now + QUIET
        frame = sys._current_frames().get(self._ident)
        lines = [] if frame is None else traceback.format_stack(frame)[-MAX_FRAMES:]
        self._log.warning(
            "%s has not run for %.1f s: results and messages of nsq_fast wait for it; heartbeats go on. It is here:"
            "\n%s",
            self._what, now - since, "".join(lines).rstrip(), extra=OUTSIDE_BLOCKED,
        )  # fmt: skip
