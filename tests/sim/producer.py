"""Producers of asyncio against nsqds, with lookup or without: every publish has one true end, in time."""

from __future__ import annotations

import asyncio
from typing import Any

from nsq_fast.aio import Producer
from nsq_fast.errors import NsqError, PublishFailed

from .clock import SimLoop
from .connection import expect
from .world import World

IN_TIME = 0.25
"""Seconds that a publish may end after its deadline."""

LARGE = 30_000
"""Bytes of a few bodies, which some nsqds refuse."""

SILENCE = 15.0
"""Seconds after which a server that has forgotten a connection is noticed, at the latest."""

MOST_LINKS = 8
"""Connections to one nsqd, one for each partition, where the option does not say otherwise."""

RECOVERS = 60.0
"""Seconds after the last fault within which a publish succeeds."""


CUT_SHORT = 3.0
"""Seconds that the first publish after an outage takes at most, however long the pauses between attempts have grown."""


class Ends:
    """How each publish ended."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stored: list[bytes] = []
        self.refused: list[tuple[bytes, BaseException]] = []  # said to be not stored
        self.unknown: list[tuple[bytes, BaseException]] = []
        self.of_key: dict[str, list[bytes]] = {}
        self.sent: list[bytes] = []
        self.large: set[bytes] = set()  # those that failed beside one that is large, in the same call

    def failed(self, bodies: list[bytes], error: BaseException) -> None:
        to = self.unknown if getattr(error, "possibly_stored", False) else self.refused
        to.extend((body, error) for body in bodies)
        if any(len(body) >= LARGE for body in bodies):
            self.large.update(bodies)
        self.world.books.note(f"failed {bodies[0]!r}: {error!r}")

    def judge(self, at_most_once: bool) -> None:
        """At the end, when nothing is on its way any more."""
        books = self.world.books
        # A refusal for the size ends the connection: by a reset where something was unread, and with it the refusal
        # itself may be lost, and replies to others.
        are_replies_lost = self.world.network.lost > 0
        for body in self.stored:
            expect(body in books.stored or body in books.lost, f"{body!r} was answered OK, and no nsqd has it")
        for body, error in self.refused:
            expect(body not in books.stored, f"{body!r} is stored, and the publish said that it is not: {error!r}")
        attempts = {body: getattr(error, "attempts", 0) for body, error in (*self.refused, *self.unknown)}
        for body, count in books.refused.items():  # once with others, and once alone
            # Of a server that is slow for seconds every answer may come too late.
            most = max(4, attempts.get(body, 0)) if self.world.is_faulty or are_replies_lost else 2
            expect(count <= most, f"{body[:9]!r} was refused for its size {count} times")
        if at_most_once:
            for body in self.sent:
                count = len(books.stored.get(body, ()))
                expect(count <= 1, f"{body!r} is stored {count} times, with retry_unknown_outcome=False")
        if not self.world.is_faulty:
            ended = [
                (body, error) for body, error in (*self.refused, *self.unknown)
                if not isinstance(error, asyncio.CancelledError) and body not in self.large
                and not (are_replies_lost and getattr(error, "possibly_stored", False))
            ]  # fmt: skip
            expect(not ended, f"failed without any fault: {ended[:1]}")
            for body in () if are_replies_lost else self.sent:
                count = len(books.stored.get(body, ()))
                expect(count <= 1, f"{body!r} is stored {count} times, and nothing was wrong")
        if self.world.is_redesigned:
            for key, bodies in self.of_key.items():
                self._judge_order(key, bodies)

    def _judge_order(self, key: str, bodies: list[bytes]) -> None:
        """What was stored, is so in the order of the calls. Copies may follow."""
        ok, place = set(self.stored), {body: number for number, body in enumerate(bodies)}
        for log in self.world.nsqds[0].cluster:
            highest, seen = -1, set[bytes]()
            for message in log.messages:
                number = place.get(message.body)
                if number is None or message.body not in ok or message.body in seen:
                    continue
                seen.add(message.body)
                expect(number > highest, f"key {key}: {message.body!r} is stored behind a later one")
                highest = number


class Publisher:
    """One task that publishes, and notes how each publish ends."""

    def __init__(self, world: World, producer: Producer, ends: Ends, number: int, timeout: float) -> None:
        chance = world.loop.chance
        self._loop, self._chance, self._producer, self._ends = world.loop, chance, producer, ends
        self._number, self._timeout = number, timeout
        self._count = 0
        self._key = f"k{number}" if chance.happens(0.5) else None
        self._is_redesigned = world.is_redesigned

    def _body(self, is_small: bool) -> bytes:
        self._count += 1
        body = b"%d-%d." % (self._number, self._count)
        if self._chance.happens(0.05) and not is_small:
            body = body.ljust(LARGE, b"x")
        self._ends.sent.append(body)
        if self._key is not None:
            self._ends.of_key.setdefault(self._key, []).append(body)
        return body

    async def run(self, seconds: float) -> None:
        end = self._loop.time() + seconds
        pipelined: list[asyncio.Task[None]] = []
        while self._loop.time() < end:
            kind = self._chance.random()
            if kind < 0.7:
                await self.once()
            elif kind < 0.8:
                await self.once(count=self._chance.randint(2, 5))
            elif kind < 0.97:
                pipelined += [self._loop.create_task(self.once()) for _ in range(self._chance.randint(2, 6))]
            else:
                task = self._loop.create_task(self.once())
                self._loop.call_later(self._chance.long_tailed(0.0, 1.0), task.cancel)
                await asyncio.wait([task])
                expect(task.cancelled() or task.exception() is None, f"{task}")
            await asyncio.sleep(self._chance.long_tailed(0.001, 6.0))
        await asyncio.gather(*pipelined)

    async def once(self, *, count: int = 1, timeout: float | None = None, must: bool = False) -> None:
        """One publish; with ``must`` it has to succeed."""
        bodies = [self._body(is_small=must) for _ in range(count)]
        options: dict[str, Any] = {"timeout": timeout}
        if self._key is not None:
            options["key"] = self._key
        if self._is_redesigned and self._chance.happens(0.1):
            options["trace_id"] = 7 if count == 1 else [7] * count
        began = self._loop.time()
        try:
            if count == 1:
                await self._producer.publish("t", bodies[0], **options)
            else:
                await self._producer.multipublish("t", bodies, **options)
        except asyncio.CancelledError as error:
            self._ends.failed(bodies, error)
            raise
        except NsqError as error:
            self._ends.failed(bodies, error)
            expect(not must, f"{bodies[0]!r} failed long after the last fault: {error!r}")
            expect(isinstance(error, PublishFailed) or hasattr(error, "possibly_stored"), f"{error!r}")
        else:
            self._ends.stored.extend(bodies)
        took = self._loop.time() - began
        limit = timeout or self._timeout
        expect(took <= limit + IN_TIME, f"{bodies[0]!r} took {took:.3f} s, and the limit is {limit} s")


async def outage(world: World, publishers: list[Publisher]) -> None:
    """All nsqds are away, and nothing is published meanwhile: they are tried ever more seldom, until something is."""
    for nsqd in world.nsqds:
        nsqd.kill()
    await asyncio.sleep(40.0 + 20.0 * world.loop.chance.random())
    for nsqd in world.nsqds:
        nsqd.come_back()
    await asyncio.gather(*(publisher.once(timeout=CUT_SHORT, must=True) for publisher in publishers))


async def scenario(loop: SimLoop) -> dict[str, Any]:
    """A producer, several tasks, and a world that goes wrong for a while."""
    chance = loop.chance
    world = World(loop)
    world.make_topic("t", chance.randint(1, 4), is_ext=False)
    if chance.happens(0.3):
        for nsqd in world.nsqds:
            nsqd.max_msg_size = LARGE - 1
    at_most_once = chance.happens(0.3)
    timeout = chance.choice((3.0, 10.0, 30.0))
    attempt_timeout = chance.choice((None, None, 1.0))
    per_nsqd = chance.choice((None, None, 1, 3))
    world.network.links = per_nsqd or (MOST_LINKS if world.is_redesigned else 1)
    producer = Producer(
        **world.addresses,  # type: ignore[arg-type]
        publish_timeout=timeout,
        retry_unknown_outcome=not at_most_once,
        attempt_timeout=attempt_timeout,
        connections_per_nsqd=per_nsqd,
        coalesce=chance.happens(0.7),
        linger=chance.choice((0.0, 0.0, 0.01)),
        max_pending=chance.choice((100_000, 5)),
        max_backoff_duration=10.0,
        heartbeat_interval=chance.choice((1.0, 5.0)),
        connect_timeout=chance.choice((0.5, 3.0)),
        write_timeout=5.0,
        lookupd_poll_interval=chance.choice((3.0, 10.0)),
        hostname="h",
    )
    world.books.note(f"producer {producer.config if hasattr(producer, 'config') else producer!r}"[:2000])
    ends = Ends(world)
    await producer.start()
    seconds = chance.choice((2.0, 4.0, 20.0))
    world.plan_faults(seconds)
    publishers = [Publisher(world, producer, ends, number, timeout) for number in range(chance.randint(1, 5))]
    await asyncio.gather(*(publisher.run(seconds) for publisher in publishers))
    # What is sent once only must not go to a machine that has rebooted before that is noticed; and what met two of them
    # goes to no other, since it may be what ended them.
    rebooted = {host for _, _, kind, host in world.faults.periods if kind == "vanish"}
    patience = SILENCE if at_most_once or len(rebooted) > 1 else 0.0
    await asyncio.sleep(max(0.0, world.last_end + patience - loop.time()))
    await asyncio.gather(*(publisher.once(timeout=RECOVERS, must=True) for publisher in publishers))
    if not world.lookupds and chance.happens(0.5):  # what lookup names no more is not tried
        await outage(world, publishers)
    limit = chance.choice((None, 5.0))
    began = loop.time()
    late = [loop.create_task(publisher.once()) for publisher in publishers] if chance.happens(0.5) else []
    await asyncio.sleep(0)
    await producer.close(limit)
    took = loop.time() - began
    expect(took <= (limit or timeout) + 3.0, f"close took {took:.3f} s")
    await asyncio.wait_for(asyncio.gather(*late), 0.01)
    await asyncio.sleep(2.5)  # a connection whose server is silent takes two more to end
    held = producer.stats()["held"]
    expect(held == 0, f"{held} messages are held after all have ended")
    ends.judge(at_most_once)
    return {"published": len(ends.sent), "stored": len(ends.stored), "unknown": len(ends.unknown),
            "refused": len(ends.refused)}  # fmt: skip
