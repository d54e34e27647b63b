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


def holder(nsqds: list[ModelNsqd]) -> ModelNsqd:
    """The one that has a publish and has not read it."""
    (found,) = (nsqd for nsqd in nsqds if any(b"PUB " in conn.end.arrived for conn in nsqd.conns))
    return found


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("pause", [0.2, 2.5])
def test_a_server_that_ends_long_after_it_got_a_publish_did_not_end_of_it(pause: float, seed: int) -> None:
    """As where nsqds are restarted in turn, each while publishes wait there for a replica that is away."""

    async def scenario(loop: SimLoop) -> object:
        nsqds = [ModelNsqd(loop.network, loop.books, f"10.1.0.{number}", "original") for number in range(1, 5)]
        addresses = [f"10.1.0.{number}:4150" for number in range(1, 5)]
        async with Producer(addresses, coalesce=False, publish_timeout=60.0) as producer:
            await producer.publish("t", b"first")
            while len(producer.stats()["connected"]) < len(nsqds):
                await asyncio.sleep(0.1)
            for nsqd in nsqds:
                nsqd.freeze()
            waiting = asyncio.ensure_future(producer.publish("t", b"waits"))
            for _ in range(3):
                await asyncio.sleep(pause)
                if not waiting.done():
                    holder(nsqds).kill()
            for nsqd in nsqds:
                nsqd.thaw()
            (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
            return outcome

    outcome = in_virtual_time(f"ends {pause} {seed}", scenario)
    if pause > 1.0:
        assert outcome == b"OK"
    else:
        assert "it may be what ended them: it is sent to no other server" in str(outcome)
