"""ansq as a measured client: consume, publish."""

import asyncio
import os

import ansq
from asynchronous import consume, job, publish

HOST, PORT = job["nsqds"][0]


async def main():
    if job["kind"] == "publish":
        await publish(await ansq.create_writer([f"{HOST}:{PORT}"]))
    else:
        connection = await ansq.open_connection(HOST, PORT)
        await connection.subscribe(job["topic"], job["channel"], job["max_in_flight"])
        await consume(connection.messages())
    os._exit(0)  # its reconnecting tasks would outlive the measurement


asyncio.run(main())
