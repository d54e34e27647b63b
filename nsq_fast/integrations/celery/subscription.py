"""What one queue gets: the messages of its topic, or of the exchanges that it is bound to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from re import Pattern
from time import monotonic
from typing import Any, NamedTuple

from nsq_fast import Message
from nsq_fast.errors import AlreadyResponded, NsqError
from nsq_fast.log_events import RESPONSE_FAILED, SUBSCRIPTION_FAILED
from nsq_fast.threads import Consumer

from .envelope import Payload, decode, seconds_to_eta
from .servers import Servers

MOST_IN_FLIGHT = 2500
"""Messages that are held where kombu knows no bound. An nsqd allows as many, unless it is told otherwise."""

CLOSE_TIMEOUT = 5.0
"""Seconds for the last responses of a subscription to leave."""

LOOK_PAUSE = 0.002
"""Seconds between two looks at whether a consumer is subscribed."""

logger = logging.getLogger(__name__)


class Source(NamedTuple):
    """Where messages of a queue come from.

    Attributes:
        topic, channel: of NSQ.
        routing_key: what the routing keys of messages have to match; None: all match.
        since: messages that nsqd got before are not for this queue; nanoseconds since 1970.
        is_broadcast: whether each queue gets every message, from every nsqd there is.
    """

    topic: str
    channel: str
    routing_key: Pattern[str] | None = None
    since: int = 0
    is_broadcast: bool = False


class Arrival(NamedTuple):
    """A message that waits to be taken by kombu."""

    subscription: Subscription
    message: Message
    payload: Payload


class Subscription:
    """The consumers of one queue. Messages arrive in a thread of theirs.

    Args:
        arrived: called there with each message.
        no_ack: whether messages are finished when kombu takes them.
        prefetch: messages that may be held; 0: as many as nsqd allows.

    Attributes:
        callback: of kombu, for each message.
        is_cancelled: whether messages that arrive are given back.
    """

    def __init__(
        self,
        servers: Servers,
        sources: Iterable[Source],
        arrived: Callable[[Arrival], object],
        no_ack: bool,
        prefetch: int,
    ) -> None:
        self.callback: Callable[[Any], object] = _ignore
        self.no_ack = no_ack
        self.is_cancelled = False
        self._arrived = arrived
        self._max_delay = servers.max_delay
        self._consumers = [self._consumer(servers, source, prefetch) for source in sources]
        for consumer in self._consumers:
            consumer.start(block=False)

    def wait(self, timeout: float) -> None:
        """Return when each consumer is subscribed to an nsqd at least, or after ``timeout`` seconds, with a warning.

        What is published to an exchange goes to the queues that there are then, and to no later one.
        """
        end = monotonic() + timeout
        while waiting := [each for each in self._consumers if not each.stats().totals.subscriptions]:
            if monotonic() > end:
                logger.warning(
                    "%s: not subscribed within %g s; going on without it",
                    waiting[0].topic,
                    timeout,
                    extra=SUBSCRIPTION_FAILED,
                )
                return
            time.sleep(LOOK_PAUSE)

    def _consumer(self, servers: Servers, source: Source, prefetch: int) -> Consumer:
        def handle(consumer: object, messages: list[Message]) -> None:
            for message in messages:
                message.enable_async()
                self._received(source, message)

        return servers.new_consumer(
            source.topic,
            source.channel,
            everywhere=source.is_broadcast,
            batch_handler=handle,
            max_in_flight=_in_flight(prefetch),
        )

    def _received(self, source: Source, message: Message) -> None:
        payload = decode(message.body)
        if self.is_cancelled:
            give_back(message)
        elif _is_for_another(source, message, payload):
            finish(message)
        elif (delay := min(self._max_delay, seconds_to_eta(payload, datetime.now(timezone.utc)))) > 0:
            give_back(message, delay)
        else:
            self._arrived(Arrival(self, message, payload))

    def allow(self, prefetch: int) -> None:
        """From now on so many messages may be held; 0: as many as nsqd allows."""
        for consumer in self._consumers:
            consumer.max_in_flight = _in_flight(prefetch)

    def cancel(self) -> None:
        """Take no more messages. Those that kombu has taken are still responded to."""
        self.is_cancelled = True
        for consumer in self._consumers:
            consumer.pause()

    def resume(self) -> None:
        """End ``cancel``."""
        self.is_cancelled = False
        for consumer in self._consumers:
            consumer.resume()

    def close(self) -> None:
        """Send the responses that were given, and end the connections."""
        self.is_cancelled = True
        for consumer in self._consumers:
            consumer.close(timeout=CLOSE_TIMEOUT)


def finish(message: Message) -> None:
    """FIN. A message whose connection is lost comes again: one warning says so."""
    try:
        message.finish()
    except AlreadyResponded:
        pass
    except NsqError as error:
        logger.warning(
            "a task has run, and runs again: its message cannot be finished: %s", error, extra=RESPONSE_FAILED
        )


def give_back(message: Message, delay: float = 0.0) -> None:
    """REQ, with a delay in seconds. A message whose connection is lost comes again by itself."""
    try:
        message.requeue(round(1000 * delay), backoff=False)
    except NsqError as error:
        logger.debug("a message is not requeued: %s", error, extra=RESPONSE_FAILED)


def _is_for_another(source: Source, message: Message, payload: Payload) -> bool:
    if message.timestamp < source.since:
        return True
    routing_key = payload["properties"]["delivery_info"].get("routing_key") or ""
    return source.routing_key is not None and source.routing_key.match(routing_key) is None


def _in_flight(prefetch: int) -> int:
    return prefetch or MOST_IN_FLIGHT


def _ignore(message: object) -> None:
    pass
