"""Packets get lost for 8 to 30 s: publishes go on within two seconds of the end of that, whenever it comes."""

from __future__ import annotations

import asyncio

import pytest

from nsq_fast.aio import Producer

from .clock import SimLoop
from .lookupd import ModelLookupd
from .nsqd import ModelNsqd
from .runner import in_virtual_time

SOON = 2.0


@pytest.mark.parametrize("dialect", ["original", "redesigned"])
@pytest.mark.parametrize("seed", range(20))
def test_after_an_outage_publishes_go_on_within_two_seconds(dialect: str, seed: int) -> None:
    async def scenario(loop: SimLoop) -> float:
        chance = loop.chance
        cluster: list[object] = []
        nsqds = [ModelNsqd(loop.network, loop.books, f"10.1.0.{number}", dialect, cluster) for number in (1, 2)]
        for number in range(4 if dialect == "redesigned" else 1):
            nsqds[number % 2].log("t", number)
        ModelLookupd(loop.network, loop.books, "10.2.0.1", nsqds)
        hosts = [*(nsqd.host for nsqd in nsqds), loop.network.host("10.2.0.1")]
        async with Producer(
            [],
            ["10.2.0.1:4161"],
            heartbeat_interval=chance.choice((5.0, 30.0)),
            coalesce=chance.happens(0.5),
            publish_timeout=60.0,
            attempt_timeout=chance.choice((5.0, 30.0)),
        ) as producer:

            async def one(number: int) -> None:
                await producer.publish("t", b"%d" % number, key=f"k{number % 4}")

            await asyncio.gather(*(one(number) for number in range(8)))
            for host in hosts:
                host.is_slow_to_mend = True
                host.cut()
            until = loop.time() + 8.0 + 22.0 * chance.random()
            late = [loop.create_task(one(number)) for number in range(8)]
            while loop.time() < until:
                await asyncio.sleep(0.1)
                late.append(loop.create_task(one(len(late))))
            for host in hosts:
                host.mend()
            mended = loop.time()
            now = [loop.create_task(one(number)) for number in range(8)]
            await asyncio.gather(*now)
            took = loop.time() - mended
            await asyncio.gather(*late)
            return took

    took = in_virtual_time(f"outage {dialect} {seed}", scenario)
    assert took <= SOON
