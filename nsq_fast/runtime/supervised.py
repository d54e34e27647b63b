"""Supervised greenlets: an unexpected exception is logged and reported, and what the greenlet does goes on.

A ``Loop`` runs for as long as its owner; when its body raises, the body begins
again after a pause that grows. A ``Job`` does one piece of work; when it raises,
that is logged. No other module of ``runtime/`` makes greenlets, so none can die
unseen (``tests/runtime/test_runtime_supervised.py``).

Expected failures (a lost connection, a refused command) are for the body to
handle. What arrives here is a defect of nsq_fast, whose effects are unknown: the
body must leave its owner in a state from which it can begin again.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from gevent import Timeout, getcurrent, killall, sleep

from nsq_fast.client.loop import FaultReporter, RestartPauses

from .fork import Greenlet

# A Timeout is no Exception in gevent. One that gets so far was not caught by whoever started it.
FAULTS = (Exception, Timeout)

if TYPE_CHECKING:
    _Greenlet = Greenlet[..., Any]
else:
    _Greenlet = Greenlet


class Supervisor(FaultReporter):
    """Makes the greenlets of one owner, and reports their faults."""

    def loop(self, name: str, body: Callable[[], object]) -> Loop:
        """A greenlet, not started yet, that calls ``body()`` until it returns."""
        return Loop(self, name, body)

    def job(self, name: str, function: Callable[..., object], *args: Any) -> Job:
        """A greenlet, not started yet, that calls ``function(*args)`` once; its ``value`` is None after a fault."""
        return Job(self, name, function, *args)


class Loop(_Greenlet):
    """A supervised greenlet that runs for as long as its owner. Made by ``Supervisor.loop``.

    Attributes:
        runs_handlers: whether code of the program runs in it, which may wait for what it likes.
    """

    runs_handlers = False

    def __init__(self, supervisor: Supervisor, name: str, body: Callable[[], object]) -> None:
        super().__init__()
        self.name = name
        self.supervisor = supervisor
        self.body = body

    def _run(self) -> None:
        pauses = RestartPauses()
        while True:
            began = monotonic()
            try:
                self.body()
            except FAULTS as fault:
                pause = pauses.after(monotonic() - began)
                self.supervisor.report(self.name, fault, f"it begins again in {pause:.3g} s")
            else:
                return
            sleep(pause)


class Job(_Greenlet):
    """A supervised greenlet that does one thing and ends. Made by ``Supervisor.job``."""

    runs_handlers = False

    def __init__(self, supervisor: Supervisor, name: str, function: Callable[..., object], *args: Any) -> None:
        super().__init__()
        self.name = name
        self.supervisor = supervisor
        self.function = function
        self.arguments = args

    def _run(self) -> object:
        try:
            return self.function(*self.arguments)
        except FAULTS as fault:
            self.supervisor.report(self.name, fault, "it is not tried again")
            return None


class JobGroup:
    """Jobs of one owner that end with it, if not before."""

    def __init__(self, supervisor: Supervisor, name: str) -> None:
        self._supervisor = supervisor
        self._name = name
        self._jobs: set[Job] = set()

    def start(self, function: Callable[..., object], *args: Any) -> Job:
        """Run ``function(*args)`` in a job, which is named after both."""
        job = self._supervisor.job(f"{self._name} {function.__name__}", function, *args)
        self._jobs.add(job)
        job.rawlink(self._jobs.discard)
        job.start()
        return job

    def kill(self) -> None:
        """End all jobs but the calling one. Does not wait for that."""
        jobs = [job for job in self._jobs if job is not getcurrent()]
        self._jobs.clear()
        killall(jobs, block=False)
