"""Each reason why nothing is done, injected, is the one that ``progress()`` names, and within its bound."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from nsq_fast.aio import Consumer, Producer
from nsq_fast.client.http import HttpClient, Reply
from nsq_fast.client.progress import ASK_EVERY, MOVING, REASONS
from nsq_fast.errors import NsqError

from .clock import SimLoop
from .lookupd import ModelLookupd
from .nsqd import ModelNsqd, move_leader

SOON = MOVING + 0.5
"""Seconds after which what does not move is named, at the latest."""

NSQD, LOOKUPD = "10.1.0.1:4150", "10.2.0.1:4161"
Stage = Callable[[SimLoop, str], Awaitable[None]]


async def finish(consumer: Any, message: Any) -> None:
    """The handler of who has none of interest."""


async def hang(consumer: Any, message: Any) -> None:
    await asyncio.sleep(1000.0)


async def hang_at_each(consumer: Any) -> None:
    async for message in consumer:
        await hang(consumer, message)


async def fail(consumer: Any, message: Any) -> None:
    raise ValueError("a handler fails")


async def named(loop: SimLoop, client: Any, reason: str | None, within: float = SOON) -> Any:
    """The progress of a client, once it names this reason."""
    end = loop.time() + within
    while (progress := client.progress()).reason != reason:
        assert loop.time() < end, f"{progress} and not {reason}"
        await asyncio.sleep(0.05)
    return progress


def an_nsqd(loop: SimLoop, dialect: str = "original", *topics: str) -> ModelNsqd:
    nsqd = ModelNsqd(loop.network, loop.books, "10.1.0.1", dialect)
    for topic in topics:
        nsqd.log(topic).channel("c")
    return nsqd


def consumer_of(nsqds: Any = NSQD, handler: Any = finish, topic: Any = "t", **options: Any) -> Consumer:
    return Consumer(topic, "c", nsqds, message_handler=handler, max_in_flight=2, **options)


def consumer_by_lookup(handler: Any = finish, **options: Any) -> Consumer:
    return consumer_of((), handler, lookupd_http_addresses=[LOOKUPD], lookupd_poll_interval=1.0, **options)


# The reasons


async def idle(loop: SimLoop, reason: str) -> None:
    nsqd = an_nsqd(loop)
    async with consumer_of() as consumer:
        await named(loop, consumer, reason)
        nsqd.log("t").store(b"work")
        progress = await named(loop, consumer, None)
        (connection,) = progress.topics[0].connections
        assert connection.since_delivery < 0.1
        progress = await named(loop, consumer, reason)
        (connection,) = progress.topics[0].connections
        assert MOVING <= connection.since_finish <= connection.since_delivery < SOON + 0.1
        assert (connection.rdy, connection.in_flight, connection.is_connected) == (2, 0, True)


async def closing(loop: SimLoop, reason: str) -> None:
    nsqd = an_nsqd(loop)
    consumer = consumer_of(handler=hang)
    await consumer.start()
    nsqd.log("t").store(b"work")
    await named(loop, consumer, None)
    end = loop.create_task(consumer.close(timeout=3.0))
    await asyncio.sleep(0)
    await named(loop, consumer, reason, 0.0)
    await end
    assert consumer.progress().reason == reason


async def handlers_busy(loop: SimLoop, reason: str) -> None:
    nsqd = an_nsqd(loop)
    consumer = consumer_of(handler=hang)
    await consumer.start()
    message, _ = nsqd.log("t").store(b"first"), nsqd.log("t").store(b"second")
    progress = await named(loop, consumer, reason)
    assert progress.handler.message == message.id
    assert MOVING <= progress.handler.age < SOON + 0.5
    assert "in hang" in progress.handler.stack
    assert progress.handler.stack.lstrip().startswith(f'File "{__file__}"')  # what calls it is left out
    (connection,) = progress.topics[0].connections
    assert (connection.in_flight, connection.unstarted) == (2, 1)
    await consumer.close(drain=False)
    async with consumer_of(handler=None, topic="iterated") as consumer:
        nsqd.log("iterated").store(b"work")
        iterating = loop.create_task(hang_at_each(consumer))
        assert "in hang" in (await named(loop, consumer, reason)).handler.stack
        iterating.cancel()


async def awaiting_answers(loop: SimLoop, reason: str) -> None:
    nsqd = an_nsqd(loop)
    held = []

    async def hold(consumer: Any, message: Any) -> None:
        message.enable_async()
        held.append(message)

    async with consumer_of(handler=hold) as consumer:
        nsqd.log("t").store(b"work")
        progress = await named(loop, consumer, reason)
        assert progress.handler is None
        held.pop().finish()
        await named(loop, consumer, None)


async def backoff(loop: SimLoop, reason: str) -> None:
    nsqd = an_nsqd(loop)
    async with consumer_of(handler=fail, requeue_delay=0, max_tries=0) as consumer:
        nsqd.log("t").store(b"work")
        await named(loop, consumer, reason, 10.0)


async def max_in_flight_zero(loop: SimLoop, reason: str) -> None:
    nsqd = an_nsqd(loop)
    async with consumer_of() as consumer:
        await named(loop, consumer, "idle")
        consumer.pause()
        nsqd.log("t").store(b"work")
        assert "pause()" in (await named(loop, consumer, reason)).detail
        consumer.resume()
        await named(loop, consumer, None)
        consumer.max_in_flight = 0
        assert "max_in_flight is 0" in (await named(loop, consumer, reason)).detail


async def not_connected(loop: SimLoop, reason: str) -> None:
    nsqd = an_nsqd(loop)
    async with consumer_of() as consumer:
        await named(loop, consumer, "idle")
        nsqd.kill()
        assert "10.1.0.1:4150" in (await named(loop, consumer, reason)).detail
        await asyncio.sleep(300)
        end = loop.time() + 130.0
        while not (found := re.search(r"; the next attempt is in ([\d.]+) s$", consumer.progress().detail)):
            assert loop.time() < end, consumer.progress()
            await asyncio.sleep(0.1)
        nsqd.come_back()
        await asyncio.sleep(float(found[1]) - 1)
        assert consumer.progress().reason == reason
        await named(loop, consumer, "idle", 3.0)


async def lookup_empty(loop: SimLoop, reason: str) -> None:
    nsqd = an_nsqd(loop)
    lookupd = ModelLookupd(loop.network, loop.books, "10.2.0.1", [nsqd])
    async with consumer_by_lookup() as consumer:
        assert "TOPIC_NOT_FOUND" in (await named(loop, consumer, reason)).detail
        nsqd.log("t")
        lookupd.notice()
        await named(loop, consumer, "idle", 5.0)


async def lookup_failing(loop: SimLoop, reason: str) -> None:
    nsqd = an_nsqd(loop, "original", "t")
    lookupd = ModelLookupd(loop.network, loop.books, "10.2.0.1", [nsqd])
    lookupd.change_mood("error")
    async with consumer_by_lookup() as consumer:
        assert consumer.progress().detail == "no nsqlookupd has answered yet"
        assert "500" in (await named(loop, consumer, reason)).detail
        lookupd.change_mood("")
        await named(loop, consumer, "idle", 20.0)


async def no_leader(loop: SimLoop, reason: str) -> None:
    nsqd = an_nsqd(loop, "redesigned")
    other = ModelNsqd(loop.network, loop.books, "10.1.0.2", "redesigned", nsqd.cluster)
    logs = nsqd.log("t", 0), other.log("t", 1)
    lookupd = ModelLookupd(loop.network, loop.books, "10.2.0.1", [nsqd, other])
    async with consumer_by_lookup() as consumer:
        await named(loop, consumer, "idle")
        move_leader(logs[1], None)
        lookupd.notice()
        progress = await named(loop, consumer, reason, 5.0)
        assert progress.topics[0].detail == "partitions without a leader: 1"
        move_leader(logs[1], nsqd)
        lookupd.notice()
        await named(loop, consumer, "idle", 10.0)


async def blocked_message(loop: SimLoop, reason: str) -> None:
    nsqd = an_nsqd(loop, "redesigned")
    nsqd.log("t").is_ordered = True
    ModelLookupd(loop.network, loop.books, "10.2.0.1", [nsqd])
    nsqd.log("t").channel("c")
    nsqd.log("t").store(b"work")
    async with consumer_by_lookup(fail, ordered=True, requeue_delay=20_000, max_tries=0) as consumer:
        await named(loop, consumer, reason, 5.0)


async def filtered(loop: SimLoop, reason: str) -> None:
    nsqd = an_nsqd(loop, "redesigned")
    log = nsqd.log("t")
    log.is_ext = True
    ModelLookupd(loop.network, loop.books, "10.2.0.1", [nsqd])
    log.channel("c")
    async with consumer_by_lookup(skip_header="test") as consumer:
        await named(loop, consumer, "idle")
        log.store(b"work", ext=b'{"test":"1"}')
        await named(loop, consumer, reason)
        log.store(b"work", ext=b'{"other":"1"}')
        await named(loop, consumer, None)


async def zone_filter(loop: SimLoop, reason: str) -> None:
    ModelLookupd(loop.network, loop.books, "10.2.0.1", [an_nsqd(loop, "original", "t")])
    async with consumer_by_lookup(discovery_filter=lambda nsqd: False) as consumer:
        await named(loop, consumer, reason)


# What the nsqd says by HTTP


class Stats(ModelLookupd):
    """The route /stats of an nsqd. It says what waits, and pushes none of it."""

    is_paused = False
    held = 0

    def __init__(self, nsqd: ModelNsqd, topic: str) -> None:
        self.log = nsqd.log(topic)
        if self.log.is_redesigned:
            nsqd.log(topic, 1).channel("c")  # nothing waits there
        self.channel: Any = self.log.channel("c")
        self.channel.push = lambda: None
        self.asked_at: list[float] = []
        super().__init__(nsqd.network, nsqd.books, nsqd.address[0], [])

    def start(self) -> None:
        self.address = (self.address[0], 4151)
        super().start()

    def answer(self, path: str, query: dict[str, str]) -> tuple[int, dict[str, Any]]:
        assert (path, query["topic"], query["channel"]) == ("/stats", "t", "c")
        self.asked_at.append(self.books.loop.time())
        waiting = (len(self.channel.queue), len(self.log.messages), self.is_paused, self.held)
        of_partitions = {"0": waiting, "1": (0, 0, False, 0)} if self.log.is_redesigned else {"": waiting}
        names = ("depth", "message_count", "paused", "deferred_count")
        return 200, {
            "topics": [
                {"topic_name": "t", "topic_partition": number, "channels": [
                    {"channel_name": "c", **dict(zip(names, figures, strict=True))}
                ]}
                for number, figures in of_partitions.items()
            ]
        }  # fmt: skip


def stats_of(loop: SimLoop, dialect: str = "original", *others: str) -> Stats:
    nsqd = an_nsqd(loop, dialect, *others)
    stats = Stats(nsqd, "t")
    ModelLookupd(loop.network, loop.books, "10.2.0.1", [nsqd])
    return stats


async def paused_by_server(loop: SimLoop, reason: str) -> None:
    stats = stats_of(loop)
    stats.is_paused = True
    stats.log.store(b"work")
    async with consumer_by_lookup() as consumer:
        progress = await named(loop, consumer, reason, 3.0)
        assert progress.topics[0].connections[0].depth == 1
        stats.is_paused = False
        stats.channel.queue.clear()
        await named(loop, consumer, "idle", ASK_EVERY + SOON)
        await asyncio.sleep(5 * ASK_EVERY)
        consumer.progress()
        await asyncio.sleep(1.0)
    between = [later - earlier for earlier, later in zip(stats.asked_at, stats.asked_at[1:], strict=False)]
    assert len(between) == 2
    assert min(between) >= ASK_EVERY - 0.1, "each takes a moment of its own to arrive"


async def server_not_pushing(loop: SimLoop, reason: str) -> None:
    stats = stats_of(loop, "redesigned")
    stats.log.store(b"work")
    async with consumer_by_lookup() as consumer:
        await asyncio.sleep(2 * MOVING)
        progress = await named(loop, consumer, reason)
        assert "1 message, and none comes" in progress.detail
        assert {each.partition: each.depth for each in progress.topics[0].connections} == {0: 1, 1: 0}
        del stats.channel.push  # it has come to its senses
        stats.channel.push()
        await named(loop, consumer, None)
        assert (await named(loop, consumer, "idle")).topics[0].connections[0].depth is None


async def sampled_out(loop: SimLoop, reason: str) -> None:
    stats = stats_of(loop)
    async with consumer_by_lookup(sample_rate=1) as consumer:
        await named(loop, consumer, "idle")
        await asyncio.sleep(1.0)
        stats.log.store(b"work")
        stats.channel.queue.clear()
        await named(loop, consumer, reason, ASK_EVERY + SOON)


CONSUMERS: list[Stage] = [
    idle, closing, handlers_busy, awaiting_answers, backoff, max_in_flight_zero, not_connected, lookup_empty,
    lookup_failing, no_leader, blocked_message, filtered, zone_filter, paused_by_server, server_not_pushing,
    sampled_out,
]  # fmt: skip


@pytest.mark.parametrize("stage", CONSUMERS, ids=lambda stage: stage.__name__)
async def test_a_consumer_names_why_nothing_is_done(loop: SimLoop, stage: Stage) -> None:
    await stage(loop, stage.__name__)


@pytest.mark.parametrize("is_ordered", [True, False], ids=["ordered", "unordered"])
async def test_what_others_hold_is_told(loop: SimLoop, is_ordered: bool) -> None:
    """What waits there is deferred, or another's: of an ordered partition nothing comes before that is answered."""
    stats = stats_of(loop, "redesigned")
    stats.log.is_ordered = is_ordered
    stats.log.store(b"work")
    stats.held = 1
    async with consumer_by_lookup(ordered=is_ordered) as consumer:
        await asyncio.sleep(2 * MOVING)
        consumer.progress()
        await asyncio.sleep(MOVING)
        progress = await named(loop, consumer, "blocked_message" if is_ordered else "idle")
        assert progress.detail.startswith("in flight to others, or deferred: 1 message")


