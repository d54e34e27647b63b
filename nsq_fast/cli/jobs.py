"""What the demo runs: a job on original servers, and one on an ordered topic of a redesigned cluster. No presentation.

``MainJob`` publishes to several topics and consumes them with handlers of every kind: some fail once or always,
requeue, touch, or answer from another greenlet. What happens to a message depends on its number alone, so that every
seed of trouble is there in every run. ``OrderedJob`` publishes with keys, traced, while a partition gets another
leader, and checks that the messages of a key come in order. Both account for each message in a ``Ledger``: loss and
duplication are counted, not guessed. That the server has taken the FINs is seen in its own statistics afterwards.
"""

from __future__ import annotations

import dataclasses
import logging
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, perf_counter, perf_counter_ns
from typing import Any, NamedTuple
from uuid import uuid4

from gevent import Greenlet, joinall, sleep, spawn
from gevent.event import Event

from nsq_fast._codec import Message
from nsq_fast.broker import ClusterProcess
from nsq_fast.client.trace import ConsumeRecord, PublishRecord, TraceLog, TraceRecord, log_to_file
from nsq_fast.consumer import Consumer
from nsq_fast.errors import NsqError, RequeueMessage
from nsq_fast.producer import Producer

from .servers import Lookup

CHANNEL = "workers"
BODY_SIZE = 200
STALL_TIMEOUT = 30.0
"""Seconds without any progress after which a job ends."""

_TICK = 0.1
_BULK = 0.95  # the rate is that of the first so many
_CLOSE_TIMEOUT = 10.0

Tell = Callable[["Ledger"], None]
Results = dict[str, Any]


class Ledger:
    """Marks for the sequence numbers 0 to ``size - 1``: a publish that was answered OK, FINs, a give-up.

    A message is lost that was published OK, and never finished nor given up; duplicated that was finished more than
    once. Marks are made where the fact is known: OK after the reply, FIN when the handler has decided it.

    Attributes:
        published, publish_failed: messages answered OK, and those that were not (one may be stored all the same).
        delivered: calls of handlers.
        settled: messages finished or given up at least once.
        events: how often handlers failed, requeued, touched, answered later.
        latencies: nanoseconds from publish to first delivery.
        bulk: so many are settled at ``bulk_at``; the last ones are late on purpose.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.published: int = 0
        self.publish_failed: int = 0
        self.delivered = 0
        self.settled: int = 0
        self.given_up: int = 0
        self.events: Counter[str] = Counter()
        self.latencies: array[int] = array("q")
        self.bulk: int = max(1, int(size * _BULK))
        self.bulk_at: float = 0.0
        self._ok = bytearray(size)
        self._finished = bytearray(size)
        self._given_up = bytearray(size)

    def account(self, numbers: range, publish: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Publish these messages by a call, and mark what came of it."""
        try:
            publish(*arguments, **options)
        except NsqError:
            self.publish_failed += len(numbers)
        else:
            self.mark_published(numbers.start, len(numbers))

    def mark_published(self, first: int, count: int) -> None:
        """The messages from ``first`` on were answered OK."""
        self._ok[first : first + count] = b"\1" * count
        self.published += count

    def mark_finished(self, number: int) -> None:
        """The handler of this message decided on FIN."""
        self._finished[number] = min(255, self._finished[number] + 1)
        if self._finished[number] == 1 and not self._given_up[number]:
            self._settle()

    def mark_given_up(self, number: int) -> None:
        self.given_up += 1
        if not self.is_settled(number):
            self._settle()
        self._given_up[number] = 1

    def _settle(self) -> None:
        self.settled += 1
        if self.settled == self.bulk:
            self.bulk_at = perf_counter()

    def is_settled(self, number: int) -> bool:
        """Whether this message was finished or given up."""
        return bool(self._finished[number] or self._given_up[number])

    @property
    def moves(self) -> int:
        """Grows as long as anything happens."""
        return self.delivered + self.published + self.publish_failed

    @property
    def finished(self) -> int:
        """Messages finished at least once."""
        return self.size - self._finished.count(0)

    @property
    def duplicated(self) -> int:
        """Messages finished more than once."""
        return self.finished - self._finished.count(1)

    @property
    def is_whole(self) -> bool:
        """Whether everything that was answered OK is settled."""
        return self.settled >= self.published and not self.lost

    @property
    def lost(self) -> int:
        """Messages answered OK and not settled."""
        marks = zip(self._ok, self._finished, self._given_up, strict=True)
        return sum(ok and not finished and not given_up for ok, finished, given_up in marks)

    def results(self, ended: str, seconds: float) -> Results:
        """What came of it. ``ended`` is ``done``, ``stalled`` or ``interrupted``; then messages are still on their
        way, so that ``lost`` is None."""
        return {
            "ended": ended,
            "published": self.published,
            "publish_failed": self.publish_failed,
            "delivered": self.delivered,
            "finished": self.finished,
            "lost": None if ended == "interrupted" else self.lost,
            "duplicated": self.duplicated,
            "seconds": round(seconds, 3),
        }

    def latency_ms(self, percent: float) -> float | None:
        """A percentile of the latencies, in milliseconds; None when there are none."""
        if not self.latencies:
            return None
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] / 1e6


