"""The port on an asyncio loop, uvloop's among them: leaves are native."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from _socket import SOCK_STREAM
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from socket import socket
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet, finalize, ref

from nsq_fast._lazy import get_logger
from nsq_fast.errors import NsqError, WrongThread

from .loop import FaultReporter, Names, RestartPauses

T = TypeVar("T")
logger: logging.Logger = get_logger("nsq_fast.client")

FOR_EVER = 1e9
"""Seconds that no loop lives for."""


_known: WeakSet[Any] = WeakSet()
"""What a fork copies and its child must let go of: sockets survive a fork, and the loop does not run there."""

_forks = 0
"""Of which this process is the child."""


def _in_child() -> None:
    global _forks
    _forks += 1
    for thing in list(_known):
        thing.forked()


os.register_at_fork(after_in_child=_in_child)


if TYPE_CHECKING:
    _Future = asyncio.Future[Any]
else:  # what runs needs no type
    _Future = asyncio.Future


class LoopWaiter(_Future):
    """A future that its waiter may have left: setting it then is no error."""

    def set(self, value: Any) -> None:
        """End the wait."""
        if not self.done():
            self.set_result(value)

    def set_exception(self, error: Any) -> None:
        """End the wait with an error."""
        if not self.done():
            super().set_exception(error)

    def ready(self) -> bool:
        """Whether it was set, or nobody waits any more."""
        return self.done()


class LoopWatch:
    """A reader or writer of the loop; see ``loop.Watch``."""

    __slots__ = ("_add", "_descriptor", "_forks", "_function", "_is_on", "_remove")

    def __init__(
        self, add: Callable[..., object], remove: Callable[..., object], sock: Any, function: Callable[[], object]
    ) -> None:
        self._add, self._remove = add, remove
        self._descriptor: int = sock.fileno()
        self._function = function
        self._forks = _forks
        self._is_on = False

    def pause(self) -> None:
        if self._is_on:
            self._is_on = False
            if self._forks != _forks:
                return  # what the loop waits with is the parent's, too: it would hear of nothing any more
            with suppress(RuntimeError):  # the loop is closed, and watches nothing
                self._remove(self._descriptor)

    def resume(self) -> None:
        if not self._is_on and self._descriptor >= 0:
            self._is_on = True
            self._add(self._descriptor, self._function)

    def close(self) -> None:
        self.pause()
        self._descriptor = -1


class LoopTask:
    """A supervised task; see ``loop.Task``."""

    __slots__ = ("_task",)

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, body: Coroutine[Any, Any, None]) -> None:
        self._task = loop.create_task(body, name=name)
        # Who closes a loop in the middle of it knows: there is nothing to tell.
        self._task._log_destroy_pending = False  # type: ignore[attr-defined]
        finalize(self._task, body.close).atexit = False  # nor of what had not even begun

    def cancel(self) -> None:
        if not self.is_current():
            with suppress(RuntimeError):  # the loop is closed: it never goes on
                self._task.cancel()

    def ready(self) -> bool:
        return self._task.done()

    def was_cancelled(self) -> bool:
        """Whether somebody has cancelled it. Python 3.10 cannot tell: then it may have been."""
        cancelling = getattr(self._task, "cancelling", None)
        return cancelling is None or cancelling() > 0

    def is_current(self) -> bool:
        return not self._task.done() and asyncio.current_task() is self._task

    async def join(self, timeout: float | None = None) -> bool:
        await asyncio.wait((self._task,), timeout=timeout)
        return self.ready()


class LoopSupervisor(FaultReporter):
    """See ``loop.Supervisor``."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, log: logging.Logger, on_fault: Callable[[NsqError], object] | None
    ) -> None:
        super().__init__(log, on_fault)
        self._loop = loop

    def job(self, name: str, sequence: Callable[..., Coroutine[Any, Any, object]], *arguments: Any) -> LoopTask:
        return LoopTask(self._loop, name, self._once(name, sequence, arguments))

    def keep(self, name: str, sequence: Callable[[], Coroutine[Any, Any, object]]) -> LoopTask:
        return LoopTask(self._loop, name, self._again(name, sequence))

    async def _once(
        self, name: str, sequence: Callable[..., Coroutine[Any, Any, object]], arguments: tuple[Any, ...]
    ) -> None:
        try:
            await sequence(*arguments)
        except Exception as fault:
            self.report(name, fault, "it is not tried again")

    async def _again(self, name: str, sequence: Callable[[], Coroutine[Any, Any, object]]) -> None:
        pauses = RestartPauses()
        while True:
            began = monotonic()
            try:
                await sequence()
            except Exception as fault:
                pause = pauses.after(monotonic() - began)
                self.report(name, fault, f"it begins again in {pause:.3g} s")
            else:
                return
            await asyncio.sleep(pause)


