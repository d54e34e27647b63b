"""Clients that were started before a fork: at any moment of the beginning of their thread, and amid a loop."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.processes import FORKING_PYTHON
from support.waiting import PROCESS

from nsq_fast.threads import Producer

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
import os, sys, time
from {module} import Producer

address, after = sys.argv[1], float(sys.argv[2])
{start}
time.sleep(after)  # sleep: forks at moments that differ
child = os.fork()
if child == 0:
    import signal
    signal.alarm(20)
    {publish}
    os._exit(0)
_, status = os.waitpid(child, 0)
sys.exit(status != 0)
"""

THREADS = PROGRAM.format(
    module="nsq_fast.threads",
    start="producer = Producer(address); producer.start()",
    publish='producer.publish("t", b"of the child")',
)
AIO = PROGRAM.format(
    module="nsq_fast.aio",
    start="import asyncio; producer = Producer(address)",
    publish="""
    async def publish():
        async with producer:
            await producer.publish("t", b"of the child")
    asyncio.run(publish())""",
)


@pytest.mark.parametrize("program", [THREADS, AIO], ids=["threads", "aio"])
def test_a_fork_at_any_moment_after_the_start(nsqd_process: Any, program: str) -> None:
    address = f"localhost:{nsqd_process.address.rpartition(':')[2]}"  # a name, which has to be resolved
    for milliseconds in (0, 1, 2, 4, 6, 9, 13, 20, 40):
        done = subprocess.run(
            [*FORKING_PYTHON, "-c", program, address, str(milliseconds / 1000)],
            capture_output=True, text=True, timeout=PROCESS,
        )  # fmt: skip
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
    done = subprocess.run(
        [*FORKING_PYTHON, "-c", program], capture_output=True, text=True, timeout=PROCESS, check=False, cwd=ROOT,
        env=os.environ,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
