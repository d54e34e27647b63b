"""``progress()`` of every face: what moves, and why nothing does."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
from support.contract import Face
from support.held_publishes import PublishNsqd
from support.waiting import WAIT

from nsq_fast import Message, NsqdHTTPClient
from nsq_fast.broker import BrokerProcess
from nsq_fast.client.progress import REASONS
from nsq_fast.errors import PublishFailed

NOBODY = "127.0.0.1:1"


async def test_a_consumer_shows_its_connections_and_the_handler_that_hangs(face: Face, filled: str) -> None:
    is_released = False
    begun: list[Message] = []

    async def handle_in_vain(consumer: Any, message: Message) -> None:
        begun.append(message)
        while not is_released:
            await face.sleep(0.001)  # sleep: looks again and again

    async with face.consuming("concurrent", handle_in_vain, filled, max_in_flight=10, concurrency=2) as consumer:
        await face.until(lambda: (found := consumer.progress().handler) and found.age > 1.1, consumer.progress)
        progress = consumer.progress()
        (of_topic,) = progress.topics
        (connection,) = of_topic.connections
        assert (progress.reason, of_topic.reason, connection.reason) == ("handlers_busy",) * 3
        assert of_topic.topic == "t"
        assert (connection.in_flight, connection.unstarted, connection.rdy) == (10, 8, 10)
        assert connection.since_delivery >= 1.0
        assert connection.since_finish is None
        assert "in handle_in_vain" in progress.handler.stack
        assert len(begun) == 2, "as many run at once as concurrency says"
        is_released = True
        await face.until(lambda: consumer.stats().totals.finished == 100)
        await face.until(lambda: consumer.progress().reason == "idle", consumer.progress)
        assert consumer.progress().handler is None
    assert consumer.progress().reason == "closing"


@pytest.fixture
def lookupd_of_a_paused_channel() -> Iterator[str]:
    with BrokerProcess() as broker, NsqdHTTPClient.from_url(str(broker.nsqds[0].http)) as nsqd:
        nsqd.create_topic("t")
        nsqd.create_channel("t", "c")
        nsqd.pause_channel("t", "c")
        nsqd.publish("t", b"body")
        yield str(broker.lookupd.http)


async def test_a_channel_that_is_paused_says_so(face: Face, lookupd_of_a_paused_channel: str) -> None:
    async def handle(consumer: Any, message: Message) -> None: ...

    lookupd = {"lookupd_http_addresses": lookupd_of_a_paused_channel}
    async with face.client("Consumer", "t", "c", message_handler=handle, **lookupd) as consumer:
        end = monotonic() + WAIT
        while consumer.progress().reason != "paused_by_server":  # asked in its own thread, which asks the nsqd
            assert monotonic() < end, consumer.progress()
            await face.sleep(0.05)  # sleep: looks again and again
        ((connection,),) = (topic.connections for topic in consumer.progress().topics)
        assert (connection.depth, connection.is_connected, connection.since_delivery) == (1, True, None)


async def test_a_producer_says_why_publishes_wait(face: Face) -> None:
    with PublishNsqd() as server:
        async with face.client("Producer", server.address) as producer:
            assert producer.progress().reason == "idle"
            promise = producer.publish_nowait("t", b"body")
            await face.until(lambda: producer.progress().reason == "awaiting_answers", producer.progress)
            progress = producer.progress()
            assert (progress.pending, [each.topic for each in progress.topics]) == (1, ["t"])
            assert progress.oldest >= 1.0
            server.reply(0)
            assert await face.result(promise) == b"OK"
            assert producer.progress().reason == "idle"
        assert producer.progress().reason == "closing"


async def test_clients_without_an_nsqd_say_so(face: Face) -> None:
    async with face.client("Consumer", "t", "c", NOBODY) as consumer, face.client("Producer", NOBODY) as producer:
        promise = producer.publish_nowait("t", b"body")
        for client in (consumer, producer):
            await face.until(lambda client=client: client.progress().reason == "not_connected", client.progress)  # type: ignore[misc]
            assert NOBODY in client.progress().detail
        await face(producer.close(0.1))
        with pytest.raises(PublishFailed, match="the producer was closed") as caught:
            await face.result(promise)
        assert not caught.value.possibly_stored


def test_every_reason_stands_in_the_page(request: pytest.FixtureRequest) -> None:
    page = (request.config.rootpath / "docs" / "progress.md").read_text()
    assert {reason for reason in REASONS if f"| `{reason}` |" not in page} == set()
