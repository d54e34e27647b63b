"""asyncnsq as a measured client: consume, publish."""

import asyncio
import os

from asynchronous import consume, publish, told
from asyncnsq import create_reader, create_writer

HOST, PORT = told["nsqds"][0]


async def main():
    if told["kind"] == "publish":
        await publish(await create_writer(HOST, PORT))
    else:
        reader = await create_reader([f"{HOST}:{PORT}"], max_in_flight=told["max_in_flight"])
        await reader.subscribe(told["topic"], told["channel"])
        await consume(reader.messages())
    os._exit(0)  # its reconnecting tasks would outlive the measurement


asyncio.run(main())