async def test_a_blocked_partition_is_told_of_its_topic_while_another_moves(loop: SimLoop) -> None:
    async def fail_one(consumer: Any, message: Any) -> None:
        if message.body == b"bad":
            raise ValueError("bad")

    nsqd = an_nsqd(loop, "redesigned")
    logs = nsqd.log("t", 0), nsqd.log("t", 1)
    for log in logs:
        log.is_ordered = True
        log.channel("c")
    ModelLookupd(loop.network, loop.books, "10.2.0.1", [nsqd])
    logs[0].store(b"bad")
    async with consumer_by_lookup(fail_one, ordered=True, requeue_delay=20_000, max_tries=0) as consumer:
        await named(loop, consumer, "blocked_message", 5.0)
        logs[1].store(b"good")
        progress = await named(loop, consumer, None)
        assert progress.topics[0].reason == "blocked_message"


async def test_a_connection_without_rdy_says_what_has_it(loop: SimLoop) -> None:
    """With fewer messages allowed than connections."""
    nsqds = [ModelNsqd(loop.network, loop.books, f"10.1.0.{number}", "original") for number in (1, 2)]
    may_go_on, held = asyncio.Event(), []

    async def handle(consumer: Any, message: Any) -> None:
        await may_go_on.wait()
        message.enable_async()
        held.append(message)

    addresses = [f"10.1.0.{number}:4150" for number in (1, 2)]
    async with Consumer("t", "c", addresses, message_handler=handle, max_in_flight=1) as consumer:

        async def says(reason: str, detail: str) -> None:
            await asyncio.sleep(0.1)
            (waiting,) = (each for each in consumer.progress().topics[0].connections if not each.rdy)
            assert (waiting.reason, detail in waiting.detail) == (reason, True), waiting

        while consumer.total_ready_count != 1 or len(consumer.stats().connections) < 2:
            await asyncio.sleep(0.1)
        await says("max_in_flight_zero", "it is another's turn")
        (ready,) = (each for each in consumer.stats().connections if each.rdy)
        next(each for each in nsqds if each.address == tuple(ready.address)).log("t").store(b"work")
        await says("handlers_busy", "max_in_flight=1 is held by 1 handler")
        may_go_on.set()
        await says("awaiting_answers", "hold all of max_in_flight=1")
        held.pop().finish()


