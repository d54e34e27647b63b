"""A broker of FastStream on ``nsq_fast.aio``: subscribers and publishers as decorators.

    from faststream import FastStream
    from nsq_fast.integrations.faststream import NSQBroker

    broker = NSQBroker("127.0.0.1:4150")
    app = FastStream(broker)

    @broker.subscriber("orders", "billing")
    async def bill(order: dict) -> None: ...

It is built on parts of FastStream that FastStream calls internal, so the extra asks for the versions that it was
tested with. docs/integrations.md says what is left out.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

try:
    import faststream as _faststream  # noqa: F401  # says which extra is missing before anything below needs it
except ImportError as _error:
    raise ImportError(
        "nsq_fast.integrations.faststream needs FastStream: pip install 'nsq-fast[faststream]'"
    ) from _error

import anyio
from fast_depends import dependency_provider
from faststream._internal._compat import json_loads
from faststream._internal.broker import BrokerUsecase
from faststream._internal.broker.registrator import Registrator
from faststream._internal.configs import (
    BrokerConfig,
    PublisherSpecificationConfig,
    PublisherUsecaseConfig,
    SubscriberSpecificationConfig,
    SubscriberUsecaseConfig,
)
from faststream._internal.constants import EMPTY
from faststream._internal.context.repository import ContextRepo
from faststream._internal.di import FastDependsConfig
from faststream._internal.endpoint.publisher import PublisherSpecification, PublisherUsecase
from faststream._internal.endpoint.subscriber import SubscriberSpecification, SubscriberUsecase
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream._internal.endpoint.utils import process_msg
from faststream._internal.logger import DefaultLoggerStorage, make_logger_state
from faststream._internal.logger.logging import get_broker_logger
from faststream._internal.parser import DefaultCodec
from faststream._internal.producer import ProducerProto
from faststream.exceptions import FeatureNotSupportedException
from faststream.message import StreamMessage
from faststream.middlewares import AckPolicy
from faststream.response import PublishCommand
from faststream.response.publish_type import PublishType
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import BrokerSpec, Operation, PublisherSpec, SubscriberSpec
from faststream.specification.schema import Message as MessageSpec

from nsq_fast import Message
from nsq_fast.aio import Consumer, Producer
from nsq_fast.errors import NsqError
from nsq_fast.names import Addresses

from . import delay_ms, respond

__all__ = ["NSQBroker", "NSQMessage", "NSQRouter"]


class NSQMessage(StreamMessage[Message]):  # type: ignore[misc]  # FastStream is an extra: type checkers may not have it
    """A message; ``ack`` and ``reject`` are its FIN, ``nack`` its REQ."""

    async def ack(self) -> None:
        respond(self.raw_message.finish)
        await super().ack()

    async def nack(self, delay: float | None = None) -> None:
        """REQ: it comes again after ``delay`` seconds; None: later with each attempt."""
        milliseconds = delay_ms("delay", delay)
        respond(lambda: self.raw_message.requeue(milliseconds))
        await super().nack()

    async def reject(self) -> None:
        """FIN: nobody wants it."""
        respond(self.raw_message.finish)
        await super().reject()


async def parse(message: Message) -> NSQMessage:
    """The message as FastStream wants it. Bodies of original servers have no headers beside them."""
    headers = message.headers if message.ext is not None else {}
    return NSQMessage(
        raw_message=message,
        body=message.body,
        headers=headers,
        content_type=headers.get("content-type"),
        correlation_id=headers.get("correlation_id"),
        message_id=message.id.decode("ascii", "replace"),
    )


async def decode(message: StreamMessage[Any]) -> Any:
    """What the body holds: JSON, else text, else the bytes."""
    with suppress(ValueError):
        return json_loads(message.body)
    with suppress(UnicodeDecodeError):
        return message.body.decode()
    return message.body


class NSQPublishCommand(PublishCommand):  # type: ignore[misc]
    """One publish: ``destination`` is the topic, ``delay`` seconds until it is delivered, ``key`` of its partition."""

    def __init__(
        self,
        body: Any,
        *,
        delay: float | None = None,
        key: str | bytes | int | None = None,
        _publish_type: PublishType = PublishType.PUBLISH,
        **options: Any,
    ) -> None:
        super().__init__(body, _publish_type=_publish_type, **options)
        self.delay = delay
        self.key = key

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
        self.codec: DefaultCodec = DefaultCodec()
        self.serializer: Any = None
        self._parser = parse
        self._decoder = decode

    async def publish(self, cmd: NSQPublishCommand) -> Any:
        """Return when a server has the message. Raises what ``nsq_fast.aio.Producer.publish`` raises."""
        body, _ = await self.codec.encode(cmd.body, self.serializer)
        defer = delay_ms("delay", cmd.delay)
        headers = cmd.headers or None
        if headers is not None and cmd.correlation_id is not None:  # alone it would make headers where none are taken
            headers = {"correlation_id": cmd.correlation_id, **headers}
        return await self.producer.publish(cmd.destination, body, defer, key=cmd.key, headers=headers)

    async def request(self, cmd: NSQPublishCommand) -> Any:
        """NSQ has no replies."""
        raise FeatureNotSupportedException("NSQ has no replies: publish to a topic, and subscribe to another")

    async def publish_batch(self, cmd: NSQPublishCommand) -> Any:
        """One publish for each message is as fast: those that are under way go together."""
        raise FeatureNotSupportedException("publish the messages one by one, at the same time: they go together")


@dataclass(kw_only=True)
class PublisherOptions(PublisherUsecaseConfig):  # type: ignore[misc]
    _outer_config: BrokerConfig = field(default_factory=BrokerConfig)
    topic: str
    delay: float | None = None


@dataclass(kw_only=True)
class PublisherDescription(PublisherSpecificationConfig):  # type: ignore[misc]
    topic: str


class NSQPublisherSpecification(PublisherSpecification[BrokerConfig, PublisherDescription]):  # type: ignore[misc]
    @property
    def topic(self) -> str:
        return f"{self._outer_config.prefix}{self.config.topic}"

    @property
    def name(self) -> str:
        return self.config.title_ or f"{self.topic}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        message = MessageSpec(title=f"{self.name}:Message", payload=resolve_payloads(self.get_payloads(), "Publisher"))
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
        return f"{self._outer_config.prefix}{self._options.topic}"

    async def publish(
        self,
        message: Any,
        topic: str = "",
        *,
        delay: float | None = None,
        key: str | bytes | int | None = None,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
    ) -> Any:
        """Publish to the topic of this publisher, or to another; arguments are those of ``NSQBroker.publish``."""
        cmd = NSQPublishCommand(
            message,
            destination=topic or self.topic,
            delay=self._options.delay if delay is None else delay,
            key=key,
            headers=headers,
            correlation_id=correlation_id,
        )
        return await self._basic_publish(cmd, producer=self._outer_config.producer, _extra_middlewares=())

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[Any]) -> None:
        """What a handler returned; nothing for None and an empty text. FastStream calls it."""
        if cmd.body is None or (isinstance(cmd.body, (str, bytes)) and not cmd.body):
            return  # no nsqd takes an empty body, and a handler that has nothing to say has not failed
        cmd = NSQPublishCommand.from_cmd(cmd)
        cmd.destination = cmd.destination or self.topic
        cmd.delay = self._options.delay if cmd.delay is None else cmd.delay
        producer = self._outer_config.producer
        await self._basic_publish(cmd, producer=producer, _extra_middlewares=_extra_middlewares)

    async def request(self, message: Any, *arguments: Any, **options: Any) -> Any:
        """NSQ has no replies."""
        return await self._outer_config.producer.request(NSQPublishCommand(message, destination=self.topic))


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
    topic: str


class NSQSubscriberSpecification(SubscriberSpecification[BrokerConfig, SubscriberDescription]):  # type: ignore[misc]
    @property
    def topic(self) -> str:
        return f"{self._outer_config.prefix}{self.config.topic}"

    @property
    def channel_labels(self) -> list[str]:
        return [self.topic]

    def get_schema(self) -> dict[str, SubscriberSpec]:
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
        return f"{self._outer_config.prefix}{self._options.topic}"

    async def start(self) -> None:
        """Begin to consume, if there is a handler."""
        await super().start()
        self._post_start()
        if self.calls:
            await self._start_consumer(message_handler=self._handle, concurrency=self._options.max_workers)

    async def _start_consumer(self, **arguments: Any) -> Consumer:
        if self._consumer is None:
            # With MANUAL what a handler leaves unanswered would be touched, too, though it may be forgotten.
            is_touched = self.ack_policy is not AckPolicy.MANUAL
            options = {"max_tries": 0, "auto_touch": is_touched}
            self._consumer = self._outer_config.new_consumer(
                self.topic, self._options.channel, **{**options, **self._options.consumer, **arguments}
            )
            await self._consumer.start()
        return self._consumer

    async def _handle(self, consumer: Consumer, message: Message) -> None:
        message.enable_async()  # FastStream responds, and what it does not begin with must not be finished
        was_running = self.running
        try:
            await self.consume(message)
        except BaseException:
            if self.ack_policy is not AckPolicy.MANUAL:
                _give_back(message)
            raise
        if not was_running:
            _give_back(message)
        elif self.ack_policy is not AckPolicy.MANUAL:
            # SkipMessage: at once, it would come in a circle. Once the broker stops, it is for another.
            _give_back(message, None if self.running else 0)

    async def stop(self) -> None:
        """Take no more messages; wait for those that handlers have, for ``graceful_timeout`` of the broker at most."""
        consumer, self._consumer = self._consumer, None
        left = time_left(self._outer_config.graceful_timeout)
        if consumer is not None:
            consumer.pause()
        await super().stop()
        if consumer is not None:
            await consumer.close(timeout=left())

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


def _give_back(message: Message, delay: int | None = 0) -> None:
    if not message.has_responded():
        with suppress(NsqError):  # its connection is lost: it comes again by itself
            message.requeue(delay, backoff=False)


def time_left(timeout: float | None) -> Callable[[], float | None]:
    """What says how many seconds are left of ``timeout``, which begins now; None: there is no end."""
    if timeout is None:
        return lambda: None
    end = monotonic() + timeout
    return lambda: max(SHORTEST_CLOSING, end - monotonic())


SHORTEST_CLOSING = 0.1
"""Seconds that connections get to close, whatever handlers have taken."""

PING_PAUSE = 0.05
"""Seconds between two looks at whether an nsqd is connected."""


@dataclass(kw_only=True)
class NSQBrokerConfig(BrokerConfig):  # type: ignore[misc]
    """What all parts of a broker use."""

    servers: tuple[Any, Any] = field(default=((), ()), repr=False)
    consumer: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def new_consumer(self, topic: str, channel: str, **options: Any) -> Consumer:
        """A consumer of the servers of the broker."""
        return Consumer(topic, channel, *self.servers, **{**self.consumer, **options})


class NSQRegistrator(Registrator[Message, NSQBrokerConfig]):  # type: ignore[misc]
    """What brokers and routers have in common: the decorators."""

    def subscriber(
        self,
        topic: str,
        channel: str = "faststream",
        *,
        max_workers: int = 1,
        consumer: Mapping[str, Any] | None = None,
        ack_policy: AckPolicy = EMPTY,
        dependencies: Sequence[Any] = (),
        parser: Any = None,
        decoder: Any = None,
        codec: Any = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        include_in_schema: bool = True,
    ) -> NSQSubscriber:
        """Call the decorated function with each message of a channel.

        Args:
            max_workers: messages that are handled at once. As many are held, and one for each nsqd at least.
            consumer: more options of ``nsq_fast.aio.Consumer``. ``max_tries`` is 0: no message is given up.
            ack_policy: NACK_ON_ERROR by default: what fails comes again. With MANUAL a message that the handler leaves
                unanswered stays in flight until somebody responds to it, or its timeout is over; ``auto_touch`` is off.
        """
        calls: CallsCollection[Message] = CallsCollection()
        described = SubscriberDescription(
            topic=topic, title_=title, description_=description, include_in_schema=include_in_schema
        )
        options = SubscriberOptions(
            topic=topic,
            channel=channel,
            max_workers=max_workers,
            consumer=consumer or {},
            no_reply=True,
            _ack_policy=ack_policy,
            _outer_config=self.config,
        )
        subscriber = NSQSubscriber(options, NSQSubscriberSpecification(self.config, described, calls), calls)
        super().subscriber(subscriber, persistent=persistent)
        added: NSQSubscriber = subscriber.add_call(
            parser_=parser or self._parser,
            decoder_=decoder or self._decoder,
            codec_=codec,
            dependencies_=dependencies,
        )
        return added

    def publisher(
        self,
        topic: str,
        *,
        delay: float | None = None,
        persistent: bool = True,
        schema: Any = None,
        title: str | None = None,
        description: str | None = None,
        include_in_schema: bool = True,
    ) -> NSQPublisher:
        """Publish what the decorated function returns; ``delay``: seconds that it waits in nsqd (original servers)."""
        described = PublisherDescription(
            topic=topic, schema_=schema, title_=title, description_=description, include_in_schema=include_in_schema
        )
        options = PublisherOptions(topic=topic, delay=delay, _outer_config=self.config)
        publisher = NSQPublisher(options, NSQPublisherSpecification(self.config, described))
        super().publisher(publisher, persistent=persistent)
        return publisher


class NSQRouter(NSQRegistrator):
    """Subscribers and publishers of one module, for ``NSQBroker.include_router``; ``prefix`` begins their topics."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__(config=NSQBrokerConfig(prefix=prefix), routers=())


