"""Clients that were started before a fork: at any moment of the beginning of their thread, and amid a loop."""

from __future__ import annotations

from typing import Any

import pytest
from support.processes import run_python, run_quietly

from nsq_fast.threads import Producer

PROGRAM = """
import os, sys, time
from nsq_fast.threads import Producer

producer = Producer(sys.argv[1])
producer.start()
time.sleep(float(sys.argv[2]))  # sleep: forks at moments that differ
child = os.fork()
if child == 0:
    import signal
    signal.alarm(20)
    producer.publish("t", b"of the child")
    os._exit(0)
_, status = os.waitpid(child, 0)
producer.publish("t", b"of the parent")
sys.exit(status != 0)
"""


def test_a_fork_at_any_moment_after_the_start(nsqd_process: Any) -> None:
    address = f"localhost:{nsqd_process.address.rpartition(':')[2]}"  # a name, which has to be resolved
    for milliseconds in (0, 1, 2, 4, 6, 9, 13, 20, 40):
        done = run_python(PROGRAM, address, str(milliseconds / 1000))
        assert done.returncode == 0, f"a fork after {milliseconds} ms: {done.stderr}"


@pytest.mark.fork
def test_a_child_of_a_process_whose_loop_consumes_has_consumers_of_its_own(nsqd_process: Any) -> None:
    with Producer(nsqd_process.address) as producer:
        producer.multipublish("t", [b"%d" % number for number in range(200)])
    program = f"""
import asyncio, os
from nsq_fast.aio import Consumer, Producer
address = {nsqd_process.address!r}
found = set()
made_before = Producer(address)
def in_child():
    async def main():
        done = asyncio.Event()
        async def handle(consumer, message):
            done.set()
        async with made_before as producer, Consumer("u", "c", address, message_handler=handle):
            assert await producer.publish("u", b"x") == b"OK"
            await asyncio.wait_for(done.wait(), 50)
            try:
                await consumer.join()  # the parent's, which was not started here
            except Exception as error:
                assert "start()" in str(error)
    try:
        asyncio.run(main())
    except BaseException as error:
        os.write(2, repr(error).encode())
        os._exit(1)
    os._exit(0)
async def handle_all(consumer, message):
    if len(found) == 50 and not children:
        children.append(os.fork())
        if not children[0]:
            os._exit(run_child())
    found.add(message.body)
    if len(found) == 200:
        done.set()
def run_child():
    import threading
    thread = threading.Thread(target=in_child)  # this one is within the copy of the parent's loop
    thread.start()
    thread.join()
    return 1
children = []
async def main():
    global consumer, done
    done = asyncio.Event()
    consumer = Consumer("t", "c", address, message_handler=handle_all, max_in_flight=10)
    async with consumer:
        await asyncio.wait_for(done.wait(), 50)
    assert os.waitpid(children[0], 0)[1] == 0
asyncio.run(main())
"""
    run_quietly(program)


@pytest.mark.fork
def test_a_child_of_a_fork_consumes_with_a_thread_of_its_own(filled: str) -> None:
    run_quietly(f"""
import os, threading
from nsq_fast.threads import Consumer
got = threading.Event()
def handle(consumer, message):
    message.enable_async()  # one message is held, the others are for the child
    got.set()
consumer = Consumer("t", "c", {filled!r}, message_handler=handle, max_in_flight=1)
consumer.start(block=False)
assert got.wait(20)
child = os.fork()
if not child:
    got.clear()
    assert not consumer.is_running
    consumer.start(block=False)
    assert got.wait(20)
    consumer.close(drain=False)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
consumer.close(drain=False)
""")


@pytest.mark.fork
def test_greenlets_of_a_child_of_a_fork_publish_at_once(nsqd_process: Any) -> None:
    run_quietly(f"""
import os
import gevent
from nsq_fast.threads import Producer
producer = Producer({nsqd_process.address!r})
producer.start()
producer.publish("t", b"0")
child = gevent.os.fork()
if not child:
    greenlets = [gevent.spawn(producer.publish, "t", b"%d" % number) for number in range(10)]
    gevent.joinall(greenlets, timeout=50)
    os._exit(0 if all(greenlet.value == b"OK" for greenlet in greenlets) else 1)
assert gevent.os.waitpid(child, 0)[1] == 0
producer.close()
""")
