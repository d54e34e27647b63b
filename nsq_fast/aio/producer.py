"""The Producer of asyncio, of uvloop too: everything is done by the loop in which it was started."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, overload
from weakref import WeakSet

from nsq_fast._publish_path import Wakeups
from nsq_fast.client.asyncio_loop import AsyncioLoop
from nsq_fast.client.loop import EXIT_TIMEOUT, check_end_timeout, tell_unconfirmed
from nsq_fast.client.producer import ProducerCore
from nsq_fast.client.publishes import Body, Group, Publish, options_of
from nsq_fast.errors import NotRunning, WrongThread
from nsq_fast.protocol.partitioner import Key
from nsq_fast.protocol.publishing import OK, Receipt

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from nsq_fast.client.sender import Sender
    from nsq_fast.keywords import PublishKeywords

Headers: TypeAlias = Mapping[str, Any]
Stored: TypeAlias = bytes | Receipt
AllStored: TypeAlias = bytes | list[Receipt]

logger: logging.Logger = logging.getLogger(__name__)


class Producer(ProducerCore):
    """Publishes messages, from any number of tasks of the loop in which it was started.

    Arguments, options, guarantees and errors are those of ``nsq_fast.Producer``.

    A publish that is cancelled, by ``asyncio.timeout`` too, is withdrawn if nothing of it was sent. The CancelledError
    has the attribute ``possibly_stored``, which says whether a server may have the message all the same; where
    ``asyncio.timeout`` makes a TimeoutError of it, it is the ``__cause__`` of that.

    The end of the interpreter says in one line how many publishes were not confirmed of producers that nobody closed;
    where their loop is not closed it runs for two seconds more.
    """

    _forget_loop: Callable[[], None]
    _home: asyncio.AbstractEventLoop | None
    _pid = 0

    def _new_wakeups(self) -> Wakeups:
        return Wakeups(None, None, self._home)

    # Publishing

    @overload
    async def publish(
        self,
        topic: str,
        body: Body,
        defer: int | None = None,
        block: bool = True,
        timeout: float | None = None,
        *,
        trace_id: int,
        key: Key | None = None,
        partition: int | None = None,
        headers: Headers | None = None,
        tag: str | None = None,
    ) -> Receipt: ...

    @overload
    async def publish(
        self,
        topic: str,
        body: Body,
        defer: int | None = None,
        block: bool = True,
        timeout: float | None = None,
        **options: Unpack[PublishKeywords],
    ) -> Stored: ...

    async def publish(
        self,
        topic: str,
        body: Body,
        defer: int | None = None,
        block: bool = True,
        timeout: float | None = None,
        *,
        key: Key | None = None,
        partition: int | None = None,
        trace_id: int | None = None,
        headers: Headers | None = None,
        tag: str | None = None,
    ) -> Stored:
        """Publish one message and wait until a server has it; returns ``b"OK"``, or a Receipt when it was traced.

        The arguments are those of ``nsq_fast.Producer.publish``.
        """
        is_usual = block and (defer is timeout is None and headers is None and tag is None)
        usual = self._sent_usual(topic, body, key, partition, trace_id) if is_usual else None
        if usual is None:
            self._check_loop("publish()")
            usual = self._new(topic, body, defer, timeout, options_of(key, partition, trace_id, headers, tag))
            stored: Stored = await self._carry_out([usual], usual, block)
            return stored
        if not usual.done:
            try:
                await usual
            except asyncio.CancelledError as error:
                error.possibly_stored = self._withdraw((usual,))  # type: ignore[attr-defined]
                raise
        elif usual.error is not None:
            raise usual.error
        if usual.is_plain:
            return OK
        stored = usual.value()
        return stored

    def publish_nowait(
        self,
        topic: str,
        body: Body,
        defer: int | None = None,
        timeout: float | None = None,
        *,
        key: Key | None = None,
        partition: int | None = None,
        trace_id: int | None = None,
        headers: Headers | None = None,
        tag: str | None = None,
    ) -> asyncio.Future[Stored]:
        """Publish one message without waiting; the future gets what ``publish`` returns, or the error.

        Raises PublishFailed when ``max_pending`` is reached. Cancelling the future does not withdraw the publish.
        """
        self._check_loop("publish_nowait()")
        is_usual = defer is timeout is None and headers is None and tag is None
        publish = self._prepared(topic, body, key, partition, trace_id) if is_usual else None
        if publish is None:
            publish = self._new(topic, body, defer, timeout, options_of(key, partition, trace_id, headers, tag))
            self._take_room_now(publish)
        publish.waiter = future = self._create_future()
        publish.destination.add(publish)
        return future

    async def multipublish(
        self,
        topic: str,
        bodies: Iterable[Body],
        block: bool = True,
        timeout: float | None = None,
        *,
        key: Key | None = None,
        partition: int | None = None,
        trace_id: int | Sequence[int] | None = None,
        headers: Headers | Sequence[Headers] | None = None,
        tag: str | None = None,
    ) -> AllStored:
        """Publish several messages with one command, as ``nsq_fast.Producer.multipublish``."""
        self._check_loop("multipublish()")
        parts = self._parts(topic, bodies, timeout, options_of(key, partition, trace_id, headers, tag))
        whole: Publish | Group = parts[0] if len(parts) == 1 else Group(parts)
        stored: AllStored = await self._carry_out(parts, whole, block)
        return stored

    async def _carry_out(self, parts: list[Publish], whole: Publish | Group, block: bool) -> Any:
        """Send the parts of a call, and wait for its end."""
        whole.waiter = waiter = self._create_future()
        try:
            await self._enter_all(parts, whole, block)
            return await waiter
        except asyncio.CancelledError as error:
            self._cancelled(error, parts, waiter)
            raise
        except BaseException:
            waiter.cancel()  # a part could not enter: nobody waits for the others
            raise

    def _cancelled(self, error: asyncio.CancelledError, parts: Sequence[Publish], waiter: Any) -> None:
        """Take back what was not sent; tell ``error`` whether any of it may be stored."""
        if not waiter.cancel() and not waiter.cancelled():
            waiter.exception()  # it has ended just now: nobody else asks how
        error.possibly_stored = self._withdraw(parts)  # type: ignore[attr-defined]

    # Life

    async def start(self) -> None:
        """Begin to connect, without waiting for it. A closed producer cannot be started again."""
        running = asyncio.get_running_loop()
        if self._home is not running:
            if self._is_running and self.is_running:
                self._check_loop("start()")
            self._is_running = False  # in a child of a fork, or after its loop was closed: it begins anew
            self._home = running
            self._pid = os.getpid()
            loop: Any = AsyncioLoop()
            self._build(loop)
            self._get_loop = asyncio.get_running_loop
            self._create_future = running.create_future
            # What asyncio's own loop is about to do; uvloop does not show it.
            self._ready = getattr(running, "_ready", ())
            self._forget_loop = loop.tell_end(partial(self._loop_ended, self._sender))
            _known.add(self)
        await self._start()

    async def close(self, timeout: float | None = None) -> None:
        """Publish no more; wait for the publishes that are pending, then close the connections.

        Args:
            timeout: seconds that all of it may take; publishes that are still pending then fail.
        """
        check_end_timeout(timeout)
        if self._home is None:
            self._is_closed = True  # never started: there is nothing to wait for
        elif self._home.is_closed():
            self._is_closed = True
            self._is_running = False
        else:
            self._check_loop("close()")
            try:
                await self._close(timeout)
            finally:
                if not self._is_closing:
                    self._forget_loop()

    def _loop_ended(self, sender: Sender) -> None:
        """The loop in which ``sender`` lives is closed, or the producer is."""
        try:
            if self._is_running and sender is self._sender and self._pid == os.getpid():
                text = f"unclosed producer {self!r}: close it, or use it in an async with block"
                warnings.warn(text, ResourceWarning, stacklevel=2, source=self)
        finally:
            sender.let_go()

    async def join(self, timeout: float | None = None) -> bool:
        """Wait until the producer has closed; whether it has."""
        check_end_timeout(timeout)
        if self._home is None and not self._is_closed:
            raise self._not_running()
        if self._is_closed and not self._is_closing:
            return True
        self._check_loop("join()")
        return await self._closed.wait(timeout)

    @property
    def is_running(self) -> bool:
        """Whether it takes publishes."""
        home = self._home
        return self._is_running and home is not None and not home.is_closed() and self._pid == os.getpid()

    def _check_loop(self, call: str) -> None:
        """Raise NotRunning in another loop than its own, WrongThread where none runs."""
        home = self._home
        try:
            if home is asyncio.get_running_loop():
                return
        except RuntimeError:
            raise WrongThread(
                f"Producer.{call} was called where no event loop runs, in thread {threading.current_thread().name!r};"
                " nothing was done. Use loop.call_soon_threadsafe, or a Producer of nsq_fast.threads"
            ) from None
        if home is None or home.is_closed() or self._pid != os.getpid():
            raise self._not_running()
        raise NotRunning(
            f"Producer.{call}: {self!r} was started in another event loop, and can only be used there; nothing was"
            " done. Make one for each loop"
        )

    def _not_running(self) -> NotRunning:
        if self._is_closed:
            return NotRunning("the producer was closed")
        return NotRunning("the producer is not running: await start(), or use it with `async with`")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def end(self) -> int:
        """At the end of the interpreter: close, if the loop still can; how many messages are not confirmed."""
        home = self._home
        if not self._is_running or home is None or self._pid != os.getpid():
            return 0
        lost = self._count_unconfirmed()
        if not home.is_closed() and not home.is_running():
            home.run_until_complete(self._sender.pending.wait_for_none(EXIT_TIMEOUT))
            lost = self._count_unconfirmed()
            home.run_until_complete(self._close(0.1))
        return lost


_known: WeakSet[Producer] = WeakSet()


@atexit.register
def _at_exit() -> None:
    lost = sum(producer.end() for producer in list(_known))
    tell_unconfirmed(logger, lost)
