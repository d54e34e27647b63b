"""At full speed and at rest: memory stays flat, others keep running, and idling costs nothing.

NSQ_FAST_FLAT_MESSAGES says how many cross between the hub thread and the threads and loops of a program: 200,000 here,
5,000,000 with `make soak`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gevent
import pytest
from support.peers import Peer, PeerServer
from support.processes import run_python
from support.publishing import PublishNsqd
from support.wire import message_frame

from nsq_fast import Consumer, Message, Producer, aio, threads
from nsq_fast.broker import BrokerProcess

pytestmark = pytest.mark.timeout(300)
RDY = 2000
CROSSING = int(os.environ.get("NSQ_FAST_FLAT_MESSAGES", "200000"))
FIN_SIZE = len(b"FIN 0123456789abcdef\n")


class Flood(PeerServer):
    """An nsqd that sends messages as fast as their FINs come back; ``finished`` counts them."""

    def __init__(self) -> None:
        self.finished = 0
        self._batch = b"".join(message_frame(number, b"x" * 200) for number in range(RDY))
        super().__init__(self._flood)

    def _flood(self, peer: Peer) -> None:
        peer.accept_sub()
        assert peer.read_line().startswith(b"RDY")
        while True:
            peer.send(self._batch)
            peer.read(RDY * FIN_SIZE)
            self.finished += RDY


@pytest.fixture
def flood() -> Iterator[Flood]:
    server = Flood()
    yield server
    server.stop()


def resident_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def run_until(flood: Flood, count: int) -> None:
    with gevent.Timeout(200):
        while flood.finished < count:
            gevent.sleep(0.002)  # sleep: looks again and again


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"concurrency": 10}, {"batch": True}, {"heard": True}], ids=str)
def test_memory_is_flat_over_300_000_messages(flood: Flood, options: dict[str, Any]) -> None:
    options = dict(options)
    handler = "batch_handler" if options.pop("batch", False) else "message_handler"
    is_heard = options.pop("heard", False)
    consumer = Consumer("t", "c", [flood.address], max_in_flight=RDY, **{handler: lambda c, m: None}, **options)
    if is_heard:
        consumer.on_finish.connect(lambda c, message_id: None, weak=False)
    consumer.start(block=False)
    try:
        run_until(flood, 50_000)
        gc.collect()
        objects, memory = len(gc.get_objects()), resident_kib()
        run_until(flood, flood.finished + 300_000)
        gc.collect()
        assert len(gc.get_objects()) - objects < 3 * RDY, "beyond what may be in flight at that moment"
        assert resident_kib() - memory < 4096
    finally:
        consumer.close(drain=False)


@pytest.mark.slow
def test_memory_is_flat_over_many_publishes() -> None:
    server = PublishNsqd()
    with Producer([server.address]) as producer:

        def work(count: int) -> None:
            for number in range(count):
                producer.publish("t", b"x" * 200)
                if number % 10 == 0:
                    producer.multipublish("t", [b"x"] * 10)
                if number % 50 == 0:
                    server.commands.clear()

        def all_work(count: int) -> tuple[int, int]:
            gevent.joinall([gevent.spawn(work, count) for _ in range(20)], raise_error=True)
            server.commands.clear()
            gc.collect()
            return len(gc.get_objects()), resident_kib()

        objects, memory = all_work(100)
        later_objects, later_memory = all_work(1000)
        assert producer.stats()["pending"] == producer.stats()["held"] == 0
    server.stop()
    assert later_objects - objects < 200
    assert later_memory - memory < 4096


@pytest.mark.slow
@pytest.mark.timeout(300 + CROSSING // 1000)
def test_memory_is_flat_over_many_messages_through_threads_and_asyncio(real_nsqd: Any) -> None:
    root = Path(__file__).parent.parent.parent
    path = os.pathsep.join([str(root), str(root / "tests")])
    command = [sys.executable, __file__, str(real_nsqd().tcp_address), str(CROSSING)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=root, env={**os.environ, "PYTHONPATH": path}
    )
    assert (done.returncode, done.stderr) == (0, "")
    sys.stdout.write(done.stdout)  # the curve, for who wants to see it
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    early, late = rounds[2 : len(rounds) // 2], rounds[len(rounds) // 2 :]  # the first two fill what is kept for reuse
    assert rounds[-1][0] >= 0.9 * CROSSING
    assert max(objects for *_, objects in late) - max(objects for *_, objects in early) < 200
    assert max(resident for _, resident, _ in late) - max(resident for _, resident, _ in early) < 4096, "KiB"


@pytest.mark.slow
def test_others_keep_running_while_messages_come_at_full_speed(flood: Flood) -> None:
    handled = 0
    at_ticks = [0]

    def handler(consumer: Consumer, message: Message) -> None:
        nonlocal handled
        handled += 1
        sum(range(50))

    def tick() -> None:
        while True:
            gevent.sleep(0.001)  # sleep: a timer that is always due
            at_ticks.append(handled)

    consumer = Consumer("t", "c", [flood.address], max_in_flight=RDY, message_handler=handler)
    consumer.start(block=False)
    try:
        run_until(flood, RDY)
        ticker = gevent.spawn(tick)
        run_until(flood, flood.finished + 200_000)
        ticker.kill()
    finally:
        consumer.close(drain=False)
    between = sorted(after - before for before, after in pairwise(at_ticks))
    assert len(between) > 20
    assert between[len(between) * 9 // 10] <= 10 * RDY, "handled before others had their turn"


IDLE = """
import sys, time
import gevent
from nsq_fast import Consumer, Producer

