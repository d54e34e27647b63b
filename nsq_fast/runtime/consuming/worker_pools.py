"""The workers of a consumer: one pool that all connections share, or one for each connection."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

from greenlet import greenlet

from nsq_fast._dispatch import HandlerLimit, PromptFins
from nsq_fast.config import ConsumerConfig
from nsq_fast.runtime.owner_thread import OwnerThread

from .dispatch import CALLS_HANDLERS, Pool
from .disposition import Disposition
from .load import Workload
from .watchdog import HubWatch, watchdog

if TYPE_CHECKING:
    from .outside_handlers import OutsideHandlers


class WorkerPools:
    """Makes and ends workers.

    Args:
        workload: gets each pool, for those who ask how busy handlers are.
        limit: gives the number of handlers that may run at once.
        name: of the consumer; the names of worker greenlets begin with it.
        thread: of the consumer; native threads of handlers are served there.

    Attributes:
        shared: the pool that all connections share; None when each has its own.
        outside: where handlers run; None when they run in the worker greenlets.
        new_outside: makes that when the consumer starts; None: native threads where the options ask for them.
    """

    def __init__(
        self, disposition: Disposition, workload: Workload, limit: Callable[[], int], name: str, thread: OwnerThread
    ) -> None:
        self.shared: Pool | None = None
        self._disposition = disposition
        self._workload = workload
        self._pools = cast(list[Pool], workload.pools)
        self._limit = HandlerLimit(limit)
        self._prompt = PromptFins()
        self._name = name
        self._thread = thread
        self.outside: OutsideHandlers | None = None
        self.new_outside: Callable[[], OutsideHandlers | None] | None = None
        self._watch: HubWatch | None = None

    def start(self, config: ConsumerConfig, is_iterated: bool, log: logging.Logger) -> None:
        """Make what the options ask for; with ``is_iterated`` a pool without workers, served by who iterates.

        ``log`` gets a warning when a handler keeps the hub from running.
        """
        self._watch = HubWatch(log, CALLS_HANDLERS, lambda: self._workload.is_handling, is_iterated=is_iterated)
        watchdog.add(self._watch)
        concurrency, threads = config.concurrency, config.handler_threads
        self.outside = None if self.new_outside is None else self.new_outside()
        if threads and self.outside is None:
            from .handler_threads import HandlerThreads  # most handlers run in greenlets

            self.outside = HandlerThreads(min(threads, concurrency or threads), self._thread)
        # Without any of these, each connection gets a worker of its own: messages stay in the order of arrival.
        if is_iterated or concurrency or threads:
            size = 0 if is_iterated else concurrency or threads
            self.shared = self.new(size, "worker", self._spare_workers(config))
            self._workload.shared = self.shared

    def _spare_workers(self, config: ConsumerConfig) -> int:
        """How many workers may hand over messages while all handlers are busy; none where each waits for its turn."""
        if self.outside is None or config.ordered or self._disposition.batch_handler is not None:
            return 0
        return self.outside.spare

    def new(self, size: int, name: str, spare: int = 0) -> Pool:
        """Make ``size`` worker greenlets, and ``spare`` that wait for them."""
        pool = Pool(self._disposition, size, f"{self._name} {name}", self._limit, self._prompt, self.outside, spare)
        self._pools.append(pool)
        return pool

    def drop(self, pool: Pool) -> None:
        """Forget the workers of one connection."""
        if pool in self._pools and pool is not self.shared:
            self._pools.remove(pool)

    def limit_changed(self) -> None:
        """The number of handlers that may run at once is another now."""
        self._limit.changed()

    def greenlets(self) -> Iterator[greenlet | None]:
        """Where handlers run."""
        return (worker.greenlet for pool in self._pools for worker in pool.workers)

    def leave(self) -> None:
        """The thread of the consumer has failed: no worker runs any more."""
        if self.outside is not None:
            self.outside.leave()
        if self._watch is not None:
            watchdog.remove(self._watch)

    def stop(self) -> None:
        """Let each worker end after what it is handling now."""
        for pool in self._pools:
            pool.stop()
        if self.outside is not None:
            self.outside.stop()
        if self._watch is not None:
            watchdog.remove(self._watch)
