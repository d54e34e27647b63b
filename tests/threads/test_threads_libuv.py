"""The other loop of gevent, which a program may have chosen by the environment: all works there as well."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
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


@pytest.mark.parametrize("end", ["closed", "left to the interpreter"])
def test_producers_and_consumers_work_on_libuv(nsqd_process: Any, end: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, nsqd_process.address, end],
        env={**os.environ, "GEVENT_LOOP": "libuv"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, ["400", "400"], "")
