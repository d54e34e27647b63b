"""One process of a worker, as the supervisor sees it."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from time import monotonic

import msgspec

from nsq_fast.log_events import WORKER_PROCESS_LATE
from nsq_fast.printable import printable

from .reports import DRAIN, EXIT_GRACE, UNFINISHED, Report, parse_report
from .task import Task, pack

logger = logging.getLogger(__name__)

KILL_GRACE = 2.0
"""Seconds after ``drain_timeout`` and ``EXIT_GRACE``, when the process ought to have ended itself, until SIGKILL."""

_LONGEST_LINE = 65536
_READ_SIZE = 65536
_MOST_READS = 16
_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


class Process:
    """A fresh interpreter that does a task, and the ends of its pipes.

    Args:
        number: which of the worker's processes it is.
        selector: calls what its keys have as data when there is something to read.

    Attributes:
        report: the last one.
        reported_at: when it came, or when the process was started; monotonic.
        last_line: the last line that it wrote on stderr.
        is_leaving: whether it was asked to end.
    """

    def __init__(self, number: int, task: Task, selector: selectors.BaseSelector) -> None:
        self.number = number
        self.report = Report()
        self.started_at = self.reported_at = monotonic()
        self.last_line = ""
        self.is_leaving = False
        self._kill_at: float | None = None
        self._drain_timeout = task.settings.worker.drain_timeout
        self._selector = selector
        self._lines = b""
        self._errors = b""
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = _start(theirs)
        self.pid = self._process.pid
        with suppress(OSError):  # it has ended already
            self._socket.sendall(pack(task))
        assert self._process.stderr is not None
        self._stderr = self._process.stderr.fileno()
        selector.register(self._socket, selectors.EVENT_READ, self._read_reports)
        selector.register(self._stderr, selectors.EVENT_READ, self._read_errors)

    def __str__(self) -> str:
        return f"process {self.number} (pid {self.pid})"

    @property
    def is_ready(self) -> bool:
        """Whether messages can arrive at each of its consumers, as it said last."""
        return not self.is_leaving and self.report.is_ready

    def drain(self) -> None:
        """Ask it to end in good order. Does not block; ``enforce`` sees to it that it does."""
        if self.is_leaving:
            return
        self.is_leaving = True
        self._kill_at = monotonic() + self._drain_timeout + EXIT_GRACE + KILL_GRACE
        with suppress(OSError):  # it has ended
            self._socket.sendall(DRAIN)

    def enforce(self, now: float) -> None:
        """Kill it when it has not ended in time."""
        if self._kill_at is not None and now > self._kill_at:
            self._kill_at = None
            text = "%s did not end in time, and is killed; nsqd delivers again what it held"
            logger.error(text, self, extra=WORKER_PROCESS_LATE)
            self.kill()

    def kill(self) -> None:
        """SIGKILL. What it held is delivered again by nsqd when it times out."""
        self.is_leaving = True
        self._process.kill()

    def ended(self) -> int | None:
        """Its exit code if it has ended, negative for the signal that ended it; then its pipes are closed, too."""
        code = self._process.poll()
        if code is not None and self._process.stderr is not None:
            self._close()
        return code

    def why(self, code: int) -> str:
        """How it ended, for people."""
        if code < 0:
            with suppress(ValueError):
                how = f"was killed by {signal.Signals(-code).name}"
                return f"{self} {how}{self._last_words()}"
            return f"{self} was killed by signal {-code}{self._last_words()}"
        if code == UNFINISHED:
            return f"{self} ended before its handlers had finished: nsqd delivers again what they held"
        return f"{self} ended with exit code {code}{self._last_words()}"

    def _last_words(self) -> str:
        if self.report.failure:
            return f": {self.report.failure}"
        return f"; its last line: {printable(self.last_line)}" if self.last_line else ""

    def _close(self) -> None:
        """Take what is left in the pipes, and no more than they hold: what it has started itself may still write."""
        os.set_blocking(self._socket.fileno(), False)
        os.set_blocking(self._stderr, False)
        for read in (self._read_reports, self._read_errors):
            for _ in range(_MOST_READS):
                if not read():
                    break
        if self._errors:
            self._show(self._errors + b"\n")
        for each in (self._socket, self._stderr):
            self._forget(each)
        self._socket.close()
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._process.stderr = None

    def _forget(self, source: socket.socket | int) -> None:
        """Look at it no more: it has ended, maybe before the process."""
        with suppress(KeyError):
            self._selector.unregister(source)

    def _read_reports(self) -> bool:
        """Whether there may be more."""
        try:
            piece = self._socket.recv(_READ_SIZE)
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        if not piece:
            self._forget(self._socket)
        *lines, self._lines = (self._lines + piece).split(b"\n")
        for line in lines:
            with suppress(msgspec.DecodeError):
                self.report = parse_report(line)
                self.reported_at = monotonic()
        return bool(piece)

    def _read_errors(self) -> bool:
        """Hand on whole lines of stderr, so that those of several processes do not mix. Whether there may be more."""
        try:
            piece = os.read(self._stderr, _READ_SIZE)
        except BlockingIOError:
            return False
        if not piece:
            self._forget(self._stderr)
        whole, end, self._errors = (self._errors + piece).rpartition(b"\n")
        if len(self._errors) > _LONGEST_LINE:
            whole, end, self._errors = whole + end + self._errors, b"\n", b""
        if end:
            self._show(whole + end)
        return bool(piece)

    def _show(self, lines: bytes) -> None:
        last = lines.rstrip().rpartition(b"\n")[2].strip()
        self.last_line = last.decode("utf-8", "replace")[-200:] or self.last_line
        with suppress(OSError):  # nobody reads our stderr any more
            sys.stderr.buffer.write(lines)
            sys.stderr.flush()


def _start(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Signals are held back until it can handle them: those of a terminal come to every process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINAL_SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "nsq_fast.worker.child", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
