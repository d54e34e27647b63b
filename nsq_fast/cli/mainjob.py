"""The main job: publish to several topics, consume them with handlers of every kind, account for each message.

No presentation: ``MainJob.run`` works, a callback is told how far it is, and a
``Summary`` says what came of it. What is published how is in ``jobpublishers``,
what becomes of a message in ``jobhandlers``. The rate is that of the first 95 %
answered: the last ones are delayed on purpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from time import perf_counter
from typing import Any
from uuid import uuid4

from gevent import Greenlet, joinall, spawn
from gevent.event import Event

from nsq_fast.runtime import Consumer, Producer

from .jobhandlers import JobHandlers
from .joboptions import JobOptions
from .jobpublishers import JobPublishers
from .ledger import Ledger

_CHANNEL = "workers"
_TICK = 0.1
_BULK = 0.95
_CLOSE_TIMEOUT = 10.0


@dataclasses.dataclass(frozen=True)
class Summary:
    """What came of the job. ``ended`` is ``done``, ``stalled`` or ``interrupted``.

    ``lost`` is None when it was interrupted: messages are still on their way then.
    """

    ended: str
    published: int
    publish_failed: int
    delivered: int
    finished: int
    failed: int
    requeued: int
    touched: int
    answered_later: int
    given_up: int
    lost: int | None
    duplicated: int
    discovery_seconds: float
    seconds: float
    messages_per_second: float
    latency_p50_ms: float | None
    latency_p99_ms: float | None


class MainJob:
    """One run of the job. ``topics`` are fresh names, so that servers in use are not disturbed."""

    def __init__(self, options: JobOptions) -> None:
        self.options = options
        self.ledger = Ledger(options.messages)
        run = uuid4().hex[:8]
        self.topics = [f"demo-{run}-{number}" for number in range(options.topics)]
        self._handlers = JobHandlers(self.ledger)
        self._publishers = JobPublishers(options, self.topics, self.ledger, self._handlers.openers)
        self._started = self._bulk_at = 0.0
        self._bulk = 0

    def run(self, stop: Event, on_progress: Callable[[Ledger], None]) -> Summary:
        """Do the job; return when all is settled, when nothing moves any more, or when ``stop`` is set.

        Args:
            stop: ends the job early.
            on_progress: called about ten times a second.

        Raises NsqError when the servers cannot be used at all.
        """
        consumers = [self._consumer(topic) for topic in self.topics]
        self._started = perf_counter()
        with Producer(**self.options.servers, lookupd_poll_interval=1.0) as producer:
            publishers = self._publishers.start(producer)
            for consumer in consumers:
                consumer.start(block=False)
            later = spawn(self._handlers.answer_later)
            try:
                ended = self._watch(publishers, stop, on_progress)
                seconds = perf_counter() - self._started
            finally:
                self._publishers.stop()
                self._handlers.stop()
                joinall([*publishers, later], timeout=_CLOSE_TIMEOUT)
                joinall([spawn(consumer.close, drain=True, timeout=_CLOSE_TIMEOUT) for consumer in consumers])
        on_progress(self.ledger)
        return self._summary(ended, seconds)

    def _consumer(self, topic: str) -> Consumer:
        options = self.options
        # Failures are deliberate here: backoff would only measure itself, and requeues are to come back soon.
        consumer = Consumer(
            topic,
            _CHANNEL,
            **options.servers,
            message_handler=self._handlers.handle,
            max_tries=options.max_tries,
            max_in_flight=options.max_in_flight,
            max_backoff_duration=0,
            requeue_base_delay=0.05,
            requeue_max_delay=0.2,
            lookupd_poll_interval=0.2,
        )
        consumer.on_giving_up.connect(self._handlers.on_giving_up, weak=False)
        return consumer

    def _watch(self, publishers: list[Greenlet[..., Any]], stop: Event, on_progress: Callable[[Ledger], None]) -> str:
        ledger = self.ledger
        ledger.wake_when(int(ledger.size * _BULK))
        moved_at, seen = perf_counter(), -1
        while not stop.is_set():
            if ledger.woken.wait(_TICK) and self._is_done(publishers):
                return "done"
            on_progress(ledger)
            moves = ledger.delivered + ledger.published + ledger.publish_failed
            if moves != seen:
                moved_at, seen = perf_counter(), moves
            elif perf_counter() - moved_at > self.options.stall_timeout:
                return "stalled"
        return "interrupted"

    def _is_done(self, publishers: list[Greenlet[..., Any]]) -> bool:
        """Called when the ledger woke up: at the end of the bulk, then when all may be settled."""
        ledger = self.ledger
        if not self._bulk_at:
            self._end_bulk()
        joinall(publishers, timeout=_TICK)
        missing = ledger.lost
        ledger.wake_when(ledger.settled + missing if missing else self._publishers.settleable())
        return not missing and all(publisher.dead for publisher in publishers)

    def _summary(self, ended: str, seconds: float) -> Summary:
        ledger = self.ledger
        failed = ledger.events["failed"]
        return Summary(
            ended=ended,
            published=ledger.published,
            publish_failed=ledger.publish_failed,
            delivered=ledger.delivered,
            finished=ledger.finished,
            failed=failed,
            requeued=ledger.events["requeued"] + failed,
            touched=ledger.events["touched"],
            answered_later=ledger.events["answered_later"],
            given_up=ledger.given_up,
            lost=None if ended == "interrupted" else ledger.lost,
            duplicated=ledger.duplicated,
            discovery_seconds=round(max(0.0, self._publishers.flowing_since - self._started), 3),
            seconds=round(seconds, 3),
            messages_per_second=round(self._rate(), 1),
            latency_p50_ms=ledger.latency_ms(50),
            latency_p99_ms=ledger.latency_ms(99),
        )

    def _rate(self) -> float:
        if not self._publishers.flowing_since:
            return 0.0
        if not self._bulk_at:
            self._end_bulk()
        return self._bulk / max(1e-6, self._bulk_at - self._publishers.flowing_since)

    def _end_bulk(self) -> None:
        self._bulk_at, self._bulk = perf_counter(), self.ledger.settled
