"""Orders of events that the simulation has found to matter, each by itself."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from nsq_fast.aio import Consumer, Producer

from .clock import SimLoop
from .lookupd import ModelLookupd
from .nsqd import ModelNsqd
from .runner import in_virtual_time


def test_bound_publishes_that_wait_for_room_before_anything_is_connected_get_away() -> None:
    async def scenario(loop: SimLoop) -> None:
        nsqd = ModelNsqd(loop.network, loop.books, "10.1.0.1", "original")
        async with Producer("10.1.0.1:4150", max_pending=1, publish_timeout=5.0) as producer:
            await asyncio.gather(producer.publish("t", b"first"), producer.publish("t", b"second", key="k"))
        assert {message.body for message in nsqd.log("t").messages} == {b"first", b"second"}

    in_virtual_time("room", scenario)


def test_a_key_keeps_its_order_when_lookup_answers_while_publishes_wait_for_room() -> None:
    async def scenario(loop: SimLoop) -> None:
        nsqd = ModelNsqd(loop.network, loop.books, "10.1.0.1", "redesigned")
        log = nsqd.log("t")
        ModelLookupd(loop.network, loop.books, "10.2.0.1", [nsqd])
        nsqd.host.delays = (0.01, 0.01)  # lookup answers long before it is connected
        async with Producer([], ["10.2.0.1:4161"], max_pending=5) as producer:

            async def publish(number: int) -> None:
                await producer.publish("t", b"%d" % number, key="k")

            company = asyncio.create_task(producer.publish("t", b"company"))
            early = [asyncio.create_task(publish(number)) for number in range(6)]
            await asyncio.sleep(0.015)
            await asyncio.gather(company, *early, *(publish(number) for number in range(6, 9)))
        of_key = [message.body for message in log.messages if message.body != b"company"]
        assert of_key == [b"%d" % number for number in range(9)]

    in_virtual_time("order", scenario)


def test_a_lookupd_that_hangs_does_not_put_off_when_topics_of_a_pattern_are_looked_for() -> None:
    async def scenario(loop: SimLoop) -> None:
        nsqd = ModelNsqd(loop.network, loop.books, "10.1.0.1", "original")
        good, hung = (ModelLookupd(loop.network, loop.books, f"10.2.0.{number}", [nsqd]) for number in (1, 2))
        hung.freeze()
        handled: dict[str, float] = {}

        async def handle(_: Any, message: Any) -> None:
            handled[message.topic] = loop.time()

        async with Consumer(
            re.compile("orders.*"), "c", lookupd_http_addresses=["10.2.0.1:4161", "10.2.0.2:4161"],
            message_handler=handle, lookupd_poll_interval=3.0, lookupd_poll_jitter=0.0, lookupd_timeout=60.0,
        ):  # fmt: skip
            for number in range(4):
                nsqd.log(f"orders{number}").store(b"body")
                good.notice()
                await asyncio.sleep(4.0)
                assert f"orders{number}" in handled

    in_virtual_time("pattern", scenario)


def test_a_topic_of_a_pattern_is_asked_of_the_lookupd_that_named_it_while_that_was_busy() -> None:
    async def scenario(loop: SimLoop) -> None:
        nsqd = ModelNsqd(loop.network, loop.books, "10.1.0.1", "original")
        good, ignorant = (ModelLookupd(loop.network, loop.books, f"10.2.0.{number}", [nsqd]) for number in (1, 2))
        ignorant.is_ignorant = True  # and soon has nothing to do
        good.host.delays = (0.1, 0.1)
        handled: set[str] = set()

        async def handle(_: Any, message: Any) -> None:
            handled.add(message.topic)

        for number in range(60):  # the round takes longer than the list
            nsqd.log(f"orders{number}").store(b"body")
        good.notice()
        async with Consumer(
            re.compile("orders.*"), "c", lookupd_http_addresses=["10.2.0.1:4161", "10.2.0.2:4161"],
            message_handler=handle, lookupd_poll_interval=20.0, lookupd_poll_jitter=0.0,
        ):  # fmt: skip
            await asyncio.sleep(10.0)
            nsqd.log("orders60").store(b"body")
            good.notice()
            await asyncio.sleep(15.0)
            assert "orders60" in handled

    in_virtual_time("busy", scenario)