@pytest.mark.parametrize("stats", [b'{"topics": [{"topic_name": "\xff"}]}', b'{"topics": 1}', b"{"])
async def test_stats_that_cannot_be_read_are_no_fault_of_the_client(
    loop: SimLoop, monkeypatch: pytest.MonkeyPatch, stats: bytes
) -> None:
    asked: list[HttpClient] = []

    async def ask(self: HttpClient, loop: Any, method: str, path: str, *arguments: Any, **options: Any) -> Reply:
        if path != "/stats":
            return await real_ask(self, loop, method, path, *arguments, **options)
        asked.append(self)
        return Reply(200, stats, {})

    real_ask = HttpClient.ask
    monkeypatch.setattr(HttpClient, "ask", ask)
    stats_of(loop, "original", "u").log.store(b"work")
    faults: list[NsqError] = []
    async with consumer_by_lookup(topic=["t", "u"]) as consumer:
        consumer.on_error.connect(lambda _, error: faults.append(error), weak=False)
        await asyncio.sleep(2 * MOVING)
        await named(loop, consumer, "idle")
        await asyncio.sleep(MOVING)
    assert asked == 2 * asked[:1], "about both topics over one connection"
    assert faults == []


async def test_an_nsqd_that_pushes_nothing_is_subscribed_to_anew(loop: SimLoop) -> None:
    stats = stats_of(loop)
    stats.log.store(b"work")
    async with consumer_by_lookup() as consumer:
        await asyncio.sleep(2 * MOVING)
        began = loop.time()
        await named(loop, consumer, "server_not_pushing")
        (first,) = stats.channel.clients
        while stats.channel.clients == [first]:
            await asyncio.sleep(0.05)
            consumer.progress()
        assert loop.time() - began < ASK_EVERY + SOON
        del stats.channel.push  # the new connection gets what waits
        await asyncio.sleep(0.5)
        stats.channel.push()
        await named(loop, consumer, None)
        (connection,) = consumer.progress().topics[0].connections
        assert connection.renewed == 1
        await asyncio.sleep(3 * ASK_EVERY)
        assert consumer.stats().totals.finished == 1
        assert consumer.stats().totals.subscriptions == 2


