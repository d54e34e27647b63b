"""Each publish of asyncio has one outcome, and it is true: whoever else publishes, cancels, or cuts the connection."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable

import pytest
from gevent import sleep
from support.loops import LOOPS, NewLoop, run
from support.peers import Peer, frame
from support.publishing import Command, EndOfPeer, PublishNsqd, agree
from support.waiting import until

from nsq_fast.aio import Producer
from nsq_fast.errors import PublishFailed

ROUNDS = 5
ALONE = 60
TOGETHER = 15

Outcomes = dict[bytes, bool | None]
"""Body -> whether it is stored; None: unknown."""


def _unreliable(rng: random.Random) -> Callable[[Peer, Command], None]:
    """Mostly OK; sometimes in two parts, or late, and now and then the connection ends."""

    def answer(peer: Peer, command: Command) -> None:
        kind = rng.random()
        if kind < 0.04:
            raise EndOfPeer
        if kind < 0.06:
            sleep(0.002)  # sleep: somebody may cancel meanwhile
            raise EndOfPeer
        if kind < 0.08:
            peer.frame(1, b"E_PUB_FAILED try again")
            raise EndOfPeer
        if kind < 0.15:
            reply = frame(0, b"OK")
            peer.send(reply[:5])
            sleep(0.001)  # sleep: the client reads the beginning
            peer.send(reply[5:])
            return
        if kind < 0.25:
            sleep(0.001)  # sleep: somebody may cancel meanwhile
        agree(peer, command)

    return answer


class Publishers:
    """Publish at random, and note what became of it."""

    def __init__(self, producer: Producer, rng: random.Random) -> None:
        self.outcomes: Outcomes = {}
        self._producer = producer
        self._rng = rng
        self._number = 0

    def _body(self) -> bytes:
        self._number += 1
        return b"%d " % self._number + self._rng.choice((1, 200, 5000)) * b"x"

    async def one(self) -> None:
        """One publish, that may be cancelled."""
        body = self._body()
        task = asyncio.ensure_future(self._producer.publish("t", body))
        if self._rng.random() < 0.1:
            await asyncio.sleep(self._rng.choice((0, 0, 0.0003, 0.001)))  # sleep: it is somewhere on its way
            task.cancel()
        try:
            await task
            self.outcomes[body] = True
        except PublishFailed as error:
            self.outcomes[body] = None if error.possibly_stored else False
        except asyncio.CancelledError as error:
            self.outcomes[body] = None if _possibly_stored(error) else False

    async def many(self) -> None:
        """Publishes on each other's heels, in each way that there is."""
        bodies = [self._body() for _ in range(4)]
        results = await asyncio.gather(
            self._producer.publish_nowait("t", bodies[0]),
            self._producer.publish("t", bodies[1]),
            self._producer.multipublish("t", bodies[2:]),
            return_exceptions=True,
        )
        for body, result in zip(bodies, [*results, results[-1]], strict=True):
            assert result == b"OK" or isinstance(result, PublishFailed)
            self.outcomes[body] = True if result == b"OK" else None if result.possibly_stored else False

    async def run(self) -> None:
        for _ in range(ROUNDS):
            for _ in range(ALONE):
                await self.one()
            await asyncio.gather(*(self.one() for _ in range(TOGETHER)), self.many(), self.many())


def _possibly_stored(error: BaseException) -> bool:
    while not hasattr(error, "possibly_stored"):  # 3.10 and the futures of a loop raise it anew
        assert error.__context__ is not None, "a cancelled publish does not say whether it may be stored"
        error = error.__context__
    stored: bool = error.possibly_stored
    return stored


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("seed", range(2))
def test_each_publish_has_one_outcome_and_that_is_true(seed: int, new_loop: NewLoop) -> None:
    rng = random.Random(seed)
    nsqd = PublishNsqd(_unreliable(random.Random(rng.random())))
    found: list[Outcomes] = []

    async def main() -> None:
        async with Producer(
            str(nsqd.address), retry_unknown_outcome=False, max_backoff_duration=0.01, retry_max_delay=0.01
        ) as producer:
            publishers = Publishers(producer, rng)
            await publishers.run()
        found.append(publishers.outcomes)

    thread = threading.Thread(target=run, args=(main(), new_loop))
    thread.start()
    until(lambda: not thread.is_alive())
    nsqd.stop()
    (outcomes,) = found
    received = Counter(nsqd.bodies)
    assert len(outcomes) == ROUNDS * (ALONE + TOGETHER + 8)
    assert set(received) <= set(outcomes)
    assert {body for body, count in received.items() if count > 1} == set()
    assert {body for body, is_stored in outcomes.items() if is_stored and not received[body]} == set()
    assert {body for body, is_stored in outcomes.items() if is_stored is False and received[body]} == set()
    assert sum(is_stored is True for is_stored in outcomes.values()) > len(outcomes) / 2
