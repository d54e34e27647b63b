"""What a node writes to its log of the messages that are traced.

A message is traced when it has a trace id, when its topic is traced at the node that stores it, or when its channel is
traced at the node that delivers it. The lines are those of the real server (youzan/nsq: nsqd/tracer.go, LogMsgTracer);
``nsq-fast trace-report`` reads both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nsq_fast.log_events import BROKER_MESSAGE_TRACED

from .delivery import Delivery
from .log import PartitionLog, Record

logger = logging.getLogger("nsq_fast.broker.redesigned.tracing")

SLOW = 1.0
"""Seconds until FIN from which on it is logged as slow."""
_NANOSECONDS = 1_000_000_000


class Actor(NamedTuple):
    """Who did something to a message: the address of a client, and its id while the message is in flight to it."""

    address: str
    id: int = 0


SERVER = Actor("0")
NO_CLIENT = Actor("")


class TraceSwitches:
    """What one node traces of a partition, beside messages with a trace id.

    Attributes:
        is_on: whether it traces the messages that are published.
        channels: names of those whose deliveries it traces.
        slow_channels: names of those where it logs a FIN that took long.
        has_channels: whether there are any of either.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.channels: set[str] = set()
        self.slow_channels: set[str] = set()
        self.has_channels = False

    def switch(self, is_on: bool) -> None:
        """Trace what is published, or stop that."""
        self.is_on = is_on

    def switch_channel(self, name: str, is_on: bool, *, slow: bool) -> None:
        """Trace the deliveries of a channel, or log its slow FINs, or stop that."""
        names = self.slow_channels if slow else self.channels
        (names.add if is_on else names.discard)(name)
        self.has_channels = bool(self.channels or self.slow_channels)


class PublishTrace:
    """Logs what is published to a partition.

    Attributes:
        switches: those of the node that leads it.
    """

    def __init__(self, topic: str, number: int, switches: TraceSwitches) -> None:
        self._topic = topic
        self._number = number
        self.switches = switches

    def stored(self, records: Sequence[Record]) -> None:
        """Messages were stored."""
        for record in records:
            if self.switches.is_on or record.trace_id:
                _write(
                    f"{self._place_of(record)}( 0) put PUB at offset: {record.offset},"
                    f" current count: {record.sequence + 1} at time {time.time_ns()}, delayed: 0"
                )

    def answered(self, record: Record, client: str) -> None:
        """The command of a client, given by its address, has stored one message."""
        if self.switches.is_on or record.trace_id:
            _write(
                f"{self._place_of(record)} put success from client {client} at offset: {record.offset},"
                f" at time {time.time_ns()}"
            )

    def _place_of(self, record: Record) -> str:
        return f"topic {self._topic}-{self._number} trace id {record.trace_id}: message {record.internal_id}"


class DeliveryTrace:
    """Logs what becomes of the messages of a channel.

    Attributes:
        switches: those of the node that leads the partition.
    """

    def __init__(self, topic: str, channel: str, switches: TraceSwitches) -> None:
        self._topic = topic
        self._channel = channel
        self.switches = switches

    def follows(self, log: PartitionLog) -> bool:
        """Whether anything of the messages of a log may have to be logged."""
        return log.has_traced or self.switches.has_channels

    @property
    def is_on(self) -> bool:
        """Whether messages without a trace id are logged."""
        return self._channel in self.switches.channels

    @property
    def follows_slow(self) -> bool:
        """Whether slow FINs are logged of all messages."""
        return self._channel in self.switches.slow_channels

    def taken(self, deliveries: Iterable[Delivery]) -> None:
        """Messages come next: from the log, or again."""
        for delivery in self._traced(deliveries):
            self._log("READ_REQ" if delivery.delivered_at else "READ_QUEUE", delivery, SERVER)

    def started(self, deliveries: Iterable[Delivery], client: Actor) -> None:
        """Messages are sent to a client."""
        for delivery in self._traced(deliveries):
            self._log("START", delivery, client)

    def finished(self, deliveries: Iterable[Delivery], client: Actor, *, is_internal: bool) -> None:
        """Messages are done; ``is_internal`` where no command of a client did it."""
        now = time.monotonic()
        for delivery in deliveries:
            is_traced, cost = self._is_traced(delivery), now - delivery.delivered_at
            if is_traced:
                self._log("FIN_INTERNAL" if is_internal else "FIN", delivery, client, cost)
            if cost >= SLOW and not is_internal and (is_traced or self.follows_slow):
                self._log("SLOW_ACK", delivery, client, cost)

    def requeued(self, deliveries: Iterable[Delivery], client: str) -> None:
        """Messages were given back by a client, given by its address, to be delivered again at once."""
        for delivery in self._traced(deliveries):
            self._log("REQ", delivery, Actor(client), 0.0)

    def deferred(self, delivery: Delivery, client: Actor) -> None:
        """A message was given back, to be delivered later."""
        if self._is_traced(delivery):
            self._log("REQ_DEFER", delivery, client, 0.0)

    def timed_out(self, deliveries: Iterable[Delivery], client: str) -> None:
        """Messages were not finished in time by a client; that is logged of all messages, traced or not."""
        if not logger.isEnabledFor(logging.INFO):
            return
        for delivery in deliveries:
            self.requeued((delivery,), SERVER.address)
            self._log("TIMEOUT", delivery, Actor(client), time.monotonic() - delivery.delivered_at)

    def due(self, delivery: Delivery) -> None:
        """The time of a deferred message has come."""
        if self._is_traced(delivery):
            self._log("REQ", delivery, SERVER, 0.0)
            self._log("DELAY_TIMEOUT", delivery, NO_CLIENT, time.monotonic() - delivery.delivered_at)

    def _is_traced(self, delivery: Delivery) -> bool:
        return self.is_on or bool(delivery.record.trace_id)

    def _traced(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        return [delivery for delivery in deliveries if self._is_traced(delivery)]

    def _log(self, state: str, delivery: Delivery, actor: Actor, cost: float | None = None) -> None:
        """Log a state, in the server's word; ``cost`` is in seconds, by default since the message was published."""
        now, record = time.time_ns(), delivery.record
        nanoseconds = now - record.timestamp if cost is None else round(cost * _NANOSECONDS)
        _write(
            f"topic {self._topic} channel {self._channel} trace id {record.trace_id}: message {record.internal_id}"
            f" (ts: {record.timestamp}, offset: {record.offset}, pri:{_wall_clock(delivery.priority, now)})"
            f" consume state {state} from client {actor.address}({actor.id}) at time: {now} cost: {nanoseconds},"
            f" attempt: {delivery.attempts}"
        )


def _wall_clock(monotonic: float, now: int) -> int:
    """A monotonic time in nanoseconds since the epoch, of which it is ``now``; 0 for none."""
    return now + round((monotonic - time.monotonic()) * _NANOSECONDS) if monotonic else 0


def _write(line: str) -> None:
    logger.info("[TRACE] %s", line, extra=BROKER_MESSAGE_TRACED)
