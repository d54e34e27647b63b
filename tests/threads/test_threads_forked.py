"""Producers that were started before a fork, at any moment of the beginning of their thread."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from support.processes import FORKING_PYTHON
from support.waiting import PROCESS

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