lookupd, *addresses = sys.argv[1:]
with (
    Consumer("t", "c", addresses, lookupd, message_handler=lambda c, m: None, max_in_flight=8) as consumer,
    Consumer("t", "d", addresses, message_handler=lambda c, m: None, max_in_flight=2),
    Producer(addresses) as producer,
):
    producer.publish("t", b"x")
    while consumer.total_ready_count < 8:
        gevent.sleep(0.01)  # sleep: looks again and again
    gevent.sleep(0.2)  # sleep: what has begun ends
    seconds = []
    for _ in range(5):  # on a machine that is busy with something else, the same work takes more CPU in some
        began = time.process_time()
        gevent.sleep(1.0)  # sleep: the CPU of an idle second is measured
        seconds.append(time.process_time() - began)
    print(min(seconds))
"""


@pytest.mark.slow
def test_an_idle_client_uses_next_to_no_cpu() -> None:
    """In a process of its own: threads of another test's JVM would count, too."""
    with BrokerProcess(nsqds=4) as broker:
        done = run_python(IDLE, str(broker.lookupd.http), *(str(nsqd.tcp) for nsqd in broker.nsqds))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.03


# The program that publishes and consumes through threads and asyncio at once, half of the messages through each, in
# rounds; at the end of each one line of JSON says how many messages have gone through and were handled, the resident
# memory in KiB, and how many objects there are.


ROUNDS = 20
THREADS = 4
TASKS = 20
BATCH = 10
"""Messages of one step of a publisher: one by itself, the others together."""

BODY = b"x" * 200


async def run(address: str, messages: int) -> None:
    """Do all of it."""
    steps = max(1, messages // 2 // BATCH // ROUNDS // 20)  # of each publisher, in one round; there are 20 of each kind
    options: dict[str, Any] = {"max_in_flight": 500}

    def publish_in_thread() -> None:
        for _ in range(steps * TASKS // THREADS):
            producer.publish("threads", BODY)
            producer.multipublish("threads", [BODY] * (BATCH - 1))

    async def publish_in_task() -> None:
        for _ in range(steps):
            await aio_producer.publish("tasks", BODY)
            await aio_producer.multipublish("tasks", [BODY] * (BATCH - 1))

    async def handle(consumer: aio.Consumer, message: Message) -> None: ...

    with (
        threads.Producer(address) as producer,
        threads.Consumer("threads", "c", address, message_handler=lambda consumer, message: None, **options) as first,
    ):
        async with (
            aio.Producer(address) as aio_producer,
            aio.Consumer("tasks", "c", address, message_handler=handle, **options) as second,
        ):
            for due in range(steps * TASKS * BATCH, (ROUNDS + 1) * steps * TASKS * BATCH, steps * TASKS * BATCH):
                others = [asyncio.to_thread(publish_in_thread) for _ in range(THREADS)]
                await asyncio.gather(*(publish_in_task() for _ in range(TASKS)), *others)
                while min(each.stats().totals.finished for each in (first, second)) < due:
                    await asyncio.sleep(0.002)  # sleep: looks again and again
                say(2 * due)


def say(messages: int) -> None:
    """Print the memory after so many messages."""
    gc.collect()
    sys.stdout.write(json.dumps([messages, resident_kib(), len(gc.get_objects())]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2])))
