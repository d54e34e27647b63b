"""asyncnsq as a measured client: consume, publish."""

import asyncio
import os

from asynchronous import consume, job, publish
from asyncnsq import create_reader, create_writer

HOST, PORT = job["nsqds"][0]


async def main():
    if job["kind"] == "publish":
        await publish(await create_writer(HOST, PORT))
    else:
        reader = await create_reader([f"{HOST}:{PORT}"], max_in_flight=job["max_in_flight"])
        await reader.subscribe(job["topic"], job["channel"])
        await consume(reader.messages())
    os._exit(0)  # its reconnecting tasks would outlive the measurement


asyncio.run(main())
