"""The consumers of a run, what they have in common, and what is looked at while they work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

from gevent import Greenlet, spawn

from nsq_fast import Message
from nsq_fast.runtime import Consumer

from . import bodies
from .health import Accounts, Bound, ConnectionSample
from .ledger import Ledger

CLOSE_TIMEOUT = 10.0
GRACE = 2.0
_MOST_ATTEMPTS = 6

OPTIONS: dict[str, Any] = {
    "max_tries": 0,
    "heartbeat_interval": 1.0,
    "connect_timeout": 2.0,
    "max_reconnect_delay": 2.0,
    "max_backoff_duration": 1.0,
    "requeue_base_delay": 0.1,
    "requeue_max_delay": 1.0,
    "lookupd_poll_interval": 2.0,
    "lookupd_timeout": 1.0,
}
"""Of every consumer: quick to notice what is wrong, so that a run of minutes sees it often."""


class Garbled(Exception):
    """A body that is not what was published: the link changed it, and it has to come again."""


class Consumers:
    """The consumers by the name of their channel, which is their client id too.

    Attributes:
        garbled: deliveries of a changed body.
        given_up: messages that came changed again and again: changed on their way into the server.
        running: handlers that run now.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.garbled = 0
        self.given_up = 0
        self.running = 0
        self.slow_to_close: list[str] = []
        self._ledger = ledger
        self._consumers: dict[str, Consumer] = {}
        self._bounds: dict[str, Bound] = {}
        self._readers: list[Greenlet[..., Any]] = []

    def start(self, topic: str, channel: str, **options: Any) -> Consumer:
        """Start a consumer with a handler."""
        consumer = self._make(topic, channel, **options)
        consumer.start(block=False)
        return consumer

    def iterate(self, topic: str, channel: str, **options: Any) -> None:
        """Start a consumer that is read by a loop."""
        self._readers.append(spawn(self._read, self._make(topic, channel, **options)))

    def _make(self, topic: str, channel: str, **options: Any) -> Consumer:
        for name in ("message_handler", "batch_handler"):
            if name in options:
                options[name] = self._counted(options[name])
        consumer = Consumer(topic, channel, client_id=channel, **{**OPTIONS, **options})
        self._consumers[channel] = consumer
        self._bounds[channel] = Bound(f"{channel}: messages held", consumer.max_in_flight)
        return consumer

    def _counted(self, handler: Callable[[Consumer, Any], None]) -> Callable[[Consumer, Any], None]:
        def handle(consumer: Consumer, taken: Any) -> None:
            self.running += 1
            try:
                handler(consumer, taken)
            finally:
                self.running -= 1

        return handle

    def _read(self, consumer: Consumer) -> None:
        for message in consumer:
            self.finish_or_requeue(consumer, message)

    def finish_or_requeue(self, consumer: Consumer, message: Message) -> None:
        """What a loop or a batch handler does with a message; the client finishes it unless it is requeued."""
        try:
            number = self.number(message)
        except Garbled:
            message.requeue(100)
        else:
            self.finish(consumer, number)

    def number(self, message: Message) -> int | None:
        """The number of a message; None for one that is to be finished and forgotten. Raises Garbled."""
        number = bodies.decode(message.body)
        if number is None:
            self.garbled += 1
            if message.attempts < _MOST_ATTEMPTS:
                raise Garbled
            self.given_up += 1
        return number

    def finish(self, consumer: Consumer, number: int | None) -> None:
        """The handler of this message returns now."""
        self.mark_finished(consumer.channel, number)

    def mark_finished(self, channel: str, number: int | None) -> None:
        """A message of a channel is answered with FIN."""
        if number is not None:
            self._ledger.mark_finished(channel, number)

    def sample(self) -> list[ConnectionSample]:
        """Every connection, as it is now; the bounds are looked at, too."""
        samples = []
        for name, consumer in self._consumers.items():
            stats = consumer.stats()
            self._bounds[name].sample(stats.in_flight)
            is_excused = stats.backoff_level > 0 or stats.max_in_flight < len(stats.connections)
            for each in stats.connections:
                address = str(each.address) if each.partition is None else f"{each.address}/{each.partition}"
                samples.append(ConnectionSample(name, address, each.is_connected, each.rdy, each.in_flight, is_excused))
        return samples

    @property
    def connected(self) -> dict[str, int]:
        """How many connections each consumer has."""
        return {
            name: sum(each.is_connected for each in consumer.stats().connections)
            for name, consumer in self._consumers.items()
        }

    def accounts(self) -> dict[str, Accounts]:
        """What the consumers say that they have finished and requeued."""
        totals = {name: consumer.stats().totals for name, consumer in self._consumers.items()}
        return {name: Accounts(each.finished, each.requeued, each.answers_failed) for name, each in totals.items()}

    def close(self) -> None:
        """Close all, and see that it takes no longer than it may."""
        for name, consumer in self._consumers.items():
            began = monotonic()
            consumer.close(timeout=CLOSE_TIMEOUT)
            if (seconds := monotonic() - began) > CLOSE_TIMEOUT + GRACE:
                self.slow_to_close.append(f"{name}: close(timeout={CLOSE_TIMEOUT:.0f}) took {seconds:.1f} s")
        for reader in self._readers:
            reader.get(timeout=CLOSE_TIMEOUT)

    @property
    def violations(self) -> list[str]:
        """What should not be, in words."""
        return list(self._violations())

    def _violations(self) -> Iterator[str]:
        for bound in self._bounds.values():
            yield from bound.violations
        yield from self.slow_to_close
