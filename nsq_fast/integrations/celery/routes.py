"""Which topics and channels of NSQ stand for the exchanges and queues that were declared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from kombu.exceptions import ChannelError

from .names import exchange_topic, is_reply_queue, nsq_name, queue_topic, reply_queue
from .subscription import Source


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
