"""A broker of Celery: a transport of kombu, which knows ``nsq://`` once this module is imported.

    import nsq_fast.integrations.celery
    from celery import Celery

    app = Celery("shop", broker="nsq://127.0.0.1:4150")

A queue is a topic, whose messages all workers share through one channel. A
message is finished when Celery acknowledges it, requeued when Celery rejects it
for that, and touched for as long as Celery holds it. A task with a countdown or
an ETA waits in nsqd. docs/integrations.md says what is different from other
brokers.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from itertools import count
from time import monotonic
from typing import Any

try:
    from kombu.exceptions import ChannelError
    from kombu.transport import TRANSPORT_ALIASES, virtual
except ImportError as _error:
    raise ImportError("nsq_fast.integrations.celery needs Celery: pip install 'nsq-fast[celery]'") from _error

from nsq_fast import Message, __version__
from nsq_fast._lazy import get_logger
from nsq_fast.errors import ConfigError, ConnectionLost, HttpError, NoNsqd, PublishFailed
from nsq_fast.log_events import PRIORITY_IGNORED
from nsq_fast.threads import Producer

from .celery_queues import (
    NSQD_PORT,
    Arrival,
    Payload,
    Servers,
    Source,
    Subscription,
    Wakeup,
    encode,
    exchange_topic,
    finish,
    give_back,
    is_reply_queue,
    nsq_name,
    queue_topic,
    reply_queue,
    seconds_to_eta,
    servers_of,
    shown,
)

__all__ = ["Transport"]

TRANSPORT_ALIASES.setdefault("nsq", f"{__name__}:Transport")


class Routes:
    """Routes of one channel of AMQP.

    A queue is a topic. A fanout exchange is a topic, too, of which each queue is a channel. So is a topic exchange for
    queues that end with their consumer: whoever publishes does not know them.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def topics(self, exchange: str, routing_key: str) -> Iterator[str]:
        """Where a message is published to. Raises ChannelError where no queue is known for it."""
        if not exchange:
            yield queue_topic(routing_key)
        elif (kind := self._channel.typeof(exchange).type) == "fanout":
            yield self._exchange_topic(exchange)
        elif queues := sorted(self._lasting_queues(exchange, routing_key)):
            yield from map(queue_topic, queues)
        elif kind == "topic":
            yield self._exchange_topic(exchange)
        elif queue := reply_queue(exchange, routing_key):
            yield queue_topic(queue)
        else:
            raise ChannelError(
                f"no queue is known to be bound to the exchange {exchange!r} with the routing key {routing_key!r}: NSQ"
                " keeps no bindings, so whoever publishes must declare the queue, too (task_queues)"
            )

    def _lasting_queues(self, exchange: str, routing_key: str) -> set[str]:
        bound = self._channel._lookup(exchange, routing_key) if exchange in self._channel.state.exchanges else ()
        return {queue for queue in bound if queue and not self._is_broadcast(queue, exchange)}

    def _exchange_topic(self, exchange: str) -> str:
        declared = self._channel.state.exchanges.get(exchange, {})
        # Events go to a topic exchange that is said to last; what nobody listens to must not fill a disk.
        return exchange_topic(exchange, declared.get("type") == "topic" or not declared.get("durable"))

    def _is_broadcast(self, queue: str, exchange: str) -> bool:
        """Whether a queue gets what goes to the topic of an exchange."""
        kind: str = self._channel.typeof(exchange).type
        is_temporary = self._channel.connection.declared.get(queue, (False, 0))[0]
        return kind == "fanout" or (kind == "topic" and is_temporary)

    def sources(self, queue: str) -> list[Source]:
        """Where the messages of a queue come from."""
        is_temporary, since = self._channel.connection.declared.get(queue, (False, 0))
        bindings: dict[str, list[str]] = {}
        for bound in self._channel.state.queue_bindings(queue):
            if self._is_broadcast(queue, bound.exchange):
                bindings.setdefault(bound.exchange, []).append(bound.routing_key)
        broadcasts = [
            Source(
                self._exchange_topic(exchange),
                nsq_name(queue, is_temporary),
                self._pattern(exchange, routing_keys),
                since if is_temporary else 0,
                is_broadcast=True,
            )
            for exchange, routing_keys in bindings.items()
        ]
        if is_temporary and broadcasts:
            return broadcasts
        is_reply = is_reply_queue(queue)
        own = Source(
            queue_topic(queue), nsq_name(self._channel.connection.servers.channel, is_reply), is_broadcast=is_reply
        )
        return [own, *broadcasts]

    def _pattern(self, exchange: str, routing_keys: Iterable[str]) -> re.Pattern[str] | None:
        kind = self._channel.typeof(exchange)
        return re.compile("|".join(map(kind.key_to_pattern, routing_keys))) if kind.type == "topic" else None


