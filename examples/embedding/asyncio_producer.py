"""Publish with asyncio: nsq_fast speaks the protocol, asyncio moves the bytes.

    python asyncio_producer.py 127.0.0.1:4150 orders < lines
    python asyncio_producer.py 127.0.0.1:4150 orders --partition 0 < lines    # a redesigned server

Any number of tasks may publish at once: their commands leave in one stream, and replies find their tasks by tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
from types import TracebackType

from nsq_fast import protocol
from nsq_fast.protocol import ConnectionConfig, ReconnectDelay, Session

log = logging.getLogger(__name__)
CONFIG = ConnectionConfig(user_agent="asyncio-example", heartbeat_interval=10)


class Producer:
    """Keeps one nsqd connected: ``async with Producer(host, port) as producer: await producer.publish(...)``."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._session = Session(CONFIG)
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Producer:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session.pending_count and self._ready.is_set():
            self._idle.clear()
            await asyncio.wait_for(self._idle.wait(), 10)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def publish(self, topic: str, body: bytes, *, partition: int | None = None, timeout: float = 10) -> None:
        """Publish one message, waiting for a connection if need be.

        Raises a ServerError; ConnectionError when the connection was lost before the reply, and asyncio.TimeoutError:
        it may have been stored in both cases.
        """
        await asyncio.wait_for(self._ready.wait(), timeout)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        assert self._writer is not None
        self._writer.write(self._session.pub(topic, body, partition=partition, token=reply))
        await self._writer.drain()
        await asyncio.wait_for(reply, timeout)

    async def _run(self) -> None:
        delay, now = ReconnectDelay(60, random=random.random), asyncio.get_running_loop().time
        while True:
            try:
                reader, self._writer = await asyncio.open_connection(*self._address)
                delay.connected(now())
                await self._converse(reader, self._writer)
            except (OSError, asyncio.TimeoutError, protocol.ProtocolError, protocol.ServerError) as error:
                pause = delay.next(now())
                log.warning("%s:%s: %r; again in %.1f s", *self._address, error, pause)
            await asyncio.sleep(pause)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._session = session = Session(CONFIG)
        try:
            writer.write(session.connect())
            # Heartbeats make silence a sign of a dead peer.
            while data := await asyncio.wait_for(reader.read(65536), 2 * CONFIG.heartbeat_interval):
                for event in session.receive(data):
                    self._take(event, writer)
            raise ConnectionError("closed by the server")
        finally:
            self._ready.clear()
            writer.close()
            for event in session.receive(b""):  # Disconnected, with the commands whose outcome is unknown
                for _command, reply in event.pending:
                    if reply is not None and not reply.done():
                        reply.set_exception(ConnectionError("the connection was lost before the reply"))

    def _take(self, event: protocol.Event, writer: asyncio.StreamWriter) -> None:
        if isinstance(event, protocol.Ready):
            self._ready.set()
        elif isinstance(event, protocol.Reply) and not event.token.done():
            event.token.set_result(event.data)
        elif isinstance(event, protocol.CommandFailed) and event.token is not None and not event.token.done():
            event.token.set_exception(event.error)
        if event.send:
            writer.write(event.send)  # NOP for a heartbeat
        if not self._session.pending_count:
            self._idle.set()
        if isinstance(event, (protocol.CommandFailed, protocol.ServerFailed)) and event.fatal:
            raise event.error


async def main(arguments: argparse.Namespace) -> None:
    host, _, port = arguments.nsqd.rpartition(":")
    lines = sys.stdin.buffer.read().splitlines()
    async with Producer(host, int(port)) as producer:
        await asyncio.gather(*(producer.publish(arguments.topic, x, partition=arguments.partition) for x in lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nsqd")
    parser.add_argument("topic")
    parser.add_argument("--partition", type=int)
    logging.basicConfig()
    asyncio.run(main(parser.parse_args()))
