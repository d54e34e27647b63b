"""The loops on which the client runs: a test that is ``async def`` and takes ``loop`` runs on each of them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import gevent
import pytest
from support.waiting import WAIT

from nsq_fast.client.asyncio_loop import AsyncioLoop
from nsq_fast.client.gevent_loop import GeventLoop, run


@pytest.fixture(params=["gevent", "asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> str:
    """The port of the client on a loop; its name until the test begins."""
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    return str(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    _run_on(arguments.pop("loop"), lambda loop: pyfuncitem.obj(loop=loop, **arguments))
    return True


def _run_on(name: str, test: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    if name == "gevent":
        with gevent.Timeout(2 * WAIT):
            run(test(GeventLoop.here()))
        return

    async def main() -> None:
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        await asyncio.wait_for(test(AsyncioLoop()), 2 * WAIT)
        assert not faults

    if name == "asyncio":
        asyncio.run(main())
        return
    import uvloop

    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
