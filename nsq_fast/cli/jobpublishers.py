"""The publishers of the main job: one for each topic, one by one, deferred, or in batches, by turns.

Each publisher sends one message and waits until it was handled: discovery is
over then, and the clock for the rate starts. It waits while too many messages
are unsettled, so that the latency is that of a system at work, not of a backlog.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, perf_counter_ns
from typing import Any

from gevent import Greenlet, sleep, spawn
from gevent.event import Event

from nsq_fast.errors import NsqError
from nsq_fast.runtime import Producer

from .jobmessages import HEAD
from .joboptions import JobOptions
from .ledger import Ledger

_POLL = 0.002


class JobPublishers:
    """The publishers of one run; they mark in ``ledger`` what was stored.

    Args:
        openers: gets the numbers of the messages that are to be simply finished: the first of each topic.

    Attributes:
        flowing_since: ``perf_counter`` when the first message of each topic had been handled; 0.0 before.
    """

    def __init__(self, options: JobOptions, topics: Sequence[str], ledger: Ledger, openers: set[int]) -> None:
        self.flowing_since = 0.0
        self._options = options
        self._topics = topics
        self._ledger = ledger
        self._openers = openers
        self._padding = b"." * max(0, options.body_size - HEAD.size)
        self._unopened = options.topics
        self._all_open = Event()
        self._is_running = True

    def stop(self) -> None:
        """Publish no more; the greenlets end soon."""
        self._is_running = False
        self._all_open.set()

    def settleable(self) -> int:
        """How many messages can be settled: failed publishes never are, but for those that were stored all the same."""
        return self._options.messages - self._ledger.publish_failed

    def start(self, producer: Producer) -> list[Greenlet[..., Any]]:
        """Begin to publish: a greenlet for each topic."""
        messages, topics = self._options.messages, self._options.topics
        edges = [messages * number // topics for number in range(topics + 1)]
        return [
            spawn(self._publish_topic, producer, topic, first, last)
            for topic, first, last in zip(self._topics, edges, edges[1:], strict=False)
        ]

    def _publish_topic(self, producer: Producer, topic: str, first: int, last: int) -> None:
        self._open(producer, topic, first)
        for turn, start in enumerate(range(first + 1, last, self._options.batch)):
            self._wait_for_room()
            if not self._is_running:
                return
            self._publish_batch(producer, topic, range(start, min(last, start + self._options.batch)), turn)
        self._ledger.wake_when(min(self._ledger.wake_at, self.settleable()))

    def _open(self, producer: Producer, topic: str, number: int) -> None:
        """Publish one message that is simply finished, wait until it is, then for the other topics."""
        self._openers.add(number)
        self._account(range(number, number + 1), producer.publish, topic, self._body(number, 0))
        while self._is_running and not self._ledger.is_settled(number) and not self._ledger.publish_failed:
            sleep(_POLL)
        self._unopened -= 1
        if not self._unopened:
            self.flowing_since = perf_counter()
            self._all_open.set()
        self._all_open.wait()

    def _wait_for_room(self) -> None:
        ledger, window = self._ledger, self._options.window
        while self._is_running and ledger.published - ledger.settled > window:
            sleep(_POLL)

    def _publish_batch(self, producer: Producer, topic: str, numbers: range, turn: int) -> None:
        """Publish messages one by one, deferred, or together, by turns."""
        if turn % 20 == 10:
            for number in numbers:
                body = self._body(number, perf_counter_ns())
                self._account(range(number, number + 1), producer.publish, topic, body)
        elif turn % 100 == 50:
            for number in numbers:
                self._account(range(number, number + 1), producer.publish, topic, self._body(number, 0), defer=50)
        else:
            now = perf_counter_ns()
            self._account(numbers, producer.multipublish, topic, [self._body(number, now) for number in numbers])

    def _account(self, numbers: range, publish: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            publish(*args, **kwargs)
        except NsqError:
            self._ledger.mark_failed(len(numbers))
        else:
            self._ledger.mark_published(numbers.start, len(numbers))

    def _body(self, number: int, published_at: int) -> bytes:
        return HEAD.pack(number, published_at) + self._padding
