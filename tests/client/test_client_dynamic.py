"""Documents of config sources on either loop: ours, one of a program that blocks, and one that is ``async def``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import gevent.event
from support.waiting import WAIT

from nsq_fast.client.dynamic import ConfigKeeper
from nsq_fast.config_source import ConfigDocument

log = logging.getLogger("nsq_fast.test")


def document(*topics: str) -> bytes:
    return json.dumps({"trace": dict.fromkeys(topics, True)}).encode()


@contextlib.contextmanager
def keeping(loop: Any, source: Any) -> Iterator[tuple[ConfigKeeper, list[set[str]]]]:
    applied: list[set[str]] = []
    keeper = ConfigKeeper(source, lambda config: applied.append(set(config.trace)), "test")
    keeper.start(loop, loop.supervisor(log))
    try:
        yield keeper, applied
    finally:
        keeper.stop()


async def until(loop: Any, probe: Any) -> None:
    deadline = time.monotonic() + WAIT
    while not probe():
        assert time.monotonic() < deadline
        await loop.sleep(0.002)  # sleep: looks again and again


def test_a_source_of_the_program_may_block(on_loop: Any) -> None:
    """On asyncio it does so in a thread: the loop goes on, and closing does not wait for it."""
    threads: list[int] = []

    class Blocking:
        def next(self, last: ConfigDocument | None) -> ConfigDocument:
            threads.append(threading.get_ident())
            if len(threads) == 2:
                raise OSError("away")
            if len(threads) > 3:
                waits.wait(WAIT)
            return ConfigDocument({"trace": {f"t{len(threads)}": True}}, len(threads))

    waits: Any

    async def test(loop: Any) -> None:
        nonlocal waits
        threads.clear()
        is_asyncio = not hasattr(loop, "is_of")
        waits = threading.Event() if is_asyncio else gevent.event.Event()
        with keeping(loop, Blocking()) as (keeper, applied):
            await keeper.wait_first(loop, WAIT)
            await until(loop, lambda: len(threads) >= 4)
            assert applied == [{"t1"}, {"t3"}]
            assert (threading.get_ident() in threads) is not is_asyncio
        if is_asyncio:
            waits.set()

    on_loop(test)


def test_a_source_on_asyncio_may_be_a_coroutine_function() -> None:
    from nsq_fast.client.asyncio_loop import AsyncioLoop

    class Native:
        async def next(self, last: ConfigDocument | None) -> ConfigDocument:
            if last is not None:
                await asyncio.Event().wait()
            return ConfigDocument(document("native"), 1)

    async def main() -> None:
        loop = AsyncioLoop()
        with keeping(loop, Native()) as (keeper, applied):
            await keeper.wait_first(loop, WAIT)
            assert applied == [{"native"}]

    asyncio.run(main())