def test_each_reason_is_injected() -> None:
    assert {stage.__name__ for stage in CONSUMERS} == set(REASONS)


# Producers


async def waits_for(loop: SimLoop, producer: Producer, reason: str, within: float = SOON, **options: Any) -> Any:
    """A publish waits for this reason; its progress."""
    waiting = loop.create_task(producer.publish("t", b"body", timeout=60.0, **options))
    try:
        progress = await named(loop, producer, reason, within)
        assert [(each.topic, each.pending) for each in progress.topics] == [("t", 1)]
        assert progress.oldest >= MOVING
        return progress
    finally:
        waiting.cancel()
        with suppress(NsqError, asyncio.CancelledError):
            await waiting


async def publish_backoff(loop: SimLoop) -> None:
    nsqd = an_nsqd(loop, "redesigned")
    nsqd.log("t").is_writable = False
    options: dict[str, Any] = {"retry_base_delay": 20.0, "retry_max_delay": 30.0}
    ModelLookupd(loop.network, loop.books, "10.2.0.1", [nsqd])
    async with Producer((), [LOOKUPD], **options) as producer:
        assert "E_FAILED_ON_NOT_WRITABLE" in (await waits_for(loop, producer, "backoff", 10.0)).detail


async def publish_lookup_failing(loop: SimLoop) -> None:
    ModelLookupd(loop.network, loop.books, "10.2.0.1", [an_nsqd(loop, "original", "t")]).change_mood("error")
    async with Producer((), [LOOKUPD]) as producer:
        await waits_for(loop, producer, "lookup_failing")


