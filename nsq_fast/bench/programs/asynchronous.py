"""What the two asyncio clients have in common: the loops over their readers and writers."""

import asyncio
from time import time_ns

from meter import Meter, settings, stamp_of

job = settings()
meter = Meter(job)
body = b"x" * job["size"]


async def consume(messages, take=meter.take, marks=meter.marks):
    """Take, count and finish what an asynchronous iterator brings."""
    is_timed = bool(job["rate"])
    async for message in messages:
        if is_timed:
            meter.seen(stamp_of(message.body))
        await message.fin()
        if take() in marks and meter.mark():
            return


async def publish(writer):
    """The modes of publishing, on anything with ``pub`` and ``mpub``."""
    await _publish(writer, job["warmup"])
    meter.start()
    await _publish(writer, job["count"])
    meter.report(job["count"])


async def _publish(writer, count):
    if job["mode"] == "single":
        for _ in range(count):
            start = time_ns()
            await writer.pub(job["topic"], body)
            meter.seen(start)
    elif job["mode"] == "concurrent":
        share = count // job["concurrency"]
        await asyncio.gather(*(_publish_many(writer, share) for _ in range(job["concurrency"])))
    else:
        batch = [body] * job["batch"]
        for _ in range(count // job["batch"]):
            await writer.mpub(job["topic"], *batch)


async def _publish_many(writer, count):
    for _ in range(count):
        await writer.pub(job["topic"], body)
