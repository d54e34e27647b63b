"""The event loops with which tests of asyncio run: its own, and uvloop's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from .waiting import WAIT

try:
    import uvloop
except ImportError:  # it is not built for each Python and machine
    uvloop = None

NewLoop = Callable[[], asyncio.AbstractEventLoop]

LOOPS = [
    pytest.param(asyncio.new_event_loop, id="asyncio"),
    pytest.param(
        uvloop and uvloop.new_event_loop,
        id="uvloop",
        marks=pytest.mark.skipif(uvloop is None, reason="uvloop is not installed"),
    ),
]


def run(main: Coroutine[Any, Any, Any], new_loop: NewLoop) -> None:
    """As ``asyncio.run``, in a loop of this kind."""
    loop = new_loop()
    try:
        loop.run_until_complete(main)
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def until_async(probe: Callable[[], object]) -> None:
    """As ``until``, while the loop runs."""
    end = time.monotonic() + WAIT
    while not probe():
        assert time.monotonic() < end, probe
        await asyncio.sleep(0.002)  # sleep: looks again and again
