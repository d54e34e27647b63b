"""Consumers whose nsqlookupds hang, lie and are slow, while topics appear. The nsqds are well.

The first lookupd is always well, and knows all topics. So each message is handled soon after its topic is there,
whatever becomes of the others: what one lookupd knows is used at once, and one that hangs delays nothing.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from nsq_fast.aio import Consumer
from nsq_fast.client.lookup import SIDE_BY_SIDE, STRAGGLER_GRACE

from .clock import SimLoop
from .connection import expect
from .lookupd import MOODS, ModelLookupd
from .world import World

MOVES = 1.0
"""Seconds for an answer, a connection and a message on their way, and for an nsqlookupd to hear of a topic."""

LONGEST_SEARCH = 5.0
"""Seconds, at most, until a topic that nobody knew is asked for again."""


MOST_ASKED = 2.5
"""Questions a second for each topic and list: no more than one in ``lookupd_refresh_interval``, and some at first."""


class Topics:
    """Those there are, their messages, and when each of these was stored and handled.

    Attributes:
        found: when the first message of each was handled.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.made: list[str] = []
        self.found: dict[str, float] = {}
        self.stored: dict[bytes, float] = {}
        self.handled: dict[bytes, float] = {}

    def make(self, name: str) -> None:
        world, chance = self._world, self._world.loop.chance
        if name in self.made:
            return
        self.made.append(name)
        world.books.note(f"topic {name} is made")
        if world.is_redesigned:
            world.make_topic(name, chance.randint(1, 3))
            for log in world.nsqds[0].cluster:
                log.channel("c")  # else it begins at what comes after it is made
        else:
            for nsqd in chance.sample(world.nsqds, chance.randint(1, len(world.nsqds))):
                nsqd.log(name)
        for _ in range(chance.randint(1, 3)):
            self.store(name)

    def store(self, name: str) -> None:
        world, chance = self._world, self._world.loop.chance
        body = b"%b %d" % (name.encode(), len(self.stored))
        logs = [log for log in world.nsqds[0].cluster if log.topic == name]
        logs += [nsqd.logs[name] for nsqd in world.nsqds if name in nsqd.logs]
        self.stored[body] = world.loop.time()
        chance.choice(logs).store(body)

    async def handle(self, consumer: Consumer, message: Any) -> None:
        self._world.books.require(message.topic.encode() == message.body.split()[0], "a message of another topic")
        self.handled.setdefault(message.body, self._world.loop.time())
        self.found.setdefault(message.topic, self._world.loop.time())

    def check(self, patience: float) -> None:
        """Each message is handled in time: within ``patience`` while its topic is not found, and else at once."""
        now = self._world.loop.time()
        for body, stored_at in self.stored.items():
            is_found = self.found.get(body.split()[0].decode(), now) < stored_at - MOVES
            took, most = self.handled.get(body, now) - stored_at, MOVES if is_found else patience
            expect(took <= most, f"{body!r} is not handled {took:.2f} s after it was there; {most:.2f} s are enough")


def _plan_moods(world: World, lookupds: list[ModelLookupd], within: float, moods: tuple[str, ...]) -> None:
    """Each of these has several times of its own in which it is not well."""
    loop, chance = world.loop, world.loop.chance
    for lookupd in lookupds:
        moment = loop.time() + chance.choice((-1.0, 0.0, 2.0))
        while moment < loop.time() + within:
            length = chance.long_tailed(0.1, within)
            loop.call_at(max(moment, loop.time()), lookupd.change_mood, chance.choice(moods))
            loop.call_at(max(moment, loop.time()) + length, lookupd.change_mood, "")
            moment += length + chance.long_tailed(0.1, within / 2)


async def scenario(loop: SimLoop) -> dict[str, Any]:
    """A consumer of listed topics, or of a pattern."""
    chance = loop.chance
    world = World(loop, faulty=0.0, fewest_lookupds=1)
    for number in range(chance.randint(0, 2)):
        world.lookupds.append(ModelLookupd(world.network, world.books, f"10.2.1.{number + 1}", world.nsqds))
    names = [f"orders{number}" for number in range(chance.choice((1, 2, 3, 10)))]
    topics = Topics(world)
    for name in names:
        if chance.happens(0.6):
            topics.make(name)
    for number in range(3):
        world.make_topic(f"other{number}", 1)
    for lookupd in world.lookupds:
        lookupd.notice()
    interval = chance.choice((1.0, 3.0, 20.0))
    jitter = chance.choice((0.0, 0.3))
    is_pattern = chance.happens(0.5)
    is_patient = chance.happens(0.5)
    has_ghosts = not world.is_redesigned and chance.happens(0.3)  # then a topic is known, and not sought any more
    consumer = Consumer(
        re.compile("orders.*") if is_pattern else names, "c",
        **world.addresses,  # type: ignore[arg-type]
        message_handler=topics.handle,
        max_in_flight=500,
        lookupd_poll_interval=interval,
        lookupd_poll_jitter=jitter,
        lookupd_timeout=60.0 if is_patient else 2.0,
        hostname="h",
    )  # fmt: skip
    world.books.note(f"{'pattern' if is_pattern else 'names'} {consumer.lookup_config}"[:500])
    seconds = chance.choice((5.0, 10.0, 30.0))
    _plan_moods(world, world.lookupds[1:], seconds, ("hangs", "hangs", *MOODS[: None if has_ghosts else -1]))
    began_at = loop.time()
    await consumer.start()
    for name in names:
        loop.call_later(chance.random() * seconds, topics.make, name)
    # What is there is polled for; a listed topic that nobody knows is asked for more often.
    is_polled = is_pattern or has_ghosts
    patience = MOVES + STRAGGLER_GRACE + (1.0 + jitter) * (interval if is_polled else min(interval, LONGEST_SEARCH))
    end = loop.time() + seconds
    while loop.time() < end + patience:
        await asyncio.sleep(0.5)
        topics.check(patience)
        if topics.made and chance.happens(0.3) and loop.time() < end:
            topics.store(chance.choice(topics.made))
    expect(set(consumer.topics) == set(names), f"{consumer.topics} are consumed, of {names}")
    most = max(lookupd.most_at_once for lookupd in world.lookupds)
    expect(most <= SIDE_BY_SIDE + 3, f"{most} questions at once to one lookupd")
    asked = max(lookupd.asked for lookupd in world.lookupds)
    rate = asked / (loop.time() - began_at) / (len(names) + 2)
    expect(rate <= MOST_ASKED, f"a lookupd is asked {rate:.1f} times a second for each topic")
    expect(len(topics.handled) == len(topics.stored), "not all is handled")
    began = loop.time()
    await consumer.close(timeout=5.0)
    expect(loop.time() - began < 1.0, f"close took {loop.time() - began:.2f} s beside lookupds that hang")
    await asyncio.sleep(0.5)
    return {
        "topics": len(names),
        "handled": len(topics.handled),
        "questions": sum(each.asked for each in world.lookupds),
    }
