"""Waiting for something that happens elsewhere, without sleeping for luck."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from gevent import sleep

T = TypeVar("T")


def holds(probe: Callable[[], object], seconds: float = 0.02) -> None:
    """Fail unless ``probe`` is true now and for a while: for what must not happen.

    On a slow machine it sees less of what must not happen; it never fails for that.
    """
    end = time.monotonic() + seconds
    while True:
        assert probe(), f"not so for {seconds} s: {probe}"
        if time.monotonic() > end:
            return
        sleep(0.002)


def until(probe: Callable[[], T], timeout: float = 30.0, every: float = 0.005) -> T:
    """Call ``probe``, ``every`` so many seconds, until its result is true, and return that; fails after ``timeout``."""
    deadline = time.monotonic() + timeout
    while not (result := probe()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {timeout} s: {probe}")
        sleep(every)
    return result
