"""What the two asyncio clients have in common: the loops over their readers and writers."""

import asyncio
from time import time_ns

from meter import Meter, settings, stamp_of

told = settings()
meter = Meter(told)
body = b"x" * told["size"]


async def consume(messages, take=meter.take, marks=meter.marks):
    """Take, count and finish what an asynchronous iterator brings."""
    is_timed = bool(told["rate"])
    async for message in messages:
        if is_timed:
            meter.seen(stamp_of(message.body))
        await message.fin()
        if take() in marks and meter.mark():
            return


async def publish(writer):
    """The modes of publishing, on anything with ``pub`` and ``mpub``."""
    await _publish(writer, told["warmup"])
    meter.start()
    await _publish(writer, told["count"])
    meter.report(told["count"])


async def _publish(writer, count):
    if told["mode"] == "single":
        for _ in range(count):
            start = time_ns()
            await writer.pub(told["topic"], body)
            meter.seen(start)
    elif told["mode"] == "concurrent":
        share = count // told["concurrency"]
        await asyncio.gather(*(_publish_many(writer, share) for _ in range(told["concurrency"])))
    else:
        batch = [body] * told["batch"]
        for _ in range(count // told["batch"]):
            await writer.mpub(told["topic"], *batch)


async def _publish_many(writer, count):
    for _ in range(count):
        await writer.pub(told["topic"], body)
