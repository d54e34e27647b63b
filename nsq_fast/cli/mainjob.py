"""The main job: publish to several topics, consume them with handlers of every kind, account for each message.

No presentation: ``MainJob.run`` works, a callback is told how far it is, and a
``Summary`` says what came of it. What a handler does to a message depends on the
message's sequence number alone (see ``_PLAN``), so a run can be repeated, and
every seed of trouble is there in every run: handlers that fail once or always,
that requeue, touch, or answer from another greenlet; deferred publishes.

Each publisher sends one message and waits until it was handled: discovery is
over then, and the clock for the rate starts. It waits while too many messages
are unsettled, so that the latency is that of a system at work, not of a backlog.
The rate is that of the first 95 % answered: the last ones are delayed on purpose.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping
from time import perf_counter, perf_counter_ns
from typing import Any
from uuid import uuid4

from gevent import Greenlet, joinall, sleep, spawn
from gevent.event import Event

from nsq_fast._codec import Message
from nsq_fast.errors import NsqError, RequeueMessage
from nsq_fast.runtime import Consumer, Producer

from .ledger import Ledger

_HEAD = struct.Struct(">QQ")  # sequence number; perf_counter_ns when published, 0: latency is not measured
_CHANNEL = "workers"
_TICK = 0.1
_LATER = 0.02
_POLL = 0.002
_BULK = 0.95
_CLOSE_TIMEOUT = 10.0


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """Size and shape of the job, and its servers: nsqds over TCP, or lookupds over HTTP.

    ``security`` holds the options of clients for TLS and AUTH.
    """

    nsqds: tuple[str, ...] = ()
    lookupds: tuple[str, ...] = ()
    messages: int = 200_000
    topics: int = 4
    body_size: int = 200
    batch: int = 100
    max_in_flight: int = 2000
    max_tries: int = 3
    window: int = 20_000
    stall_timeout: float = 30.0
    security: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def servers(self) -> dict[str, Any]:
        """The servers as arguments of a Consumer or Producer, with what TLS and AUTH need."""
        return {"nsqd_tcp_addresses": self.nsqds, "lookupd_http_addresses": self.lookupds, **self.security}


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


class DeliberateFailure(Exception):
    """What a handler raises to fail a message on purpose."""


Action = Callable[["MainJob", Message, int], None]


class MainJob:
    """One run of the job. ``topics`` are fresh names, so that servers in use are not disturbed."""

    def __init__(self, options: JobOptions) -> None:
        self.options = options
        self.ledger = Ledger(options.messages)
        run = uuid4().hex[:8]
        self.topics = [f"demo-{run}-{number}" for number in range(options.topics)]
        self._padding = b"." * max(0, options.body_size - _HEAD.size)
        self._later: list[tuple[Message, int]] = []
        self._running = True
        self._started = self._bulk_at = 0.0
        self._bulk = 0
        self._openers: set[int] = set()
        self._unopened = options.topics
        self._all_open = Event()
        self._flowing_since = 0.0

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
            publishers = self._publishers(producer)
            for consumer in consumers:
                consumer.start(block=False)
            later = spawn(self._answer_later)
            try:
                ended = self._watch(publishers, stop, on_progress)
                seconds = perf_counter() - self._started
            finally:
                self._running = False
                self._all_open.set()
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
            message_handler=self._handle,
            max_tries=options.max_tries,
            max_in_flight=options.max_in_flight,
            max_backoff_duration=0,
            requeue_base_delay=0.05,
            requeue_max_delay=0.2,
            lookupd_poll_interval=0.2,
        )
        consumer.on_giving_up.connect(self._on_giving_up, weak=False)
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
        ledger.wake_when(ledger.settled + missing if missing else self._settleable())
        return not missing and all(publisher.dead for publisher in publishers)

    def _settleable(self) -> int:
        # Failed publishes are never settled, but for those that were stored all the same.
        return self.options.messages - self.ledger.publish_failed

    # Publishing

    def _publishers(self, producer: Producer) -> list[Greenlet[..., Any]]:
        messages, topics = self.options.messages, self.options.topics
        edges = [messages * number // topics for number in range(topics + 1)]
        return [
            spawn(self._publish_topic, producer, topic, first, last)
            for topic, first, last in zip(self.topics, edges, edges[1:], strict=False)
        ]

    def _publish_topic(self, producer: Producer, topic: str, first: int, last: int) -> None:
        self._open(producer, topic, first)
        for turn, start in enumerate(range(first + 1, last, self.options.batch)):
            self._wait_for_room()
            if not self._running:
                return
            self._publish_batch(producer, topic, range(start, min(last, start + self.options.batch)), turn)
        self.ledger.wake_when(min(self.ledger.wake_at, self._settleable()))

    def _open(self, producer: Producer, topic: str, number: int) -> None:
        """Publish one message that is simply finished, wait until it is, then for the other topics."""
        self._openers.add(number)
        self._account(range(number, number + 1), producer.publish, topic, self._body(number, 0))
        while self._running and not self.ledger.is_settled(number) and not self.ledger.publish_failed:
            sleep(_POLL)
        self._unopened -= 1
        if not self._unopened:
            self._flowing_since = perf_counter()
            self._all_open.set()
        self._all_open.wait()

    def _wait_for_room(self) -> None:
        ledger, window = self.ledger, self.options.window
        while self._running and ledger.published - ledger.settled > window:
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
            self.ledger.mark_failed(len(numbers))
        else:
            self.ledger.mark_published(numbers.start, len(numbers))

    def _body(self, number: int, published_at: int) -> bytes:
        return _HEAD.pack(number, published_at) + self._padding

    # Handling

    def _handle(self, _consumer: Consumer, message: Message) -> None:
        number, published_at = _HEAD.unpack_from(message.body)
        ledger = self.ledger
        ledger.delivered += 1
        if published_at and message.attempts == 1:
            ledger.latencies.append(perf_counter_ns() - published_at)
        action = _PLAN[number % len(_PLAN)]
        if action is None or number in self._openers:
            ledger.mark_finished(number)
        else:
            action(self, message, number)

    def _fail_always(self, _message: Message, number: int) -> None:
        self.ledger.events["failed"] += 1
        raise DeliberateFailure(number)

    def _fail_once(self, message: Message, number: int) -> None:
        if message.attempts == 1:
            self.ledger.events["failed"] += 1
            raise DeliberateFailure(number)
        self.ledger.mark_finished(number)

    def _requeue_once(self, message: Message, number: int) -> None:
        if message.attempts == 1:
            self.ledger.events["requeued"] += 1
            raise RequeueMessage(0.01)
        self.ledger.mark_finished(number)

    def _touch(self, message: Message, number: int) -> None:
        message.touch()
        self.ledger.events["touched"] += 1
        self.ledger.mark_finished(number)

    def _finish_later(self, message: Message, number: int) -> None:
        message.enable_async()
        self._later.append((message, number))

    def _answer_later(self) -> None:
        while self._running or self._later:
            sleep(_LATER)
            waiting, self._later = self._later, []
            for message, number in waiting:
                self._finish(message, number)

    def _finish(self, message: Message, number: int) -> None:
        try:
            message.finish()
        except NsqError:  # the connection is gone: nsqd delivers the message again
            return
        self.ledger.events["answered_later"] += 1
        self.ledger.mark_finished(number)

    def _on_giving_up(self, _consumer: Any, message: Message) -> None:
        self.ledger.mark_given_up(_HEAD.unpack_from(message.body)[0])

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
            discovery_seconds=round(max(0.0, self._flowing_since - self._started), 3),
            seconds=round(seconds, 3),
            messages_per_second=round(self._rate(), 1),
            latency_p50_ms=ledger.latency_ms(50),
            latency_p99_ms=ledger.latency_ms(99),
        )

    def _rate(self) -> float:
        if not self._flowing_since:
            return 0.0
        if not self._bulk_at:
            self._end_bulk()
        return self._bulk / max(1e-6, self._bulk_at - self._flowing_since)

    def _end_bulk(self) -> None:
        self._bulk_at, self._bulk = perf_counter(), self.ledger.settled


def _plan() -> list[Action | None]:
    """What happens to the messages whose number has a given remainder; None: the handler just returns."""
    plan: list[Action | None] = [None] * 1000
    plan[500] = MainJob._fail_always
    for action, first in [
        (MainJob._fail_once, 101),
        (MainJob._requeue_once, 211),
        (MainJob._touch, 307),
        (MainJob._finish_later, 401),
        (MainJob._finish_later, 601),
    ]:
        plan[first : first + 50 : 10] = [action] * 5
    return plan


_PLAN = _plan()
