"""FastStream on NSQ: handlers get messages, what they return is published, and what fails comes again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from nsq_fast import NsqdHTTPClient
from nsq_fast.aio import Producer
from nsq_fast.broker import BrokerProcess
from nsq_fast.errors import ConfigError

pytest.importorskip("faststream")

from faststream import AckPolicy, Context, Response
from faststream.exceptions import FeatureNotSupportedException, SkipMessage
from faststream.specification import AsyncAPI
from support.processes import until_async
from support.waiting import WAIT

from nsq_fast.integrations.faststream import NSQBroker, NSQMessage, NSQRouter

QUICK = {"requeue_delay": 0, "max_backoff_duration": 0, "max_reconnect_delay": 0.1}


def channels_of(http: Any, topic: str) -> list[Any]:
    with NsqdHTTPClient.from_url(str(http)) as client:
        topics = [each for each in client.stats()["topics"] if each["topic_name"] == topic]
    return [channel for each in topics for channel in each["channels"]]


def in_flight(nsqd: Any, topic: str) -> tuple[int, int]:
    """Messages of the channel of a topic: in flight, and waiting."""
    (channel,) = channels_of(nsqd.http, topic)
    return channel["in_flight_count"], channel["depth"] + channel["deferred_count"]


async def test_what_handlers_return_is_published_and_what_fails_comes_again(nsqd_process: Any) -> None:
    tries: list[int] = []
    bills: list[dict[str, int]] = []
    texts: list[str] = []
    broker = NSQBroker(nsqd_process.address, consumer=QUICK)
    router = NSQRouter("notes.")

    @broker.subscriber("orders", "billing", max_workers=3)
    @broker.publisher("bills")
    async def bill(order: dict[str, int]) -> dict[str, int]:
        tries.append(order["number"])
        if tries.count(3) == 1 and order["number"] == 3:
            raise ValueError("the first time")
        return {"bill": order["number"]}

    @broker.subscriber("bills", "box")
    async def box(bill: dict[str, int]) -> None:
        bills.append(bill)

    @router.subscriber("text", "reader")
    async def read(text: str) -> None:
        texts.append(text)

    broker.include_router(router)
    async with broker:
        await broker.start()
        assert await broker.ping(WAIT)
        for number in range(10):
            await broker.publish({"number": number}, "orders")
        await broker.publish("hello", "notes.text")
        await until_async(lambda: len(bills) == 10 and texts)
    assert sorted(each["bill"] for each in bills) == list(range(10))
    assert sorted(tries) == sorted([*range(10), 3])
    assert texts == ["hello"]
    assert in_flight(nsqd_process, "orders") == (0, 0)


@pytest.mark.nsq_cluster(nodes=3, kind=True)
async def test_keys_choose_partitions_and_headers_carry_the_correlation(nsq_cluster: Any) -> None:
    seen: list[tuple[str, int | None, str]] = []
    broker = NSQBroker((), [str(each.http_address) for each in nsq_cluster.lookupds], consumer=QUICK)
    nsq_cluster.create_topic("orders", 3, channels=["billing"], ext=True)
    nsq_cluster.create_topic("bills", 3, channels=["box"], ext=True)

    @broker.subscriber("orders", "billing")
    @broker.publisher("bills")
    async def bill(order: str, message: NSQMessage = Context()) -> Response:  # noqa: B008
        return Response(order, headers={"kind": "bill"})

    @broker.subscriber("bills", "box")
    async def box(bill: str, message: NSQMessage = Context()) -> None:  # noqa: B008
        seen.append((bill, message.raw_message.partition, message.correlation_id))

    async with broker:
        await broker.start()
        again = broker.publisher("bills")
        for number in range(6):
            await again.publish(f"to one {number}", key="one")
            await broker.publish(f"to two {number}", "bills", key=b"two")
        await broker.publish("an order", "orders", headers={"kind": "order"}, correlation_id="a-1")
        await until_async(lambda: len(seen) == 13)
    for key in ("one", "two"):
        assert len({partition for body, partition, _ in seen if body.startswith(f"to {key}")}) == 1
    assert [each for body, _, each in seen if body == "an order"] == ["a-1"]


async def test_a_subscriber_takes_messages_of_all_nsqds_at_once() -> None:
    with BrokerProcess(nsqds=2, lookupd=False) as servers:
        broker = NSQBroker([str(each.tcp_address) for each in servers.nsqds])

        @broker.subscriber("orders", "c")
        async def handle(order: int) -> None: ...

        def asked_for() -> list[int]:
            channels = [channels_of(each.http_address, "orders") for each in servers.nsqds]
            return [sum(client["ready_count"] for each in found for client in each["clients"]) for found in channels]

        async with broker:
            await broker.start()
            await until_async(lambda: asked_for() == [1, 1])


async def test_wrong_arguments_of_publishes_are_named(nsqd_process: Any) -> None:
    broker = NSQBroker(nsqd_process.address)
    nacked: list[str] = []

    @broker.subscriber("orders", "c", ack_policy=AckPolicy.MANUAL)
    async def handle(message: NSQMessage = Context()) -> None:  # noqa: B008
        try:
            await message.nack(-1.0)
        except ConfigError as error:
            nacked.append(str(error))
            await message.ack()

    async with broker:
        await broker.start()
        await broker.publish("one", "orders", key="on original servers, too")
        for publish in (broker.publish, broker.publisher("orders").publish):
            with pytest.raises(TypeError, match=r"publish\(\) got an unexpected keyword argument 'delya'"):
                await publish("one", "orders", delya=1)  # type: ignore[call-arg]
            for delay in ("soon", -1.0, float("nan"), float("inf")):
                with pytest.raises(ConfigError, match=r"delay=.* must be a number of seconds"):
                    await publish("one", "orders", delay=delay)  # type: ignore[arg-type]
        await until_async(lambda: nacked)
    assert "delay=-1.0" in nacked[0]
    assert in_flight(nsqd_process, "orders") == (0, 0)


async def test_with_manual_acknowledgement_the_handler_responds_and_what_is_kept_is_not_touched(
    nsqd_process: Any,
) -> None:
    seen: dict[tuple[str, int], NSQMessage] = {}
    broker = NSQBroker(nsqd_process.address, consumer={**QUICK, "msg_timeout": 1.0})

    @broker.subscriber("orders", "c", ack_policy=AckPolicy.MANUAL, max_workers=5)
    async def handle(body: str, message: NSQMessage = Context()) -> None:  # noqa: B008
        seen[body, message.raw_message.attempts] = message
        if body == "again" and message.raw_message.attempts == 1:
            await message.nack(0.0)
        elif body != "keep":
            await message.ack()

    async with broker:
        await broker.start()
        for body in ("done", "again", "keep"):
            await broker.publish(body, "orders")
        await until_async(lambda: len(seen) == 5)  # the timeout of the one that is kept was over
        await seen["keep", 2].ack()  # later than its handler has ended
        await until_async(lambda: in_flight(nsqd_process, "orders") == (0, 0))
    assert sorted(seen) == [("again", 1), ("again", 2), ("done", 1), ("keep", 1), ("keep", 2)]


async def test_what_is_skipped_comes_again_later_with_each_attempt(nsqd_process: Any) -> None:
    seen: list[int] = []
    options = {"requeue_base_delay": 60.0, "requeue_jitter": 0.0, "max_backoff_duration": 0}
    broker = NSQBroker(nsqd_process.address, consumer=options)

    @broker.subscriber("orders", "c")
    async def handle(number: int) -> None:
        seen.append(number)
        if number == 1:
            raise SkipMessage

    async with broker:
        await broker.start()
        await broker.publish(1, "orders")
        await broker.publish(2, "orders")
        await until_async(lambda: 2 in seen and in_flight(nsqd_process, "orders") == (0, 1))
    assert sorted(seen) == [1, 2]


async def test_a_handler_that_returns_nothing_publishes_nothing(nsqd_process: Any) -> None:
    returned: list[Any] = [None, "", b"", "a bill"]
    seen: list[int] = []
    bills: list[Any] = []
    broker = NSQBroker(nsqd_process.address, consumer=QUICK)

    @broker.subscriber("orders", "c")
    @broker.publisher("bills")
    async def bill(number: int) -> Any:
        seen.append(number)
        return returned[number]

    @broker.subscriber("bills", "c")
    async def note(bill: str) -> None:
        bills.append(bill)

    async with broker:
        await broker.start()
        for number in range(4):
            await broker.publish(number, "orders")
        await until_async(lambda: bills and in_flight(nsqd_process, "orders") == (0, 0))
        await until_async(lambda: in_flight(nsqd_process, "bills") == (0, 0))
    assert (seen, bills) == ([0, 1, 2, 3], ["a bill"])


async def test_a_broker_stops_within_the_graceful_timeout_and_is_started_again(nsqd_process: Any) -> None:
    seen: list[str] = []
    over = asyncio.Event()
    broker = NSQBroker(nsqd_process.address, graceful_timeout=0.1)

    @broker.subscriber("orders", "c")
    async def handle(body: str) -> None:
        seen.append(body)
        if body == "slow":
            await over.wait()

    for number, body in enumerate(("quick", "slow")):
        await broker.start()
        assert await broker.ping(WAIT)
        await broker.publish(body, "orders")
        await until_async(lambda number=number: len(seen) > number)
        await asyncio.wait_for(broker.stop(), 10.0)  # consumers wait for handlers for 30 s where nobody says otherwise
        assert not await broker.ping(0)
    over.set()


async def test_a_subscriber_without_a_handler_is_asked_for_messages_and_whoever_is_cancelled_gives_one_back(
    nsqd_process: Any,
) -> None:
    parsing: list[int] = []

    async def parse(message: Any, original: Callable[[Any], Any]) -> Any:
        parsing.append(message.attempts)
        if message.attempts == 1:
            await asyncio.sleep(WAIT)  # sleep: a parser that does not end
        return await original(message)

    broker = NSQBroker(nsqd_process.address)
    subscriber = broker.subscriber("orders", "c", parser=parse)
    async with broker:
        await broker.start()
        await broker.publish({"number": 1}, "orders")
        asking = asyncio.create_task(subscriber.get_one(timeout=WAIT))
        await until_async(lambda: parsing)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        message = await subscriber.get_one(timeout=WAIT)
        assert message is not None
        assert await message.decode() == {"number": 1}
        await message.ack()
        assert await subscriber.get_one(timeout=0.05) is None
        await subscriber.stop()
        assert in_flight(nsqd_process, "orders") == (0, 0)
    assert parsing == [1, 2]


def test_a_broker_that_stops_loses_nothing_that_it_holds(nsqd_process: Any) -> None:
    handled: list[int] = []

    async def run(count: int) -> None:
        broker = NSQBroker(nsqd_process.address)

        @broker.subscriber("orders", "c", max_workers=4)
        async def handle(number: int) -> None:
            await asyncio.sleep(0.01)  # sleep: the handler waits, so that some run when the broker stops
            handled.append(number)

        async with broker:
            await broker.start()
            await until_async(lambda: len(handled) >= count)

    async def publish() -> None:
        async with Producer(nsqd_process.address) as producer:
            await producer.multipublish("orders", [b"%d" % number for number in range(60)])

    asyncio.run(publish())
    asyncio.run(run(10))
    asyncio.run(run(60))
    assert set(handled) == set(range(60))


@pytest.mark.kill
async def test_an_nsqd_that_goes_down_and_comes_back_loses_no_message(nsqd_process: Any) -> None:
    handled: set[int] = set()
    begun: list[int] = []
    broker = NSQBroker(nsqd_process.address, producer={"retry_max_delay": 0.1}, consumer=QUICK)
    go = asyncio.Event()

    @broker.subscriber("orders", "c", max_workers=4)
    async def handle(number: int) -> None:
        begun.append(number)
        await go.wait()
        handled.add(number)

    async with broker:
        await broker.start()
        for number in range(20):
            await broker.publish(number, "orders")
        await until_async(lambda: len(begun) == 4)
        await until_async(lambda: in_flight(nsqd_process, "orders") == (4, 16))  # none is on its way to the channel
        nsqd_process.go_down()
        publishing = [asyncio.create_task(broker.publish(number, "orders")) for number in range(20, 40)]
        await asyncio.sleep(0)
        nsqd_process.start()
        await asyncio.gather(*publishing)
        go.set()
        await until_async(lambda: handled == set(range(40)))


async def test_what_nsq_has_not_is_an_error_and_the_rest_is_described() -> None:
    broker = NSQBroker("127.0.0.1:4150")

    @broker.subscriber("orders", "c")
    @broker.publisher("bills")
    async def bill(order: int) -> int:
        return order

    with pytest.raises(FeatureNotSupportedException, match="NSQ has no replies"):
        await broker.request(1, "orders")
    shown = AsyncAPI(broker).to_specification().to_json()
    assert "orders:Bill" in shown
    assert "bills:Publisher" in shown
    assert "127.0.0.1:4150" in shown