def _watch(ledger: Ledger, at_work: Sequence[Greenlet[..., Any]], stop: Event, tell: Tell) -> str:
    """Wait until what is at work has ended, and all is settled: ``done``; ``stalled`` when nothing has moved for
    STALL_TIMEOUT, or ``interrupted`` by ``stop``."""
    moved_at, seen = perf_counter(), -1
    while not stop.is_set():
        joinall(at_work, timeout=_TICK, raise_error=True)
        if all(each.dead for each in at_work):
            if ledger.is_whole:
                return "done"
            stop.wait(_LATER)
        tell(ledger)
        if ledger.moves != seen:
            moved_at, seen = perf_counter(), ledger.moves
        elif perf_counter() - moved_at > STALL_TIMEOUT:
            return "stalled"
    return "interrupted"


# On original servers

_HEAD = struct.Struct(">QQ")  # sequence number; perf_counter_ns when published, 0: latency is not measured
_BATCH = 100
_WINDOW = 20_000  # messages that may be unsettled: the latency is to be that of a system at work, not of a backlog
_POLL = 0.002
_LATER = 0.02
MAX_TRIES = 3


class DeliberateFailure(Exception):
    """What a handler raises to fail a message on purpose."""


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """Size of the main job, and its servers; ``security`` holds the options of clients for TLS and AUTH."""

    nsqds: tuple[str, ...] = ()
    lookupds: tuple[str, ...] = ()
    messages: int = 200_000
    topics: int = 4
    security: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class MainJob:
    """One run of the job. ``topics`` are fresh names, so that servers in use are not disturbed."""

    def __init__(self, options: JobOptions) -> None:
        self.options = options
        self.ledger: Ledger = Ledger(options.messages)
        run = uuid4().hex[:8]
        self.topics: list[str] = [f"demo-{run}-{number}" for number in range(options.topics)]
        self._servers: dict[str, Any] = {
            "nsqd_tcp_addresses": options.nsqds,
            "lookupd_http_addresses": options.lookupds,
            **options.security,
        }
        self._padding = b"." * (BODY_SIZE - _HEAD.size)
        self._is_running = True
        self._openers: set[int] = set()
        self._unopened = options.topics
        self._all_open = Event()
        self._later: list[tuple[Message, int]] = []
        self._started = self._flowing_since = 0.0

    def run(self, stop: Event, tell: Tell) -> Results:
        """Do the job; return when all is settled, when nothing moves any more, or when ``stop`` is set.

        Args:
            tell: called about ten times a second.

        Raises NsqError when the servers cannot be used at all.
        """
        consumers = [self._consumer(topic) for topic in self.topics]
        self._started = perf_counter()
        with Producer(**self._servers, lookupd_poll_interval=1.0) as producer:
            size, count = self.options.messages, len(self.topics)
            edges = [size * number // count for number in range(count + 1)]
            parts = zip(self.topics, edges, edges[1:], strict=False)
            publishers: list[Greenlet[..., Any]] = [spawn(self._publish_topic, producer, *part) for part in parts]
            for consumer in consumers:
                consumer.start(block=False)
            later: Greenlet[..., Any] = spawn(self._answer_later)
            try:
                ended = _watch(self.ledger, publishers, stop, tell)
                seconds = perf_counter() - self._started
            finally:
                self._is_running = False
                self._all_open.set()
                joinall([*publishers, later], timeout=_CLOSE_TIMEOUT)
                joinall([spawn(consumer.close, drain=True, timeout=_CLOSE_TIMEOUT) for consumer in consumers])
        tell(self.ledger)
        return self._summary(ended, seconds)

    def _summary(self, ended: str, seconds: float) -> Results:
        ledger, events, rate = self.ledger, self.ledger.events, 0.0
        if self._flowing_since:
            # Where not as many were settled, it is the rate until now.
            until, count = (ledger.bulk_at, ledger.bulk) if ledger.bulk_at else (perf_counter(), ledger.settled)
            rate = count / max(1e-6, until - self._flowing_since)
        return {
            **ledger.results(ended, seconds),
            "failed": events["failed"],
            "requeued": events["requeued"] + events["failed"],
            "touched": events["touched"],
            "answered_later": events["answered_later"],
            "given_up": ledger.given_up,
            "discovery_seconds": round(max(0.0, self._flowing_since - self._started), 3),
            "messages_per_second": round(rate, 1),
            "latency_p50_ms": ledger.latency_ms(50),
            "latency_p99_ms": ledger.latency_ms(99),
        }

    # Publishing

    def _publish_topic(self, producer: Producer, topic: str, first: int, last: int) -> None:
        """Publish one by one, deferred, and in batches, by turns."""
        account = self.ledger.account
        self._open(producer, topic, first)
        for turn, start in enumerate(range(first + 1, last, _BATCH)):
            while self._is_running and self.ledger.published - self.ledger.settled > _WINDOW:
                sleep(_POLL)
            if not self._is_running:
                return
            numbers = range(start, min(last, start + _BATCH))
            if turn % 20 == 10:
                for number in numbers:
                    body = self._body(number, perf_counter_ns())
                    account(range(number, number + 1), producer.publish, topic, body)
            elif turn % 100 == 50:
                for number in numbers:
                    account(range(number, number + 1), producer.publish, topic, self._body(number), defer=50)
            else:
                now = perf_counter_ns()
                account(numbers, producer.multipublish, topic, [self._body(number, now) for number in numbers])

    def _open(self, producer: Producer, topic: str, number: int) -> None:
        """Publish a message that is simply finished; wait until it is, then for the other topics: discovery is over
        then, and the clock for the rate starts."""
        self._openers.add(number)
        self.ledger.account(range(number, number + 1), producer.publish, topic, self._body(number))
        while self._is_running and not self.ledger.is_settled(number) and not self.ledger.publish_failed:
            sleep(_POLL)
        self._unopened -= 1
        if not self._unopened:
            self._flowing_since = perf_counter()
            self._all_open.set()
        self._all_open.wait()

    def _body(self, number: int, published_at: int = 0) -> bytes:
        return _HEAD.pack(number, published_at) + self._padding

    # Handling

    def _consumer(self, topic: str) -> Consumer:
        # Failures are deliberate here: backoff would only measure itself, and requeues are to come back soon.
        consumer = Consumer(
            topic,
            CHANNEL,
            **self._servers,
            message_handler=self._handle,
            max_tries=MAX_TRIES,
            max_in_flight=2000,
            max_backoff_duration=0,
            requeue_base_delay=0.05,
            requeue_max_delay=0.2,
            lookupd_poll_interval=0.2,
        )
        consumer.on_giving_up.connect(self._given_up, weak=False)
        return consumer

    def _handle(self, _consumer: Consumer, message: Message) -> None:
        number, published_at = _HEAD.unpack_from(message.body)
        ledger = self.ledger
        ledger.delivered += 1
        if published_at and message.attempts == 1:
            ledger.latencies.append(perf_counter_ns() - published_at)
        action = _PLAN[number % len(_PLAN)]
        if action == "finish" or number in self._openers:
            pass
        elif action == "later":
            message.enable_async()
            self._later.append((message, number))
            return
        elif action == "touch":
            message.touch()
            ledger.events["touched"] += 1
        elif action == "fail always" or (action == "fail" and message.attempts == 1):
            ledger.events["failed"] += 1
            raise DeliberateFailure(number)
        elif action == "requeue" and message.attempts == 1:
            ledger.events["requeued"] += 1
            raise RequeueMessage(0.01)
        ledger.mark_finished(number)

    def _answer_later(self) -> None:
        """Finish what the handler has left to it, until nothing comes any more."""
        while self._is_running or self._later:
            sleep(_LATER)
            waiting, self._later = self._later, []
            for message, number in waiting:
                with suppress(NsqError):  # the connection is gone: nsqd delivers the message again
                    message.finish()
                    self.ledger.events["answered_later"] += 1
                    self.ledger.mark_finished(number)

    def _given_up(self, _consumer: Any, message: Message) -> None:
        self.ledger.mark_given_up(_HEAD.unpack_from(message.body)[0])


def _plan() -> list[str]:
    """What happens to the messages whose number has a given remainder."""
    plan = ["finish"] * 1000
    plan[500] = "fail always"
    for action, first in (("fail", 101), ("requeue", 211), ("touch", 307), ("later", 401), ("later", 601)):
        plan[first : first + 50 : 10] = [action] * 5
    return plan


_PLAN = _plan()


# On an ordered topic of a redesigned cluster

_NUMBER = struct.Struct(">Q")
_PIPELINE = 20
_PARTITIONS = 3
_READY_TIMEOUT = 120.0
_READY_POLL = 0.2


@dataclasses.dataclass(frozen=True)
class OrderedOptions:
    """What to publish, and where. ``messages`` are shared evenly by the keys; traces go to ``trace_file`` too;
    ``security``: options of clients.
    """

    lookupds: tuple[str, ...]
    topic: str
    messages: int = 20_000
    keys: int = 20
    trace_file: Path | None = None
    security: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class OrderedJob:
    """One run, on a topic that exists. A message that comes again is a duplicate, not a violation of the order.

    Args:
        move: called in the middle to give a partition another leader; None: nothing moves.
    """

    def __init__(self, options: OrderedOptions, move: Callable[[], None] | None = None) -> None:
        self.options = options
        self._each = max(1, options.messages // options.keys)
        self.ledger: Ledger = Ledger(self._each * options.keys)
        self._move = move
        self._moves = 0
        self._last = [-1] * options.keys
        self._violations = 0
        self._records = _Records(options.trace_file)
        self._padding = b"." * (BODY_SIZE - _NUMBER.size)

    def run(self, stop: Event, tell: Tell) -> Results:
        """Publish and consume; return when all was consumed, when nothing moves any more, or when ``stop`` is set."""
        trace = TraceLog(self._records.logger)
        trace.enable()
        options = self.options
        common: dict[str, Any] = {"lookupd_http_addresses": options.lookupds, **options.security, "trace": trace}
        consumer = Consumer(
            options.topic, CHANNEL, message_handler=self._handle, max_tries=0, max_in_flight=100, **common
        )
        began = perf_counter()
        with Producer(publish_timeout=STALL_TIMEOUT, **common) as producer:
            consumer.start(block=False)
            greenlets: list[Greenlet[..., Any]] = [spawn(self._publish, producer, key) for key in range(options.keys)]
            greenlets.append(spawn(self._move_in_the_middle))

            try:
                ended = _watch(self.ledger, greenlets, stop, tell)
                seconds = perf_counter() - began
            finally:
                for greenlet in greenlets:
                    greenlet.kill()
                consumer.close()
                self._records.close()
        tell(self.ledger)
        return self._summary(ended, seconds)

    def _publish(self, producer: Producer, key: int) -> None:
        first, last = key * self._each, (key + 1) * self._each
        for start in range(first, last, _PIPELINE):
            numbers = range(start, min(last, start + _PIPELINE))
            results = [
                producer.publish_nowait(self.options.topic, _NUMBER.pack(number) + self._padding, key=f"key{key}")
                for number in numbers
            ]
            for number, result in zip(numbers, results, strict=True):
                self.ledger.account(range(number, number + 1), result.get)

    def _move_in_the_middle(self) -> None:
        if self._move is None:
            return
        while self.ledger.published < self.ledger.size // 2:
            sleep(_TICK / 10)
        self._move()
        self._moves += 1

    def _handle(self, _consumer: Consumer, message: Message) -> None:
        (number,) = _NUMBER.unpack_from(message.body)
        ledger, key = self.ledger, number // self._each
        ledger.delivered += 1
        if not ledger.is_settled(number):
            self._violations += number < self._last[key]
            self._last[key] = max(self._last[key], number)
        ledger.mark_finished(number)

    def _summary(self, ended: str, seconds: float) -> Results:
        """``traces_joined`` counts the publishes of which there is a record of the consumption too."""
        published, joined = self._records.join()
        return {
            **self.ledger.results(ended, seconds),
            "order_violations": self._violations,
            "leader_moves": self._moves,
            "traces_published": published,
            "traces_joined": joined,
            "messages_per_second": round(self.ledger.finished / seconds, 1),
        }


class _Records(logging.Handler):
    """Keeps what is written to a trace log of its own, which may go to a file too."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self.logger = logging.Logger("nsq_fast.demo.trace")
        self.logger.addHandler(self)
        self._file = None if path is None else log_to_file(path, max_bytes=0, log=self.logger)
        self._published: list[PublishRecord] = []
        self._consumed: set[tuple[Any, ...]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        trace: Any = record.msg
        if isinstance(trace, PublishRecord):
            self._published.append(trace)
        elif isinstance(trace, ConsumeRecord):
            self._consumed.add(_identity(trace))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()

    def join(self) -> tuple[int, int]:
        """How many publishes there are, and how many of them were consumed."""
        return len(self._published), sum(_identity(record) in self._consumed for record in self._published)


def _identity(record: TraceRecord) -> tuple[Any, ...]:
    """What the records of one message have in common, wherever it was consumed."""
    return record.partition, record.internal_id, record.trace_id, record.offset, record.size


class Place(NamedTuple):
    """A topic that is ready, and how to give one of its partitions another leader, where that may be done."""

    name: str
    lookupds: tuple[str, ...]
    topic: str
    move: Callable[[], None] | None


def _new_topic() -> str:
    return f"demo-ordered-{uuid4().hex[:8]}"


@contextmanager
def embedded_cluster() -> Iterator[Place]:
    """A cluster of three nsqds and two nsqlookupds, in a process of its own."""
    topic = _new_topic()
    with ClusterProcess(nodes=3, lookupds=2) as cluster:
        cluster.create_topic(topic, _PARTITIONS, 2, channels=[CHANNEL], ordered=True)
        lookupds = tuple(f"http://{lookupd.http}" for lookupd in cluster.lookupds)
        yield Place("embedded redesigned cluster", lookupds, topic, lambda: cluster.move_leader(topic, 0))


@contextmanager
def existing_cluster(servers: Lookup) -> Iterator[Place]:
    """A topic of its own on a cluster in use, deleted afterwards. Leaders stay where they are.

    Raises NsqError when the topic cannot be created, or is not ready in time.
    """
    topic, addresses = _new_topic(), tuple(map(str, servers.lookupds))
    replicas = min(2, servers.count_nodes())
    servers.tell_leader("create", topic, partition_num=_PARTITIONS, replicator=replicas, orderedmulti="true")
    try:
        deadline = monotonic() + _READY_TIMEOUT
        while len(places := servers.places_or_none(topic)) < _PARTITIONS:
            if monotonic() > deadline:
                raise NsqError(f"topic {topic}: not all of its partitions had a leader after {_READY_TIMEOUT:.0f} s")
            sleep(_READY_POLL)
        for place in places:  # without a channel a partition takes no publishes
            if error := place.call("create", topic, CHANNEL).error:
                raise NsqError(f"topic {topic}: {error}")
        yield Place(f"nsqlookupd {', '.join(addresses)}", addresses, topic, None)
    finally:
        with suppress(NsqError):
            servers.tell_leader("delete", topic, partition="**")
