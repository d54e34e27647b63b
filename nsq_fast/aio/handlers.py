"""Handlers in an event loop: coroutine functions, which run in tasks of the loop.

A worker greenlet of the hub thread hands over a batch. One task runs the handlers
of a batch, one after the other, each in a context of its own: to make a task for
each message takes longer than a handler that does not wait.

Where the number of handlers is given, more batches than that are here: a task
that is done with one goes on with the next, which need not come from another
thread first.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from time import monotonic
from types import CoroutineType
from typing import Any

from nsq_fast.errors import RequeueMessage
from nsq_fast.runtime import Batch, OutsideHandlers, Queued

from .gate import LoopGate

SLICE = 0.005
"""Seconds after which a batch ends, so that its FINs leave and others have their turn."""


class LoopHandlers(OutsideHandlers):
    """Runs batches in a loop. Made in the hub thread.

    Args:
        gate: the way into the loop.
        on_loop_end: called in the hub thread when the tasks of the loop are cancelled: it is about to end.
        width: how many batches run at once at most; None: all there are.
    """

    max_batch = 256

    def __init__(self, gate: LoopGate, on_loop_end: Callable[[], object], width: int | None) -> None:
        super().__init__()
        self.spare = 0 if width is None else (width + 1) // 2
        self._gate = gate
        self._on_loop_end = on_loop_end
        self._width = width
        self._waiting: deque[Batch] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving = 0  # tasks that look for another batch yet; each is in _tasks for a turn of the loop after that
        self._is_ending = False

    def _begin(self, batch: Batch) -> None:
        self._gate.post(self._start, batch)

    def is_running(self) -> bool:
        """Whether any handler runs. In any thread."""
        return bool(self._running)

    # In the loop

    @property
    def is_current(self) -> bool:
        """Whether the calling task runs a handler."""
        return asyncio.current_task() in self._tasks

    def _start(self, batch: Batch) -> None:
        if self._is_ending:  # what is in it is taken back
            self._done(batch)
            return
        self._waiting.append(batch)
        if self._width is None or self._serving < self._width:
            self._start_task()

    def _start_task(self) -> None:
        task = self._gate.loop.create_task(self._serve())
        self._serving += 1
        # Who closes a loop in the middle of a handler knows: the message is delivered again, and nothing is to be told.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # A handler has exited, and the loop goes on all the same.
            if task.exception() is not None and self._waiting:
                self._start_task()
            return
        self._is_ending = True  # nobody but the end of the loop cancels it
        while self._waiting:  # what is in them is taken back
            self._done(self._waiting.popleft())
        self._gate.call_hub(self._on_loop_end)

    async def _serve(self) -> None:
        try:
            while self._waiting:
                batch = self._waiting.popleft()
                try:
                    await self._run(batch)
                finally:
                    self._done(batch)
        finally:
            self._serving -= 1

    async def _run(self, batch: Batch) -> None:
        end = monotonic() + SLICE
        while (item := batch.take()) is not None:
            outcome: BaseException | None = None
            context = copy_context()
            try:
                rest = context.run(_begin, batch.handle, item)
                if rest is not None:
                    await _Rest(context, *rest)
            except Exception as error:
                outcome = error
            except BaseException as error:
                outcome = RequeueMessage(0.0, backoff=False)
                if not isinstance(error, asyncio.CancelledError) or _is_cancelled():
                    raise
                outcome = RuntimeError("something that the handler waited for was cancelled")
                outcome.__cause__ = error
            finally:
                batch.end(outcome)
            if monotonic() > end:
                return


def _is_cancelled() -> bool:
    """Whether the current task is being cancelled. Python 3.10 cannot tell: then a loop ends when it is closed."""
    task = asyncio.current_task()
    return bool(task is not None and sys.version_info >= (3, 11) and task.cancelling())


def _begin(handler: Callable[[Any], object], item: object) -> tuple[Coroutine[Any, Any, Any], Any] | None:
    """Run a handler up to where it first waits; return its coroutine and what it waits for. None: it is done."""
    result = handler(item)
    if isinstance(result, CoroutineType):
        try:
            return result, result.send(None)
        except StopIteration:
            return None
    if result is not None and inspect.isawaitable(result) and not isinstance(result, Queued):
        return _await(result), None
    return None


async def _await(result: Any) -> None:
    await result


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
