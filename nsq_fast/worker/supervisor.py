"""The supervisor of a worker: it starts processes, starts again what ends, replaces them one by one on SIGHUP, and ends
them in good order on SIGTERM and SIGINT.

All of it happens in one thread, between two waits for what the processes, signals and files have to say. It runs no
code of the program and no consumer.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import CLOCK_MONOTONIC, clock_gettime_ns, monotonic
from typing import Any

import msgspec

from nsq_fast._lazy import get_logger
from nsq_fast.errors import ConfigError, printable
from nsq_fast.log_events import (
    WORKER_DRAINING,
    WORKER_KILLED,
    WORKER_LOGS_LEFT_OUT,
    WORKER_OPTIONS_UNUSED,
    WORKER_PROCESS_DELAYED,
    WORKER_PROCESS_DIED,
    WORKER_PROCESS_ENDED,
    WORKER_PROCESS_LATE,
    WORKER_PROCESS_STARTED,
    WORKER_PROGRAM_FAILED,
    WORKER_RESTART_BEGAN,
    WORKER_RESTART_ENDED,
)
from nsq_fast.worker.settings import WorkerConfig

from .health import (
    DRAIN,
    ECHO,
    EXIT_GRACE,
    SCRAPE,
    UNFINISHED,
    WRONG_PROGRAM,
    Phase,
    ProcessState,
    Report,
    Snapshot,
    Totals,
    not_alive,
    not_ready,
)
from .settings import Settings, Task
from .status_page import StatusPage

logger: logging.Logger = get_logger(__name__)

KILL_GRACE = 2.0
"""Seconds after ``drain_timeout`` and ``EXIT_GRACE``, when the process ought to have ended itself, until SIGKILL."""

_LONGEST_LINE = 65536
_LONGEST_SAID = 200
_READ_SIZE = 65536
_MOST_READS = 16
_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


class Stderr(io.RawIOBase):
    """Where the logs of all processes go. Whoever reads them may be stuck: what has not been taken after ``PATIENCE``
    seconds is left out, and so is what follows until it reads again. So a worker whose logs nobody takes still looks
    after its processes, and ends when it is told to.

    Attributes:
        left_out: bytes.
    """

    PATIENCE = 1.0

    def __init__(self) -> None:
        self.left_out: int = 0

    def text(self) -> io.TextIOWrapper:
        """To be ``sys.stderr``."""
        return io.TextIOWrapper(io.BufferedWriter(self), errors="backslashreplace", line_buffering=True)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self._is_taken(0.0 if self.left_out else self.PATIENCE):
            self.left_out += len(data)
            return len(data)
        try:
            return os.write(2, data[: select.PIPE_BUF])  # as much as a pipe that can be written takes at once
        except OSError:  # nobody ever reads it any more
            return len(data)

    def report(self) -> None:
        """Say what was left out, once it can be said."""
        if self.left_out and self._is_taken(0.0):
            count, self.left_out = self.left_out, 0
            logger.warning("%d bytes of logs are left out here: nobody read them", count, extra=WORKER_LOGS_LEFT_OUT)

    def _is_taken(self, timeout: float) -> bool:
        return bool(select.select([], [2], [], timeout)[1])


class _Lines:
    """Whole lines from the end of a pipe, so that those of several processes do not mix.

    Args:
        selector: calls what its keys have as data when there is something to read.
        longest: what is longer than this without an end is a line all the same; 0: nothing is.
    """

    def __init__(
        self, pipe: int, selector: selectors.BaseSelector, take: Callable[[list[bytes]], object], longest: int = 0
    ) -> None:
        self._pipe, self._selector, self._take, self._longest = pipe, selector, take, longest
        self._rest = b""
        selector.register(pipe, selectors.EVENT_READ, self.read)

    def read(self) -> bool:
        """Whether there may be more."""
        try:
            piece = os.read(self._pipe, _READ_SIZE)
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        if not piece:
            self._forget()
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if 0 < self._longest < len(self._rest):
            lines, self._rest = [*lines, self._rest], b""
        if lines:
            self._take(lines)
        return bool(piece)

    def finish(self) -> None:
        """Take what is left in it, and no more than it holds: what the process has started itself may still write."""
        os.set_blocking(self._pipe, False)
        for _ in range(_MOST_READS):
            if not self.read():
                break
        if self._rest:
            self._take([self._rest])
        self._forget()

    def _forget(self) -> None:
        """Look at it no more: it has ended, maybe before the process."""
        with suppress(KeyError):
            self._selector.unregister(self._pipe)


class Process:
    """A fresh interpreter that does a task, and the ends of its pipes.

    Args:
        number: which of the worker's processes it is.

    Attributes:
        report: the last one, with the last metrics that it said.
        reported_at: when it came, or when the process was started; monotonic.
        last_line: the last line that it wrote on stderr.
        is_scraped: whether it was asked for its metrics, and has not said them.
    """

    reported_at: float
    started_at: float

    def __init__(self, number: int, task: Task, selector: selectors.BaseSelector) -> None:
        self.number = number
        self.report: Report = Report()
        self.started_at = self.reported_at = monotonic()
        self.last_line: str = ""
        self.is_scraped: bool = False
        self._kill_at: float | None = None
        self._drain_timeout = task.settings.worker.drain_timeout
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = _start(theirs)
        self.pid: int = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        with suppress(OSError), self._process.stdin as stdin:  # it has ended already
            pickle.dump(task, stdin)
        self._pipes = (
            _Lines(self._socket.fileno(), selector, self._take_reports),
            _Lines(self._process.stderr.fileno(), selector, self._show, _LONGEST_LINE),
        )

    def __str__(self) -> str:
        return f"process {self.number} (pid {self.pid})"

    def drain(self) -> None:
        """Ask it to end in good order. Does not block; ``enforce`` sees to it that it does."""
        self._kill_at = monotonic() + self._drain_timeout + EXIT_GRACE + KILL_GRACE
        with suppress(OSError):  # it has ended
            self._socket.sendall(DRAIN)

    def scrape(self) -> None:
        """Ask for its metrics. Does not block; one that has not begun to run has none, and may take long to say so."""
        if not self.is_scraped and self.report.phase is not Phase.STARTING:
            with suppress(OSError):  # it has ended
                self._socket.sendall(SCRAPE)
                self.is_scraped = True

    def enforce(self, now: float) -> None:
        """Kill it when it has not ended in time."""
        if self._kill_at is not None and now > self._kill_at:
            self._kill_at = None
            text = "%s did not end in time, and is killed; nsqd delivers again what it held"
            logger.error(text, self, extra=WORKER_PROCESS_LATE)
            self.kill()

    def kill(self) -> None:
        """SIGKILL. What it held is delivered again by nsqd when it times out."""
        self._process.kill()

    def ended(self) -> int | None:
        """Its exit code if it has ended, negative for the signal that ended it; then its pipes are closed, too."""
        code = self._process.poll()
        if code is not None and self._process.stderr is not None:
            for pipe in self._pipes:
                pipe.finish()
            self._socket.close()
            self._process.stderr.close()
            self._process.stderr = None
        return code

    def why(self, code: int) -> str:
        """How it ended, for people."""
        if code < 0:
            known = {number.value: number.name for number in signal.Signals}
            return f"{self} was killed by {known.get(-code, f'signal {-code}')}{self._last_words()}"
        if code == UNFINISHED:
            return f"{self} ended before its handlers had finished: nsqd delivers again what they held"
        return f"{self} ended with exit code {code}{self._last_words()}"

    def _last_words(self) -> str:
        if self.report.failure:
            return f": {self.report.failure}"
        return f"; its last line: {printable(self.last_line)}" if self.last_line else ""

    def _take_reports(self, lines: list[bytes]) -> None:
        for line in lines:
            with suppress(msgspec.DecodeError):
                report = msgspec.json.decode(line, type=Report)
                if report.metrics is None:
                    report = msgspec.structs.replace(report, metrics=self.report.metrics)
                else:
                    self.is_scraped = False
                self.report, self.reported_at = report, monotonic()

    def _show(self, lines: list[bytes]) -> None:
        last = next((line for line in reversed(lines) if line.strip()), b"").strip()
        self.last_line = _said(last.decode("utf-8", "replace")) or self.last_line
        if sys.stderr is None:  # it was closed before we began
            return
        with suppress(OSError):  # nobody reads it any more
            sys.stderr.buffer.write(b"\n".join([*lines, b""]))
            sys.stderr.flush()


def _said(line: str) -> str:
    """What a line says, short enough for a line of ours: of a record in JSON its message."""
    with suppress(msgspec.DecodeError, msgspec.ValidationError):
        record = msgspec.json.decode(line, type=dict[str, Any])
        exception = str(record.get("exception") or "").strip().rpartition("\n")[2]
        line = ": ".join(filter(None, (str(record.get("message") or ""), exception))) or line
    return line if len(line) <= _LONGEST_SAID else line[:_LONGEST_SAID] + "..."


def _start(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Signals are held back until it can handle them: those of a terminal come to every process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINAL_SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "nsq_fast.worker.child", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
        has_failed: whether ``successor`` could not take its place, since ``replace``.
        is_wrong: whether the first process ended because there is nothing that it could run.
    """

    def __init__(self, number: int, config: WorkerConfig, start: Callable[[int], Process]) -> None:
        self.number = number
        self.current: Process | None = None
        self.successor: Process | None = None
        self.leaving: list[Process] = []
        self.restarts: int = 0
        self.has_failed: bool = False
        self.is_wrong: bool = False
        self._config = config
        self._start = start
        self._delay = config.restart_delay
        self._start_at: float | None = None
        self._has_run = False

    def processes(self) -> Iterator[Process]:
        yield from self.leaving
        for each in (self.current, self.successor):
            if each is not None:
                yield each

    def start(self) -> None:
        """Start a process, now; where the system cannot, after a pause."""
        self._start_at = None
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

    def replace(self) -> None:
        """Start another process; the old one, if any, is asked to end as soon as the new one is ready."""
        self._start_at = None
        self.successor = self._started()
        self.has_failed = False
        if self.successor is None:
            self._replacing_failed(monotonic())

    def _replacing_failed(self, now: float) -> None:
        self.successor, self.has_failed = None, True
        if self.current is None:  # it waited to be started again, and does so once more
            self._start_later(now)

    def drain(self) -> None:
        """Ask everything here to end, for good."""
        self._start_at = None
        self._dismiss(self.current)
        self._dismiss(self.successor)
        self.current = self.successor = None

    def look(self, now: float) -> None:
        """Start, replace and kill what is due."""
        for each in self.leaving:
            each.enforce(now)
        if self._start_at is not None and now >= self._start_at:
            self.restarts += 1
            self.start()
        if self.current is not None and self.current.report.phase is Phase.RUNNING:
            self._has_run = True
        if self.successor is None:
            return
        # Where the old one is not ready either, there is no gap to fear: the servers are away.
        is_running = self.successor.report.phase is Phase.RUNNING
        limit = self._config.start_timeout
        is_old_ready = self.current is not None and self.current.report.is_ready
        if self.successor.report.is_ready or (is_running and not is_old_ready):
            self._dismiss(self.current)
            self.current, self.successor = self.successor, None
        elif now - self.successor.started_at >= limit:
            text = "%s is not ready after %g s (start_timeout): %s goes on"
            old = self.current or f"process {self.number}"
            logger.error(text, self.successor, limit, old, extra=WORKER_PROCESS_LATE)
            self._dismiss(self.successor)
            self._replacing_failed(now)

    def _dismiss(self, process: Process | None) -> None:
        if process is not None:
            process.drain()
            self.leaving.append(process)

    def ended(self, process: Process, code: int, now: float) -> None:
        """A process has ended."""
        if process in self.leaving:
            self.leaving.remove(process)
            level = logging.INFO if code == 0 else logging.WARNING
            text = process.why(code) if code else f"{process} has ended"
            logger.log(level, "%s", text, extra=WORKER_PROCESS_ENDED)
        elif process is self.successor:
            old = self.current or f"process {self.number}"
            logger.error("%s; %s goes on", process.why(code), old, extra=WORKER_PROCESS_DIED)
            self._replacing_failed(now)
        elif process is self.current:
            self._lost(process, code, now)

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
        self._start_at = now + self._delay
        if not self.is_wrong or self._has_run or self._config.reload:  # otherwise the worker may end of it
            text = "process %d is started again in %g s"
            logger.warning(text, self.number, self._delay, extra=WORKER_PROCESS_DELAYED)
        self._delay = min(2 * self._delay or LEAST_DELAY, self._config.max_restart_delay)

    def due_at(self) -> float:
        """When ``look`` has something to do at the latest; monotonic."""
        return self._start_at if self._start_at is not None else monotonic() + 1.0