class LoopEnd:
    """Something that a loop has waiting, and drops when it is closed: then a function is called.

    Nothing else tells of a loop that is closed with the program's connections open.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def __call__(self) -> None:
        """Never in our time."""

    def __del__(self) -> None:
        self._function()


class LoopThread:
    """The thread of a loop; see ``loop.Owner``. Calls of other threads are made in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ident: int = 0
        self._loop = loop

    def claim(self) -> None:
        self.ident = threading.get_ident()

    def check(self, call: str) -> None:
        if self.ident and threading.get_ident() != self.ident:
            raise WrongThread(
                f"{call} was called in thread {threading.current_thread().name!r}, but what it is called on belongs to"
                " an event loop of another thread; nothing was done. Use loop.call_soon_threadsafe"
            )

    @property
    def takes_calls(self) -> bool:
        return not self._loop.is_closed()

    def hand_over(self, function: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)


def running_loop(call: str) -> asyncio.AbstractEventLoop:
    """The loop that runs in the calling thread. Raises WrongThread where none does; ``call`` names what was called."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongThread(
            f"{call} was called where no event loop runs, in thread {threading.current_thread().name!r}; nothing was"
            " done. nsq_fast.aio needs a running loop of asyncio, or uvloop; that of another library, as trio, is none."
            " Use loop.call_soon_threadsafe, or nsq_fast.threads"
        ) from None


class AsyncioLoop:
    """The running loop. Made in it."""

    def __init__(self) -> None:
        self._loop = running_loop("a client of nsq_fast.aio")
        self.at_end_of_turn: Callable[..., object] = self._loop.call_soon
        self.call_soon: Callable[..., object] = self._loop.call_soon
        self.call_later: Callable[..., asyncio.TimerHandle] = self._loop.call_later
        self.get_ident: Callable[[], int] = threading.get_ident
        self.reads_all: bool = type(self._loop).__module__.partition(".")[0] == "uvloop"
        self._supervisor = self.supervisor(logger)
        self._names = Names(self._loop.call_soon_threadsafe)
        self.tell_forks(self._names)

    @property
    def is_closed(self) -> bool:
        """Whether nothing runs in it any more."""
        return self._loop.is_closed()

    def wraps(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether it is this one."""
        return self._loop is loop

    def tell_end(self, function: Callable[[], object]) -> Callable[[], None]:
        """Call ``function`` once the loop is closed, or what this returns is called."""
        waiting = ref(self._loop.call_later(FOR_EVER, LoopEnd(function)))  # which nobody but the loop may hold

        def cancel() -> None:
            timer = waiting()
            if timer is not None:
                timer.cancel()

        return cancel

    def add_reader(self, sock: Any, function: Callable[[], object]) -> LoopWatch:
        watch = LoopWatch(self._loop.add_reader, self._loop.remove_reader, sock, function)
        watch.resume()
        return watch

    def add_writer(self, sock: Any, function: Callable[[], object]) -> LoopWatch:
        return LoopWatch(self._loop.add_writer, self._loop.remove_writer, sock, function)

    def new_socket(self, family: int) -> Any:
        sock = socket(family, SOCK_STREAM)
        sock.setblocking(False)
        return sock

    async def resolve(self, host: str, port: int, timeout: float) -> Sequence[tuple[Any, ...]]:
        return await self._names.resolve(self, host, port, timeout)

    def waiter(self) -> LoopWaiter:
        return LoopWaiter(loop=self._loop)

    async def wait(self, waiter: Any, timeout: float | None = None) -> Any:
        if timeout is None or waiter.done():
            return await waiter
        # Not by asyncio.wait_for: until Python 3.12 it swallows a cancellation that comes together with the value.
        error = TimeoutError(f"nothing came within {timeout:.3g} s")
        timer = self._loop.call_later(timeout, waiter.set_exception, error)
        try:
            return await waiter
        finally:
            timer.cancel()

    def owner(self) -> LoopThread:
        return LoopThread(self._loop)

    def tell_forks(self, thing: Any) -> None:
        _known.add(thing)

    def may_wait(self) -> bool:
        return asyncio.current_task() is not None

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def call_blocking(self, function: Callable[..., T], *arguments: Any) -> T:
        waiter = self.waiter()

        def work() -> None:
            try:
                done: Callable[[Any], object] = waiter.set
                value: Any = function(*arguments)
            except BaseException as error:
                done = waiter.set_exception
                value = RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(done, value)

        # A daemon, and none of the loop's own: nobody may have to wait for it when the program ends.
        threading.Thread(target=work, name="nsq_fast blocking call", daemon=True).start()
        value: T = await waiter
        return value

    def supervisor(self, log: logging.Logger, on_fault: Callable[[NsqError], object] | None = None) -> LoopSupervisor:
        return LoopSupervisor(self._loop, log, on_fault)

    def report(self, name: str, fault: BaseException, consequence: str) -> None:
        self._supervisor.report(name, fault, consequence)
