"""One connection at a time, against one nsqd: handshake, commands, heartbeats, silence, back-pressure, the end."""

from __future__ import annotations

import asyncio
from bisect import bisect
from functools import cache
from typing import Any

from nsq_fast import _codec
from nsq_fast.client.asyncio_loop import AsyncioLoop
from nsq_fast.client.connection import CLOSE_TIMEOUT, GRACE, Connection
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import ConnectFailed, ConnectionClosed, ConnectionLost, NsqError, ServerError
from nsq_fast.names import Address

from .clock import SimError, SimLoop
from .faults import Faults
from .nsqd import Books, ModelNsqd

KINDS = (
    "cut", "cut_to", "cut_from", "reset", "forget_stream", "freeze", "kill", "vanish", "slow", "small_buffers",
    "moods", "moods",
)  # fmt: skip
LAYERS: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"snappy": True}, {"deflate": True}, {"tls_v1": True}, {"tls_v1": True, "snappy": True},
)  # fmt: skip


@cache
def client_tls() -> Any:
    """Made once: it takes longer than a scenario."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def expect(is_so: object, text: str) -> None:
    if not is_so:
        raise SimError(text)


class Owner:
    """Uses one connection, and notes what it is told."""

    def __init__(self, loop: SimLoop, books: Books) -> None:
        self.loop, self.books, self.chance = loop, books, loop.chance
        self.sent: list[bytes] = []
        self.replied: set[bytes] = set()
        self._next = 0  # of ``sent``: the first that is not told of
        self.failed: dict[bytes, NsqError] = {}
        self.received: list[Any] = []
        self.unanswered: set[Any] = set()
        self.end: NsqError | None = None
        self.answers: list[Any] = []

    def publish(self, conn: Connection, body: bytes) -> None:
        conn.request(_codec.pub("t", body), "PUB", body)
        self.sent.append(body)

    def _told(self, token: bytes) -> None:
        self.books.require(self.end is None, "a command is reported after on_disconnect")
        self.books.require(token not in self.failed and token not in self.replied, "a command is reported twice")
        self.books.require(self.sent[self._next] == token, "replies out of order")
        self._next += 1

    def on_reply(self, conn: Connection, token: bytes, data: bytes) -> None:
        self._told(token)
        self.replied.add(token)
        self.books.require(token in self.books.stored, "OK for what was not stored")

    def on_failed(self, conn: Connection, token: bytes, error: NsqError) -> None:
        self._told(token)
        self.failed[token] = error
        if not getattr(error, "outcome_unknown", False):
            # what is on its way is thrown away by a server that has closed
            self.books.require(token not in self.books.stored, f"{error!r} says that it was not stored, and it was")

    def on_messages(self, conn: Connection, messages: list[Any]) -> None:
        self.books.require(self.end is None, "messages after on_disconnect")
        for message in messages:
            self.received.append(message)
            self.unanswered.add(message)
            self.loop.call_later(self.chance.long_tailed(0.0, 1.0), self._answer, conn, message)

    def _answer(self, conn: Connection, message: Any) -> None:
        if not conn.is_open or message not in self.unanswered:
            return
        if self.chance.happens(0.1):
            message.touch()
            self.loop.call_later(self.chance.random(), self._answer, conn, message)
            return
        self.unanswered.discard(message)
        if self.chance.happens(0.2):
            message.requeue(self.chance.choice((0, 0, 50)))
        else:
            message.finish()
            self.answers.append(message.body)

    def on_disconnect(self, conn: Connection, error: NsqError) -> None:
        self.books.require(self.end is None, "on_disconnect twice")
        self.end = error
        told = self.replied | set(self.failed)
        self.books.require(told == set(self.sent), f"not told before on_disconnect: {set(self.sent) - told}")
        self.books.note(f"ended: {error!r}")

    def on_close_wait(self, conn: Connection) -> None: ...

    def on_heartbeat(self, conn: Connection) -> None: ...

    def on_message_skipped(self, conn: Connection, message: Any, error: Any) -> None:
        self.books.breaks("a message was skipped")

    def on_answer_failed(self, conn: Connection, error: ServerError, message_id: bytes | None) -> None: ...

    def on_error(self, conn: Connection, error: ServerError) -> None:
        self.books.breaks(f"the server complains: {error}")


class Life:
    """One connection from ``open`` to its end."""

    def __init__(self, loop: SimLoop, port: AsyncioLoop, nsqd: ModelNsqd, faults: Faults, number: int) -> None:
        chance = loop.chance
        layers = dict(chance.choice(LAYERS))
        if "tls_v1" in layers:
            layers["tls_options"] = client_tls()
        self.loop, self.nsqd, self.faults = loop, nsqd, faults
        self.owner = Owner(loop, nsqd.books)
        self.config = ConnectionConfig(
            hostname="h",
            heartbeat_interval=chance.choice((1.0, 3.0, 30.0)),
            connect_timeout=chance.choice((0.5, 5.0)),
            write_timeout=chance.choice((2.0, 30.0)),
            msg_timeout=chance.choice((None, 2.0)),
            **layers,
        )
        self.conn = Connection(Address(*nsqd.address), self.config, self.owner, port)
        self.number = number
        self.sizes = (60_000,) if chance.happens(0.15) else (10, 100, 100, 1000)
        self.began = loop.time()

    @property
    def is_untouched(self) -> bool:
        return not self.faults.touched(self.began - 0.01, self.loop.time())

    async def run(self) -> None:
        loop, chance, conn, owner = self.loop, self.loop.chance, self.conn, self.owner
        try:
            await conn.open()
        except ConnectFailed as error:
            self._expect_in_time()
            expect(not self.is_untouched, f"open failed, and nothing was wrong: {error!r} {error.__cause__!r}")
            expect(owner.end is None, "on_disconnect of a connection that never was")
            self._watch(False)
            return
        self._expect_in_time()
        self._watch(True)
        work = [loop.create_task(self._publish())]
        if chance.happens(0.7):
            work.append(loop.create_task(self._consume()))
        lasts = chance.choice((0.2, 5.0, 5.0, 100.0))
        try:
            await self._until_end(lasts)
            expect(owner.end is None or not self.is_untouched, f"it ended, and nothing was wrong: {owner.end!r}")
            await self._close()
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        for task in work:
            if not task.cancelled() and (fault := task.exception()) is not None:
                raise fault
        self._judge()

    def _expect_in_time(self) -> None:
        took = self.loop.time() - self.began
        expect(took <= self.config.connect_timeout + 0.01, f"open took {took:.3f} s")

    def _watch(self, is_open: bool) -> None:
        expect(self.conn.is_open is is_open, f"is_open is not {is_open}")

    async def _until_end(self, seconds: float) -> None:
        """So long; less, if it ends. And no silent server is taken for a living one."""
        end = self.loop.time() + seconds
        patience = 2 * self.config.heartbeat_interval + GRACE + 0.6
        while self.owner.end is None and self.loop.time() < end:
            silence = self.loop.time() - self.conn.last_received_at
            expect(silence <= patience, f"open after {silence:.3f} s of silence")
            if self.nsqd.conns and self.is_untouched:
                sent = bisect(self.nsqd.conns[-1].delivered_at, self.loop.time() - 0.1)
                expect(len(self.owner.received) >= sent, f"{sent} were sent, {len(self.owner.received)} handed on")
            await asyncio.sleep(min(0.5, seconds / 3))

    async def _publish(self) -> None:
        chance = self.loop.chance
        number = 0
        while self.conn.is_open:
            for _ in range(chance.choice((1, 1, 20))):
                size = chance.choice(self.sizes)
                number += 1
                body = (b"%d-%d " % (self.number, number)).ljust(size, b"x")
                try:
                    self.owner.publish(self.conn, body)
                except ConnectionLost as error:
                    expect(not error.outcome_unknown, "unknown, of what was not sent")
                    return
            if self.conn.is_blocked and self.conn.session.pending and len(self.conn.session.pending) > 500:
                await asyncio.sleep(1.0)
            await asyncio.sleep(chance.long_tailed(0.01, 20.0))

    async def _consume(self) -> None:
        chance, conn = self.loop.chance, self.conn
        try:
            await conn.subscribe("t", "c")
        except ConnectionLost as error:
            if self.is_untouched and self.owner.end is None and not isinstance(conn.closed_error, ConnectionClosed):
                raise SimError("SUB failed, and nothing was wrong") from error
            return
        while conn.is_open:
            conn.set_rdy(chance.choice((0, 1, 1, 10, 100)))
            await asyncio.sleep(chance.long_tailed(0.05, 20.0))

    async def _close(self) -> None:
        chance, conn, owner = self.loop.chance, self.conn, self.owner
        if owner.end is None and conn.is_open and chance.happens(0.3) and conn.topic is not None:
            conn.start_close()
            await self._until_end(chance.random() * 3)
        is_gentle = owner.end is None and conn.is_open
        if is_gentle and chance.happens(0.5):
            for message in list(owner.unanswered):  # in the same turn as the close
                owner.unanswered.discard(message)
                message.finish()
                owner.answers.append(message.body)
            for index in range(chance.choice((1, 4))):
                owner.publish(conn, (b"%d-last-%d " % (self.number, index)).ljust(chance.choice((10, 90_000)), b"x"))
        pending = len(conn.session.pending)
        began = self.loop.time()
        was_untouched = self.is_untouched
        timeout = chance.choice((0.5, CLOSE_TIMEOUT))
        conn.close(timeout=timeout)
        await asyncio.wait_for(conn.closed(), timeout + 0.5)
        took = self.loop.time() - began
        expect(owner.end is not None, "closed() before on_disconnect")
        if is_gentle and was_untouched and self.is_untouched:
            expect(took < timeout, f"an unhindered close took {took} s, with {pending} pending")
            lost = [body for body in owner.answers if self.nsqd.books.finished[body] == 0]
            expect(not lost, f"FINs were lost by a gentle close: {lost[:3]}")
            expect(not owner.failed, f"a gentle close lost replies: {list(owner.failed.values())[:1]}")

    def _judge(self) -> None:
        expect(not self.conn.is_open, "open after its end")
        for call in (lambda: self.conn.write(b"NOP\n"), lambda: self.conn.request(b"", "PUB", 1)):
            try:
                call()
            except ConnectionLost:
                continue
            raise SimError("a command was taken after the end")


async def scenario(loop: SimLoop) -> dict[str, Any]:
    """Several lives of connections to one nsqd, with faults or without."""
    chance = loop.chance
    network = loop.network
    books = loop.books
    nsqd = ModelNsqd(network, books, "10.1.0.1", chance.choice(("original", "redesigned")))
    nsqd.log("t").channel("c")
    if chance.happens(0.15):
        for index in range(30):
            nsqd.log("t").store((b"old %d " % index).ljust(60_000, b"x"))
    nsqd.msg_timeout = chance.choice((5.0, 60.0))
    faults = Faults(network, books, [nsqd])
    if chance.happens(0.7):
        faults.plan(chance.randint(1, 6), chance.choice((1.0, 60.0)), KINDS)
    port = AsyncioLoop()
    lives = 0
    for number in range(chance.randint(1, 4)):
        life = Life(loop, port, nsqd, faults, number)
        await life.run()
        await asyncio.sleep(chance.random())
        lives += 1
    expect(nsqd.mute_clients == 0 or faults.periods, "the server took a client for mute, and nothing was wrong")
    return {"lives": lives, "stored": len(books.stored), "commands": sum(books.commands.values())}
