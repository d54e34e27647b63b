"""NSQ for asyncio: a Producer and a Consumer whose methods are awaited.

    from nsq_fast.aio import Producer

    async with Producer("127.0.0.1:4150") as producer:
        await producer.publish("greetings", b"hello")

They have the names and arguments of those of ``nsq_fast``, which live on gevent. What they do is done by the loop in
which they were started, uvloop too; gevent is not imported.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import os
import sys
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from time import monotonic
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, overload
from weakref import WeakSet

from msgspec import UNSET

from nsq_fast._codec import Message
from nsq_fast._dispatch import InboundQueue, take
from nsq_fast._lazy import get_logger
from nsq_fast._publish_path import Wakeups
from nsq_fast.client.acknowledger import Acknowledger, no_handler
from nsq_fast.client.asyncio_loop import AsyncioLoop, running_loop
from nsq_fast.client.consumer import ConsumerCore, warn_unclosed
from nsq_fast.client.loop import (
    EXIT_TIMEOUT,
    SLICE,
    EndTimeout,
    check_close_timeout,
    check_end_timeout,
    tell_unconfirmed,
)
from nsq_fast.client.producer import ProducerCore
from nsq_fast.client.publishes import AllStored, Body, Group, Headers, Publish, Stored, options_of
from nsq_fast.client.signals import is_heard, receivers
from nsq_fast.client.workers import Cursor, Worker, WorkerPool, check_fits, deferred_kind, thread_frames
from nsq_fast.errors import CallInvalid, ConfigError, NotRunning
from nsq_fast.protocol.publishing import OK, Key, Receipt

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from nsq_fast._dispatch import HandlerLimit, PromptFins
    from nsq_fast.client.give_up import GiveUpPolicy
    from nsq_fast.client.sender import Sender
    from nsq_fast.client.start_position import StartPositions
    from nsq_fast.client.workers import Sample
    from nsq_fast.keywords import PublishKeywords

__all__ = ["Consumer", "Producer"]


logger: logging.Logger = get_logger(__name__)


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
        try:  # here, and below: one coroutine more would cost 2 % of a publish
            await usual
        except asyncio.CancelledError as error:
            self._tell_cancelled(error, (usual,))
            raise
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
        is_usual = block and (timeout is key is partition is trace_id is None and headers is None and tag is None)
        usual = self._sent_batch_usual(topic, bodies) if is_usual else None
        if usual is None:
            self._check_loop("multipublish()")
            parts = self._parts(topic, bodies, timeout, options_of(key, partition, trace_id, headers, tag))
            whole: Publish | Group = parts[0] if len(parts) == 1 else Group(parts)
            stored: AllStored = await self._carry_out(parts, whole, block)
            return stored
        try:
            await usual
        except asyncio.CancelledError as error:
            self._tell_cancelled(error, (usual,))
            raise
        return OK

    async def _carry_out(self, parts: list[Publish], whole: Publish | Group, block: bool) -> Any:
        """Send the parts of a call, and wait for its end."""
        whole.waiter = waiter = self._create_future()
        try:
            await self._enter_all(parts, block)
            return await waiter
        except asyncio.CancelledError as error:
            if not waiter.cancel() and not waiter.cancelled():
                waiter.exception()  # it has ended just now: nobody else asks how
            self._tell_cancelled(error, parts)
            raise
        except BaseException:
            waiter.cancel()  # a part could not enter: nobody waits for the others
            raise

    def _tell_cancelled(self, error: asyncio.CancelledError, parts: Sequence[Publish]) -> None:
        """Take back what was not sent; tell ``error`` whether any of it may be stored."""
        error.possibly_stored = self._withdraw(parts)  # type: ignore[attr-defined]

    # Life

    async def start(self) -> None:
        """Begin to connect, without waiting for it. A closed producer cannot be started again."""
        running = running_loop("Producer.start()")
        if self._home is not running:
            if self._is_running and self.is_running:
                self._check_loop("start()")
            self._is_running = False  # in a child of a fork, or after its loop was closed: it begins anew
            self._home = running
            self._pid = os.getpid()
            loop: Any = AsyncioLoop()
            self._build(loop)
            self._get_loop = asyncio._get_running_loop  # which gives None where none runs
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
        if home is running_loop(f"Producer.{call}"):
            return
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


# The Consumer: native tasks on the running loop; handlers are coroutine functions, or messages are taken by
# ``async for``.
#
# What every consumer is stands in ``nsq_fast.client.consumer``. A worker is a task, which runs handlers one after the
# other, each in a context of its own: to make a task for each message takes longer than a handler that does not wait.
# What a handler does before it first waits is run compiled, many in a row (``_dispatch.pyx``).


CANCEL_TIMEOUT = 0.5
"""Seconds that handlers have for their own cleaning up, once they were cancelled with the task of the consumer."""

END_TIMEOUT = 1.0
"""Seconds for answers to leave then."""

Handler: TypeAlias = Callable[["Consumer", Message], Awaitable[object]]
BatchHandler: TypeAlias = Callable[["Consumer", list[Message]], Awaitable[object]]


class AsyncioAcknowledger(Acknowledger):
    """What follows a handler that is a coroutine function; a receiver of ``on_message`` may be one, too."""

    def present_handler(self) -> Any:
        handler, called = self.handler, receivers(self.consumer.on_message, self.consumer)
        if not called:
            return handler or _no_handler

        async def handle(consumer: Any, message: Message) -> None:
            if handler is not None:
                await handler(consumer, message)
            for receiver in called:
                result = receiver(consumer, message=message)
                if inspect.isawaitable(result):
                    await result

        return handle


async def _no_handler(consumer: object, message: Message) -> object:
    return no_handler(consumer, message)


class Consumer(ConsumerCore[Handler, BatchHandler]):
    """Consume one topic, or several, through a channel, in the loop in which it was started.

    Arguments, options, guarantees and errors are those of ``nsq_fast.Consumer``. Handlers are coroutine functions:
    one at a time for each nsqd, in the order of arrival; ``concurrency=N`` has N at work over all. The message is
    finished when its coroutine returns, and requeued when it raises. ``message.finish()`` and the other methods of
    messages may be awaited, and need not be. A plain function is refused.

    Instead of a handler, iterate: ``async for message in consumer``. Asking for the next message finishes the one
    before. A message at which the loop is left early is requeued, unless it was responded to. The consumer goes on
    then, until it is closed.

    When the task that is within ``async with`` is cancelled, by Ctrl-C too, so are the handlers, which have half a
    second to clean up; what is held is requeued, and the consumer is closed within a second after that. A handler that
    is cancelled with its loop has its message requeued.

    Each message has a context of its own (``contextvars``), which begins as that in which the consumer was started.
    Several handlers may share a task.

    Everything happens in the loop: a handler that blocks it keeps heartbeats from being answered. ``give_up`` and
    ``blocked_policy`` may be coroutine functions, and must not block; nor must receivers of signals, which are plain
    functions.
    """

    acknowledger_class: ClassVar[type[Acknowledger]] = AsyncioAcknowledger
    loop: AsyncioLoop  # type: ignore[assignment]  # it has more arguments in places

    def _build(self, start: StartPositions | None) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}  # workers, in their order
        self._cursors: list[_Cursor] = []
        self._is_ending = self._is_unclosed = False
        super()._build(start)

    def check_handler(self, name: str, handler: Any) -> None:
        if handler is None:
            return
        if not callable(handler):
            raise ConfigError(f"{name}={handler!r}: must be callable")
        if deferred_kind(handler) != "an async function":
            raise ConfigError(
                f"{name}={handler!r}: must be a coroutine function, as it runs in the event loop, which it would block:"
                " write `async def`, and `await asyncio.to_thread(...)` in it for what blocks; or use nsq_fast.threads"
            )
        check_fits(name, handler)

    def _check_policy(self, name: str, policy: Any) -> None:
        if policy is None:
            return
        if not callable(policy):
            raise ConfigError(f"{name}={policy!r}: must be callable")
        check_fits(name, policy)

    def _check_receivers(self) -> None:
        for receiver in receivers(self.on_message, self) if is_heard(self, "on_message") else ():
            kind = deferred_kind(receiver)
            if kind not in (None, "an async function"):
                raise ConfigError(f"a receiver of on_message={receiver!r} is {kind}, whose body nobody would run")
            check_fits("a receiver of on_message", receiver, "message")

    # Running

    async def start(self) -> None:
        """Begin to consume, in the running loop. Raises NotRunning after ``close``."""
        self._check_loop("Consumer.start()")
        was_started = self._is_started
        if not was_started:
            self._check_receivers()
        self._start(is_iterated=not self.acknowledger.has_handler)
        if not was_started:
            self._forget_loop = self.loop.tell_end(self._loop_ended)
            self.loop.tell_forks(self)
            try:
                await self._subscribe()
            except BaseException:  # nobody who is cancelled here would close it
                self._abandon()
                raise

    async def join(self, timeout: float | None = None) -> bool:
        """Wait until the consumer is closed; False if ``timeout`` seconds passed first.

        Raises NotRunning before ``start``, and what the consumer closed of, where nobody has asked for it.
        """
        if not self._is_started:
            raise NotRunning("the consumer is not running: await start(), or use it with `async with`")
        self._check_loop("Consumer.join()")
        return await self._wait_closed(timeout)

    async def close(self, drain: bool = True, timeout: EndTimeout = UNSET) -> None:
        """Stop consuming, gracefully, as ``nsq_fast.Consumer.close``. In a handler it only begins to close.

        The message at which the calling task iterates is requeued, unless it was responded to; those of other tasks
        are finished when they ask for the next.

        A close that is cancelled cancels the handlers, as when the task within ``async with`` is: the consumer is
        closed within a second and a half. Cancelled once more, it drops the connections at once.
        """
        check_close_timeout(timeout)
        self._is_unclosed = False
        if self._is_closed or (self._is_started and self.loop.is_closed):
            self._abandon()
            return
        self._check_loop("Consumer.close()")
        task = asyncio.current_task()
        for cursor in list(self._cursors):
            if cursor.owner is task:
                cursor.leave()
        self.begin_closing(drain, timeout)
        if task not in self._tasks:
            assert self._has_closed is not None
            try:
                await self._has_closed.wait()
            except asyncio.CancelledError:
                await self._end_at_once()
                raise

    async def __aenter__(self) -> Consumer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # What is no Exception, as CancelledError, ends the program or a part of it: handlers are not waited for.
        if kind is not None and not issubclass(kind, Exception):
            await self._end_at_once()
        else:
            await self.close()

    async def _end_at_once(self) -> None:
        """Cancel the handlers, requeue what is held, and close; who is cancelled meanwhile drops all of it."""
        self._is_unclosed = False
        if self._is_closed or not self._is_started or self.loop.is_closed:
            return
        self._is_ending = True
        self.pools.stop()
        self.begin_closing(True, CANCEL_TIMEOUT + END_TIMEOUT)  # nsqd would send again at once what goes back first
        for cursor in list(self._cursors):
            cursor.leave()
        try:
            self._cancel_workers()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=CANCEL_TIMEOUT)
            self.give_back()
            assert self._has_closed is not None
            await self._has_closed.wait(END_TIMEOUT)
        except asyncio.CancelledError:
            self._cancel_workers()  # their cleaning up, too
            raise
        finally:
            self.begin_closing(False, 0.0)  # policies are closed there
            self._abandon()

    def _cancel_workers(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def _abandon(self) -> None:
        """The loop ends, or has ended: nothing waits for anything there. Requeue what is held, as far as that can be
        sent, and drop the connections: nsqd delivers the rest again. Does not block."""
        if self._is_closed or not self._is_started:
            return
        self._is_closing = self._is_ending = True
        if self._keeper is not None:
            self._keeper.stop()
        self._subscriptions.freeze()
        with suppress(RuntimeError):  # the loop is closed
            self._subscriptions.stop()
        self._stop_parts()
        for subscriber in self._subscriptions:
            subscriber.abandon(self.loop.is_closed)
        self._closed()

    def _loop_ended(self) -> None:
        try:
            if self._is_unclosed or not self._is_closing:
                warn_unclosed(self)
        finally:
            self._abandon()

    def _closed(self) -> None:
        if self._is_closed:  # abandoned while it closed
            return
        with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            super()._closed()
        if self._is_started and not self._is_unclosed:
            self._forget_loop()

    def forked(self) -> None:
        """In the child of a fork: not started, whatever the parent's is; ``start`` makes connections of its own."""
        was_closing = self._is_closing
        self._build(None)
        self._is_closing = self._is_closed = was_closing

    def _check_loop(self, call: str) -> None:
        """Raise NotRunning in another loop than its own, WrongThread where none runs."""
        running = running_loop(call)
        if self._has_closed is not None and not self.loop.wraps(running):
            raise NotRunning(
                f"{call}: {self!r} was started in another event loop, and can only be used there; nothing was done."
                " Make one for each loop"
            )

    def _change(self, call: str, function: Callable[[Any], None], value: Any) -> None:
        # In any thread: it is made in the loop.
        if self._has_closed is None or self.loop.is_closed or self.ident == self.loop.get_ident():
            function(value)
        else:
            self.loop.owner().hand_over(function, value)

    # Iterating

    def __aiter__(self) -> _Iteration:
        """Take messages one by one, until the consumer is closed. Several tasks may iterate.

        Raises NotRunning before ``start``: iterate within ``async with``.
        """
        if self.acknowledger.has_handler:
            raise CallInvalid("a consumer with a handler cannot be iterated")
        if not self._is_started:
            raise NotRunning("the consumer is not running: await start(), or use it with `async with`")
        self._check_loop("Consumer.iter()")
        pool = self.pools.shared
        assert pool is not None
        return _Iteration(self, pool)

    # What is asyncio's

    def new_loop(self) -> AsyncioLoop:  # type: ignore[override]  # as above
        return AsyncioLoop()

    def new_pool(self, limit: HandlerLimit, prompt: PromptFins) -> WorkerPool:
        waiters = _Waiters()
        return WorkerPool(self.acknowledger, limit, prompt, None, waiters.wait, waiters.release)

    def new_worker(self, pool: WorkerPool) -> Worker:
        return TaskWorker(pool)

    def start_worker(self, worker: Worker, name: str) -> None:
        assert isinstance(worker, TaskWorker)
        task = worker.runs_in = _task_of(worker.serve(), name)
        # Who closes a loop in the middle of a handler knows: the message is delivered again, and nothing is to be told.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks[task] = None
        task.add_done_callback(partial(self._worker_ended, worker, name))

    def _worker_ended(self, worker: TaskWorker, name: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        is_cancelled = task.cancelled()
        if self._is_ending or not (is_cancelled or task.exception()):
            return
        if is_cancelled and self.is_cut_off:
            self._is_unclosed = True  # unless who is within its ``async with`` is cancelled a moment later
            self._abandon()
        else:  # a handler has exited, or cancelled its task, and the loop goes on all the same
            self.start_worker(worker, name)

    @property
    def is_cut_off(self) -> bool:
        """Whether all that is cancelled now ends with the consumer, or its loop, as ``asyncio.run`` has it.

        Who cancels the task of one handler leaves the others alone, and those of the connections.
        """
        tasks: list[Any] = [each.task for each in self.subscribers]
        is_over = self._is_ending or self._is_closed or not tasks
        return is_over or any(task is not None and task.was_cancelled() for task in tasks)

    def is_failure(self, error: BaseException) -> bool:
        return not isinstance(error, (SystemExit, KeyboardInterrupt))

    def escaped(self, error: BaseException, message: Message) -> None:
        """Nothing: it goes through the task."""

    def apart(self, function: Callable[..., object], *arguments: Any) -> Any:
        return asyncio.to_thread(function, *arguments)

    def dead_letters(self, options: dict[str, Any]) -> Any:
        return _DeadLetters(list(self.nsqd_addresses), list(self.lookupd_addresses), **options)


class _DeadLetters(Producer):
    """Of a consumer's policy: it is started when it is used first, by each of those who come until it runs."""

    async def publish(self, *arguments: Any, **place: Any) -> Any:
        if not self._is_running:
            await self.start()
        return await super().publish(*arguments, **place)


class _Waiters:
    """Tasks that wait for messages. A release wakes one; who comes later looks for messages first."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def release(self) -> None:
        """Let one go on."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                try:
                    future.set_result(None)
                except RuntimeError:  # the loop is closed: it waits no more
                    continue
                return

    async def wait(self) -> None:
        """Wait until it is one's turn."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release()  # what it was woken for is for another
            raise


class TaskWorker(Worker):
    """A task that handles messages, one at a time or in batches; handlers are coroutine functions."""

    __slots__ = ()

    began: float

    def frames(self) -> list[FrameType]:
        return _frames_of(self.runs_in, self._acknowledger.consumer.ident)

    async def serve(self) -> None:
        """Work until the pool is stopped."""
        pool = self._pool
        while not pool.is_stopped:
            inbound = pool.take_now()
            if inbound is None:
                if not pool.is_stopped:
                    await pool.wait_for_more()
                continue
            try:
                is_over = await self._serve_queue(inbound)
            except BaseException as error:
                if isinstance(error, GeneratorExit) and not _runs(self.runs_in):
                    raise  # the loop was closed: nothing goes on there
                is_over = self._cut_short(inbound, error)
            self._leave(inbound)
            if is_over:
                await asyncio.sleep(0)  # others have their turn

    async def _serve_queue(self, inbound: InboundQueue) -> bool:
        """Handle some messages; whether the time slice is over."""
        acknowledger, sample = self._acknowledger, self._sampled()
        if self.began >= inbound.ledger.next_deadline:
            inbound.expire(self.began)
        try:
            if inbound.lock is not None:
                await self._serve_ordered(inbound, sample)
            elif acknowledger.batch_handler is not None:
                await self._serve_batch(inbound, sample)
            else:
                await self._serve_single(inbound, sample)
        except Exception:
            # A fault of ours, not of a handler: those are dealt with below. The worker must go on.
            acknowledger.log_fault(self.current)
        if inbound.lock is None:
            self._pool.handled(self.began, inbound.slice.take_count())
        return bool(inbound.waiting)

    def _leave(self, inbound: InboundQueue) -> None:
        self.current = None
        self._pool.leave(inbound)

    def _cut_short(self, inbound: InboundQueue, error: BaseException) -> bool:
        """A handler raised what is no Exception, or was cancelled. Raises that again if it ends the worker."""
        acknowledger, current = self._acknowledger, self.current
        consumer: Any = acknowledger.consumer
        is_cancelled = isinstance(error, asyncio.CancelledError)
        if is_cancelled and consumer.is_cut_off:
            # What it has goes back behind a CLS, with all that is held: nsqd would send it again, here, at once.
            self._leave(inbound)
            raise error
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            asyncio.get_running_loop().call_soon(self._requeue, inbound, list(self.in_hand()))
            self._leave(inbound)
            raise error
        failure: BaseException = error
        if is_cancelled:
            failure = RuntimeError("the handler was cancelled, and the consumer was not")
            failure.__cause__ = error
        if isinstance(current, Message):
            acknowledger.failed(current, failure, is_ordered=inbound.lock is not None)
        elif current:
            acknowledger.batch_failed(current, failure)
        if is_cancelled and _is_cancelled():  # who has cancelled the task may wait for its end: another goes on
            self._leave(inbound)
            raise error
        return True

    def _requeue(self, inbound: InboundQueue, messages: list[Message]) -> None:
        """A handler has exited, and the loop goes on: they go back. If it is cancelled, they do so behind a CLS."""
        consumer: Any = self._acknowledger.consumer
        if consumer.is_cut_off:
            return
        for message in messages:
            if not message.is_async():
                self._acknowledger.requeue(message, 0, False)
        inbound.connection.flush()

    async def _serve_single(self, inbound: InboundQueue, sample: Sample | None) -> None:
        acknowledger, time_slice = self._acknowledger, self._acknowledger.slice_of(inbound)
        end = min(self.began + SLICE, inbound.ledger.next_deadline)
        handler = acknowledger.single_handler()
        if sample is not None:  # the first message by itself: the others cost nothing more
            handler, time_slice.end = self._timed(handler, sample), 0.0
        else:
            time_slice.end = end
        while True:
            found = time_slice.begin(self, inbound, acknowledger, handler)
            if found is None:
                is_over = not inbound.waiting or monotonic() > end
            elif isinstance(found, Message):
                await give_up(acknowledger, inbound, found)
                is_over = monotonic() > end
            else:
                message = self.current
                assert isinstance(message, Message)
                error = await _outcome(_Rest(*found))
                if error is None:
                    time_slice.returned(message)
                else:
                    acknowledger.failed(message, error)
                is_over = True  # others had their turn meanwhile, and so has the connection
            self.current = None
            if sample is not None:
                sample.count()
                handler, sample = acknowledger.single_handler(), None
                time_slice.end = end
            if is_over or self._pool.is_stopped:
                return

    async def _serve_batch(self, inbound: InboundQueue, sample: Sample | None) -> None:
        acknowledger = self._acknowledger
        messages = await self._batch(inbound)
        if not messages:
            return
        self.current = messages
        # A list of its own: a handler may pop, clear or replace, and what it was given is answered all the same.
        error = await self._call(acknowledger.batch_handler, messages[:], sample)
        if error is not None:
            acknowledger.batch_failed(messages, error)
        else:
            acknowledger.slice_of(inbound).all_returned(messages)

    async def _batch(self, inbound: InboundQueue) -> list[Message]:
        """As many messages as a batch handler gets at once; policies get those of too many attempts, or too old."""
        acknowledger = self._acknowledger
        messages, attempts = take(inbound.waiting, acknowledger.batch_size)
        self.current = messages
        if attempts <= acknowledger.max_tries and not acknowledger.max_age:
            return messages
        chosen = []
        for message in messages:
            verdict: Any = acknowledger.judge(inbound, message)
            if callable(verdict):
                await give_up(acknowledger, inbound, message, verdict)
            else:
                chosen.append(message)
        return chosen

    async def _serve_ordered(self, inbound: InboundQueue, sample: Sample | None) -> None:
        """Handle what an ordered partition sends, one message after the other; each FIN leaves at once."""
        acknowledger, waiting = self._acknowledger, inbound.waiting
        end = self.began + SLICE
        while waiting and not self._pool.is_stopped:
            now = monotonic()
            if now >= inbound.ledger.next_deadline:
                inbound.expire(now)
                continue
            message = self.current = waiting.popleft()
            verdict: Any = acknowledger.judge(inbound, message)
            if callable(verdict):
                await give_up(acknowledger, inbound, message, verdict)
            elif verdict:
                is_batch = acknowledger.batch_handler is not None
                handler = acknowledger.batch_handler if is_batch else acknowledger.single_handler()
                error = await self._call(handler, [message] if is_batch else message, sample)
                if error is not None:
                    acknowledger.failed(message, error, is_ordered=True)
                elif message.mark_returned():
                    inbound.connection.put_finished(message)  # the server sends the next one only then
                    acknowledger.tell_finished(message)
            self.current = None
            sample = None
            if monotonic() > end:
                return

    async def _call(self, handler: Any, item: Any, sample: Sample | None) -> BaseException | None:
        """Run a handler to its end, in a context of its own; what it raised."""
        context = copy_context()
        if sample is not None:
            handler = self._timed(handler, sample)
        try:
            return await _outcome(_in(context, context.run(handler, self._acknowledger.consumer, item)))
        finally:
            if sample is not None:
                sample.count()

    def _timed(self, handler: Any, sample: Sample) -> Any:
        async def handle(consumer: Any, item: Any) -> None:
            sample.begin(item)
            try:
                await handler(consumer, item)
            finally:
                sample.end()

        return handle


async def give_up(
    acknowledger: Acknowledger, inbound: InboundQueue, message: Message, policy: GiveUpPolicy | None = None
) -> None:
    """As ``Acknowledger.give_up``, for a policy that may have to be awaited."""
    policy = policy or acknowledger.policy_of(message)
    try:
        result = acknowledger.call_policy(message, policy)
        if inspect.isawaitable(result):
            await result
    except Exception as error:
        acknowledger.policy_failed(inbound, message, error)
    else:
        acknowledger.given_up(inbound, message, policy)


async def _outcome(handling: Awaitable[object]) -> BaseException | None:
    """Await what a handler does; what it raised. Raises what ends the task."""
    try:
        await handling
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        outcome = RuntimeError("something that the handler waited for was cancelled")
        outcome.__cause__ = error
        return outcome
    except Exception as error:
        return error
    return None


async def _in(context: Context, coroutine: Any) -> None:
    """Await a coroutine in a context."""
    if not inspect.iscoroutine(coroutine):
        await coroutine
        return
    try:
        waited_for = context.run(coroutine.send, None)
    except StopIteration:
        return
    await _Rest(context, coroutine, waited_for)


class _Rest:
    """The rest of a coroutine that waits for something. It goes on in its own context, in the task that awaits this."""

    __slots__ = ("_context", "_coroutine", "_waited_for")

    def __init__(self, context: Context, coroutine: Coroutine[Any, Any, Any], waited_for: Any) -> None:
        self._context = context
        self._coroutine = coroutine
        self._waited_for = waited_for

    def __await__(self) -> Generator[Any, Any, None]:
        run, coroutine, waited_for = self._context.run, self._coroutine, self._waited_for
        try:
            while True:
                try:
                    value = yield waited_for
                except GeneratorExit:  # noqa: PERF203
                    coroutine.close()
                    raise
                except BaseException as error:
                    waited_for = run(coroutine.throw, error)
                else:
                    waited_for = run(coroutine.send, value)
        except StopIteration:
            return


if sys.version_info < (3, 11):

    class _CancellableTask(asyncio.Task):  # type: ignore[type-arg]
        """A task that knows whether it is being cancelled, as all do from Python 3.11 on."""

        _cancelled = False

        def cancel(self, msg: Any = None) -> bool:
            self._cancelled = True
            return super().cancel(msg)

        def cancelling(self) -> int:
            return int(self._cancelled)


def _task_of(serving: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    loop = asyncio.get_running_loop()
    # Where a program has a task factory it wants tasks of its own, which in Python 3.10 do not know.
    if sys.version_info < (3, 11) and loop.get_task_factory() is None:
        return _CancellableTask(serving, loop=loop, name=name)
    return loop.create_task(serving, name=name)


def _runs(task: Any) -> bool:
    """Whether the caller is in this task, and not where its coroutine is closed."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no loop runs
        return False


def _is_cancelled() -> bool:
    """Whether the current task is being cancelled, and not only what it waits for."""
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is not None and cancelling() > 0


def _frames_of(task: asyncio.Task[Any] | None, ident: int) -> list[FrameType]:
    """Where a task is now, the outermost frame first; ``ident``: the thread of its loop."""
    found: list[FrameType] = []
    awaited: Any = None if task is None else task.get_coro()
    while awaited is not None:
        if getattr(awaited, "cr_running", False):
            return thread_frames(ident)
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            break
        found.append(frame)
        is_rest = frame.f_code is _Rest.__await__.__code__
        awaited = frame.f_locals["coroutine"] if is_rest else getattr(awaited, "cr_await", None)
    return found


class _Cursor(Cursor):
    """A task that iterates.

    Attributes:
        beyond: a message that has too many attempts, for a policy, which may have to be awaited.
    """

    __slots__ = ("beyond", "inbound")

    def __init__(self, pool: WorkerPool) -> None:
        super().__init__(pool, None)
        self.beyond: tuple[Message, GiveUpPolicy] | None = None

    def frames(self) -> list[FrameType]:
        owner: Any = self.owner
        return _frames_of(owner, self._acknowledger.consumer.ident)

    def begin(self, inbound: InboundQueue) -> None:
        self.inbound = inbound
        super().begin(inbound)

    def _is_given_up(self, inbound: InboundQueue, message: Message) -> bool:
        verdict = self._acknowledger.judge(inbound, message)
        if callable(verdict):
            self.beyond = message, verdict
            self.is_over = True
        return verdict is not True


class _Iteration:
    """One ``async for``."""

    def __init__(self, consumer: Consumer, pool: WorkerPool) -> None:
        self._consumer = consumer
        self._pool = pool
        self._cursor = _Cursor(pool)
        self._is_left = False
        consumer._cursors.append(self._cursor)

    def __aiter__(self) -> _Iteration:
        return self

    async def __anext__(self) -> Message:
        cursor, pool = self._cursor, self._pool
        if self._is_left:
            raise StopAsyncIteration
        while True:
            message = cursor.next()
            if message is not None:
                cursor.owner = asyncio.current_task()
                return message
            if cursor.beyond is not None:
                (message, policy), cursor.beyond = cursor.beyond, None
                try:
                    await give_up(self._consumer.acknowledger, cursor.inbound, message, policy)
                except BaseException:
                    self._consumer.acknowledger.requeue(message, 0, False)
                    raise
            if cursor.is_over:
                await asyncio.sleep(0)  # others have their turn
            if pool.is_stopped:
                self._end()
                if self._consumer.failure is not None:
                    raise self._consumer.failure
                raise StopAsyncIteration
            inbound = pool.take_now()
            if inbound is not None:
                cursor.begin(inbound)
                continue
            if not pool.is_stopped:
                await pool.wait_for_more()

    async def aclose(self) -> None:
        """Leave the loop, as for ``contextlib.aclosing``: the message at which it is goes back."""
        self._end()

    def _end(self) -> None:
        self._is_left = True
        self._cursor.close()
        if self._cursor in self._consumer._cursors:
            self._consumer._cursors.remove(self._cursor)

    def __del__(self) -> None:
        self._end()
