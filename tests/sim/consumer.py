"""Consumers of asyncio against nsqds, with lookup or without: all is handled, in its order, and never too much."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Any

from nsq_fast.aio import Consumer
from nsq_fast.client.connection import Connection
from nsq_fast.client.consumer import CLOSING_SHARE
from nsq_fast.errors import NsqError

from .clock import SimLoop
from .connection import expect
from .world import World

RECOVERS = 120.0
"""Seconds after the last fault within which everything is handled."""


def _rdy(conn: Connection) -> int:
    return 0 if conn.session.is_closing else conn.rdy  # CLS stands for RDY 0


class Watched:
    """The connections of the client: it never asks for more than max_in_flight, by all that it knows then.

    What was on its way when RDY was lowered, or comes twice after packets were lost, may still come on top of it.

    Attributes:
        limit: max_in_flight, and what it was a moment ago where it was lowered.
    """

    def __init__(self, world: World, limit: int) -> None:
        self.world = world
        self.limit = limit
        self._open: list[Connection] = []
        world.loop.watched = self

    def opened(self, conn: Connection) -> None:
        self._open.append(conn)

    def lower(self, limit: int) -> None:
        self.limit = limit
        self._expect(sum(map(_rdy, self._living())))

    def raised(self) -> None:
        """RDY of one was raised just now."""
        self._expect(sum(max(_rdy(conn), conn.in_flight) for conn in self._living()))

    def _living(self) -> list[Connection]:
        self._open = [conn for conn in self._open if conn.is_open]
        return self._open

    def _expect(self, total: int) -> None:
        if total > self.limit:
            state = [(str(conn.address), conn.rdy, conn.in_flight) for conn in self._open]
            self.world.books.breaks(f"{total} asked for or in flight, and max_in_flight is {self.limit}: {state}")


class Handler:
    """Handles as a program does: mostly well, sometimes not."""

    def __init__(self, world: World) -> None:
        self._world, self._loop, self._chance = world, world.loop, world.loop.chance
        self.failing = self._chance.choice((0.0, 0.0, 0.1))
        self.longest = self._chance.choice((0.0, 0.01, 1.0))
        self.handled: Counter[bytes] = Counter()
        self.done: Counter[bytes] = Counter()
        self.first: dict[int, int] = {}  # partition -> the highest offset that was handled
        self.running = self.unanswered = 0
        self.is_ordered = False

    async def __call__(self, consumer: Consumer, message: Any) -> None:
        chance = self._chance
        body = message.body
        self.handled[body] += 1
        if self.is_ordered:
            self._note_order(body)
        self.running += 1
        try:
            if self.longest:
                await asyncio.sleep(chance.long_tailed(0.0, self.longest))
            kind = chance.random()
            if kind < self.failing:
                raise ValueError("a handler fails")
            if kind < 2 * self.failing:
                message.requeue(0 if chance.happens(0.5) else 100)
                return
            if kind < 0.05:
                message.touch()
            self.done[body] += 1
            if kind > 0.95:
                message.finish()
            elif kind > 0.9:
                message.enable_async()
                self.unanswered += 1
                self._loop.call_later(chance.long_tailed(0.0, 1.0), self._finish_later, message)
        finally:
            self.running -= 1

    def _finish_later(self, message: Any) -> None:
        self.unanswered -= 1
        with suppress(NsqError):  # its connection is lost, or its time is over: then it comes again
            message.finish()

    def _note_order(self, body: bytes) -> None:
        records = self._world.books.stored[body]
        record = records[0]
        before = self.first.get(record.log.partition, -1)
        if record.offset > before:
            skipped = [
                other.body for other in record.log.messages
                if before < other.offset < record.offset and not self.done[other.body]
            ]  # fmt: skip
            self._world.books.require(not skipped, f"{body!r} is handled before {skipped[:1]}")
            self.first[record.log.partition] = record.offset


async def _feed(world: World, seconds: float) -> None:
    """Messages arrive at the nsqds."""
    loop, chance = world.loop, world.loop.chance
    end, number = loop.time() + seconds, 0
    while loop.time() < end:
        for _ in range(chance.choice((1, 1, 5, 30))):
            number += 1
            if world.is_redesigned:
                chance.choice(world.nsqds[0].cluster).store(b"m%d" % number)
            else:
                nsqd = chance.choice(world.nsqds)
                if nsqd.is_running:
                    nsqd.log("t").store(b"m%d" % number)
        await asyncio.sleep(chance.long_tailed(0.005, 5.0))


def _left(world: World) -> int:
    """Messages that nobody has finished, and no nsqd has lost."""
    logs = (
        world.nsqds[0].cluster if world.is_redesigned else [log for nsqd in world.nsqds for log in nsqd.logs.values()]
    )
    return sum(len(log.backlog) + sum(channel.depth for channel in log.channels.values()) for log in logs)


async def scenario(loop: SimLoop) -> dict[str, Any]:
    """A consumer, and a world that goes wrong for a while."""
    chance = loop.chance
    world = World(loop)
    is_ordered = world.is_redesigned and chance.happens(0.5)
    world.make_topic("t", chance.randint(1, 4), is_ordered=is_ordered)
    logs = world.nsqds[0].cluster or [nsqd.log("t") for nsqd in world.nsqds]
    for log in logs:
        log.channel("c")
    handler = Handler(world)
    handler.is_ordered = is_ordered
    max_in_flight = chance.choice((1, 2, 5, 200))
    watched = Watched(world, max_in_flight)
    msg_timeout = chance.choice((2.0, 60.0))
    consumer = Consumer(
        "t", "c",
        **world.addresses,  # type: ignore[arg-type]
        message_handler=handler,
        max_tries=0,
        max_in_flight=max_in_flight,
        concurrency=chance.choice((None, None, 3, 50)),
        msg_timeout=msg_timeout,
        heartbeat_interval=chance.choice((1.0, 5.0)),
        connect_timeout=chance.choice((0.5, 3.0)),
        write_timeout=5.0,
        lookupd_poll_interval=chance.choice((3.0, 10.0)),
        low_ready_idle_timeout=chance.choice((0.5, 10.0)),
        max_backoff_duration=chance.choice((0.0, 4.0)),
        backoff_on_requeue=chance.happens(0.5),
        backoff_scope=chance.choice(("consumer", "connection")),
        max_reconnect_delay=10.0,
        requeue_base_delay=0.1, requeue_max_delay=1.0,
        requeue_unfinished=chance.happens(0.5),
        auto_touch=chance.happens(0.3),
        hostname="h",
    )  # fmt: skip
    world.books.note(f"{'ordered' if is_ordered else ''} {consumer.config} {consumer.connection_config}"[:2500])
    seconds = chance.choice((2.0, 4.0, 20.0))
    await consumer.start()
    world.plan_faults(seconds)
    feeding = loop.create_task(_feed(world, seconds))
    while not feeding.done():
        await asyncio.sleep(0.5)
        consumer.progress()  # which changes nothing
        if chance.happens(0.03):
            new = chance.choice((1, 3, 50))
            watched.limit = max(watched.limit, new)
            consumer.max_in_flight = new
            if new < watched.limit:
                await asyncio.sleep(2 * msg_timeout + 10.0)  # what is in flight goes on
                watched.lower(new)
        if chance.happens(0.02):
            consumer.pause()
            await asyncio.sleep(chance.random())
            consumer.resume()
    await feeding
    await asyncio.sleep(max(0.0, world.last_end - loop.time()))
    handler.failing = 0.0
    end = loop.time() + RECOVERS
    while _left(world):
        await asyncio.sleep(0.5)
        expect(loop.time() < end, f"{_left(world)} messages are still there, {RECOVERS} s after the last fault")
    if not world.is_faulty and handler.longest < 0.5:  # else what waits for handlers may wait too long
        timeouts = sum(channel.timeouts for log in logs for channel in log.channels.values())
        expect(not timeouts, f"{timeouts} messages timed out, and nothing was wrong")
    books = world.books
    for body, count in books.finished.items():
        expect(
            count <= handler.done[body], f"{body!r} was finished {count} times, and handled {handler.done[body]} times"
        )
    await _close(world, consumer, handler, msg_timeout)
    return {"messages": len(books.stored), "handled": sum(handler.handled.values())}


async def _close(world: World, consumer: Consumer, handler: Handler, msg_timeout: float) -> None:
    """In the middle of work, or idle."""
    loop, chance = world.loop, world.loop.chance
    if chance.happens(0.5):
        for number in range(20):
            chance.choice(world.nsqds[0].cluster or [nsqd.log("t") for nsqd in world.nsqds]).store(b"late%d" % number)
        await asyncio.sleep(chance.long_tailed(0.0, 0.3))
    began = loop.time()
    timeout = chance.choice((1.0, 10.0))
    drain = chance.happens(0.7)  # else no handler is waited for
    await consumer.close(drain, timeout)
    took = loop.time() - began
    expect(took <= timeout + 1.0, f"close took {took:.3f} s, and the timeout is {timeout} s")
    is_over = took >= timeout * (1 - CLOSING_SHARE)  # the rest is for the connections
    expect(not drain or is_over or not handler.running, f"{handler.running} handlers run after close")
    while handler.running or handler.unanswered:
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)
    if not world.is_faulty and drain and timeout > 1.0:
        expect(took < 5.0, f"close took {took:.3f} s, and nothing was wrong")
    if not world.is_faulty and drain and took < timeout - 0.1:
        expect(not world.books.abandoned, f"close left {world.books.abandoned} messages in flight")
