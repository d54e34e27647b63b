"""A program that publishes and consumes through threads and asyncio at once, and says how much memory it takes.

    python -m support.outside_flow HOST:PORT MESSAGES

Half of the messages go through each. They are published in rounds; at the end of each, when all of it was handled, one
line of JSON says how many messages have gone through, the resident memory in KiB, and how many objects there are.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

from nsq_fast import Message, aio, threads

ROUNDS = 20
THREADS = 4
TASKS = 20
BATCH = 10
"""Messages of one step of a publisher: one by itself, the others together."""

BODY = b"x" * 200
WAIT = 300.0


class Count:
    """Messages that were handled; one of each consumer."""

    def __init__(self) -> None:
        self.handled = 0
        self.due = 0
        self.is_reached = threading.Event()

    def expect(self, count: int) -> None:
        """So many more are to come."""
        self.due += count
        self.is_reached.clear()

    def add(self) -> None:
        """One was handled. In one thread, or one loop."""
        self.handled += 1
        if self.handled == self.due:
            self.is_reached.set()


def publish_in_threads(producer: threads.Producer, steps: int) -> None:
    """Publish ``steps`` batches from several threads, and wait for the results."""

    def publish(share: int) -> None:
        for _ in range(share):
            producer.publish("threads", BODY)
            producer.multipublish("threads", [BODY] * (BATCH - 1))

    workers = [threading.Thread(target=publish, args=(steps // THREADS,)) for _ in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


async def publish_in_tasks(producer: aio.Producer, steps: int) -> None:
    """As ``publish_in_threads``, from several tasks."""

    async def publish(share: int) -> None:
        for _ in range(share):
            await producer.publish("tasks", BODY)
            await producer.multipublish("tasks", [BODY] * (BATCH - 1))

    await asyncio.gather(*[publish(steps // TASKS) for _ in range(TASKS)])


async def run(address: str, messages: int) -> None:
    """Do all of it."""
    in_threads, in_tasks = Count(), Count()
    steps = max(1, messages // 2 // BATCH // ROUNDS // 20) * 20  # of each kind of publisher, in one round
    options: dict[str, Any] = {"max_in_flight": 500}

    async def handle(consumer: aio.Consumer, message: Message) -> None:
        in_tasks.add()

    with (
        threads.Producer(address) as producer,
        threads.Consumer(
            "threads", "c", address, message_handler=lambda consumer, message: in_threads.add(), **options
        ) as consumer,
    ):
        consumer.stats()
        async with (
            aio.Producer(address) as aio_producer,
            aio.Consumer("tasks", "c", address, message_handler=handle, **options),
        ):
            for number in range(1, ROUNDS + 1):
                for count in (in_threads, in_tasks):
                    count.expect(steps * BATCH)
                others = asyncio.create_task(asyncio.to_thread(publish_in_threads, producer, steps))
                await publish_in_tasks(aio_producer, steps)
                await others
                for count in (in_threads, in_tasks):
                    assert await asyncio.to_thread(count.is_reached.wait, WAIT), (count.handled, count.due)
                say(2 * number * steps * BATCH)


def say(messages: int) -> None:
    """Print the memory after so many messages."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    sys.stdout.write(json.dumps([messages, resident, len(gc.get_objects())]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2])))
