"""Ctrl-C and SIGTERM as an event that a command waits for, so that it ends where it can end cleanly.

Raised as KeyboardInterrupt they would land in whichever greenlet happens to
run. A second signal does not wait for anybody.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from gevent import signal_handler
from gevent.event import Event

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended before its work was done."""


@contextmanager
def stop_signals() -> Iterator[Event]:
    """Give an event that the first SIGINT or SIGTERM sets; the second ends the process at once."""
    stop = Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    watchers = [signal_handler(number, on_signal, number) for number in numbers]
    try:
        yield stop
    finally:
        for number, watcher, handler in zip(numbers, watchers, before, strict=True):
            watcher.cancel()
            signal.signal(number, handler)
