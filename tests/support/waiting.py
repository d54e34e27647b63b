"""Waiting for something that happens elsewhere, without sleeping for luck."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from gevent import sleep

T = TypeVar("T")

WAIT = 60.0
"""Seconds until a test gives up: as long as a busy machine may need. A test that passes does not wait for it."""

PROCESS = 2 * WAIT
"""Seconds until a test gives up a Python process that it runs to its end, which has to start and to import first."""

PROMPT = 20.0
"""Seconds in which something is done that waits for nothing: what it must not wait for takes longer, or for ever."""

TURNS = 10
"""Of the loop, at least, in which what must not happen could have happened."""


@contextmanager
def promptly(limit: float = PROMPT) -> Iterator[None]:
    """Fail if the body took longer: then it has waited for what it must not wait for."""
    began = time.monotonic()
    yield
    taken = time.monotonic() - began
    assert taken < limit, f"took {taken:.1f} s"


def holds(probe: Callable[[], object], seconds: float = 0.02) -> None:
    """Fail unless ``probe`` is true now and for a while: for what must not happen.

    On a slow machine it sees less of what must not happen; it never fails for that.
    """
    end, turns = time.monotonic() + seconds, 0
    while True:
        assert probe(), f"not so for {seconds} s: {probe}"
        if time.monotonic() > end and turns >= TURNS:
            return
        sleep(0.002)  # sleep: looks again and again
        turns += 1


def until(probe: Callable[[], T], timeout: float = WAIT, every: float = 0.005, about: Callable[[], object] = str) -> T:
    """Call ``probe``, ``every`` so many seconds, until its result is true, and return that.

    Fails after ``timeout``, and says what ``about`` gives.
    """
    deadline = time.monotonic() + timeout
    while not (result := probe()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {timeout} s: {probe} {about()}")
        sleep(every)  # sleep: looks again and again
    return result


async def until_on(loop: Any, probe: Callable[[], object]) -> None:
    """As ``until``, on the client's port of a loop, or another that has ``sleep``: ``asyncio``."""
    deadline = time.monotonic() + WAIT
    while not probe():
        assert time.monotonic() < deadline, f"not so within {WAIT} s: {probe}"
        await loop.sleep(0.002)  # sleep: looks again and again


def block_until(probe: Callable[[], object], what: str = "", wait: float = WAIT) -> None:
    """Block the process, hub included, until the result of ``probe`` is true, for ``wait`` seconds at most."""
    deadline = time.monotonic() + wait
    while not probe():
        assert time.monotonic() < deadline, f"not so within {wait} s: {what or probe}"
        time.sleep(0.002)  # sleep: blocks, as an ordinary library does
