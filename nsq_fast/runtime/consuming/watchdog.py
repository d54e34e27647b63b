"""A warning about handlers that keep the hub from running, while they do it.

Nothing in the hub's thread can tell of that in time, so a native thread looks a
few times a second. There is one thread for all consumers of a process; it ends
with the last of them, and begins anew in a child that is forked.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterable
from time import monotonic
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Protocol

from gevent.hub import Hub
from gevent.monkey import get_original  # patches nothing: it finds what a program may have patched

from nsq_fast.log_events import HUB_BLOCKED
from nsq_fast.runtime.fork import tell_forks
from nsq_fast.runtime.loop_turns import LoopTurns, loop_turns
from nsq_fast.runtime.owner_thread import get_ident

WARN_AFTER = 1.0
"""Seconds without the hub that are worth a warning."""

QUIET = 60.0
"""Seconds between two warnings of one consumer."""

PAUSE = 0.25
MAX_FRAMES = 12

_REMEDY = (
    "Meanwhile nothing else in this thread runs: no heartbeat is answered, no other message is handled."
    " Let it wait with gevent (monkey.patch_all()), or give the consumer handler_threads=N"
)


class HubWatch:
    """Looks at one consumer's hub. Made in its thread; ``look`` is called in that of the watchdog.

    Args:
        log: gets the warnings.
        calls_handlers: the code of the functions that call handlers: what runs above one of them is a handler.
        is_handling: whether any message of the consumer is being handled now.
        is_iterated: whether a program takes the messages by itself: its code is a handler while it is at one.
    """

    def __init__(
        self,
        log: logging.Logger,
        calls_handlers: Iterable[CodeType],
        is_handling: Callable[[], bool],
        *,
        is_iterated: bool,
    ) -> None:
        self._log = log
        self._callers = frozenset(calls_handlers)
        self._is_handling = is_handling
        self._is_iterated = is_iterated
        self._ident = get_ident()
        self._turns: LoopTurns = loop_turns()
        self._iteration = -1
        self._since = 0.0
        self._quiet_until = 0.0
        self._suppressed = 0

    def look(self, now: float, warned: dict[int, int]) -> None:
        """Warn if a handler has kept the hub from running for too long, once.

        ``warned`` has the last turn of each thread's loop that a consumer has warned of: another does not do so again.
        """
        iteration = self._turns.iteration
        is_warned_of = warned.get(self._ident) == iteration
        frame = None if is_warned_of or not self._is_handling() else sys._current_frames().get(self._ident)
        stack = None if frame is None else self._handler_stack(frame)
        if stack is None:
            self._iteration = -1
        elif iteration != self._iteration:
            self._iteration = iteration
            # Workers look at the loop before each handler, so this is when the first one since its last turn began.
            self._since = self._turns.began_at if self._turns.noted_iteration == iteration else now
        if stack and now - self._since >= WARN_AFTER:
            self._warn(now, stack)
            warned[self._ident] = iteration

    def _handler_stack(self, frame: FrameType) -> list[FrameType] | None:
        """The frames of the handler that runs now, the innermost first; None when none does."""
        is_hub = frame.f_code is Hub.run.__code__
        stack: list[FrameType] = []
        at: FrameType | None = frame
        while at is not None:
            if at.f_code in self._callers:
                return stack or [at]
            stack.append(at)
            at = at.f_back
        return stack if self._is_iterated and not is_hub else None

    def _warn(self, now: float, stack: list[FrameType]) -> None:
        if now < self._quiet_until:
            self._suppressed += 1
            return
        lines = traceback.StackSummary.extract((each, each.f_lineno) for each in reversed(stack[:MAX_FRAMES])).format()
        more = f" ({self._suppressed} more in the last minute)" if self._suppressed else ""
        self._quiet_until, self._suppressed = now + QUIET, 0
        self._log.warning(
            "a handler has kept the hub from running for %.1f s%s. %s. It is here:\n%s",
            now - self._since, more, _REMEDY, "".join(lines).rstrip(), extra=HUB_BLOCKED,
        )  # fmt: skip


if TYPE_CHECKING:

    class Watch(Protocol):
        """What the watchdog looks after."""

        def look(self, now: float, warned: dict[int, int]) -> None:
            """Warn if there is reason to; ``warned`` as for ``HubWatch.look``."""


class Watchdog:
    """The native thread, and the watches that it looks after. All methods but ``_run`` belong to any thread."""

    def __init__(self) -> None:
        self._watches: list[Watch] = []
        self._warned: dict[int, int] = {}
        self._is_running = False
        self._lock = get_original("_thread", "allocate_lock")()
        tell_forks(self)

    def add(self, watch: Watch) -> None:
        """Look after one more."""
        with self._lock:
            self._watches.append(watch)
            if not self._is_running:
                self._is_running = True
                get_original("_thread", "start_new_thread")(self._run, ())

    def remove(self, watch: Watch) -> None:
        """Look after one no more. Idempotent."""
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)

    def forked(self) -> None:
        """In the child of a fork: the thread is the parent's, and so are the consumers."""
        self._watches = []
        self._is_running = False
        self._lock = get_original("_thread", "allocate_lock")()

    @property
    def is_running(self) -> bool:
        """Whether there is a thread."""
        return self._is_running

    def _run(self) -> None:
        sleep = get_original("time", "sleep")
        while True:
            sleep(PAUSE)
            with self._lock:
                watches = list(self._watches)
                if not watches:
                    self._is_running = False
                    return
            for watch in watches:
                self._look(watch)

    def _look(self, watch: Watch) -> None:
        try:
            watch.look(monotonic(), self._warned)
        except Exception:  # its hub was destroyed, or logging failed: the others are still looked after
            self.remove(watch)


watchdog = Watchdog()
