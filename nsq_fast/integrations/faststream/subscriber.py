"""Consuming: one subscriber is one Consumer of ``nsq_fast.aio``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
from faststream._internal.configs import BrokerConfig, SubscriberSpecificationConfig, SubscriberUsecaseConfig
from faststream._internal.constants import EMPTY
from faststream._internal.endpoint.subscriber import SubscriberSpecification, SubscriberUsecase
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream._internal.endpoint.utils import process_msg
from faststream.middlewares import AckPolicy
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message as MessageSpec
from faststream.specification.schema import Operation, SubscriberSpec

from nsq_fast import Message
from nsq_fast.aio import Consumer
from nsq_fast.errors import NsqError

from .message import NSQMessage, decode, parse


@dataclass(kw_only=True)
class SubscriberOptions(SubscriberUsecaseConfig):  # type: ignore[misc]
    """Of one subscriber; ``consumer`` are more options of its Consumer."""

    _outer_config: BrokerConfig = field(default_factory=BrokerConfig)
    topic: str
    channel: str
    max_workers: int = 1
    consumer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ack_policy(self) -> AckPolicy:
        """A message whose handler fails comes again, unless the subscriber or the broker says otherwise."""
        for policy in (self._ack_policy, self._outer_config.ack_policy):
            if policy is not EMPTY:
                return policy
        return AckPolicy.NACK_ON_ERROR


@dataclass(kw_only=True)
class SubscriberDescription(SubscriberSpecificationConfig):  # type: ignore[misc]
    """The same, for AsyncAPI."""

    topic: str


class NSQSubscriberSpecification(SubscriberSpecification[BrokerConfig, SubscriberDescription]):  # type: ignore[misc]
    """What AsyncAPI shows of a subscriber."""

    @property
    def topic(self) -> str:
        """With the prefix of its router."""
        return f"{self._outer_config.prefix}{self.config.topic}"

    @property
    def channel_labels(self) -> list[str]:
        return [self.topic]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        """Its channel."""
        message = MessageSpec(title=f"{self.name}:Message", payload=resolve_payloads(self.get_payloads()))
        operation = Operation(message=message, bindings=None)
        return {
            self.name: SubscriberSpec(
                address=self.topic, description=self.description, operation=operation, bindings=None
            )
        }


class NSQSubscriber(SubscriberUsecase[Message]):  # type: ignore[misc]
    """Calls handlers with the messages of one channel, ``max_workers`` at once."""

    def __init__(
        self, config: SubscriberOptions, specification: NSQSubscriberSpecification, calls: CallsCollection[Message]
    ) -> None:
        config.parser, config.decoder = parse, decode
        super().__init__(config, specification, calls)
        self._options = config
        self._consumer: Consumer | None = None

    @property
    def topic(self) -> str:
        """With the prefix of its router."""
        return f"{self._outer_config.prefix}{self._options.topic}"

    async def start(self) -> None:
        """Begin to consume, if there is a handler."""
        await super().start()
        self._post_start()
        if self.calls:
            await self._start_consumer(message_handler=self._handle, concurrency=self._options.max_workers)

    async def _start_consumer(self, **arguments: Any) -> Consumer:
        if self._consumer is None:
            options = {"max_tries": 0, "auto_touch": True, "max_in_flight": self._options.max_workers}
            self._consumer = self._outer_config.new_consumer(
                self.topic, self._options.channel, **{**options, **self._options.consumer, **arguments}
            )
            await self._consumer.start()
        return self._consumer

    async def _handle(self, consumer: Consumer, message: Message) -> None:
        message.enable_async()  # FastStream responds, and what it does not begin with must not be finished
        try:
            await self.consume(message)
        finally:
            if self.ack_policy is not AckPolicy.MANUAL:
                _give_back(message)

    async def stop(self) -> None:
        """Take no more messages; wait for those that handlers have, for ``graceful_timeout`` of the broker at most."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.pause()
        await super().stop()
        if consumer is not None:
            await consumer.close()

    async def get_one(self, *, timeout: float = 5.0) -> NSQMessage | None:
        """The next message, for a subscriber without handlers; None if none comes within ``timeout`` seconds."""
        with anyio.move_on_after(timeout):
            async for message in self:
                return message
        return None

    async def __aiter__(self) -> AsyncIterator[NSQMessage]:
        """The messages, for a subscriber without handlers. Who takes them responds to them."""
        consumer = await self._start_consumer()
        parser, decoder = self._get_parser_and_decoder()
        context = self._outer_config.context
        async for raw in consumer:
            raw.enable_async()
            middlewares = (each(raw, context=context) for each in self._broker_middlewares)
            try:
                message: Any = await process_msg(msg=raw, middlewares=middlewares, parser=parser, decoder=decoder)
            except BaseException:  # of a parser, or who asked is cancelled: nobody has it, who could respond to it
                _give_back(raw)
                raise
            yield message

    def _make_response_publisher(self, message: Any) -> Sequence[Any]:
        return ()  # no message asks for a reply

    def get_log_context(self, message: Any) -> dict[str, str]:
        """What lines of the log say of a message."""
        context = {"topic": self.topic, "channel": self._options.channel}
        return {**context, "message_id": getattr(message, "message_id", "")}


def _give_back(message: Message) -> None:
    if not message.has_responded():
        with suppress(NsqError):  # its connection is lost: it comes again by itself
            message.requeue(0, backoff=False)
