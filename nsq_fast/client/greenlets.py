"""Greenlets of ours: in which thread they live, what a fork makes of them, which of them may wait, and for how long.

Four things that gevent leaves to its users:

- **Forks.** gevent lets greenlets survive a fork, and the kernel lets file descriptors: without ``tell_forks`` the
  child would go on with the parent's conversations. Each socket is closed in the child before it runs anything (which
  the parent and the server do not notice), our greenlets and timers end, and Consumer and Producer begin anew. All of
  it happens at the fork; messages and publishes are not checked for anything.
- **Threads.** gevent's parts belong to the hub of the thread in which they were made. A call from another thread would
  do half of what it should: ``OwnerThread`` raises WrongThread before it has done anything.
- **Faults.** Greenlets are made as ``Job`` or ``Loop`` only, so none can die unseen.
- **Turns.** ``gevent.sleep(0)`` does not reach the loop: gevent runs the callbacks that are ready, looks at the clock
  after 50 of them only, and goes on to timers and sockets when 5 ms are over (gevent: src/gevent/libev/corecext.pyx,
  loop._run_callbacks). With handlers of 20 ms that is a second. So who has kept the thread for a time slice waits in
  ``LoopTurns``: timers, sockets and what they cause come first, then those who wait, one after the other in the order
  in which they came, for a time slice together.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import current_thread
from time import monotonic, time
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from gevent import Greenlet as _Greenlet
from gevent import GreenletExit, Timeout, get_hub, getcurrent, reinit, sleep
from gevent.hub import Waiter
from greenlet import greenlet

from nsq_fast._dispatch import TurnTimes
from nsq_fast._lazy import get_original
from nsq_fast.errors import WrongThread

from .loop import SLICE, FaultReporter, RestartPauses, Supervisor
from .signals import is_emitting

T = TypeVar("T")

get_ident: Any = get_original("_thread", "get_ident")
"""The number of the native thread: what ``threading.get_ident`` returns names a greenlet after ``patch_all``."""


# Forks


_known: WeakSet[Any] = WeakSet()
# Greenlets of the program that were waiting for one of our objects: they must neither be woken nor collected, which
# would run their ``finally`` clauses in the child.
_kept: list[object] = []


def tell_forks(thing: Any) -> None:
    """Call ``thing.forked()`` in every child that is forked while ``thing`` lives, before anything else runs there.

    It must not switch to another greenlet.
    """
    _known.add(thing)


def known(kind: type[T]) -> list[T]:
    """The things of this kind that are told of forks."""
    while True:
        try:
            return [thing for thing in _known if isinstance(thing, kind)]
        except RuntimeError:  # noqa: PERF203  # another thread has added one in the middle
            continue


def keep(*parts: object) -> None:
    """In the child: hold on to what greenlets of the program may be waiting for."""
    _kept.extend(parts)


def _in_child() -> None:
    known = list(_known)
    if known:
        reinit()  # for those who fork with an os.fork that gevent has not patched; twice does no harm
        for thing in known:
            thing.forked()


os.register_at_fork(after_in_child=_in_child)


class CopyEnded(GreenletExit):
    """Raised in the copy of a greenlet that belongs to the parent."""


class _ParentsOnly(_Greenlet):  # type: ignore[type-arg]  # not subscriptable when it runs
    """A greenlet whose copy ends in the child, unless it is the one that forked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tell_forks(self)

    def forked(self) -> None:
        """In the child of a fork: end."""
        # Greenlets of other threads are not running any more: the fork left their threads behind.
        if self and self is not getcurrent() and self.parent is get_hub():
            self.kill(CopyEnded, block=False)


if TYPE_CHECKING:
    from gevent import Greenlet as Greenlet  # which is generic

    _AnyGreenlet = Greenlet[..., Any]
else:
    Greenlet = _AnyGreenlet = _ParentsOnly


# Threads

# Threads that run handlers for another one: by their number, that thread and what has it call a function.
_serving: dict[int, tuple[int, Callable[..., object]]] = {}

# Threads that take calls from every thread: by their number, what has them call a function.
_taking_calls: dict[int, Callable[..., object]] = {}


def take_calls(call: Callable[..., object]) -> None:
    """The calling thread takes calls from every thread: ``call(function, *arguments)`` has it make one soon."""
    _taking_calls[get_ident()] = call


def refuse_calls() -> None:
    """End ``take_calls``."""
    _taking_calls.pop(get_ident(), None)


def is_taking_calls() -> bool:
    """Whether the calling thread takes calls from every thread."""
    return get_ident() in _taking_calls


