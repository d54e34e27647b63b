"""From the hub thread into an event loop: calls of one moment arrive together, with one wake-up of the loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from time import monotonic
from typing import Any, TypeVar

from nsq_fast.errors import NotRunning
from nsq_fast.runtime import HubThread, OutsideWatch

from .loop_wakeup import LoopWakeup

T = TypeVar("T")
logger = logging.getLogger(__name__)


class LoopGate:
    """The way into one loop. Made in that loop.

    Args:
        thread: the hub thread.
        name: whose gate it is, for warnings.
        on_closed: called once, in the hub thread, when the loop turns out to be closed.
        at_end_of_turn: calls a function in the hub thread at the end of its turn; that of ``thread`` by default.
    """

    def __init__(
        self,
        thread: HubThread,
        name: str,
        on_closed: Callable[[], object],
        at_end_of_turn: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread = thread
        self._name = name
        self._on_closed = on_closed
        self._at_end_of_turn = at_end_of_turn or thread.at_end_of_turn
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_asking = False
        self._is_closed = False
        self._wakeup = LoopWakeup(self.loop, self._make_calls)
        self._asked_at = 0.0
        self._watched: int | None = None
        self.is_used: Callable[[], bool] = lambda: False  # whether handlers run in the loop now
        self._watch = OutsideWatch(logger, f"the event loop of {name}", self._look)
        self._watch.start()
        thread.tell_end(self)

    def thread_ended(self, error: NotRunning) -> None:
        """In the hub thread, which fails: what it has posted is asked for now, there is no end of its turn."""
        self._watch.stop()
        if self._calls and not self._is_closed:
            self._ask()

    def close(self) -> None:
        """Nothing is to come any more."""
        self._watch.stop()
        self._wakeup.close()
        if self._watched is not None:
            self.loop.remove_reader(self._watched)
            self._watched = None

    def watch(self, descriptor: int, function: Callable[[], object]) -> None:
        """Have the loop call ``function`` whenever ``descriptor`` is readable, until ``close``."""
        self._watched = descriptor
        Context().run(self.loop.add_reader, descriptor, function)  # it is the context of no caller

    def check_loop(self, call: str) -> None:
        """Raise NotRunning in another loop than its own."""
        if asyncio.get_running_loop() is not self.loop:
            raise NotRunning(
                f"{call}: {self._name} was started in another event loop, and can only be used there; nothing was done."
                " Make one for each loop"
            )

    # In the hub thread

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the loop call ``function`` soon. Nothing happens once the loop is closed."""
        if self._is_closed:
            return
        self._calls.append((function, arguments))
        if not self._is_asking:
            self._is_asking = True
            self._at_end_of_turn(self._ask)

    def _ask(self) -> None:
        self._asked_at = monotonic()
        try:
            self._wakeup.ring()
        except RuntimeError:  # the loop is closed
            self._loop_closed()

    def _loop_closed(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._asked_at = 0.0
            self._calls.clear()
            self._watch.stop()
            self._on_closed()

    # In the thread of the watchdog

    def _look(self) -> float:
        """Since when the loop has not taken something; asks it whether it runs, where handlers may block it."""
        if self.loop.is_closed():
            self._thread.submit(self._loop_closed)
        elif not self._asked_at and self.is_used():
            self._asked_at = monotonic()
            with suppress(RuntimeError):  # it was closed just now
                self.loop.call_soon_threadsafe(self._runs)
        return self._asked_at

    # In the loop

    def _runs(self) -> None:
        self._asked_at = 0.0

    def _make_calls(self) -> None:
        self._asked_at = 0.0
        self._is_asking = False  # before the calls are looked at: none can come in between and not be seen
        calls = self._calls
        try:
            while calls:
                function, arguments = calls.popleft()
                function(*arguments)
        finally:
            if calls:  # one has raised, or the program was interrupted: the others must not wait for the next post
                self.loop.call_soon(self._make_calls)

    def call_hub(self, function: Callable[[], object]) -> None:
        """Have the hub thread call ``function`` soon; it must not block."""
        self._thread.submit(function)

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run ``function``, which may block, in the hub thread; wait for what it returns, or raise what it raises.

        Raises NotRunning in another loop than its own.
        """
        result: T = await self._called(function, *arguments).future
        return result

    async def wait(self, function: Callable[..., T], *arguments: Any) -> T:
        """As ``call``, for what does nothing but wait: it ends when the caller is cancelled."""
        promise = self._called(function, *arguments)
        try:
            result: T = await promise.future
        except asyncio.CancelledError:
            self._thread.submit(self._thread.withdraw, promise)
            raise
        return result

    def _called(self, function: Callable[..., object], *arguments: Any) -> LoopPromise:
        self.check_loop(f"{function.__name__}()")
        promise = LoopPromise(self)
        self._thread.call_later(promise, function, *arguments)
        return promise


class LoopPromise:
    """Gives a future of the loop what something in the hub thread ends with."""

    __slots__ = ("_gate", "future")

    def __init__(self, gate: LoopGate) -> None:
        self._gate = gate
        self.future: asyncio.Future[Any] = gate.loop.create_future()

    def set(self, value: Any = None) -> None:
        """It went well."""
        self._gate.post(_set, self.future, value)

    def set_here(self, value: Any) -> None:
        """It went well. In the loop."""
        _set(self.future, value)

    def set_exception(self, error: BaseException) -> None:
        """It did not."""
        self._gate.post(_set_exception, self.future, error)


def _set(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
