"""The port: all that the client asks of a loop, which is gevent's hub or asyncio's.

Data goes by callbacks: a loop says that a socket is readable, and what came is handed on from there. Sequences (to
connect, to shake hands, to wait for an end) are ``async def``, and wait at the leaves below only. On asyncio these are
native; on gevent they block the calling greenlet instead, so that ``gevent_loop.run`` takes a sequence to its end with
a single ``send(None)``. The same source serves both, and nothing else here imports either (tests/test_layering.py).

All times are seconds of ``time.monotonic()``.
"""

from __future__ import annotations

import logging
import os
from _socket import SOCK_STREAM, getaddrinfo  # which monkey.patch_all leaves as they are
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

from msgspec import UNSET, UnsetType

from nsq_fast._lazy import get_original
from nsq_fast.errors import ConfigError, InternalError, NsqError, TypeInvalid, counted, printable
from nsq_fast.log_events import INTERNAL_ERROR, PUBLISHES_UNCONFIRMED

T = TypeVar("T")
SLICE = 0.005
"""Seconds that one worker, or greenlet, after the other may use before timers and sockets have their turn."""

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 10.0
GOOD_AFTER = 10.0
"""Seconds, of RestartPauses. What ran so long was well; the pause after it is the first one again."""


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Do not make it. Idempotent."""


class Watch(Protocol):
    """Calls a function whenever a socket is ready, again and again while it stays so."""

    def pause(self) -> None:
        """Do not call it for now. Idempotent."""

    def resume(self) -> None:
        """Call it again. Idempotent."""

    def close(self) -> None:
        """Never call it again. Before the socket is closed. Idempotent."""


class Waiter(Protocol):
    """What one sequence waits for, by ``Loop.wait``."""

    def set(self, value: Any) -> object:
        """End the wait. Once."""

    def set_exception(self, error: BaseException) -> object:
        """End the wait with an error. Once."""

    def ready(self) -> bool:
        """Whether it was set."""


class Task(Protocol):
    """A sequence that runs on its own."""

    def cancel(self) -> None:
        """End it where it waits. Returns at once. Idempotent; in the task itself it does nothing."""

    def ready(self) -> bool:
        """Whether it has ended."""

    def is_current(self) -> bool:
        """Whether the caller runs in it."""

    async def join(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, ``timeout`` seconds at most; whether it has."""


class Supervisor(Protocol):
    """Runs the sequences of one owner, none of which ends unseen: an unexpected exception is logged and reported.

    Expected failures (a lost connection, a refused command) are for the sequence to handle. What arrives here is a
    defect of nsq_fast.
    """

    def job(self, name: str, sequence: Callable[..., Coroutine[Any, Any, object]], *arguments: Any) -> Task:
        """Run ``sequence(*arguments)`` once, from the next turn of the loop on."""

    def keep(self, name: str, sequence: Callable[[], Coroutine[Any, Any, object]]) -> Task:
        """Run ``sequence()`` until it returns: when it raises it begins again, after a pause that grows."""

    def report(self, name: str, fault: BaseException, consequence: str) -> None:
        """Log a fault with its stack, and hand it to the owner. ``consequence`` says what happens now."""


