"""Host names become addresses in native threads, and a fork waits for those that are being looked up.

libc's resolver works under locks of its own. A child of a fork has copies of them, but not the thread that would
release them: fork in the middle of a lookup, and no lookup of the child ever returns. Seen with glibc 2.36 in 4 of
1,180 programs that forked within milliseconds of starting a producer whose nsqd was given by name.
"""

from __future__ import annotations

import _thread
import os
import sys
from _socket import SOCK_STREAM, getaddrinfo  # which monkey.patch_all leaves as they are
from collections.abc import Sequence
from time import monotonic
from typing import Any

FORK_PATIENCE = 2.0
"""Seconds that a fork waits at most. A name server that does not answer would hold it for longer."""


def look_up(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    """What ``getaddrinfo`` says for TCP. It blocks the calling thread, which should be one that is there for that."""
    ended = _new_lock()
    ended.acquire()
    with _gate:
        _running.add(ended)
    try:
        return getaddrinfo(host, port, 0, SOCK_STREAM)
    finally:
        _running.discard(ended)
        ended.release()


def _before_fork() -> None:
    _gate.acquire()  # from here on, none begins
    deadline = monotonic() + FORK_PATIENCE
    for ended in tuple(_running):
        ended.acquire(timeout=max(0.0, deadline - monotonic()))


def _after_fork() -> None:
    _gate.release()


def _after_fork_in_child() -> None:
    _running.clear()  # no thread of the child works at them
    _gate.release()


def _native(name: str) -> Any:
    monkey = sys.modules.get("gevent.monkey")  # a program may have patched the module
    return monkey.get_original("_thread", name) if monkey else getattr(_thread, name)


_new_lock = _native("allocate_lock")
_gate = _new_lock()
_running: set[Any] = set()
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
