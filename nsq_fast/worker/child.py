"""One process of a worker: `python -m nsq_fast.worker.child DESCRIPTOR`, started by the supervisor and by nobody else.

It is a fresh interpreter. The main thread has the hub of gevent, in which the consumers of greenlets run; those of
threads have the hub thread, those of asyncio a loop on a thread of its own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from time import monotonic
from typing import Any

from gevent import get_hub, joinall, sleep, spawn
from gevent import signal_handler as on_signal
from gevent.event import Event

from nsq_fast.errors import NsqError
from nsq_fast.log_events import CONSUMER_FAILED, WORKER_CONSUMER_CLOSED, WORKER_DRAINING, WORKER_PROGRAM_FAILED
from nsq_fast.printable import printable

from .event_loop import EventLoop
from .link import Link
from .logs import write_logs
from .program import Running, load, of_program
from .reports import WRONG_PROGRAM, ConsumerReport, Family, Phase, Report
from .task import Task, unpack

logger = logging.getLogger("nsq_fast.worker")

_BEAT = 1.0


class Child:
    """The process."""

    def __init__(self, link: Link, task: Task) -> None:
        self._link = link
        self._task = task
        self._running: list[Running] = []
        self._metrics: Any = None
        self._loop: EventLoop | None = None
        self._phase = Phase.STARTING
        self._failure = ""
        self._stopping = Event()
        self._is_consuming = False
        self._beat = monotonic()

    def run(self) -> int:
        """Run until it is asked to end, or a consumer ends by itself; return the exit code."""
        waker: Any = get_hub().loop.async_()
        waker.start(self._stopping.set)
        self._link.report = self._report
        self._link.start(self._task.settings.worker.drain_timeout, lambda: self._asked_to_drain(waker))
        on_signal(signal.SIGTERM, self._stopping.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
        try:
            self._load()
            self._start()
        except Exception as error:
            self._failed_to_start(error)
            return WRONG_PROGRAM
        self._phase = Phase.RUNNING
        self._link.send()
        spawn(self._beat_on)
        self._stopping.wait()
        self._drain()
        return 1 if self._failure else 0

    def _asked_to_drain(self, waker: Any) -> None:
        """In the link's thread. A program that is being imported holds no message, and may take long."""
        if not self._is_consuming:
            os._exit(0)
        waker.send()

    def _load(self) -> None:
        self._running = load(self._task.target, self._task.folder, self._task.settings)
        self._metrics = _collected(self._running)

    def _start(self) -> None:
        self._is_consuming = True
        in_loop = [each.consumer for each in self._running if each.place == "asyncio"]
        for running in self._running:
            if running.place != "asyncio":
                running.consumer.start(block=False)
                spawn(self._watch, running)
        if in_loop:
            waker: Any = get_hub().loop.async_()
            waker.start(self._stopping.set)
            self._loop = EventLoop(in_loop, lambda error: self._ended_by_itself("a consumer of asyncio", error, waker))
            self._loop.start()

    def _failed_to_start(self, error: Exception) -> None:
        self._failure = printable(f"{type(error).__name__}: {error}")
        if not isinstance(error, NsqError):  # all of such an error is in what the supervisor says of this process
            shown = of_program(error)
            logger.error("%s cannot be run", self._task.target, exc_info=shown, extra=WORKER_PROGRAM_FAILED)
        self._link.send()

    # Running

    def _watch(self, running: Running) -> None:
        error: Exception | None = None
        try:
            running.consumer.join()
        except Exception as failure:
            error = failure
        if self._phase is not Phase.DRAINING:
            self._ended_by_itself(running.name, error, None)

    def _ended_by_itself(self, name: str, error: BaseException | None, waker: Any) -> None:
        """A consumer has closed: a new process takes the place of this one, after the others have been drained."""
        if self._phase is Phase.DRAINING:
            return
        self._failure = f"{name} has closed: {printable(str(error)) if error else 'the program closed it'}"
        logger.error("%s; the process ends", self._failure, extra=CONSUMER_FAILED)
        if waker is None:
            self._stopping.set()
        else:
            waker.send()

    def _beat_on(self) -> None:
        while True:
            self._beat = monotonic()
            sleep(_BEAT)

    def _report(self) -> Report:
        """In any thread."""
        beats = [self._beat, *([self._loop.beat] if self._loop is not None else [])]
        return Report(
            phase=self._phase,
            loop_age=monotonic() - min(beats) if self._phase is Phase.RUNNING else 0.0,
            consumers=[_consumer_report(each) for each in self._running] if self._phase is not Phase.STARTING else [],
            metrics=_families(self._metrics),
            failure=self._failure,
        )

    # Ending

    def _drain(self) -> None:
        timeout = self._task.settings.worker.drain_timeout
        self._phase = Phase.DRAINING
        self._link.expect_end()
        self._link.send()
        logger.info("draining for %g s at most", timeout, extra=WORKER_DRAINING)
        if self._loop is not None:
            self._loop.begin_closing(timeout)
        hub = [each for each in self._running if each.place != "asyncio"]
        joinall([spawn(each.consumer.close, drain=True, timeout=timeout) for each in hub])
        if self._loop is not None:
            self._loop.wait()
        for each in self._running:
            totals = each.consumer.stats().totals
            counts = totals.finished, totals.requeued
            logger.info("%s: closed: %d finished, %d requeued", each.name, *counts, extra=WORKER_CONSUMER_CLOSED)
        self._link.send()


def _consumer_report(running: Running) -> ConsumerReport:
    stats = running.consumer.stats()
    connected = sum(each.is_connected for each in stats.connections)
    return ConsumerReport(running.name, stats.is_running, connected, len(stats.connections))


def _collected(running: Sequence[Running]) -> Any:
    """The registry where the consumers are shown, and what the program shows; None without prometheus_client."""
    try:
        from prometheus_client import REGISTRY

        from nsq_fast.metrics import ClientCollector
    except ImportError:
        return None
    collector = ClientCollector(REGISTRY)
    for each in running:
        collector.add_consumer(each.name, each.consumer)
    return REGISTRY


def _families(registry: Any) -> list[Family]:
    if registry is None:
        return []
    return [
        Family(each.name, each.documentation, each.type, [(s.name, s.labels, s.value) for s in each.samples])
        for each in registry.collect()
    ]


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
    link = Link(int(sys.argv[1]))
    task = unpack(link.read)
    sys.argv = [task.target]
    write_logs(task.settings.worker)
    return _check(task) if task.is_check else Child(link, task).run()


if __name__ == "__main__":
    sys.exit(main())
