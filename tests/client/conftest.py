"""The loops on which the client runs: a test that is ``async def`` and takes ``loop`` runs on each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import gevent
import pytest
from support.waiting import WAIT

from nsq_fast.client.asyncio_loop import AsyncioLoop
from nsq_fast.client.gevent_loop import GeventLoop, run

Test = Callable[[Any], Coroutine[Any, Any, None]]


@pytest.fixture(params=["gevent", "asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Callable[[Test], None]:
    """What runs a test on a loop; the test gets the client's port."""
    if request.param == "gevent":
        return _on_gevent
    return partial(_on_asyncio, pytest.importorskip("uvloop").new_event_loop if request.param == "uvloop" else None)


def _on_gevent(test: Test) -> None:
    with gevent.Timeout(2 * WAIT):
        run(test(GeventLoop.here()))


def _on_asyncio(new_loop: Callable[[], asyncio.AbstractEventLoop] | None, test: Test) -> None:
    async def main() -> None:
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        await asyncio.wait_for(test(AsyncioLoop()), 2 * WAIT)
        assert not faults

    if new_loop is None:
        asyncio.run(main())
        return
    loop = new_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
