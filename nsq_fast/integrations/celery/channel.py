"""A channel of AMQP, as kombu wants it: exchanges and queues are topics, queues of one exchange are channels."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timezone
from itertools import count
from typing import Any

from kombu.exceptions import ChannelError
from kombu.transport import virtual

from nsq_fast import Message
from nsq_fast.errors import ConfigError
from nsq_fast.log_events import PRIORITY_IGNORED

from .envelope import Payload, encode, seconds_to_eta
from .names import queue_topic
from .routes import Routes
from .subscription import Arrival, Subscription, finish, give_back

logger = logging.getLogger(__name__)


class QoS(virtual.QoS):  # type: ignore[misc]  # kombu has no types
    """Which messages kombu holds. They are responded to in any thread."""

    def __init__(self, channel: Channel, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)
        self._messages: dict[int, Message] = {}

    def hold(self, delivery_tag: int, message: Message) -> None:
        """``message`` is what will be responded to by its tag."""
        self._messages[delivery_tag] = message

    def ack(self, delivery_tag: int) -> None:
        """FIN."""
        self._end(delivery_tag, finish)

    def reject(self, delivery_tag: int, requeue: bool = False) -> None:
        """REQ, or FIN of a message that nobody wants."""
        self._end(delivery_tag, give_back if requeue else finish)

    def _end(self, delivery_tag: int, respond: Callable[[Message], None]) -> None:
        message = self._messages.pop(delivery_tag, None)
        if message is not None:
            super().ack(delivery_tag)
            respond(message)
            self.channel.wake()  # there may be room for another one

    def restore_unacked(self) -> list[Any]:
        """REQ of all that is held."""
        for delivery_tag in list(self._messages):
            self.reject(delivery_tag, requeue=True)
        self._flush()
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """The same, at the end."""
        self._on_collect.cancel()
        self.restore_unacked()


class Channel(virtual.Channel):  # type: ignore[misc]
    """Publishes, consumes and responds. ``connection`` is the Transport."""

    QoS = QoS
    supports_fanout = True
    _tags = count(1)
    _has_warned_of_priority = False

    def __init__(self, connection: Any, **options: Any) -> None:
        super().__init__(connection, **options)
        self.closed: bool = False
        self.wake = connection.wake
        self._pid = os.getpid()
        self._subscriptions: dict[str, Subscription] = {}
        self._arrivals: deque[Arrival] = deque()
        self._routes = Routes(self)

    # Publishing

    def prepare_message(self, body: Any, priority: int | None = None, *arguments: Any, **options: Any) -> Payload:
        """As kombu's. One warning says that priorities have no effect."""
        if priority and not Channel._has_warned_of_priority:
            Channel._has_warned_of_priority = True
            logger.warning("priority=%r has no effect: NSQ has no priorities", priority, extra=PRIORITY_IGNORED)
        payload: Payload = super().prepare_message(body, priority, *arguments, **options)
        return payload

    def basic_publish(self, message: Payload, exchange: str, routing_key: str, **options: Any) -> None:
        """Publish to the topics that stand for an exchange and a routing key; returns when a server has the message.

        Raises ChannelError where no queue is known for them, and what ``nsq_fast.threads.Producer.publish`` raises.
        """
        self._inplace_augment_message(message, exchange, routing_key)
        body = encode(message)
        servers = self.connection.servers
        delay = min(servers.max_delay, seconds_to_eta(message, datetime.now(timezone.utc)))
        for topic in list(self._routes.topics(exchange, routing_key)):
            self._publish(topic, body, round(1000 * delay))

    def _publish(self, topic: str, body: bytes, delay_ms: int) -> None:
        producer = self.connection.producer
        if delay_ms:
            try:
                producer.publish(topic, body, delay_ms)
            except ConfigError:  # the redesigned NSQ cannot delay a publish: whoever receives it requeues it
                pass
            else:
                return
        producer.publish(topic, body)

    # Queues

    def _new_queue(self, queue: str, **options: Any) -> None:
        is_temporary = bool(options.get("exclusive") or options.get("auto_delete"))
        self.connection.declared.setdefault(queue, (is_temporary, time.time_ns()))

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        pass  # the state of kombu has it

    def _delete(self, queue: str, *arguments: Any, **options: Any) -> None:
        """What is ephemeral goes by itself; kombu deletes nothing else."""

    def _purge(self, queue: str) -> int:
        raise ChannelError(
            f"the queue {queue!r} cannot be emptied through this connection: empty the topic {queue_topic(queue)!r} and"
            " its channels over nsqd's HTTP interface, or in nsqadmin"
        )

    # Consuming

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], object], consumer_tag: str, **options: Any
    ) -> None:
        """Have the messages of a queue come to ``callback``."""
        super().basic_consume(queue, no_ack, callback, consumer_tag, **options)
        subscription = self._subscriptions.get(queue)
        if subscription is None:
            sources = self._routes.sources(queue)
            prefetch = 0 if no_ack else self.qos.prefetch_count
            subscription = Subscription(self.connection.servers, sources, self._arrived, no_ack, prefetch)
            self._subscriptions[queue] = subscription
            if any(source.is_broadcast for source in sources):
                subscription.wait(self.connection.connect_timeout)
        else:
            subscription.resume()
        subscription.callback = callback

    def basic_cancel(self, consumer_tag: str) -> None:
        """Take no more messages of a queue. Those that were taken are still responded to."""
        queue: str = self._tag_to_queue.get(consumer_tag, "")
        super().basic_cancel(consumer_tag)
        subscription = self._subscriptions.get(queue)
        if subscription is None:
            return
        subscription.cancel()
        for _ in range(len(self._arrivals)):  # one by one: others arrive in another thread meanwhile
            arrival = self._arrivals.popleft()
            if arrival.subscription is subscription:
                give_back(arrival.message)
            else:
                self._arrivals.append(arrival)
        if subscription.no_ack:
            del self._subscriptions[queue]
            subscription.close()

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """How many messages may be held of each queue, and be taken of all of them together; 0: no bound."""
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        for subscription in self._subscriptions.values():
            if not subscription.no_ack:
                subscription.allow(prefetch_count)
        self.wake()

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        raise NotImplementedError("NSQ has no polling for one message: consume the queue (Connection.SimpleQueue)")

    def _arrived(self, arrival: Arrival) -> None:
        """In a thread of the consumer."""
        self._arrivals.append(arrival)
        self.wake()

    def deliver_one(self) -> bool:
        """Give one message to kombu; whether there was one, and room for it."""
        while self._arrivals and (self._arrivals[0].subscription.no_ack or self.qos.can_consume()):
            arrival = self._arrivals.popleft()
            if arrival.subscription.is_cancelled:
                give_back(arrival.message)
                continue
            self._deliver(arrival)
            return True
        return False

    def _deliver(self, arrival: Arrival) -> None:
        subscription, message, payload = arrival
        tag = next(self._tags)
        properties = payload["properties"]
        properties["delivery_tag"] = tag
        properties["delivery_info"]["redelivered"] = message.attempts > 1
        taken = self.Message(payload, channel=self)
        if subscription.no_ack:
            finish(message)
        else:
            self.qos.hold(tag, message)
            self.qos.append(taken, tag)
        subscription.callback(taken)

    # The end

    def close(self) -> None:
        """Give back what was not responded to, and end the connections. In the child of a fork: the parent does."""
        if self.closed or os.getpid() != self._pid:
            self.closed = True
            return
        super().close()  # which cancels, and restores what is held
        subscriptions, self._subscriptions = list(self._subscriptions.values()), {}
        for subscription in subscriptions:
            subscription.close()
