"""The port on gevent's hub: leaves block the calling greenlet."""

from __future__ import annotations

import logging
from _socket import SOCK_STREAM
from _socket import socket as CSocket  # which monkey.patch_all leaves as it is
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from gevent import Timeout, get_hub, getcurrent, sleep
from gevent.event import AsyncResult
from gevent.exceptions import BlockingSwitchOutError

from nsq_fast._lazy import get_logger
from nsq_fast.client import signals
from nsq_fast.errors import NsqError, WrongThread

from .connection import Connection
from .greenlets import (
    IN_THE_HUB,
    LAST,
    Job,
    OwnerThread,
    SupervisedLoop,
    get_ident,
    known,
    loop_turns,
    tell_forks,
)
from .loop import FaultReporter, Names
from .transport import Transport

T = TypeVar("T")
READ, WRITE = 1, 2
signals.caller = getcurrent
_reporter = FaultReporter(get_logger("nsq_fast.client"))


def run(sequence: Coroutine[Any, Any, T]) -> T:
    """Take a sequence to its end in the calling greenlet, which its leaves block."""
    try:
        sequence.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    except BlockingSwitchOutError as error:
        raise WrongThread(f"What has to wait {IN_THE_HUB.format(done='it was broken off')}") from error
    sequence.close()
    raise RuntimeError("a sequence waited for something else than the leaves of the port")


class HubTimer:
    """A timer of the hub; see ``loop.Timer``."""

    __slots__ = ("_timer",)

    def __init__(self, hub: Any, seconds: float, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._timer = hub.loop.timer(max(0.0, seconds), priority=LAST)
        # The loop knows what time it was at its last turn: from there on, the timer would be early.
        self._timer.start(self._ring, function, arguments, update=True)

    def _ring(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.cancel()
        function(*arguments)

    def cancel(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.stop()
            timer.close()


class HubWatch:
    """A watcher of the hub; see ``loop.Watch``."""

    __slots__ = ("_function", "_is_on", "_watcher")

    def __init__(self, hub: Any, sock: Any, event: int, function: Callable[[], object]) -> None:
        self._watcher = hub.loop.io(sock.fileno(), event)
        self._function = function
        self._is_on = False

    def pause(self) -> None:
        if self._is_on:
            self._is_on = False
            self._watcher.stop()

    def resume(self) -> None:
        if not self._is_on and self._watcher is not None:
            self._is_on = True
            self._watcher.start(self._function)

    def close(self) -> None:
        watcher, self._watcher = self._watcher, None
        self._is_on = False
        if watcher is not None:
            watcher.close()


class HubTask:
    """A supervised greenlet; see ``loop.Task``."""

    __slots__ = ("_greenlet",)

    def __init__(self, greenlet: Any) -> None:
        self._greenlet = greenlet
        greenlet.start()

    def cancel(self) -> None:
        if not self.is_current():
            self._greenlet.kill(block=False)

    def ready(self) -> bool:
        return bool(self._greenlet.ready())

    def is_current(self) -> bool:
        return getcurrent() is self._greenlet

    async def join(self, timeout: float | None = None) -> bool:
        self._greenlet.join(timeout)
        return self.ready()


class HubSupervisor(FaultReporter):
    """See ``loop.Supervisor``."""

    def job(self, name: str, sequence: Callable[..., Any], *arguments: Any) -> HubTask:
        return HubTask(Job(self, name, lambda: run(sequence(*arguments))))

    def keep(self, name: str, sequence: Callable[[], Any]) -> HubTask:
        return HubTask(SupervisedLoop(self, name, lambda: run(sequence())))


class GeventLoop:
    """The hub of the thread in which it is made. ``here`` gives the one of the calling thread."""

    def __init__(self) -> None:
        self._hub: Any = get_hub()
        turns = loop_turns()
        self.at_end_of_turn: Any = turns.at_end
        self.call_soon: Callable[..., object] = self._hub.loop.run_callback
        self.tell_forks = tell_forks
        self.get_ident: Any = get_ident
        self.reads_all: bool = "libuv" in type(self._hub.loop).__module__
        self._names = Names(self._hub.loop.run_callback_threadsafe)
        tell_forks(self._names)

    @classmethod
    def here(cls) -> GeventLoop:
        """That of the calling thread's hub."""
        hub = get_hub()
        loop = _loops.get(hub)
        if loop is None:
            loop = _loops[hub] = cls()
        return loop

    def is_of(self, hub: object) -> bool:
        """Whether it is that hub's."""
        return self._hub is hub

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: Any) -> HubTimer:
        return HubTimer(self._hub, seconds, function, arguments)

    def add_reader(self, sock: Any, function: Callable[[], object]) -> HubWatch:
        watch = HubWatch(self._hub, sock, READ, function)
        watch.resume()
        return watch

    def add_writer(self, sock: Any, function: Callable[[], object]) -> HubWatch:
        return HubWatch(self._hub, sock, WRITE, function)

    def new_socket(self, family: int) -> Any:
        sock = CSocket(family, SOCK_STREAM)
        sock.settimeout(0.0)
        return sock

    async def resolve(self, host: str, port: int, timeout: float) -> Sequence[tuple[Any, ...]]:
        # Only names need it: with gevent.socket it is 7 % of what the import of the client takes.
        from gevent.resolver.thread import Resolver as ThreadResolver

        if isinstance(self._hub.resolver, ThreadResolver):  # gevent's default
            return await self._names.resolve(self, host, port, timeout)
        from gevent.socket import getaddrinfo

        found: Sequence[tuple[Any, ...]]
        with Timeout(timeout, TimeoutError(f"{host} was not resolved within {timeout:.2g} s")):
            found = getaddrinfo(host, port, 0, SOCK_STREAM)
        return found

    def waiter(self) -> AsyncResult[Any]:
        return AsyncResult()

    async def wait(self, waiter: Any, timeout: float | None = None) -> Any:
        # Not by the limit of get: it would raise gevent's Timeout, which is no Exception.
        if not waiter.ready() and timeout is not None:
            waiter.wait(timeout)
            if not waiter.ready():
                raise TimeoutError(f"nothing came within {timeout:.3g} s")
        return waiter.get()

    async def sleep(self, seconds: float) -> None:
        sleep(seconds)

    async def call_blocking(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)

    def supervisor(self, log: logging.Logger, on_fault: Callable[[NsqError], object] | None = None) -> HubSupervisor:
        return HubSupervisor(log, on_fault)

    def report(self, name: str, fault: BaseException, consequence: str) -> None:
        _reporter.report(name, fault, consequence)

    def owner(self) -> OwnerThread:
        return OwnerThread()

    def may_wait(self) -> bool:
        return getcurrent() is not self._hub


_loops: WeakKeyDictionary[Any, GeventLoop] = WeakKeyDictionary()


def let_go_of_all(hub: object) -> None:
    """A hub runs no more: let go of its sockets, so that servers deliver elsewhere what they have sent."""
    for transport in known(Transport):
        if isinstance(transport.loop, GeventLoop) and transport.loop.is_of(hub):
            transport.forked()
    for connection in known(Connection):  # a timer that is stopped after its loop is gone ends the process
        if isinstance(connection.loop, GeventLoop) and connection.loop.is_of(hub):
            connection.forked()
