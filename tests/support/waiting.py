"""Waiting for something that happens elsewhere, without sleeping for luck."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from gevent import sleep

T = TypeVar("T")


def until(probe: Callable[[], T], timeout: float = 30.0, every: float = 0.005) -> T:
    """Call ``probe``, ``every`` so many seconds, until its result is true, and return that; fails after ``timeout``."""
    deadline = time.monotonic() + timeout
    while not (result := probe()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {timeout} s: {probe}")
        sleep(every)
    return result
