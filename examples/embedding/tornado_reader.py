"""A reader for tornado in pynsq's style, with the protocol of nsq_fast under it.

    python tornado_reader.py 127.0.0.1:4150 orders billing

The handler returns True to finish a message and False to requeue it, or calls ``message.enable_async()`` and answers
later, as with ``nsq.Reader``. What pynsq does for each frame (two reads, two callbacks, slicing, a message with an
event registry) is done here once for each chunk, and FINs leave together.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import sys
import time
from collections.abc import Callable

from tornado.gen import sleep
from tornado.ioloop import IOLoop
from tornado.iostream import IOStream, StreamClosedError
from tornado.locks import Event
from tornado.tcpclient import TCPClient

from nsq_fast import protocol
from nsq_fast.protocol import ConnectionConfig, Message, ReconnectDelay, Session

log = logging.getLogger(__name__)
CONFIG = ConnectionConfig(user_agent="tornado-example")
SILENCE = 2 * CONFIG.heartbeat_interval  # seconds


class Reader:
    """Consumes from some nsqds; begins when the IOLoop runs.

    Args:
        message_handler: called with each message; True finishes it, False or an exception requeues it.
        max_in_flight: over all nsqds, shared out evenly.
        requeue_delay: seconds, times the attempts of the message.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        message_handler: Callable[[Message], object],
        nsqd_tcp_addresses: list[str],
        max_in_flight: int = 1,
        requeue_delay: float = 90,
    ) -> None:
        self.topic, self.channel, self.handler = topic, channel, message_handler
        self.requeue_delay = requeue_delay
        self.is_closing = False
        self.rdy = max(1, max_in_flight // len(nsqd_tcp_addresses))
        self._conns: set[Conn] = set()
        self._left = len(nsqd_tcp_addresses)
        self.closed = Event()
        for address in nsqd_tcp_addresses:
            IOLoop.current().spawn_callback(self._stay_connected, *address.rsplit(":", 1))

    def close(self) -> None:
        """Take no more messages; each connection closes when what it has is answered."""
        self.is_closing = True
        for conn in list(self._conns):
            conn.start_close()

    async def _stay_connected(self, host: str, port: str) -> None:
        delay = ReconnectDelay(60, random=random.random)
        while not self.is_closing:
            try:
                stream = await TCPClient().connect(host, int(port))
                delay.connected(time.monotonic())
                await self._converse(Conn(self, stream))
            except (OSError, StreamClosedError, protocol.ProtocolError, protocol.ServerError) as error:
                pause = 0.0 if self.is_closing else delay.next(time.monotonic())
                log.warning("%s:%s: %r; again in %.1f s", host, port, error, pause)
                await sleep(pause)
        self._left -= 1
        if not self._left:
            self.closed.set()

    async def _converse(self, conn: Conn) -> None:
        self._conns.add(conn)
        try:
            await conn.run()
        finally:
            self._conns.discard(conn)


class Conn:
    """One connection, used once. It answers its messages, so it is their responder."""

    def __init__(self, reader: Reader, stream: IOStream) -> None:
        self._reader, self._stream = reader, stream
        self._session = Session(CONFIG, responder=self)
        self._finished: list[Message] = []

    async def run(self) -> None:
        """Talk until the connection ends; raise why, unless it was closed by us."""
        stream, call_later = self._stream, IOLoop.current().call_later
        stream.set_nodelay(True)
        watch = call_later(SILENCE, stream.close)
        try:
            self._write(self._session.connect())
            while True:
                data = await stream.read_bytes(65536, partial=True)
                IOLoop.current().remove_timeout(watch)
                watch = call_later(SILENCE, stream.close)
                for event in self._session.receive(data):
                    if isinstance(event, Message):
                        self._handle(event)
                    else:
                        self._take(event)
        except StreamClosedError:
            if not self._session.is_closing:
                raise
        finally:
            IOLoop.current().remove_timeout(watch)
            stream.close()

    def _handle(self, message: Message) -> None:
        try:
            done = self._reader.handler(message)
        except Exception:
            log.exception("attempt %d of %s failed", message.attempts, message.id)
            done = False
        if not message.is_async() and not message.has_responded():
            if done:
                message.finish()
            else:
                message.requeue()

    def _take(self, event: protocol.Event) -> None:
        session = self._session
        if isinstance(event, protocol.Ready):
            self._write(session.sub(self._reader.topic, self._reader.channel))
        elif isinstance(event, protocol.Reply) and event.command == "SUB":
            self._write(session.set_rdy(min(self._reader.rdy, session.info.max_rdy_count)))
        elif isinstance(event, (protocol.CommandFailed, protocol.ServerFailed)) and event.fatal:
            raise event.error
        self._write(event.send)
        self._close_when_done()

    def start_close(self) -> None:
        if self._session.is_subscribed:
            self._write(self._session.cls())
        else:
            self._stream.close()

    def _close_when_done(self) -> None:
        session = self._session
        if session.is_closing and not session.pending_count and not session.in_flight:
            self._stream.write(b"").add_done_callback(lambda _: self._stream.close())  # behind what is still unsent

    # What messages call

    def finish(self, message: Message) -> None:
        if not self._finished:
            IOLoop.current().add_callback(self._flush)
        self._finished.append(message)

    def requeue(self, message: Message, time_ms: int | None = None, backoff: bool = True) -> None:
        delay = time_ms if time_ms is not None else int(1000 * self._reader.requeue_delay * message.attempts)
        self._write(self._session.req(message, delay))
        self._close_when_done()

    def touch(self, message: Message) -> None:
        self._write(self._session.touch(message))

    def _flush(self) -> None:
        finished, self._finished = self._finished, []
        self._write(self._session.fin_many(finished))
        self._close_when_done()

    def _write(self, data: bytes) -> None:
        if data and not self._stream.closed():
            self._stream.write(data).add_done_callback(lambda future: future.exception())


async def main() -> None:
    nsqd, topic, channel = sys.argv[1:]

    def show(message: Message) -> bool:
        print(message.body.decode(), flush=True)
        return True

    reader = Reader(topic, channel, show, [nsqd], max_in_flight=200)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, reader.close)
    await reader.closed.wait()


if __name__ == "__main__":
    logging.basicConfig()
    asyncio.run(main())
