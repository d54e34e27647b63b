"""Consume a topic with asyncio: nsq_fast speaks the protocol, asyncio moves the bytes.

python asyncio_consumer.py 127.0.0.1:4150 orders billing
python asyncio_consumer.py 127.0.0.1:4150 orders billing --partition 0 --ordered    # a redesigned server
# Ctrl-C: what is being handled is finished, the rest goes back at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from nsq_fast import protocol
from nsq_fast.protocol import ConnectionConfig, Message, ReconnectDelay, Session

log = logging.getLogger(__name__)
CONFIG = ConnectionConfig(user_agent="asyncio-example", heartbeat_interval=10)


class Consumer:
    """Keeps one nsqd subscribed, and awaits ``handler(message)`` for one message after the other."""

    def __init__(self, host: str, port: str, handler: Callable[[Message], Awaitable[object]], rdy: int = 100) -> None:
        self._address, self._handler, self._rdy = (host, port), handler, rdy
        self._closing, self._session = asyncio.Event(), Session(CONFIG)
        self._writer: asyncio.StreamWriter | None = None

    def close(self) -> None:
        """Begin to close; then ``run`` returns."""
        self._closing.set()
        if self._session.is_subscribed and self._writer:
            self._writer.write(self._session.cls())

    async def run(self, topic: str, channel: str, **options: Any) -> None:
        """Consume until closed, connecting again whenever that is needed. Options: those of ``Session.sub``."""
        delay, now = ReconnectDelay(60, random=random.random), asyncio.get_running_loop().time
        while not self._closing.is_set():
            try:
                reader, self._writer = await asyncio.open_connection(*self._address)
                delay.connected(now())
                await self._converse(reader, self._writer, lambda: self._session.sub(topic, channel, **options))
            except (OSError, asyncio.TimeoutError, protocol.ProtocolError, protocol.ServerError) as error:
                pause = delay.next(now())
                log.warning("%s:%s: %r; again in %.1f s", *self._address, error, pause)
                await asyncio.wait([asyncio.create_task(self._closing.wait())], timeout=pause)

    async def _converse(self, reader: asyncio.StreamReader, writer: Any, subscribe: Callable[[], bytes]) -> None:
        self._session = Session(CONFIG)
        waiting: asyncio.Queue[Message | None] = asyncio.Queue()
        worker = asyncio.create_task(self._handle_all(self._session, writer, waiting))
        try:
            writer.write(self._session.connect())
            # Heartbeats make silence a sign of a dead peer.
            while data := await asyncio.wait_for(reader.read(65536), 2 * CONFIG.heartbeat_interval):
                for event in self._session.receive(data):
                    if isinstance(event, Message):
                        waiting.put_nowait(event)
                    elif isinstance(event, protocol.Ready):
                        writer.write(subscribe())
                    elif isinstance(event, protocol.Reply) and event.command == "CLS":
                        return  # no message follows
                    elif isinstance(event, protocol.Reply):
                        writer.write(self._session.set_rdy(min(self._rdy, self._session.info.max_rdy_count)))
                    elif isinstance(event, (protocol.CommandFailed, protocol.ServerFailed)) and event.fatal:
                        raise event.error
                    elif event.send:
                        writer.write(event.send)  # NOP for a heartbeat
            raise ConnectionError("closed by the server")
        finally:
            while not waiting.empty() and (message := waiting.get_nowait()):
                writer.write(self._session.req(message, 0))  # not begun with: another consumer may have it now
            waiting.put_nowait(None)
            await worker
            writer.close()
            await writer.wait_closed()

    async def _handle_all(self, session: Session, writer: Any, waiting: asyncio.Queue[Message | None]) -> None:
        done: list[Message] = []

        def finish() -> None:
            writer.write(session.fin_many(done))
            done.clear()

        while message := await waiting.get():
            try:
                await self._handler(message)
            except Exception:
                log.exception("attempt %d of %s failed", message.attempts, message.id)
                writer.write(session.req(message, 1000 * message.attempts))
                continue
            if not done:  # the FINs of one turn of the loop leave together
                asyncio.get_running_loop().call_soon(finish)
            done.append(message)
        await asyncio.sleep(0)


async def main(arguments: argparse.Namespace) -> None:
    async def show(message: Message) -> None:
        print(message.body.decode(), message.offset, flush=True)

    host, port = arguments.nsqd.rsplit(":", 1)
    consumer = Consumer(host, port, show)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, consumer.close)
    await consumer.run(arguments.topic, arguments.channel, partition=arguments.partition, ordered=arguments.ordered)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("nsqd", "topic", "channel"):
        parser.add_argument(name)
    parser.add_argument("--partition", type=int)
    parser.add_argument("--ordered", action="store_true")
    logging.basicConfig()
    asyncio.run(main(parser.parse_args()))