class Owner(Protocol):
    """The thread that a thing of the loop belongs to from ``claim`` on. ``OwnerThread`` is gevent's."""

    ident: int

    def claim(self) -> None:
        """Belong to the calling thread."""

    def check(self, call: str) -> None:
        """Raise WrongThread in another thread; ``call`` names what was called."""

    @property
    def takes_calls(self) -> bool:
        """Whether the calling thread, which is another one, may ``hand_over`` calls."""

    def hand_over(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the owner call ``function`` soon."""


class Loop(Protocol):
    """One loop, used in its own thread.

    Attributes:
        reads_all: whether a reader has to read until nothing is left. libuv, below uvloop and gevent's other loop,
            stops watching a socket that has an error, a reset say, and calls once more: who leaves that behind some
            bytes is never called again (libuv: src/unix/poll.c, uv__poll_io).
    """

    reads_all: bool

    def at_end_of_turn(self, function: Callable[[], object]) -> None:
        """Call ``function`` before the loop waits for anything: what is written in one turn leaves together."""

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> object:
        """Call ``function`` after the caller has given way."""

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: Any) -> Timer:
        """Call ``function`` then, after what sockets have brought until then.

        After a time in which the loop did not run, a peer that sent something meanwhile must not look silent.
        """

    def add_reader(self, sock: Any, function: Callable[[], object]) -> Watch:
        """Call ``function`` whenever ``sock`` has something to read, or has ended."""

    def add_writer(self, sock: Any, function: Callable[[], object]) -> Watch:
        """Call ``function`` whenever ``sock`` takes bytes. It begins paused."""

    def new_socket(self, family: int) -> Any:
        """A TCP socket that does not block."""

    async def resolve(self, host: str, port: int, timeout: float) -> Sequence[tuple[Any, ...]]:
        """What ``getaddrinfo`` says for TCP. Raises OSError, TimeoutError."""

    def waiter(self) -> Waiter:
        """A new one."""

    async def wait(self, waiter: Waiter, timeout: float | None = None) -> Any:
        """Its value, or its error raised; TimeoutError after ``timeout`` seconds."""

    async def sleep(self, seconds: float) -> None:
        """Let others run, for so long. With 0 until their turn is over."""

    async def call_blocking(self, function: Callable[..., T], *arguments: Any) -> T:
        """What ``function``, which may wait in its own way, returns; on asyncio it is called in another thread."""

    def supervisor(self, log: logging.Logger, on_fault: Callable[[NsqError], object] | None = None) -> Supervisor:
        """A new one. ``on_fault`` is called with an InternalError whose cause is the fault; it must not block."""

    def get_ident(self) -> int:
        """The number of the calling native thread."""

    def owner(self) -> Owner:
        """A new one, of nobody yet."""

    def tell_forks(self, thing: Any) -> None:
        """Call ``thing.forked()`` in every child of a fork while it lives, if the loop goes on there."""

    def may_wait(self) -> bool:
        """Whether the caller may wait, and is no callback of the loop."""

    def report(self, name: str, fault: BaseException, consequence: str) -> None:
        """Log a defect of nsq_fast in a callback, with its stack. ``consequence`` says what happens now."""


class Event:
    """Something that sequences wait for, any number of them, until it is set."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiters: list[Waiter] = []
        self.is_set: bool = False

    def set(self) -> None:
        """Let all who wait go on, and those who will."""
        self.is_set = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.ready():
                waiter.set(None)

    def clear(self) -> None:
        """Have those who come wait."""
        self.is_set = False

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, ``timeout`` seconds at most; whether it is."""
        if self.is_set:
            return True
        waiter = self._loop.waiter()
        self._waiters.append(waiter)
        try:
            await self._loop.wait(waiter, timeout)
        except TimeoutError:
            return self.is_set
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        return True


class FaultReporter:
    """Reports the faults of what one owner has running: base of the supervisors of both loops.

    Args:
        log: gets each fault, with its stack.
        on_fault: called with an InternalError whose cause is the fault; must not block. None: the log is enough.
    """

    def __init__(self, log: logging.Logger, on_fault: Callable[[NsqError], object] | None = None) -> None:
        self._log = log
        self._on_fault = on_fault

    def report(self, name: str, fault: BaseException, consequence: str) -> None:
        """Log a fault and hand it to ``on_fault``. ``consequence`` says what happens now."""
        text = f"nsq_fast itself failed in {name}: {printable(repr(fault))}; {consequence}"
        self._log.error("%s", text, exc_info=fault, extra=INTERNAL_ERROR)
        if self._on_fault is None:
            return
        error = InternalError(text)
        error.__cause__ = fault
        try:
            self._on_fault(error)
        except Exception:  # a receiver must not end what is supervised
            self._log.exception("%s: on_fault failed", name, extra=INTERNAL_ERROR)


class RestartPauses:
    """How long what has failed waits before it begins again: twice as long each time."""

    def __init__(self) -> None:
        self._next = FIRST_PAUSE

    def after(self, seconds: float) -> float:
        """The pause, in seconds, after it ran for so many."""
        pause = FIRST_PAUSE if seconds >= GOOD_AFTER else self._next
        self._next = min(2 * pause, LONGEST_PAUSE)
        return pause


class Changes(Event):
    """Wakes those who wait for a condition whenever something happened that may bear on it."""

    async def wait_while(self, condition: Callable[[], bool], deadline: float | None = None) -> bool:
        """Wait until ``condition`` no longer holds; False if it still does at ``deadline`` (monotonic)."""
        while condition():
            timeout = None if deadline is None else deadline - monotonic()
            if timeout is not None and timeout <= 0.0:
                return False
            await self.next(timeout)
        return True

    async def next(self, timeout: float | None = None) -> None:
        """Wait for the next ``set``, for ``timeout`` seconds at most."""
        self.clear()
        await self.wait(timeout)


class Repeated:
    """Something that is looked at soon after it was asked for, and again when the last look said so.

    Args:
        look: called in the loop, must not block; returns after how many seconds to look again, None for not by itself.
            When it raises, that is reported, and it is called again after a pause that grows.
    """

    def __init__(self, name: str, look: Callable[[float], float | None]) -> None:
        self._name = name
        self._look = look
        self._loop: Loop | None = None
        self._supervisor: Supervisor | None = None
        self._timer: Timer | None = None
        self._is_asked = False
        self._pauses = RestartPauses()
        self._began = 0.0

    def start(self, loop: Loop, supervisor: Supervisor, after: float | None = None) -> None:
        """Look, in the next turn of the loop, or in ``after`` seconds."""
        self._loop, self._supervisor = loop, supervisor
        self._began = monotonic()
        if after is None:
            self.ask()
        else:
            self._cancel()
            self._timer = loop.call_later(after, self._run)

    def stop(self) -> None:
        """Look no more. Idempotent."""
        self._loop = None
        self._cancel()

    def ask(self) -> None:
        """Look soon. Without effect before ``start`` and after ``stop``."""
        if self._loop is not None and not self._is_asked:
            self._is_asked = True
            self._loop.call_soon(self._run)

    def _cancel(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _run(self) -> None:
        self._is_asked = False
        self._cancel()
        if self._loop is None:
            return
        try:
            pause = self._look(monotonic())
        except Exception as fault:
            now = monotonic()
            pause, self._began = self._pauses.after(now - self._began), now
            assert self._supervisor is not None
            self._supervisor.report(self._name, fault, f"it is looked at again in {pause:.3g} s")
        if pause is not None and self._loop is not None and not self._is_asked:
            self._timer = self._loop.call_later(pause, self._run)


def refuse_copies(client: object, protocol: object) -> NoReturn:
    """As ``__reduce_ex__``, which ``copy`` and ``pickle`` call: what was copied would share the connections."""
    raise TypeInvalid(
        f"{client!r} can be neither copied nor pickled: make another one there; a child of a fork has its own"
    )


EndTimeout: TypeAlias = float | UnsetType | None
"""Of the close of a consumer: seconds, None for ever, UNSET what its option ``close_timeout`` says."""


def check_close_timeout(timeout: object) -> None:
    """As ``check_end_timeout``, where it may be left to the option."""
    if timeout is not UNSET:
        check_end_timeout(timeout)


def check_end_timeout(timeout: object) -> None:
    """Raise ConfigError unless it is one of ``close`` or ``join``: seconds, or None. With 0 nothing is waited for."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ConfigError(f"timeout={timeout!r}: must be a number of seconds, 0 or more, or None")


EXIT_TIMEOUT = 2.0
"""Seconds that the end of the interpreter may wait for what is pending of clients that nobody closed."""


def tell_unconfirmed(log: logging.Logger, count: int) -> None:
    """The interpreter ends: say in one line how many publishes were not confirmed, if there are any."""
    if count:
        log.warning(
            "the interpreter ended before the confirmation of %s: it is unknown whether that is stored."
            " Call close() of the producer, which waits for it",
            counted(count, "publish", "publishes"), extra=PUBLISHES_UNCONFIRMED,
        )  # fmt: skip


# Host names become addresses in native threads, and a fork waits for those that are being looked up.
#
# libc's resolver works under locks of its own. A child of a fork has copies of them, but not the thread that would
# release them: fork in the middle of a lookup, and no lookup of the child ever returns. Seen with glibc 2.36 in 4 of
# 1,180 programs that forked within milliseconds of starting a producer whose nsqd was given by name.


FORK_PATIENCE = 2.0
"""Seconds that a fork waits at most. A name server that does not answer would hold it for longer."""


def look_up(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    """What ``getaddrinfo`` says for TCP. It blocks the calling thread, which should be one that is there for that."""
    ended = _new_lock()
    ended.acquire()
    with _gate:
        _running.add(ended)
    try:
        return getaddrinfo(host, port, 0, SOCK_STREAM)
    finally:
        _running.discard(ended)
        ended.release()


class Names:
    """Looks host names up, each in a native thread of its own, which all who ask for it meanwhile share.

    The threads of a pool would do for names that are answered. Those that no name server answers would keep them all:
    then no other name is found, the program's own work in the pool waits, and its end waits for them.

    Args:
        hand_over: has the loop's thread call a function.

    Who makes it has it told of forks.
    """

    def __init__(self, hand_over: Callable[..., object]) -> None:
        self._hand_over = hand_over
        self._asking: dict[tuple[str, int], list[Waiter]] = {}

    async def resolve(self, loop: Any, host: str, port: int, timeout: float) -> Sequence[tuple[Any, ...]]:
        """See ``Loop.resolve``."""
        waiters = self._asking.get((host, port))
        if waiters is None:
            try:
                _start_thread(self._ask, (host, port))
            except RuntimeError as error:  # the system has no more threads: for callers it is as if the resolver failed
                raise OSError(f"{host} cannot be resolved: {error}") from error
            waiters = self._asking[host, port] = []
        waiter = loop.waiter()
        waiters.append(waiter)
        try:
            found: Sequence[tuple[Any, ...]] = await loop.wait(waiter, timeout)
        except TimeoutError:
            raise TimeoutError(f"{host} was not resolved within {timeout:.2g} s") from None
        finally:
            waiters.remove(waiter)
        return found

    def _ask(self, host: str, port: int) -> None:
        found: Sequence[tuple[Any, ...]] = ()
        error: Exception | None = None
        try:
            found = look_up(host, port)
        except Exception as caught:
            error = caught
        with suppress(Exception):  # the loop has ended
            self._hand_over(self._answered, host, port, found, error)

    def _answered(self, host: str, port: int, found: Sequence[tuple[Any, ...]], error: Exception | None) -> None:
        for waiter in self._asking.pop((host, port), ()):
            if not waiter.ready():
                waiter.set(found) if error is None else waiter.set_exception(error)

    def forked(self) -> None:
        """The threads are the parent's."""
        self._asking.clear()


def _before_fork() -> None:
    _gate.acquire()  # from here on, none begins
    deadline = monotonic() + FORK_PATIENCE
    for ended in tuple(_running):
        ended.acquire(timeout=max(0.0, deadline - monotonic()))


def _after_fork() -> None:
    _gate.release()


def _after_fork_in_child() -> None:
    _running.clear()  # no thread of the child works at them
    _gate.release()


_new_lock = get_original("_thread", "allocate_lock")
_start_thread = get_original("_thread", "start_new_thread")
_gate = _new_lock()
_running: set[Any] = set()
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
