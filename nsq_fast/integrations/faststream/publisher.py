"""Publishing: the commands, what carries them out, and the decorator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from faststream._internal.configs import BrokerConfig, PublisherSpecificationConfig, PublisherUsecaseConfig
from faststream._internal.endpoint.publisher import PublisherSpecification, PublisherUsecase
from faststream._internal.parser import DefaultCodec
from faststream._internal.producer import ProducerProto
from faststream.exceptions import FeatureNotSupportedException
from faststream.response import PublishCommand
from faststream.response.publish_type import PublishType
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message, Operation, PublisherSpec

from nsq_fast.aio import Producer

from .message import decode, parse


class NSQPublishCommand(PublishCommand):  # type: ignore[misc]
    """One publish: ``destination`` is the topic, ``delay`` seconds until it is delivered."""

    def __init__(self, body: Any, *, delay: float | None = None, **options: Any) -> None:
        super().__init__(body, **options)
        self.delay = delay

    @classmethod
    def from_cmd(cls, cmd: PublishCommand) -> NSQPublishCommand:
        """The same as what a handler returned."""
        if isinstance(cmd, cls):
            return cmd
        return cls(
            cmd.body,
            destination=cmd.destination,
            headers=cmd.headers,
            correlation_id=cmd.correlation_id,
            reply_to=cmd.reply_to,
            _publish_type=cmd.publish_type,
        )


class NSQProducer(ProducerProto[NSQPublishCommand]):  # type: ignore[misc]
    """Carries commands out on a Producer of ``nsq_fast.aio``, while that runs."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self.codec = DefaultCodec()
        self.serializer: Any = None
        self._parser = parse
        self._decoder = decode

    async def publish(self, cmd: NSQPublishCommand) -> Any:
        """Return when a server has the message. Raises what ``nsq_fast.aio.Producer.publish`` raises."""
        body, _ = await self.codec.encode(cmd.body, self.serializer)
        defer = None if cmd.delay is None else round(1000 * cmd.delay)
        return await self.producer.publish(cmd.destination, body, defer, headers=cmd.headers or None)

    async def request(self, cmd: NSQPublishCommand) -> Any:
        """NSQ has no replies."""
        raise FeatureNotSupportedException("NSQ has no replies: publish to a topic, and subscribe to another")

    async def publish_batch(self, cmd: NSQPublishCommand) -> Any:
        """One publish for each message is as fast: those that are under way go together."""
        raise FeatureNotSupportedException("publish the messages one by one, at the same time: they go together")


@dataclass(kw_only=True)
class PublisherOptions(PublisherUsecaseConfig):  # type: ignore[misc]
    """Of one publisher."""

    _outer_config: BrokerConfig = field(default_factory=BrokerConfig)
    topic: str
    delay: float | None = None


@dataclass(kw_only=True)
class PublisherDescription(PublisherSpecificationConfig):  # type: ignore[misc]
    """The same, for AsyncAPI."""

    topic: str


class NSQPublisherSpecification(PublisherSpecification[BrokerConfig, PublisherDescription]):  # type: ignore[misc]
    """What AsyncAPI shows of a publisher."""

    @property
    def topic(self) -> str:
        """With the prefix of its router."""
        return f"{self._outer_config.prefix}{self.config.topic}"

    @property
    def name(self) -> str:
        return self.config.title_ or f"{self.topic}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        """Its channel."""
        message = Message(title=f"{self.name}:Message", payload=resolve_payloads(self.get_payloads(), "Publisher"))
        operation = Operation(message=message, bindings=None)
        description = self.config.description_
        return {
            self.name: PublisherSpec(address=self.topic, description=description, operation=operation, bindings=None)
        }


class NSQPublisher(PublisherUsecase):  # type: ignore[misc]
    """Publishes what a handler returns, or what it is given, to one topic."""

    def __init__(self, config: PublisherOptions, specification: NSQPublisherSpecification) -> None:
        super().__init__(config, specification)
        self._options = config

    @property
    def topic(self) -> str:
        """With the prefix of its router."""
        return f"{self._outer_config.prefix}{self._options.topic}"

    async def publish(self, message: Any, topic: str = "", **options: Any) -> Any:
        """Publish to the topic of this publisher, or to another; ``options`` as of ``NSQBroker.publish``."""
        cmd = new_command(message, topic or self.topic, **{"delay": self._options.delay, **options})
        return await self._basic_publish(cmd, producer=self._outer_config.producer, _extra_middlewares=())

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[Any]) -> None:
        """What a handler returned. FastStream calls it."""
        cmd = NSQPublishCommand.from_cmd(cmd)
        cmd.destination = cmd.destination or self.topic
        cmd.delay = self._options.delay if cmd.delay is None else cmd.delay
        producer = self._outer_config.producer
        await self._basic_publish(cmd, producer=producer, _extra_middlewares=_extra_middlewares)

    async def request(self, message: Any, *arguments: Any, **options: Any) -> Any:
        """NSQ has no replies."""
        return await self._outer_config.producer.request(new_command(message, self.topic))


def new_command(
    message: Any,
    topic: str,
    *,
    delay: float | None = None,
    headers: dict[str, Any] | None = None,
    correlation_id: str | None = None,
) -> NSQPublishCommand:
    """A publish that the program asks for."""
    return NSQPublishCommand(
        message,
        destination=topic,
        delay=delay,
        headers=headers,
        correlation_id=correlation_id,
        _publish_type=PublishType.PUBLISH,
    )
