"""The end of the supervisor's socket in a process of a worker. Its thread is a native one, so that a blocked event loop
keeps no report from being sent. It uses nothing that a program may have patched."""

from __future__ import annotations

import os
from collections.abc import Callable
from select import POLLIN
from time import monotonic

from gevent.monkey import get_original  # patches nothing: it finds what a program may have patched

from .reports import DRAIN, EXIT_GRACE, REPORT_INTERVAL, UNFINISHED, Report

_start_thread = get_original("_thread", "start_new_thread")
_poll = get_original("select", "poll")
_new_lock = get_original("_thread", "allocate_lock")


class Link:
    """The socket, as a file descriptor.

    Attributes:
        report: makes the report of now; called in the link's thread, and may be set at any time.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = _new_lock()
        self._ask_to_drain: Callable[[], object] | None = None
        self._exit_at: float | None = None
        self._is_supervised = True
        self.report: Callable[[], Report] = Report

    def read(self, size: int) -> bytes:
        """Exactly so many bytes of what the supervisor sent. Raises EOFError."""
        content = b""
        while len(content) < size:
            piece = os.read(self._descriptor, size - len(content))
            if not piece:
                raise EOFError("the supervisor has gone")
            content += piece
        return content

    def start(self, drain_timeout: float, ask_to_drain: Callable[[], object]) -> None:
        """Begin to report and to listen.

        Args:
            ask_to_drain: called in the link's thread, once, when the supervisor says so or has gone; whichever way it
                goes, the process ends ``drain_timeout`` and ``EXIT_GRACE`` later.
        """
        self._drain_timeout = drain_timeout
        self._ask_to_drain = ask_to_drain
        _start_thread(self._run, ())

    def expect_end(self) -> None:
        """The process drains: it ends in time, whatever its handlers do."""
        if self._exit_at is None:
            self._exit_at = monotonic() + self._drain_timeout + EXIT_GRACE

    def send(self) -> None:
        """Report now. In any thread."""
        with self._lock:  # from when it is made until it is sent: a later report is never followed by an earlier one
            try:
                line = self.report().line()
            except Exception:  # when the interpreter ends, nothing can be asked; a missing report is noticed
                return
            self._write(line)

    def _write(self, line: bytes) -> None:
        try:
            while line and self._is_supervised:
                line = line[os.write(self._descriptor, line) :]
        except OSError:  # the supervisor has gone
            self._is_supervised = False

    # In its thread

    def _run(self) -> None:
        while True:
            self.send()
            self._listen()
            if self._exit_at is not None and monotonic() > self._exit_at:
                os.write(2, b"nsq_fast.worker: handlers have not finished in time: the process ends without them\n")
                os._exit(UNFINISHED)

    def _listen(self) -> None:
        waiting = _poll()
        if self._is_supervised:
            waiting.register(self._descriptor, POLLIN)
        if waiting.poll(1000 * REPORT_INTERVAL):
            said = self._read_some()
            if not said:
                self._is_supervised = False
            if (not said or said.endswith(DRAIN)) and self._ask_to_drain is not None:
                self.expect_end()
                self._ask_to_drain()
                self._ask_to_drain = None

    def _read_some(self) -> bytes:
        try:
            return os.read(self._descriptor, 65536)
        except OSError:
            return b""
