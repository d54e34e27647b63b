"""The loops on which the client runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import gevent
import pytest
from support.waiting import WAIT

from nsq_fast.client.asyncio_loop import AsyncioLoop
from nsq_fast.client.gevent_loop import GeventLoop, run


@pytest.fixture(params=["gevent", "asyncio", "uvloop"])
def on_loop(request: pytest.FixtureRequest) -> Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]:
    """``on_loop(test)``: runs ``await test(loop)`` to its end."""

    def go(test: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        if request.param == "gevent":
            with gevent.Timeout(2 * WAIT):
                run(test(GeventLoop.here()))
            return

        async def main() -> None:
            faults: list[dict[str, Any]] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
            await asyncio.wait_for(test(AsyncioLoop()), 2 * WAIT)
            assert not faults

        if request.param == "asyncio":
            asyncio.run(main())
        else:
            uvloop = pytest.importorskip("uvloop")
            loop = uvloop.new_event_loop()
            try:
                loop.run_until_complete(main())
            finally:
                loop.close()

    return go
