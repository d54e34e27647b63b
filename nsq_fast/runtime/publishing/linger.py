"""Gathering: publishes to one destination leave together, as one MPUB.

With ``linger`` they wait for each other: one alarm serves all destinations, it
rings ``linger`` seconds after the first publish came, and everything that
gathered leaves. With ``coalesce`` what was published in one turn of the hub
leaves at its end: nothing waits, and a hundred greenlets that were woken
together cost the server one command instead of a hundred (``nsq-fast bench
publish``). In both cases a queue leaves earlier when it makes a full command.
"""

from __future__ import annotations

from time import monotonic

from gevent import get_hub

from nsq_fast.config import ProducerConfig
from nsq_fast.runtime.supervised import FAULTS, Supervisor

from .destination import Queue
from .timers import Alarm


class Linger:
    """The queues that are held."""

    def __init__(self, config: ProducerConfig, supervisor: Supervisor) -> None:
        self._seconds = config.linger
        self._is_on = bool(config.linger or config.coalesce)
        self._supervisor = supervisor
        self._held: dict[Queue, None] = {}
        self._alarm = Alarm(self.flush, supervisor)
        self._hub = get_hub()

    def hold(self, queue: Queue) -> bool:
        """Hold a queue for what comes next, unless gathering is off; ``Queue.pump`` is called in time then."""
        if not self._is_on:
            return False
        if not self._held:
            if self._seconds:
                self._alarm.set(monotonic() + self._seconds)
            else:
                self._hub.loop.run_callback(self.flush)
        self._held[queue] = None
        return True

    def release(self, queue: Queue) -> None:
        """Hold a queue no longer: it leaves now."""
        self._held.pop(queue, None)
        if not self._held:
            self._alarm.stop()

    def flush(self) -> None:
        """Send everything now."""
        self._alarm.stop()
        held, self._held = self._held, {}
        for queue in held:
            try:
                queue.pump()
            except FAULTS as fault:  # noqa: PERF203  # what fails keeps nothing else from leaving
                self._supervisor.report("sending what gathered", fault, "the rest is sent")

    def forget(self) -> None:
        """Send nothing of what gathered."""
        self._alarm.stop()
        self._held.clear()
