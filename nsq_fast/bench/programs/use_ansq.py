"""ansq as a measured client: consume, publish."""

import asyncio
import os

import ansq
from asynchronous import consume, publish, told

HOST, PORT = told["nsqds"][0]


async def main():
    if told["kind"] == "publish":
        await publish(await ansq.create_writer([f"{HOST}:{PORT}"]))
    else:
        connection = await ansq.open_connection(HOST, PORT)
        await connection.subscribe(told["topic"], told["channel"], told["max_in_flight"])
        await consume(connection.messages())
    os._exit(0)  # its reconnecting tasks would outlive the measurement


asyncio.run(main())
