"""SIGKILL at random moments of publishing: nothing that was answered OK is lost."""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path
from typing import Any

from gevent import spawn
from support.http import ask
from support.redesigned import sized
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import BrokerProcess

KILLS = 4


def publish(address: Any, turn: int, dice: random.Random, confirmed: set[bytes]) -> None:
    """Publish until the connection ends."""
    with contextlib.suppress(OSError, struct.error):
        client = WireClient(address)
        for number in range(1_000_000):
            bodies = [b"%d-%d-%d" % (turn, number, each) for each in range(dice.choice((1, 1, 20)))]
            inner = struct.pack(">I", len(bodies)) + b"".join(map(sized, bodies))
            if client.command(b"MPUB t\n" + sized(inner)) == b"OK":
                confirmed.update(bodies)


def consume(address: Any, found: set[bytes]) -> None:
    with contextlib.suppress(OSError, struct.error):
        client = WireClient(address)
        client.subscribe("t", "c", 100)
        while True:
            found.add(client.message().body)


def test_kills_at_random_moments_lose_nothing_that_was_answered_ok(tmp_path: Path) -> None:
    dice, confirmed, found = random.Random(7), set[bytes](), set[bytes]()
    broker = BrokerProcess(nsqds=1, lookupd=False, data_path=tmp_path, mem_queue_size=50, sync_timeout=0.1)
    for turn in range(KILLS):
        broker.start()
        for path in ("/topic/create?topic=t", "/channel/create?topic=t&channel=c"):
            assert ask(broker.nsqd.http, "POST", path).status == 200
        least = len(confirmed) + dice.randrange(300, 2000)
        greenlets = [spawn(publish, broker.nsqd.tcp, turn, dice, confirmed), spawn(consume, broker.nsqd.tcp, found)]
        until(lambda least=least: len(confirmed) >= least)  # type: ignore[misc]
        broker.kill()
        for greenlet in greenlets:
            greenlet.join()
    broker.start()
    reader = spawn(consume, broker.nsqd.tcp, found)
    until(lambda: found >= confirmed)
    reader.kill()
    broker.stop()
