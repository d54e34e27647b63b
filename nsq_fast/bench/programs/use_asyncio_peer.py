"""ansq or asyncnsq, the first argument says which, as a measured client: consume, publish."""

import asyncio
import os
import sys
from time import time_ns

from meter import Meter, settings, stamp_of

job = settings()
meter = Meter(job)
body = b"x" * job["size"]
HOST, PORT = job["nsqds"][0]


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


async def ansq():
    import ansq

    if job["kind"] == "publish":
        await publish(await ansq.create_writer([f"{HOST}:{PORT}"]))
    else:
        connection = await ansq.open_connection(HOST, PORT)
        await connection.subscribe(job["topic"], job["channel"], job["max_in_flight"])
        await consume(connection.messages())


async def asyncnsq():
    from asyncnsq import create_reader, create_writer

    if job["kind"] == "publish":
        await publish(await create_writer(HOST, PORT))
    else:
        reader = await create_reader([f"{HOST}:{PORT}"], max_in_flight=job["max_in_flight"])
        await reader.subscribe(job["topic"], job["channel"])
        await consume(reader.messages())


async def main():
    await {"ansq": ansq, "asyncnsq": asyncnsq}[sys.argv[1]]()
    os._exit(0)  # its reconnecting tasks would outlive the measurement


asyncio.run(main())
