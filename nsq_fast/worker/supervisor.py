"""The supervisor of a worker: it starts processes, starts again what ends, replaces them one by one on SIGHUP, and ends
them in good order on SIGTERM and SIGINT.

All of it happens in one thread, between two waits for what the processes, signals and files have to say. It runs no
code of the program and no consumer.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from time import monotonic

from nsq_fast.log_events import (
    WORKER_DRAINING,
    WORKER_KILLED,
    WORKER_PROCESS_STARTED,
    WORKER_PROGRAM_FAILED,
    WORKER_RESTART_BEGAN,
    WORKER_RESTART_ENDED,
)

from .health import ProcessState, Snapshot, liveness, readiness
from .notify import Notifier
from .process import Process
from .reports import WRONG_PROGRAM, Phase
from .slot import Slot
from .status_page import StatusPage
from .task import Task
from .totals import Totals
from .watch import FileWatch

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LONGEST_WAIT = 1.0


class Supervisor:
    """The supervisor of one worker. Its process has no other use."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._config = task.settings.worker
        self._selector = selectors.DefaultSelector()
        self._past = Totals()
        self._slots = [Slot(number, self._config, self._start_process) for number in range(self._config.processes)]
        self._events: deque[int | str] = deque()
        self._to_replace: deque[Slot] = deque()
        self._replacing: Slot | None = None
        self._stop_signal = 0
        self._exit_code = 0
        self._is_up = False
        self._has_replacement_failed = False
        self._notifier = Notifier()
        self._watchdog_at = 0.0
        self._status = StatusPage(self._config.alive_timeout)
        self._tell(monotonic())

    def run(self) -> int:
        """Run until a signal ends it, and return the exit code: 0, 78 when there is nothing to run, 128 and more when
        a second signal did not wait for handlers.

        Raises ConfigError when it cannot listen, or lacks what an option needs.
        """
        self._status.listen(self._config.http)
        watch = FileWatch(Path(self._task.folder), self._file_changed) if self._config.reload else None
        self._take_signals()
        for slot in self._slots:
            slot.start()
        while not self._is_over:
            for key, _ in self._selector.select(self._until_next()):
                key.data()
            self._handle_events()
            self._reap()
            self._look()
        if watch is not None:
            watch.stop()
        self._status.close()
        return self._exit_code

    # What happens

    def _take_signals(self) -> None:
        reader, self._waker = os.pipe()
        for descriptor in (reader, self._waker):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda number, frame: self._events.append(number))
        self._selector.register(reader, selectors.EVENT_READ, lambda: _drop(reader))

    def _file_changed(self, path: str) -> None:
        """In another thread."""
        self._events.append(path)
        with suppress(BlockingIOError):
            os.write(self._waker, b"\0")

    def _handle_events(self) -> None:
        while self._events:
            event = self._events.popleft()
            if isinstance(event, str):
                logger.info("%s has changed", event, extra=WORKER_RESTART_BEGAN)
                self._begin_replacing()
            elif event in STOP_SIGNALS:
                self._stop(event)
            elif event == signal.SIGHUP:
                logger.info("SIGHUP: the processes are replaced one by one", extra=WORKER_RESTART_BEGAN)
                self._begin_replacing()

    # Starting, and starting again

    def _start_process(self, number: int) -> Process:
        process = Process(number, self._task, self._selector)
        logger.info("%s is started", process, extra=WORKER_PROCESS_STARTED)
        return process

    def _begin_replacing(self) -> None:
        if self._is_ending:
            return
        self._notifier.reloading()
        self._has_replacement_failed = False
        self._to_replace = deque(self._slots)

    def _reap(self) -> None:
        now = monotonic()
        for slot in self._slots:
            for process in list(slot.processes()):
                code = process.ended()
                if code is None:
                    continue
                self._past = self._past.with_ended(process.report.metrics)
                if slot.ended(process, code, now):
                    self._replacement_failed()

    def _look(self) -> None:
        now = monotonic()
        self._end_without_program()
        for slot in self._slots:
            if slot.look(now):
                self._replacement_failed()
        self._go_on_replacing()
        self._tell(now)

    def _end_without_program(self) -> None:
        if all(slot.is_wrong for slot in self._slots) and not self._config.reload and not self._exit_code:
            logger.error("%s cannot be run: the worker ends", self._task.target, extra=WORKER_PROGRAM_FAILED)
            self._exit_code = WRONG_PROGRAM
            self._to_replace.clear()
            for slot in self._slots:
                slot.drain()

    def _go_on_replacing(self) -> None:
        if self._replacing is not None and not self._replacing.is_replacing:
            self._replacing = None
            if not self._to_replace:
                self._replaced()
        if self._replacing is None and self._to_replace:
            self._replacing = self._to_replace.popleft()
            if not self._replacing.replace():
                self._replacement_failed()

    def _replaced(self) -> None:
        if self._is_ending:
            return
        self._notifier.tell("READY=1")
        if self._has_replacement_failed:
            logger.error("the restart has ended: not all processes are replaced", extra=WORKER_RESTART_ENDED)
        else:
            logger.info("the restart has ended: all processes are replaced", extra=WORKER_RESTART_ENDED)

    def _replacement_failed(self) -> None:
        self._has_replacement_failed = True
        self._to_replace.clear()

    # Ending

    def _stop(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stop_signal:
            text = "%s again: the processes are killed; nsqd delivers again what they held"
            logger.warning(text, name, extra=WORKER_KILLED)
            self._exit_code = 128 + number
            for slot in self._slots:
                for process in slot.processes():
                    process.kill()
            return
        limit = self._config.drain_timeout
        logger.info("%s: the processes drain for %g s at most", name, limit, extra=WORKER_DRAINING)
        self._stop_signal = number
        self._notifier.tell("STOPPING=1")
        self._to_replace.clear()
        for slot in self._slots:
            slot.drain()

    @property
    def _is_ending(self) -> bool:
        return bool(self._stop_signal or self._exit_code)

    @property
    def _is_over(self) -> bool:
        return self._is_ending and not any(True for slot in self._slots for _ in slot.processes())

    # What is told

    def _until_next(self) -> float:
        due = min(slot.due_at() for slot in self._slots)
        return max(0.0, min(due - monotonic(), self._notifier.watchdog_interval or LONGEST_WAIT, LONGEST_WAIT))

    def _tell(self, now: float) -> None:
        snapshot = self._snapshot(now)
        self._status.shown = snapshot, self._past
        ready = readiness(snapshot, now, self._config.alive_timeout)
        self._notifier.status("ready" if ready.is_well else "; ".join(ready.reasons))
        if not self._is_up and all(_is_running(slot) for slot in self._slots):
            self._is_up = True
            self._notifier.tell("READY=1")
        interval = self._notifier.watchdog_interval
        if interval is not None and now >= self._watchdog_at:
            if liveness(snapshot, now, self._config.alive_timeout).is_well:
                self._notifier.tell("WATCHDOG=1")
            self._watchdog_at = now + interval

    def _snapshot(self, now: float) -> Snapshot:
        processes = tuple(
            ProcessState(each.number, each.pid, each.report, each.reported_at, each.is_leaving)
            for slot in self._slots
            for each in slot.processes()
        )
        missing = tuple(slot.number for slot in self._slots if slot.current is None and not self._is_ending)
        restarts = sum(slot.restarts for slot in self._slots)
        return Snapshot(now, processes, missing, restarts, self._is_ending)


def _is_running(slot: Slot) -> bool:
    return slot.current is not None and slot.current.report.phase is Phase.RUNNING


def _drop(descriptor: int) -> None:
    with suppress(BlockingIOError):
        os.read(descriptor, 4096)


def check(task: Task) -> int:
    """Have a process say what it would run; return its exit code."""
    selector = selectors.DefaultSelector()
    process = Process(0, task, selector)
    while (code := process.ended()) is None:
        for key, _ in selector.select(0.1):
            key.data()
    sys.stderr.flush()
    return code
