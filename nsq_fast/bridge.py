"""Between threads: the hub thread, in which clients of other threads live, and native threads that run handlers.

The hub thread is a native thread of ours that runs a gevent hub, in which there are ordinary consumers and producers.
Other threads hand calls over. Those of one moment are made in one turn of the
hub, with one wake-up for them all. The hub never waits for who called it.

There is one for a process. It begins with the first client that needs it, and
ends with the interpreter; a child of a fork makes its own when it needs one.

Should it end in another way, nobody waits for it in vain: who does gets an
error, and the next call makes another thread, with clients anew.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # gevent's resolver does, and could not when the interpreter ends
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from socket import close as close_descriptor  # unlike os.close this one is never patched
from time import monotonic
from types import FrameType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from gevent import config, get_hub, getcurrent, joinall
from gevent._hub_local import get_hub_if_exists
from gevent.event import Event
from gevent.hub import Waiter

from nsq_fast._codec import Message
from nsq_fast._dispatch import InboundQueue
from nsq_fast._lazy import being_logged, get_logger, get_original
from nsq_fast.client.gevent_loop import let_go_of_all
from nsq_fast.client.greenlets import (
    Job,
    OwnerThread,
    get_ident,
    is_interrupting,
    is_taking_calls,
    must_go_on,
    refuse_calls,
    take_calls,
    tell_forks,
)
from nsq_fast.client.loop import EXIT_TIMEOUT, SLICE, FaultReporter, tell_unconfirmed
from nsq_fast.client.workers import Sample, Worker, WorkerPool, refuse_deferred, thread_frames
from nsq_fast.errors import NotRunning, WrongThread
from nsq_fast.log_events import EXIT_IGNORED, HUB_THREAD_FAILED, INTERNAL_ERROR

P = ParamSpec("P")
T = TypeVar("T")
ClientT = TypeVar("ClientT")
logger: logging.Logger = get_logger(__name__)

END_TIMEOUT = 5.0
"""Seconds that it waits then for the thread. It is left behind after that."""

LOOP_DESCRIPTORS = 8
"""As many files as a loop and its resolver may have open, or more."""

_new_lock = get_original("_thread", "allocate_lock")
_start_thread = get_original("_thread", "start_new_thread")


class Reply:
    """The result of something, or its error; set once, in any thread, and waited for in the one that made it.

    Raises WrongThread in a callback of the hub thread, which would wait for itself.

    Args:
        blocks_thread: whether to block the thread even where it runs a hub of gevent: for who holds a lock of threads,
            at which the other greenlets of the thread would block it for ever.

    Attributes:
        error: what it ended with when it did not go well.
        is_set: whether it has ended.
    """

    __slots__ = ("_lock", "_value", "_wake", "error", "is_set")

    def __init__(self, *, blocks_thread: bool = False) -> None:
        self.error: BaseException | None = None
        self._value: Any = None
        self.is_set: bool = False
        hub: Any = get_hub_if_exists()
        self._lock: Any = None  # what a thread waits for
        self._wake: Any = None  # what a greenlet waits for
        if is_taking_calls() and must_go_on():
            raise WrongThread(
                "a callback in the hub thread of nsq_fast (of a Future, for example) called what waits for that thread:"
                " it would wait for ever; nothing was done. Use publish_nowait() there, or hand the call over to a"
                " thread of yours"
            )
        if hub is None or getcurrent() is hub or blocks_thread:
            self._lock = _new_lock()
            self._lock.acquire()
        else:
            self._wake = hub.loop.async_()

    def set(self, value: Any = None) -> None:
        """It went well."""
        self._value = value
        self._set()

    def set_exception(self, error: BaseException) -> None:
        """It did not."""
        self.error = error
        self._set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it; whether it came within ``timeout`` seconds."""
        if self._lock is None:
            return self._wait_on_hub(timeout)
        # Once it is set nobody looks at the lock: whoever was interrupted between the next two lines still has it.
        if not self.is_set and self._lock.acquire(True, -1 if timeout is None else max(0.0, timeout)):
            self._lock.release()
        return self.is_set

    def get(self) -> Any:
        """Wait for it; return the value or raise the error."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._value

    def _set(self) -> None:
        self.is_set = True
        if self._lock is not None:
            self._lock.release()
        else:
            with suppress(ValueError):  # the hub there was destroyed: nobody waits any more
                self._wake.send()

    def _wait_on_hub(self, timeout: float | None) -> bool:
        hub: Any = get_hub_if_exists()
        waiter: Waiter[Any] = Waiter()
        timer = None
        self._wake.start(waiter.switch, None)
        try:
            if timeout is not None:
                timer = hub.loop.timer(max(0.0, timeout))
                timer.start(waiter.switch, None)
            if not self.is_set:  # one that is set from now on wakes the loop
                waiter.get()
        finally:
            self._wake.stop()  # not closed: who sets it may be about to use it
            if timer is not None:
                timer.stop()
                timer.close()
        return self.is_set


class HubClient(Protocol):
    """A client that lives in the hub thread. What it does there must not block, where nothing else is said."""

    def close_at_exit(self, timeout: float) -> int:
        """The interpreter ends: close, which may take ``timeout`` seconds; return how many publishes were not
        confirmed."""

    def count_unconfirmed(self) -> int:
        """How many publishes are not confirmed now. In any thread, while the hub thread is stuck."""

    def thread_ended(self, error: NotRunning) -> object:
        """The hub thread fails, and nothing comes from it any more: tell who waits."""


class HubThread:
    """The thread. Its methods belong to every thread, but for what says otherwise.

    Calls are handed over by a queue, and each of them wakes the hub: a note that it is being woken already would stay
    for ever where a handler of a Unix signal (Ctrl-C, an alarm) raises between the note and the wake-up itself.

    Raises NotRunning if it cannot begin.

    Attributes:
        calls: functions and their arguments, not called yet.
        ident: its number.
        is_over: whether it takes no calls any more: it ended, or is the parent's.
        is_stopped: whether it ended, with the interpreter.
    """

    is_over: bool
    is_stopped: bool

    def __init__(self) -> None:
        self.ident: Any = 0
        self.is_over = self.is_stopped = False
        self.calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._clients: WeakSet[Any] = WeakSet()
        self._replies: set[Reply] = set()  # that somebody waits for
        self._failure: BaseException | None = None
        self._reporter = FaultReporter(logger)
        self._ended = _new_lock()
        self._ended.acquire()
        started = _new_lock()
        started.acquire()
        try:
            _check_descriptors()
            _import_all()
        except (OSError, ImportError) as error:
            self.is_over = True
            raise NotRunning(f"the hub thread of nsq_fast cannot begin: {error!r}") from error
        _start_thread(self._run, (started.release,))
        started.acquire()  # blocks greenlets, too: another one that asks for the thread would find its lock taken
        if self._failure is not None:
            raise NotRunning(f"the hub thread of nsq_fast cannot begin: {self._failure!r}") from self._failure
        tell_forks(self)

    def submit(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the hub call ``function`` soon; it must not block. Raises NotRunning when the thread is over."""
        self.calls.append((function, arguments))
        if self.is_over:  # looked at afterwards: whoever ends the thread looks at the calls after it has said so
            raise NotRunning(
                "the thread of nsq_fast has ended: the interpreter ends, this is a child of a fork, or it has failed,"
                " of which the log tells"
            )
        try:  # noqa: SIM105  # a publish of a thread does this: suppress() costs more
            self.wake()
        except ValueError:
            pass  # it failed just now, and answers what was submitted

    def at_end_of_turn(self, function: Callable[[], object]) -> None:
        """In the hub thread: have the hub call ``function`` when it has done what it is doing now."""
        if self.is_over:  # there is no other turn
            function()
        else:
            self._run_callback(function)

    def start_job(self, function: Callable[..., object], *arguments: Any) -> Job:
        """In the hub thread: run ``function``, which may block, in a greenlet of its own."""
        name = f"nsq_fast hub {getattr(function, '__qualname__', function)}"
        job = Job(self._reporter, name, function, *arguments)
        job.runs_handlers = True  # it may wait, as whoever called for it does
        job.start()
        return job

    def call(self, function: Callable[..., T], *arguments: Any, blocks_thread: bool = False) -> T:
        """Run ``function``, which may block, in a greenlet there; return what it returns, raise what it raises.

        With ``blocks_thread`` no other greenlet of the calling thread runs meanwhile.
        """
        if get_ident() == self.ident:
            return function(*arguments)
        reply = Reply(blocks_thread=blocks_thread)
        self._replies.add(reply)  # before it is submitted: whoever ends the thread looks at them afterwards
        try:
            self.submit(self.start_job, self._answer, reply, function, arguments)
            result: T = reply.get()
        finally:
            self._replies.discard(reply)
        return result

    def call_or_begin(self, function: Callable[..., object], *arguments: Any, only_begins: bool = False) -> None:
        """As ``call``; with ``only_begins``, and where the caller must not wait, it is left to itself."""
        if only_begins or is_interrupting() or get_ident() == self.ident:
            self.submit(self.start_job, function, *arguments)
        else:
            self.call(function, *arguments)

    def adopt(self, client: HubClient) -> None:
        """Close ``client`` when the interpreter ends, and tell it if the thread fails, as long as it lives."""
        self._clients.add(client)

    def stop(self) -> None:
        """Close what nobody has closed, tell in one line what was not delivered, and end the thread."""
        if self.is_over:
            return
        reply = Reply()
        self.submit(self.start_job, self._answer, reply, self._close_clients, ())
        if reply.wait(2 * END_TIMEOUT) and reply.error is None:
            lost = reply.get()
        else:  # a callback keeps the thread, say
            lost = sum(client.count_unconfirmed() for client in list(self._clients))
        tell_unconfirmed(logger, lost)
        self.submit(self._stopping.set)
        self.is_stopped = self.is_over = True
        self._ended.acquire(timeout=END_TIMEOUT)

    def forked(self) -> None:
        """In the child of a fork: there is no such thread."""
        self.is_over = True

    # In the thread

    def _run(self, tell_started: Callable[[], None]) -> None:
        try:
            self._begin()
        except BaseException as error:
            self._failure = error
            self._ended.release()
            return
        finally:
            tell_started()
        try:
            self._serve()
        except BaseException as error:
            self._failure = error
        finally:
            self._end()

    def _begin(self) -> None:
        with suppress(Exception):  # a name for logs, and nothing more
            threading.current_thread().name = "nsq_fast hub"
        _check_descriptors()
        hub: Any = get_hub()
        hub.destroy = _refuse_to_destroy  # what is at work in the loop would go on in freed memory
        self.ident = get_ident()
        self._run_callback = hub.loop.run_callback
        self._stopping = Event()
        self._watcher = hub.loop.async_()
        self._watcher.start(self._make_calls)
        self.wake: Any = self._watcher.send
        take_calls(self.submit)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                self._stopping.wait()
            except (SystemExit, KeyboardInterrupt, SystemError) as error:  # noqa: PERF203  # gevent brings them here
                logger.error(
                    "%r of a handler or a callback ends nothing: nsq_fast goes on in its thread",
                    error,
                    extra=EXIT_IGNORED,
                )

    def _end(self) -> None:
        self.is_over = True
        refuse_calls()
        if self._failure is not None:
            self._tell_all(self._failure)
        hub: Any = get_hub()
        with suppress(Exception):  # of a hub that failed nothing is known
            # A handler in the middle of a record holds its lock, for which ``logging`` waits when the program ends.
            joinall([each for each in being_logged if each.parent is hub], timeout=END_TIMEOUT)
            let_go_of_all(hub)
            self._watcher.stop()
            self._watcher.close()
            type(hub).destroy(hub, destroy_loop=True)
        self._ended.release()

    def _tell_all(self, failure: BaseException) -> None:
        """Nobody is to wait for what this thread would have done."""
        said = f"{type(failure).__name__}: {failure}".partition("\n")[0]  # gevent's LoopExit describes its hub below
        logger.critical(
            "the hub thread of nsq_fast has ended: its clients are lost, and what they were asked for fails; the next"
            " call makes another one. It ended of %s", said, exc_info=failure, extra=HUB_THREAD_FAILED,
        )  # fmt: skip
        error = NotRunning(f"the hub thread of nsq_fast has ended of {said}; the next call makes another one")
        error.__cause__ = failure
        for reply in list(self._replies):
            _safely(reply.set_exception, error)
        for client in list(self._clients):
            _safely(client.thread_ended, error)

    def _make_calls(self) -> None:
        calls = self.calls
        try:
            while calls:
                function, arguments = calls.popleft()
                _safely(function, *arguments)
        finally:
            if calls:  # what is no Exception goes to the hub
                self._watcher.send()

    def _answer(self, reply: Reply, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        """Give ``reply`` what a function returns or raises."""
        try:
            value = function(*arguments)
        except BaseException as error:
            reply.set_exception(error)
        else:
            reply.set(value)

    def _close_clients(self) -> int:
        jobs = [self.start_job(client.close_at_exit, EXIT_TIMEOUT) for client in list(self._clients)]
        joinall(jobs, timeout=END_TIMEOUT)
        return sum(job.value or 0 for job in jobs if job.successful())


def _import_all() -> None:
    """Import what the thread would import at its first use of it.

    A fork in the middle of an import in another thread leaves the child with half a module, for good: "cannot import
    name 'ThreadPool'", "unknown encoding: idna".
    """
    for name in ("gevent.threadpool", "gevent.socket", "gevent.ssl", "stringprep"):
        import_module(name)
    config.resolver, config.threadpool, config.loop  # noqa: B018  # to read them imports what the program has chosen
    "a".encode("idna")  # the table of codecs has it from then on


def _check_descriptors() -> None:
    """Raise OSError where the process may open too few files for a loop: libev would try again for ever."""
    opened: list[int] = []
    try:
        for _ in range(LOOP_DESCRIPTORS // 2):
            opened.extend(os.pipe())
    finally:
        for descriptor in opened:
            close_descriptor(descriptor)


def _refuse_to_destroy(destroy_loop: bool | None = None) -> None:
    raise WrongThread(
        "Hub.destroy() was called in the hub thread of nsq_fast, whose hub ends with it; nothing was done"
    )


def _safely(function: Callable[..., object], *arguments: Any) -> None:
    """Make one of several calls: it must not harm the others."""
    try:
        function(*arguments)
    except Exception:
        logger.exception("nsq_fast itself failed in %r", function, extra=INTERNAL_ERROR)


_lock: Any = _new_lock()
_the_thread: HubThread | None = None


def hub_thread() -> HubThread:
    """The one of this process."""
    global _the_thread
    with _lock:
        if _the_thread is None or _the_thread.is_over:
            _the_thread = HubThread()
        return _the_thread


def arguments_of(made: Callable[Concatenate[Any, P], None]) -> Callable[[Any], Callable[Concatenate[Any, P], None]]:
    """Say that what is decorated takes the arguments of the ``__init__`` of what it makes."""

    def decorate(init: Any) -> Any:
        init.__wrapped__ = made  # for inspect.signature
        return init

    return decorate


class Place(Generic[ClientT]):
    """A client, made in the hub thread. In a child of a fork it is made again, in a thread of the child.

    It is also made again when the hub thread has failed.

    Args:
        make: called in the hub thread, with that.
        renewed: called there with what was made again, before anybody uses it; None: nothing more is to be done.
    """

    def __init__(
        self, make: Callable[[HubThread], ClientT], renewed: Callable[[ClientT], object] | None = None
    ) -> None:
        self._make = make
        self._renewed = renewed
        self.thread: HubThread = hub_thread()
        self._client = self.thread.call(make, self.thread)
        self.forked()
        tell_forks(self)

    def get(self) -> ClientT:
        """The client. ``thread`` is where it is, from then on."""
        if self._is_left_behind:
            with self._lock:  # blocks greenlets, too: who holds it must not let others of its thread run
                if self._is_left_behind:
                    thread = hub_thread()
                    self._client = thread.call(self._make_again, thread, blocks_thread=True)
                    self.thread = thread
        return self._client

    def _make_again(self, thread: HubThread) -> ClientT:
        client = self._make(thread)
        if self._renewed is not None:
            self._renewed(client)
        return client

    @property
    def _is_left_behind(self) -> bool:
        return self.thread.is_over and not self.thread.is_stopped

    def forked(self) -> None:
        """In the child of a fork: who held the lock is the parent's."""
        self._lock: Any = _new_lock()


def _before_fork() -> None:
    _lock.acquire()  # a fork in the middle of the beginning of the thread would leave half of it to the child


def _after_fork() -> None:
    _lock.release()


# The child has but the thread that forked, which is the one that holds the lock there.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


@atexit.register
def _at_exit() -> None:
    if _the_thread is not None:
        _the_thread.stop()


# Handlers on native threads, for code that blocks the thread in which it runs, and programs of threads that iterate.
#
# Everything else stays in the hub's thread. A worker greenlet hands over a ``Batch``
# of messages and waits for it; on the thread the handler is called for one message
# after the other, and the outcomes come back. So whatever follows a handler (FIN,
# REQ, giving up, signals) is done by the worker, as always.
#
# A batch may hold many messages while handlers are quick: waking up two threads
# takes longer than such a handler. After a time slice the worker takes what there
# is of outcomes, and takes back what no handler has begun with, so that neither a
# FIN nor a message waits for a handler that turns out to be slow.


LONGEST_END = 1.0
"""Seconds that idle threads get to end."""

QUICK = 0.001
"""Seconds for a whole batch below which the next one may be twice as large."""


class Batch:
    """Work to be done elsewhere, and what came of it.

    Args:
        handle: called with one item after the other, elsewhere.
        begins: called with each item before, elsewhere; it says whether the item is still to be handled.

    Attributes:
        items: what no handler has begun with; taken from the left.
        current: what a handler has begun with and not ended; None when there is none.
        outcomes: each item that was handled, with what its handler raised, or None.
        is_done: whether nothing of it runs any more.
        sample: times the handler of the first item; None: none is timed.
        ended: set then.
        thread: the number of the native thread in which it runs; 0 before.
    """

    __slots__ = ("begins", "current", "ended", "handle", "is_done", "items", "outcomes", "sample", "thread")

    def __init__(self, handle: Callable[[Any], object], begins: Callable[[Any], bool], items: deque[Any]) -> None:
        self.handle: Callable[[Any], object] = handle
        self.begins: Callable[[Any], bool] = begins
        self.items: deque[Any] = items
        self.current: Any = None
        self.outcomes: deque[tuple[Any, BaseException | None]] = deque()
        self.is_done: bool = False
        self.sample: Sample | None = None
        self.ended: Event = Event()
        self.thread: int = 0

    def take(self) -> Any:
        """Begin with the next item; None when there is none, or the others were taken back."""
        while True:
            try:
                item = self.items.popleft()
            except IndexError:
                return None
            if self.begins(item):
                self.current = item
                if self.sample is not None:
                    self.sample.begin(item)
                return item

    def end(self, outcome: BaseException | None) -> None:
        """The handler of ``current`` has ended: it raised ``outcome``, or None. Without effect when there is none."""
        item, self.current = self.current, None
        if self.sample is not None:
            self.sample.end()
        if item is not None:
            self.outcomes.append((item, outcome))


class HandlerExecutor:
    """Runs batches elsewhere. Made and used in the hub's thread, but for what says otherwise.

    A subclass has ``_begin(batch)``, which brings a batch to where it runs. There ``done(batch)`` is called at its
    end, in any thread.

    Attributes:
        max_batch: the most messages that a batch may hold.
    """

    max_batch = 64

    def __init__(self) -> None:
        self._loop = get_hub().loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_stopped = False
        self._is_copy = False
        self._is_waking = False
        self._running: set[Batch] = set()
        tell_forks(self)

    def run(self, batch: Batch, on_slow: Callable[[], object]) -> None:
        """Have a batch run elsewhere; return when it is done.

        ``on_slow`` is called when that takes longer than a time slice. Once the handlers are stopped, nothing is run.
        """
        if self._is_stopped:
            return
        self._running.add(batch)
        # There is nothing to take back of one item: no timer for each message where handlers are slow.
        patience: float | None = SLICE if len(batch.items) > 1 else None
        self._begin(batch)
        try:
            while not batch.is_done:
                if not batch.ended.wait(patience):
                    patience = None
                    on_slow()
        finally:
            self._running.discard(batch)

    def stop(self) -> None:
        """Begin with no batch any more."""
        self._is_stopped = True

    def forked(self) -> None:
        """In the child of a fork: where handlers run is the parent's."""
        self._is_stopped = self._is_copy = True

    def leave(self) -> None:
        """The hub runs no more: what ends from now on is told to nobody. Does not block."""
        self._is_stopped = self._is_copy = True

    def _begin(self, batch: Batch) -> None:
        raise NotImplementedError

    # In any thread

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the hub's thread call a function, which must not block: in the order in which it is asked to."""
        self._calls.append((function, arguments))
        if not self._is_waking and not self._is_copy:
            self._is_waking = True
            with suppress(ValueError):  # the hub was destroyed: nobody waits any more
                self._loop.run_callback_threadsafe(self._make_calls)

    def done(self, batch: Batch) -> None:
        """Nothing of the batch runs any more."""
        batch.is_done = True
        self.call(batch.ended.set)

    # In the hub's thread again

    def _make_calls(self) -> None:
        self._is_waking = False  # before the calls are looked at: none can come in between and not be seen
        while self._calls:
            function, arguments = self._calls.popleft()
            _safely(function, *arguments)


class ExecutorWorker(Worker):
    """A worker greenlet whose messages are handled elsewhere."""

    __slots__ = ("_batch", "_executor", "_size")

    def __init__(self, pool: WorkerPool, executor: HandlerExecutor) -> None:
        super().__init__(pool)
        self._executor = executor
        self._size = 1  # how many messages the next batch may hold
        self._batch: Batch | None = None

    def frames(self) -> list[FrameType]:
        batch = self._batch
        return [] if batch is None else thread_frames(batch.thread)

    def calling(self, handler: Callable[[Any, Any], object], sample: Sample | None) -> Callable[[Any, Any], object]:
        return partial(self._call, handler, sample)

    def _call(
        self, handler: Callable[[Any, Any], object], sample: Sample | None, consumer: object, item: Any
    ) -> object:
        """Have a handler called elsewhere with one message, or one list, and timed. Raises what it raises."""
        batch = self._batch = Batch(partial(handler, consumer), lambda item: True, deque((item,)))
        batch.sample = sample
        self._executor.run(batch, lambda: None)
        self._batch = None
        errors = [error for _, error in batch.outcomes]
        if not errors:
            raise NotRunning("the consumer is closed: its handlers run no more")
        if errors[0] is not None:
            raise errors[0]
        return None

    def _handle_single(self, inbound: InboundQueue, sample: Sample | None) -> None:
        """Have some messages handled elsewhere; do what follows the handlers. It is said there what is ``current``."""
        acknowledger, waiting, handed = self._acknowledger, inbound.waiting, deque[Message]()
        while waiting and len(handed) < self._size:
            message = waiting.popleft()
            if not acknowledger.is_given_up(inbound, message):
                handed.append(message)
        if not handed:
            return
        returned = acknowledger.slice_of(inbound).returned
        began = monotonic()
        handle = partial(acknowledger.present_handler(), acknowledger.consumer)
        batch = self._batch = Batch(handle, self._begins, handed)
        batch.sample = sample

        def finish_some() -> None:
            while batch.outcomes:
                message, error = batch.outcomes.popleft()
                if sample is not None:
                    sample.count()
                if error is None:
                    returned(message)
                else:
                    acknowledger.failed(message, error)

        def take_back() -> None:
            while handed:
                with suppress(IndexError):  # the thread took it just now
                    waiting.appendleft(handed.pop())
            if waiting:
                self._pool.put(inbound, len(waiting))

        def on_slow() -> None:
            take_back()
            finish_some()

        inbound.handed.append(handed)
        try:
            self._executor.run(batch, on_slow)
            finish_some()
        finally:
            self._batch = None
            inbound.handed.remove(handed)
            take_back()
        self._size = min(2 * self._size, self._executor.max_batch) if monotonic() - began < QUICK else 1

    def _begins(self, message: Message) -> bool:
        if message.has_expired() and self._acknowledger.consumer.config.drop_expired:
            return False  # it expired while it waited for a thread: nsqd has taken it back
        self.current: Message = message
        return True


class HandlerThreads(HandlerExecutor):
    """A fixed number of native threads that run batches.

    Args:
        size: how many threads.
        owner: the thread that owns what handlers may call; those calls come back to it.
    """

    def __init__(self, size: int, owner: OwnerThread) -> None:
        super().__init__()
        self._size = size
        self._owner = owner
        self._waiting: deque[Batch | None] = deque()  # None: a thread is to end
        self._count: Any = get_original("queue", "SimpleQueue")()  # as many items as are waiting
        self._ended: deque[None] = deque()
        self._all_ended = Event()
        for _ in range(size):
            _start_thread(self._serve, ())

    def stop(self) -> None:
        """End each thread after the batches that it was given; wait for that, unless handlers still run."""
        super().stop()
        self._put(*[None] * self._size)
        if not self._running:  # a program that ends now must not meet threads that are half gone
            self._all_ended.wait(LONGEST_END)

    def leave(self) -> None:
        """As of every kind of them; each thread ends after its handler."""
        super().leave()
        self._put(*[None] * self._size)

    def _begin(self, batch: Batch) -> None:
        self._put(batch)

    def _put(self, *batches: Batch | None) -> None:
        for batch in batches:
            self._waiting.append(batch)
            self._count.put(None)

    # In the native threads

    def _serve(self) -> None:
        while not self._is_copy:
            try:
                self._count.get()
            except BaseException:  # raised in the thread from outside it, as some timeouts are
                self._count.put(None)  # nothing of what waits is taken yet
                continue
            batch = self._waiting.popleft()
            if batch is None:
                break
            self._serve_batch(batch)
        hub = get_hub_if_exists()
        if hub is not None:  # a handler has used gevent here
            hub.destroy(True)
        self._ended.append(None)
        if len(self._ended) == self._size and not self._is_copy:
            with suppress(ValueError):
                self._loop.run_callback_threadsafe(self._all_ended.set)

    def _serve_batch(self, batch: Batch) -> None:
        batch.thread = get_ident()
        try:
            with self._owner.served_by(self.call):
                _run(batch)
        except BaseException as error:  # as above
            batch.end(error)
        finally:
            self.done(batch)


def _run(batch: Batch) -> None:
    """Handle one item, and more until there is none or the time slice is over."""
    end = monotonic() + SLICE
    while (item := batch.take()) is not None:
        batch.end(_outcome(batch, item))
        if monotonic() > end:
            return


def _outcome(batch: Batch, item: Any) -> BaseException | None:
    try:
        refuse_deferred(batch.handle(item))
    except BaseException as error:
        return error
    return None