class Notifier:
    """Tells systemd; does nothing where there is none.

    Attributes:
        watchdog_interval: seconds between WATCHDOG=1, half of what systemd allows; None: it does not watch.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._path = environment.get("NOTIFY_SOCKET", "")
        usec = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_interval: float | None = int(usec) / 2e6 if usec.isdecimal() and int(usec) and is_ours else None
        self._status = ""

    def tell(self, *words: str) -> None:
        """Send ``READY=1`` and such, all in one."""
        if not self._path:
            return
        path = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect(path)
            sock.sendall("\n".join(words).encode())

    def reloading(self) -> None:
        """A restart begins; READY=1 ends it."""
        self.tell("RELOADING=1", f"MONOTONIC_USEC={clock_gettime_ns(CLOCK_MONOTONIC) // 1000}")

    def status(self, text: str) -> None:
        """Say how it is, where it differs from the last time."""
        if text != self._status:
            self._status = text
            self.tell(f"STATUS={text}")


def watch_files(folder: Path, on_change: Callable[[str], object]) -> threading.Event:
    """Watch the Python files below a folder, in a native thread, until the event is set. Raises ConfigError without
    watchfiles.

    Args:
        on_change: called in that thread with one of the files that changed.
    """
    try:
        import watchfiles
    except ImportError as error:
        raise ConfigError("reload needs watchfiles: pip install 'nsq-fast[reload]'") from error
    stop = threading.Event()
    python = watchfiles.PythonFilter()
    changes = watchfiles.watch(folder, watch_filter=python, stop_event=stop, raise_interrupt=False)

    def follow() -> None:
        for changed in changes:
            on_change(min(path for _, path in changed))

    threading.Thread(target=follow, name="nsq_fast reload", daemon=True).start()
    return stop


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LONGEST_WAIT = 1.0
SCRAPE_TIMEOUT = 2.0
"""Seconds for which a scrape waits for the metrics of all processes. Of one that does not say them, the last count."""

_FILE_CHANGED, _SCRAPE = 0, 255
"""Stand for what other threads have to say, among the numbers of signals."""


class Supervisor:
    """The supervisor of one worker. Its process has no other use.

    Args:
        read: what gives the settings as they are now, before processes are replaced. Raises ConfigError.
    """

    def __init__(self, task: Task, read: Callable[[], Settings], stderr: Stderr) -> None:
        self._task = self._proven = task  # that of the last restart that succeeded
        self._stderr = stderr
        self._read = read
        self._config = task.settings.worker
        self._selector = selectors.DefaultSelector()
        reader, self._waker = os.pipe()
        for descriptor in (reader, self._waker):
            os.set_blocking(descriptor, False)
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._happened(os.read(reader, 4096)))
        self._past = Totals()
        self._slots = [Slot(number, self._config, self._start_process) for number in range(self._config.processes)]
        self._changed_file = ""
        self._scrapes: deque[threading.Event] = deque()
        self._answering: list[threading.Event] = []
        self._replacement: Iterator[None] = iter(())
        self._stopped_at: float | None = None
        self._exit_code = 0
        self._is_up = False
        self._notifier = Notifier()
        self._watchdog_at = 0.0
        self._status = StatusPage(self._config.alive_timeout, self._scrape)
        self._tell(monotonic())

    def run(self) -> int:
        """Run until a signal ends it, and return the exit code: 0, 78 when there is nothing to run, 128 and more when
        a second signal did not wait for handlers.

        Raises ConfigError when it cannot listen, or lacks what an option needs.
        """
        self._status.listen(self._config.http)
        self._take_signals()
        watch = watch_files(Path(self._task.folder), self._file_changed) if self._config.reload else None
        for slot in self._slots:
            slot.start()
        while not self._is_over:
            for key, _ in self._selector.select(self._until_next()):
                key.data()
            self._reap()
            self._look()
        if watch is not None:
            watch.set()
        self._status.close()
        return self._exit_code

    # What happens

    def _take_signals(self) -> None:
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda number, frame: None)  # what came is in the pipe

    def _file_changed(self, path: str) -> None:
        """In another thread."""
        self._changed_file = path
        self._wake(_FILE_CHANGED)

    def _scrape(self) -> None:
        """In another thread: have all processes say their metrics, and wait until ``_tell`` has shown them."""
        answered = threading.Event()
        self._scrapes.append(answered)
        self._wake(_SCRAPE)
        answered.wait(SCRAPE_TIMEOUT)

    def _wake(self, number: int) -> None:
        with suppress(BlockingIOError):
            os.write(self._waker, bytes([number]))

    def _happened(self, numbers: bytes) -> None:
        for number in numbers:
            if number in STOP_SIGNALS:
                self._stop(number)
            elif number == signal.SIGHUP:
                self._begin_replacing("SIGHUP: the processes are replaced one by one")
            elif number == _FILE_CHANGED:
                self._begin_replacing(f"{self._changed_file} has changed")
            elif number == _SCRAPE and self._scrapes:
                self._answering.append(self._scrapes.popleft())
                for process in self._processes():
                    process.scrape()

    # Starting, and starting again

    def _start_process(self, number: int) -> Process:
        process = Process(number, self._task, self._selector)
        logger.info("%s is started", process, extra=WORKER_PROCESS_STARTED)
        return process

    def _begin_replacing(self, why: str) -> None:
        logger.info("%s", why, extra=WORKER_RESTART_BEGAN)
        if self._is_ending:
            return
        self._notifier.reloading()
        if self._reads_anew():
            self._replacement = self._replace_all()
        else:
            self._notifier.tell("READY=1")

    def _replace_all(self) -> Iterator[None]:
        """Replace the processes one by one, until one fails; it goes on at each look."""
        while any(slot.is_replacing for slot in self._slots):  # from a restart before
            yield
        has_failed = False
        for slot in self._slots:
            if has_failed or self._is_ending:
                break
            slot.replace()
            while slot.is_replacing:
                yield
            has_failed = slot.has_failed
        if self._is_ending:
            return
        self._notifier.tell("READY=1")
        if has_failed:
            self._task = self._proven  # whose process dies later must not be replaced by one that cannot run
            logger.error("the restart has ended: not all processes are replaced", extra=WORKER_RESTART_ENDED)
        else:
            self._proven = self._task
            logger.info("the restart has ended: all processes are replaced", extra=WORKER_RESTART_ENDED)

    def _reads_anew(self) -> bool:
        """Take the options of consumers as they are now; whether they are right. Those of the worker stay."""
        try:
            settings = self._read()
        except ConfigError as error:
            text = "the configuration is wrong, so that no process is replaced: %s"
            logger.error(text, printable(str(error)), extra=WORKER_RESTART_ENDED)
            return False
        changed = [
            name for name in WorkerConfig.names() if getattr(settings.worker, name) != getattr(self._config, name)
        ]
        if changed:
            text = "%s: read at the start only, and stays as it was: the worker has to be started again for it"
            logger.warning(text, ", ".join(sorted(changed)), extra=WORKER_OPTIONS_UNUSED)
        self._task = replace(self._task, settings=replace(settings, worker=self._config))
        return True

    def _reap(self) -> None:
        now = monotonic()
        for slot in self._slots:
            for process in list(slot.processes()):
                code = process.ended()
                if code is None:
                    continue
                with suppress(ValueError):  # whatever a program shows, its processes are looked after
                    self._past = self._past.with_ended(process.report.metrics)
                slot.ended(process, code, now)

    def _look(self) -> None:
        now = monotonic()
        self._end_without_program()
        for slot in self._slots:
            slot.look(now)
        next(self._replacement, None)
        self._stderr.report()
        self._tell(now)

    def _end_without_program(self) -> None:
        if all(slot.is_wrong for slot in self._slots) and not self._config.reload and not self._exit_code:
            logger.error("%s cannot be run: the worker ends", self._task.target, extra=WORKER_PROGRAM_FAILED)
            self._exit_code = WRONG_PROGRAM
            for slot in self._slots:
                slot.drain()

    # Ending

    def _stop(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stopped_at is not None:
            if monotonic() - self._stopped_at < ECHO:
                return
            text = "%s again: the processes are killed; nsqd delivers again what they held"
            logger.warning(text, name, extra=WORKER_KILLED)
            self._exit_code = 128 + number
            for process in self._processes():
                process.kill()
            return
        limit = self._config.drain_timeout
        logger.info("%s: the processes drain for %g s at most", name, limit, extra=WORKER_DRAINING)
        self._stopped_at = monotonic()
        self._notifier.tell("STOPPING=1")
        for slot in self._slots:
            slot.drain()

    @property
    def _is_ending(self) -> bool:
        return self._stopped_at is not None or self._exit_code != 0

    @property
    def _is_over(self) -> bool:
        return self._is_ending and not any(self._processes())

    def _processes(self) -> Iterator[Process]:
        return (process for slot in self._slots for process in slot.processes())

    # What is told

    def _until_next(self) -> float:
        due = min(slot.due_at() for slot in self._slots)
        return max(0.0, min(due - monotonic(), self._notifier.watchdog_interval or LONGEST_WAIT, LONGEST_WAIT))

    def _tell(self, now: float) -> None:
        snapshot = self._snapshot(now)
        self._status.show(snapshot, self._past)
        if self._answering and not any(process.is_scraped for process in self._processes()):
            for answered in self._answering:
                answered.set()
            self._answering.clear()
        self._notifier.status("; ".join(not_ready(snapshot, now, self._config.alive_timeout)) or "ready")
        if not self._is_up and all(_is_running(slot) for slot in self._slots):
            self._is_up = True
            self._notifier.tell("READY=1")
        interval = self._notifier.watchdog_interval
        if interval is not None and now >= self._watchdog_at:
            if not not_alive(snapshot, now, self._config.alive_timeout):
                self._notifier.tell("WATCHDOG=1")
            self._watchdog_at = now + interval

    def _snapshot(self, now: float) -> Snapshot:
        processes = tuple(
            ProcessState(each.number, each.pid, each.report, each.reported_at, each in slot.leaving)
            for slot in self._slots
            for each in slot.processes()
        )
        missing = tuple(slot.number for slot in self._slots if slot.current is None and not self._is_ending)
        restarts = sum(slot.restarts for slot in self._slots)
        return Snapshot(now, processes, missing, restarts, self._is_ending)


def _is_running(slot: Slot) -> bool:
    return slot.current is not None and slot.current.report.phase is Phase.RUNNING


def check(task: Task) -> int:
    """Have a process say what it would run; return its exit code."""
    selector = selectors.DefaultSelector()
    process = Process(0, task, selector)
    while (code := process.ended()) is None:
        for key, _ in selector.select(0.1):
            key.data()
    sys.stderr.flush()
    return code