class NSQBroker(NSQRegistrator, BrokerUsecase[Message, Producer, NSQBrokerConfig]):  # type: ignore[misc]
    """A broker of FastStream.

    Args:
        nsqd_tcp_addresses, lookupd_http_addresses: of the servers, as for ``nsq_fast.aio.Producer``.
        producer: more options of the producer.
        consumer: more options of all consumers.
        graceful_timeout: seconds that it may take to stop: handlers that still run then, and what is not published
            yet, are not waited for. None: as long as they take.
    """

    def __init__(
        self,
        nsqd_tcp_addresses: Addresses = (),
        lookupd_http_addresses: Addresses = (),
        *,
        producer: Mapping[str, Any] | None = None,
        consumer: Mapping[str, Any] | None = None,
        graceful_timeout: float | None = 15.0,
        ack_policy: AckPolicy = EMPTY,
        dependencies: Sequence[Any] = (),
        middlewares: Sequence[Any] = (),
        routers: Iterable[NSQRegistrator] = (),
        parser: Any = None,
        decoder: Any = None,
        codec: Any = None,
        description: str | None = None,
        logger: Any = EMPTY,
        log_level: int = logging.INFO,
        apply_types: bool = True,
    ) -> None:
        servers = nsqd_tcp_addresses, lookupd_http_addresses
        self._new_producer = partial(Producer, *servers, **dict(producer or {}))
        self._nsq: Producer = self._new_producer()
        config = NSQBrokerConfig(
            servers=servers,
            consumer=consumer or {},
            producer=NSQProducer(self._nsq),
            broker_middlewares=middlewares,
            broker_parser=parser,
            broker_decoder=decoder,
            broker_codec=codec,
            broker_dependencies=dependencies,
            graceful_timeout=graceful_timeout,
            ack_policy=ack_policy,
            logger=make_logger_state(logger=logger, log_level=log_level, default_storage_cls=_LoggerStorage),
            fd_config=FastDependsConfig(
                use_fastdepends=apply_types, provider=dependency_provider, context=ContextRepo()
            ),
            extra_context={"broker": self},
        )
        urls = [f"nsq://{address}" for address in sorted(self._nsq.nsqd_tcp_addresses)] or ["nsq://"]
        specification = BrokerSpec(
            url=urls, protocol="nsq", protocol_version="V2", description=description, tags=(), security=None
        )
        super().__init__(config=config, specification=specification, routers=routers)

    async def _connect(self) -> Producer:
        if not self._nsq.is_running:  # what has stopped cannot be started again
            self._nsq = self.config.producer.producer = self._new_producer()
        self.config.producer.serializer = self.config.fd_config._serializer
        await self._nsq.start()
        return self._nsq

    async def start(self) -> None:
        """Connect, and have every subscriber begin."""
        await self.connect()
        await super().start()

    async def stop(self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None) -> None:
        """Wait for the handlers and for what is published, for ``graceful_timeout`` at most; close the connections.

        A broker that has stopped can be started again.
        """
        left = time_left(self.config.graceful_timeout)
        try:
            await super().stop(exc_type, exc_val, exc_tb)
        finally:
            self._connection = None
            await self._nsq.close(left())

    async def ping(self, timeout: float | None = None) -> bool:
        """Whether an nsqd is connected, now or within ``timeout`` seconds."""
        with anyio.move_on_after(timeout or 0):
            while not self._nsq.is_connected:
                await anyio.sleep(PING_PAUSE)
        return self._nsq.is_connected

    async def publish(
        self,
        message: Any,
        topic: str,
        *,
        delay: float | None = None,
        key: str | bytes | int | None = None,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
    ) -> Any:
        """Publish a message, and return when a server has it. Raises what ``nsq_fast.aio.Producer.publish`` raises.

        Args:
            delay: seconds that it waits in nsqd (original servers).
            key: messages of one key go to one partition, in order (redesigned servers).
            headers: extended headers (redesigned servers).
            correlation_id: goes with the headers, where there are any.
        """
        cmd = NSQPublishCommand(
            message, destination=topic, delay=delay, key=key, headers=headers, correlation_id=correlation_id
        )
        return await self._basic_publish(cmd, producer=self.config.producer)

    async def request(self, message: Any, topic: str, **options: Any) -> Any:
        """NSQ has no replies."""
        return await self.config.producer.request(NSQPublishCommand(message, destination=topic))


class _LoggerStorage(DefaultLoggerStorage):  # type: ignore[misc]
    """Makes the logger of a broker when it is first used."""

    def __init__(self) -> None:
        super().__init__()
        self._level = logging.INFO

    def set_level(self, level: int) -> None:
        self._level = level

    def register_subscriber(self, params: dict[str, Any]) -> None:
        """Nothing is aligned."""

    def get_logger(self, *, context: ContextRepo) -> Any:
        found = self._get_logger_ref()
        if not found:
            line = "%(asctime)s %(levelname)-8s - %(topic)s | %(channel)s | %(message_id)s - %(message)s"
            found = get_broker_logger(
                name="nsq",
                default_context={"topic": "", "channel": ""},
                message_id_ln=16,
                fmt=line,
                context=context,
                log_level=self._level,
            )
            self._logger_ref.add(found)
        return found
