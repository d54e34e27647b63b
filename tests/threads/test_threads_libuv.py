"""The other loop of gevent, which a program may have chosen by the environment: all works there as well."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from nsq_fast.threads import Consumer, Producer

address, is_closed = sys.argv[1], sys.argv[2] == "closed"
got = set()

def handle(consumer, message):
    got.add(message.body)
    if len(got) == 400:
        consumer.close()

producer = Producer(address)
producer.start()
with ThreadPoolExecutor(4) as pool:
    for topic in ("t", "u"):
        assert set(pool.map(lambda n: producer.publish(topic, b"%d" % n), range(400))) == {b"OK"}
consumer = Consumer("t", "threads", address, message_handler=handle, concurrency=4)
consumer.start()
assert consumer.join(60)
with Consumer("u", "iterated", address) as iterated:
    taken = set()
    for message in iterated:
        taken.add(message.body)
        if len(taken) == 400:
            break
if is_closed:
    producer.close()
print(len(got), len(taken))
"""
AIO = """
import asyncio, sys
from nsq_fast.aio import Consumer, Producer

address, is_closed = sys.argv[1], sys.argv[2] == "closed"
got = set()

async def handle(consumer, message):
    await asyncio.sleep(0)
    got.add(message.body)
    if len(got) == 400:
        await consumer.close()

async def main():
    producer = Producer(address)
    await producer.start()
    for n in range(100):  # alone: where that can be, such publishes are sent directly
        assert await producer.publish("t", b"%d" % n) == b"OK"
    await asyncio.gather(*(producer.publish("t", b"%d" % n) for n in range(100, 400)))
    await asyncio.gather(*(producer.publish("u", b"%d" % n) for n in range(400)))
    async with Consumer("t", "aio", address, message_handler=handle, concurrency=4) as consumer:
        assert await consumer.join(60)
    taken = set()
    async with Consumer("u", "iterated", address) as iterated:
        async for message in iterated:
            taken.add(message.body)
            if len(taken) == 400:
                break
    if is_closed:
        await producer.close()
    print(len(got), len(taken))

asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["closed", "left to the interpreter"])
@pytest.mark.parametrize("program", [THREADS, AIO], ids=["threads", "aio"])
def test_producers_and_consumers_work_on_libuv(nsqd_process: Any, program: str, end: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", program, nsqd_process.address, end],
        env={**os.environ, "GEVENT_LOOP": "libuv"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, ["400", "400"], "")