async def publish_lookup_empty(loop: SimLoop) -> None:
    ModelLookupd(loop.network, loop.books, "10.2.0.1", [])
    async with Producer((), [LOOKUPD]) as producer:
        await waits_for(loop, producer, "lookup_empty")


async def publish_zone_filter(loop: SimLoop) -> None:
    ModelLookupd(loop.network, loop.books, "10.2.0.1", [an_nsqd(loop, "original", "t")])
    async with Producer((), [LOOKUPD], discovery_filter=lambda nsqd: False) as producer:
        await waits_for(loop, producer, "zone_filter")


async def publish_no_leader(loop: SimLoop) -> None:
    nsqd = an_nsqd(loop, "redesigned")
    logs = nsqd.log("t", 0), nsqd.log("t", 1)
    lookupd = ModelLookupd(loop.network, loop.books, "10.2.0.1", [nsqd])
    move_leader(logs[1], None)
    lookupd.notice()
    async with Producer((), [LOOKUPD]) as producer:
        await waits_for(loop, producer, "no_leader", partition=1)


@pytest.mark.parametrize(
    "stage",
    [
        publish_backoff, publish_lookup_failing, publish_lookup_empty, publish_zone_filter, publish_no_leader,
    ],
    ids=lambda stage: stage.__name__,
)  # fmt: skip
async def test_a_producer_names_why_publishes_wait(loop: SimLoop, stage: Any) -> None:
    await stage(loop)