class OwnerThread:
    """Which thread an object belongs to, from the moment it begins to run there.

    What only reads (``stats()``, ``is_running`` and the like) is not checked: a monitoring thread may call it.

    Attributes:
        ident: of the thread; 0 while the object belongs to nobody and every thread may use it. A hot path compares
            it to ``get_ident()`` by itself.
    """

    __slots__ = ("_name", "ident")

    def __init__(self) -> None:
        self.release()

    def claim(self) -> None:
        """Belong to the calling thread from now on."""
        self.ident: int = get_ident()
        self._name = "the main thread" if get_hub().main_hub else f"thread {current_thread().name!r}"

    def release(self) -> None:
        """Belong to nobody: not started yet, or copied by a fork."""
        self.ident = 0
        self._name = ""

    def check(self, call: str) -> None:
        """Raise WrongThread when the object belongs to another thread. ``call`` is the method: ``Consumer.close()``."""
        if self.ident and get_ident() != self.ident:
            raise WrongThread(
                f"{call} was called in thread {current_thread().name!r}, but what it is called on runs in {self._name}"
                " and can only be used there; nothing was done. Use nsq_fast.threads, whose Producer and Consumer every"
                " thread may call, or nsq_fast.aio in asyncio. In a program on gevent use one for each thread, or hand"
                " the call over: hub.loop.run_callback_threadsafe(gevent.spawn, function, *arguments), where hub is"
                " what gevent.get_hub() returns in the thread in which it runs"
            )

    @contextmanager
    def served_by(self, call: Callable[..., object]) -> Iterator[None]:
        """The calling thread runs a handler for the owner meanwhile: ``call(function, *arguments)`` is made there."""
        ident = get_ident()
        _serving[ident] = self.ident, call
        try:
            yield
        finally:
            del _serving[ident]

    @property
    def is_served_here(self) -> bool:
        """Whether the calling thread runs a handler for the owner."""
        return _serving.get(get_ident(), (0, None))[0] == self.ident != 0

    @property
    def takes_calls(self) -> bool:
        """Whether the calling thread, which is another one, may ``hand_over`` calls."""
        return self.is_served_here or self.ident in _taking_calls

    def hand_over(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the owner call ``function`` soon, in order with what else the calling thread hands over."""
        call = _serving[get_ident()][1] if self.is_served_here else _taking_calls[self.ident]
        call(function, *arguments)


# Faults

# A Timeout is no Exception in gevent. One that gets so far was not caught by whoever started it.
FAULTS = (Exception, Timeout)


class Job(_AnyGreenlet):
    """A greenlet, not started yet, that calls ``function(*args)`` once; its ``value`` is None after a fault.

    An unexpected exception in it is logged and reported. Expected failures (a lost connection, a refused command) are
    for the function to handle. What arrives here is a defect of nsq_fast, whose effects are unknown: the function must
    leave its owner in a state from which it can begin again.

    Attributes:
        runs_handlers: whether code of the program runs in it, which may wait for what it likes.
    """

    runs_handlers = False

    def __init__(
        self, reporter: FaultReporter | Supervisor, name: str, function: Callable[..., object], *args: Any
    ) -> None:
        super().__init__()
        self.name = name
        self.reporter = reporter
        self.function = function
        self.arguments = args

    def _run(self) -> object:
        try:
            return self.function(*self.arguments)
        except FAULTS as fault:
            self.reporter.report(self.name, fault, "it is not tried again")
            return None


class SupervisedLoop(Job):
    """A greenlet, not started yet, that calls its function until that returns: when it raises, again after a pause that
    grows."""

    def _run(self) -> None:
        pauses = RestartPauses()
        while True:
            began = monotonic()
            try:
                self.function()
            except FAULTS as fault:
                pause = pauses.after(monotonic() - began)
                self.reporter.report(self.name, fault, f"it begins again in {pause:.3g} s")
            else:
                return
            sleep(pause)


# Who may wait for the end of something, and who can only bring it about: ``close()`` is called from anywhere, by a
# program that wants to wait, in a handler or a receiver of a signal, which ``close()`` would wait for, in a callback of
# the loop, where nothing can wait, and by handlers of the signals of Unix.


def may_wait(workers: Iterable[greenlet | None] = ()) -> bool:
    """Whether the calling greenlet may wait for an object to close, of which ``workers`` run the handlers."""
    current = getcurrent()
    return not (must_go_on() or is_emitting() or any(worker is current for worker in workers))


def must_go_on() -> bool:
    """Whether the caller interrupts the hub, or what one of our greenlets does in the background."""
    current = getcurrent()
    return current is get_hub() or (isinstance(current, Job) and not current.runs_handlers)


IN_THE_HUB = (
    "was called in a callback of gevent's hub, or in a handler of signal.signal that has interrupted the hub, where"
    " nothing can wait; {done}. Handle signals with gevent.signal_handler, whose handlers run in greenlets of their"
    " own, and use gevent.spawn in callbacks"
)
"""Of an error, after what was called. ``done``: what became of it."""


def check_can_wait(call: str, instead: str = "") -> None:
    """Raise WrongThread in the hub, where nothing can wait, before anything is done."""
    if getcurrent() is get_hub():
        raise WrongThread(f"{call} {IN_THE_HUB.format(done='nothing was done')}{instead}")


def is_interrupting() -> bool:
    """Whether the caller runs in a handler of ``signal.signal``, in the middle of whatever was interrupted by it.

    Nothing may be changed there that the interrupted code may be using; to call ``loop.run_callback`` is safe.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Python calls such a handler, and nothing else, with the frame that is interrupted.
        if frame.f_back is not None and any(value is frame.f_back for value in _arguments(frame)):
            return True
        frame = frame.f_back
    return False


def _arguments(frame: FrameType) -> Iterable[object]:
    code = frame.f_code
    values = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        values.extend(frame.f_locals.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ()))
    return values


