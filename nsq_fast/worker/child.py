"""One process of a worker: `python -m nsq_fast.worker.child DESCRIPTOR`, started by the supervisor and by nobody else.

It is a fresh interpreter. The main thread has the hub of gevent, in which the consumers of greenlets run; those of
threads have the hub thread, those of asyncio a loop on a thread of its own. The supervisor's socket has a native thread
too, so that a blocked loop keeps no report from being sent.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count
from select import POLLIN
from time import monotonic
from typing import Any, NamedTuple

from gevent import get_hub, joinall, sleep, spawn
from gevent import signal_handler as on_signal
from gevent.event import Event

from nsq_fast import aio, threads
from nsq_fast._lazy import get_logger, get_original
from nsq_fast.bridge import Reply
from nsq_fast.consumer import Consumer
from nsq_fast.errors import ConfigError, NsqError, printable
from nsq_fast.log_events import (
    CONSUMER_FAILED,
    METRICS_FAILED,
    WORKER_CONSUMER_CLOSED,
    WORKER_DRAINING,
    WORKER_OPTIONS_UNUSED,
    WORKER_PROGRAM_FAILED,
)

from .health import (
    DRAIN,
    EXIT_GRACE,
    REPORT_INTERVAL,
    SCRAPE,
    UNFINISHED,
    WRONG_PROGRAM,
    ConsumerReport,
    Phase,
    Report,
    Stall,
)
from .settings import Settings, Subscription, Task, declared, write_logs

_start_thread = get_original("_thread", "start_new_thread")
_poll = get_original("select", "poll")
_new_lock = get_original("_thread", "allocate_lock")


class Link:
    """The socket, as a file descriptor.

    Args:
        report: makes the report of now, with metrics or without; called in any thread.
        ask_to_drain: called in the link's thread, once, when the supervisor says so or has gone; whichever way it goes,
            the process ends ``drain_timeout`` and ``EXIT_GRACE`` later.
    """

    def __init__(
        self,
        descriptor: int,
        drain_timeout: float,
        report: Callable[[bool], Report],
        ask_to_drain: Callable[[], object],
    ) -> None:
        self._descriptor = descriptor
        self._drain_timeout = drain_timeout
        self._report = report
        self._ask_to_drain: Callable[[], object] | None = ask_to_drain
        self._lock = _new_lock()
        self._exit_at: float | None = None
        self._is_supervised = True

    def start(self) -> None:
        """Begin to report and to listen."""
        _start_thread(self._run, ())

    def expect_end(self) -> None:
        """The process drains: it ends in time, whatever its handlers do."""
        if self._exit_at is None:
            self._exit_at = monotonic() + self._drain_timeout + EXIT_GRACE

    def send(self, with_metrics: bool = False) -> None:
        """Report now. In any thread."""
        with self._lock:  # from when it is made until it is sent: a later report is never followed by an earlier one
            try:
                line = self._report(with_metrics).line()
            except Exception:  # when the interpreter ends, nothing can be asked; a missing report is noticed
                return
            try:
                while line and self._is_supervised:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:  # the supervisor has gone
                self._is_supervised = False

    # In its thread

    def _run(self) -> None:
        is_asked = False
        while True:
            self.send(is_asked)
            is_asked = self._listen()
            if self._exit_at is not None and monotonic() > self._exit_at:
                self.send(with_metrics=True)
                os.set_blocking(2, False)
                with suppress(OSError):  # nobody reads it: the supervisor has gone
                    os.write(2, b"nsq_fast.worker: handlers have not finished in time: the process ends without them\n")
                os._exit(UNFINISHED)

    def _listen(self) -> bool:
        """Whether the next report is to have metrics."""
        waiting, said = _poll(), b""
        if self._is_supervised:
            waiting.register(self._descriptor, POLLIN)
        if waiting.poll(1000 * REPORT_INTERVAL):
            with suppress(OSError):
                said = os.read(self._descriptor, 65536)
            self._is_supervised &= bool(said)
            if (not said or DRAIN in said) and self._ask_to_drain is not None:
                self.expect_end()
                self._ask_to_drain()
                self._ask_to_drain = None
        return SCRAPE in said


logger: logging.Logger = get_logger("nsq_fast.worker")

KINDS: dict[str, Any] = {"gevent": Consumer, "threads": threads.Consumer, "asyncio": aio.Consumer}
"""Of consumers, by where their handlers run."""

_IMPORTING = {"nsq_fast", "importlib"}


class Running(NamedTuple):
    """A consumer of one of the three kinds, by a name that no other one of the program has."""

    name: str
    consumer: Any
    place: str


def load(target: str, folder: str, settings: Settings) -> list[Running]:
    """Import ``module`` or ``module:attribute`` from ``folder``, and make the consumers that it declares.

    An attribute is a function that was declared, a Subscription, a Consumer, several of them, or a function that
    returns such. Without one, it is all that was declared with ``subscribe``.

    Raises ConfigError, also where the module ends the program, and whatever else the module raises.
    """
    try:
        found = list(_declared(target, folder))
    except SystemExit as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{target} ends the program where it should declare what runs: sys.exit({error.code!r}) at"
            f" {at.filename}:{at.lineno}"
        ) from None
    if not found:
        raise ConfigError(
            f"{target}: there is nothing to run: declare handlers with nsq_fast.worker.subscribe, or name what is to"
            f" be run, as in {target.partition(':')[0]}:consumers"
        )
    for name in sorted(set(settings.special) - {each.name for each in declared()}):
        text = '[subscription."%s"] has no effect: the program declares nothing of that name with subscribe'
        logger.warning(text, printable(name), extra=WORKER_OPTIONS_UNUSED)
    running: dict[str, Running] = {}
    for each in found:
        consumer, place = _consumer(each, settings)
        plain = f"{consumer.topic}/{consumer.channel}"
        numbered = chain([plain], (f"{plain}#{number}" for number in count(2)))
        name = next(name for name in numbered if name not in running)
        running[name] = Running(name, consumer, place)
    return list(running.values())


def _declared(target: str, folder: str) -> Iterator[Any]:
    module_name, _, attribute = target.partition(":")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    value: Any = _imported(module_name, folder)
    if not attribute:
        yield from declared()
        return
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"{target}: {value!r} has no {part!r}")
        value = getattr(value, part)
    yield from _flat(value, target)


def _imported(name: str, folder: str) -> object:
    """The module. That it is missing itself is said with where it was looked for."""
    if not name:
        raise ConfigError("no module is named: nsq-fast run MODULE, or MODULE:ATTRIBUTE")
    if "/" in name or (name.endswith(".py") and os.path.exists(os.path.join(folder, name))):
        path = os.path.normpath(name.removesuffix(".py"))
        within, _, meant = path.rpartition("/")
        if path.startswith(("/", "..")):
            meant += f" --app-dir {within}"
        else:
            meant = path.replace("/", ".")
        raise ConfigError(f"{name} is a path: name a module, as in nsq-fast run {meant}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the program imports
        raise ConfigError(
            f"there is no module {error.name!r} in {folder}, nor where Python looks else: run it where"
            f" {error.name.replace('.', '/')}.py is, or name its folder with --app-dir"
        ) from None


def of_program(error: Exception) -> Exception:
    """An error of a program, its traceback without the calls from here that led into the program. Of one that is no
    Python at all they are all there is: the error says where."""
    at = error.__traceback__
    while at is not None and (at.tb_frame.f_globals.get("__package__") or "").partition(".")[0] in _IMPORTING:
        at = at.tb_next
    return error if at is None and not isinstance(error, SyntaxError) else error.with_traceback(at)


def _flat(value: Any, target: str, may_call: bool = True) -> Iterator[Any]:
    if isinstance(value, (Subscription, *KINDS.values())):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each, target)
    elif callable(value) and declared(value):
        yield from declared(value)
    elif callable(value) and may_call:
        yield from _flat(value(), target, may_call=False)
    else:
        raise ConfigError(
            f"{target}: {value!r} cannot be run: it must be declared with subscribe, a Consumer of nsq_fast,"
            " nsq_fast.threads or nsq_fast.aio, a list of these, or a function that returns them"
        )


def _consumer(found: Any, settings: Settings) -> tuple[Any, str]:
    if not isinstance(found, Subscription):
        return found, next(place for place, kind in KINDS.items() if isinstance(found, kind))
    place = found.place_of(settings.worker.handlers)
    handler = {"batch_handler" if found.batch else "message_handler": found.handler}
    try:
        return KINDS[place](found.topic, found.channel, **handler, **settings.options_of(found)), place
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{found.name}: {error}") from error


DEFAULT_MSG_TIMEOUT = 60.0
"""Of an nsqd, in seconds, where a consumer does not say."""


class EventLoop:
    """A loop of asyncio, on a thread of its own. Its methods belong to greenlets of the main thread.

    Args:
        on_exit: called in the thread when a handler calls sys.exit(); the loop goes on.
    """

    def __init__(self, on_exit: Callable[[BaseException], object]) -> None:
        self._on_exit = on_exit
        self._is_over = False
        begun = Reply()
        _start_thread(self._run, (begun,))
        self._loop: asyncio.AbstractEventLoop = begun.get()

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have it called there. Does not block."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Block the greenlet until the coroutine has ended there; return what it returns, raise what it raises."""
        reply = Reply()

        async def carry_out() -> None:
            try:
                reply.set(await coroutine)
            except BaseException as error:
                reply.set_exception(error)

        self.call_soon(lambda: self._loop.create_task(carry_out()))
        return reply.get()

    def end(self) -> None:
        """Cancel what the program has left running there, and end the thread."""
        self.run(self._cancel_rest())
        self._is_over = True
        self.call_soon(self._loop.stop)

    # In the thread

    def _run(self, begun: Reply) -> None:
        try:
            loop = asyncio.new_event_loop()  # here: of a program that is patched by gevent it belongs to this thread
        except Exception as error:
            begun.set_exception(error)
            return
        begun.set(loop)
        while not self._is_over:
            try:
                loop.run_forever()
            except BaseException as error:  # noqa: PERF203  # of a handler: asyncio brings it here
                self._on_exit(error)
                if not isinstance(error, (SystemExit, KeyboardInterrupt)):  # of the loop itself, which is broken
                    break
        loop.close()

    async def _cancel_rest(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


_BEAT = 1.0
"""Seconds between two turns of a loop that are noted; in each it looks at the progress of its consumers."""

_LATE = 2.0
"""Seconds after which the link looks at a consumer whose loop has not done so."""


class Child:
    def __init__(self, descriptor: int, task: Task) -> None:
        self._link = Link(descriptor, task.settings.worker.drain_timeout, self._report, self._asked_to_drain)
        self._task = task
        self._running: list[Running] = []
        self._metrics: Callable[[], str] = str
        self._stalls: dict[str, Stall] = {}
        self._event_loop: EventLoop | None = None
        self._beats: dict[str, float] = {}  # place -> when its loop last turned, monotonic
        self._phase = Phase.STARTING
        self._failure = ""
        self._stopping = Event()
        self._waker: Any = get_hub().loop.async_()  # its ``send`` sets ``_stopping`` from any thread
        self._waker.start(self._stopping.set)

    def run(self) -> int:
        """Run until it is asked to end, or a consumer ends by itself; return the exit code."""
        self._link.start()
        on_signal(signal.SIGTERM, self._stopping.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
        try:
            self._running = load(self._task.target, self._task.folder, self._task.settings)
            self._metrics = _collected(self._running)
            self._start()
        except Exception as error:
            self._failed_to_start(error)
            return WRONG_PROGRAM
        self._phase = Phase.RUNNING
        self._link.send()
        try:
            self._stopping.wait()
        except SystemExit as error:  # of a handler on gevent, whose hub has it raised in the main greenlet
            self._ended_by_itself("a consumer of gevent", error)
        self._drain()
        return 1 if self._failure else 0

    def _asked_to_drain(self) -> None:
        """In the link's thread. A program that is being imported holds no message, and may take long."""
        if not self._running:
            os._exit(0)
        self._waker.send()

    def _start(self) -> None:
        self._stalls = {each.name: Stall(each.consumer.progress) for each in self._running}
        if any(each.place == "asyncio" for each in self._running):
            self._event_loop = EventLoop(partial(self._ended_by_itself, "a consumer of asyncio"))
            self._beats["asyncio"] = monotonic()
        self._beats["gevent"] = monotonic()
        for each in self._running:
            self._call(each, "start", **({} if each.place == "asyncio" else {"block": False}))
            spawn(self._watch, each)
        spawn(self._beat_on)

    def _call(self, running: Running, name: str, **options: Any) -> Any:
        """Call what blocks; of a consumer of asyncio it does so in its loop."""
        done = getattr(running.consumer, name)(**options)
        return self._event_loop.run(done) if self._event_loop and running.place == "asyncio" else done

    def _failed_to_start(self, error: Exception) -> None:
        self._failure = printable(f"{type(error).__name__}: {error}")
        if not isinstance(error, NsqError):  # all of such an error is in what the supervisor says of this process
            shown = of_program(error)
            logger.error("%s cannot be run", self._task.target, exc_info=shown, extra=WORKER_PROGRAM_FAILED)
        self._link.send()

    # Running

    def _watch(self, running: Running) -> None:
        try:
            self._call(running, "join")
        except (Exception, asyncio.CancelledError) as error:
            self._ended_by_itself(running.name, error)
        else:
            self._ended_by_itself(running.name, None)

    def _beat_on(self) -> None:
        while True:
            self._beat("gevent")
            if self._event_loop is not None:
                self._event_loop.call_soon(self._beat, "asyncio")
            sleep(_BEAT)

    def _beat(self, place: str) -> None:
        """In the loop of a place: only there a look at its progress has a consumer ask its nsqds what waits."""
        self._beats[place] = now = monotonic()
        for each in self._running:
            if each.place == place:
                self._stalls[each.name].look(now)

    def _ended_by_itself(self, name: str, error: BaseException | None) -> None:
        """In any thread: a consumer has closed. When the others are drained, a new process takes the place of this."""
        if self._phase is Phase.DRAINING:
            return
        why = "the program closed it" if error is None else f"{type(error).__name__}: {error}"
        self._failure = f"{name} has closed: {printable(why)}"
        logger.error("%s; the process ends", self._failure, extra=CONSUMER_FAILED)
        self._waker.send()

    def _report(self, with_metrics: bool) -> Report:
        """In any thread."""
        shown = self._running if self._phase is not Phase.STARTING else []
        return Report(
            phase=self._phase,
            loop_age=monotonic() - min(self._beats.values()) if self._phase is Phase.RUNNING else 0.0,
            consumers=[self._consumer_report(each) for each in shown],
            metrics=self._metrics() if with_metrics else None,
            failure=self._failure,
        )

    def _consumer_report(self, running: Running) -> ConsumerReport:
        consumer = running.consumer
        stats = consumer.stats()
        after = self._task.settings.worker.stall_after
        if after is None:
            after = 2 * (consumer.connection_config.msg_timeout or DEFAULT_MSG_TIMEOUT)
        connected = sum(each.is_connected for each in stats.connections)
        counts = stats.totals.finished, stats.totals.requeued, stats.in_flight
        stall, now = self._stalls[running.name], monotonic()
        stall.look(now, 0.0 if running.place == "threads" else _LATE)
        stalled = stall.said(stats.totals, after, now)
        return ConsumerReport(running.name, stats.is_running, connected, len(stats.connections), *counts, stalled)

    # Ending

    def _drain(self) -> None:
        timeout = self._task.settings.worker.drain_timeout
        self._phase = Phase.DRAINING
        self._link.expect_end()
        self._link.send()
        logger.info("draining for %g s at most", timeout, extra=WORKER_DRAINING)
        closing = [spawn(self._call, each, "close", drain=True, timeout=timeout) for each in self._running]
        while not all(each.ready() for each in closing):
            with suppress(SystemExit):  # of a handler: the hub has it raised in the main greenlet
                joinall(closing)
        if self._event_loop is not None:
            self._event_loop.end()
            self._event_loop = None  # it beats no more
        for each in self._running:
            totals = each.consumer.stats().totals
            counts = totals.finished, totals.requeued
            logger.info("%s: closed: %d finished, %d requeued", each.name, *counts, extra=WORKER_CONSUMER_CLOSED)
        self._link.send(with_metrics=True)


def _collected(running: Sequence[Running]) -> Callable[[], str]:
    """What shows the consumers, and what the program shows; nothing without prometheus_client."""
    try:
        from prometheus_client import REGISTRY, generate_latest

        from nsq_fast.metrics import ClientCollector
    except ImportError:
        return str
    collector = ClientCollector.of(REGISTRY)
    for each in running:
        with suppress(ConfigError):  # the program has added it
            collector.add_consumer(each.name, each.consumer)
    text, has_failed = "", False

    def shown() -> str:
        nonlocal text, has_failed
        try:
            text, has_failed = generate_latest(REGISTRY).decode(), False
        except Exception as error:  # of a collector of the program: it would keep the process from reporting at all
            if not has_failed:
                logger.warning("the figures stay as they are until they can be read: %r", error, extra=METRICS_FAILED)
            has_failed = True
        return text

    return shown


def _check(task: Task) -> int:
    """Say what would run, and where it is wrong."""
    try:
        found = load(task.target, task.folder, task.settings)
    except Exception as error:
        sys.stderr.write(f"{task.target}: {type(error).__name__}: {error}\n")
        return WRONG_PROGRAM
    for each in found:
        sys.stdout.write(f"{each.name}: {each.place}\n")
    return 0


def main() -> int:
    """Run as the supervisor says; return the exit code."""
    for number in (signal.SIGINT, signal.SIGHUP):  # they come from a terminal to all processes: the supervisor acts
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGHUP))
    descriptor = int(sys.argv[1])
    task: Task = pickle.load(sys.stdin.buffer)
    sys.argv = [task.target]
    write_logs(task.settings.worker)
    return _check(task) if task.is_check else Child(descriptor, task).run()


if __name__ == "__main__":
    sys.exit(main())
