"""The second half of the demo: an ordered topic of a redesigned cluster, published with keys and traced.

Greenlets publish, each for a key of its own, several messages at a time; a
consumer checks that those of a key come in order. In the middle a partition
gets another leader. Producer and consumer write trace records; each publish is
joined with the consumption that has the same ids, place and leader.

A message that comes again is a duplicate, not a violation of the order.
"""

from __future__ import annotations

import dataclasses
import logging
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from gevent import Greenlet, joinall, sleep, spawn
from gevent.event import Event

from nsq_fast._codec import Message
from nsq_fast.errors import NsqError
from nsq_fast.runtime import Consumer, ConsumeRecord, Producer, PublishRecord, TraceLog, TraceRecord, log_to_file

from .ledger import Ledger

CHANNEL = "workers"
_NUMBER = struct.Struct(">Q")
_TICK = 0.1
_PIPELINE = 20


@dataclasses.dataclass(frozen=True)
class OrderedOptions:
    """What to publish, and where. ``messages`` are shared evenly by the keys; traces go to ``trace_file`` too;
    ``security``: options of clients.
    """

    lookupds: tuple[str, ...]
    topic: str
    messages: int = 20_000
    keys: int = 20
    body_size: int = 200
    stall_timeout: float = 30.0
    trace_file: Path | None = None
    security: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class OrderedSummary:
    """What came of it. ``ended`` is ``done``, ``stalled`` or ``interrupted``; ``lost`` is None when interrupted.

    ``traces_joined`` counts the publishes of which there is a record of the consumption too.
    """

    ended: str
    published: int
    publish_failed: int
    delivered: int
    finished: int
    lost: int | None
    duplicated: int
    order_violations: int
    leader_moves: int
    traces_published: int
    traces_joined: int
    seconds: float
    messages_per_second: float

    @property
    def is_good(self) -> bool:
        """Whether all is as promised."""
        return (
            self.ended == "done"
            and not (self.lost or self.publish_failed or self.order_violations)
            and self.traces_joined == self.traces_published == self.published
        )


class OrderedJob:
    """One run, on a topic that exists.

    Args:
        options: what to do.
        move: called in the middle to give a partition another leader; None: nothing moves.
    """

    def __init__(self, options: OrderedOptions, move: Callable[[], None] | None = None) -> None:
        self.options = options
        self._each = max(1, options.messages // options.keys)
        self.ledger = Ledger(self._each * options.keys)
        self._move = move
        self._moves = 0
        self._last = [-1] * options.keys
        self._violations = 0
        self._records = _Records(options.trace_file)
        self._padding = b"." * max(0, options.body_size - _NUMBER.size)

    def run(self, stop: Event, on_progress: Callable[[Ledger], None]) -> OrderedSummary:
        """Publish and consume; return when all was consumed, when nothing moves any more, or when ``stop`` is set."""
        trace = TraceLog(self._records.logger)
        trace.enable()
        servers = {"lookupd_http_addresses": self.options.lookupds, **self.options.security}
        common: dict[str, Any] = {**servers, "trace": trace}
        consumer = Consumer(
            self.options.topic, CHANNEL, message_handler=self._handle, max_tries=0, max_in_flight=100, **common
        )
        began = perf_counter()
        with Producer(publish_timeout=self.options.stall_timeout, **common) as producer:
            consumer.start(block=False)
            greenlets: list[Greenlet[..., Any]] = [
                spawn(self._publish, producer, key) for key in range(self.options.keys)
            ]
            greenlets.append(spawn(self._move_in_the_middle))
            try:
                ended = self._watch(greenlets, stop, on_progress)
                seconds = perf_counter() - began
            finally:
                for greenlet in greenlets:
                    greenlet.kill()
                consumer.close()
                self._records.close()
        on_progress(self.ledger)
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
                self._account(number, result)

    def _account(self, number: int, result: Any) -> None:
        try:
            result.get()
        except NsqError:
            self.ledger.mark_failed(1)
        else:
            self.ledger.mark_published(number, 1)

    def _move_in_the_middle(self) -> None:
        while self._move is not None and self.ledger.published < self.ledger.size // 2:
            sleep(_TICK / 10)
        if self._move is not None:
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

    def _watch(self, greenlets: list[Greenlet[..., Any]], stop: Event, on_progress: Callable[[Ledger], None]) -> str:
        ledger = self.ledger
        moved_at, seen = perf_counter(), -1
        while not stop.is_set():
            joinall(greenlets, timeout=_TICK, raise_error=True)
            if all(greenlet.dead for greenlet in greenlets) and not ledger.lost:
                return "done"
            on_progress(ledger)
            stop.wait(_TICK if all(greenlet.dead for greenlet in greenlets) else 0)
            moves = ledger.delivered + ledger.published + ledger.publish_failed
            if moves != seen:
                moved_at, seen = perf_counter(), moves
            elif perf_counter() - moved_at > self.options.stall_timeout:
                return "stalled"
        return "interrupted"

    def _summary(self, ended: str, seconds: float) -> OrderedSummary:
        ledger = self.ledger
        published, joined = self._records.join()
        return OrderedSummary(
            ended=ended,
            published=ledger.published,
            publish_failed=ledger.publish_failed,
            delivered=ledger.delivered,
            finished=ledger.finished,
            lost=None if ended == "interrupted" else ledger.lost,
            duplicated=ledger.duplicated,
            order_violations=self._violations,
            leader_moves=self._moves,
            traces_published=published,
            traces_joined=joined,
            seconds=round(seconds, 3),
            messages_per_second=round(ledger.finished / seconds, 1),
        )


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