logger: logging.Logger = get_logger(__name__)


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
        self.wake: Any = connection.wake
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


CONNECT_TIMEOUT = 5.0
"""Seconds, where kombu is told of no limit."""


class Transport(virtual.Transport):  # type: ignore[misc]  # kombu has no types
    """Made by ``kombu.Connection``, in each process; used in one thread, as that is.

    Attributes:
        servers: which are meant.
        declared: the queues that were declared: whether they end with their consumer, and when that was, in
            nanoseconds since 1970.
    """

    Channel = Channel
    can_parse_url = True
    default_port = NSQD_PORT
    driver_type = "nsq"
    driver_name = "nsq_fast"
    connection_errors: tuple[type[BaseException], ...] = (ConnectionLost, NoNsqd, PublishFailed, HttpError, OSError)
    channel_errors: tuple[type[BaseException], ...] = (ChannelError,)
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors: tuple[type[BaseException], ...] = ()
    implements: Any = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(("direct", "topic", "fanout")), heartbeats=False
    )

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self.servers: Servers = servers_of(client)
        self.declared: dict[str, tuple[bool, int]] = {}
        self._pid = os.getpid()
        self._producer: Producer | None = None
        self._wakeup: Wakeup | None = None

    def driver_version(self) -> str:
        return __version__

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """The URL; without ``include_password`` it shows no secret."""
        if include_password:
            return uri if uri.startswith("nsq") else f"nsq+{uri}"
        return shown(uri, mask)

    # Life

    def establish_connection(self) -> Transport:
        """Raises ConnectFailed unless one of the servers is there. From then on nsq_fast connects again by itself."""
        self.servers.check(self.connect_timeout)
        super().establish_connection()
        return self

    def close_connection(self, connection: Any) -> None:
        """Close what is open. In the child of a fork that is the parent's."""
        if os.getpid() != self._pid:
            return
        super().close_connection(connection)
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            wakeup.close()

    @property
    def producer(self) -> Producer:
        if self._producer is None:
            self._producer = self.servers.new_producer()
            self._producer.start()
        return self._producer

    @property
    def connect_timeout(self) -> float:
        """Seconds. Celery gives none for the remote control of its pool gevent."""
        given = self.client.connect_timeout
        return CONNECT_TIMEOUT if given is None else float(given)

    def wake(self) -> None:
        """Have whoever takes messages look for some. In any thread."""
        if self._wakeup is not None:
            self._wakeup.wake()

    def _waker(self) -> Wakeup:
        if self._wakeup is None:
            self._wakeup = Wakeup()
        return self._wakeup

    # Events

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Give one message to its callback. Raises ``socket.timeout`` when none comes within ``timeout`` seconds."""
        end = None if timeout is None else monotonic() + timeout
        wakeup = self._waker()
        while True:
            wakeup.clear()  # before the messages are looked at: none can come in between and not be seen
            if any(channel.deliver_one() for channel in list(self.channels)):
                return
            left = None if end is None else end - monotonic()
            if left is not None and left <= 0:
                raise TimeoutError("no message came")
            wakeup.wait(left)

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Have a loop of kombu take the messages."""
        loop.add_reader(self._waker().fileno(), self.on_readable, connection, loop)
        self.wake()  # some may have arrived

    def unregister_from_event_loop(self, connection: Any, loop: Any) -> None:
        """End ``register_with_event_loop``."""
        if self._wakeup is not None:
            loop.remove_reader(self._wakeup.fileno())

    def on_readable(self, connection: Any, loop: Any) -> None:
        """Take one message, and others in the next turns of the loop."""
        try:
            self.drain_events(connection, timeout=0)
        except TimeoutError:
            return
        loop.call_soon(self.on_readable, connection, loop)