# Waiting


class Waiters:
    """Greenlets of one hub that wait for messages. A release wakes one; who comes later looks for messages first.

    A consumer waits once for each read. A semaphore of gevent's, which serves any thread and knows limits of time,
    takes 5,000 instructions more: 2 % of all, for reads of 100 messages (bench/instructions.py).
    """

    __slots__ = ("_run_callback", "_waiting")

    def __init__(self) -> None:
        self._run_callback = get_hub().loop.run_callback
        self._waiting: deque[Waiter[Any]] = deque()

    def release(self) -> None:
        """Let one go on, soon."""
        if self._waiting:
            self._run_callback(self._waiting.popleft().switch, None)

    def wait(self) -> None:
        """Wait until it is one's turn."""
        waiter: Waiter[Any] = Waiter()
        self._waiting.append(waiter)
        try:
            waiter.get()
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                self.release()  # what it was woken for is for another
            raise


# Turns

LAST = -2
"""The lowest priority of libev: called after all other watchers that are ready in the same turn."""

_turns: WeakKeyDictionary[Any, LoopTurns] = WeakKeyDictionary()


def loop_turns() -> LoopTurns:
    """Those of the calling greenlet's hub."""
    hub = get_hub()
    turns = _turns.get(hub)
    if turns is None:
        turns = _turns[hub] = LoopTurns(hub.loop)
    return turns


class LoopTurns(TurnTimes):
    """The turns of one loop.

    All times are of ``time.monotonic()``. What is done in each turn is in TurnTimes, which is compiled.
    """

    _loop: Any
    _run_callback: Callable[..., Any]

    __slots__ = ("_is_armed", "_iteration", "_now", "_timer", "_waiting")

    def __init__(self, loop: Any) -> None:
        super().__init__(loop)
        self._now = loop.now
        self._timer = loop.timer(0.0, priority=LAST)
        self._iteration = -1
        self._waiting: deque[Waiter[Any]] = deque()
        self._is_armed = False

    def is_overdue(self, now: float) -> bool:
        """Whether the loop has not had its turn for a time slice."""
        return now > self.due_at and not self._has_turned(now)

    def give_way(self) -> None:
        """Let other greenlets run, and timers and sockets if they are overdue."""
        if self.is_overdue(monotonic()):
            self.wait()
        else:
            sleep(0)

    def _has_turned(self, now: float) -> bool:
        """Take note of a turn that there was meanwhile; whether that was within the last time slice."""
        iteration = self._loop.iteration
        if iteration == self._iteration:
            return False
        self._iteration = iteration
        # The loop has the time of its last turn on the wall clock, which may have been set since.
        self.began_at: float = now - max(0.0, time() - self._now())
        self.due_at: float = self.began_at + SLICE
        return bool(now <= self.due_at)

    def wait(self) -> None:
        """Let timers, sockets and other greenlets have their turn; return when it is the caller's again."""
        waiter: Waiter[Any] = Waiter()
        self._waiting.append(waiter)
        self._arm()
        try:
            waiter.get()
        finally:
            if waiter in self._waiting:  # the caller was killed
                self._waiting.remove(waiter)

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            self._timer.start(self._turned)

    def _turned(self) -> None:
        # What was read just now may have to be answered: what sends the answer is a callback that waits already.
        self._timer.stop()
        self._run_callback(self._resume)

    def _resume(self) -> None:
        """Resume those who wait, one at least, until the next turn is due."""
        self._is_armed = False
        self._iteration = self._loop.iteration
        self.began_at = monotonic()
        self.due_at = self.began_at + SLICE
        while self._waiting:
            self._waiting.popleft().switch(None)
            if self._waiting and self.is_overdue(monotonic()):
                self._arm()
                return
