"""The place of one process of a worker: what runs there is started again when it ends, and can be replaced without a
gap."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from time import monotonic

from nsq_fast.config import WorkerConfig
from nsq_fast.log_events import (
    WORKER_PROCESS_DELAYED,
    WORKER_PROCESS_DIED,
    WORKER_PROCESS_ENDED,
    WORKER_PROCESS_LATE,
)

from .process import Process
from .reports import WRONG_PROGRAM, Phase

logger = logging.getLogger(__name__)

LEAST_DELAY = 0.1
"""Seconds: the second pause where ``restart_delay`` is 0."""

GOOD_AFTER = 60.0
"""Seconds: a process that ran so long was well; the next pause is the first one again."""


class Slot:
    """One place.

    Args:
        start: starts a process for this place.

    Attributes:
        current: what runs there; None while it waits to be started again.
        successor: what takes its place as soon as it is ready.
        leaving: those that were asked to end and have not ended.
        restarts: how often one was started in place of one that had ended by itself.
        is_wrong: whether the first process ended because there is nothing that it could run.
    """

    def __init__(self, number: int, config: WorkerConfig, start: Callable[[int], Process]) -> None:
        self.number = number
        self.current: Process | None = None
        self.successor: Process | None = None
        self.leaving: list[Process] = []
        self.restarts = 0
        self.is_wrong = False
        self._config = config
        self._start = start
        self._delay = config.restart_delay
        self._start_at: float | None = None
        self._unsaid_delay: float | None = None
        self._has_run = False

    def processes(self) -> Iterator[Process]:
        """All of them."""
        yield from self.leaving
        for each in (self.current, self.successor):
            if each is not None:
                yield each

    def start(self) -> None:
        """Start a process, now; where the system cannot, after a pause."""
        self._start_at = self._unsaid_delay = None
        self.current = self._started()
        if self.current is None:
            self._start_later(monotonic())

    def _started(self) -> Process | None:
        try:
            return self._start(self.number)
        except OSError as error:
            logger.error("process %d cannot be started: %s", self.number, error, extra=WORKER_PROCESS_DIED)
            return None

    @property
    def is_replacing(self) -> bool:
        """Whether ``replace`` has begun, and the old process has not ended."""
        return self.successor is not None or bool(self.leaving)

    def replace(self) -> bool:
        """Start another process; the old one is asked to end as soon as the new one is ready. Whether it is started."""
        if self.current is None:
            self.start()
            return self.current is not None
        self.successor = self._started()
        return self.successor is not None

    def drain(self) -> None:
        """Ask everything here to end, for good."""
        self._start_at = self._unsaid_delay = None
        for each in list(self.processes()):
            each.drain()
        self.leaving = list(self.processes())
        self.current = self.successor = None

    def look(self, now: float) -> bool:
        """Start, replace and kill what is due; whether a replacement has failed."""
        for each in self.leaving:
            each.enforce(now)
        self._say_delay()
        if self._start_at is not None and now >= self._start_at:
            self.restarts += 1
            self.start()
        if self.current is not None and self.current.report.phase is Phase.RUNNING:
            self._has_run = True
        if self.successor is None:
            return False
        if self._may_change_over(self.successor):
            self._change_over()
            return False
        return self._is_overdue(self.successor, now)

    def _may_change_over(self, successor: Process) -> bool:
        """Where the old one is not ready either, there is no gap to fear: the servers are away."""
        is_running = successor.report.phase is Phase.RUNNING
        return self.current is None or successor.is_ready or (is_running and not self.current.is_ready)

    def _is_overdue(self, successor: Process, now: float) -> bool:
        """End a successor that is not ready in time."""
        limit = self._config.start_timeout
        if now - successor.started_at < limit:
            return False
        text = "%s is not ready after %g s (start_timeout): %s goes on"
        logger.error(text, successor, limit, self.current, extra=WORKER_PROCESS_LATE)
        successor.drain()
        self.leaving.append(successor)
        self.successor = None
        return True

    def _change_over(self) -> None:
        if self.current is not None:
            self.current.drain()
            self.leaving.append(self.current)
        self.current, self.successor = self.successor, None

    def ended(self, process: Process, code: int, now: float) -> bool:
        """A process has ended. Whether a replacement has failed with it."""
        if process in self.leaving:
            self.leaving.remove(process)
            level = logging.INFO if code == 0 else logging.WARNING
            text = process.why(code) if code else f"{process} has ended"
            logger.log(level, "%s", text, extra=WORKER_PROCESS_ENDED)
        elif process is self.successor:
            self.successor = None
            old = self.current or f"process {self.number}"
            logger.error("%s; %s goes on", process.why(code), old, extra=WORKER_PROCESS_DIED)
            return True
        elif process is self.current:
            self._lost(process, code, now)
        return False

    def _lost(self, process: Process, code: int, now: float) -> None:
        self.current, self.successor = self.successor, None
        if self.current is not None:
            text = "%s; %s takes its place"
            logger.error(text, process.why(code), self.current, extra=WORKER_PROCESS_DIED)
        else:
            self.is_wrong |= code == WRONG_PROGRAM and not self._has_run
            if now - process.started_at >= GOOD_AFTER:
                self._delay = self._config.restart_delay
            logger.error("%s", process.why(code), extra=WORKER_PROCESS_DIED)
            self._start_later(now)

    def _start_later(self, now: float) -> None:
        """``look`` says so: until then it may turn out that nothing is started again."""
        self._start_at, self._unsaid_delay = now + self._delay, self._delay
        self._delay = min(2 * self._delay or LEAST_DELAY, self._config.max_restart_delay)

    def _say_delay(self) -> None:
        if self._unsaid_delay is None:
            return
        text = "process %d is started again in %g s"
        if self.is_wrong and not self._has_run and not self._config.reload:
            text += ", unless no process can run the program"
        logger.warning(text, self.number, self._unsaid_delay, extra=WORKER_PROCESS_DELAYED)
        self._unsaid_delay = None

    def due_at(self) -> float:
        """When ``look`` has something to do at the latest; monotonic."""
        return self._start_at if self._start_at is not None else monotonic() + 1.0
