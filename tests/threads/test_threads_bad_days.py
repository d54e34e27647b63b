"""Servers that are hung, killed or mad while a program consumes through threads, and through asyncio."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from support.faces import FACES, Asyncio, Threads
from support.processes import FORKING_PYTHON
from support.waiting import PROCESS, WAIT, until

from nsq_fast import Message
from nsq_fast.threads import Producer

ROOT = Path(__file__).parent.parent.parent
BODIES = {b"%d" % number for number in range(200)}
QUICK: dict[str, Any] = {"max_in_flight": 10, "max_reconnect_delay": 0.1}


@pytest.fixture(params=FACES, ids=lambda face: str(face.name))
def face(request: pytest.FixtureRequest) -> Threads | Asyncio:
    found: Threads | Asyncio = request.param
    return found


def publish(address: str, bodies: set[bytes]) -> None:
    with Producer(address) as producer:
        producer.multipublish("t", sorted(bodies))


def is_connected(consumer: Any) -> bool:
    return any(connection.is_connected for connection in consumer.stats().connections)


@pytest.mark.kill
def test_an_nsqd_that_hangs_while_it_is_consumed_costs_no_message(face: Threads | Asyncio, nsqd_process: Any) -> None:
    found: set[bytes] = set()
    publish(nsqd_process.address, BODIES)

    def handle(message: Message) -> None:
        found.add(message.body)
        if len(found) == 100:
            nsqd_process.freeze()

    # The shortest interval that nsqd takes. Thawed, it sends messages to the old connection still, and has them again
    # when they time out (nsqio/nsq: nsqd/channel.go, RemoveClient): sooner than this test gives up.
    options = {**QUICK, "heartbeat_interval": 1.0, "msg_timeout": 10.0}
    with face.consuming("t", "c", handle, nsqd_tcp_addresses=nsqd_process.address, **options) as consumer:
        until(lambda: len(found) >= 100 and not is_connected(consumer))  # nothing came for two intervals
        nsqd_process.thaw()
        until(lambda: found == BODIES)
        until(lambda: is_connected(consumer) and consumer.total_in_flight == 0)


@pytest.mark.kill
def test_an_nsqd_that_is_killed_while_it_is_consumed_costs_no_message(
    face: Threads | Asyncio, nsqd_process: Any, request: pytest.FixtureRequest
) -> None:
    found: set[bytes] = set()
    publish(nsqd_process.address, BODIES)

    go_on = threading.Event()

    def handle(message: Message) -> None:
        found.add(message.body)
        if len(found) == 100:
            go_on.wait(WAIT)

    with face.consuming("t", "c", handle, nsqd_tcp_addresses=nsqd_process.address, **QUICK) as consumer:
        until(lambda: len(found) >= 100)
        nsqd_process.kill()
        go_on.set()
        until(lambda: not is_connected(consumer))
        nsqd_process.start()
        later = {b"later %d" % number for number in range(50)}
        publish(nsqd_process.address, later)
        if "embedded" in request.node.callspec.id:
            until(lambda: found == BODIES | later, about=lambda: (BODIES | later) - found)
        else:  # killed, the real one comes back without some messages that it had begun to send
            until(lambda: later <= found)
        until(lambda: consumer.total_in_flight == 0)


@pytest.mark.fork
def test_a_child_of_a_process_whose_loop_consumes_has_consumers_of_its_own(nsqd_process: Any) -> None:
    publish(nsqd_process.address, BODIES)
    program = f"""
import asyncio, os
from nsq_fast.aio import Consumer, Producer
address = {nsqd_process.address!r}
found = set()
def in_child():
    async def main():
        done = asyncio.Event()
        async def handle(consumer, message):
            done.set()
        async with Producer(address) as producer, Consumer("u", "c", address, message_handler=handle):
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
    if len(found) == {len(BODIES)}:
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
    done = subprocess.run(
        [*FORKING_PYTHON, "-c", program], capture_output=True, text=True, timeout=PROCESS, check=False, cwd=ROOT,
        env=os.environ,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
